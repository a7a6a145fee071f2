"""Hosts JAX's coordination service for `stratacl launch`, and tidies up.

A process of its own, so that no rank's death takes the service along, the
launcher needs no JAX, and somebody is left to end the ranks' own children when
the launcher itself is killed.

Reads lines from standard input: first `ADDRESS NUM_PROCESSES`, then the process
group of each rank. At the end of input (the launcher is gone) it kills those
groups and leaves. A launcher that ends in order kills this process first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import types


def _load_distributed() -> types.ModuleType:
    """`_compat_distributed` by path: the package would import all of JAX."""
    path = os.path.join(os.path.dirname(__file__), "_compat_distributed.py")
    spec = importlib.util.spec_from_file_location("_compat_distributed", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    address, num_processes = sys.stdin.readline().split()
    service = _load_distributed().start_service(address, int(num_processes))
    groups = [int(line) for line in sys.stdin]  # until the launcher is gone
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    del service
    os._exit(0)


if __name__ == "__main__":
    main()
