"""Deadlines among the devices of one process, which read each other's memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from ranks import (
    attempt,
    check,
    mesh_of,
    must_contain,
    psum,
    rows,
    run_all,
    scatter,
    total,
)

import stratacl_jax as scl

DEADLINE_S = 1.2
LATE_S = 1.8
COLUMNS = 100_000  # beyond what a post carries: read where XLA has it

scl.config.update("timeout", DEADLINE_S)
scl.initialize()
MESH = mesh_of()
N = MESH.size
LATE = 2

Function = Callable[[jax.Array], jax.Array]


def late_on_one_device(flag: np.ndarray, index: np.ndarray) -> np.ndarray:
    if flag and index == LATE:
        time.sleep(LATE_S)
    return np.float32(0)


def delayed(function: Function) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`function`, to which one device comes late if the flag is set."""

    def run(v: jax.Array, flag: jax.Array) -> jax.Array:
        zero = jax.pure_callback(
            late_on_one_device,
            jax.ShapeDtypeStruct((), np.float32),
            flag[0, 0],
            lax.axis_index("i"),
        )
        return function(v + zero)

    return spmd_of_two(run)


def spmd_of_two(function: Callable) -> Callable:
    spec = jax.sharding.PartitionSpec("i")
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=(spec, spec), out_specs=spec)
    )


def one_is_late(function: Function, expected: Callable, op: str) -> None:
    f = delayed(function)
    on, off = (scatter(np.full((N, 1), k, np.float32), MESH) for k in (1, 0))
    x = rows(N, COLUMNS)
    v = scatter(x, MESH)
    check(f(v, off), expected(x), "before")
    canaries = [scatter(rows(N, COLUMNS, seed=k), MESH) for k in range(1, 5)]
    error = attempt(lambda: f(v, on))[1]
    must_contain(error, "DeadlineExceeded: ", f"rank {LATE}", f"{op} of float32")
    # Operands and results of the failed launch are freed and in use again.
    canaries += [scatter(rows(N, COLUMNS, seed=k), MESH) for k in range(5, 9)]
    for _ in range(3):
        check(f(v, off), expected(x), "after the error")
    for k, canary in enumerate([v, *canaries]):
        check(canary, rows(N, COLUMNS, seed=k), f"canary {k}")


def late_to_psum() -> None:
    one_is_late(lambda v: psum(v) % 13 - v, lambda x: total(x) % 13 - x, "psum")


def late_to_all_gather() -> None:
    weights = np.arange(1, N + 1, dtype=np.float32)[:, None]
    one_is_late(
        lambda v: (scl.all_gather(v[0], "i") * weights).sum(axis=0)[None],
        lambda x: total(x * weights),
        "all_gather",
    )


def late_to_ppermute() -> None:
    ring = [(r, (r + 1) % N) for r in range(N)]
    one_is_late(
        lambda v: scl.ppermute(v, "i", ring),
        lambda x: np.roll(x, 1, axis=0),
        "ppermute",
    )


def one_waits_for_one() -> None:
    # The others meet nobody; the late one sends to a reader that has given up.
    def expected(x: np.ndarray) -> np.ndarray:
        y = np.zeros_like(x)
        y[0] = x[LATE]
        return y

    one_is_late(lambda v: scl.ppermute(v, "i", [(LATE, 0)]), expected, "ppermute")


def late_with_more_to_do() -> None:
    # Independent collectives of one launch: one fails, all end.
    def run(v: jax.Array) -> jax.Array:
        a = psum(v) % 13
        b = scl.ppermute(v, "i", [(r, (r + 1) % N) for r in range(N)])
        c = psum(v * 2 + 1) % 11
        return a - b + c

    one_is_late(
        run,
        lambda x: total(x) % 13 - np.roll(x, 1, axis=0) + total(x * 2 + 1) % 11,
        "",
    )


def pipelined_errors() -> None:
    f = delayed(lambda v: psum(v) % 13 - v)
    on, off = (scatter(np.full((N, 1), k, np.float32), MESH) for k in (1, 0))
    operands = [scatter(rows(N, COLUMNS, seed=k), MESH) for k in range(4)]
    jax.block_until_ready(f(operands[0], off))
    started = [f(v, on if k == 1 else off) for k, v in enumerate(operands)]
    for k, result in enumerate(started):
        error = attempt(lambda result=result: result)[1]
        if k == 1:
            must_contain(error, "DeadlineExceeded: ", f"rank {LATE}")
        else:
            x = rows(N, COLUMNS, seed=k)
            assert not error, error
            check(result, total(x) % 13 - x, f"launch {k}")


CASES = [
    late_to_psum,
    late_to_all_gather,
    late_to_ppermute,
    one_waits_for_one,
    late_with_more_to_do,
    pipelined_errors,
]

if __name__ == "__main__":
    chosen = sys.argv[1:]
    run_all([c for c in CASES if not chosen or c.__name__ in chosen])
