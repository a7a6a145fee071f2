"""The child's side of `children.RankSet`: obey requests read from stdin.

A worker module calls `serve(handlers)` as its `__main__`. Requests and replies
are one JSON object a line. Replies go to the descriptor that stdout was when
the child started; stdout itself is turned into stderr, so that a stray print
can never be taken for a reply.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Emit = Callable[[dict[str, Any]], None]
Handler = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Child:
    """What a child knows of itself."""

    impl: str  # "ours" or "stock": whose collectives it runs
    processes: int
    devices: int  # devices of each process
    process_id: int
    emit: Emit  # sends one intermediate event to the parent

    @property
    def ranks(self) -> int:
        return self.processes * self.devices


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Started by stratacl itself.")
    parser.add_argument("--impl", choices=["ours", "stock"], required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    parser.add_argument("--coordinator", default=None)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    return parser.parse_args()


def _die_with_parent(parent: int) -> None:
    """A child must not outlive its parent, not even one that was SIGKILLed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def serve(make_handlers: Callable[[Child], Mapping[str, Handler]]) -> None:
    """Joins the other ranks, then obeys requests until `quit` or end of input.

    Args:
      make_handlers: called once the ranks are connected; returns a function
        for each request name. A handler's result must be JSON-able.
    """
    args = _arguments()
    _die_with_parent(args.parent)
    # A hard limit that needs no cooperation of the (possibly stuck) main
    # thread: prints every stack and ends the process.
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    handlers: dict[str, Handler] = {}

    def hello() -> dict[str, Any]:
        import jax

        if args.processes > 1:
            from stratacl_jax import _compat_distributed

            _compat_distributed.join_launcher(
                args.coordinator, args.processes, args.process_id
            )
        child = Child(
            args.impl,
            args.processes,
            args.devices,
            args.process_id,
            lambda event: send({"event": event}),
        )
        handlers.update(make_handlers(child))
        if len(jax.devices()) != child.ranks:
            raise RuntimeError(
                f"{child.ranks} devices expected, JAX has {len(jax.devices())}"
            )
        return {"pid": os.getpid(), "jax": jax.__version__}

    handlers["hello"] = hello
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        if name == "quit":
            _leave(args)
            send({"value": None})
            break
        try:
            send({"value": handlers[name](**request)})
        except Exception:
            traceback.print_exc()
            send({"error": traceback.format_exc(limit=-1).strip().splitlines()[-1]})
    replies.close()
    # Not sys.exit: a peer's threads inside XLA may be stuck, and the answer
    # has been given.
    sys.stderr.flush()
    os._exit(0)


def _leave(args: argparse.Namespace) -> None:
    import jax

    if args.impl == "ours":
        import stratacl_jax

        stratacl_jax.shutdown()
    if args.processes > 1:
        jax.distributed.shutdown()


def collectives(impl: str) -> Any:
    """The module whose psum, all_gather and ppermute a child calls."""
    if impl == "stock":
        import jax

        return jax.lax
    import stratacl_jax

    stratacl_jax.initialize()
    return stratacl_jax
