"""Who may hold XLA's memory and for how long: past arrays, programs, the fabric, forks.

The programs are in tests/multiprocess; they compare every value with numpy's.
"""

from __future__ import annotations

import sys

import pytest
from test_registration import all_ok, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")


@pytest.mark.parametrize("processes, devices", [(2, 1), (1, 2)])
def test_arrays(processes, devices):
    result = run("lifetimes.py", processes=processes, devices=devices)
    all_ok(result, 12, processes)


@pytest.mark.parametrize("processes, devices, cases", [(2, 1, 4), (1, 2, 3)])
def test_leaving_and_joining_again(tmp_path, processes, devices, cases):
    result = run(
        *("lifetimes_restart.py", "restart", tmp_path),
        processes=processes,
        devices=devices,
    )
    all_ok(result, cases, processes)


def test_forks(tmp_path):
    all_ok(run("lifetimes_restart.py", "fork", tmp_path), 5, 2)
