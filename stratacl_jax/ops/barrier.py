"""barrier: nobody goes on before all ranks have come."""

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


def barrier(axis_name: Any, token: Any = None) -> Any:
    """Waits until every rank of `axis_name` has come to this barrier.

    XLA knows no order but that of data. What must happen before the barrier is
    what `token` is computed from; what must happen after it must use the result::

        x = scl.barrier("i", x)

    Args:
      axis_name: name of a manual mesh axis, or a tuple of names.
      token: array or pytree that is passed through, unchanged and uncopied; the
        derivative passes through, too. None: a scalar zero, only good to
        wait for.

    Returns:
      `token`, once all ranks have come.

    Raises:
      NameError: the axis is not bound by a surrounding `jax.shard_map`.
    """
    names = _axes.names_of(axis_name)
    _compat.check_axis_names(names, "stratacl_jax.barrier")
    leaves, tree = jax.tree.flatten(jnp.int32(0) if token is None else token)
    if not leaves:
        leaves, tree = jax.tree.flatten(jnp.int32(0))
    out = barrier_p.bind(*(jnp.asarray(x) for x in leaves), axes=names, groups=None)
    return jax.tree.unflatten(tree, out)


barrier_p = Primitive("stratacl_barrier")
barrier_p.multiple_results = True


@barrier_p.def_effectful_abstract_eval
def _abstract(*avals: Any, axes: tuple[Any, ...], groups: Any) -> Any:
    del groups
    _compat.check_axis_names(axes, "stratacl_jax.barrier")
    return list(avals), _axes.effects(axes)


def _fallback(*xs: Any, axes: tuple[Any, ...], groups: Any) -> Any:
    del groups
    # The sum is zero, but no compiler may know that.
    one = lax.psum(lax.optimization_barrier(jnp.zeros((), jnp.int32)), axes)
    return [lax.optimization_barrier((x, one))[0] for x in xs]


_axes.def_impl(barrier_p)


_call.register(
    barrier_p,
    _call.BARRIER,
    _fallback,
    describe=lambda avals: (),
    aliased=True,
    has_side_effect=True,
)


def _batch(
    axis_data: Any, xs: Any, dims: Any, *, axes: tuple[Any, ...], groups: Any
) -> Any:
    mine, names = _axes.batch(axis_data, dims, axes)
    if mine and not names:
        return list(xs), list(dims)
    return barrier_p.bind(*xs, axes=names, groups=groups), list(dims)


batching.fancy_primitive_batchers[barrier_p] = _batch


def _transpose(cts: Sequence[Any], *, axes: tuple[Any, ...], groups: Any) -> Any:
    del axes, groups
    return list(cts)


_axes.def_linear(barrier_p, _transpose)
