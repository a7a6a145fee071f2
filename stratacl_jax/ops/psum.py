"""psum and pmean: the sum over the ranks of a named axis, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from .. import _compat
from . import _axes, _call

# What has no native addition is summed as this and rounded once, which gives the
# bits that a native one would: integers wrap alike, and every product and sum of
# small floats is exact in f32 or rounded as f32 rounds.
_SUMMED_AS = {
    "bool": jnp.int32,
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
}  # and the small floats as f32


def psum(x: Any, axis_name: Any, *, axis_index_groups: Any = None) -> Any:
    """Sum over the ranks of `axis_name`, as `jax.lax.psum`.

    A pytree is one collective, whatever the number of its arrays. Each element is
    `((x0 + x1) + x2) + ...` over the ranks in `axis_index` order (in listed order
    for `axis_index_groups`), accumulated in float32 for the 16-bit and 8-bit
    float types and rounded once: the same bits on all ranks and for every layout.
    Integers wrap. NaN stays NaN, and a sum of -0.0 is -0.0.

    Differentiable: under `check_vma=False` the transpose is psum, under True it is
    `pcast(..., to="varying")`, as in jax.lax.

    Args:
      x: array, scalar or pytree of them; any number type. bool sums as int32.
      axis_name: name of a manual mesh axis, or a tuple of names. Integers among
        them are array dimensions, summed locally.
      axis_index_groups: list of lists of indices along the axis that sum among
        themselves; only with `check_vma=False`.

    Returns:
      The sum, with the shape and dtype of `x`, not varying over `axis_name`.

    Raises:
      NameError: the axis is not bound by a surrounding `jax.shard_map`.
      ValueError: malformed groups.
      Unsupported: an array of no number type, as of PRNG keys.
    """
    axes = _axes.names_of(axis_name)
    names = tuple(a for a in axes if not isinstance(a, int))
    positions = tuple(a for a in axes if isinstance(a, int))
    if positions and axis_index_groups is not None:
        raise ValueError("psum: axis_index_groups needs named axes only")
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not axes:
        return x
    _compat.check_axis_names(names, "stratacl_jax.psum")
    groups = _axes.canonical_groups(axis_index_groups, names, "psum")
    if all(not _compat.is_tracer(leaf) for leaf in leaves):
        # A constant is the same on all ranks: no communication.
        if groups is not None:
            _axes.equal_groups(groups, "psum of a constant")
        size = _compat.axis_size(names, groups) if names else 1
        out = [_constant_sum(leaf, positions, size) for leaf in leaves]
        return jax.tree.unflatten(tree, out)
    dtypes = [_call.checked_dtype(leaf, "psum") for leaf in leaves]
    out = [_widen(leaf) for leaf in leaves]
    if positions:
        out = [jnp.sum(v, axis=_dimensions(positions, v)) for v in out]
    if names:
        if _compat.check_vma() and _axes.of_mesh(names):
            if groups is not None:
                raise NotImplementedError(
                    "psum: axis_index_groups gives results that vary along the axis; "
                    "pass check_vma=False to jax.shard_map"
                )
            varying = [_axes.make_varying(v, names) for v in out]
            out = psum_invariant_p.bind(*varying, axes=names, groups=None)
        else:
            out = psum_p.bind(*out, axes=names, groups=groups)
    out = [_narrow(v, d) for v, d in zip(out, dtypes, strict=True)]
    return jax.tree.unflatten(tree, out)


def pmean(x: Any, axis_name: Any, *, axis_index_groups: Any = None) -> Any:
    """Mean over the ranks of `axis_name`: psum divided by the group's size.

    As `jax.lax.pmean`: integers become floats. Arguments, order of summation and
    errors as `psum`; groups must have one size.
    """
    names = _axes.names_of(axis_name)
    groups = None
    if axis_index_groups is not None:
        groups = _axes.canonical_groups(axis_index_groups, names, "pmean")
        _axes.equal_groups(groups, "pmean")
    total = psum(x, axis_name, axis_index_groups=axis_index_groups)
    size = _compat.axis_size(names, groups)
    return jax.tree.map(lambda v: v / size, total)


def _dimensions(positions: Sequence[int], x: Any) -> tuple[int, ...]:
    return tuple(p % max(1, np.ndim(x)) for p in positions)


def _constant_sum(x: Any, positions: Sequence[int], size: int) -> Any:
    x = lax.convert_element_type(x, np.int32) if _is_bool(x) else x
    if positions:
        x = jnp.sum(x, axis=_dimensions(positions, x))
    return lax.convert_element_type(size, jax.typeof(x).dtype) * x


def _is_bool(x: Any) -> bool:
    return np.dtype(jax.typeof(x).dtype) == np.bool_


def _widen(x: Any) -> Any:
    dtype = np.dtype(jax.typeof(x).dtype)
    if _call.reducible(dtype):
        return x
    return lax.convert_element_type(x, _SUMMED_AS.get(dtype.name, jnp.float32))


def _narrow(x: Any, dtype: np.dtype) -> Any:
    if dtype == np.bool_ or x.dtype == dtype:
        return x
    return lax.convert_element_type(x, dtype)


# --- primitives ---------------------------------------------------------------

psum_p = Primitive("stratacl_psum")
psum_p.multiple_results = True
# Under check_vma the sum is invariant, and its transpose another: two primitives,
# as in jax.lax.
psum_invariant_p = Primitive("stratacl_psum_invariant")
psum_invariant_p.multiple_results = True


def _abstract(*avals: Any, axes: tuple[Any, ...], groups: Any) -> Any:
    del groups
    _compat.check_axis_names(axes, "stratacl_jax.psum")
    return list(avals), _axes.effects(axes)


def _abstract_invariant(*avals: Any, axes: tuple[Any, ...], groups: Any) -> Any:
    del groups
    _compat.check_axis_names(axes, "stratacl_jax.psum")
    out = []
    for aval in avals:
        varying = _compat.varying(aval)
        if not varying.intersection(axes):
            raise ValueError(
                f"psum over {axes} of a value that varies over {set(varying)} only: "
                "it is the same on all ranks; cast it with jax.lax.pcast(x, axes, "
                "to='varying') if the sum of equal values is meant"
            )
        out.append(_compat.with_varying(aval, varying.difference(axes)))
    return out, _axes.effects(axes)


psum_p.def_effectful_abstract_eval(_abstract)
psum_invariant_p.def_effectful_abstract_eval(_abstract_invariant)


def _fallback(*xs: Any, axes: tuple[Any, ...], groups: Any) -> Any:
    return lax.psum(list(xs), axes, axis_index_groups=groups)


for _p in (psum_p, psum_invariant_p):
    _axes.def_impl(_p)
    _call.register(_p, _call.PSUM, _fallback, identity=True)


def _batcher(primitive: Any) -> Any:
    def rule(
        axis_data: Any, xs: Any, dims: Any, *, axes: tuple[Any, ...], groups: Any
    ) -> Any:
        mine, names = _axes.batch(axis_data, dims, axes)
        if not mine:
            return primitive.bind(*xs, axes=axes, groups=groups), list(dims)
        if groups is not None:
            raise NotImplementedError(
                "psum: axis_index_groups over an axis that vmap names"
            )
        # vmap's axis is an array dimension here: summed locally first.
        local = _axes.sum_batch(xs, dims, axis_data.size)
        out = primitive.bind(*local, axes=names, groups=None) if names else local
        return out, [None] * len(out)

    return rule


batching.fancy_primitive_batchers[psum_p] = _batcher(psum_p)
batching.fancy_primitive_batchers[psum_invariant_p] = _batcher(psum_invariant_p)


def _transpose(cts: Sequence[Any], *, axes: tuple[Any, ...], groups: Any) -> Any:
    return psum_p.bind(*cts, axes=axes, groups=groups)


def _transpose_invariant(
    cts: Sequence[Any], *, axes: tuple[Any, ...], groups: Any
) -> Any:
    del groups
    mesh = _axes.of_mesh(axes)
    mapped = tuple(a for a in axes if a not in mesh)
    if mapped:
        cts = psum_p.bind(*cts, axes=mapped, groups=None)
    return [lax.pcast(ct, mesh, to="varying") for ct in cts]


_axes.def_linear(psum_p, _transpose)
_axes.def_linear(psum_invariant_p, _transpose_invariant)
