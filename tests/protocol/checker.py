"""Breadth-first search over the protocol model.

Owns: the world around the ranks (deadlines, deaths, monitors), the invariants
of quiet states, and the search that returns a shortest counterexample.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from model import Model
from states import (
    ABORTED_L,
    ACK,
    ARM,
    ASLEEP,
    BELL,
    BUMP,
    CLAIM,
    DEAD,
    DOOM,
    END,
    ENTRY,
    KNOWN,
    LEFT,
    MASK,
    MATCH,
    ORDINAL,
    PC,
    POST,
    PROG,
    READ,
    REQUEST,
    RING,
    RUNG,
    SLEEP,
    SNAPS,
    START,
    W_RESOLVE,
    W_STAGE,
    WAIT,
    WRITE,
    Changes,
    Fault,
    Scenario,
    State,
    Variant,
)

# Coarse steps: a rank goes through these without being interrupted.  Their
# interleavings are explored by the fine scenarios of two ranks; three ranks
# would need hours.  Never joined: what lies around the reads of other ranks'
# posts, phases and payloads.
_JOINED = (
    {(START, CLAIM), (CLAIM, WRITE), (BELL, ARM), (ACK, ACK), (READ, PROG)}
    | {(a, b) for a in (POST, PROG, ACK, ENTRY) for b in (RING,)}
    | {(RING, RING), (RING, BUMP), (BUMP, RING)}
)


@dataclass
class Result:
    scenario: str
    states: int = 0
    depth: int = 0
    fault: str | None = None
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0


class World(Model):
    """The ranks, and what befalls them."""

    # -- the world -----------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[str, State, bool]]:
        """(label, next state, spontaneous).  Deadlines and crashes are
        spontaneous: nobody may depend on one of them to go on."""
        ranks, deadlines, crashes, siblings = state

        def apply(changes: Changes) -> tuple:
            new = list(ranks)
            for r, fields in changes.items():
                new[r] = tuple(fields)
            return tuple(new)

        for r, old in enumerate(ranks):
            if old[PC] not in (END, DEAD, ASLEEP):
                for label, changes in self.step(ranks, r):
                    new = apply(changes)
                    while self.s.coarse and (old[PC], new[r][PC]) in _JOINED:
                        more, changes = next(self.step(new, r))
                        label, old = f"{label}; {more}", new[r]
                        merged = list(new)
                        for q, fields in changes.items():
                            merged[q] = tuple(fields)
                        new = tuple(merged)
                    yield f"{r}: {label}", (new, *state[1:]), False
                old = ranks[r]
            may_time_out = old[WAIT] != W_RESOLVE or self.v.resolve_deadline
            if old[PC] in (SLEEP, ASLEEP) and deadlines and may_time_out:
                rank = list(old)
                rank[PC] = {W_STAGE: REQUEST, W_RESOLVE: DOOM}.get(old[WAIT], ENTRY)
                label = f"{r}: deadline"
                new = apply({r: rank})
                yield label, (new, deadlines - 1, crashes, siblings), True
            if crashes and old[PC] not in (END, DEAD):
                rank = list(old)
                rank[PC] = DEAD
                for name in (LEFT, SNAPS, MATCH):
                    rank[name] = ()
                rank[RUNG] = rank[MASK] = 0
                label = f"{r}: is killed"
                new = apply({r: rank})
                yield label, (new, deadlines, crashes - 1, siblings), True
            launch = old[ORDINAL]
            touched = old[PC] not in (START, ENTRY, END, DEAD) and launch
            if siblings and touched and old[ABORTED_L] < launch:
                everyone = {q: list(ranks[q]) for q in range(self.n)}
                everyone[r][ABORTED_L] = launch
                for rank in everyone.values():
                    self.bump(rank)
                label = f"{r}: another operation aborts launch {launch}"
                new = apply(everyone)
                yield label, (new, deadlines, crashes, siblings - 1), True
            if old[PC] in (END, DEAD):
                continue
            for d in self.everyone:
                if ranks[(r + d) % self.n][PC] == DEAD and not old[KNOWN] >> d & 1:
                    rank = list(old)
                    rank[KNOWN] |= 1 << d
                    self.bump(rank)
                    label = f"{r}: its monitor marks a peer dead and rings"
                    yield label, (apply({r: rank}), *state[1:]), False

    def quiet(self, ranks: tuple) -> None:
        """Nobody can move: everybody must be done."""
        for r, rank in enumerate(ranks):
            if rank[PC] == ASLEEP and self.wait_over(ranks, r):
                raise Fault("lost wake-up: asleep though its wait is over")
        if any(rank[PC] == ASLEEP for rank in ranks):
            raise Fault("deadlock: asleep for ever")


def check(
    scenario: Scenario, variant: Variant | None = None, limit: int = 10_000_000
) -> Result:
    """Breadth-first search: the first fault found is one of the shortest."""
    model = World(scenario, variant)
    began = time.monotonic()
    first = model.canonical(model.initial())
    parent: dict[State, State | None] = {first: None}
    level = [first]
    result = Result(scenario.name)

    def stop(state: State, message: str) -> Result:
        chain = [state]
        while (above := parent[chain[-1]]) is not None:
            chain.append(above)
        result.fault = message
        result.trace = replay(model, chain[::-1])
        result.depth = len(result.trace)
        return done()

    def done() -> Result:
        result.states = len(parent)
        result.seconds = time.monotonic() - began
        return result

    while level:
        following = []
        for state in level:
            stuck = True
            try:
                for _, new, spontaneous in model.successors(state):
                    stuck = stuck and spontaneous
                    new = model.canonical(new)
                    if new not in parent:
                        parent[new] = state
                        following.append(new)
                if stuck:
                    model.quiet(state[0])
            except Fault as fault:
                return stop(state, str(fault))
        if len(parent) > limit:
            raise MemoryError(f"{scenario.name}: more than {limit} states")
        level = following
        result.depth += 1
    return done()


def replay(model: World, chain: list[State]) -> list[str]:
    """The labels along a chain of canonical states, ranks named consistently."""
    state = model.initial()
    labels = []
    for target in chain[1:]:
        for label, new, _ in model.successors(state):
            if model.canonical(new) == target:
                labels.append(label)
                state = new
                break
        else:
            raise AssertionError("the chain does not replay")
    labels.append("FAULT in the next step")
    return labels
