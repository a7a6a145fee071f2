"""The process's place in the job: initialize, shutdown, info, ledger."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import resource
import sys
import threading
from typing import Any

from .config import config
from .cpus import usable_cpus
from .errors import InvalidUsage, Unsupported, from_message
from .ledger import Ledger

TARGET = "stratacl_collective"

_lock = threading.RLock()
_state: dict[str, Any] | None = None
_attempts = 0  # to connect, successful or not
_forked = False
_watches_forks = False
_registered = False
_said: set[str] = set()


def _after_fork() -> None:
    global _forked
    _forked = True


def say_once(message: str) -> None:
    """One line on stderr, once a process."""
    if message not in _said:
        _said.add(message)
        print(f"stratacl: {message}", file=sys.stderr, flush=True)


def native_module() -> Any:
    """The native half.

    Raises:
      Unsupported: this platform has none; operators then are jax.lax's own.
    """
    if not sys.platform.startswith("linux"):
        raise Unsupported(
            f"the fabric needs Linux, this is {platform.system()}; every operator is "
            "jax.lax's own here"
        )
    try:
        # Not `from .. import`: type checkers know it only where it has been built.
        import stratacl_jax._native as native
    except ModuleNotFoundError as error:
        raise ImportError(
            "stratacl_jax was imported from its sources, where it is not built "
            f"({error}): `pip install .`, then run from another directory, with the "
            "`stratacl` command, or with `python -P`"
        ) from error
    return native


def _local_device_count() -> int:
    """Local CPU devices: as they are, or as the configuration asks for."""
    import jax

    from .. import _compat

    if _compat.backend_started():
        return len(jax.local_devices(backend="cpu"))
    asked = _compat.requested_cpu_devices()
    if asked is not None:
        return asked
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(found[-1]) if found else 1


def _secure_launch_pool() -> None:
    """Makes XLA's thread pool large enough for launches that wait.

    XLA sizes it by NPROC when the backend starts. Every launch in flight holds a
    thread while it waits for its predecessor, so with fewer than twice as many
    threads as local devices a pipelined loop stops for ever.

    Raises:
      InvalidUsage: the backend runs already, with a pool that is too small.
    """
    from .. import _compat

    devices = _local_device_count()
    if devices == 1:
        return
    need = 2 * devices
    given = os.environ.get("NPROC", "")
    have = int(given) if given.isdigit() and int(given) > 0 else os.cpu_count() or 1
    if have >= need:
        return
    if _compat.backend_started():
        raise InvalidUsage(
            f"{devices} CPU devices in one process need NPROC >= {need} in the "
            f"environment before JAX's backend starts (it is {have}), or pipelined "
            "launches can hang; call stratacl_jax.initialize() before anything that "
            "starts the backend, or use `stratacl launch`"
        )
    os.environ["NPROC"] = str(need + 2)


def _fingerprint() -> str:
    """What makes two compilers order equal calls differently."""
    import jaxlib

    flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
    return hashlib.sha256(f"{jaxlib.__version__} {flags}".encode()).hexdigest()


def _native_settings(ranks_here: int) -> dict[str, Any]:
    cpus = usable_cpus()
    spin = config.spin_us
    crowded = cpus.usable < ranks_here
    if spin < 0:
        spin = 0 if crowded else 100
    return {
        "timeout_s": config.timeout,
        "warn_after_s": config.warn_after,
        "spin_us": spin,
        "yield_us": 30 if crowded else 10,
        "inplace_us": config.inplace_us,
        "chunk_bytes": config.chunk_bytes,
        "registration": {"staged": 0, "on_allocation": 1, "just_in_time": 2}[
            config.registration
        ],
        "algorithm": {"auto": 0, "one_shot": 1, "two_phase": 2}[config.algorithm],
    }


def _register(native: Any) -> None:
    """Tells XLA about the custom call; the type must come before the target."""
    global _registered
    if _registered:
        return
    import jax

    from .. import _compat

    jax.ffi.register_ffi_type(TARGET, native.ffi_types(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, native.ffi_targets(), platform="cpu")

    def wanted(program: Any) -> bool:
        if isinstance(program, bytes):
            return True  # a serialized executable: looking costs more
        return TARGET in str(program)

    _compat.hook_compiles(wanted, native.begin_module, native.end_module)
    _registered = True


def initialize(*, timeout: float | None = None) -> None:
    """Joins the fabric: all processes of the job call it, or none does.

    Uses JAX's distributed runtime if the program (or `stratacl launch`, `srun`,
    `mpirun`) started it, else this process is the whole job. Starts JAX's CPU
    backend. Operators call it by themselves when they are first lowered; call it
    first thing if one process has several devices, so that XLA's thread pool can
    still be sized. A second call without other arguments does nothing.

    Args:
      timeout: seconds, as `STRATACL_TIMEOUT`; the deadline of every wait.

    Raises:
      InvalidUsage: different arguments than before; a forked child; settings that
        differ between ranks; a thread pool that is already too small.
      Unsupported: not Linux, or ranks on several hosts.
      ResourceExhausted: no address space (see RLIMIT_AS, RLIMIT_FSIZE).
      DeadlineExceeded: a process did not come.
    """
    global _state, _attempts, _watches_forks
    with _lock:
        arguments = {"timeout": timeout}
        if _forked:
            raise InvalidUsage(
                "a child made by fork() has no rank; start workers with the 'spawn' "
                "method"
            )
        if _state is not None:
            if timeout is not None and timeout != config.timeout:
                raise InvalidUsage(
                    f"initialize() was called before with {_state['arguments']}, now "
                    f"with {arguments}; call shutdown() in between"
                )
            return
        native = native_module()
        import jax

        from .. import _compat
        from .detect import detect_cluster

        if timeout is not None:
            config.update("timeout", timeout)
        for line in config.unknown_variables():
            say_once(line)
        if not _compat.supported_jaxlib():
            say_once("this jaxlib is outside the tested range; expect surprises")
        _secure_launch_pool()
        if _compat.distributed_client() is None and not _compat.backend_started():
            cluster = detect_cluster()
            if cluster is not None:
                cluster.connect()
        config.freeze()
        try:
            process, processes = _compat.process_index(), _compat.process_count()
            devices = sorted(jax.devices("cpu"), key=lambda d: d.id)
            if len(devices) > native.max_ranks():
                raise InvalidUsage(
                    f"{len(devices)} ranks; this version serves {native.max_ranks()}"
                )
            _secure_launch_pool()
            _attempts += 1
            fabric = _bootstrap(native, process, processes, len(devices))
            armed = _arm(native)
            native.start(
                [(d.process_index, d.id) for d in devices], fabric["divergent"]
            )
            _register(native)
            if armed:
                _probe(native)
            if not _watches_forks:
                os.register_at_fork(after_in_child=_after_fork)
                _watches_forks = True
        except BaseException:
            native.shutdown(0.0)
            config.thaw()
            raise
        _state = {
            "arguments": arguments,
            "fabric": fabric,
            "process": process,
            "processes": processes,
            "devices": [(d.process_index, d.id) for d in devices],
        }


def _arm(native: Any) -> bool:
    """Makes the arena the source of XLA's memory, if that is wanted and possible."""
    if config.registration == "staged":
        return False
    why = native.arm(config.eager_bytes, config.arena_limit)
    if why:
        say_once(
            f"XLA's memory cannot be shared ({why}); large operands are copied to "
            "shared memory first, which is correct and slower"
        )
    return not why


def _probe(native: Any) -> None:
    """Looks whether XLA's memory does come from the arena, now that it should."""
    import jax
    import numpy as np

    size = max(config.eager_bytes, 1 << 16)
    # Not aligned: JAX must copy it into memory of its own.
    unaligned = np.zeros(size + 1, np.uint8)[1:]
    array = jax.device_put(unaligned, jax.local_devices(backend="cpu")[0])
    # Unless the limit is too small for even that.
    refused = native.ledger()["fallback_bytes"] > 0
    if not refused and not native.in_arena(array.unsafe_buffer_pointer(), size):
        say_once(
            "XLA's memory does not come from the arena although jaxlib was "
            "prepared; large operands are copied to shared memory first, which is "
            "correct and slower"
        )


def _bootstrap(native: Any, process: int, processes: int, ranks: int) -> dict[str, Any]:
    from .. import _compat
    from . import bootstrap

    return bootstrap.connect(
        native,
        _compat.distributed_client(),
        _attempts - 1,
        process,
        processes,
        config.arena_span,
        config.eager_bytes,
        _native_settings(ranks),
        _fingerprint(),
        config.timeout,
    )


def is_initialized() -> bool:
    """Whether this process has joined the fabric."""
    return _state is not None


def shutdown() -> None:
    """Leaves the fabric; all processes do. Programs compiled before cannot run.

    Waits for work that is under way on this process's devices. Does nothing if
    the process never joined. `initialize()` may follow.

    Raises:
      InvalidUsage: collectives are still pending after 10 s (another rank has not
        come to them).
    """
    global _state
    with _lock:
        if _state is None or _forked:
            return
        import jax

        with contextlib.suppress(Exception):
            for device in jax.local_devices(backend="cpu"):
                jax.device_put(0, device).block_until_ready()
        done = native_module().shutdown(10.0)
        _state = None
        config.thaw()
        jax.clear_caches()
        if not done:
            raise InvalidUsage(
                "shutdown() while collectives were still waiting for other ranks"
            )


def ledger() -> Ledger:
    """What moved, and how: counters since `initialize()`; see `Ledger`."""
    if _state is None:
        return Ledger({})
    raw = dict(native_module().ledger())
    raw["page_faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return Ledger(raw)


def info() -> dict[str, Any]:
    """Versions, host, ranks, address plan, waiting policy and settings.

    JSON can hold all of it. Works before `initialize()`, with less to say.
    """
    from importlib import metadata

    cpus = usable_cpus()
    found: dict[str, Any] = {
        "versions": {
            name: _version(metadata, name)
            for name in ("stratacl_jax", "jax", "jaxlib", "numpy", "flax")
        }
        | {"python": platform.python_version(), "kernel": platform.release()},
        "host": {
            "name": platform.node(),
            "machine": platform.machine(),
            "cpus": cpus.affinity,
            "cpu_quota": cpus.quota,
            "usable_cpus": cpus.usable,
        },
        "initialized": _state is not None,
        "settings": config.describe(),
        "unknown_variables": config.unknown_variables(),
    }
    if _state is None:
        return found
    here = [i for i, (p, _) in enumerate(_state["devices"]) if p == _state["process"]]
    span = config.arena_span
    base = _state["fabric"]["base"]
    waiting = _native_settings(len(_state["devices"]))
    found["ranks"] = {
        "process": _state["process"],
        "processes": _state["processes"],
        "ranks": len(_state["devices"]),
        "local_ranks": here,
        "layout": f"{_state['processes']} x {len(here)}",
        "device_ids": [d for _, d in _state["devices"]],
    }
    found["address_plan"] = {
        "base": hex(base),
        "span": span,
        "arenas": [hex(base + p * span) for p in range(_state["processes"])],
    }
    found["arena"] = {
        key: value for key, value in ledger().items() if key.startswith("arena_")
    }
    found["waiting"] = {
        "spin_us": waiting["spin_us"],
        "yield_us": waiting["yield_us"],
        "inplace_us": waiting["inplace_us"],
        "then": "futex",
        "deadline_s": waiting["timeout_s"],
    }
    found["ledger"] = ledger().as_dict()
    return found


def _version(metadata: Any, name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def translate_errors() -> Any:
    """Turns XLA's exceptions into this package's, inside a `with` block.

    A failure inside a compiled program reaches Python as `jax.errors.
    JaxRuntimeError` or, if it shows while the program is being called, as
    `ValueError`, with a text that contains "stratacl: PeerLost: ...". In this
    block it becomes `PeerLost` itself. The block must contain the place where the
    error shows: the call, or `block_until_ready()`.
    """
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        ours = from_message(str(error))
        if ours is None:
            raise
        raise ours from error


def available() -> bool:
    """Joins the fabric if need be; False where operators are jax.lax's own."""
    if _state is not None and not _forked:
        return True
    try:
        initialize()
    except Unsupported as error:
        if sys.platform.startswith("linux"):
            raise
        say_once(str(error))
        return False
    return True
