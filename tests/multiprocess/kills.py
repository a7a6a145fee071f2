"""A rank of three is killed at a point of the protocol; the others must say so.

Five processes, three rounds: in each, three of those still alive form a group
and one of them dies. Arguments: the fault point's number, a directory.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from ranks import (
    Board,
    DeathWatch,
    attempt,
    check,
    mesh_of,
    must_contain,
    psum,
    rows,
    say,
    scatter,
    spmd,
    total,
)

import stratacl_jax as scl
from stratacl_jax import _native

POINT = int(sys.argv[1])
BEFORE_POST, AFTER_POST, ABORT_REQUESTED = 1, 2, 6
# Group and victim. Rank 0 is first, so that it is missing from then on.
ROUNDS = [((0, 1, 2), 0), ((1, 2, 3), 2), ((1, 3, 4), 4)]
# A post that carries its operand itself; several chunks, in two phases if summed.
SMALL, LARGE = 7, 300_001
PROMISED_S = 2.0
SLACK_S = 8.0  # of a busy machine
CALLS = 12

if POINT == ABORT_REQUESTED:
    scl.config.update("timeout", 3.0)  # somebody has to give up
scl.initialize()
ME = jax.process_index()
BOARD = Board(sys.argv[2])


def sum_up(v: jax.Array) -> jax.Array:
    return psum(v) % 13 - v


def gather(v: jax.Array) -> jax.Array:
    weights = jnp.array([[1.0], [2.0], [3.0]])
    return v + (scl.all_gather(v[0], "i") * weights).sum(axis=0) % 11


def after(call: int, x: np.ndarray) -> np.ndarray:
    if call % 2 == 0:
        return total(x) % 13 - x
    return x + (x * [[1], [2], [3]]).sum(axis=0) % 11


def run_round(number: int) -> None:
    group, victim = ROUNDS[number]
    columns = (SMALL, LARGE)[(POINT + number) % 2]
    strikes_at = 6 + number % 2  # the call in which the victim dies
    # Together, for deadlines may be short; only then with deadlines.
    BOARD.post(f"{number}.pid.{ME}", os.getpid())
    pids = {rank: int(BOARD.read(f"{number}.pid.{rank}")) for rank in group}
    name = f"rank {victim} (pid {pids[victim]})"
    mesh = mesh_of(group)
    programs = [spmd(sum_up, mesh), spmd(gather, mesh)]
    expected = rows(3, columns, seed=number)
    y = scatter(expected, mesh)
    for call in range(2):
        y = programs[call](y)
        expected = after(call, expected)
    check(y, expected, "before anything happens")

    if victim == ME:
        # Only who gives up passes the last point.
        passes = 0 if POINT == ABORT_REQUESTED else strikes_at
        _native.set_fault(POINT, passes, signal.SIGKILL)
        for call in range(CALLS):
            y = jax.block_until_ready(programs[call % 2](y))
        raise AssertionError("the victim has survived")

    watch = DeathWatch(pids[victim])
    done, error = 0, ""
    while done < CALLS:
        if POINT == ABORT_REQUESTED and done == strikes_at:
            watch.time_of_death()  # the victim waits for us, gives up, and dies
        call = functools.partial(programs[done % 2], y)
        result, error = attempt(call)
        if error:
            break
        y = result
        expected = after(done, expected)
        check(y, expected, f"call {done}")
        done += 1
    seconds = time.monotonic() - watch.time_of_death()
    must_contain(error, "PeerLost: ", name)
    assert seconds < PROMISED_S + SLACK_S, f"raised only after {seconds:.2f} s"

    # If all that was needed of the victim is there, the call still succeeds: so on
    # all survivors alike.
    # A gathered operand is all there with the post if it is read where XLA has it.
    direct = strikes_at % 2 == 1 and scl.config.registration != "staged"
    enough = POINT != BEFORE_POST and (
        columns == SMALL or direct or POINT not in (AFTER_POST, ABORT_REQUESTED)
    )
    assert done == strikes_at + enough, f"{done} calls succeeded"
    must_contain(attempt(call)[1], "PeerLost: ", name)
    say(
        f"round {number}: {columns} columns, rank {victim} killed in call "
        f"{strikes_at}; PeerLost {seconds:.3f} s later, {done} calls done"
    )


for k in range(len(ROUNDS)):
    if ME in ROUNDS[k][0]:
        run_round(k)
say("ok")
# Not through JAX's end, which would wait for the dead.
os._exit(0)
