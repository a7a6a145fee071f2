"""Every operator, data type and size, bit for bit, on the ranks; see test_ops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stratacl_jax as scl
from live import sheet

EAGER = 8192


def _inputs(dtype: Any, shapes: Any, seed: int) -> list[list[np.ndarray]]:
    """For each rank, an array of each shape."""
    return [
        [sheet.random(dtype, shape, (seed, r, k)) for k, shape in enumerate(shapes)]
        for r in range(sheet.mesh().size)
    ]


def every_operator(name: str, check_vma: bool) -> None:
    """All operators on a type's arrays, of all the sizes where something changes."""
    dtype = np.dtype(getattr(jnp, name))
    n = sheet.mesh().size
    around = EAGER // dtype.itemsize
    shapes = [(), (0,), (1,), (3, 5), (around - 1,), (around,), (around + 1,)]
    shapes += [(65536 // dtype.itemsize + 3,)]
    if dtype.name in ("int4", "uint4"):
        shapes[4:] = [(1000,)]
    x = _inputs(dtype, shapes, 1)
    # Dealt out: a leading dimension of n, or a second one of 2n.
    parted = [(n,), (n, 0), (n, 5), (n, around // n + 1), (n, around + 7)]
    tiled = [(3, 2 * n), (1, n * 33, 2)]
    y, z = _inputs(dtype, parted, 2), _inputs(dtype, tiled, 3)
    shift = [(r, (r + 1) % n) for r in range(n)]

    def program(x: Any, y: Any, z: Any) -> Any:
        return {
            "psum": [scl.psum(v, "i") for v in x],
            "all_gather": [scl.all_gather(v, "i") for v in x],
            "ppermute": [scl.ppermute(v, "i", shift) for v in x],
            "barrier": [scl.barrier("i", v) for v in x[:2]],
            "psum_scatter": [scl.psum_scatter(v, "i") for v in y],
            "tiled": [
                scl.psum_scatter(v, "i", scatter_dimension=1, tiled=True) for v in z
            ],
            "gathered": scl.all_gather(z[0], "i", axis=-1, tiled=True),
        }

    def part(v: np.ndarray, r: int) -> np.ndarray:
        width = v.shape[1] // n
        return v[:, r * width : (r + 1) * width]

    count = len(shapes)
    sums = [sheet.total([x[r][k] for r in range(n)]) for k in range(count)]
    for rank, got in sheet.run(program, x, y, z, check_vma=check_vma).items():
        expected = {
            "psum": sums,
            "all_gather": [np.stack([x[r][k] for r in range(n)]) for k in range(count)],
            "ppermute": x[rank - 1],
            "barrier": x[rank][:2],
            "psum_scatter": [
                sheet.total([y[r][k] for r in range(n)])[rank]
                for k in range(len(parted))
            ],
            "tiled": [
                part(sheet.total([z[r][k] for r in range(n)]), rank)
                for k in range(len(tiled))
            ],
            "gathered": np.concatenate([z[r][0] for r in range(n)], axis=-1),
        }
        for operator, right in expected.items():
            sheet.same_trees(got[operator], right, f"{operator} on rank {rank}")


def large(name: str, count: int, algorithm: str = "auto") -> None:
    """Big arrays: what moves in many chunks through the arena."""
    dtype = np.dtype(getattr(jnp, name))
    n = sheet.mesh().size
    x = [sheet.random(dtype, (count,), (4, r)) for r in range(n)]
    shift = [(r, (r + 1) % n) for r in range(n)]

    def program(x: Any) -> Any:
        whole = scl.psum(x, "i")
        whole, y = scl.barrier("i", (whole, x))
        return whole, scl.ppermute(y, "i", shift), scl.all_gather(y[::n], "i")

    with scl_settings(algorithm=algorithm):
        for rank, got in sheet.run(program, x).items():
            sheet.same(got[0], sheet.total(x), f"psum on rank {rank}")
            sheet.same(got[1], x[rank - 1], f"ppermute on rank {rank}")
            parts = np.stack([v[::n] for v in x])
            sheet.same(got[2], parts, f"all_gather on rank {rank}")


class scl_settings:
    """Leaves the fabric and joins it again under other settings, and back."""

    def __init__(self, **settings: Any):
        self._settings = {k: v for k, v in settings.items() if v != "auto"}

    def _set(self, settings: dict[str, Any]) -> None:
        if not settings:
            return
        scl.shutdown()
        for name, value in settings.items():
            scl.config.update(name, value)
        scl.initialize()

    def __enter__(self) -> None:
        self._set(self._settings)

    def __exit__(self, *_: object) -> None:
        self._set(dict.fromkeys(self._settings))


def means(check_vma: bool) -> None:
    """pmean: integers become floats; floats keep their type."""
    n = sheet.mesh().size
    for name in ("int32", "float32", "bfloat16", "float64", "complex64"):
        dtype = np.dtype(getattr(jnp, name))
        if jnp.issubdtype(dtype, jnp.integer):
            x = [np.arange(-4, 5, dtype=dtype) * (r + 1) for r in range(n)]
        else:
            x = [sheet.random(dtype, (9,), (5, r)) for r in range(n)]
        right = sheet.mean(sheet.total(x), n)
        for got in sheet.run(
            lambda v: scl.pmean(v, "i"), x, check_vma=check_vma
        ).values():
            sheet.same(got, right, f"pmean of {name}")


def many_leaves(check_vma: bool) -> None:
    """A pytree is one operation on each rank, whatever is in it."""
    n = sheet.mesh().size
    names = ["float32", "bfloat16", "int8", "bool", "float64", "complex64"]
    names += ["uint16", "float8_e4m3fn", "int4", "float16"]
    shapes: list[Any] = [(), (3,), (0, 2), (2, 3), (17,)]
    kinds = [(names[k % len(names)], shapes[k % 7 % 5]) for k in range(199)]
    kinds += [("float32", (5000,))]

    def tree(r: int) -> Any:
        leaves = [
            sheet.random(getattr(jnp, name), shape, (6, r, k))
            for k, (name, shape) in enumerate(kinds)
        ]
        return {"a": leaves[:100], "b": tuple(leaves[100:])}

    x = [tree(r) for r in range(n)]
    shift = [(r, (r + 1) % n) for r in range(n)]
    right_sum = jax.tree.map(lambda *v: sheet.total(v), *x)
    right_gather = jax.tree.map(lambda *v: np.stack(v), *x)
    for operator, right in [
        (lambda v: scl.psum(v, "i"), lambda r: right_sum),
        (lambda v: scl.all_gather(v, "i"), lambda r: right_gather),
        (lambda v: scl.ppermute(v, "i", shift), lambda r: x[r - 1]),
        (lambda v: scl.barrier("i", v), lambda r: x[r]),
    ]:
        on = sheet.mesh()
        args = sheet.spread(x, on)
        compiled = sheet.on_ranks(operator, on, check_vma=check_vma)
        with sheet.Operations() as operations:
            out = jax.block_until_ready(compiled(args))
        assert operations.count == jax.local_device_count(), operations.count
        for rank, got in sheet.collect(out, on).items():
            sheet.same_trees(got, right(rank), f"rank {rank}")


def special_values() -> None:
    """Infinities, NaN, signed zeros, extremes; one kind in each element."""
    n = sheet.mesh().size
    for name in ("float16", "bfloat16", "float32", "float64", "complex128"):
        dtype = np.dtype(getattr(jnp, name))
        part = np.dtype(np.float64) if dtype.kind == "c" else dtype
        big = float(jnp.finfo(part).max)
        rows = [
            [np.nan] + [1.0] * (n - 1),
            [1.0] * (n - 1) + [np.nan],
            [np.inf] * n,
            [-np.inf] * n,
            [np.inf] * (n - 1) + [-np.inf],
            [-0.0] * n,
            [-0.0] * (n - 1) + [0.0],
            [0.0] * n,
            [-float(k + 1) for k in range(n)],
            [big] * n,  # overflows once, in the end
            [big, -big, *[1.0] * (n - 2)],  # exact in float32, if first to last
            [-big] * n,
        ]
        # Long enough that vector loops see them, and too long to be eager.
        table = np.asarray(rows).T.astype(dtype)
        for repeat in (1, 9, 1400):
            x = [np.tile(table[r], repeat) for r in range(n)]
            for got in sheet.run(lambda v: scl.psum(v, "i"), x).values():
                sheet.same(got, sheet.total(x), f"{name} x {repeat}")
            moved = sheet.run(lambda v: scl.ppermute(v, "i", [(0, 1)]), x)
            for rank, got in moved.items():
                sheet.same(got, x[0] if rank == 1 else np.zeros_like(x[0]), name)
    for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64"):
        dtype = np.dtype(name)
        info = np.iinfo(dtype)
        x = [np.array([info.min, info.max, 1] * 50, dtype) for _ in range(n)]
        for got in sheet.run(lambda v: scl.psum(v, "i"), x).values():
            sheet.same(got, sheet.total(x), name)
    for values in ([True] * n, [False] * n, [True] + [False] * (n - 1)):
        flags = [np.full(3, v) for v in values]
        for got in sheet.run(lambda v: scl.psum(v, "i"), flags).values():
            sheet.same(got, np.full(3, sum(values), np.int32), "bool")


def constants() -> None:
    """Python scalars and constants, traced or not."""
    n = sheet.mesh().size
    host = np.arange(3, dtype=np.float32)
    with sheet.Operations() as operations:
        out = sheet.run(
            lambda x: (
                scl.psum(1, "i") + x,
                scl.psum(2.5, "i"),
                scl.psum(True, "i"),
                scl.psum(host, "i"),
                scl.pmean(3, "i"),
                scl.psum({}, "i") or 0,
            ),
            [np.int32(r) for r in range(n)],
        )
    assert operations.count == 0
    for rank, got in out.items():
        assert got[0] == n + rank
        assert got[1] == 2.5 * n and got[2] == n and got[4] == 3
        sheet.same(got[3], host * n, "constant array")
    moved = sheet.run(
        lambda x: (
            scl.all_gather(7, "i"),
            scl.ppermute(2.5, "i", [(0, 1)]),
            scl.all_gather(host, "i", tiled=True),
            scl.barrier("i") + x,
        ),
        [np.int32(r) for r in range(n)],
    )
    for rank, got in moved.items():
        assert list(got[0]) == [7] * n
        assert got[1] == (2.5 if rank == 1 else 0)
        sheet.same(got[2], np.tile(host, n), "gathered constant")
        assert got[3] == rank
