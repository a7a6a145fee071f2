"""Ranks call different things: each must learn who called what, and go on.

Three processes. Argument: a directory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ranks import (
    Board,
    check,
    error_of,
    mesh_of,
    must_contain,
    psum,
    rows,
    run_all,
    say,
    scatter,
    spmd,
    total,
)

import stratacl_jax as scl

PROMISED_S = 5.0
SLACK_S = 10.0  # of a busy machine

scl.initialize()
ME = jax.process_index()
MESH = mesh_of()
N = MESH.size
BOARD = Board(sys.argv[1])
RING = [(0, 1), (1, 2), (2, 0)]
BACK = [(1, 0), (2, 1), (0, 2)]

Function = Callable[[jax.Array], jax.Array]
good = spmd(lambda v: psum(v) - v, MESH)
serial = 0


def refused(mine: Function, x: np.ndarray, *words: str) -> None:
    """Runs what this rank calls; all must get Mismatch that names `words`.

    Args:
      mine: the function of a row that this rank calls.
      x: its operand, as all ranks' rows.
      words: descriptions of both calls.
    """
    global serial
    serial += 1
    f = spmd(mine, MESH)
    x = scatter(x, MESH)
    f = f.lower(x).compile()
    BOARD.meet(f"{serial}", N, ME)
    begin = time.monotonic()
    error = error_of(lambda: f(x))
    seconds = time.monotonic() - begin
    must_contain(error, "Mismatch: ", *words)
    # Both sides by name: this rank, and at least one other.
    named = {rank for rank in range(N) if f"rank {rank} (pid " in error}
    assert ME in named and len(named) >= 2, error
    assert seconds < PROMISED_S + SLACK_S, f"raised only after {seconds:.2f} s"
    BOARD.meet(f"{serial}.raised", N, ME)
    next_correct_calls()
    say(f"  {sys._getframe(1).f_code.co_name}: Mismatch after {seconds:.2f} s")


def next_correct_calls() -> None:
    y = rows(N, seed=serial)
    for _ in range(3):
        check(good(scatter(y, MESH)), total(y) - y, "the next correct call")


def gathered(v: jax.Array) -> jax.Array:
    return scl.all_gather(v, "i").sum(axis=0)


def operator() -> None:
    odd = ME == 1
    refused(
        gathered if odd else psum,
        rows(N),
        "all_gather of float32[1,5] over 3 ranks",
        "psum of float32[1,5] over 3 ranks",
    )


def operator_of_large_arrays() -> None:
    odd = ME == 0
    refused(
        gathered if odd else psum,
        rows(N, 200_000),
        "all_gather of float32[1,200000] over 3 ranks",
        "psum of float32[1,200000] over 3 ranks",
    )


def scatter_or_sum() -> None:
    def scattered(v: jax.Array) -> jax.Array:
        return jnp.tile(scl.psum_scatter(v[0], "i", tiled=True), 3)[None]

    refused(
        scattered if ME == 2 else psum,
        rows(N, 6),
        "psum_scatter of float32[3,2] over 3 ranks",
        "psum of float32[1,6] over 3 ranks",
    )


def shape() -> None:
    columns = 5 if ME == 2 else 3
    refused(psum, rows(N, columns), "psum of float32[1,3]", "psum of float32[1,5]")


def dtype() -> None:
    x = rows(N).astype(np.int32 if ME == 0 else np.float32)
    refused(psum, x, "psum of float32[1,5]", "psum of int32[1,5]")


def number_of_arrays() -> None:
    def run(v: jax.Array) -> jax.Array:
        leaves = (v, v + 1) if ME == 1 else (v,)
        return sum(scl.psum(leaves, "i")) + 0 * v

    refused(
        run, rows(N), "psum of float32[1,5] and 1 more arrays", "psum of float32[1,5]"
    )


def permutation() -> None:
    # Rank 0 sends to 1 and receives from 2 by both calls' reckoning but 1's own:
    # it has its result, for a source does not wait for its reader.
    def run(v: jax.Array) -> jax.Array:
        return scl.ppermute(v, "i", BACK if ME == 1 else RING)

    if ME == 0:
        x = rows(N)
        f = spmd(run, MESH)
        correctly_done(lambda: check(f(scatter(x, MESH)), np.roll(x, 1, axis=0)))
    else:
        refused(run, rows(N), "ppermute of float32[1,5] over 3 ranks")


def sent_and_gone() -> None:
    # Rank 0 has sent, waits for nobody and makes no further call meanwhile; what
    # it called is known all the same.
    def run(v: jax.Array) -> jax.Array:
        return scl.ppermute(v, "i", [(0, 1)]) if ME == 0 else psum(v)

    if ME == 0:
        x = rows(N)
        f = spmd(run, MESH)
        correctly_done(lambda: check(f(scatter(x, MESH)), np.zeros_like(x)))
    else:
        refused(run, rows(N), "psum of float32[1,5]", "ppermute of float32[1,5]")


def one_call_more() -> None:
    # The others end their launch without the second call; their next one tells.
    def run(v: jax.Array) -> jax.Array:
        v = psum(v)
        return psum(v * 2) if ME == 1 else v

    global serial
    serial += 1
    x = rows(N)
    f = spmd(run, MESH)
    if ME == 1:
        error = error_of(lambda: f(scatter(x, MESH)))
        must_contain(error, "Mismatch: ", "psum of float32[1,5] over 3 ranks (launch")
        must_contain(error, "rank 1 (pid ", "finished its launch without it")
    else:
        check(f(scatter(x, MESH)), total(x))
    next_correct_calls()


def correctly_done(run: Callable[[], None]) -> None:
    """`refused`, on a rank whose own call is none of those that cannot be."""
    global serial
    serial += 1
    BOARD.meet(f"{serial}", N, ME)
    run()
    BOARD.meet(f"{serial}.raised", N, ME)
    next_correct_calls()


def predicate_that_differs() -> None:
    # The same two calls on all ranks, in another order on one: nobody computes,
    # nobody can go on.
    def run(v: jax.Array) -> jax.Array:
        odd = lax.axis_index("i") == 1

        def first(w: jax.Array) -> jax.Array:
            w = psum(w)
            return vary_gather(w)

        def second(w: jax.Array) -> jax.Array:
            w = vary_gather(w)
            return psum(w)

        return lax.cond(odd, second, first, v)

    def vary_gather(w: jax.Array) -> jax.Array:
        return scl.all_gather(w, "i").sum(axis=0)

    refused(run, rows(N), "psum of float32[1,5]", "all_gather of float32[1,5]")


CASES = [
    operator,
    operator_of_large_arrays,
    scatter_or_sum,
    shape,
    dtype,
    number_of_arrays,
    permutation,
    sent_and_gone,
    one_call_more,
    predicate_that_differs,
]

if __name__ == "__main__":
    run_all(CASES)
