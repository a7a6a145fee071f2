"""Derivatives and vmap of the operators, against a dense formula on one device.

Every operator here is a linear map of all ranks' operands to all ranks' results.
`TABLE` has both forms of it; values along the first dimension of `dense`'s
argument are those of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stratacl_jax as scl
from live import sheet


class Linear(NamedTuple):
    """An operator with its parameters.

    Attributes:
      shape: of one rank's operand, given the number of ranks.
      call: on one rank's operand and the axis name.
      dense: on all operands, stacked.
    """

    shape: Callable[[int], tuple[int, ...]]
    call: Callable[[Any, Any], Any]
    dense: Callable[[Any], Any]


def _to_all(x: Any) -> Any:
    return jnp.broadcast_to(x, (x.shape[0], *x.shape))


def _same_for_all(x: Any, n: int) -> Any:
    return jnp.broadcast_to(x, (n, *x.shape))


def _shifted(pairs: Callable[[int], Sequence[tuple[int, int]]], x: Any) -> Any:
    y = jnp.zeros_like(x)
    for s, d in pairs(x.shape[0]):
        y = y.at[d].set(x[s])
    return y


def _ring(n: int) -> list[tuple[int, int]]:
    return [(r, (r + 1) % n) for r in range(n)]


def _partial(n: int) -> list[tuple[int, int]]:
    return [(n - 1, 0), (0, n - 1)] if n > 2 else [(1, 0)]


def _tiles(x: Any, n: int, d: int) -> Any:
    """Dealt out along dimension d of one rank's array: the parts first."""
    return jnp.stack(jnp.split(x, n, d))


TABLE: dict[str, Linear] = {
    "psum": Linear(
        lambda n: (3, 2),
        scl.psum,
        lambda x: _same_for_all(x.sum(0), x.shape[0]),
    ),
    "pmean": Linear(
        lambda n: (3, 2),
        scl.pmean,
        lambda x: _same_for_all(x.mean(0), x.shape[0]),
    ),
    "all_gather": Linear(lambda n: (3, 2), scl.all_gather, _to_all),
    "all_gather_tiled": Linear(
        lambda n: (3, 2),
        functools.partial(scl.all_gather, axis=1, tiled=True),
        lambda x: _same_for_all(jnp.concatenate(list(x), 1), x.shape[0]),
    ),
    "psum_scatter": Linear(
        lambda n: (3, n),
        functools.partial(scl.psum_scatter, scatter_dimension=1),
        lambda x: jnp.moveaxis(x.sum(0), 1, 0),
    ),
    "psum_scatter_tiled": Linear(
        lambda n: (2 * n, 3),
        functools.partial(scl.psum_scatter, tiled=True),
        lambda x: _tiles(x.sum(0), x.shape[0], 0),
    ),
    "ppermute": Linear(
        lambda n: (3, 2),
        lambda v, axis: scl.ppermute(v, axis, _ring(jax.lax.axis_size(axis))),
        functools.partial(_shifted, _ring),
    ),
    "ppermute_partial": Linear(
        lambda n: (3, 2),
        lambda v, axis: scl.ppermute(v, axis, _partial(jax.lax.axis_size(axis))),
        functools.partial(_shifted, _partial),
    ),
    "barrier": Linear(
        lambda n: (3, 2), lambda v, axis: scl.barrier(axis, v), lambda x: x
    ),
}


def _close(got: Any, expected: Any, what: str) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype == np.float64, (what, got.dtype)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12, err_msg=what)


def derivatives(name: str, check_vma: bool) -> None:
    """grad, vjp, jvp, linearize, checkpoint and second order, inside and outside.

    The loss is the sum over all ranks of sum(op(x)^2 * w), w different on each.
    """
    linear = TABLE[name]
    on = sheet.mesh()
    n = on.size
    shape = (n, *linear.shape(n))
    out_shape = jax.eval_shape(linear.dense, jax.ShapeDtypeStruct(shape, float)).shape
    x, t = sheet.random(float, shape, 20), sheet.random(float, shape, 21)
    w, ct = sheet.random(float, out_shape, 22), sheet.random(float, out_shape, 23)

    def call(v: Any) -> Any:
        return linear.call(v, "i")

    def loss(v: Any, w: Any) -> Any:
        return jnp.sum(call(v) ** 2 * w)

    def dense_loss(x: Any) -> Any:
        return jnp.sum(linear.dense(x) ** 2 * w)

    def inside(v: Any, w: Any, t: Any, ct: Any) -> Any:
        # A cotangent varies or not as the result that it belongs to.
        out, back = jax.vjp(lambda v: call(v) * jnp.ones_like(w), v)
        _, forward = jax.linearize(call, v)
        saved = jax.checkpoint(lambda v: jnp.sin(call(v)) * w)
        return {
            "value": out,
            "grad": jax.grad(loss)(v, w),
            "vjp": back(ct)[0],
            "jvp": jax.jvp(call, (v,), (t,))[1],
            "linearize": forward(t),
            "checkpoint": jax.grad(lambda v: jnp.sum(saved(v)))(v),
            "second order": jax.jvp(lambda v: jax.grad(loss)(v, w), (v,), (t,))[1],
        }

    right = {
        "value": linear.dense(x),
        "grad": jax.grad(dense_loss)(x),
        "vjp": jax.vjp(linear.dense, x)[1](jnp.asarray(ct))[0],
        "jvp": linear.dense(t),
        "linearize": linear.dense(t),
        "checkpoint": jax.grad(lambda x: jnp.sum(jnp.sin(linear.dense(x)) * w))(x),
        "second order": jax.jvp(jax.grad(dense_loss), (x,), (t,))[1],
    }
    for rank, got in sheet.run(
        inside, list(x), list(w), list(t), list(ct), on=on, check_vma=check_vma
    ).items():
        for what, value in got.items():
            _close(value, right[what][rank], f"{what} of {name} on rank {rank}")

    mapped = sheet.on_ranks(call, on, check_vma=check_vma)
    xs, ws, ts, cts = (sheet.spread(list(v), on) for v in (x, w, t, ct))

    @jax.jit
    def outside(x: Any, w: Any, t: Any, ct: Any) -> Any:
        out, back = jax.vjp(mapped, x)
        _, forward = jax.linearize(mapped, x)
        saved = jax.checkpoint(lambda x: jnp.sin(mapped(x)) * w)
        return {
            "value": out,
            "grad": jax.grad(lambda x: jnp.sum(mapped(x) ** 2 * w))(x),
            "vjp": back(ct)[0],
            "jvp": jax.jvp(mapped, (x,), (t,))[1],
            "linearize": forward(t),
            "checkpoint": jax.grad(lambda x: jnp.sum(saved(x)))(x),
            "second order": jax.jvp(
                jax.grad(lambda x: jnp.sum(mapped(x) ** 2 * w)), (x,), (t,)
            )[1],
        }

    for rank, got in sheet.collect(outside(xs, ws, ts, cts), on).items():
        for what, value in got.items():
            _close(value, right[what][rank], f"outside, {what} of {name}")


def eager(check_vma: bool) -> None:
    """Without jit: each operator runs by itself."""
    n = sheet.mesh().size
    for name, linear in TABLE.items():
        x = sheet.random(float, (n, *linear.shape(n)), 24)
        right = linear.dense(x)
        for rank, got in sheet.run(
            lambda v, linear=linear: linear.call(v, "i"),
            list(x),
            check_vma=check_vma,
            jit=False,
        ).items():
            _close(got, right[rank], f"{name} on rank {rank}")


BATCH = 3


def batched(name: str, check_vma: bool) -> None:
    """vmap along each dimension is the loop, bit for bit, and one operation."""
    linear = TABLE[name]
    on = sheet.mesh()
    n = on.size
    shape = linear.shape(n)
    dims = range(len(shape) + 1)
    x = [
        [sheet.random(float, (*shape[:d], BATCH, *shape[d:]), (25, r, d)) for d in dims]
        for r in range(n)
    ]

    def call(v: Any) -> Any:
        return linear.call(v, "i")

    def mapped(x: Any) -> Any:
        return [jax.vmap(call, in_axes=d, out_axes=-1)(x[d]) for d in dims]

    def looped(x: Any) -> Any:
        return [
            jnp.stack([call(jnp.take(x[d], b, d)) for b in range(BATCH)], -1)
            for d in dims
        ]

    def gradient(x: Any) -> Any:
        # Of the mapped operator, against the mapped gradient of one.
        def loss(v: Any) -> Any:
            return jnp.sum(jnp.sin(call(v)))

        def all_of_it(v: Any, d: int) -> Any:
            return jnp.sum(jnp.sin(jax.vmap(call, in_axes=d)(v)))

        return [
            (
                jax.grad(all_of_it)(x[d], d),
                jax.vmap(jax.grad(loss), in_axes=d, out_axes=d)(x[d]),
            )
            for d in dims
        ]

    options: dict[str, Any] = {"on": on, "check_vma": check_vma}
    args = sheet.spread(x, on)
    compiled = sheet.on_ranks(mapped, on, check_vma=check_vma)
    with sheet.Operations() as operations:
        out = jax.block_until_ready(compiled(args))
    here = [r for r, d in enumerate(on.devices.flat) if d in jax.local_devices()]
    if name == "ppermute_partial":
        taking_part = {r for pair in _partial(n) for r in pair}
        here = [r for r in here if r in taking_part]
    assert operations.count == len(dims) * len(here), operations.count
    got, right = sheet.collect(out, on), sheet.run(looped, x, **options)
    for rank, values in got.items():
        sheet.same_trees(values, right[rank], f"{name} on rank {rank}")
    for rank, pairs in sheet.run(gradient, x, **options).items():
        for one, other in pairs:
            sheet.same(one, other, f"gradient of {name} on rank {rank}")

    # Outside: the ranks' dimension stays behind or before that of vmap.
    f = sheet.on_ranks(call, on, check_vma=check_vma)
    for d in range(len(shape) + 2):
        across = jax.jit(lambda v, d=d: jnp.moveaxis(v, 1, d))(
            sheet.spread([v[0] for v in x], on)
        )
        whole = jax.vmap(f, in_axes=d, out_axes=1)(across)
        for rank, value in sheet.collect(whole, on).items():
            expected = np.moveaxis(right[rank][0], -1, 0)
            sheet.same(value, expected, f"{name} on rank {rank}, in_axes {d} outside")


def named(name: str, check_vma: bool) -> None:
    """vmap's own axis among the names: alone, before and behind the ranks'."""
    linear = TABLE[name]
    on = sheet.mesh()
    n = on.size
    for axes in ("b", ("i", "b"), ("b", "i")):
        mixed = axes != "b"
        size = n * BATCH if mixed else BATCH
        shape = (n, BATCH, *linear.shape(size))
        x = sheet.random(float, shape, 26)

        def program(v: Any, w: Any, axes: Any = axes) -> Any:
            def call(u: Any) -> Any:
                return linear.call(u, axes)

            def loss(u: Any, w: Any) -> Any:
                return jnp.sum(call(u) ** 2 * w)

            def whole(v: Any) -> Any:
                return jnp.sum(jax.vmap(loss, axis_name="b")(v, w))

            def unmapped(u: Any) -> Any:
                return call(v[0]) + 0 * u[0, 0]

            return {
                "value": jax.vmap(call, axis_name="b")(v),
                "unmapped operand": jax.vmap(unmapped, axis_name="b")(v),
                "grad of vmap": jax.grad(whole)(v),
                "vmap of grad": jax.vmap(jax.grad(loss), axis_name="b")(v, w),
            }

        def dense(x: Any, axes: Any = axes) -> Any:
            if axes == "b":
                return jax.vmap(linear.dense)(x)
            turned = axes == ("b", "i")
            y = jnp.swapaxes(x, 0, 1) if turned else x
            y = linear.dense(y.reshape(-1, *y.shape[2:]))
            y = (
                y.reshape(BATCH, n, *y.shape[1:])
                if turned
                else y.reshape(n, BATCH, *y.shape[1:])
            )
            return jnp.swapaxes(y, 0, 1) if turned else y

        out_shape = jax.eval_shape(dense, jax.ShapeDtypeStruct(shape, float)).shape
        w = sheet.random(float, out_shape, 27)

        def run(
            program: Any = program, x: Any = x, w: Any = w
        ) -> dict[int, dict[str, Any]]:
            return sheet.run(program, list(x), list(w), check_vma=check_vma)

        if mixed and name.startswith("ppermute"):
            try:
                run()
            except NotImplementedError as error:
                assert "vmap" in str(error), error
                continue
            raise AssertionError("a permutation over mixed axes was accepted")

        def dense_loss(x: Any, dense: Any = dense, w: Any = w) -> Any:
            return jnp.sum(dense(x) ** 2 * w)

        right = {
            "value": dense(x),
            "unmapped operand": dense(np.broadcast_to(x[:, :1], x.shape)),
            "grad of vmap": jax.grad(dense_loss)(x),
        }
        right["vmap of grad"] = right["grad of vmap"]
        for rank, got in run().items():
            for what, value in got.items():
                _close(value, right[what][rank], f"{what}, {name} over {axes}")
