"""`stratacl demo`: the same training on our collectives and on stock JAX."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stratacl_jax.bench import layout as layouts
from stratacl_jax.bench.children import ChildFailed, RankSet
from stratacl_jax.bench.crowd import CROWDED, Crowd
from stratacl_jax.runtime import cpus

_WORKER = "stratacl_jax.demo.worker"
_SEQUENCES = 8
# Both sides compute with the same numbers; what may differ is the order of
# rounding. A wrong sum shows in the first digits.
_TOLERANCE = 1e-4
_COMMUNICATION_MS = 250.0  # about a fourth of that measurement's time
_RESERVE_S = 5.0  # for it and for leaving, out of --max-seconds


@dataclasses.dataclass
class Run:
    """What one side did.

    Attributes:
      losses: of steps 0, 1, ...: nats a byte.
      step_ms: of the same steps, the slowest rank's.
      communication_ms: one psum of the gradients.
      others: cores that other processes of this host kept busy meanwhile.
      facts: sizes of the model and the text.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    communication_ms: float = 0.0
    others: float | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        """Of all steps but the first two, which warm up."""
        return statistics.median(self.step_ms[2:] or self.step_ms)


@click.command()
@click.option("--ranks", type=int, help="Number of ranks.  [default: 2]")
@click.option("--steps", type=click.IntRange(min=1), default=60, show_default=True)
@click.option(
    "--layout",
    "layout_text",
    default="processes",
    show_default=True,
    metavar="processes|devices|PxD",
    help="A process for each rank, devices of one process, or P processes of D "
    "devices; the same for both sides.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help=f"Sequences in a step, over all ranks; a multiple of them.  "
    f"[default: {_SEQUENCES}, or one a rank if that is more]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=30),
    default=170.0,
    show_default=True,
    help="Do fewer steps rather than take longer.",
)
def demo(
    ranks: int | None,
    steps: int,
    layout_text: str,
    batch: int | None,
    seed: int,
    max_seconds: float,
) -> None:
    """Trains a small transformer on this machine, twice.

    A language model over bytes (Flax nnx) learns the sources of Python's own
    standard library, data parallel, its gradients summed inside jit: first by
    this package's psum, then, same steps, seed and data, by stock JAX. Prints
    losses and times of both; exit code 1 if the losses differ by more than
    rounding.
    """
    for package in ("flax", "optax"):
        if importlib.util.find_spec(package) is None:
            raise click.ClickException(
                f"the demo needs {package}: pip install 'stratacl_jax[flax]'"
            )
    try:
        if ranks is None and "x" not in layout_text:
            ranks = 2
        layout = layouts.parse(layout_text, ranks)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    batch = batch or max(_SEQUENCES, layout.ranks)
    if batch % layout.ranks:
        raise click.UsageError(
            f"--batch {batch} cannot be split evenly over {layout.ranks} ranks"
        )
    start = time.monotonic()
    stock = "in-process" if layout.processes == 1 else "Gloo"
    try:
        console = Console(soft_wrap=not sys.stdout.isatty())
        runs: list[Run] = []
        with _Bars(console, steps) as bars:
            for name, impl, share in (
                ("stratacl", "ours", 0.45),
                (f"stock JAX ({stock})", "stock", 1.0),
            ):
                bars.begin(name)
                end = start + max_seconds * share - _RESERVE_S
                goal = len(runs[0].losses) if runs else steps
                run = train(name, impl, layout, goal, batch, seed, end, bars.show)
                runs.append(run)
    except ChildFailed as error:
        raise click.ClickException(str(error)) from None
    ours, theirs = runs
    agree = _print(console, layout, batch, seed, ours, theirs, stock)
    done = len(theirs.losses)
    if done < steps:
        console.print(f"Cut to {done} of {steps} steps: --max-seconds was used up.")
    console.print(f"{time.monotonic() - start:.0f} s in all")
    if not agree:
        sys.exit(1)


class _Bars:
    """A progress bar for each side; lines, now and then, where no terminal is."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        # Few refreshes: the bar must not steal the cores it looks at.
        self._progress = Progress(
            console=console, refresh_per_second=2, disable=not console.is_terminal
        )

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        self._name = name
        self._task = self._progress.add_task(f"{name}: compiling", total=self._steps)

    def show(self, done: int, loss: float) -> None:
        text = f"{self._name}: loss {loss:.3f}"
        self._progress.update(self._task, completed=done, description=text)
        if self._progress.disable and done % max(1, self._steps // 5) == 0:
            self._console.print(f"{text} after step {done} of {self._steps}")


def train(
    name: str,
    impl: str,
    layout: layouts.Layout,
    steps: int,
    sequences: int,
    seed: int,
    end: float,
    on_step: Callable[[int, float], None],
) -> Run:
    """Trains on one implementation's live ranks.

    Args:
      impl: "ours" or "stock".
      end: `time.monotonic()` at which no further step starts.
      on_step: called with (steps done, loss).

    Raises:
      ChildFailed: a rank failed or was late.
    """
    run = Run()

    def left(extra_s: float = 60.0) -> float:
        """The deadline of a request: a fault, not slowness, reaches it."""
        return max(1.0, end - time.monotonic()) + extra_s

    def on_event(process: int, event: dict[str, Any]) -> None:
        step = event["step"]
        if step == len(run.step_ms):
            run.step_ms.append(0.0)
        run.step_ms[step] = max(run.step_ms[step], event["ms"])
        if process == 0:
            run.losses.append(event["loss"])
            on_step(len(run.losses), event["loss"])

    life_s = left(120.0)
    with RankSet(name, _WORKER, impl, layout, life_s=life_s) as ranks:
        ranks.call("hello", timeout_s=left())
        run.facts = ranks.call(
            "setup", timeout_s=left(), sequences=sequences, seed=seed
        )[0]
        crowd = Crowd(ranks.pids)
        chunk = 1
        while len(run.losses) < steps:
            if run.losses and time.monotonic() + run.median_ms / 1e3 * chunk > end:
                break
            count = min(chunk, steps - len(run.losses))
            ranks.call(
                "steps",
                timeout_s=left(),
                on_event=on_event,
                first=len(run.losses),
                count=count,
            )
            chunk = 5
        repeats = 2
        for _ in range(2):  # the first only to see how many fill the time
            replies = ranks.call("communication", timeout_s=left(), repeats=repeats)
            run.communication_ms = max(replies)
            repeats = round(_COMMUNICATION_MS / run.communication_ms)
            repeats = max(3, min(200, repeats))
        run.others = crowd.cores()
    return run


def agreement(ours: Run, theirs: Run) -> float:
    """Largest relative difference of the losses over the steps both did."""
    pairs = zip(ours.losses, theirs.losses, strict=False)
    # A NaN loss agrees with nothing: max() alone would drop it.
    differences = [abs(a - b) / max(abs(a), abs(b)) for a, b in pairs]
    return max(differences) if all(d == d for d in differences) else float("inf")


def _print(
    console: Console,
    layout: layouts.Layout,
    batch: int,
    seed: int,
    ours: Run,
    theirs: Run,
    stock: str,
) -> bool:
    """Prints the result; True if the losses agree."""
    facts = ours.facts
    steps = min(len(ours.losses), len(theirs.losses))
    console.print(
        f"Transformer of {facts['parameters'] / 1e6:.2f} M parameters: "
        f"{facts['gradient_bytes'] / 1e6:.1f} MB of f32 gradients in "
        f"{facts['arrays']} arrays,\none psum a step. "
        f"{layout.ranks} ranks ({layout}: processes x devices) on "
        f"{cpus.affinity_cpus()} cores; each step\n{batch} sequences of "
        f"{facts['length']} bytes, seed {seed}, out of "
        f"{facts['text_bytes'] / 1e6:.1f} MB of Python's standard library\n"
        f"({facts['text_files']} files)."
    )
    table = Table()
    table.add_column("")
    for name in ("stratacl", f"stock JAX ({stock})", "stock / stratacl"):
        table.add_column(name, justify="right")
    shown = sorted({0, *range(steps // 4, steps, max(1, steps // 4)), steps - 1})
    for step in shown:
        a, b = ours.losses[step], theirs.losses[step]
        table.add_row(f"loss, step {step + 1}", f"{a:.6f}", f"{b:.6f}", "")
    table.add_section()
    for name, a, b in (
        ("step, ms", ours.median_ms, theirs.median_ms),
        ("communication, ms", ours.communication_ms, theirs.communication_ms),
    ):
        table.add_row(name, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}x")
    rates = [batch * facts["length"] / run.median_ms * 1e3 for run in (ours, theirs)]
    table.add_row("bytes of text a second", *(f"{rate:.0f}" for rate in rates), "")
    console.print(table)
    console.print(
        "step: median of all but the first two. communication: psum of a pytree\n"
        "like the gradients, median of programs of four dependent ones, over four;\n"
        "in a step it may overlap with work or wait for it."
    )
    others = max(run.others or 0.0 for run in (ours, theirs))
    if others > CROWDED:
        console.print(
            f"Other processes kept {others:.1f} cores busy meanwhile: times say little."
        )
    difference = agreement(ours, theirs)
    agree = difference <= _TOLERANCE
    verdict = "equal to rounding" if agree else "NOT EQUAL"
    console.print(
        f"Losses of {steps} steps: {verdict} (largest relative difference "
        f"{difference:.1e}, allowed {_TOLERANCE:.0e})."
    )
    return agree
