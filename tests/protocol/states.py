"""Vocabulary of the protocol model: states, operations, scenarios, variants.

Owns: the layout of a model state.  A state is (ranks, budgets...), a rank and
a slot are flat tuples indexed by the constants below.  Whatever a rank keeps
about a peer is indexed by the distance d = (peer - me) mod n, so renaming the
ranks cyclically is a rotation of the tuple of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

# Phases of a slot.
FREE, POSTED, REQ, ABORTED = range(4)
# How an operation ended on a rank.
OK, ABORT, SKIPPED = range(3)
# What a rank waits for: needs, a drained slot, its readers, a peer's request.
W_STAGE, W_CLAIM, W_EXIT, W_RESOLVE = range(4)

(
    START, CLAIM, WRITE, POST, RING, BUMP, CHECK, ARM, BELL, SNAP, FIND, SLEEP, ASLEEP,
    PREACK, READ, PROG, VERDICT, HELP, ACK, EXIT, REQUEST, EPOCH1, RECHECK,
    RETRACT, EPOCH2, COMMIT, DOOM, ENTRY, END, DEAD,
) = range(30)  # fmt: skip

# Fields of a rank.  Private to it:
PC, OP, STAGE, WAIT, LEFT, NEXT, FORCE, SNAPS, MATCH, KNOWN, SEEN_EPOCH = range(11)
# Shared; RUNG, MASK, acks and (HELP only) phases are also written by peers.
SLOTS, ORDINAL, ABORTED_L, MASK, RUNG, EPOCH, RESULT = range(11, 18)
# Fields of a slot.  GONE: XLA reuses the memory the slot points to.
GEN, PHASE, KEY, PROGRESS, ACKS, GONE = range(6)

Rank = tuple
State = tuple
Changes = dict[int, list]


@dataclass(frozen=True)
class Op:
    """One operation.  `needs[k][r]`: the distances rank r's stage k waits for.

    In an `agreed` operation every rank needs every other; those promise one
    verdict for all.  The others (ppermute) promise right data only.
    """

    launch: int
    needs: tuple[tuple[tuple[int, ...], ...], ...]
    agreed: bool = True
    direct: bool = False  # peers read XLA's memory: return after their acks


@dataclass(frozen=True)
class Scenario:
    name: str
    n: int
    ops: tuple[Op, ...]
    slots: int = 1
    deadlines: int = 0  # how many waits may time out, anywhere
    crashes: int = 0  # how many ranks may die, anywhere
    siblings: int = 0  # how often another operation of the launch may abort it
    rotate: bool = True  # the ranks are interchangeable
    coarse: bool = False  # fewer, larger steps: see Model.coarse_steps


@dataclass(frozen=True)
class Variant:
    """The protocol's choices.  The defaults are the protocol."""

    recheck: bool = True  # look again between arming and sleeping
    bell_first: bool = True  # read the doorbell before arming, not after
    arm_first: bool = True  # set wait_mask before that look, not after
    clear_first: bool = True  # the waker clears the bit, then bumps the bell
    store_then_ring: bool = True  # POSTED is visible before wait_mask is read
    ack_then_ring: bool = True  # the same for the ack words
    ack_after_read: bool = True
    reuse_needs_acks: bool = True
    release: str = "slot"  # what releases besides acks: slot | entry | none
    own_entry_after_post: bool = True  # one-sided: look before anything is read
    request: bool = True  # ABORT_REQ before ABORTED
    look_after_request: bool = True  # needs are read again in between
    request_counts: bool = True  # a peer in ABORT_REQ still counts as posted
    ready_needs_posted: bool = False  # a request holds its peers' stages up
    entry_over_slot: bool = False  # verdict: aborted_launch beats the slot
    snap_first: bool = True  # entries and liveness are read before the slots
    verdict: str = "help"  # help | epoch (compare, then wait) | none
    dead_request: str = "posted"  # epoch: a dead rank's request counts as
    resolve_deadline: bool = False  # epoch: the wait for a request may time out
    exit_wait: bool = True


class Fault(Exception):
    """An invariant is broken."""
