"""A rank is stopped in the middle of the protocol, and goes on much later.

Three processes. Arguments: "past" (beyond the deadline) or "within" it, and a
directory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ranks import (
    Board,
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

BEFORE_POST, AFTER_POST, MID_STAGES, BEFORE_ACK, AFTER_ACK, ABORT_REQUESTED = range(
    1, 7
)
SMALL, LARGE = 7, 300_001
DEADLINE_S = 2.0
PAUSE_S = 1.5
WARN_AFTER_S = 0.4
LATE_S = 1.2
CALLS = 9
STRIKES_AT = 4

MODE, BOARD = sys.argv[1], Board(sys.argv[2])
if MODE == "past":
    scl.config.update("timeout", DEADLINE_S)
else:
    scl.config.update("warn_after", WARN_AFTER_S)
scl.initialize()
ME = jax.process_index()
MESH = mesh_of()
N = MESH.size
PIDS: list[int] = []


def meet(name: str) -> None:
    BOARD.meet(name, N, ME)


def name_of(rank: int) -> str:
    return f"rank {rank} (pid {PIDS[rank]})"


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def wait_until_stopped(pid: int) -> None:
    end = time.monotonic() + 60
    while not is_stopped(pid):
        assert time.monotonic() < end, "the victim did not stop"
        time.sleep(0.02)


# --- past the deadline ----------------------------------------------------------


def past(number: int, point: int, victim: int, columns: int) -> None:
    f = spmd(lambda v: psum(v) % 13 - v, MESH)

    def after(x: np.ndarray) -> np.ndarray:
        return total(x) % 13 - x

    expected = rows(N, columns, seed=number)
    y = scatter(expected, MESH)
    f = f.lower(y).compile()  # which takes longer on one rank than on another
    # Of the size of operands and results, before and among them.
    canaries = [scatter(rows(N, columns, seed=100 + k), MESH) for k in range(4)]
    jax.block_until_ready(canaries)
    meet(f"{number}.start")
    for _ in range(2):
        y = f(y)
        expected = after(expected)
    check(y, expected, "before anything happens")
    if victim == ME:
        passes = 0 if point == ABORT_REQUESTED else STRIKES_AT
        _native.set_fault(point, passes, signal.SIGSTOP)
    meet(f"{number}.armed")

    done, error = 0, ""
    begin = time.monotonic()
    while done < CALLS:
        if point == ABORT_REQUESTED and done == STRIKES_AT and victim != ME:
            wait_until_stopped(PIDS[victim])  # it waits for us and gives up
            begin = time.monotonic()
        result, error = attempt(lambda: f(y))
        if error:
            break
        y = result
        expected = after(expected)
        check(y, expected, f"call {done}")
        done += 1
    seconds = time.monotonic() - begin
    must_contain(
        error, "DeadlineExceeded: ", name_of(victim), "psum of float32", "launch"
    )
    _native.set_fault(0, 0, 0)

    BOARD.post(f"{number}.raised.{ME}", error)
    if victim != ME:
        # What XLA has taken back is in use again when the stopped rank wakes.
        canaries += [scatter(rows(N, columns, seed=100 + k), MESH) for k in range(4, 8)]
        jax.block_until_ready(canaries)
        meet_survivors(f"{number}.ready", victim)
        if min(r for r in range(N) if r != victim) == ME:
            assert is_stopped(PIDS[victim])
            os.kill(PIDS[victim], signal.SIGCONT)
    meet(f"{number}.resumed")
    for k, canary in enumerate(canaries):
        check(canary, rows(N, columns, seed=100 + k), f"canary {k}")
    enough = point != BEFORE_POST and (
        columns == SMALL or point not in (AFTER_POST, ABORT_REQUESTED)
    )
    assert done == STRIKES_AT + enough, f"{done} calls succeeded"
    # The next launch is a fresh start.
    for k in range(2):
        y = f(y)
        expected = after(expected)
        check(y, expected, f"call {k} after the error")
    say(
        f"point {point}, rank {victim}, {columns} columns: {done} calls, then after "
        f"{seconds:.2f} s {error.partition(':')[0]}"
    )


def past_one_way(number: int, columns: int) -> None:
    """The reader of a one-sided operator is stopped; its source runs ahead."""
    f = spmd(lambda v: scl.ppermute(v, "i", [(0, 1)]), MESH)
    x = rows(N, columns, seed=number)
    f = f.lower(scatter(x, MESH)).compile()
    if ME == 1:
        _native.set_fault(MID_STAGES, STRIKES_AT, signal.SIGSTOP)
    meet(f"{number}.start")
    done, error = 0, ""
    # Four posts may await their reader, if the operand is in the post; what is read
    # where XLA has it is waited for. Rank 2 meets nobody and makes all calls.
    direct = columns != SMALL and scl.config.registration != "staged"
    succeed = STRIKES_AT if direct else STRIKES_AT + 4
    while done <= succeed:
        expected = np.zeros_like(x)
        expected[1] = x[0] + done
        result, error = attempt(lambda: f(scatter(x + done, MESH)))
        if error:
            break
        check(result, expected, f"call {done}")
        done += 1
    if ME == 2:
        assert done == succeed + 1, error
        BOARD.read(f"{number}.raised.0")
        os.kill(PIDS[1], signal.SIGCONT)
    else:
        assert done == succeed, f"{done} calls succeeded"
        must_contain(error, "DeadlineExceeded: ", name_of(1), "ppermute", "launch")
    BOARD.post(f"{number}.raised.{ME}", error)
    meet(f"{number}.resumed")
    expected[1] = x[0]
    check(f(scatter(x, MESH)), expected, "after the error")
    say(f"one way, {columns} columns: {done} calls, {error.partition(':')[0]}")


def meet_survivors(name: str, victim: int) -> None:
    BOARD.post(f"{name}.{ME}", "here")
    for rank in set(range(N)) - {victim}:
        BOARD.read(f"{name}.{rank}")


# --- within the deadline --------------------------------------------------------


def chain(columns: int) -> Callable[[], None]:
    f = spmd(lambda v: psum(v) % 13 - v, MESH)

    def run() -> None:
        expected = rows(N, columns)
        y = scatter(expected, MESH)
        for k in range(CALLS):
            y = f(y)
            expected = total(expected) % 13 - expected
            check(y, expected, f"call {k}")

    return run


def pipeline() -> Callable[[], None]:
    f = spmd(lambda v: psum(v) % 13 - v, MESH)

    def run() -> None:
        expected = rows(N)
        y = scatter(expected, MESH)
        for _ in range(40):
            y = f(y)
            expected = total(expected) % 13 - expected
        check(y, expected)

    return run


def one_way(columns: int) -> Callable[[], None]:
    # Rank 0 only sends: it runs ahead until it has no slot left.
    def body(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        got = scl.ppermute(c, "i", [(0, 1)])
        return c + 1, got[:, 0]

    f = spmd(lambda v: lax.scan(body, v, None, length=50)[1].T, MESH)

    def run() -> None:
        x = rows(N, columns)
        expected = np.zeros((N, 50), np.float32)
        expected[1] = x[0, 0] + np.arange(50)
        check(f(scatter(x, MESH)), expected)

    return run


def within(number: int, case: Callable[[], None], victim: int) -> None:
    case()
    meet(f"{number}.warm")
    usage: list[float] = []

    def watch() -> None:
        wait_until_stopped(PIDS[victim])
        time.sleep(0.1)
        cpu, begin = time.process_time(), time.monotonic()
        time.sleep(PAUSE_S - 0.2)
        usage.append((time.process_time() - cpu) / (time.monotonic() - begin))
        BOARD.post(f"{number}.measured.{ME}", usage[0])
        others = set(range(N)) - {victim}
        if min(others) == ME:
            for rank in others:
                BOARD.read(f"{number}.measured.{rank}")
            os.kill(PIDS[victim], signal.SIGCONT)

    watcher = threading.Thread(target=watch)
    if victim == ME:
        _native.set_fault(MID_STAGES, STRIKES_AT, signal.SIGSTOP)
    else:
        watcher.start()
    begin = time.monotonic()
    case()
    seconds = time.monotonic() - begin
    if victim != ME:
        watcher.join()
        say(f"case {number}: {usage[0]:.3f} CPU-s per s of waiting, {seconds:.2f} s")
        assert usage[0] < 0.2, f"{usage[0]:.3f} CPU-s per s while waiting"
    _native.set_fault(0, 0, 0)
    meet(f"{number}.end")


def late() -> None:
    """Rank 1 comes late to each operator in turn; the others warn, once each."""
    x = rows(N, 9)  # a shape of its own: the test counts the warnings
    everybody = np.broadcast_to(x.sum(axis=0), x.shape)
    cases = [
        (psum, everybody),
        (lambda v: scl.all_gather(v, "i").sum(axis=0), everybody),
        (
            lambda v: jnp.tile(scl.psum_scatter(v[0], "i", tiled=True), 3)[None],
            np.stack([np.tile(x.sum(axis=0)[3 * r : 3 * r + 3], 3) for r in range(N)]),
        ),
        # Each of the others hears from rank 1, or from one that does.
        (
            lambda v: scl.ppermute(v, "i", [(1, 0), (0, 2), (2, 1)]),
            x[[1, 2, 0]],
        ),
        (lambda v: scl.barrier("i", v), x),
    ]
    for k, (function, expected) in enumerate(cases):
        f = spmd(function, MESH)
        f = f.lower(scatter(x, MESH)).compile()
        meet(f"late.{k}")
        if ME == 1:
            time.sleep(LATE_S)
        check(f(scatter(x, MESH)), expected)


BOARD.post(f"pid.{ME}", os.getpid())
PIDS += [int(BOARD.read(f"pid.{rank}")) for rank in range(N)]
if MODE == "past":
    past(0, BEFORE_POST, 0, SMALL)
    past(1, AFTER_POST, 1, LARGE)
    past(2, AFTER_POST, 2, SMALL)
    past(3, MID_STAGES, 0, LARGE)
    past(4, BEFORE_ACK, 1, LARGE)
    past(5, AFTER_ACK, 2, SMALL)
    past(6, ABORT_REQUESTED, 0, SMALL)
    past(7, ABORT_REQUESTED, 1, LARGE)
    past_one_way(8, SMALL)
    past_one_way(9, LARGE)
else:
    within(0, chain(SMALL), 0)
    within(1, chain(LARGE), 1)
    within(2, pipeline(), 2)
    within(3, one_way(SMALL), 1)
    within(4, one_way(LARGE), 1)
    late()
say("ok")
