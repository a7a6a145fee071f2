"""ppermute: each rank's array goes to the rank that a permutation names."""

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

Pairs = tuple[tuple[int, int], ...]


def ppermute(x: Any, axis_name: Any, perm: Sequence[tuple[int, int]]) -> Any:
    """Sends `x` along `perm`, as `jax.lax.ppermute`.

    A pytree is one collective. Any number type. A rank waits for its source only.
    Over several axes, indices are those of `axis_index` over the same names in
    the same order (stock XLA pairs by mesh order there). Differentiable; the
    transpose is the inverse permutation.

    Args:
      x: array or pytree of arrays.
      axis_name: name of a manual mesh axis, or a tuple of names.
      perm: (source, destination) pairs of indices along the axis; each index at
        most once as source and at most once as destination. It need not cover all
        ranks: one that nobody sends to receives zeros.

    Returns:
      The source's `x`, or zeros; same shape and dtype, varying over `axis_name`.

    Raises:
      NameError: the axis is not bound by a surrounding `jax.shard_map`.
      ValueError: an index repeated or out of range.
      Unsupported: an array of no number type, as of PRNG keys.
    """
    names = _axes.names_of(axis_name)
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not names:
        return x
    _compat.check_axis_names(names, "stratacl_jax.ppermute")
    pairs = _canonical(perm, _compat.axis_size(names))
    leaves = [_axes.make_varying(jnp.asarray(leaf), names) for leaf in leaves]
    bytewise = [_call.unpacked(leaf, "ppermute") for leaf in leaves]
    moved = ppermute_p.bind(*bytewise, axes=names, groups=None, perm=pairs)
    out = [_call.packed(y, x.dtype) for x, y in zip(leaves, moved, strict=True)]
    return jax.tree.unflatten(tree, out)


def _canonical(perm: Sequence[tuple[int, int]], size: int) -> Pairs:
    pairs = tuple((int(s), int(d)) for s, d in perm)
    for what, ends in (
        ("source", [s for s, _ in pairs]),
        ("destination", [d for _, d in pairs]),
    ):
        wrong = [i for i in ends if not -size <= i < size]
        if wrong:
            raise ValueError(
                f"ppermute: {what} {wrong[0]} is out of range for an axis of {size}"
            )
        if len({i % size for i in ends}) != len(ends):
            raise ValueError(f"ppermute: a {what} occurs twice in {pairs}")
    return tuple((s % size, d % size) for s, d in pairs)


# --- primitive ----------------------------------------------------------------

ppermute_p = Primitive("stratacl_ppermute")
ppermute_p.multiple_results = True


@ppermute_p.def_effectful_abstract_eval
def _abstract(*avals: Any, axes: tuple[Any, ...], groups: Any, perm: Pairs) -> Any:
    del groups, perm
    _compat.check_axis_names(axes, "stratacl_jax.ppermute")
    return [
        _axes.moved_aval(aval, axes, "ppermute", aval.shape) for aval in avals
    ], _axes.effects(axes)


def _fallback(*xs: Any, axes: tuple[Any, ...], groups: Any, perm: Pairs) -> Any:
    del groups
    return [lax.ppermute(x, axes, perm) for x in xs]


_axes.def_impl(ppermute_p)
_call.register(
    ppermute_p,
    _call.PPERMUTE,
    _fallback,
    permutation=lambda perm, **_: perm,
)


def _batch(
    axis_data: Any,
    xs: Any,
    dims: Any,
    *,
    axes: tuple[Any, ...],
    groups: Any,
    perm: Pairs,
) -> Any:
    mine, names = _axes.batch(axis_data, dims, axes)
    if not mine:
        out = ppermute_p.bind(*xs, axes=axes, groups=groups, perm=perm)
        return out, list(dims)
    if names:
        raise NotImplementedError(
            f"ppermute over {axes}, one of which vmap names and the others not"
        )
    n = axis_data.size
    source = np.full(n, n)  # one past the end: filled with zeros
    for s, d in perm:
        source[d] = s
    out = []
    for x, d in zip(xs, dims, strict=True):
        y = (
            jnp.broadcast_to(x, (n, *np.shape(x)))
            if d is None
            else _axes.to_front(x, d)
        )
        out.append(jnp.take(y, source, axis=0, mode="fill", fill_value=0))
    return out, [0] * len(out)


batching.fancy_primitive_batchers[ppermute_p] = _batch


def _transpose(
    cts: Sequence[Any], *, axes: tuple[Any, ...], groups: Any, perm: Pairs
) -> Any:
    inverse = tuple((d, s) for s, d in perm)
    return ppermute_p.bind(*cts, axes=axes, groups=groups, perm=inverse)


_axes.def_linear(ppermute_p, _transpose)
