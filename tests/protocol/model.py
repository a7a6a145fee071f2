"""The posting protocol of docs/protocol.md as a transition system.

Owns: what a rank does in one step, over sequentially consistent memory.
Nothing here imports the package: this is the specification the C++ is written
from.  A step is one access to shared memory, or several whose order nobody
can observe.  The search is in checker.py, the scenarios and the broken
variants it must reject are in scenarios.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from looking import Looking
from states import (
    ABORT,
    ABORTED,
    ABORTED_L,
    ACK,
    ACKS,
    ARM,
    ASLEEP,
    BELL,
    BUMP,
    CHECK,
    CLAIM,
    COMMIT,
    DEAD,
    DOOM,
    END,
    ENTRY,
    EPOCH,
    EPOCH1,
    EPOCH2,
    EXIT,
    FIND,
    FORCE,
    FREE,
    GEN,
    GONE,
    HELP,
    KEY,
    KNOWN,
    LEFT,
    MASK,
    MATCH,
    OP,
    ORDINAL,
    PC,
    PHASE,
    POST,
    POSTED,
    PREACK,
    PROG,
    PROGRESS,
    READ,
    RECHECK,
    REQ,
    REQUEST,
    RETRACT,
    RING,
    RUNG,
    SEEN_EPOCH,
    SKIPPED,
    SLEEP,
    SLOTS,
    SNAP,
    SNAPS,
    STAGE,
    START,
    VERDICT,
    W_CLAIM,
    W_EXIT,
    W_RESOLVE,
    W_STAGE,
    WAIT,
    WRITE,
    Changes,
    Fault,
)


class Model(Looking):
    """The steps of one scenario under one variant."""

    # -- the protocol --------------------------------------------------------

    def step(self, ranks: tuple, me: int) -> Iterator[tuple[str, Changes]]:
        """Yields (label, {rank: its new fields}); at most one in this model."""
        v, n = self.v, self.n
        old = ranks[me]
        rank = list(old)
        out = {me: rank}
        pc, op = old[PC], old[OP]

        if pc == START:
            rank[STAGE], rank[WAIT], rank[MATCH], rank[SNAPS] = 0, W_STAGE, (), ()
            while rank[OP] < len(self.s.ops):
                launch = self.s.ops[rank[OP]].launch
                if rank[ABORTED_L] < launch:
                    rank[ORDINAL], rank[PC] = launch, CLAIM
                    yield f"begins K{rank[OP]}, ordinal {launch}", out
                    return
                self.record(ranks, me, rank, SKIPPED)
                rank[OP] += 1
            rank[PC] = END
            yield "ends", out

        elif pc == CLAIM and old[ABORTED_L] >= self.s.ops[op].launch:
            rank[PC] = ENTRY
            yield "finds its own launch aborted", out

        elif pc == CLAIM:
            i = self.claimable(ranks, me)
            if i < 0:
                self.begin_wait(rank, W_CLAIM)
                yield "finds no drained slot", out
                return
            rank[LEFT], rank[PC] = (i,), WRITE
            yield f"finds slot {i} drained", out

        elif pc == WRITE:
            i = old[LEFT][0]
            rank[LEFT] = ()
            self.edit(rank, i, phase=FREE, key=op, progress=0, gone=0)
            rank[PC] = POST
            if not v.store_then_ring:
                self.ring(rank, self.readers[op][me], POST)
            yield f"writes key and payload of K{op} into slot {i}", out

        elif pc == POST:
            i = self.mine(old)
            self.edit(rank, i, phase=POSTED, gen=old[SLOTS][i][GEN] + 1)
            if v.store_then_ring:
                self.ring(rank, self.readers[op][me], CHECK)
            else:
                rank[PC] = CHECK
            yield f"K{op} POSTED", out

        elif pc in (RING, BUMP):
            yield self.ring_one(ranks, me, rank)

        elif (
            pc == CHECK
            and not self.s.ops[op].agreed
            and old[ABORTED_L] >= self.s.ops[op].launch
            and v.own_entry_after_post
        ):
            rank[PC] = DOOM
            yield "finds its own launch aborted", out

        elif pc == CHECK:
            what, match = self.look(ranks, me, op, old[STAGE], ())
            if what == "go":
                self.go(ranks, me, rank, match)
                yield f"finds the needs of K{op} stage {old[STAGE]}", out
            else:
                self.begin_wait(rank, W_STAGE)
                yield f"misses the needs of K{op} stage {old[STAGE]}", out

        elif pc == ARM:
            ds = self.everyone
            if old[WAIT] == W_STAGE:
                ds = self.s.ops[op].needs[old[STAGE]][me]
            for d in ds:
                rank[MASK] |= 1 << d
            rank[PC] = self.look_again(old) if v.bell_first else BELL
            if not v.arm_first:
                rank[PC] = SLEEP
            yield "arms its wait bits", out

        elif pc == BELL:
            rank[RUNG] = 0
            rank[PC] = ARM if v.bell_first else self.look_again(old)
            if not v.arm_first:
                rank[PC] = self.look_again(old)
            yield "reads its doorbell", out

        elif pc == SNAP and v.snap_first:
            rank[SNAPS] = self.snapshot(ranks, me, self.s.ops[op].launch)
            rank[PC] = FIND
            yield "reads entries and liveness", out

        elif pc == SNAP:  # mutant: this look comes after the one at the slots
            snaps = self.snapshot(ranks, me, self.s.ops[op].launch)
            rank[SNAPS] = ()
            self.conclude(rank, old[SNAPS], snaps)
            yield "then reads entries and liveness", out

        elif pc == FIND:
            self.find_again(ranks, me, rank)
            yield "looks again", out

        elif pc == SLEEP:
            if old[RUNG]:
                self.begin_wait(rank, old[WAIT])
                yield "futex_wait returns: the doorbell changed", out
            else:
                rank[PC] = ASLEEP
                yield "sleeps", out

        elif pc == PREACK:  # mutant
            for d, i, gen in old[MATCH]:
                out[(me + d) % n] = peer = list(ranks[(me + d) % n])
                self.write_ack(peer, i, n - d, gen)
            rank[PC] = READ
            yield "acknowledges before it reads", out

        elif pc == READ:
            self.read(ranks, me)
            rank[STAGE] += 1
            if rank[STAGE] < len(self.s.ops[op].needs):
                rank[MATCH], rank[PC] = (), PROG
            else:
                self.to_verdict(rank, me)
            yield f"reads its sources: stage {old[STAGE]} of K{op} done", out

        elif pc == PROG:
            self.edit(rank, self.mine(old), progress=old[STAGE])
            self.ring(rank, self.readers[op][me], CHECK)
            yield f"K{op} progress {old[STAGE]}", out

        elif pc in (VERDICT, HELP):
            yield self.verdict(ranks, me, rank)

        elif pc == ACK:
            d = old[LEFT][0]
            p = (me + d) % n
            i = self.find(ranks[p], op)
            peer = list(ranks[p])
            if i < 0:
                if v.ack_after_read:
                    raise Fault("lapped: a source's slot is gone before its ack")
            else:
                self.write_ack(peer, i, n - d, peer[SLOTS][i][GEN])
                out[p] = peer
            rank[LEFT] = old[LEFT][1:]
            if not rank[LEFT]:
                sources = self.sources[op][me] if v.ack_then_ring else ()
                self.ring(rank, sources, EXIT)
            yield f"acknowledges K{op} of rank {p}", out

        elif pc == EXIT:
            i = self.mine(old)
            if v.exit_wait and not self.drained(ranks, me, old[SLOTS][i]):
                self.begin_wait(rank, W_EXIT)
                yield "still has readers", out
                return
            self.edit(rank, i, gone=1)
            rank[OP], rank[PC] = op + 1, START
            yield f"returns K{op}: the memory is XLA's again", out

        elif pc == REQUEST:
            rank[PC] = RECHECK if v.look_after_request else COMMIT
            if v.request:
                self.edit(rank, self.mine(old), phase=REQ)
                if v.verdict == "epoch":
                    rank[PC] = EPOCH1
            yield f"K{op} ABORT_REQ", out

        elif pc == EPOCH1:
            rank[EPOCH] += 1
            rank[PC] = RECHECK
            yield "abort_epoch + 1", out

        elif pc == RECHECK:
            what, match = self.look(ranks, me, op, old[STAGE], (), True)
            rank[MATCH] = match if what == "go" else ()
            rank[PC] = RETRACT if what == "go" else COMMIT
            yield f"looks at its needs after the request: {what}", out

        elif pc == RETRACT:
            self.edit(rank, self.mine(old), phase=POSTED)
            rank[PC] = READ
            if v.verdict == "epoch":
                rank[PC] = EPOCH2
            yield f"K{op} POSTED again", out

        elif pc == EPOCH2:
            rank[EPOCH] += 1
            self.ring(rank, self.everyone, READ)
            yield "abort_epoch + 1", out

        elif pc in (COMMIT, DOOM):
            i = self.mine(old)
            helped = old[SLOTS][i][PHASE] == POSTED
            if pc == COMMIT and v.request and helped:
                rank[PC] = CHECK
                yield "its request was turned down by a peer: goes on", out
                return
            self.edit(rank, i, phase=ABORTED)
            rank[LEFT], rank[PC] = (), ENTRY
            yield f"K{op} ABORTED", out

        elif pc == ENTRY:
            rank[ABORTED_L] = self.s.ops[op].launch
            if v.verdict == "epoch":
                rank[EPOCH] += 1
            if old[WAIT] != W_EXIT:
                self.record(ranks, me, rank, ABORT)
            rank[OP] = op + 1
            rank[MATCH], rank[SNAPS] = (), ()
            self.ring(rank, self.everyone, START, force=1)
            yield f"aborted_launch {rank[ABORTED_L]}: K{op} raises", out

    def ring_one(self, ranks: tuple, me: int, rank: list) -> tuple[str, Changes]:
        old = ranks[me]
        d = old[LEFT][0]
        p = (me + d) % self.n
        peer = list(ranks[p])
        bit = 1 << (self.n - d)
        last = old[PC] == BUMP or old[FORCE]
        clears = not old[FORCE] and (old[PC] == RING) == self.v.clear_first
        label = f"clears its bit at rank {p}"
        if old[PC] == RING and not old[FORCE] and not peer[MASK] & bit:
            last, label = True, f"sees no wait bit at rank {p}"
        elif clears:
            peer[MASK] &= ~bit
        else:
            self.bump(peer)
            label = f"rings rank {p}"
        rank[PC] = BUMP
        if last:
            rank[LEFT], rank[PC] = old[LEFT][1:], RING
            if not rank[LEFT]:
                self.after_ring(rank)
        return label, {me: rank, p: peer}

    def bump(self, peer: list) -> None:
        if peer[PC] == DEAD:
            return
        peer[RUNG] = 1
        if peer[PC] == ASLEEP:
            self.begin_wait(peer, peer[WAIT])

    def write_ack(self, peer: list, i: int, d: int, gen: int) -> None:
        acks = list(peer[SLOTS][i][ACKS])
        acks[d - 1] = gen
        self.edit(peer, i, acks=tuple(acks))

    def read(self, ranks: tuple, me: int) -> None:
        rank = ranks[me]
        for d, i, gen in rank[MATCH]:
            slot = ranks[(me + d) % self.n][SLOTS][i]
            if slot[KEY] != rank[OP] or slot[GEN] != gen:
                raise Fault("lapped: the slot holds another operation")
            if slot[GONE]:
                raise Fault("lapped: XLA reused the memory under its reader")
            if slot[PROGRESS] < rank[STAGE]:
                raise Fault("read before the stage was finished")

    def find_again(self, ranks: tuple, me: int, rank: list) -> None:
        sleep = SLEEP if self.v.arm_first else ARM
        kind, op = rank[WAIT], rank[OP]
        if kind != W_STAGE:
            on = {W_CLAIM: CLAIM, W_EXIT: EXIT, W_RESOLVE: VERDICT}[kind]
            rank[PC] = on if self.wait_over(ranks, me) else sleep
            return
        what, info = self.look(ranks, me, op, rank[STAGE], rank[SNAPS])
        rank[SNAPS] = ()
        if what == "go":
            self.go(ranks, me, rank, info)
        elif what == "bad":
            self.give_up(rank, info)
        elif self.v.snap_first:
            rank[PC] = sleep
        else:
            needs = self.s.ops[op].needs[rank[STAGE]][me]
            rank[SNAPS] = tuple(
                d in needs and self.find(ranks[(me + d) % self.n], op) < 0
                for d in self.everyone
            )
            rank[PC] = SNAP

    def conclude(self, rank: list, missing: tuple, snaps: tuple) -> None:
        for absent, (aborted, past, dead) in zip(missing, snaps, strict=True):
            if absent and (aborted or dead):
                self.give_up(rank, "peer aborted or lost")
                return
            if absent and past:
                self.give_up(rank, "mismatch")
        rank[PC] = SLEEP if self.v.arm_first else ARM

    def give_up(self, rank: list, why: str) -> None:
        if why == "mismatch":
            raise Fault("false Mismatch: all ranks run the same program")
        rank[PC] = REQUEST

    def verdict(self, ranks: tuple, me: int, rank: list) -> tuple[str, Changes]:
        """After the last read: is there a source that will not finish?"""
        v, old = self.v, ranks[me]
        out = {me: rank}
        if not old[LEFT] or v.verdict == "none":
            self.succeed(ranks, me, rank)
            return f"K{old[OP]} SUCCESS", out
        d = old[LEFT][0]
        p = (me + d) % self.n
        # The mutant that acknowledged early has no right to look any more.
        phase = self.source(ranks, me, d)[PHASE] if v.ack_after_read else POSTED

        def passed() -> None:
            rank[LEFT], rank[PC] = old[LEFT][1:], VERDICT
            if not rank[LEFT]:
                self.succeed(ranks, me, rank)

        if v.verdict == "epoch":
            epoch = ranks[p][EPOCH]
            if old[SEEN_EPOCH][d - 1] == epoch:
                passed()
                return f"rank {p}'s abort_epoch is unchanged", out
        if self.v.entry_over_slot and (
            ranks[p][ABORTED_L] >= self.s.ops[old[OP]].launch
        ):
            phase = ABORTED
        if phase == ABORTED:
            rank[PC] = DOOM
        elif phase == POSTED or not self.s.ops[old[OP]].agreed:
            passed()
        elif old[PC] == HELP:
            peer = out[p] = list(ranks[p])
            self.edit(peer, self.find(ranks[p], old[OP]), phase=POSTED)
            passed()
            return f"turns down rank {p}'s request: POSTED", out
        elif v.verdict == "help":
            rank[PC] = HELP
        elif old[KNOWN] >> d & 1:
            passed() if v.dead_request == "posted" else rank.__setitem__(PC, DOOM)
        else:
            self.begin_wait(rank, W_RESOLVE)
        names = ["FREE", "POSTED", "ABORT_REQ", "ABORTED"]
        return f"sees rank {p} {names[phase]}", out
