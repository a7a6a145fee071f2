"""Runs the cells of a benchmark: every implementation alternates in each round."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stratacl_jax.bench import cases
from stratacl_jax.bench.children import ChildFailed, RankSet
from stratacl_jax.bench.crowd import Crowd
from stratacl_jax.bench.layout import Layout
from stratacl_jax.runtime import cpus

OURS = "stratacl"
PEERS = ("gloo", "inprocess")
_WORKER = "stratacl_jax.bench.worker"
_START_S = 120.0
_COPY_S = 0.02  # of copying memory, in each round
# Below, the call of the copy costs more than the copy.
_COPY_BYTES = 64 << 10
_LEAST_ROUNDS = 3  # even where the time is up
# Untimed programs before the first round: memory that is new to a process must
# be faulted in, and ours is registered with the peers meanwhile.
_WARM_PROGRAMS, _WARM_S = 12, 2.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      layout: layout of our ranks; the peers have their own.
      peers: names out of `PEERS`.
      rounds: how often each implementation takes its turn.
      iterations: timed programs in a turn; None fits them to `turn_s`.
      turn_s: about how long a turn lasts, seconds.
      case_s: no further round of a case starts after this time, seconds.
      timeout_s: deadline of one request to one implementation, seconds.
    """

    layout: Layout
    peers: tuple[str, ...]
    dtype: str = "float32"
    single: bool = False
    rounds: int = 5
    iterations: int | None = None
    turn_s: float = 0.1
    case_s: float = 8.0
    timeout_s: float = 120.0


@dataclasses.dataclass(frozen=True)
class Cell:
    """One implementation's result for one case.

    Attributes:
      times_us: microseconds of one collective, one entry a round.
      wrong: wrong elements on all ranks, or None when `error` says why there
        is no result.
      copy_us: of our cells: microseconds in which each rank, all at once, copies
        as many bytes as its result has; None where that is too short to time.
      counters: of our cells: the ledger's gain in a call of one rank, mean.
    """

    case: cases.Case
    impl: str
    layout: Layout
    times_us: tuple[float, ...] = ()
    iterations: int = 0
    wrong: int | None = None
    error: str = ""
    copy_us: float | None = None
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def time_us(self) -> float:
        return statistics.median(self.times_us) if self.times_us else math.nan

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes): size over time."""
        return self.case.bytes / self.time_us / 1e3

    @property
    def busbw(self) -> float:
        """GB/s: algbw times nccl-tests' factor of the operator."""
        return self.algbw * self.case.bus_factor

    @property
    def good(self) -> bool:
        return self.wrong == 0 and not self.error


def plan(
    ops: Sequence[str], sizes: Sequence[int], options: Options
) -> list[cases.Case]:
    """The cases of a run, in the order in which they are measured."""
    return [
        cases.make(
            op,
            size,
            options.dtype,
            options.layout.ranks,
            single=options.single,
            cores=cpus.affinity_cpus(),
        )
        for op in ops
        for size in sizes
    ]


def layout_of(impl: str, options: Options) -> Layout:
    ranks = options.layout.ranks
    return {
        OURS: options.layout,
        "gloo": Layout(ranks, 1),
        "inprocess": Layout(1, ranks),
    }[impl]


class Sweep:
    """The live rank sets of all implementations. Use as a context manager."""

    def __init__(self, options: Options, life_s: float = 3600.0) -> None:
        self._options = options
        self._life_s = life_s
        self._stack = contextlib.ExitStack()
        self._sets: dict[str, RankSet] = {}
        self._dead: dict[str, str] = {}

    def __enter__(self) -> Sweep:
        options = self._options
        with contextlib.ExitStack() as stack:
            for impl in (OURS, *options.peers):
                self._sets[impl] = stack.enter_context(
                    RankSet(
                        impl,
                        _WORKER,
                        "ours" if impl == OURS else "stock",
                        layout_of(impl, options),
                        life_s=self._life_s,
                        x64=options.dtype.endswith("64"),
                    )
                )
            for impl in self._sets:
                self._call(impl, "hello", timeout_s=_START_S)
            self._crowd = Crowd(p for s in self._sets.values() for p in s.pids)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def others(self) -> float | None:
        """Cores kept busy by anybody else since the start; None if unknown."""
        return None if self._dead else self._crowd.cores()

    def cells(
        self,
        plan: Sequence[cases.Case],
        on_turn: Callable[[str], None] = lambda _: None,
    ) -> Iterator[list[Cell]]:
        """Measures each case; yields its cells, ours first.

        Args:
          on_turn: told what is about to run, once for each of a case's
            (rounds + 2) turns of each implementation.
        """
        for case in plan:
            yield self._measure(case, on_turn)

    def _measure(self, case: cases.Case, on_turn: Callable[[str], None]) -> list[Cell]:
        options = self._options
        wrong: dict[str, int] = dict.fromkeys(self._sets, 0)
        times: dict[str, list[float]] = {impl: [] for impl in self._sets}
        iterations: dict[str, int] = {}
        most = min(_WARM_PROGRAMS, options.iterations or _WARM_PROGRAMS)
        warm = dict.fromkeys(self._sets, most)
        copies: list[float] = []
        ledger: Counter[str] = Counter()
        for impl in self._sets:
            on_turn(f"{case.op} {case.bytes} B: compile {impl}")
            for reply in self._call(impl, "prepare", case=case.asdict()):
                wrong[impl] += reply["wrong"]
                program_s = reply["program_s"]
                least = 3 if program_s < 2 * options.turn_s else 1
                mine = options.iterations or _fit(options.turn_s, program_s, least)
                iterations[impl] = min(mine, iterations.get(impl, mine))
                warm[impl] = min(warm[impl], _fit(_WARM_S, program_s, 2))
        for impl in self._sets:
            on_turn(f"{case.op} {case.bytes} B: warm {impl} up")
            self._call(impl, "run", iterations=warm[impl], discard=0)
        end = time.monotonic() + options.case_s
        for done in range(options.rounds):
            if done >= _LEAST_ROUNDS and time.monotonic() > end:
                break
            for impl in self._sets:
                on_turn(f"{case.op} {case.bytes} B: {impl}")
                count = iterations.get(impl, 0)
                discard = 1 + count // 10
                replies = self._call(impl, "run", iterations=count, discard=discard)
                if replies:  # the slowest rank's word
                    program_s = max(reply["program_s"] for reply in replies)
                    times[impl].append(program_s / case.chain * 1e6)
                for reply in replies:
                    ledger.update(reply["ledger"])
            if case.result_bytes >= _COPY_BYTES:
                replies = self._call(OURS, "copy", seconds=_COPY_S)
                copies += [max(replies) * 1e6] if replies else []
        for impl in self._sets:
            for reply in self._call(impl, "finish"):
                wrong[impl] += reply["wrong"]
        cells = [
            Cell(case, impl, s.layout, error=self._dead[impl])
            if impl in self._dead
            else Cell(
                case,
                impl,
                s.layout,
                tuple(times[impl]),
                iterations[impl],
                wrong[impl],
            )
            for impl, s in self._sets.items()
        ]
        if not cells[0].error:
            calls = ledger.pop("operations", 0)
            cells[0] = dataclasses.replace(
                cells[0],
                copy_us=statistics.median(copies) if copies else None,
                counters={name: n / calls for name, n in ledger.items() if calls},
            )
        return cells

    def _call(
        self, impl: str, do: str, *, timeout_s: float | None = None, **arguments: Any
    ) -> list[Any]:
        """A request to one implementation; nothing from one that has died."""
        if impl in self._dead:
            return []
        timeout_s = timeout_s or self._options.timeout_s
        try:
            return self._sets[impl].call(do, timeout_s=timeout_s, **arguments)
        except ChildFailed as error:
            self._dead[impl] = str(error)
            return []


def _fit(seconds: float, program_s: float, least: int) -> int:
    """Programs of `program_s` that fill `seconds`, within reason."""
    return max(least, min(300, round(seconds / max(program_s, 1e-6))))
