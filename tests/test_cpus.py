"""Affinity and cgroup quotas, from made-up /proc and /sys trees."""

import os
from pathlib import Path

import pytest

from stratacl_jax.runtime import cpus

V2_MOUNT = "30 23 0:26 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = (
    "33 24 0:28 {top} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup "
    "rw,cpu,cpuacct\n34 24 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def v2(root: Path, group: str, limits: dict[str, str], top: str = "/") -> str:
    files = {f"sys/fs/cgroup/{at}/cpu.max": text for at, text in limits.items()}
    files["proc/self/cgroup"] = f"0::{group}\n"
    files["proc/self/mountinfo"] = V2_MOUNT.format(top=top)
    return tree(root, files)


@pytest.mark.parametrize(
    "limits, quota",
    [
        ({}, None),
        ({"a/b": "max 100000\n"}, None),
        ({"a/b": "150000 100000\n"}, 1.5),
        ({"a/b": "max 100000\n", "a": "50000 100000\n"}, 0.5),
        ({"a/b": "400000 100000\n", "a": "300000 100000\n"}, 3.0),
        ({"a/b": "what is this\n"}, None),
        ({"a/b": "100000 0\n"}, None),
    ],
)
def test_v2_walks_up(tmp_path, limits, quota):
    assert cpus.cgroup_quota(v2(tmp_path, "/a/b", limits)) == quota


@pytest.mark.parametrize("group", ["/", "/../..", "/docker/abc"])
def test_v2_in_a_container(tmp_path, group):
    """The container's group is mounted as the root of what is seen."""
    root = v2(tmp_path, group, {"": "200000 100000\n"}, top="/docker/abc")
    assert cpus.cgroup_quota(root) == 2.0


def test_v1(tmp_path):
    base = "sys/fs/cgroup/cpu,cpuacct"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job/7\n4:memory:/job\n0::/x\n",
            "proc/self/mountinfo": V1_MOUNT.format(top="/"),
            f"{base}/job/7/cpu.cfs_quota_us": "-1\n",
            f"{base}/job/7/cpu.cfs_period_us": "100000\n",
            f"{base}/job/cpu.cfs_quota_us": "250000\n",
            f"{base}/job/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpus.cgroup_quota(root) == 2.5


def test_nothing_to_read(tmp_path):
    assert cpus.cgroup_quota(str(tmp_path)) is None
    found = cpus.usable_cpus(str(tmp_path))
    assert found.usable == found.affinity == cpus.affinity_cpus() >= 1


@pytest.mark.parametrize(
    "affinity, quota, available, usable",
    [(8, None, 8.0, 8), (8, 2.9, 2.9, 2), (8, 0.3, 0.3, 1), (2, 16.0, 2.0, 2)],
)
def test_usable(affinity, quota, available, usable):
    found = cpus.Cpus(affinity, quota)
    assert found.available == available and found.usable == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_affinity_is_respected():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpus.usable_cpus().usable == 1
    finally:
        os.sched_setaffinity(0, before)
