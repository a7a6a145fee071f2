"""all_gather: every rank's array, on every rank."""

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


def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    axis: int = 0,
    tiled: bool = False,
) -> Any:
    """Gathers `x` from the ranks of `axis_name`, as `jax.lax.all_gather`.

    A pytree is one collective. Any number type; values are moved as they are.
    Differentiable; the transpose is `psum_scatter`.

    Args:
      x: array or pytree of arrays.
      axis_name: name of a manual mesh axis, or a tuple of names.
      axis_index_groups: list of lists of indices along the axis, all of one size,
        that gather among themselves, in listed order.
      axis: dimension of the result (of `x` if `tiled`) along which the ranks'
        arrays lie; negative counts from the end.
      tiled: concatenate along `axis` instead of stacking in a new one.

    Returns:
      `x.shape` with a new dimension of the group's size at `axis`, or with that
      dimension multiplied by it. Varying over `axis_name`.

    Raises:
      NameError: the axis is not bound by a surrounding `jax.shard_map`.
      ValueError: malformed groups, or `axis` out of range.
      Unsupported: an array of no number type, as of PRNG keys.
    """
    names = _axes.names_of(axis_name)
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not names:
        return x
    _compat.check_axis_names(names, "stratacl_jax.all_gather")
    groups = _axes.canonical_groups(axis_index_groups, names, "all_gather")
    _axes.equal_groups(groups, "all_gather")
    size = _compat.axis_size(names, groups)
    leaves = [_axes.make_varying(jnp.asarray(leaf), names) for leaf in leaves]
    bytewise = [_call.unpacked(leaf, "all_gather") for leaf in leaves]
    at = [_dimension(axis, leaf.ndim + (0 if tiled else 1)) for leaf in leaves]
    stacked = all_gather_p.bind(*bytewise, axes=names, groups=groups, size=size)
    out = []
    for leaf, y, d in zip(leaves, stacked, at, strict=True):
        y = jnp.moveaxis(_call.packed(y, leaf.dtype), 0, d)
        if tiled:
            shape = list(y.shape)
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
            y = y.reshape(shape)
        out.append(y)
    return jax.tree.unflatten(tree, out)


def _dimension(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"all_gather: axis {axis} is out of range for {ndim} dimensions"
        )
    return axis % ndim


# --- primitive: stacks along a new leading dimension --------------------------

all_gather_p = Primitive("stratacl_all_gather")
all_gather_p.multiple_results = True


@all_gather_p.def_effectful_abstract_eval
def _abstract(*avals: Any, axes: tuple[Any, ...], groups: Any, size: int) -> Any:
    del groups
    _compat.check_axis_names(axes, "stratacl_jax.all_gather")
    return [
        _axes.moved_aval(aval, axes, "all_gather", (size, *aval.shape))
        for aval in avals
    ], _axes.effects(axes)


def _fallback(*xs: Any, axes: tuple[Any, ...], groups: Any, size: int) -> Any:
    del size
    return [lax.all_gather(x, axes, axis_index_groups=groups) for x in xs]


_axes.def_impl(all_gather_p)
_call.register(all_gather_p, _call.ALL_GATHER, _fallback)


def _batch(
    axis_data: Any,
    xs: Any,
    dims: Any,
    *,
    axes: tuple[Any, ...],
    groups: Any,
    size: int,
) -> Any:
    mine, names = _axes.batch(axis_data, dims, axes)
    if not mine:
        out = all_gather_p.bind(*xs, axes=axes, groups=groups, size=size)
        return out, [None if d is None else d + 1 for d in dims]
    if groups is not None:
        raise NotImplementedError(
            "all_gather: axis_index_groups over an axis that vmap names"
        )
    n = axis_data.size
    local = [
        jnp.broadcast_to(x, (n, *np.shape(x))) if d is None else _axes.to_front(x, d)
        for x, d in zip(xs, dims, strict=True)
    ]
    if not names:
        return local, [None] * len(local)
    rest = all_gather_p.bind(*local, axes=names, groups=None, size=size // n)
    # (other ranks, vmap's axis, ...): put them in the order of `axes`.
    sizes = [n if a == axis_data.name else _compat.axis_size((a,)) for a in axes]
    others = [s for a, s in zip(axes, sizes, strict=True) if a != axis_data.name]
    at = axes.index(axis_data.name)
    out = []
    for y in rest:
        y = y.reshape(*others, n, *y.shape[2:])
        y = jnp.moveaxis(y, len(others), at)
        out.append(y.reshape(size, *y.shape[len(sizes) :]))
    return out, [None] * len(out)


batching.fancy_primitive_batchers[all_gather_p] = _batch


def _transpose(
    cts: Sequence[Any], *, axes: tuple[Any, ...], groups: Any, size: int
) -> Any:
    from .psum_scatter import psum_scatter_p

    return psum_scatter_p.bind(*cts, axes=axes, groups=groups, size=size)


_axes.def_linear(all_gather_p, _transpose)
