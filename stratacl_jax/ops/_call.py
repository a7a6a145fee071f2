"""The custom call: how an operator's parameters reach the native handler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from .. import _compat
from ..runtime import world
from ..runtime.errors import Unsupported

# Kinds, as xla_ffi/plan/types.h numbers them.
PSUM, PSUM_SCATTER, ALL_GATHER, PPERMUTE, BARRIER = 1, 2, 3, 4, 5
_VERSION = 1

# XLA's type codes (xla/ffi/api/c_api.h) of the types that can be reduced; others
# are only moved, as code 0 with their size.
_CODES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "complex64": 15,
    "bfloat16": 16,
    "complex128": 18,
}

# XLA packs several of these into a byte, so they travel as a type that holds their
# values exactly.
_UNPACKED = {
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.bfloat16,
}


def checked_dtype(x: Any, operator: str) -> np.dtype:
    """The type of an operand.

    Raises:
      Unsupported: it is none whose values XLA keeps in whole bytes or can convert
        to such, as a PRNG key's.
    """
    dtype = jax.typeof(x).dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = np.dtype(dtype)
        name = dtype.name
        if name in _CODES or name in _UNPACKED or name.startswith("float8_"):
            return dtype
    hint = ""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        hint = "; send jax.random.key_data(key) and rebuild it with wrap_key_data"
    raise Unsupported(f"{operator}: arrays of {dtype} cannot be communicated{hint}")


def unpacked(x: Any, operator: str) -> Any:
    """An operand in whole bytes; `packed` takes the result back to its type."""
    wide = _UNPACKED.get(checked_dtype(x, operator).name)
    return x if wide is None else lax.convert_element_type(x, wide)


def packed(x: Any, dtype: np.dtype) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def reducible(dtype: Any) -> bool:
    """Whether the native kernels add this type as it is."""
    name = np.dtype(dtype).name
    return name in _CODES and name != "bool"


def specification(
    kind: int,
    channel: int,
    avals: Sequence[Any],
    groups: Sequence[Sequence[int]],
    permutation: Sequence[tuple[int, int]] = (),
) -> np.ndarray:
    """The one attribute of the call; xla_ffi/ffi/handlers.cc reads it."""
    words: list[int] = [_VERSION, kind, 0, channel, len(avals)]
    for aval in avals:
        dtype = np.dtype(aval.dtype)
        words += [_CODES.get(dtype.name, 0), math.prod(aval.shape), dtype.itemsize]
    shape = avals[0].shape if avals else ()
    words += [len(shape), *shape, len(groups)]
    for group in groups:
        words += [len(group), *group]
    words.append(len(permutation))
    for pair in permutation:
        words += pair
    return np.asarray(words, np.int64)


def register(
    primitive: Any,
    kind: int,
    fallback: Callable[..., Any],
    permutation: Callable[..., Sequence[tuple[int, int]]] | None = None,
    describe: Callable[[Sequence[Any]], Sequence[Any]] = lambda avals: avals,
    identity: bool = False,
    aliased: bool = False,
    **call_options: Any,
) -> None:
    """Registers both lowerings of a primitive with parameters `axes`, `groups`.

    Args:
      kind: the operator's number.
      fallback: the same in terms of jax.lax, for other platforms.
      permutation: reads the (source, destination) pairs from the parameters.
      describe: the operands that the plan is about, of the operands there are.
      identity: whether a group of one leaves operands as they are.
      aliased: whether each result is its operand's own buffer.
      call_options: for the custom call, as `has_side_effect`.
    """
    lax_rule = mlir.lower_fun(fallback, multiple_results=True)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if not world.available():
            return lax_rule(ctx, *operands, **params)
        groups = _compat.device_groups(ctx, params["axes"], params["groups"])
        if isinstance(groups, str):
            raise Unsupported(f"{primitive.name}: {groups}")
        if identity and all(len(group) == 1 for group in groups):
            return operands
        pairs = permutation(**params) if permutation else ()
        spec = specification(
            kind, _compat.next_call(ctx), describe(ctx.avals_in), groups, pairs
        )
        options = dict(call_options)
        if aliased:
            options["operand_output_aliases"] = {i: i for i in range(len(operands))}
        return jax.ffi.ffi_lowering(world.TARGET, **options)(ctx, *operands, spec=spec)

    # Not cacheable: two equal equations are two calls and need two numbers.
    mlir.register_lowering(primitive, lower, platform="cpu", cacheable=False)
    mlir.register_lowering(primitive, lax_rule)
