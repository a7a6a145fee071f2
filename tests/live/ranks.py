"""Rank processes that stay alive between tests and run functions on demand.

Starting JAX and joining the fabric takes seconds; most tests need neither anew.
A `Ranks` starts when it is first called, waits in a read while nobody calls, and
is killed after any failure, so that the next call finds fresh ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import procs
import pytest

_SERVER = Path(__file__).with_name("server.py")
_START_S = 60.0
# Longest life of a set: the backstop if this process dies without a word.
_LIFE_S = 1800.0
# Once one rank has failed, how long the others have to tell what they saw.
_GRACE_S = 5.0


def on_layouts(*layouts: tuple[int, int]) -> pytest.MarkDecorator:
    """Runs a test with the fixture `ranks` in each (processes, devices)."""
    names = [f"{processes}x{devices}" for processes, devices in layouts]
    return pytest.mark.parametrize("ranks", layouts, ids=names, indirect=True)


class RankFailure(AssertionError):
    """A function failed on a rank, or did not return in time."""


class Ranks:
    """One set of live rank processes.

    Args:
      processes: rank processes.
      devices: CPU devices of each.
      env: added to their environment.
    """

    def __init__(
        self, processes: int, devices: int, env: Mapping[str, str] | None = None
    ):
        self.processes = processes
        self.devices = devices
        self._env = {"JAX_ENABLE_X64": "1", **(env or {})}
        self._stack: contextlib.ExitStack | None = None
        self._child: procs.Child | None = None
        self._links: list[Connection] = []
        self._pids: list[int] = []

    @property
    def size(self) -> int:
        """Number of ranks: devices of all processes."""
        return self.processes * self.devices

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        deadline: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs a function in every process at once.

        Args:
          function: importable by module and name; arguments and results travel
            by pickle.
          deadline: seconds until all must have returned.

        Returns:
          What it returned, by process.

        Raises:
          RankFailure: with the tracebacks, or with every thread's stack.
        """
        self._start()
        begun = time.monotonic()
        order = (function.__module__, function.__qualname__, args, kwargs)
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            for link in self._links:
                link.send(order)
            until = begun + deadline
            while len(answers) < self.processes:
                failed = any(not good for good, _ in answers.values())
                self._collect(answers, until)
                if not failed and any(not good for good, _ in answers.values()):
                    until = min(until, time.monotonic() + _GRACE_S)
                if time.monotonic() >= until:
                    break
        except BaseException as error:
            report = self._report(answers, str(error))
            self._kill()
            if isinstance(error, OSError):
                raise RankFailure(report) from error
            raise
        if len(answers) < self.processes or not all(g for g, _ in answers.values()):
            seconds = time.monotonic() - begun
            report = self._report(answers, f"after {seconds:.1f} s")
            self._kill()
            raise RankFailure(f"{function.__qualname__}(*{args}, **{kwargs}) {report}")
        return [answers[i][1] for i in range(self.processes)]

    def _collect(self, answers: dict[int, tuple[bool, Any]], until: float) -> None:
        open_links = [link for i, link in enumerate(self._links) if i not in answers]
        for link in wait(open_links, max(0.0, until - time.monotonic())):
            assert isinstance(link, Connection)
            index = self._links.index(link)
            try:
                answers[index] = link.recv()
            except (EOFError, ConnectionResetError):
                answers[index] = (False, "the process has died")

    def _report(self, answers: Mapping[int, tuple[bool, Any]], why: str) -> str:
        """What each rank said, with the stacks of those that said nothing."""
        assert self._child is not None
        silent = [i for i in range(self.processes) if i not in answers]
        for index in silent:
            with contextlib.suppress(OSError):
                os.kill(self._pids[index], signal.SIGUSR1)
        if silent:
            time.sleep(0.5)
        lines = [f"failed, {why}"]
        for index in range(self.processes):
            good, said = answers.get(index, (False, "no answer; see its stacks"))
            lines.append(f"-- process {index}: {'fine' if good else said}")
        return "\n".join([*lines, "---- stderr", self._child.err[-20000:]])

    def _start(self) -> None:
        if self._child is not None:
            return
        stack = self._stack = contextlib.ExitStack()
        name = f"live-ranks-{uuid.uuid4().hex}"
        try:
            listener = socket.socket(socket.AF_UNIX)
            stack.enter_context(listener)
            listener.bind("\0" + name)
            listener.listen(self.processes)
            command = procs.launch_command(
                _SERVER, name, processes=self.processes, devices=self.devices
            )
            self._child = stack.enter_context(
                procs.start(command, deadline=_LIFE_S, env=self._env)
            )
            until = time.monotonic() + _START_S
            found: dict[int, tuple[Connection, int]] = {}
            while len(found) < self.processes:
                listener.settimeout(max(0.1, until - time.monotonic()))
                link = Connection(listener.accept()[0].detach())
                stack.callback(link.close)
                if not link.poll(max(0.1, until - time.monotonic())):
                    raise TimeoutError("a rank connected and said nothing")
                index, pid = link.recv()
                found[index] = (link, pid)
        except BaseException as error:
            said = self._child.err[-20000:] if self._child is not None else ""
            self._kill()
            raise RankFailure(f"the ranks did not start: {error!r}\n{said}") from error
        self._links = [found[i][0] for i in range(self.processes)]
        self._pids = [found[i][1] for i in range(self.processes)]

    def _kill(self) -> None:
        stack, self._stack = self._stack, None
        self._child, self._links, self._pids = None, [], []
        if stack is not None:
            stack.close()

    def close(self) -> None:
        """Ends the ranks in order; fails if they do not, or leave anything."""
        child = self._child
        if child is None:
            return
        try:
            for link in self._links:
                link.close()
            result = child.wait(within=30.0)
            assert result.code == 0, f"live ranks did not end in order: {result}"
        finally:
            self._kill()
