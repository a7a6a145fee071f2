"""What the model is run on: scenarios, and the mutants it must reject.

python scenarios.py                  every scenario, every mutant, one line each
python scenarios.py --deep           larger scenarios too (minutes)
python scenarios.py --trace NAME     a mutant's shortest counterexample
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from checker import Result, check
from states import Op, Scenario, Variant


def mesh(n: int, launch: int = 1, stages: int = 1, direct: bool = False) -> Op:
    """psum, all_gather, psum_scatter, barrier: everyone needs everyone."""
    peers = tuple(range(1, n))
    return Op(launch, ((peers,) * n,) * stages, agreed=True, direct=direct)


def permute(n: int, edges: dict[int, int], launch: int = 1, direct: bool = False) -> Op:
    """ppermute: `edges` maps a reading rank to its source."""
    needs = tuple(((edges[r] - r) % n,) if r in edges else () for r in range(n))
    return Op(launch, (needs,), agreed=False, direct=direct)


def _two(name: str, *ops: Op, **limits: int) -> Scenario:
    return Scenario(name, 2, ops, **limits)


def _three(name: str, *ops: Op, **limits: int) -> Scenario:
    return Scenario(name, 3, ops, coarse=True, **limits)


_ONE_WAY = Scenario(
    "2 ranks: three one-way ppermutes, three launches, source runs ahead",
    2,
    tuple(permute(2, {1: 0}, launch) for launch in (1, 2, 3)),
    slots=2,
    rotate=False,
)
_ONE_WAY_ABORT = Scenario(
    "2 ranks: one-way ppermutes, deadline and kill",
    2,
    (permute(2, {1: 0}, 1), permute(2, {1: 0}, 1), permute(2, {1: 0}, 2)),
    deadlines=1,
    crashes=1,
    rotate=False,
)
_ONE_WAY_DIRECT = Scenario(
    "2 ranks: one-way direct ppermutes, deadline and kill",
    2,
    tuple(permute(2, {1: 0}, launch, direct=True) for launch in (1, 2)),
    deadlines=1,
    crashes=1,
    rotate=False,
)

_ONE_WAY_SIBLING = Scenario(
    "2 ranks: one-way ppermutes, another operation aborts the launch",
    2,
    tuple(permute(2, {1: 0}, launch) for launch in (1, 2)),
    deadlines=1,
    siblings=1,
    rotate=False,
)
_ONE_WAY_LAST = Scenario("one one-way ppermute", 2, (permute(2, {1: 0}),), rotate=False)
_ONE_WAY_TWICE = Scenario(
    "two one-way ppermutes, deadline",
    2,
    (permute(2, {1: 0}), permute(2, {1: 0}, 2)),
    deadlines=1,
    rotate=False,
)

SCENARIOS = (
    _two("2 ranks: three operations, one slot", mesh(2), mesh(2), mesh(2, 2)),
    _two("2 ranks: two stages twice", mesh(2, 1, 2), mesh(2, 1, 2)),
    _two("2 ranks: two deadlines", mesh(2), mesh(2, 2), mesh(2, 3), deadlines=2),
    _two("2 ranks: two stages, two deadlines", mesh(2, 1, 2), mesh(2, 2), deadlines=2),
    _two(
        "2 ranks: deadline in one launch of two operations, two slots",
        mesh(2), mesh(2), mesh(2, 2),
        slots=2, deadlines=2,
    ),
    _two(
        "2 ranks: two stages, deadline and kill",
        mesh(2, 1, 2), mesh(2, 2),
        deadlines=1, crashes=1,
    ),
    _two(
        "2 ranks: direct, deadlines and kill",
        mesh(2, 1, 1, True), mesh(2, 2, 1, True),
        deadlines=2, crashes=1,
    ),
    _two("2 ranks: direct, two stages, deadline", mesh(2, 1, 2, True), mesh(2, 2),
         deadlines=1),
    _ONE_WAY,
    _ONE_WAY_ABORT,
    _ONE_WAY_DIRECT,
    _ONE_WAY_SIBLING,
    _two("2 ranks: another operation aborts the launch, deadline",
         mesh(2), mesh(2), mesh(2, 2), siblings=1, deadlines=1),
    _two("2 ranks: two stages, another operation aborts the launch",
         mesh(2, 1, 2), mesh(2, 2), siblings=2),
    _three("3 ranks: another operation aborts the launch", mesh(3), siblings=1),
    _three("3 ranks: two operations, one slot", mesh(3), mesh(3, 2)),
    _three("3 ranks: two deadlines", mesh(3), deadlines=2),
    _three("3 ranks: deadline and kill", mesh(3), deadlines=1, crashes=1),
    _three("3 ranks: two stages, deadline", mesh(3, 1, 2), deadlines=1),
)  # fmt: skip

DEEP = (
    _three(
        "3 ranks: ring ppermute then psum, deadline",
        permute(3, {0: 2, 1: 0, 2: 1}), mesh(3),
        slots=2, deadlines=1,
    ),
    _three("3 ranks: two launches, deadline", mesh(3), mesh(3, 2), deadlines=1),
    _three("3 ranks: two launches, two deadlines", mesh(3), mesh(3, 2), deadlines=2),
    _three("3 ranks: two stages, two deadlines", mesh(3, 1, 2), deadlines=2),
    _three("3 ranks: two stages, deadline and kill", mesh(3, 1, 2), deadlines=1,
           crashes=1),
    _three("3 ranks: direct, deadline and kill", mesh(3, 1, 1, True), deadlines=1,
           crashes=1),
    _two("2 ranks: two stages twice, three deadlines, kill", mesh(2, 1, 2),
         mesh(2, 1, 2), mesh(2, 2), deadlines=3, crashes=1),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    name: str
    why: str  # what the mutation is, in words
    variant: Variant
    scenario: Scenario
    breaks: str  # how the fault message begins


_PAIR = _two("two operations", mesh(2), mesh(2))
_PAIR_LATE = _two("two launches, deadline", mesh(2), mesh(2, 2), deadlines=1)
_TRIO_LATE = _three("one operation, two deadlines", mesh(3), deadlines=2)
_TRIO_KILL = _three("deadline and kill", mesh(3), deadlines=1, crashes=1)
_PAIR_DIRECT = _two("direct", mesh(2, 1, 1, True), mesh(2, 2, 1, True))
_TWICE = _two("two stages, deadline", mesh(2, 1, 2), deadlines=1)
_LOST = "lost wake-up"

MUTANTS = (
    Mutant("no_recheck", "sleep without looking again after arming",
           Variant(recheck=False), _PAIR, _LOST),
    Mutant("arm_after_recheck", "set wait_mask after the second look",
           Variant(arm_first=False), _PAIR, _LOST),
    Mutant("bell_after_arm", "read the doorbell after arming",
           Variant(bell_first=False), _PAIR, _LOST),
    Mutant("bump_before_clear", "waker bumps the doorbell, then clears the bit",
           Variant(clear_first=False), _PAIR, _LOST),
    Mutant("post_not_seq_cst", "wait_mask is read before POSTED is visible",
           Variant(store_then_ring=False), _ONE_WAY_LAST, _LOST),
    Mutant("ack_does_not_ring", "a released slot wakes nobody",
           Variant(ack_then_ring=False), _ONE_WAY_TWICE, _LOST),
    Mutant("ack_before_read", "acknowledge on match, read afterwards",
           Variant(ack_after_read=False), _PAIR, "lapped"),
    Mutant("reuse_without_ack", "claim a slot that is not drained",
           Variant(reuse_needs_acks=False), _PAIR, "lapped"),
    Mutant("no_exit_wait", "direct: return before the readers are done",
           Variant(exit_wait=False), _PAIR_DIRECT, "lapped"),
    Mutant("aborted_reader_holds", "an aborted reader never releases a slot",
           Variant(release="none"), _ONE_WAY_TWICE, ""),
    Mutant("no_request_phase", "look at the needs, then ABORTED at once",
           Variant(request=False), _TRIO_LATE, "disagreement"),
    Mutant("request_without_look", "ABORT_REQ, then ABORTED without looking",
           Variant(look_after_request=False), _TWICE, "disagreement"),
    Mutant("no_verdict", "success without looking at the sources' phases",
           Variant(verdict="none"), _PAIR_LATE, "disagreement"),
    Mutant("request_does_not_count", "a peer in ABORT_REQ counts as not posted",
           Variant(request_counts=False), _TRIO_LATE, "disagreement"),
    Mutant("entry_releases", "aborted_launch of a reader releases every slot",
           Variant(release="entry"), _ONE_WAY_SIBLING, "lapped"),
    Mutant("post_into_aborted_launch", "one-sided: read without a look at the own "
           "entry", Variant(own_entry_after_post=False), _ONE_WAY_SIBLING, "lapped"),
    Mutant("entry_over_slot", "verdict: aborted_launch beats a post that is there",
           Variant(entry_over_slot=True), _two(
               "two operations of one launch, deadline", mesh(2), mesh(2),
               slots=2, deadlines=1), "disagreement"),
    Mutant("slots_before_entries", "read the entries after the slots",
           Variant(snap_first=False), _ONE_WAY, "false Mismatch"),
    Mutant("request_holds_request", "two ranks in ABORT_REQ hold each other up",
           Variant(verdict="epoch", ready_needs_posted=True, request_counts=False),
           _TRIO_LATE, "disagreement"),
    Mutant("dead_request_aborts", "a dead rank's ABORT_REQ counts as ABORTED",
           Variant(verdict="epoch", dead_request="aborted"), _TRIO_KILL,
           "disagreement"),
    Mutant("verdict_gives_up", "the wait for a peer's request may time out",
           Variant(verdict="epoch", resolve_deadline=True), _TRIO_LATE,
           "disagreement"),
)  # fmt: skip


def run_mutant(mutant: Mutant) -> Result:
    return check(mutant.scenario, mutant.variant)


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["--trace"]:
        (mutant,) = (m for m in MUTANTS if m.name == arguments[1])
        result = run_mutant(mutant)
        print(f"{mutant.why}: {result.fault}")
        print("\n".join(result.trace))
        return
    for scenario in SCENARIOS + (DEEP if "--deep" in arguments else ()):
        r = check(scenario)
        print(
            f"{r.states:>8} states {r.seconds:5.1f} s  {scenario.name}: "
            f"{r.fault or 'no fault'}",
            flush=True,
        )
    for mutant in MUTANTS:
        r = run_mutant(mutant)
        print(
            f"{r.depth:>8} steps  {r.seconds:5.1f} s  {mutant.name}: {r.fault}",
            flush=True,
        )


if __name__ == "__main__":
    _main(sys.argv[1:])
