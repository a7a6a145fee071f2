"""Axis names, groups and varying axes, as jax.lax treats them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from .. import _compat

Groups = tuple[tuple[int, ...], ...] | None


def names_of(axis_name: Any) -> tuple[Any, ...]:
    """One name or several, as a tuple."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def canonical_groups(groups: Any, names: Sequence[Any], operator: str) -> Groups:
    """Groups as tuples, checked: each index of the axis exactly once.

    Raises:
      ValueError: indices missing, repeated or out of range.
    """
    if groups is None:
        return None
    result = tuple(tuple(int(i) for i in group) for group in groups)
    size = _compat.axis_size(names)
    if sorted(i for group in result for i in group) != list(range(size)):
        raise ValueError(
            f"{operator}: axis_index_groups must cover all indices 0..{size - 1} of "
            f"{tuple(names)} exactly once, got {groups}"
        )
    return result


def equal_groups(groups: Groups, operator: str) -> None:
    """Raises ValueError unless all groups have one size."""
    if groups is not None and len({len(group) for group in groups}) > 1:
        raise ValueError(
            f"{operator}: all axis_index_groups must have the same size, got {groups}"
        )


def of_mesh(names: Sequence[Any]) -> tuple[Any, ...]:
    """The mesh axes among the names; types do not tell what varies over vmap's."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n in names if n in mesh.axis_names)


def make_varying(x: Any, names: Sequence[Any]) -> Any:
    """Casts to varying over `names`, where shard_map checks that."""
    if not (_compat.check_vma() and _compat.auto_pcast()):
        return x
    missing = tuple(n for n in of_mesh(names) if n not in _compat.varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def moved_aval(aval: Any, names: Sequence[Any], operator: str, shape: Any) -> Any:
    """Result of an operator that wants varying input and gives varying output."""
    varying = _compat.collective_vma_rule(operator, of_mesh(names), aval)
    return _compat.with_varying(aval.update(shape=tuple(shape)), varying)


def effects(names: Sequence[Any]) -> set[Any]:
    return {_compat.NamedAxisEffect(name) for name in names}


def batch(
    axis_data: Any, dims: Sequence[Any], names: Sequence[Any]
) -> tuple[bool, tuple[Any, ...]]:
    """(whether vmap's own axis is among the names, the other names)."""
    del dims
    if axis_data.name not in names:
        return False, tuple(names)
    return True, tuple(n for n in names if n != axis_data.name)


def sum_batch(xs: Sequence[Any], dims: Sequence[Any], n: int) -> list[Any]:
    """Sums over vmap's own axis, of size n; what is not batched counts n times."""
    return [
        x * lax.convert_element_type(n, x.dtype)
        if d is None
        else jnp.sum(x, axis=d, dtype=x.dtype)
        for x, d in zip(xs, dims, strict=True)
    ]


def def_linear(
    primitive: Any,
    transpose: Callable[..., Sequence[Any]],
) -> None:
    """Derivatives of a primitive that maps each operand to one result, linearly.

    Tangents and cotangents that are symbolic zeros take no part in the
    communication; every rank traces the same program and leaves out the same.

    Args:
      transpose: (cotangents, operand avals, **params) -> operand cotangents, on
        the leaves that are not zero.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        result: list[Any] = [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in out]
        if live:
            moved = primitive.bind(*(tangents[i] for i in live), **params)
            for i, t in zip(live, moved, strict=True):
                result[i] = t
        return out, result

    def transposed(cotangents: Any, *operands: Any, **params: Any) -> Any:
        result: list[Any] = [
            ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands
        ]
        live = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
        if live:
            back = transpose([cotangents[i] for i in live], **params)
            for i, ct in zip(live, back, strict=True):
                result[i] = ct
        return result

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transposed


def def_impl(primitive: Any) -> None:
    """Eager evaluation: through the same lowering."""
    primitive.def_impl(functools.partial(_compat.apply_primitive, primitive))


def to_front(x: Any, d: int) -> Any:
    return jnp.moveaxis(x, d, 0)
