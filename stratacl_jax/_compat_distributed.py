"""JAX's coordination service, its private parts: what the launcher needs.

Apart from `_compat` because a rank needs it while JAX, imported by `_compat`
itself, has only just arrived. Nothing is imported at the top, so that the
service's host does not pay for JAX.

Everyone is *recoverable* in JAX's words: a dead rank is no reason for JAX to
abort the living ones, who are to report what they saw. Deaths are noticed by
the fabric and by the launcher, within milliseconds; JAX's heartbeats would only
add a way to lose a rank that was stopped for a while (a debugger, a suspended
laptop), so they are given a day.
"""

from __future__ import annotations

import atexit
import logging
from typing import Any

_DAY_S = 24 * 3600
_CONNECT_TIMEOUT_S = 300

_log = logging.getLogger(__name__)


def _unknown_jax(error: Exception) -> RuntimeError:
    return RuntimeError(
        "stratacl launch: this version of JAX has no coordination service where "
        f"one is expected ({error}); start the ranks yourself and call "
        "jax.distributed.initialize() in the program"
    )


def start_service(address: str, num_processes: int) -> Any:
    """Starts a coordination service; it lives as long as the object returned.

    Args:
      address: "host:port" to listen at.
      num_processes: how many ranks will connect.
    """
    try:
        from jaxlib import _jax

        start = _jax.get_distributed_runtime_service
    except (ImportError, AttributeError) as error:
        raise _unknown_jax(error) from error
    return start(
        address,
        num_processes,
        heartbeat_timeout=_DAY_S,
        shutdown_timeout=_CONNECT_TIMEOUT_S,
        recoverable=True,
    )


def join_launcher(address: str, num_processes: int, process_id: int) -> None:
    """Connects this process to the launcher's service, as `jax.distributed` does.

    Rank 0 starts no service of its own. Afterwards a call of
    `jax.distributed.initialize` in the program finds its work done.
    Blocks until every rank has connected.
    """
    try:
        from jax._src import distributed
        from jax._src.lib import _jax

        state = distributed.global_state
        make_client = _jax.get_distributed_runtime_client
    except (ImportError, AttributeError) as error:
        raise _unknown_jax(error) from error

    def connect() -> None:
        client = make_client(
            address,
            process_id,
            init_timeout=_CONNECT_TIMEOUT_S,
            heartbeat_timeout=_DAY_S,
            shutdown_on_destruction=False,
            use_compression=True,
        )
        client.connect()
        state.coordinator_address = address
        state.num_processes = num_processes
        state.process_id = process_id
        state.client = client
        state.initialize_preemption_sync_manager()

    called = False

    def initialize(
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *_: Any,
        partition_index: int | None = None,
        **__: Any,
    ) -> None:
        nonlocal called
        for name, ours, theirs in (
            ("num_processes", state.num_processes, num_processes),
            ("process_id", state.process_id, process_id),
        ):
            if theirs is not None and theirs != ours:
                raise ValueError(
                    f"jax.distributed.initialize({name}={theirs}) under `stratacl "
                    f"launch`, which started this process with {name}={ours}: "
                    "leave the argument out, or start the ranks without the launcher"
                )
        if called and state.client is not None:
            raise RuntimeError("distributed.initialize should only be called once.")
        called = True
        if coordinator_address not in (None, address):
            _log.info("using the launcher's %s, not %s", address, coordinator_address)
        if partition_index is not None:
            state.partition_index = partition_index
        if state.client is None:  # after the program's own shutdown()
            connect()

    connect()
    # On the instance, below jax.distributed.initialize: a program that imported
    # the function by name finds it prepared too, and JAX's own checks stay.
    setattr(state, "initialize", initialize)  # noqa: B010


def abandon() -> None:
    """Forgets the service without a word, for a process about to fail.

    Keeps JAX's exit function from waiting for programs that cannot finish.
    """
    try:
        from jax._src import distributed
        from jax._src.api import clean_up
    except ImportError:  # unknown JAX: its exit function runs, on a time limit
        return
    distributed.global_state.preemption_sync_manager = None
    distributed.global_state.client = None
    atexit.unregister(clean_up)
