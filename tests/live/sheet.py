"""What tests on the ranks are written with: inputs per rank in, results per rank out.

An input is a list with one pytree for each rank of the mesh, known to every
process, so that each can compute what every rank must get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stratacl_jax as scl


@functools.cache
def mesh(shape: tuple[int, ...] = (), order: tuple[int, ...] = ()) -> Mesh:
    """All devices: one axis "i", or two, "i" and "j"; in another order if given."""
    devices = np.array(jax.devices())
    if order:
        devices = devices[list(order)]
    if not shape:
        return Mesh(devices, ("i",))
    return Mesh(devices.reshape(shape), ("i", "j")[: len(shape)])


def spread(per_rank: Sequence[Any], on: Mesh) -> Any:
    """A global array (or pytree) whose part on rank r is `per_rank[r]`."""

    def leaf(*parts: Any) -> jax.Array:
        whole = np.stack([np.asarray(part) for part in parts])
        sharding = NamedSharding(on, P(on.axis_names))
        return jax.make_array_from_callback(
            whole.shape, sharding, lambda index: whole[index]
        )

    return jax.tree.map(leaf, *per_rank)


def collect(result: Any, on: Mesh) -> dict[int, Any]:
    """What the ranks of this process hold, by position in the mesh."""
    place = {device: r for r, device in enumerate(on.devices.flat)}
    leaves, tree = jax.tree.flatten(result)
    held: dict[int, list[Any]] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            value = np.asarray(shard.data)[0]
            held.setdefault(place[shard.device], []).append(value)
    return {r: jax.tree.unflatten(tree, values) for r, values in held.items()}


def on_ranks(
    function: Callable[..., Any],
    on: Mesh | None = None,
    *,
    check_vma: bool = True,
    jit: bool = True,
    **jit_options: Any,
) -> Callable[..., Any]:
    """`function`, of one rank's values, as one of `spread` arrays.

    The result is spread likewise, whether it differs between ranks or not.
    """
    on = on or mesh()

    def local(*args: Any) -> Any:
        out = function(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda y: jnp.asarray(y)[None], out)

    spec = P(on.axis_names)
    mapped = jax.shard_map(
        local, mesh=on, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(mapped, **jit_options) if jit else mapped


def run(
    function: Callable[..., Any],
    *inputs: Sequence[Any],
    on: Mesh | None = None,
    **options: Any,
) -> dict[int, Any]:
    """Runs `function` once on the ranks' values; results by rank."""
    on = on or mesh()
    args = [spread(per_rank, on) for per_rank in inputs]
    return collect(on_ranks(function, on, **options)(*args), on)


# --- values -------------------------------------------------------------------


def random(dtype: Any, shape: Sequence[int], seed: Any) -> np.ndarray:
    """Random values over much of a type's range, without NaN and denormals."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    shape = tuple(shape)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        wide = np.int64 if info.min < 0 else np.uint64
        values = rng.integers(
            int(info.min), int(info.max), shape, dtype=wide, endpoint=True
        )
        return values.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        values = np.empty(shape, dtype)
        values.real = random(part, shape, (seed, 1))
        values.imag = random(part, shape, (seed, 2))
        return values
    scale = 2.0 ** rng.integers(-3, 4, shape)
    return (rng.standard_normal(shape) * scale).astype(dtype)


# --- the oracle ---------------------------------------------------------------


def total(values: Sequence[np.ndarray], dtype: Any = None) -> np.ndarray:
    """The canonical sum: ((x0 + x1) + x2) + ..., rounded once to the type."""
    values = [np.asarray(v) for v in values]
    dtype = np.dtype(dtype or values[0].dtype)
    if dtype == np.bool_:
        return functools.reduce(np.add, [v.astype(np.int32) for v in values])
    own = dtype
    if dtype.name in ("int2", "int4", "uint2", "uint4"):
        own = np.dtype(np.int8)
    elif jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        own = np.dtype(np.float32)
    with np.errstate(all="ignore"):
        result = functools.reduce(np.add, [v.astype(own) for v in values])
        if own == np.int8 and dtype != np.int8:
            # Wraps at the type's own width.
            bits = 4 if dtype.name.endswith("4") else 2
            result = result & ((1 << bits) - 1)
            if not dtype.name.startswith("u"):
                result = np.where(result >> (bits - 1), result - (1 << bits), result)
        return np.asarray(result).astype(dtype)


def mean(sums: Any, count: int) -> np.ndarray:
    """`sums / count` as XLA divides by a constant: by multiplying, an ulp away."""
    divided = np.asarray(jax.jit(lambda v: v / count)(sums))
    wide = divided.astype(np.complex128 if divided.dtype.kind == "c" else np.float64)
    ulp = float(jnp.finfo(divided.dtype).eps)
    np.testing.assert_allclose(wide, np.asarray(sums).astype(wide.dtype) / count, ulp)
    return divided


def same(got: Any, expected: Any, what: object = "") -> None:
    """Equal type, shape and bits; NaN equals NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} for {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} for {expected.shape}"
    a, b = _words(got), _words(expected)
    if np.array_equal(a, b):
        return
    wrong = np.flatnonzero(a != b)
    first = np.unravel_index(wrong[0], a.shape)
    size = a.size // max(1, got.size)
    at = np.unravel_index(wrong[0] // size, got.shape) if got.ndim else ()
    raise AssertionError(
        f"{what}: {wrong.size} of {a.size} differ in {got.dtype}{got.shape}, first at "
        f"{tuple(map(int, at))}: {got[at]!r} for {expected[at]!r} "
        f"({a[first]:#x} for {b[first]:#x})"
    )


def _words(x: np.ndarray) -> np.ndarray:
    """Bits as unsigned integers, flat, with one NaN for all."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = np.ascontiguousarray(x).reshape(-1).view(np.finfo(x.dtype).dtype)
    x = np.ascontiguousarray(x).reshape(-1)
    words = x.view(f"u{x.dtype.itemsize}").copy()
    if jnp.issubdtype(x.dtype, jnp.floating):
        words[np.isnan(x)] = np.iinfo(words.dtype).max
    return words


def same_trees(got: Any, expected: Any, what: object = "") -> None:
    """`same` for each leaf."""
    a, tree = jax.tree.flatten(got)
    b, other = jax.tree.flatten(expected)
    assert tree == other, f"{what}: {tree} for {other}"
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        same(x, y, f"{what}, leaf {number}")


class Operations:
    """Counts, in a `with` block, the operations that this process's ranks began."""

    def __enter__(self) -> Operations:
        scl.initialize()
        self._before = scl.ledger()["operations"]
        return self

    def __exit__(self, *_: object) -> None:
        self.count = scl.ledger()["operations"] - self._before
