"""Child processes for tests: a hard deadline, all output kept, nothing left.

Every process that a test starts here, and all it starts in turn, carries a mark
in its environment. After the test whatever still carries it is killed, and the
test fails: a leak is a fault like any other.

A child that outlives its deadline is asked for its Python stacks first (SIGABRT
under faulthandler), then killed. `timeout -k` around the child is the backstop
for the case that the test process itself is killed meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A developer's checkout, with the native module beside the Python files; else the
# installed package is tested.
SOURCE_IS_BUILT = any((ROOT / "stratacl_jax").glob("_native*.so"))
_MARK = "TEST_PROCESS_MARK"
# How long a process may linger between its parent's end and its own.
_LINGER_S = 2.0


@dataclasses.dataclass
class Result:
    """How a child ended.

    Attributes:
      code: exit code, negative for a death by signal as in `subprocess`.
      out, err: everything it and its children wrote.
      seconds: wall time.
    """

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"exit code {self.code} after {self.seconds:.1f} s\n"
            f"---- stdout\n{self.out}\n---- stderr\n{self.err}\n----"
        )


class Child:
    """A running child; made by `start`."""

    def __init__(
        self,
        command: Sequence[str],
        deadline: float,
        env: Mapping[str, str],
        cwd: str | os.PathLike | None,
    ):
        self.mark = uuid.uuid4().hex
        self._begun = time.monotonic()
        self._deadline = self._begun + deadline
        # Files, not pipes: a full pipe must not stop a child that nobody reads.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._timeout = subprocess.Popen(
            ["timeout", "-k", "5", str(deadline + 20), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**env, _MARK: self.mark},
            cwd=cwd,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The command's own process, below `timeout`."""
        while self._timeout.poll() is None:
            with contextlib.suppress(OSError):
                pid = self._timeout.pid
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                if children:
                    return int(children.split()[0])
            time.sleep(0.005)
        raise AssertionError(f"the command has ended: {self.wait()}")

    @property
    def out(self) -> str:
        """What has been written to standard output so far."""
        return _contents(self._out)

    @property
    def err(self) -> str:
        """What has been written to standard error so far."""
        return _contents(self._err)

    def signal(self, number: int) -> None:
        """Signals the command's own process and nothing else."""
        os.kill(self.pid, number)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Waits until `text` has been written `count` times to either stream."""
        while (self.out + self.err).count(text) < count:
            if self._timeout.poll() is not None:
                raise AssertionError(f"ended before it wrote {text!r}: {self.wait()}")
            self._give_up_if_late(f"did not write {text!r} {count} times")
            time.sleep(0.01)

    def wait(self, within: float | None = None) -> Result:
        """Waits for the end; fails past the deadline, or if processes remain.

        Args:
          within: seconds from now that move the deadline forward.
        """
        if within is not None:
            self._deadline = min(self._deadline, time.monotonic() + within)
        while self._timeout.poll() is None:
            self._give_up_if_late("did not end")
            time.sleep(0.005)
        result = self._result()
        left = self._remaining(_LINGER_S)
        if left:
            self._kill(left)
            raise AssertionError(f"left processes behind: {left}\n{result}")
        return result

    def end(self) -> None:
        """Kills whatever is left; for the end of a `with` block."""
        if self._timeout.poll() is None or self._remaining(0):
            self._kill(self._remaining(0))
        self._timeout.wait()
        self._out.close()
        self._err.close()

    def _result(self) -> Result:
        code = self._timeout.returncode
        # timeout(1) reports the death of its command by a signal as 128 + n,
        # except for SIGKILL, with which it ends itself.
        seconds = time.monotonic() - self._begun
        return Result(code, self.out, self.err, seconds)

    def _give_up_if_late(self, what: str) -> None:
        if time.monotonic() < self._deadline:
            return
        late = self._remaining(0)
        for pid in late:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)  # faulthandler prints the stacks
        time.sleep(1.0)
        self._kill(self._remaining(0))
        self._timeout.wait()
        raise AssertionError(f"{what} in time; {self._result()}")

    def _remaining(self, patience: float) -> dict[int, str]:
        """Living processes with our mark, but for `timeout`; pid -> command."""
        until = time.monotonic() + patience
        while True:
            found = marked_processes(self.mark)
            found.pop(self._timeout.pid, None)
            if not found or time.monotonic() >= until:
                return found
            time.sleep(0.02)

    def _kill(self, pids: Mapping[int, str]) -> None:
        # Stopped first: one that is being killed starts no other meanwhile.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)


def marked_processes(mark: str) -> dict[int, str]:
    """Processes, zombies aside, that carry the mark; pid -> command line."""
    needle = f"{_MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace").strip()
    return found


def _contents(file) -> str:
    # pread: the children's writes share the file's offset.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of test children: this one's, less what would leak in."""
    dropped = ("JAX_", "XLA_", "STRATACL_", "PYTEST_", "NPROC")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    env.update(
        JAX_PLATFORMS="cpu",
        PYTHONFAULTHANDLER="1",
        PYTHONUNBUFFERED="1",
        PYTHONPATH=os.pathsep.join(
            p
            for p in (
                str(ROOT) if SOURCE_IS_BUILT else "",
                os.environ.get("PYTHONPATH"),
            )
            if p
        ),
    )
    env.update(extra or {})
    return env


@contextlib.contextmanager
def start(
    command: Sequence[str],
    *,
    deadline: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
) -> Iterator[Child]:
    """Starts a command; when the block ends, nothing of it is left.

    Args:
      command: program and arguments.
      deadline: seconds until it counts as hung.
      env: added to `environment()`.
      cwd: working directory.
    """
    child = Child(command, deadline, environment(env), cwd)
    try:
        yield child
    finally:
        child.end()


def run(command: Sequence[str], **options) -> Result:
    """`start`, then wait for the end."""
    with start(command, **options) as child:
        return child.wait()


def script(directory: Path, source: str, name: str = "program.py") -> Path:
    """Writes a program, indented as it may be, to a file."""
    path = directory / name
    path.write_text(textwrap.dedent(source))
    return path


def launch_command(
    program: str | os.PathLike,
    *arguments: str,
    processes: int = 2,
    devices: int = 1,
    options: Sequence[str] = (),
) -> list[str]:
    """The command line of `stratacl launch`."""
    return [
        *(sys.executable, "-P", "-m", "stratacl_jax", "launch"),
        *("-n", str(processes), "--devices-per-process", str(devices)),
        *options,
        *(os.fspath(program), *arguments),
    ]


def run_ranks(
    source: str,
    *arguments: str,
    directory: Path,
    processes: int = 2,
    devices: int = 1,
    options: Sequence[str] = (),
    **more,
) -> Result:
    """Runs a program, given as text, on ranks of this host."""
    path = script(directory, source)
    command = launch_command(
        path, *arguments, processes=processes, devices=devices, options=options
    )
    return run(command, **more)
