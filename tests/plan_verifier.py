"""A proof checker for plans: one collective, the plans of all its ranks.

`verify` takes what `stratacl_jax._native.build_plan` returned for every rank and
shows, for every interleaving that the `needs` rule allows and every operand:

* each output byte is made of the right operand bytes, each once, and reductions
  take them in the order of the group, in one step;
* no two operations that can run at the same time touch one byte, if one of them
  writes it; nothing is read that has not been written, or written twice; what
  peers store has arrived when the plan ends;
* nobody waits for a stage that does not come;
* plans agree on who reads whom, stay in bounds, and staged ones read nothing of
  a peer but its window.

It works on intervals of bytes with symbolic contents, so its cost depends on the
number of slices and not on sizes.  It knows nothing of the builder: the meaning
of an operator is written down here a second time, in `expected`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from plan_contents import ZERO, Contents, Segment, Value, merged, shift

Memory = tuple[str, int, int]  # space, rank, buffer

HALF_TYPES = (10, 16)  # f16, bf16: a partial sum has been rounded


class PlanError(AssertionError):
    """A plan that is wrong.  `kind` names the property it breaks."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True)
class Problem:
    """The keyword arguments of `build_plan`, without `me`."""

    op: str
    ranks: int
    leaves: tuple[tuple[int, int, int], ...] = ()  # count, type code, bytes each
    reduce: str = "sum"
    permutation: tuple[tuple[int, int], ...] = ()
    transport: str = "staged"
    chunk_bytes: int = 0
    algorithm: str = "auto"

    def arguments(self, me: int) -> dict[str, Any]:
        return {
            "op": self.op,
            "reduce": self.reduce,
            "leaves": list(self.leaves),
            "ranks": self.ranks,
            "me": me,
            "permutation": list(self.permutation),
            "transport": self.transport,
            "chunk_bytes": self.chunk_bytes,
            "algorithm": self.algorithm,
        }

    def input_bytes(self, leaf: int) -> int:
        count, _, element_bytes = self.leaves[leaf]
        return count * element_bytes

    def output_bytes(self, leaf: int) -> int:
        total = self.input_bytes(leaf)
        if self.op == "all_gather":
            return total * self.ranks
        if self.op == "psum_scatter":
            return total // self.ranks
        return total


def expected(problem: Problem, me: int, leaf: int) -> list[Segment]:
    """What the operator means: the contents of one output leaf of rank `me`."""
    size = problem.output_bytes(leaf)
    everyone = range(problem.ranks)
    if problem.op == "psum":
        return [(0, size, tuple((r, leaf, 0) for r in everyone))]
    if problem.op == "psum_scatter":
        return [(0, size, tuple((r, leaf, me * size) for r in everyone))]
    if problem.op == "all_gather":
        block = problem.input_bytes(leaf)
        return [
            (r * block, (r + 1) * block, ((r, leaf, -r * block),)) for r in everyone
        ]
    if problem.op == "ppermute":
        source = {to: frm for frm, to in problem.permutation}.get(me)
        return [(0, size, ZERO if source is None else ((source, leaf, 0),))]
    raise ValueError(f"{problem.op} has no output")


@dataclass
class _Access:
    """All accesses to one memory, as columns."""

    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    operation: list[int] = field(default_factory=list)
    writes: list[bool] = field(default_factory=list)


class _Verifier:
    def __init__(self, problem: Problem, plans: list[dict], in_place: bool) -> None:
        self.problem = problem
        self.plans = plans
        self.in_place = in_place
        self.accesses: dict[Memory, _Access] = {}
        self.operations = 0
        self.contents: dict[Memory, Contents] = {}

    # --- who waits for whom -----------------------------------------------------

    def check_rendezvous(self) -> None:
        ranks = self.problem.ranks
        if len(self.plans) != ranks:
            raise PlanError("structure", f"{len(self.plans)} plans for {ranks} ranks")
        for me, plan in enumerate(self.plans):
            union: set[int] = set()
            for k, stage in enumerate(plan["stages"]):
                needs = set(stage["needs"])
                if len(needs) != len(stage["needs"]) or me in needs:
                    raise PlanError("structure", f"rank {me} stage {k}: needs {needs}")
                for peer in needs:
                    if not 0 <= peer < ranks:
                        raise PlanError("structure", f"rank {me} needs rank {peer}")
                    # Stage k waits for the peer's stage k - 1 only, so by
                    # induction every stage runs if that stage exists.
                    if len(self.plans[peer]["stages"]) < k:
                        raise PlanError(
                            "deadlock",
                            f"rank {me} stage {k} waits for {k} stages of rank {peer}, "
                            f"which has {len(self.plans[peer]['stages'])}",
                        )
                union |= needs
            if sorted(union) != plan["sources"]:
                raise PlanError(
                    "structure",
                    f"rank {me} has sources {plan['sources']}, needs {sorted(union)}",
                )
        for me, plan in enumerate(self.plans):
            readers = [r for r in range(ranks) if me in self.plans[r]["sources"]]
            if readers != plan["readers"]:
                raise PlanError(
                    "structure",
                    f"rank {me} has readers {plan['readers']}, is read by {readers}",
                )

    def order(self) -> None:
        """known[r, k, p]: stages of p that are over when stage k of r starts."""
        depth = max((len(plan["stages"]) for plan in self.plans), default=0)
        ranks = self.problem.ranks
        known = np.zeros((ranks, depth + 1, ranks), np.int32)
        for k in range(1, depth + 1):
            for r, plan in enumerate(self.plans):
                known[r, k] = known[r, k - 1]
                known[r, k, r] = k
                if k >= len(plan["stages"]):
                    continue
                for p in plan["stages"][k]["needs"]:
                    # All that p knew when it started its stage k - 1, and it.
                    np.maximum(known[r, k], known[p, k - 1], out=known[r, k])
                    known[r, k, p] = max(known[r, k, p], k)
        self.known = known
        # arrived[r][p]: the first stage in which r knows that p has posted.
        self.arrived: list[dict[int, int]] = [{} for _ in self.plans]
        for r, plan in enumerate(self.plans):
            for k, stage in enumerate(plan["stages"]):
                for p in stage["needs"]:
                    self.arrived[r].setdefault(p, k)

    # --- single operations ------------------------------------------------------

    def memory(self, addr: tuple[str, int, int, int]) -> Memory:
        space, rank, buffer, _ = addr
        if self.in_place and space == "output":
            space = "input"
        return (space, rank, buffer)

    def check_address(
        self, me: int, k: int, addr: tuple[str, int, int, int], size: int, writes: bool
    ) -> None:
        space, rank, buffer, offset = addr
        if space == "zero":
            if writes or (rank, buffer, offset) != (0, 0, 0):
                raise PlanError("structure", f"rank {me} stage {k}: {addr}")
            return
        if not 0 <= rank < self.problem.ranks:
            raise PlanError("bounds", f"rank {me} stage {k}: {addr}")
        if space == "window":
            limit = self.plans[rank]["window_bytes"] if buffer == 0 else -1
        elif not 0 <= buffer < len(self.problem.leaves):
            limit = -1
        elif space == "input":
            limit = self.problem.input_bytes(buffer)
        else:
            limit = self.problem.output_bytes(buffer)
        if size <= 0 or offset < 0 or offset + size > limit:
            raise PlanError(
                "bounds", f"rank {me} stage {k}: {addr}, {size} bytes of {limit}"
            )
        if writes and space == "input":
            raise PlanError("structure", f"rank {me} stage {k}: writes {addr}")
        if rank == me:
            return
        if self.problem.transport == "staged" and space != "window":
            raise PlanError("structure", f"rank {me} stage {k}: {addr} is not staged")
        if self.arrived[me].get(rank, k + 1) > k:
            raise PlanError(
                "race", f"rank {me} stage {k}: rank {rank} may not have arrived"
            )

    def record(
        self, me: int, k: int, addr: tuple[str, int, int, int], size: int, writes: bool
    ) -> None:
        if addr[0] == "zero":
            return
        access = self.accesses.setdefault(self.memory(addr), _Access())
        access.begin.append(addr[3])
        access.end.append(addr[3] + size)
        access.rank.append(me)
        access.stage.append(k)
        access.operation.append(self.operations)
        access.writes.append(writes)

    def operands(self, k: int) -> Iterator[tuple[int, list, list, int, dict]]:
        """(rank, sources, destinations, bytes, record) of all operations of stage k."""
        for me, plan in enumerate(self.plans):
            if k >= len(plan["stages"]):
                continue
            for piece in plan["stages"][k]["slices"]:
                yield me, [piece["src"]], [piece["dst"]], piece["bytes"], piece
            for piece in plan["stages"][k]["reduces"]:
                sizes = [
                    size
                    for _, dtype, size in self.problem.leaves
                    if dtype == piece["dtype"]
                ]
                if not sizes or piece["count"] <= 0:
                    raise PlanError("structure", f"rank {me} stage {k}: {piece}")
                dsts = [piece["dst"], *piece["copies"]]
                yield me, piece["srcs"], dsts, piece["count"] * sizes[0], piece

    def check_operation(
        self, me: int, k: int, srcs: list, dsts: list, size: int, piece: dict
    ) -> None:
        for addr in srcs:
            self.check_address(me, k, addr, size, writes=False)
            self.record(me, k, addr, size, writes=False)
            for dst in dsts:
                gap = abs(addr[3] - dst[3])
                if self.memory(addr) == self.memory(dst) and (
                    0 < gap < size
                    or (gap == 0 and "srcs" not in piece and not self.in_place)
                ):
                    raise PlanError("race", f"rank {me} stage {k}: overlap in {piece}")
        for dst in dsts:
            self.check_address(me, k, dst, size, writes=True)
            self.record(me, k, dst, size, writes=True)
        self.operations += 1
        if "srcs" in piece:
            owners = [dst[1] for dst in dsts]
            if owners[0] != me or len(set(owners)) != len(owners):
                raise PlanError("structure", f"rank {me} reduces into ranks {owners}")
            return
        dst = dsts[0]
        own, other = (dst, srcs[0]) if piece["action"] == "load" else (srcs[0], dst)
        peer = me if other[0] == "zero" else other[1]
        if own[1] != me or peer != piece["peer"]:
            raise PlanError("structure", f"rank {me} stage {k}: peer of {piece}")

    def record_exit(self) -> None:
        """What follows a plan's last stage: XLA reads results and reuses operands.

        Where peers store results, nobody waits for readers afterwards, so the plan
        itself must have shown that they are through with the operand.
        """
        for me, plan in enumerate(self.plans):
            k = len(plan["stages"])
            stored = any(r["copies"] for s in plan["stages"] for r in s["reduces"])
            for leaf in range(len(self.problem.leaves)):
                size = self.problem.output_bytes(leaf)
                if size and self.problem.op != "barrier":
                    self.record(me, k, ("output", me, leaf, 0), size, writes=False)
                    self.operations += 1
                if stored and not self.in_place and self.problem.input_bytes(leaf):
                    size = self.problem.input_bytes(leaf)
                    self.record(me, k, ("input", me, leaf, 0), size, writes=True)
                    self.operations += 1

    # --- contents ---------------------------------------------------------------

    def read(self, me: int, k: int, addr: tuple, size: int) -> list[Segment]:
        if addr[0] == "zero":
            return [(0, size, ZERO)]
        contents = self.contents.setdefault(self.memory(addr), Contents())
        found = contents.read(addr[3], addr[3] + size)
        if found is None:
            raise PlanError(
                "unwritten", f"rank {me} stage {k} reads {addr}, {size} bytes"
            )
        return found

    def result(
        self, me: int, k: int, srcs: list, dst: tuple, size: int, piece: dict
    ) -> list[Segment]:
        """What one operation writes, in positions of its destination."""
        sources = [
            [
                (
                    lo - addr[3] + dst[3],
                    hi - addr[3] + dst[3],
                    shift(value, addr[3] - dst[3]),
                )
                for lo, hi, value in self.read(me, k, addr, size)
            ]
            if addr[0] != "zero"
            else [(dst[3], dst[3] + size, ZERO)]
            for addr in srcs
        ]
        if "srcs" not in piece:
            return sources[0]
        cuts = sorted({edge for source in sources for s in source for edge in s[:2]})
        return [
            (lo, hi, self.reduced(me, k, sources, lo, hi, piece))
            for lo, hi in pairwise(cuts)
        ]

    def reduced(
        self, me: int, k: int, sources: list, lo: int, hi: int, piece: dict
    ) -> Value:
        where = f"rank {me} stage {k}: {piece['op']} at {lo}"
        if piece["op"] != self.problem.reduce:
            raise PlanError("value", f"{where}: not {self.problem.reduce}")
        joined: list[tuple[int, int, int]] = []
        for index, source in enumerate(sources):
            value = next(v for b, e, v in source if b <= lo and hi <= e)
            # x0 + (x1 + x2) has another order, and a 16-bit sum of sums has been
            # rounded twice.
            if len(value) != 1 and (index > 0 or piece["dtype"] in HALF_TYPES):
                raise PlanError("value", f"{where}: source {index} is {value}")
            joined.extend(value)
        for _, leaf, delta in joined:
            _, dtype, element_bytes = self.problem.leaves[leaf]
            if dtype != piece["dtype"] or (lo + delta) % element_bytes:
                raise PlanError("value", f"{where}: elements of leaf {leaf} torn")
        return tuple(joined)

    def check_contents(self) -> None:
        """Runs the plans stage by stage: race-free, so one order stands for all."""
        for r in range(self.problem.ranks):
            for leaf in range(len(self.problem.leaves)):
                contents = self.contents.setdefault(("input", r, leaf), Contents())
                size = self.problem.input_bytes(leaf)
                if size:
                    contents.write(0, size, ((r, leaf, 0),))
        for k in range(self.known.shape[1]):
            for me, srcs, dsts, size, piece in self.operands(k):
                # All are computed before one is written: an element is read from
                # every source first, and a destination may be a source.
                results = [self.result(me, k, srcs, d, size, piece) for d in dsts]
                for dst, segments in zip(dsts, results, strict=True):
                    target = self.contents.setdefault(self.memory(dst), Contents())
                    for lo, hi, value in segments:
                        target.write(lo, hi, value)
        for me in range(self.problem.ranks):
            for leaf in range(len(self.problem.leaves)):
                size = self.problem.output_bytes(leaf)
                if size == 0:
                    continue
                k = len(self.plans[me]["stages"])
                got = self.read(me, k, ("output", me, leaf, 0), size)
                want = merged(expected(self.problem, me, leaf))
                if got != want:
                    raise PlanError(
                        "value",
                        f"rank {me} leaf {leaf}: {_first_difference(got, want)}",
                    )

    def check_barrier(self) -> None:
        for me, plan in enumerate(self.plans):
            if plan["sources"] != [r for r in range(self.problem.ranks) if r != me]:
                raise PlanError("value", f"rank {me} may leave before all arrived")

    # --- races ------------------------------------------------------------------

    def check_races(self) -> None:
        for memory, access in self.accesses.items():
            writes = np.array(access.writes)
            if not writes.any():
                continue
            begin, end = np.array(access.begin), np.array(access.end)
            rank, stage = np.array(access.rank), np.array(access.stage)
            operation = np.array(access.operation)
            w = np.flatnonzero(writes)
            overlap = (begin[:, None] < end[w]) & (begin[w] < end[:, None])
            overlap &= operation[:, None] != operation[w]
            a, b = np.nonzero(overlap)
            b = w[b]
            before = self.known[rank[b], stage[b], rank[a]] > stage[a]
            after = self.known[rank[a], stage[a], rank[b]] > stage[b]
            self.refuse("race", memory, access, a, b, ~before & ~after)
            self.refuse("twice", memory, access, a, b, writes[a])

    def refuse(
        self,
        kind: str,
        memory: Memory,
        access: _Access,
        a: np.ndarray,
        b: np.ndarray,
        wrong: np.ndarray,
    ) -> None:
        """Raises for the first wrong pair of accesses (a[i], b[i]), if there is one."""
        found = np.flatnonzero(wrong)
        if not found.size:
            return
        x, y = int(a[found[0]]), int(b[found[0]])
        begin = max(access.begin[x], access.begin[y])
        end = min(access.end[x], access.end[y])
        raise PlanError(
            kind,
            f"{memory} bytes {begin} to {end}: rank {access.rank[x]} stage "
            f"{access.stage[x]} against the write of rank {access.rank[y]} stage "
            f"{access.stage[y]}",
        )

    def run(self) -> None:
        self.check_rendezvous()
        self.order()
        for k in range(self.known.shape[1]):
            for me, srcs, dsts, size, piece in self.operands(k):
                self.check_operation(me, k, srcs, dsts, size, piece)
        self.record_exit()
        self.check_races()
        if self.problem.op == "barrier":
            self.check_barrier()
        else:
            self.check_contents()


def _first_difference(got: list[Segment], want: list[Segment]) -> str:
    for g, w in zip(got, want, strict=False):
        if g != w:
            return f"bytes {g[0]} to {g[1]} are {g[2]}, not {w}"
    return f"{len(got)} segments, not {len(want)}"


def verify(problem: Problem, plans: list[dict], *, in_place: bool = False) -> None:
    """Raises PlanError unless `plans[r]`, for every rank r, together solve `problem`.

    in_place: prove it for outputs that share their memory with the inputs (same
    leaf, same offset), as XLA arranges for a donated operand.
    """
    _Verifier(problem, plans, in_place).run()
