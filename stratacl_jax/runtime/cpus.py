"""How many processors this process may really use: affinity and cgroup quota.

A container that may run on 64 cores but is throttled to 2 must not spin as if it
had 64.
"""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Cpus:
    """The processors this process may use.

    Attributes:
      affinity: processors in the scheduler's mask.
      quota: processors' worth of time that the tightest cgroup above this process
        grants, or None if none limits it.
    """

    affinity: int
    quota: float | None

    @property
    def available(self) -> float:
        """Processors' worth of time, possibly a fraction."""
        limits = [self.affinity, self.quota or self.affinity]
        return float(min(limits))

    @property
    def usable(self) -> int:
        """Whole processors, at least 1: how many threads may spin at once."""
        return max(1, int(self.available))


def affinity_cpus() -> int:
    """Processors in this process's scheduler mask, at least 1."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no such call outside Linux
        return os.cpu_count() or 1


def usable_cpus(root: str = "/") -> Cpus:
    """The processors this process may use.

    Args:
      root: where /proc and /sys are found; tests set it.
    """
    return Cpus(affinity_cpus(), cgroup_quota(root))


def cgroup_quota(root: str = "/") -> float | None:
    """The tightest CPU quota of the cgroups above this process, in processors.

    Reads cgroup v2 (`cpu.max`) and v1 (`cpu.cfs_quota_us`), hybrids of the two
    included. What cannot be read limits nothing.
    """
    limits = []
    for controllers, path in _memberships(root):
        unified = not controllers
        if not unified and "cpu" not in controllers:
            continue
        for mount, top in _mounts(root, unified):
            limits += _limits_upward(root, mount, _below(path, top), unified)
    return min(limits, default=None)


def _memberships(root: str) -> list[tuple[list[str], str]]:
    """(controllers, path) of each line of /proc/self/cgroup; v2 has none."""
    result = []
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        fields = line.split(":", 2)
        if len(fields) == 3:
            result.append(([c for c in fields[1].split(",") if c], fields[2]))
    return result


def _mounts(root: str, unified: bool) -> list[tuple[str, str]]:
    """(mount point, the cgroup mounted there) of the wanted hierarchies."""
    result = []
    for line in _lines(os.path.join(root, "proc/self/mountinfo")):
        left, _, right = line.partition(" - ")
        fields, (kind, *_, options) = left.split(), right.split() or ["", ""]
        if len(fields) < 5:
            continue
        cpu_v1 = kind == "cgroup" and "cpu" in options.split(",")
        if kind == "cgroup2" if unified else cpu_v1:
            result.append((fields[4], fields[3]))
    return result


def _below(path: str, top: str) -> str:
    """`path` relative to the cgroup that is mounted, `top`.

    In a container, the mount often shows only the container's own group, and the
    process's path may lie outside it: then the mounted group is the one to read.
    """
    relative = os.path.relpath(path, top)
    return "" if relative.startswith("..") or relative == "." else relative


def _limits_upward(root: str, mount: str, path: str, unified: bool) -> list[float]:
    limits = []
    while True:
        group = os.path.join(root, mount.lstrip("/"), path)
        limit = _limit_v2(group) if unified else _limit_v1(group)
        if limit is not None:
            limits.append(limit)
        if not path:
            return limits
        path = os.path.dirname(path)


def _limit_v2(group: str) -> float | None:
    words = " ".join(_lines(os.path.join(group, "cpu.max"))).split()
    return _ratio(words[0], words[1]) if len(words) == 2 else None


def _limit_v1(group: str) -> float | None:
    quota = "".join(_lines(os.path.join(group, "cpu.cfs_quota_us")))
    period = "".join(_lines(os.path.join(group, "cpu.cfs_period_us")))
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    """None for "max", -1 and whatever is not a number."""
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []
