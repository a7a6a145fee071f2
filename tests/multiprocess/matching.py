"""Programs in which calls are easily paired wrongly; values are checked."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ranks import check, mesh_of, psum, rows, run_all, scatter, spmd, total, vary

import stratacl_jax as scl

scl.initialize()
MESH = mesh_of()
N = MESH.size
ME = jax.process_index()
RING = [(r, (r + 1) % N) for r in range(N)]


def different_source_lines() -> None:
    x = rows(N)
    if ME == 0:

        def mine(v):
            return psum(v * 2) + 1
    else:

        def mine(v):

            return psum(v * 2) + 1

    f = spmd(mine, MESH)
    if ME == 0:  # noqa: SIM108 (two lines are the point)
        y = f(scatter(x, MESH))
    else:
        y = f(scatter(x, MESH))
    for _ in range(3):
        y = f(y) if ME % 2 else f(y)
    expected = x
    for _ in range(4):
        expected = total(expected * 2) + 1
    check(y, expected)


def inner_jit_twice() -> None:
    # One lowered function called twice: two calls with equal attributes, and
    # nothing orders them.
    @jax.jit
    def inner(v):
        return psum(v) - v

    def outer(v):
        return inner(v), inner(v * 3 + 1), inner(v[:, ::-1] - 2)

    x = rows(N)
    f = spmd(lambda v: jnp.stack(outer(v), axis=1), MESH)
    for _ in range(5):
        y = f(scatter(x, MESH))

    def want(v):
        return total(v) - v

    check(y, np.stack([want(x), want(x * 3 + 1), want(x[:, ::-1] - 2)], axis=1))


def scan_unrolled() -> None:
    def body(c, _):
        c = psum(c) % 17 + 1
        return c, c

    x = rows(N)
    f = spmd(lambda v: lax.scan(body, v, None, length=7, unroll=2)[0], MESH)
    expected = x
    for _ in range(7):
        expected = total(expected) % 17 + 1
    check(f(scatter(x, MESH)), expected)


def while_loop() -> None:
    def body(state):
        i, v = state
        return i + 1, psum(v) % 23 - v

    def run(v):
        return lax.while_loop(lambda s: s[0] < 11, body, (0, v))[1]

    x = rows(N)
    expected = x
    for _ in range(11):
        expected = total(expected) % 23 - expected
    check(spmd(run, MESH)(scatter(x, MESH)), expected)


def conditional() -> None:
    # The predicate is the same on all ranks; the branches call different things.
    def step(v, k):
        sign = scl.psum(v[0, 0], "i") * 0 + k
        return lax.cond(
            sign % 3 == 0,
            lambda w: psum(w) % 19,
            lambda w: scl.ppermute(w, "i", RING) + 1,
            v,
        )

    def run(v):
        return lax.scan(lambda c, k: (step(c, k), None), v, jnp.arange(9.0))[0]

    x = rows(N)
    expected = x
    for k in range(9):
        if k % 3 == 0:
            expected = total(expected) % 19
        else:
            expected = np.roll(expected, 1, axis=0) + 1
    check(spmd(run, MESH)(scatter(x, MESH)), expected)


def independent_calls() -> None:
    # Matrix products keep several threads of XLA busy, so that the calls start
    # in another order on each device.
    size = 48
    weights = np.random.default_rng(5).integers(-1, 2, (20, size, size))
    weights = weights.astype(np.float32)

    def run(v):
        out = []
        for k in range(20):
            u = v[0] @ weights[k]
            if k % 4 == 0:
                u = psum(u)
            elif k % 4 == 1:
                u = scl.ppermute(u, "i", RING)
            elif k % 4 == 2:
                u = scl.all_gather(u, "i").sum(axis=0) + k
            else:
                u = psum(u) - u
            out.append((u % 101) @ weights[19 - k])
        return jnp.stack(out)[None]

    x = np.random.default_rng(1).integers(-3, 4, (N, size, size)).astype(np.float32)
    expected = []
    for k in range(20):
        u = x @ weights[k]
        if k % 4 == 0:
            u = total(u)
        elif k % 4 == 1:
            u = np.roll(u, 1, axis=0)
        elif k % 4 == 2:
            u = total(u) + k
        else:
            u = total(u) - u
        expected.append((u % 101) @ weights[19 - k])
    f = spmd(run, MESH)
    for _ in range(4):
        check(f(scatter(x, MESH)), np.stack(expected, axis=1))


def independent_calls_on_two_groups() -> None:
    # Twelve calls of four kinds, over the rows and the columns of a mesh.
    if N < 4:
        return
    a, b = 2, N // 2
    devices = MESH.devices.reshape(a, b)
    mesh = Mesh(devices, ("i", "j"))

    def run(v):
        out = []
        for k, (axis, size) in enumerate([("i", a), ("j", b)] * 6):
            u = v[0, 0] * (k + 1) + k
            if k // 2 % 4 == 0:
                u = scl.psum(u, axis)
            elif k // 2 % 4 == 1:
                u = scl.ppermute(u, axis, [(r, (r + 1) % size) for r in range(size)])
            elif k // 2 % 4 == 2:
                u = scl.all_gather(u, axis).sum(axis=0) + 1
            else:
                u = jnp.tile(scl.psum_scatter(u, axis, tiled=True), size)
            out.append(lax.pcast(u, missing_axes(u), to="varying"))
        return jnp.stack(out)[None, None]

    x = rows(N, 4 * b).reshape(a, b, 4 * b)
    expected = []
    for k, axis in enumerate([0, 1] * 6):
        size = x.shape[axis]
        u = x * (k + 1) + k
        summed = np.broadcast_to(u.sum(axis=axis, keepdims=True), u.shape)
        if k // 2 % 4 == 0:
            u = summed
        elif k // 2 % 4 == 1:
            u = np.roll(u, 1, axis=axis)
        elif k // 2 % 4 == 2:
            u = summed + 1
        else:
            part = 4 * b // size
            mine = np.indices((a, b))[axis][:, :, None] * part + np.arange(part)
            u = np.tile(np.take_along_axis(summed, mine, axis=2), size)
        expected.append(u)
    spec = P("i", "j")
    f = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
    v = jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    )
    for _ in range(4):
        check(f(v), np.stack(expected, axis=2))


def missing_axes(v: jax.Array) -> tuple[str, ...]:
    return tuple({"i", "j"} - set(jax.typeof(v).mat.varying))


def compiled_twice_ahead_of_time() -> None:
    def make(k):
        # Distinct functions, so that nothing is shared between the copies.
        return spmd(lambda v: inner(v) + inner(v * 2 + k) - k * N, MESH)

    inner = jax.jit(psum)
    x = scatter(rows(N), MESH)
    first = make(1).lower(x).compile()
    second = make(1).lower(x).compile()
    expected = total(rows(N)) * 3
    order = (first, second, second, first)
    for f in order:
        check(f(x), expected)


def caches_cleared_on_one_rank() -> None:
    x = rows(N)
    f = spmd(lambda v: psum(v) - 2 * v, MESH)
    expected = total(x) - 2 * x
    check(f(scatter(x, MESH)), expected)
    if ME == 0:
        jax.clear_caches()
    for _ in range(3):
        check(f(scatter(x, MESH)), expected)


def one_rank_prints() -> None:
    def run(v):
        a = psum(v)
        if ME == 0:
            jax.debug.print("printed {}", a[0, 0] * 0)
        return psum(a * 2 - v) + scl.ppermute(v, "i", RING)

    x = rows(N)
    y = spmd(run, MESH)(scatter(x, MESH))
    check(y, total(2 * total(x) - x) + np.roll(x, 1, axis=0))
    jax.effects_barrier()


def pipelined_launches() -> None:
    # Hundreds of launches in flight; small, and large enough to be staged.
    for columns in (5, 40_000):
        f = spmd(lambda v: psum(v) % 13 - v, MESH)
        y = scatter(rows(N, columns), MESH)
        count = 200 if columns == 5 else 40
        for _ in range(count):
            y = f(y)
        expected = rows(N, columns)
        for _ in range(count):
            expected = total(expected) % 13 - expected
        check(y, expected)


def partial_permutation() -> None:
    # Only rank 0 and rank 1 meet; the others must stay in step all the same.
    if N < 3:
        return
    x = rows(N)
    f = spmd(lambda v: scl.ppermute(v, "i", [(0, 1)]), MESH)
    g = spmd(psum, MESH)
    expected = np.zeros_like(x)
    expected[1] = x[0]
    for _ in range(6):
        check(f(scatter(x, MESH)), expected)
        check(g(scatter(x, MESH)), total(x))


def pytrees_and_sizes() -> None:
    # Equal call sites, other sizes: none may be taken for another.
    for columns in (1, 3, 1000, 70_000):
        x = rows(N, columns, seed=columns)

        def run(v):
            a, b = scl.psum((v, v[:, :1] * 2), "i")
            return vary(a + b)

        want = total(x) + total(x[:, :1] * 2)
        check(spmd(run, MESH)(scatter(x, MESH)), want)


CASES = [
    different_source_lines,
    inner_jit_twice,
    scan_unrolled,
    while_loop,
    conditional,
    independent_calls,
    independent_calls_on_two_groups,
    compiled_twice_ahead_of_time,
    caches_cleared_on_one_rank,
    one_rank_prints,
    pipelined_launches,
    partial_permutation,
    pytrees_and_sizes,
]

if __name__ == "__main__":
    chosen = sys.argv[1:]
    run_all([c for c in CASES if not chosen or c.__name__ in chosen])
