"""`stratacl bench`: the collectives against stock JAX, in one run."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator

import click

from stratacl_jax.bench import cases, crowd, layout, report, sweep
from stratacl_jax.runtime import cpus


class _Size(click.ParamType):
    name = "size"

    def convert(
        self,
        value: str | int,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            return cases.parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_SIZE = _Size()
_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)


@click.command()
@click.argument("ops", nargs=-1, required=True, metavar="OPS...")
@click.option("--ranks", type=int, help="Number of ranks.  [default: 2]")
@click.option(
    "-b", "--begin", type=_SIZE, default="64", show_default=True, help="Smallest size."
)
@click.option(
    "-e", "--end", type=_SIZE, default="64M", show_default=True, help="Largest size."
)
@click.option(
    "-f",
    "--factor",
    type=click.IntRange(min=2),
    default=8,
    show_default=True,
    help="Factor between sizes.",
)
@click.option(
    "--also",
    default="1M",
    show_default=True,
    metavar="SIZES",
    help="Further sizes, separated by commas, where they lie between the smallest "
    "and the largest; none for none.",
)
@click.option(
    "--vs",
    default="gloo,inprocess",
    show_default=True,
    metavar="PEERS",
    help="Peers, separated by commas: gloo (stock JAX, a process for each rank), "
    "inprocess (stock JAX, one process); none for none.",
)
@click.option(
    "--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True
)
@click.option(
    "--layout",
    "layout_text",
    default="processes",
    show_default=True,
    metavar="processes|devices|PxD",
    help="Our ranks: a process each, devices of one process, or P processes of "
    "D devices.",
)
@click.option("--single", is_flag=True, help="One collective in each jitted call.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True),
    help="Write one line of JSON for each cell to this file.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Turns of each implementation.",
)
@click.option(
    "--iters",
    default="auto",
    show_default=True,
    help="Timed programs in a turn; auto fits them to about 0.1 s.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Deadline of any single step of any implementation, seconds.",
)
def bench(
    ops: tuple[str, ...],
    ranks: int | None,
    begin: int,
    end: int,
    factor: int,
    also: str,
    vs: str,
    dtype: str,
    layout_text: str,
    single: bool,
    json_path: str | None,
    rounds: int,
    iters: str,
    timeout: float,
) -> None:
    """Times OPS against stock JAX: psum, all_gather, psum_scatter, ppermute.

    Sizes are bytes with K, M or G for powers of 1024, as in nccl-tests. Every
    implementation has its own live processes; they take turns on the same
    cores, case by case. All values are checked against numpy in the same run:
    a wrong or a missing cell ends in exit code 1.
    """
    try:
        options = sweep.Options(
            layout=_layout(layout_text, ranks),
            peers=_peers(vs),
            dtype=dtype,
            single=single,
            rounds=rounds,
            iterations=None if iters == "auto" else _positive(iters),
            timeout_s=timeout,
        )
        sizes = cases.sweep(begin, end, factor, _sizes(also))
        plan = sweep.plan(ops, sizes, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    bad: list[sweep.Cell] = []
    ours: list[sweep.Cell] = []
    with contextlib.ExitStack() as stack:
        out: io.TextIOBase | None = None
        if json_path:
            try:
                out = stack.enter_context(open(json_path, "w", buffering=1))
            except OSError as error:
                raise click.UsageError(f"--json: {error}") from None
        turns = len(plan) * (1 + len(options.peers)) * (2 + rounds)
        for line in report.preamble(options, cpus.affinity_cpus()):
            click.echo(line)
        echo, on_turn = stack.enter_context(_progress(turns))
        run = stack.enter_context(sweep.Sweep(options))
        op = None
        for cells in run.cells(plan, on_turn):
            lines = report.rows(cells, options)
            if cells[0].case.op != op:
                op = cells[0].case.op
                lines = report.header(op, options) + lines
            for line in lines:
                echo(line)
            if out:
                for cell in cells:
                    out.write(report.json_line(cell, options) + "\n")
            ours.append(cells[0])
            bad += [cell for cell in cells if not cell.good]
        others = run.others()
    for line in report.counters(ours):
        click.echo(line)
    if others is not None and others > crowd.CROWDED:
        click.echo(
            f"\n# Others kept {others:.2f} of {os.cpu_count()} cores busy meanwhile: "
            "times say little, sleeps are too many."
        )
    if bad:
        _explain(bad)
        sys.exit(1)
    click.echo("\n# 0 wrong")


def _explain(bad: list[sweep.Cell]) -> None:
    for error in dict.fromkeys(cell.error for cell in bad if cell.error):
        click.echo("\n" + error, err=True)
    for cell in bad:
        what = "no result" if cell.error else f"{cell.wrong} wrong elements"
        case = cell.case
        click.echo(f"{cell.impl}: {case.op} {case.bytes} B: {what}", err=True)


def _layout(text: str, ranks: int | None) -> layout.Layout:
    if ranks is None and "x" not in text:
        ranks = 2
    return layout.parse(text, ranks)


def _peers(text: str) -> tuple[str, ...]:
    peers = tuple(dict.fromkeys(p.strip() for p in text.split(",") if p.strip()))
    if peers == ("none",):
        return ()
    for peer in peers:
        if peer not in sweep.PEERS:
            raise ValueError(
                f"unknown peer {peer!r}; known: {', '.join(sweep.PEERS)}, none"
            )
    return peers


def _sizes(text: str) -> list[int]:
    if text.strip() == "none":
        return []
    return [cases.parse_size(part) for part in text.split(",")]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"--iters {text!r}: auto or a positive number")
    return int(text)


@contextlib.contextmanager
def _progress(
    turns: int,
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(print a line, announce a turn); a bar only where somebody looks."""
    if not sys.stderr.isatty():
        yield click.echo, lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn())
    # Two refreshes a second: the bar must not steal the cores it measures.
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2
    ) as progress:
        task = progress.add_task("starting", total=turns)

        def on_turn(what: str) -> None:
            progress.update(task, advance=1, description=what)

        def echo(line: str) -> None:
            if sys.stdout.isatty():
                progress.console.print(line, markup=False, highlight=False)
            else:
                click.echo(line)

        yield echo, on_turn
