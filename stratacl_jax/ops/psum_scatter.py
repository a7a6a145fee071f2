"""psum_scatter: the sum over the ranks, each rank keeping its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from .. import _compat
from . import _axes, _call
from .psum import _narrow, _widen


def psum_scatter(
    x: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Any = None,
    tiled: bool = False,
) -> Any:
    """Sums over the ranks of `axis_name` and scatters, as `jax.lax.psum_scatter`.

    A pytree is one collective. Order of summation and dtypes as `psum`.
    Differentiable; the transpose is `all_gather`.

    Args:
      x: array or pytree; its `scatter_dimension` has the group's size, or a
        multiple of it if `tiled`.
      axis_name: name of a manual mesh axis, or a tuple of names.
      scatter_dimension: dimension that is dealt out; negative counts from the end.
      axis_index_groups: list of lists of indices along the axis, all of one size.
      tiled: keep the dimension (divided by the group's size) instead of
        dropping it.

    Returns:
      This rank's part of the sum, varying over `axis_name`.

    Raises:
      NameError: the axis is not bound by a surrounding `jax.shard_map`.
      ValueError: malformed groups, or a dimension that does not divide.
    """
    names = _axes.names_of(axis_name)
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not names:
        return x
    _compat.check_axis_names(names, "stratacl_jax.psum_scatter")
    groups = _axes.canonical_groups(axis_index_groups, names, "psum_scatter")
    _axes.equal_groups(groups, "psum_scatter")
    size = _compat.axis_size(names, groups)
    leaves = [_axes.make_varying(jnp.asarray(leaf), names) for leaf in leaves]
    stacked, kept = [], []
    for leaf in leaves:
        dtype = _call.checked_dtype(leaf, "psum_scatter")
        if not -leaf.ndim <= scatter_dimension < leaf.ndim:
            raise ValueError(
                f"psum_scatter: scatter_dimension {scatter_dimension} is out of range "
                f"for shape {leaf.shape}"
            )
        d = scatter_dimension % leaf.ndim
        n = leaf.shape[d]
        if (n % size if tiled else n != size) != 0:
            raise ValueError(
                f"psum_scatter: dimension {d} of shape {leaf.shape} must be "
                f"{'a multiple of ' if tiled else ''}{size}, the size of the group"
            )
        y = leaf
        if tiled:
            y = y.reshape(*y.shape[:d], size, n // size, *y.shape[d + 1 :])
        stacked.append(_widen(jnp.moveaxis(y, d, 0)))
        kept.append(dtype)
    out = psum_scatter_p.bind(*stacked, axes=names, groups=groups, size=size)
    out = [_narrow(y, d) for y, d in zip(out, kept, strict=True)]
    return jax.tree.unflatten(tree, out)


# --- primitive: deals out the leading dimension -------------------------------

psum_scatter_p = Primitive("stratacl_psum_scatter")
psum_scatter_p.multiple_results = True


@psum_scatter_p.def_effectful_abstract_eval
def _abstract(*avals: Any, axes: tuple[Any, ...], groups: Any, size: int) -> Any:
    del groups, size
    _compat.check_axis_names(axes, "stratacl_jax.psum_scatter")
    return [
        _axes.moved_aval(aval, axes, "psum_scatter", aval.shape[1:]) for aval in avals
    ], _axes.effects(axes)


def _fallback(*xs: Any, axes: tuple[Any, ...], groups: Any, size: int) -> Any:
    del size
    return [lax.psum_scatter(x, axes, axis_index_groups=groups) for x in xs]


_axes.def_impl(psum_scatter_p)
_call.register(psum_scatter_p, _call.PSUM_SCATTER, _fallback)


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
        moved = [
            x if d is None else jnp.moveaxis(x, d, 1)
            for x, d in zip(xs, dims, strict=True)
        ]
        out = psum_scatter_p.bind(*moved, axes=axes, groups=groups, size=size)
        return out, [None if d is None else 0 for d in dims]
    if groups is not None:
        raise NotImplementedError(
            "psum_scatter: axis_index_groups over an axis that vmap names"
        )
    # Summed locally over vmap's axis, of which each index then keeps its part.
    n = axis_data.size
    sizes = [n if a == axis_data.name else _compat.axis_size((a,)) for a in axes]
    at = axes.index(axis_data.name)
    local = []
    for x in _axes.sum_batch(xs, dims, n):
        y = x.reshape(*sizes, *x.shape[1:])
        y = jnp.moveaxis(y, at, len(sizes) - 1)  # (other ranks, vmap's axis, ...)
        local.append(y.reshape(size // n, n, *x.shape[1:]))
    if names:
        out = psum_scatter_p.bind(*local, axes=names, groups=None, size=size // n)
    else:
        out = [y[0] for y in local]
    return out, [0] * len(out)


batching.fancy_primitive_batchers[psum_scatter_p] = _batch


def _transpose(
    cts: Sequence[Any], *, axes: tuple[Any, ...], groups: Any, size: int
) -> Any:
    from .all_gather import all_gather_p

    return all_gather_p.bind(*cts, axes=axes, groups=groups, size=size)


_axes.def_linear(psum_scatter_p, _transpose)
