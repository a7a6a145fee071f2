"""Which call meets which: programs in which ranks are easily paired wrongly.

The programs are in tests/multiprocess; they compare every value with numpy's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import procs
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

PROGRAMS = Path(__file__).parent / "multiprocess"


def run(
    program: str, *arguments: object, processes: int = 2, **options
) -> procs.Result:
    env = options.pop("env", None)
    command = procs.launch_command(
        PROGRAMS / program, *map(str, arguments), processes=processes, **options
    )
    result = procs.run(command, deadline=180, env=env)
    assert result.code == 0, result
    return result


def all_ok(result: procs.Result, cases: int, processes: int) -> None:
    assert result.out.count("] ok ") == cases * processes, result


CASES = 13
PRESSURE = 7


@pytest.mark.parametrize("processes, devices", [(4, 1), (1, 4), (2, 2)])
def test_programs(processes, devices):
    # (2, 1) is test_warm_cache's first run.
    result = run("matching.py", processes=processes, devices=devices)
    all_ok(result, CASES, processes)


@pytest.mark.parametrize(
    "processes, devices", [(1, 2), (1, 8), (1, 16), (8, 1), (4, 4)]
)
def test_independent_calls_in_other_layouts(processes, devices):
    names = ["independent_calls", "independent_calls_on_two_groups", "inner_jit_twice"]
    result = run("matching.py", *names, processes=processes, devices=devices)
    all_ok(result, len(names), processes)


def hits_and_misses(result: procs.Result, rank: int) -> tuple[int, int]:
    words = [
        line.split()[2]
        for line in result.out.splitlines()
        if line.startswith((f"[{rank}] hits ", f"[{rank}] misses "))
    ]
    return int(words[0]), int(words[1])


def cache_at(directory: Path) -> dict[str, str]:
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def test_warm_cache(tmp_path):
    # One rank loads what the other compiles.
    for warm in (False, True):
        result = run("cached.py", "own-keys", env=cache_at(tmp_path))
        all_ok(result, CASES, 2)
        hits, misses = hits_and_misses(result, 0)
        assert (hits >= 12 and misses == 0) if warm else misses >= 12, result


def test_warm_cache_on_all_ranks(tmp_path):
    names = [
        "inner_jit_twice",
        "scan_unrolled",
        "conditional",
        "independent_calls",
        "compiled_twice_ahead_of_time",
    ]
    for warm in (False, True):
        result = run("cached.py", "one-key", *names, env=cache_at(tmp_path))
        all_ok(result, len(names), 2)
        if warm:
            for rank in range(2):
                hits, misses = hits_and_misses(result, rank)
                assert hits >= 5 and misses == 0, result


@pytest.mark.parametrize(
    "flags",
    [
        "--xla_disable_hlo_passes=cse",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    ],
)
def test_different_flags(tmp_path, flags):
    result = run("flags.py", flags, tmp_path)
    assert result.out.count("] ok") == 2, result
    # Calls that have no copies are right whatever the compiler does.
    assert "[0] different_source_lines right" in result.out, result
    assert "[0] inner_jit_twice Mismatch" in result.out, result


@pytest.mark.parametrize("processes, devices", [(2, 1), (1, 4), (2, 2)])
def test_posts_far_ahead_of_their_readers(processes, devices):
    result = run("pressure.py", processes=processes, devices=devices)
    all_ok(result, PRESSURE, processes)
