"""What a rank sees when it looks at its peers, and how it edits a state.

Owns: every condition a rank may wait for, written once and used by the waits,
by the re-checks and by the search for lost wake-ups.
"""

from __future__ import annotations

from states import (
    ABORTED,
    ABORTED_L,
    ACK,
    ACKS,
    ARM,
    BELL,
    EPOCH,
    EXIT,
    FIND,
    FORCE,
    FREE,
    GEN,
    GONE,
    KEY,
    KNOWN,
    LEFT,
    MATCH,
    NEXT,
    OK,
    OP,
    ORDINAL,
    PC,
    PHASE,
    PREACK,
    PROGRESS,
    READ,
    REQ,
    RESULT,
    RING,
    SEEN_EPOCH,
    SLEEP,
    SLOTS,
    SNAP,
    SNAPS,
    STAGE,
    START,
    VERDICT,
    W_CLAIM,
    W_EXIT,
    W_STAGE,
    WAIT,
    Fault,
    Rank,
    Scenario,
    State,
    Variant,
)

SLOT_FIELD = {
    "gen": GEN, "phase": PHASE, "key": KEY, "progress": PROGRESS, "gone": GONE,
    "acks": ACKS,
}  # fmt: skip


class Looking:
    """One scenario under one variant: its conditions and its edits."""

    def __init__(self, scenario: Scenario, variant: Variant | None = None) -> None:
        self.s = scenario
        self.v = variant or Variant()
        n = self.n = scenario.n
        self.everyone = tuple(range(1, n))
        self.sources = [
            [tuple(sorted({d for st in op.needs for d in st[r]})) for r in range(n)]
            for op in scenario.ops
        ]
        self.readers = [
            [
                tuple(d for d in self.everyone if n - d in src[(r + d) % n])
                for r in range(n)
            ]
            for src in self.sources
        ]

    # -- states --------------------------------------------------------------

    def initial(self) -> State:
        zeros = (0,) * (self.n - 1)
        slot = (0, FREE, -1, 0, zeros, 0)
        private = (START, 0, 0, W_STAGE, (), START, 0, (), (), 0, zeros)
        rank = (*private, (slot,) * self.s.slots, 0, 0, 0, 0, 0, ())
        return ((rank,) * self.n, self.s.deadlines, self.s.crashes, self.s.siblings)

    def canonical(self, state: State) -> State:
        if not self.s.rotate:
            return state
        ranks = state[0]
        best = min(ranks[i:] + ranks[:i] for i in range(self.n))
        return (best, *state[1:])

    # -- looking -------------------------------------------------------------

    @staticmethod
    def find(peer: Rank, key: int) -> int:
        """The slot that holds `key`, or -1.  The seqlock makes it one step."""
        for i, slot in enumerate(peer[SLOTS]):
            if slot[KEY] == key and slot[PHASE] != FREE:
                return i
        return -1

    def look(
        self,
        ranks: tuple,
        me: int,
        op: int,
        stage: int,
        snaps: tuple,
        after_request: bool = False,
    ):
        """("go", matches), ("bad", why) or ("wait", None) for a stage's needs.

        `snaps` was taken before the slots are read; () means look at no
        entry and no liveness.
        """
        match, unmet = [], False
        own = ranks[me][ABORTED_L] >= self.s.ops[op].launch
        bad = "own launch aborted" if own else None
        for d in self.s.ops[op].needs[stage][me]:
            peer = ranks[(me + d) % self.n]
            aborted, past, dead = snaps[d - 1] if snaps else (0, 0, 0)
            i = self.find(peer, op)
            if i < 0:
                unmet = True
                if aborted:
                    bad = "peer aborted"
                elif dead:
                    bad = bad or "peer lost"
                elif past:
                    bad = bad or "mismatch"
                continue
            slot = peer[SLOTS][i]
            if slot[PHASE] == ABORTED:
                unmet, bad = True, "peer aborted"
            elif slot[PHASE] == REQ and not (
                self.v.request_counts
                if after_request
                else not self.v.ready_needs_posted
            ):
                unmet = True
            elif slot[PROGRESS] < stage:
                unmet = True
                bad = bad or ("peer lost" if dead else None)
            else:
                match.append((d, i, slot[GEN]))
        if not unmet:
            return "go", tuple(match)
        return ("bad", bad) if bad else ("wait", None)

    def snapshot(self, ranks: tuple, me: int, launch: int) -> tuple:
        out = []
        for d in self.everyone:
            peer = ranks[(me + d) % self.n]
            dead = ranks[me][KNOWN] >> d & 1
            out.append((peer[ABORTED_L] >= launch, peer[ORDINAL] > launch, dead))
        return tuple(out)

    def drained(self, ranks: tuple, me: int, slot: tuple) -> bool:
        """No peer reads, or will read, what this slot of mine points to."""
        key = slot[KEY]
        launch = self.s.ops[key].launch
        for d in self.readers[key][me]:
            if slot[ACKS][d - 1] == slot[GEN] or ranks[me][KNOWN] >> d & 1:
                continue
            reader = ranks[(me + d) % self.n]
            if reader[ORDINAL] > launch:
                continue
            if self.v.release == "none":
                return False
            if self.v.release == "entry" and reader[ABORTED_L] >= launch:
                continue
            i = self.find(reader, key)
            if i >= 0 and reader[SLOTS][i][PHASE] == ABORTED:
                continue
            if i < 0 and reader[ABORTED_L] >= launch:
                continue
            return False
        return True

    def claimable(self, ranks: tuple, me: int) -> int:
        for i, slot in enumerate(ranks[me][SLOTS]):
            if slot[KEY] < 0 or not self.v.reuse_needs_acks:
                return i
            if self.drained(ranks, me, slot):
                return i
        return -1

    def mine(self, rank) -> int:
        return next(i for i, s in enumerate(rank[SLOTS]) if s[KEY] == rank[OP])

    def wait_over(self, ranks: tuple, me: int) -> bool:
        """Would rank `me`, asleep, find a reason to go on if it looked?"""
        rank = ranks[me]
        kind = rank[WAIT]
        if kind == W_STAGE:
            snaps = self.snapshot(ranks, me, self.s.ops[rank[OP]].launch)
            return self.look(ranks, me, rank[OP], rank[STAGE], snaps)[0] != "wait"
        if kind == W_CLAIM and rank[ABORTED_L] >= self.s.ops[rank[OP]].launch:
            return True
        if kind == W_CLAIM:
            return self.claimable(ranks, me) >= 0
        if kind == W_EXIT:
            return self.drained(ranks, me, rank[SLOTS][self.mine(rank)])
        return self.resolved(ranks, me)

    def resolved(self, ranks: tuple, me: int) -> bool:
        d = ranks[me][LEFT][0]
        if ranks[me][KNOWN] >> d & 1:
            return True
        return self.source(ranks, me, d)[PHASE] != REQ

    def source(self, ranks: tuple, me: int, d: int) -> tuple:
        peer = ranks[(me + d) % self.n]
        i = self.find(peer, ranks[me][OP])
        if i < 0:
            raise Fault("lapped: a source's slot is gone before its ack")
        return peer[SLOTS][i]

    # -- editing -------------------------------------------------------------

    @staticmethod
    def edit(rank: list, i: int, **change) -> None:
        slots = list(rank[SLOTS])
        slot = list(slots[i])
        for name, value in change.items():
            slot[SLOT_FIELD[name]] = value
        slots[i] = tuple(slot)
        rank[SLOTS] = tuple(slots)

    def begin_wait(self, rank: list, kind: int) -> None:
        rank[WAIT] = kind
        rank[SNAPS] = ()
        rank[PC] = BELL if self.v.bell_first else ARM

    def look_again(self, rank: Rank) -> int:
        if not self.v.recheck:
            return SLEEP
        return SNAP if rank[WAIT] == W_STAGE and self.v.snap_first else FIND

    def ring(self, rank: list, peers: tuple, then: int, force: int = 0) -> None:
        rank[LEFT], rank[NEXT], rank[FORCE] = peers, then, force
        rank[PC] = RING
        if not peers:
            self.after_ring(rank)

    def after_ring(self, rank: list) -> None:
        rank[LEFT], rank[PC] = (), rank[NEXT]
        rank[NEXT], rank[FORCE] = START, 0
        if rank[PC] == EXIT and not self.s.ops[rank[OP]].direct:
            rank[OP], rank[PC] = rank[OP] + 1, START

    def go(self, ranks: tuple, me: int, rank: list, match: tuple) -> None:
        rank[MATCH], rank[SNAPS] = match, ()
        if self.v.verdict == "epoch" and not rank[STAGE]:
            seen = list(rank[SEEN_EPOCH])
            for d, _, _ in match:
                seen[d - 1] = ranks[(me + d) % self.n][EPOCH]
            rank[SEEN_EPOCH] = tuple(seen)
        rank[PC] = READ if self.v.ack_after_read else PREACK

    def to_verdict(self, rank: list, me: int) -> None:
        rank[MATCH] = ()
        rank[LEFT], rank[PC] = self.sources[rank[OP]][me], VERDICT

    def succeed(self, ranks: tuple, me: int, rank: list) -> None:
        self.record(ranks, me, rank, OK)
        sources = self.sources[rank[OP]][me]
        rank[LEFT], rank[PC] = sources, ACK
        if not sources:
            self.ring(rank, (), EXIT)

    def record(self, ranks: tuple, me: int, rank: list, end: int) -> None:
        """Notes how the operation ended and compares with everybody."""
        op = rank[OP]
        rank[RESULT] = (*rank[RESULT], end)
        if not self.s.ops[op].agreed:
            return
        for d in self.everyone:
            other = ranks[(me + d) % self.n]
            if len(other[RESULT]) > op and (other[RESULT][op] == OK) != (end == OK):
                raise Fault("disagreement: success on one rank, abort on another")
