"""Whether somebody else was using the cores while we measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

# Cores that others may use before the output says so.
CROWDED = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Crowd:
    """Processor time of this host, less that of a set of processes, since now.

    Args:
      pids: those that are meant to use the cores. They must outlive `cores()`.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = (os.getpid(), *pids)
        self._start = time.monotonic()
        self._all, self._own = _host_s(), self._own_s()

    def cores(self) -> float | None:
        """Cores that others kept busy, on average; None where nobody can tell."""
        if self._all is None or (now := _host_s()) is None:
            return None
        others = now - self._all - (self._own_s() - self._own)
        return max(0.0, others / max(time.monotonic() - self._start, 1e-3))

    def _own_s(self) -> float:
        return sum(map(_process_s, self._pids))


def _host_s() -> float | None:
    """Seconds of all cores in which they were not idle."""
    try:
        with open("/proc/stat") as file:
            # user nice system idle iowait irq softirq; no steal: that is not ours
            fields = [int(word) for word in file.readline().split()[1:8]]
    except (OSError, ValueError):
        return None
    return (sum(fields) - fields[3] - fields[4]) * _TICK_S


def _process_s(pid: int) -> float:
    """Processor seconds of a process, all its threads; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S
