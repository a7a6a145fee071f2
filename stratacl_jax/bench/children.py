"""Sets of live rank processes, told what to do over pipes.

`RankSet` starts the P processes of one implementation and keeps them. A
request goes to all of them; between requests each is blocked in a read, so
that several sets can be alive and only one uses the cores. Every request has a
deadline, every child has one of its own, and a child dies with its parent:
nothing is left behind whatever happens. JAX's coordination service runs apart,
as under `stratacl launch`, so that no rank's death takes the others with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from stratacl_jax.bench.layout import Layout
from stratacl_jax.runtime import cpus

_ERROR_GRACE_S = 1.0  # for the other ranks' own words, once one has failed
_QUIT_S = 10.0
_SHOWN = 4  # processes whose output a message shows
_COORDINATOR = str(pathlib.Path(__file__).parent.parent / "_coordinator.py")
_LAUNCHERS = (
    "JAX_COORDINATOR_ADDRESS",
    "STRATACL_LAUNCHED",
    "STRATACL_LAUNCHER_PID",
    "STRATACL_NUM_PROCESSES",
    "STRATACL_PROCESS_ID",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
)


class ChildFailed(RuntimeError):
    """A child raised, died or passed its deadline; carries its last output."""


def environment(layout: Layout, *, x64: bool = False) -> dict[str, str]:
    """The environment of a child: the same rule for every implementation.

    Args:
      layout: processes and devices of the run.
      x64: whether JAX's 64-bit types are on.
    """
    env = dict(os.environ)
    # XLA sizes its launch pool by NPROC; too small for the devices, and launches
    # that wait for each other starve (stock JAX as well). As `stratacl launch`.
    given = env.get("NPROC", "")
    threads = int(given) if given.isdecimal() else cpus.affinity_cpus()
    env["NPROC"] = str(max(threads, 2 * layout.devices + 2))
    env["no_grpc_proxy"] = "127.0.0.1,localhost"
    env["JAX_PLATFORMS"] = "cpu"
    env["JAX_NUM_CPU_DEVICES"] = str(layout.devices)
    env["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    env["JAX_ENABLE_X64"] = "1" if x64 else "0"
    # Its notifier swallows SIGTERM.
    env["JAX_ENABLE_PREEMPTION_SERVICE"] = "0"
    flags = env.get("XLA_FLAGS", "").split()
    env["XLA_FLAGS"] = " ".join(
        f for f in flags if "xla_force_host_platform_device_count" not in f
    )
    # If somebody launched us as a rank, that is not about our children.
    return {k: v for k, v in env.items() if not k.startswith(_LAUNCHERS)}


class _Process:
    """One child: its process, its reply buffer and its captured output."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # Unlinked at once, so that nothing remains of it.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self.popen = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=env,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        assert self.popen.stdin and self.popen.stdout
        self.stdin = self.popen.stdin
        self.stdout = self.popen.stdout
        self._buffer = b""

    def write(self, request: dict[str, Any]) -> None:
        self.stdin.write(json.dumps(request).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; None at the end of the stream."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def output(self, lines: int = 25) -> str:
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()
        self._output.close()


class RankSet:
    """The live processes of one implementation.

    Args:
      name: how messages call it.
      module: worker module, run with `-m`; calls `serve.serve`.
      impl: "ours" or "stock".
      layout: processes and devices.
      life_s: hard limit of every child's life, seconds.
      x64: whether JAX's 64-bit types are on.
    """

    def __init__(
        self,
        name: str,
        module: str,
        impl: str,
        layout: Layout,
        *,
        life_s: float,
        x64: bool = False,
    ) -> None:
        self.name = name
        self.layout = layout
        self._service: subprocess.Popen[bytes] | None = None
        self._port: socket.socket | None = None
        self._processes: list[_Process] = []
        address = ""
        if layout.processes > 1:
            address = self._start_service()
        env = environment(layout, x64=x64)
        try:
            for process_id in range(layout.processes):
                command = [sys.executable, "-P", "-m", module, "--impl", impl]
                command += ["--processes", str(layout.processes)]
                command += ["--devices", str(layout.devices)]
                command += ["--process-id", str(process_id)]
                command += ["--coordinator", address, "--parent", str(os.getpid())]
                command += ["--deadline", str(life_s)]
                self._processes.append(_Process(command, env))
                # It ends the group should we be killed.
                self._tell_service(str(self.pids[-1]))
        except BaseException:
            self.kill()
            raise

    def _start_service(self) -> str:
        """Hosts JAX's coordination service on a free port of this host."""
        # Held as long as the set lives, so that nobody else gets the port; gRPC
        # listens with SO_REUSEPORT as well, hence may join us there.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._port.getsockname()[1]}"
        self._service = subprocess.Popen(
            [sys.executable, _COORDINATOR],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # gRPC's log
            start_new_session=True,
        )
        self._tell_service(f"{address} {self.layout.processes}")
        return address

    def _tell_service(self, line: str) -> None:
        if self._service is not None:
            assert self._service.stdin
            with contextlib.suppress(BrokenPipeError):
                self._service.stdin.write(line.encode() + b"\n")

    @property
    def pids(self) -> list[int]:
        return [p.popen.pid for p in self._processes]

    def call(
        self,
        do: str,
        *,
        timeout_s: float,
        on_event: Callable[[int, dict[str, Any]], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Has every process run request `do`; returns their values by process.

        Args:
          do: name of the worker's handler.
          timeout_s: deadline of the whole request, seconds.
          on_event: called with (process, event) for what a handler emits.
          **arguments: JSON-able arguments of the handler.

        Raises:
          ChildFailed: a process raised, died or was late. All are dead then.
        """
        try:
            return self._call(do, timeout_s, on_event, arguments)
        except BaseException:
            self.kill()
            raise

    def _call(
        self,
        do: str,
        timeout_s: float,
        on_event: Callable[[int, dict[str, Any]], None] | None,
        arguments: dict[str, Any],
    ) -> list[Any]:
        end = time.monotonic() + timeout_s
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        with selectors.DefaultSelector() as selector:
            for i, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, i)
                # If it has died, the end of its stream says so below.
                with contextlib.suppress(OSError):
                    process.write({"do": do, **arguments})
            while selector.get_map():
                left = end - time.monotonic()
                if left <= 0:
                    break
                for key, _ in selector.select(left):
                    i = key.data
                    messages = self._processes[i].read()
                    if messages is None:
                        messages = [{"error": self._epitaph(i)}]
                    for message in messages:
                        if "event" in message:
                            if on_event:
                                on_event(i, message["event"])
                            continue
                        selector.unregister(key.fileobj)
                        if "value" in message:
                            values[i] = message["value"]
                        else:
                            errors[i] = message["error"]
                            end = min(end, time.monotonic() + _ERROR_GRACE_S)
        if errors:
            raise self._failure(do, errors)
        late = [i for i in range(len(self._processes)) if i not in values]
        if late:
            reason = f"no answer within {timeout_s:.0f} s"
            raise self._failure(do, dict.fromkeys(late, reason))
        return [values[i] for i in range(len(self._processes))]

    def _epitaph(self, i: int) -> str:
        popen = self._processes[i].popen
        try:
            code = popen.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"died of signal {-code}" if code < 0 else f"exited with code {code}"

    def _failure(self, do: str, errors: dict[int, str]) -> ChildFailed:
        lines = [f"{self.name}, layout {self.layout}, request {do!r} failed:"]
        for i, reason in sorted(errors.items()):
            lines.append(f"  process {i} (pid {self.pids[i]}): {reason}")
        for i in sorted(errors)[:_SHOWN]:
            if output := self._processes[i].output():
                lines.append(f"  last output of process {i}:")
                lines += ["    " + line for line in output.splitlines()]
        return ChildFailed("\n".join(lines))

    def kill(self) -> None:
        """Ends every process at once. Idempotent."""
        for process in self._processes:
            if process.popen.poll() is None:
                process.popen.kill()
        for process in self._processes:
            process.popen.wait()
        if self._service is not None:
            self._service.kill()
            self._service.wait()
            assert self._service.stdin
            self._service.stdin.close()
            self._service = None
        if self._port is not None:
            self._port.close()

    def close(self) -> None:
        """Asks every process to leave, and ends those that do not."""
        try:
            if all(p.popen.poll() is None for p in self._processes):
                self._call("quit", _QUIT_S, None, {})
                for process in self._processes:
                    process.popen.wait(timeout=_QUIT_S)
        except (ChildFailed, subprocess.TimeoutExpired):
            pass  # the results are in; how it leaves is not a result
        finally:
            self.kill()
            for process in self._processes:
                process.close()

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.close()
