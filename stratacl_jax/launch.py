"""`stratacl launch`: the ranks of one host, started, watched and ended together.

The launcher owns the ranks' processes and their output and knows nothing of
JAX; a child of it hosts the coordination service (`_coordinator`), and each rank
prepares itself in `_launched`. Every rank is a process group, so that what it
starts ends with it.

An ended rank stays a zombie until all have ended: its process group's number
cannot be taken by a stranger while it may still be signalled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from .runtime import cpus
from .runtime.errors import InvalidUsage

_HERE = os.path.dirname(os.path.abspath(__file__))
# From SIGTERM to SIGKILL. Stuck ranks do not heed SIGTERM: JAX's preemption
# notifier takes it.
_TERM_TO_KILL_S = 2.0
# From a forwarded Ctrl-C to SIGTERM, at most.
_INTERRUPT_TO_TERM_S = 2.0
# A line longer than this is passed on in pieces.
_LONGEST_LINE = 1 << 16
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMEOUT_CODE = 124  # as timeout(1)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to launch.

    Attributes:
      command: the script's path, or the module's name, and its arguments.
      processes: ranks' processes to start, at least 1.
      devices_per_process: JAX CPU devices of each, at least 1.
      module: `command[0]` names a module, as in `python -m`.
      grace: seconds that the others have, after the first failure, to report
        what they saw.
      timeout: seconds for the whole job, or None for no limit.
      label: prefix each line of output with `[rank]`.
    """

    command: Sequence[str]
    processes: int
    devices_per_process: int = 1
    module: bool = False
    grace: float = 5.0
    timeout: float | None = None
    label: bool = True


def run(options: Options) -> int:
    """Runs a job to its end and returns its exit code.

    0 if every rank left with 0; else that of the first failing rank (128 + the
    signal's number for a death by signal, 124 when the time limit ended the job).
    To be called from the main thread: it handles signals while it runs.

    Raises:
      InvalidUsage: nothing to run, or a count or a time that cannot be.
    """
    _check(options)
    return _Job(options).run()


def _check(options: Options) -> None:
    if not options.command:
        raise InvalidUsage("stratacl launch: name a script, or -m and a module")
    for name in ("processes", "devices_per_process"):
        if getattr(options, name) < 1:
            raise InvalidUsage(
                f"stratacl launch: {name} is {getattr(options, name)}; at least 1"
            )
    if options.grace < 0 or (options.timeout is not None and options.timeout <= 0):
        raise InvalidUsage("stratacl launch: times are positive numbers of seconds")
    script = options.command[0]
    if not options.module and not os.path.exists(script):
        raise InvalidUsage(f"stratacl launch: no such script: {script}")


def rank_environment(
    options: Options, rank: int, address: str, base: dict[str, str]
) -> dict[str, str]:
    """The environment of one rank's process."""
    env = dict(base)
    devices = options.devices_per_process
    # XLA takes NPROC, if set, for the size of its launch pool. Every launch in
    # flight holds a thread of it per device: too few, and launches that wait for
    # each other starve.
    try:
        threads = int(base.get("NPROC", ""))
    except ValueError:
        threads = cpus.affinity_cpus()
    env.update(
        STRATACL_LAUNCHED="1",
        STRATACL_LAUNCHER_PID=str(os.getpid()),
        STRATACL_NUM_PROCESSES=str(options.processes),
        STRATACL_PROCESS_ID=str(rank),
        JAX_COORDINATOR_ADDRESS=address,
        JAX_NUM_CPU_DEVICES=str(devices),
        NPROC=str(max(threads, 2 * devices + 2)),
        PYTHONUNBUFFERED="1",
        # An HTTP proxy is no way to reach this host.
        no_grpc_proxy="127.0.0.1,localhost",
    )
    env.setdefault("JAX_PLATFORMS", "cpu")
    return env


def describe_status(status: int) -> str:
    """How a process ended, for people; `status` as in `Popen.returncode`."""
    if status >= 0:
        return f"exited with code {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def exit_code(status: int) -> int:
    """The shell's exit code for a `Popen.returncode`."""
    return status if status >= 0 else 128 - status


class _Lines:
    """Passes one stream of a rank on, line by line, under a label."""

    def __init__(self, source: IO[bytes], sink: Callable[[bytes], None], label: bytes):
        self.source = source
        self._sink = sink
        self._label = label
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def pump(self) -> bool:
        """Passes on what has arrived; False when the stream has ended."""
        try:
            data = self.source.read(1 << 16)
        except BlockingIOError:
            return True
        if data is None:
            return True
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data or len(self._rest) > _LONGEST_LINE:
            if self._rest:
                lines.append(self._rest)
            self._rest = b""
        if lines:
            self._sink(b"".join(self._label + line + b"\n" for line in lines))
        return bool(data)


class _Rank:
    """One rank's process."""

    def __init__(self, index: int, process: subprocess.Popen, channel: socket.socket):
        self.index = index
        self.process = process
        self.channel = channel
        self.at_end = False  # its script has ended in order
        self.status: int | None = None  # as Popen.returncode, once it has ended

    def look(self) -> bool:
        """Notes the process's end, without reaping it; True if it is news."""
        if self.status is not None:
            return False
        info = os.waitid(
            os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        )
        if info is None:
            return False
        exited = info.si_code == os.CLD_EXITED
        self.status = info.si_status if exited else -info.si_status
        return True

    def signal(self, number: int) -> None:
        """Signals the process and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Coordinator:
    """The process that hosts the coordination service."""

    def __init__(self, address: str, num_processes: int):
        self._process = subprocess.Popen(
            [sys.executable, os.path.join(_HERE, "_coordinator.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stderr is not None
        self._orders, self.errors = self._process.stdin, self._process.stderr
        os.set_blocking(self.errors.fileno(), False)
        self.last_words = b""
        self.tell(f"{address} {num_processes}")

    def tell(self, line: str) -> None:
        """Writes a line to its standard input."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(line.encode() + b"\n")

    def hear(self) -> bool:
        """Reads its log, gRPC's mostly; False when it has ended."""
        data = self.errors.read(1 << 16)
        self.last_words = (self.last_words + (data or b""))[-4096:]
        return data != b""

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._orders.close()
        self.errors.close()


class _Job:
    """The state of one launch."""

    def __init__(self, options: Options):
        self._options = options
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._coordinator: _Coordinator | None = None
        self._code: int | None = None  # the job's exit code, once it is decided
        # What is still to be done to the ranks: (when, signal), in order.
        self._schedule: list[tuple[float, int]] = []
        self._interrupted = 0

    # -- the whole

    def run(self) -> int:
        wake, waker = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(wake)
            stack.enter_context(waker)
            self._listen_for_signals(stack, wake, waker)
            stack.callback(self._end_everything)
            self._start(stack)
            self._watch()
        return 0 if self._code is None else self._code

    def _listen_for_signals(
        self, stack: contextlib.ExitStack, wake: socket.socket, waker: socket.socket
    ) -> None:
        for end in (wake, waker):
            end.setblocking(False)

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                while wake.recv(256):
                    pass

        self._selector.register(wake, selectors.EVENT_READ, drain)
        before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before)
        # nohup stays nohup; an ignored SIGCHLD would lose the exit codes.
        numbers = [n for n in _FORWARDED if signal.getsignal(n) != signal.SIG_IGN]
        for number in (signal.SIGCHLD, *numbers):
            handler = self._on_signal if number in numbers else lambda *_: None
            old = signal.signal(number, handler)
            stack.callback(signal.signal, number, old or signal.SIG_DFL)

    # -- starting

    def _start(self, stack: contextlib.ExitStack) -> None:
        # Held for the whole job, so that nobody else gets the port. gRPC listens
        # with SO_REUSEPORT as well, hence may join us there.
        holder = stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        coordinator = _Coordinator(address, self._options.processes)
        self._coordinator = coordinator
        self._selector.register(
            coordinator.errors, selectors.EVENT_READ, self._hear_coordinator
        )
        for index in range(self._options.processes):
            self._start_rank(index, address)

    def _start_rank(self, index: int, address: str) -> None:
        options = self._options
        ours, theirs = socket.socketpair()
        env = rank_environment(options, index, address, dict(os.environ))
        env["STRATACL_CONTROL_FD"] = str(theirs.fileno())
        pipe = subprocess.PIPE if options.label else None
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    os.path.join(_HERE, "_launched.py"),
                    "module" if options.module else "script",
                    *options.command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._coordinator is not None
        self._coordinator.tell(str(process.pid))
        rank = _Rank(index, process, ours)
        self._ranks.append(rank)
        ours.setblocking(False)
        self._selector.register(
            ours, selectors.EVENT_READ, lambda: self._hear_rank(rank)
        )
        if options.label:
            width = len(str(options.processes - 1))
            label = f"[{index:>{width}}] ".encode()
            for source, sink in ((process.stdout, 1), (process.stderr, 2)):
                assert source is not None
                lines = _Lines(source, self._writer(sink), label)
                self._selector.register(
                    source, selectors.EVENT_READ, lambda lines=lines: self._pump(lines)
                )

    # -- while it runs

    def _watch(self) -> None:
        started = time.monotonic()
        limit = self._options.timeout
        while True:
            self._look_at_processes()
            if all(rank.status is not None for rank in self._ranks):
                return
            self._release_if_all_at_end()
            now = time.monotonic()
            if limit is not None and self._code is None and now >= started + limit:
                self._say(f"the time limit of {limit:g} s is over; ending all ranks")
                self._decide(TIMEOUT_CODE, grace=0.0)
            while self._schedule and self._schedule[0][0] <= now:
                self._signal_ranks(self._schedule.pop(0)[1])
            due = [self._schedule[0][0]] if self._schedule else []
            if limit is not None and self._code is None:
                due.append(started + limit)
            wait = max(0.0, min(due) - now) if due else None
            for key, _ in self._selector.select(wait):
                key.data()

    def _look_at_processes(self) -> None:
        failed = [
            (rank.status > 0, rank.index, rank)  # a death by signal explains others
            for rank in self._ranks
            if rank.look() and rank.status
        ]
        if failed and self._code is None:
            rank = min(failed)[-1]
            assert rank.status is not None
            self._drain()
            how = describe_status(rank.status)
            self._say(f"rank {rank.index} (pid {rank.process.pid}) {how}")
            self._decide(exit_code(rank.status), self._options.grace)
        coordinator = self._coordinator
        if self._code is None and coordinator is not None and coordinator.has_ended():
            self._drain()
            self._say("the coordination service ended unexpectedly; its last words:")
            self._writer(2)(coordinator.last_words)
            self._decide(1, grace=0.0)

    def _hear_coordinator(self) -> None:
        assert self._coordinator is not None
        if not self._coordinator.hear():
            self._selector.unregister(self._coordinator.errors)

    def _hear_rank(self, rank: _Rank) -> None:
        try:
            said = rank.channel.recv(16)
        except OSError:
            said = b""
        rank.at_end = rank.at_end or bool(said)
        if not said:
            self._selector.unregister(rank.channel)

    def _release_if_all_at_end(self) -> None:
        """Opens the end barrier once no rank is still at work, or one has failed."""
        failed = self._code is not None
        if failed or all(r.at_end or r.status is not None for r in self._ranks):
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.channel.send(b"!")

    def _decide(self, code: int, grace: float) -> None:
        """Fixes the job's exit code and when the remaining ranks are ended."""
        if self._code is None:
            self._code = code
        term = time.monotonic() + grace
        self._schedule = [
            (term, signal.SIGTERM),
            (term + _TERM_TO_KILL_S, signal.SIGKILL),
        ]

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks:
            if rank.status is None:
                rank.signal(number)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._interrupted += 1
        if self._interrupted > 1:  # impatience
            self._signal_ranks(signal.SIGKILL)
            return
        self._signal_ranks(number)
        # Time to save what a preempted program saves; a person waits less long.
        grace = self._options.grace
        if number == signal.SIGINT:
            grace = min(grace, _INTERRUPT_TO_TERM_S)
        self._decide(128 + number, grace)

    # -- output

    def _say(self, text: str) -> None:
        self._writer(2)(f"stratacl launch: {text}\n".encode())

    def _writer(self, descriptor: int) -> Callable[[bytes], None]:
        def write(data: bytes) -> None:
            try:
                while data:
                    try:
                        data = data[os.write(descriptor, data) :]
                    except BlockingIOError:  # somebody made it non-blocking
                        select.select([], [descriptor], [])
            except BrokenPipeError:  # the reader, say `head`, has left
                self._decide(128 + signal.SIGPIPE, grace=0.0)

        return write

    def _pump(self, lines: _Lines) -> None:
        if not lines.pump():
            self._selector.unregister(lines.source)

    def _drain(self) -> None:
        """Passes on what the ranks have written so far."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and (ready := self._selector.select(0)):
            for key, _ in ready:
                key.data()

    # -- ending

    def _end_everything(self) -> None:
        """Leaves no process and no descriptor behind, whatever has happened."""
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)  # its children, and itself if need be
        self._drain()
        for rank in self._ranks:
            rank.process.wait()
            rank.channel.close()
            for stream in (rank.process.stdout, rank.process.stderr):
                if stream is not None:
                    stream.close()
        if self._coordinator is not None:
            self._coordinator.end()
        self._selector.close()
