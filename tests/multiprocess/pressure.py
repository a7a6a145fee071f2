"""Posts far ahead of their readers, posting tables that run over; any layout.

Rank 0 only sends and the last rank only receives, from another process if there
is one.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ranks import check, mesh_of, psum, rows, run_all, scatter, spmd, total

import stratacl_jax as scl

scl.initialize()
MESH = mesh_of()
N = MESH.size
ME = jax.process_index()
LAST = N - 1
ONE_WAY = [(0, LAST)]


def run_ahead(columns: int, steps: int) -> None:
    """The last rank computes between two receipts."""
    size = 40

    def compute(w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, u: (u @ w) % 5, w)

    def body(carry: tuple, _: None) -> tuple:
        c, w = carry
        got = scl.ppermute(c, "i", ONE_WAY)
        w = lax.cond(lax.axis_index("i") == LAST, compute, lambda u: u, w)
        # Of every element: a sum that changes if one byte is of another step.
        return (c + 1, w), (got[0, 0], got[0, -1], got.sum())

    def run(v: jax.Array) -> jax.Array:
        w = jnp.ones((size, size), jnp.float32) * v[0, 0]
        out = lax.scan(body, (v, w), None, length=steps)[1]
        return jnp.stack(out)[None]

    x = rows(N, columns, seed=steps)
    k = np.arange(steps)
    expected = np.zeros((N, 3, steps), np.float32)
    expected[LAST] = x[0, 0] + k, x[0, -1] + k, x[0].sum() + columns * k
    assert expected.max() < 2**24  # sums of whole numbers are exact
    f = spmd(run, MESH)
    check(f(scatter(x, MESH)), expected)


def run_ahead_small() -> None:
    run_ahead(7, 5000)


def run_ahead_eager() -> None:
    run_ahead(1500, 2000)


def run_ahead_in_chunks() -> None:
    run_ahead(90_000, 120)


def launches_ahead() -> None:
    # Whole launches that rank 0 has done before the last rank begins them.
    f = spmd(lambda v, k: scl.ppermute(v + k[:, :1], "i", ONE_WAY), MESH)
    for columns, count in ((7, 300), (90_000, 40)):
        x = rows(N, columns)
        k = [scatter(np.full((N, 1), i, np.float32), MESH) for i in range(count)]
        v = scatter(x, MESH)
        jax.block_until_ready(f(v, k[0]))
        if jax.process_count() - 1 == ME:
            time.sleep(0.3)
        results = [f(v, i) for i in k]
        for i, result in enumerate(results):
            expected = np.zeros_like(x)
            expected[LAST] = x[0] + i
            check(result, expected, f"launch {i}")


def many_sites(count: int, launches: int) -> None:
    """That many calls in a program, all independent; the last rank begins late."""
    x = rows(N, 3)
    v = [scatter(x + k, MESH) for k in range(count)]
    f = spmd(lambda vs: [scl.ppermute(w, "i", ONE_WAY) for w in vs], MESH)
    f = f.lower(v).compile()

    def check_all(results: list[jax.Array], what: str) -> None:
        for k, result in enumerate(results):
            expected = np.zeros_like(x)
            expected[LAST] = x[0] + k
            check(result, expected, f"{what}, call {k}")

    check_all(f(v), "alone")
    if ME and jax.process_count() - 1 == ME:
        time.sleep(1.0)
    results = [f(v) for _ in range(launches)]
    for launch, result in enumerate(results):
        check_all(result, f"launch {launch}")


def full_buckets() -> None:
    # 300 calls, four executions each, in 512 buckets of four.
    many_sites(300, launches=6)


def full_table() -> None:
    # More posts at once than there are slots: the source waits, and goes on.
    many_sites(600, launches=5)


def full_table_of_all() -> None:
    x = rows(N, 3)
    v = [scatter(x + k, MESH) for k in range(600)]
    f = spmd(lambda vs: [psum(w) for w in vs], MESH)
    for result in [f(v) for _ in range(4)]:
        for k, one in enumerate(result):
            check(one, total(x) + N * k, f"call {k}")


CASES = [
    run_ahead_small,
    run_ahead_eager,
    run_ahead_in_chunks,
    launches_ahead,
    full_buckets,
    full_table,
    full_table_of_all,
]

if __name__ == "__main__":
    chosen = sys.argv[1:]
    run_all([c for c in CASES if not chosen or c.__name__ in chosen])
