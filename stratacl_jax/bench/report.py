"""The benchmark's output: nccl-tests' columns, and one JSON line a cell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stratacl_jax.bench.sweep import OURS, Cell, Options

_COLUMNS = (
    ("size", 11),
    ("count", 11),
    ("type", 9),
    ("impl", 10),
    ("time", 11),
    ("algbw", 8),
    ("busbw", 8),
    ("#wrong", 7),
)
_UNITS = ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "")


def preamble(options: Options, cores: int) -> list[str]:
    """Lines that say what is measured and how."""
    how = (
        "one collective in each jitted call"
        if options.single
        else "time of a jitted program of K dependent, unrolled collectives, over K"
    )
    lines = [
        f"# {options.layout.ranks} ranks on {cores} cores; {OURS}: {options.layout} "
        "(processes x devices of each)",
        f"# {how}",
        f"# {options.rounds} rounds, the implementations taking turns; time: the "
        "slowest rank's median in a round, median over rounds",
        "# size: a rank's operand; for all_gather its whole result, as in nccl-tests",
    ]
    if options.peers:
        lines.append(f"# ratio: time of the peer / time of {OURS}")
    lines.append(
        "# memcpy: each rank, all at once, copies as many bytes as its result has, "
        "warm and private"
    )
    return lines


def header(op: str, options: Options) -> list[str]:
    """The two header lines above the rows of `op`."""
    names = [f"{name:>{width}}" for name, width in _COLUMNS]
    units = [f"{unit:>{w}}" for unit, (_, w) in zip(_UNITS, _COLUMNS, strict=True)]
    for peer in options.peers:
        width = max(len(peer) + 2, 9)
        names.append(f"{peer:>{width}}")
        units.append(f"{'(ratio)':>{width}}")
    names.append(f"{'memcpy':>9}")
    units.append(f"{'(us)':>9}")
    return ["", f"# {op}", "#" + "".join(names)[1:], "#" + "".join(units)[1:]]


def rows(cells: Sequence[Cell], options: Options) -> list[str]:
    """One line for each implementation of a case."""
    by_impl = {cell.impl: cell for cell in cells}
    lines = []
    for cell in cells:
        case = cell.case
        values: list[Any] = [case.bytes, case.count, case.dtype, cell.impl]
        if cell.error:
            lines.append(_join(values) + "    failed")
            continue
        values += [_number(cell.time_us), _number(cell.algbw), _number(cell.busbw)]
        values.append(cell.wrong)
        line = _join(values)
        if cell.impl == OURS:
            for peer in options.peers:
                other = by_impl[peer]
                text = "-" if other.error else f"{other.time_us / cell.time_us:.2f}x"
                line += f"{text:>{max(len(peer) + 2, 9)}}"
            text = "-" if cell.copy_us is None else _number(cell.copy_us)
            line += f"{text:>9}"
        lines.append(line)
    return lines


def counters(cells: Sequence[Cell]) -> list[str]:
    """A table of what does not depend on the machine's speed: the ledger's gain in
    each of `cells`. Cells without (peers, errors) are left out."""
    names = (
        *("op", "size", "sleeps", "wakes", "deferred", "faults"),
        *("eager", "staged", "direct"),
    )
    units = ("", "(B)", "", "", "", "", "(B)", "(B)", "(B)")
    widths = (13, 11, 8, 8, 9, 9, 11, 11, 11)
    lines = [
        "",
        f"# {OURS}, in each call of a rank: futex sleeps and wakes, calls handed to "
        "another thread,",
        "# page faults, and operand bytes by the way they went",
    ]
    for heads in (names, units):
        line = "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True))
        lines.append("#" + line[1:])
    keys = (
        *("sleeps", "wakes", "deferred", "page_faults"),
        *("eager_bytes", "staged_bytes", "direct_bytes"),
    )
    for cell in cells:
        if not cell.counters:
            continue
        values = [cell.case.op, str(cell.case.bytes)]
        for key in keys:
            value = cell.counters[key]
            values.append(f"{value:.0f}" if "bytes" in key else f"{value:.3f}")
        lines.append("".join(f"{v:>{w}}" for v, w in zip(values, widths, strict=True)))
    return lines


def json_line(cell: Cell, options: Options) -> str:
    """A cell as one line of JSON; times in microseconds, bandwidths in GB/s."""
    case = cell.case
    record: dict[str, Any] = {
        "op": case.op,
        "bytes": case.bytes,
        "count": case.count,
        "dtype": case.dtype,
        "ranks": case.ranks,
        "layout": str(cell.layout),
        "impl": cell.impl,
        "mode": "single" if options.single else "chain",
        "chain": case.chain,
    }
    if cell.error:
        record |= dict.fromkeys(("time_us", "algbw", "busbw", "wrong"))
        record["error"] = cell.error
    else:
        record |= {
            "time_us": round(cell.time_us, 4),
            "algbw": round(cell.algbw, 6),
            "busbw": round(cell.busbw, 6),
            "wrong": cell.wrong,
            "min_us": round(min(cell.times_us), 4),
            "max_us": round(max(cell.times_us), 4),
            "rounds": len(cell.times_us),
            "iterations": cell.iterations,
        }
    if cell.counters:
        record["memcpy_us"] = cell.copy_us and round(cell.copy_us, 4)
        record["per_call"] = {k: round(v, 6) for k, v in cell.counters.items()}
    return json.dumps(record)


def _join(values: Sequence[Any]) -> str:
    columns = zip(values, _COLUMNS, strict=False)
    return "".join(f"{value:>{width}}" for value, (_, width) in columns)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}"
