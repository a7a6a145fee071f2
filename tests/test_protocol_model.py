"""The posting protocol holds in every interleaving, and the checker can tell.

The model is in tests/protocol; docs/protocol.md explains it.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "protocol"))

import seqlock
from checker import World, check
from scenarios import DEEP, MUTANTS, SCENARIOS, Mutant, run_mutant
from states import ABORT, OK, RESULT, SKIPPED, Scenario


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_protocol_holds(scenario: Scenario) -> None:
    result = check(scenario)
    print(f"{result.states} states in {result.seconds:.1f} s")
    assert result.fault is None, "\n".join([result.fault, *result.trace])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", DEEP, ids=lambda s: s.name)
def test_protocol_holds_deep(scenario: Scenario) -> None:
    result = check(scenario)
    assert result.fault is None, "\n".join([result.fault, *result.trace])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_checker_rejects(mutant: Mutant) -> None:
    result = run_mutant(mutant)
    print(f"{mutant.why}: {result.fault} after {len(result.trace)} steps")
    assert result.fault is not None
    assert result.fault.startswith(mutant.breaks)


@pytest.mark.parametrize(
    "scenario", sorted({m.scenario for m in MUTANTS}, key=str), ids=lambda s: s.name
)
def test_only_the_mutation_breaks_it(scenario: Scenario) -> None:
    """What the mutants fail in holds under the protocol itself."""
    assert check(scenario).fault is None


def test_scenarios_reach_every_end() -> None:
    """A model that never aborts, or always does, would prove nothing."""
    scenario = next(s for s in SCENARIOS if s.name == "2 ranks: two deadlines")
    world = World(scenario)
    seen, level = {world.initial()}, [world.initial()]
    ends, labels = set(), set()
    while level:
        following = []
        for state in level:
            for label, new, _ in world.successors(state):
                new = world.canonical(new)
                labels.add(label.split(": ", 1)[1])
                ends.update(end for rank in new[0] for end in rank[RESULT])
                if new not in seen:
                    seen.add(new)
                    following.append(new)
        level = following
    assert {OK, ABORT} <= ends
    assert SKIPPED not in ends  # one operation a launch: nothing is left to skip
    for expected in ("K0 POSTED again", "K0 ABORTED", "sleeps"):
        assert expected in labels
    assert any(label.startswith("turns down rank") for label in labels)


def test_seqlock_never_matches_a_torn_key() -> None:
    states, trace = seqlock.check()
    print(f"{states} states")
    assert trace is None, "\n".join(trace)


@pytest.mark.parametrize(
    "order",
    [
        seqlock.Order(free_first=False),
        seqlock.Order(reread=False),
        seqlock.Order(generation=False),
        seqlock.Order(payload_before_post=False),
    ],
    ids=lambda o: str(o),
)
def test_seqlock_rejects(order: seqlock.Order) -> None:
    _, trace = seqlock.check(order)
    assert trace is not None
    print(f"{len(trace)} steps: {trace[-1]}")
