"""`stratacl bench`: its arithmetic, its children, and the command as a whole."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import click.testing
import ml_dtypes
import numpy as np
import procs
import pytest

from stratacl_jax.bench import bench, cases, layout, report, sweep
from stratacl_jax.bench.children import ChildFailed, RankSet, environment

WORKER = "stratacl_jax.bench.worker"
RANKS = (1, 2, 3, 8, 64)
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint64",
)


# --- sizes and layouts ---


@pytest.mark.parametrize(
    "text, size",
    [("64", 64), ("4K", 4096), ("64M", 64 << 20), ("1g", 1 << 30), ("2KiB", 2048)],
)
def test_parse_size(text: str, size: int) -> None:
    assert cases.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-4", "4.5K", "4T", "K", "64 bytes"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        cases.parse_size(text)


def test_sweep_ends_at_the_end() -> None:
    assert cases.sweep(64, 4096, 8) == [64, 512, 4096]
    assert cases.sweep(64, 5000, 8) == [64, 512, 4096, 5000]
    assert cases.sweep(64, 64, 8) == [64]
    assert cases.sweep(64, 4096, 8, [32, 1000, 512, 8192]) == [64, 512, 1000, 4096]
    with pytest.raises(ValueError):
        cases.sweep(64, 32, 8)


def test_layouts() -> None:
    assert layout.parse("processes", 4) == layout.Layout(4, 1)
    assert layout.parse("devices", 4) == layout.Layout(1, 4)
    assert layout.parse("2x3", None) == layout.Layout(2, 3)
    for text, ranks in (("2x3", 4), ("pods", 2), ("0x2", None), ("processes", 65)):
        with pytest.raises(ValueError):
            layout.parse(text, ranks)


def test_sizes_are_those_of_nccl_tests() -> None:
    case = cases.make("psum", 4096, "float32", 4, single=False, cores=4)
    assert (case.count, case.bytes, case.bus_factor) == (1024, 4096, 1.5)
    case = cases.make("all_gather", 4096, "float32", 4, single=False, cores=4)
    assert (case.count, case.bytes, case.bus_factor) == (256, 4096, 0.75)
    case = cases.make("ppermute", 4095, "float32", 4, single=True, cores=4)
    assert (case.count, case.bytes, case.chain) == (1023, 4092, 1)
    case = cases.make("psum_scatter", 4096, "float32", 3, single=True, cores=4)
    assert (case.count, case.bytes, case.result_bytes) == (1023, 4092, 1364)
    assert case.bus_factor == pytest.approx(2 / 3)
    # One element at least, for each rank where it is dealt out.
    assert cases.make("all_gather", 64, "float64", 16, single=True, cores=4).count == 1
    many = cases.make("psum_scatter", 64, "float64", 16, single=True, cores=4)
    assert many.count == 16


# --- data and expected values ---


def total(x: list[np.ndarray]) -> np.ndarray:
    """The sum in the order of the ranks, as the types demand it."""
    kind = x[0].dtype
    wide = np.float32 if kind.kind not in "iu" and kind.itemsize < 4 else kind
    result = x[0].astype(wide)
    for term in x[1:]:
        result = result + term.astype(wide)
    return result.astype(kind)


def simulate(case: cases.Case, seed: int) -> list[np.ndarray]:
    """The chain, call by call, in the arithmetic of its type."""
    n, head = case.ranks, case.head
    x = [cases.operand(case, rank, seed) for rank in range(n)]
    for _ in range(case.chain):
        if case.op == "psum":
            x = y = [total(x)] * n
        elif case.op == "ppermute":
            x = y = [x[rank - 1] for rank in range(n)]
        elif case.op == "psum_scatter":
            y = np.split(total(x), n)
            limit = np.asarray(cases.amplitude(case), x[0].dtype)
            for rank in range(n):
                start = (rank + 1) % n * (case.count // n)
                x[rank][start : start + head] = limit - x[rank][start : start + head]
        else:
            whole = np.concatenate(x)
            y = [whole] * n
            for rank in range(n):
                start = (rank + 1) % n * case.count
                x[rank] = x[rank].copy()
                x[rank][:head] = whole[start : start + head]
    return y


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_expected_values(op: str, dtype: str, ranks: int) -> None:
    blocks = ranks if op in ("all_gather", "psum_scatter") else 1
    size = 257 * np.dtype(dtype).itemsize * blocks
    case = cases.make(op, size, dtype, ranks, single=False, cores=64)
    results = simulate(case, 7)
    for rank in range(0, ranks, 1 + ranks // 4):
        want = cases.expected(case, rank, 7, case.chain)
        assert cases.count_wrong(case, results[rank], want, case.chain) == 0
        assert np.isfinite(want.astype(np.float64)).all()
        # One element off is found.
        got = results[rank].copy()
        got[123] = got[123] + np.asarray(1, got.dtype) if got[123] == 0 else 0
        assert cases.count_wrong(case, got, want, case.chain) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_psum_chain_stays_normal(dtype: str) -> None:
    case = cases.make("psum", 64 << 10, dtype, 2, single=False, cores=2)
    smallest = float(ml_dtypes.finfo(np.dtype(dtype)).smallest_normal)
    for values in (
        cases.operand(case, 0, 1),
        cases.expected(case, 0, 1, 1),
        cases.expected(case, 0, 1, case.chain),
    ):
        magnitudes = np.abs(values[values != 0].astype(np.float64))
        assert magnitudes.size and magnitudes.min() >= smallest


def test_small_psum_chains_are_long() -> None:
    assert cases.make("psum", 64, "float32", 2, single=False, cores=2).chain == 100


def test_missing_or_misshapen_results_are_wrong() -> None:
    case = cases.make("psum", 64, "float32", 2, single=True, cores=2)
    want = cases.expected(case, 0, 1, 1)
    assert cases.count_wrong(case, want[:-1], want, 1) == 16
    assert cases.count_wrong(case, np.full_like(want, np.nan), want, 1) == 16


def test_a_stale_result_is_wrong() -> None:
    """A call that does nothing leaves the result of the one before."""
    for op in cases.OPS:
        case = cases.make(op, 4096, "float32", 2, single=False, cores=2)
        want = cases.expected(case, 0, 1, case.chain)
        stale = cases.expected(case, 0, 1, case.chain - 1)
        assert cases.count_wrong(case, stale, want, case.chain) > 0


# --- report ---


def make_cell(impl: str = "stratacl", **fields: object) -> sweep.Cell:
    case = cases.make("psum", 1 << 20, "float32", 4, single=False, cores=4)
    values = {"times_us": (90.0, 100.0, 500.0), "iterations": 3, "wrong": 0}
    return sweep.Cell(case, impl, layout.Layout(4, 1), **{**values, **fields})


OPTIONS = sweep.Options(layout.Layout(4, 1), ("gloo",))


def test_bandwidths() -> None:
    cell = make_cell()
    assert cell.time_us == 100.0
    assert cell.algbw == pytest.approx((1 << 20) / 100e-6 / 1e9)
    assert cell.busbw == pytest.approx(cell.algbw * 1.5)


def test_json_line() -> None:
    record = json.loads(report.json_line(make_cell(), OPTIONS))
    wanted = {"op", "bytes", "dtype", "ranks", "layout", "impl"}
    wanted |= {"time_us", "algbw", "busbw", "wrong"}
    assert wanted <= record.keys()
    assert (record["layout"], record["min_us"], record["max_us"]) == ("4x1", 90, 500)
    record = json.loads(report.json_line(make_cell(wrong=None, error="no"), OPTIONS))
    assert record["time_us"] is None and record["error"] == "no"


def test_rows_show_ratios() -> None:
    peer = make_cell("gloo", times_us=(250.0,))
    first, second = report.rows([make_cell(copy_us=50.0), peer], OPTIONS)
    assert first.split()[-2:] == ["2.50x", "50.00"] and "x" not in second
    first, second = report.rows([make_cell(), make_cell("gloo", error="x")], OPTIONS)
    assert first.split()[-2:] == ["-", "-"] and second.endswith("failed")


def test_counters_are_shown() -> None:
    names = ("deferred", "sleeps", "wakes", "page_faults")
    names += ("eager_bytes", "staged_bytes", "direct_bytes")
    gained = dict.fromkeys(names, 0.25) | {"staged_bytes": 4096.0}
    cell = make_cell(counters=gained)
    *_, row = report.counters([cell, make_cell(error="no")])
    assert row.split() == ["psum", "1048576", *4 * ["0.250"], "0", "4096", "0"]
    record = json.loads(report.json_line(cell, OPTIONS))
    assert record["per_call"]["staged_bytes"] == 4096


def test_columns_line_up() -> None:
    cell = make_cell(copy_us=50.0)
    lines = report.header("psum", OPTIONS)[2:]
    lines += report.rows([cell, make_cell("gloo")], OPTIONS)[:1]
    assert len({len(line) for line in lines}) == 1


# --- the command ---


class FakeSweep:
    """Stands in for the live processes; yields the cells it is given."""

    cells_of_case: list[sweep.Cell]

    def __init__(self, options: sweep.Options) -> None:
        del options

    def __enter__(self) -> FakeSweep:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def others(self) -> float:
        return 1.5

    def cells(self, plan: object, on_turn: object) -> Iterator[list[sweep.Cell]]:
        del plan, on_turn
        yield self.cells_of_case


@pytest.mark.parametrize(
    "cell, code, text",
    [
        (make_cell(), 0, "# 0 wrong"),
        (make_cell(wrong=3), 1, "3 wrong elements"),
        (make_cell(wrong=None, error="process 1 died"), 1, "process 1 died"),
    ],
)
def test_exit_code(
    cell: sweep.Cell, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "Sweep", FakeSweep)
    FakeSweep.cells_of_case = [cell]
    arguments = ["psum", "--ranks", "4", "--vs", "none"]
    result = click.testing.CliRunner().invoke(bench, arguments)
    assert result.exit_code == code
    assert text in result.output
    assert "Others kept 1.50 of" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["reduce_everything"],
        ["psum", "-b", "big"],
        ["psum", "-b", "1M", "-e", "1K"],
        ["psum", "--vs", "nccl"],
        ["psum", "--layout", "3x2", "--ranks", "4"],
        ["psum", "--ranks", "1000"],
        ["psum", "--iters", "0"],
        ["psum", "--dtype", "complex64"],
        ["psum", "--also", "1M,large"],
        ["psum", "--json", "/no/such/folder/file"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    result = click.testing.CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


COMMAND = (sys.executable, "-P", "-m", "stratacl_jax", "bench")
QUICK = ("-f", "1024", "--rounds", "1", "--iters", "2")


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", "2", "--vs", "gloo,inprocess"),
        ("--layout", "devices", "--ranks", "3", "--vs", "inprocess", "--single"),
        ("--layout", "2x2", "--vs", "none", "--dtype", "bfloat16"),
    ],
)
def test_run(options: tuple[str, ...], tmp_path) -> None:
    out = tmp_path / "cells.jsonl"
    result = procs.run(
        [*COMMAND, *cases.OPS, "-e", "64K", *QUICK, "--json", str(out), *options],
        deadline=150,
    )
    assert result.code == 0, result
    assert result.err == ""  # no bar where nobody looks
    records = [json.loads(line) for line in out.read_text().splitlines()]
    peers = options[options.index("--vs") + 1].split(",")
    implementations = 1 if peers == ["none"] else 1 + len(peers)
    assert len(records) == len(cases.OPS) * 2 * implementations
    for record in records:
        assert record["wrong"] == 0
        assert record["time_us"] > 0 and math.isfinite(record["busbw"])
    ours = [r["per_call"] for r in records if r["impl"] == "stratacl"]
    assert len(ours) == len(cases.OPS) * 2
    for counters in ours:  # each operand went one way
        names = ("eager_bytes", "staged_bytes", "direct_bytes")
        assert sorted(counters[name] > 0 for name in names) == [False, False, True]


# Runs in place of the bench's worker, with a psum of ours that is not one.
SABOTEUR = """
import types
import jax
from stratacl_jax.bench import serve, worker

real = worker.collectives

def collectives(impl):
    ops = real(impl)
    if impl != "ours":
        return ops
    return types.SimpleNamespace(psum=lambda x, axis: {psum}, ledger=ops.ledger)

worker.collectives = collectives
serve.serve(worker.make_handlers)
"""


@pytest.mark.parametrize(
    "psum, text, wrong",
    [
        # One element of rank 0's result. In a chain it spoils rank 1's as well:
        # 1 after the single call, 2 after the first chain, 2 after the last.
        (
            "ops.psum(x, axis).at[5].add(1 - jax.lax.axis_index(axis))",
            "stratacl: psum 64 B: 5 wrong elements",
            5,
        ),
        ("x + x", "XLA left 0 of 1 collectives", None),
    ],
)
def test_wrong_cells_are_found(
    psum: str, text: str, wrong: int | None, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saboteur.py").write_text(SABOTEUR.format(psum=psum))
    others = procs.environment()["PYTHONPATH"].split(os.pathsep)
    path = os.pathsep.join(filter(None, [str(tmp_path), *others]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(sweep, "_WORKER", "saboteur")
    out = tmp_path / "cells.jsonl"
    arguments = ["psum", "-e", "64", *QUICK, "--vs", "gloo", "--json", str(out)]
    result = click.testing.CliRunner().invoke(bench, arguments)
    assert result.exit_code == 1, result.output
    assert text in result.output
    ours, gloo = (json.loads(line) for line in out.read_text().splitlines())
    assert (ours["wrong"], gloo["wrong"]) == (wrong, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    arguments = ["psum", "-e", "64M", "-f", "1024"]
    with procs.start([*COMMAND, *arguments], deadline=100) as child:
        child.wait_for("inprocess  ")  # a row: all have started
        child.signal(number)
        result = child.wait(within=20)
    assert result.code != 0
    assert "Traceback" not in result.err, result


# --- the children ---


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture
def ranks() -> Iterator[RankSet]:
    rank_set = RankSet("gloo", WORKER, "stock", layout.Layout(2, 1), life_s=120)
    with rank_set:
        rank_set.call("hello", timeout_s=60)
        case = cases.make("psum", 64, "float32", 2, single=True, cores=2)
        rank_set.call("prepare", timeout_s=60, case=case.asdict())
        yield rank_set
    assert gone(rank_set.pids)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("STRATACL_PROCESS_ID", "1")
    monkeypatch.setenv("NPROC", "3")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=9 --a=b")
    env = environment(layout.Layout(2, 4))
    assert "SLURM_PROCID" not in env and "STRATACL_PROCESS_ID" not in env
    assert (env["NPROC"], env["JAX_NUM_CPU_DEVICES"]) == ("10", "4")
    assert env["XLA_FLAGS"] == "--a=b"


RUN = {"iterations": 3, "discard": 1}


def test_children_answer(ranks: RankSet) -> None:
    for _ in range(3):
        replies = ranks.call("run", timeout_s=60, **RUN)
        assert len(replies) == 2
        assert all(reply["program_s"] > 0 for reply in replies)
    assert all(seconds > 0 for seconds in ranks.call("copy", timeout_s=60, seconds=0))


def test_child_that_raises(ranks: RankSet) -> None:
    with pytest.raises(ChildFailed, match=r"(?s)TypeError.*Traceback"):
        ranks.call("run", timeout_s=60, iterations="many", discard=0)
    assert gone(ranks.pids)


def test_child_that_dies(ranks: RankSet) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(ChildFailed, match="process 1 .*died of signal 9"):
        ranks.call("run", timeout_s=60, **RUN)
    assert gone(ranks.pids)


def test_child_that_is_late(ranks: RankSet) -> None:
    os.kill(ranks.pids[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(ChildFailed, match="process 1 .*no answer within 1 s"):
        ranks.call("run", timeout_s=1, **RUN)
    assert time.monotonic() - start < 10
    assert gone(ranks.pids)


def test_children_die_with_their_parent() -> None:
    program = (
        "import os, signal\n"
        "from stratacl_jax.bench.children import RankSet\n"
        "from stratacl_jax.bench.layout import Layout\n"
        f"s = RankSet('gloo', '{WORKER}', 'stock', Layout(2, 1), life_s=60)\n"
        "s.call('hello', timeout_s=60)\n"
        "print(*s.pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 10
    while not gone(pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert gone(pids)
