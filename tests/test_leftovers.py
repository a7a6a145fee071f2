"""What is left of jobs that were killed: nothing."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import procs
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

PROGRAM = Path(__file__).parent / "multiprocess" / "endless.py"
ROUNDS = 12


def ranks_of(job: procs.Child) -> list[int]:
    """The processes of its two ranks, once they are there."""
    end = time.monotonic() + 60
    while True:
        found = procs.marked_processes(job.mark)
        pids = [pid for pid, command in found.items() if "_launched.py" in command]
        if len(pids) == 2:
            return pids
        assert time.monotonic() < end, found
        time.sleep(0.02)


def arenas(pid: int | str) -> set[str]:
    """Device and inode of each arena that a process maps or holds open."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:stratacl-arena" in line:
                found.add(line.split()[4])
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:stratacl-arena" in os.readlink(entry):
                    found.add(str(entry.stat().st_ino))
    return found


def all_arenas() -> set[str]:
    return set().union(
        *(arenas(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())
    )


def named_things(pid: int) -> list[str]:
    """Shared files, and the fabric's sockets, that a process has."""
    found = []
    maps = Path(f"/proc/{pid}/maps").read_text()
    found += re.findall(r"/dev/shm/\S*|/\S*strata\S*\.(?:sock|shm)\S*", maps)
    sockets = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7:
            sockets[f"socket:[{words[6]}]"] = words[7]
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("/dev/shm/"):
                found.append(target)
            if sockets.get(target, "").startswith("@stratacl-"):
                found.append(sockets[target])
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Jobs:
    """Starts jobs with a directory of their own for temporary files."""

    def __init__(self, directory: Path):
        self._directory = directory
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        self.end = directory / "end"

    def start(
        self, rest: float = 0.0
    ) -> contextlib.AbstractContextManager[procs.Child]:
        return procs.start(
            procs.launch_command(
                PROGRAM, str(self.end), str(rest), options=["--grace", "1"]
            ),
            deadline=240,
            env={"TMPDIR": str(self.scratch)},
            cwd=self.scratch,
        )

    def files(self) -> list[str]:
        return sorted(str(p) for p in self.scratch.rglob("*"))


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)


def strata_files() -> set[str]:
    places = ("/dev/shm", "/tmp", "/run", "/var/tmp")
    return {
        os.path.join(place, name)
        for place in places
        if os.path.isdir(place)
        for name in os.listdir(place)
        if "strata" in name.lower()
    }


def test_killed_in_the_middle_and_started_again(jobs):
    before = strata_files()
    lost: set[str] = set()
    with contextlib.ExitStack() as stack:
        # A second job of the same user runs all the while and sees nothing of it.
        other = stack.enter_context(jobs.start(rest=0.02))
        job = stack.enter_context(jobs.start())
        other.wait_for("summing", 2)
        own = set().union(*map(arenas, ranks_of(other)))
        assert own
        for number in range(ROUNDS):
            job.wait_for("summing", 2)
            time.sleep(random.random() * 0.1)
            pids = ranks_of(job)
            assert not [thing for pid in pids for thing in named_things(pid)]
            found = set().union(*map(arenas, pids))
            # Two arenas, and nobody else has them.
            assert len(found) >= 2 and not found & own, (found, own)
            lost |= found
            everything = number % 3 == 2
            kill([job.pid, *pids] if everything else pids)
            killed, job = job, stack.enter_context(jobs.start())  # at once
            result = killed.wait(within=30)  # fails if processes are left
            # timeout(1) ends itself as the launcher was ended.
            assert result.code == (-9 if everything else 137), result
        kill(ranks_of(job))
        job.wait(within=60)
        assert not lost & all_arenas()
        jobs.end.touch()
        result = other.wait(within=60)
        assert result.code == 0 and result.out.count("] sums ") == 2, result
    assert not (lost | own) & all_arenas()
    assert not jobs.files()
    assert strata_files() <= before


def test_killed_while_it_starts(jobs):
    before = strata_files()
    for number in range(6):
        with jobs.start() as job:
            time.sleep(0.3 + 0.35 * number)
            kill(ranks_of(job))
            result = job.wait(within=30)
            assert result.code == 137, result
    assert not jobs.files()
    assert strata_files() <= before
