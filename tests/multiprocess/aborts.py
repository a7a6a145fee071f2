"""What an abort leaves behind: launches in flight, other groups of the program.

Four processes in a mesh of two by two. Argument: a directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ranks import (
    Board,
    attempt,
    check,
    error_of,
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

DEADLINE_S = 2.0
LATE_S = 3.0
LAST = 3
BEFORE_POST = 1

scl.config.update("timeout", DEADLINE_S)
scl.initialize()
ME = jax.process_index()
BOARD = Board(sys.argv[1])
PIDS: list[int] = []


def name_of(rank: int) -> str:
    return f"rank {rank} (pid {PIDS[rank]})"


def dispatch(run: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
    """Starts a program, waits for nothing; gives what raises or returns."""
    try:
        result = run()
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        # A small program runs within its call.
        failure = error

        def fail() -> jax.Array:
            raise failure

        return fail
    return lambda: result


def independent_launches_in_flight() -> None:
    mesh = mesh_of()
    # The smaller programs run within their call, the larger ones behind it.
    for columns in (5, 50_000):
        operands = [scatter(rows(4, columns, seed=k), mesh) for k in range(4)]
        f = spmd(lambda v: psum(v) - v, mesh).lower(operands[0]).compile()
        BOARD.meet(f"independent.{columns}", 4, ME)
        if ME == LAST:
            time.sleep(LATE_S)
        started = [dispatch(lambda v=v: f(v)) for v in operands]
        ends = [attempt(run) for run in started]
        # The first missed rank 3; those behind it found it there.
        must_contain(ends[0][1], "DeadlineExceeded: ", name_of(LAST))
        for k in range(1, 4):
            x = rows(4, columns, seed=k)
            assert not ends[k][1], f"launch {k}: {ends[k][1]}"
            check(ends[k][0], total(x) - x, f"launch {k}")


def dependent_launches_in_flight() -> None:
    mesh = mesh_of()
    for columns in (5, 50_000):
        x = scatter(rows(4, columns), mesh)
        f = spmd(lambda v: psum(v) % 13 - v, mesh).lower(x).compile()
        BOARD.meet(f"dependent.{columns}", 4, ME)
        if ME == LAST:
            time.sleep(LATE_S)
        y = dispatch(lambda x=x: f(x))
        for _ in range(3):
            y = dispatch(lambda y=y: f(y()))
        must_contain(attempt(y)[1], "DeadlineExceeded: ", name_of(LAST))
        BOARD.meet(f"dependent.{columns}.raised", 4, ME)
        # None of the launches behind the failed one counts, on any rank.
        for k in range(5):
            z = rows(4, columns, seed=k)
            check(f(scatter(z, mesh)), total(z) % 13 - z, f"afterwards, {k}")


def groups_of_a_failed_program() -> None:
    devices = np.array(sorted(jax.devices(), key=lambda d: d.id)).reshape(2, 2)
    mesh = Mesh(devices, ("i", "j"))
    x = rows(4).reshape(2, 2, 5)

    def program(function: Callable[[jax.Array], jax.Array]) -> Callable[[], jax.Array]:
        mapped = jax.shard_map(
            lambda v: lax.pcast(function(v), tuple(unvaried(function)), to="varying"),
            mesh=mesh,
            in_specs=P("i", "j"),
            out_specs=P("i", "j"),
        )
        v = jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, P("i", "j")), lambda index: x[index]
        )
        compiled = jax.jit(mapped).lower(v).compile()
        return lambda: compiled(v)

    def unvaried(function: Callable) -> str:
        return {over_i: "i", over_j: "j", over_both: "ij", first_i: "j"}[function]

    def over_i(v: jax.Array) -> jax.Array:
        return scl.psum(v, "i")

    def over_j(v: jax.Array) -> jax.Array:
        return scl.psum(v, "j")

    def over_both(v: jax.Array) -> jax.Array:
        return scl.psum(v, ("i", "j"))

    def first_i(v: jax.Array) -> jax.Array:
        return scl.psum(lax.pcast(scl.psum(v, "i"), "i", to="varying"), "j")

    def repeat(a: np.ndarray) -> np.ndarray:
        return np.broadcast_to(a, x.shape)

    sum_i = repeat(x.sum(axis=0, keepdims=True))
    sum_j = repeat(x.sum(axis=1, keepdims=True))
    sum_ij = repeat(x.sum(axis=(0, 1), keepdims=True))
    run_i, run_j, run_both = program(over_i), program(over_j), program(over_both)
    run_i_then_j = program(first_i)
    for run, expected in ((run_i, sum_i), (run_j, sum_j), (run_both, sum_ij)):
        check(run(), expected, "before")
    check(run_i_then_j(), sum_ij, "before")

    BOARD.meet("groups", 4, ME)
    if ME == LAST:
        time.sleep(LATE_S)
    # Ranks 1 and 3 fail in their first group and never come to the second, where
    # 0 and 2 wait for them.
    must_contain(error_of(run_i_then_j), "DeadlineExceeded: ")
    BOARD.meet("groups.raised", 4, ME)
    for _ in range(3):
        check(run_i(), sum_i, "the group that the launch had come to")
        check(run_both(), sum_ij, "a group that the program does not have")
    for _ in range(2):
        error = error_of(run_j)
        must_contain(error, "DeadlineExceeded: ")
        if ME in (1, 3):
            must_contain(error, "this communicator is broken", "initialize()")
    for _ in range(3):
        check(run_both(), sum_ij, "a group that the program does not have")

    # All leave and come again: everything works.
    BOARD.meet("groups.leave", 4, ME)
    scl.shutdown()
    scl.initialize()
    for make, expected in ((over_i, sum_i), (over_j, sum_j), (over_both, sum_ij)):
        check(program(make)(), expected, "after initialize()")


def killed_with_launches_in_flight() -> None:
    mesh = mesh_of()
    columns, lives = 50_000, 6
    x = rows(4, columns)
    f = spmd(lambda v: psum(v) % 13 - v, mesh).lower(scatter(x, mesh)).compile()
    check(f(scatter(x, mesh)), total(x) % 13 - x, "before")
    BOARD.meet("killed", 4, ME)
    if ME == LAST:
        _native.set_fault(BEFORE_POST, lives, signal.SIGKILL)
    operands = [scatter(rows(4, columns, seed=k), mesh) for k in range(12)]
    started = [dispatch(lambda v=v: f(v)) for v in operands]
    for k, run in enumerate(started):
        result, error = attempt(run)
        if k < lives:
            z = rows(4, columns, seed=k)
            assert not error, f"launch {k}: {error}"
            check(result, total(z) % 13 - z, f"launch {k}")
        else:
            must_contain(error, "PeerLost: ", name_of(LAST))


CASES = [
    independent_launches_in_flight,
    dependent_launches_in_flight,
    groups_of_a_failed_program,
    killed_with_launches_in_flight,
]

BOARD.post(f"pid.{ME}", os.getpid())
PIDS += [int(BOARD.read(f"pid.{rank}")) for rank in range(4)]
for case in CASES:
    case()
    say("done", case.__name__)
say("ok")
os._exit(0)
