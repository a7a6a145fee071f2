"""XLA's buffers are fabric memory: where they lie, who reads them, what outlives what.

The programs are in tests/multiprocess; they compare every value with numpy's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import procs
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

PROGRAMS = Path(__file__).parent / "multiprocess"


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> dict[str, str]:
    """The environment of programs that use `probe`, the library being built."""
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-shared", "-fPIC"),
            *("-isystem", jax.ffi.include_dir()),
            *("-o", str(library), str(PROGRAMS / "probe.cc")),
        ],
        check=True,
        timeout=120,
    )
    return {"TEST_PROBE_LIBRARY": str(library)}


def run(program: str, *arguments: object, env=None, **options) -> procs.Result:
    command = procs.launch_command(PROGRAMS / program, *map(str, arguments), **options)
    result = procs.run(command, deadline=240, env=env)
    assert result.code == 0, result
    return result


def all_ok(result: procs.Result, cases: int, processes: int) -> None:
    assert result.out.count("] ok ") == cases * processes, result


@pytest.mark.parametrize("processes, devices", [(2, 1), (2, 2)])
def test_interception(processes, devices):
    result = run("registration.py", "here", processes=processes, devices=devices)
    all_ok(result, 8, processes)


def test_modes():
    all_ok(run("registration.py", "modes"), 1, 2)


def test_joining_with_odd_settings():
    result = run("registration_settings.py")
    all_ok(result, 7, 2)
    assert "a jaxlib from a test" in result.err, result


def test_share_that_is_read_in_place(probe):
    all_ok(run("registration_share.py", env=probe), 2, 2)


@pytest.mark.parametrize("processes, devices", [(2, 1), (1, 2)])
def test_slow_reader(probe, processes, devices):
    result = run(
        *("registration_exit.py", 8, 0.02),
        env=probe,
        processes=processes,
        devices=devices,
    )
    all_ok(result, 7, processes)


def test_stopped_reader(probe, tmp_path):
    all_ok(run("registration_exit.py", 3, 0.1, tmp_path, env=probe), 7, 2)


@pytest.mark.parametrize("processes", [2, 3])
def test_quarantine(tmp_path, processes):
    run("registration_quarantine.py", tmp_path, processes=processes)


LAYOUTS = [(2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("processes, devices", LAYOUTS)
def test_random_stress(processes, devices):
    run("remap_stress.py", 6, 1, processes=processes, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("processes, devices", LAYOUTS)
def test_random_stress_for_a_minute(processes, devices):
    run("remap_stress.py", 60, 2, processes=processes, devices=devices)
