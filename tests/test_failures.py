"""Ranks that die, stop, come late or call something else.

The programs are in tests/multiprocess; they check what each rank sees.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import procs
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

PROGRAMS = Path(__file__).parent / "multiprocess"
# Time for the survivors of a killed rank to tell what they saw.
PATIENCE = ["--grace", "120"]


def run(program: str, *arguments: object, processes: int, **options) -> procs.Result:
    command = procs.launch_command(
        PROGRAMS / program,
        *map(str, arguments),
        processes=processes,
        options=PATIENCE,
        **options,
    )
    result = procs.run(command, deadline=180)
    print(result.out)  # figures, for who wants to see them (pytest -s, or -rP)
    return result


FAULT_POINTS = {
    "before_post": 1,
    "after_post": 2,
    "mid_stages": 3,
    "before_ack": 4,
    "after_ack": 5,
    "abort_requested": 6,
}


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_killed(tmp_path, point):
    # Three times three ranks, of which one dies: rank 0 first.
    result = run("kills.py", FAULT_POINTS[point], tmp_path, processes=5)
    assert result.code == 128 + 9, result  # of the first that died
    assert result.out.count("PeerLost") == 6, result
    for survivor in (1, 3):
        assert f"[{survivor}] ok" in result.out, result


def test_stopped_past_the_deadline(tmp_path):
    result = run("stops.py", "past", tmp_path, processes=3)
    assert result.code == 0 and result.out.count("] ok") == 3, result


def test_stopped_or_late_within_the_deadline(tmp_path):
    result = run("stops.py", "within", tmp_path, processes=3)
    assert result.code == 0 and result.out.count("] ok") == 3, result
    # Who waits for a late rank says so, once a wait.
    warning = r"\[(\d)\] stratacl: warn: rank \1 \(pid \d+\), {} over 3 ranks, .*waited"
    for operator in (
        r"psum of float32\[1,9\]",
        r"all_gather of float32\[1,9\]",
        r"psum_scatter of float32\[\d,3\]",
        "barrier",
    ):
        lines = re.findall(
            warning.format(operator) + r" [\d.]+ s for .*rank 1 \(pid", result.err
        )
        assert sorted(lines) == ["0", "2"], (operator, str(result))
    # Of a ring, only the late one's own reader waits for it.
    lines = re.findall(warning.format(r"ppermute of float32\[1,9\]"), result.err)
    assert lines == ["0"], result


def test_different_calls(tmp_path):
    result = run("mismatches.py", tmp_path, processes=3)
    assert result.code == 0 and result.out.count("] ok ") == 3 * 10, result


def test_what_an_abort_leaves_behind(tmp_path):
    result = run("aborts.py", tmp_path, processes=4)
    assert result.code == 128 + 9, result  # one dies at the end
    assert result.out.count("] ok") == 3, result


def test_deadlines_among_the_devices_of_one_process():
    result = run("one_process.py", processes=1, devices=4)
    assert result.code == 0 and result.out.count("] ok ") == 6, result
