"""What is computed behind a collective does not depend on the thread that ends it.

XLA flushes denormals to zero; a thread that completes an operation runs the rest of
the program and must do so, too.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import stratacl_jax as scl
from live import sheet
from live.values_on_ranks import scl_settings

# Enough work for the others to use up any short wait.
_LATE_STEPS = 2_000_000


def _flushed(x: np.ndarray) -> np.ndarray:
    tiny = np.finfo(x.dtype).tiny
    return np.where(np.abs(x) < tiny, np.copysign(np.zeros_like(x), x), x)


def _sum(values: list[np.ndarray]) -> np.ndarray:
    """In canonical order, with all operands and results flushed."""
    total = _flushed(values[0])
    for v in values[1:]:
        total = _flushed(total + _flushed(v))
    return total


def _values(dtype: Any, r: int) -> np.ndarray:
    """Denormals, the smallest normals, and what differences of them fall below."""
    info = np.finfo(dtype)
    small = np.asarray(
        [info.smallest_subnormal, info.tiny / 2, info.tiny, info.tiny * 1.25, 1.0],
        dtype,
    )
    signs = np.asarray([1, 1, -1, 1, -1], dtype) if r else np.ones(5, dtype)
    # Long enough for vector loops.
    return np.tile(np.roll(small, r) * signs, 200)


def continuation(inplace_us: int) -> tuple[dict[int, Any], int]:
    """Arithmetic on denormals in and behind each operator, each rank once late.

    Returns:
      The results by rank, and how many operations a worker thread has ended.
    """
    n = sheet.mesh().size
    ring = [(r, (r + 1) % n) for r in range(n)]
    kinds = (np.float32, np.float64)
    x = [[_values(dtype, r) for dtype in kinds] for r in range(n)]

    def late(v: Any, who: Any) -> Any:
        steps = jnp.where(lax.axis_index("i") == who, _LATE_STEPS, 0)
        done = lax.fori_loop(
            0, steps, lambda _, s: s * 3 + 1, jnp.uint32(1) + 0 * steps
        )
        return jnp.where(done == 0, jnp.nan, v)  # no arithmetic: it would flush

    def behind(v: Any, factor: Any) -> Any:
        # Factors that the compiler does not know, or it would join them.
        f = factor.astype(v.dtype)
        return v - jnp.finfo(v.dtype).tiny, v * f, (v * f) / f

    def program(x: Any, who: Any, factor: Any) -> Any:
        out = []
        for v in x:
            v = late(v, who)
            parts = jnp.resize(v, (n, v.size // n))
            moved = {
                "psum": scl.psum(v, "i"),
                "psum_scatter": scl.psum_scatter(parts, "i"),
                "all_gather": scl.all_gather(v, "i"),
                "ppermute": scl.ppermute(v, "i", ring),
                "barrier": scl.barrier("i", v),
            }
            out.append({name: behind(v, factor) for name, v in moved.items()})
        return out

    def right(v: np.ndarray) -> Any:
        v = _flushed(v)
        f = v.dtype.type(0.25)
        return (
            _flushed(v - np.finfo(v.dtype).tiny),
            _flushed(v * f),
            _flushed(v * f) / f,
        )

    results: dict[int, Any] = {}
    with scl_settings(inplace_us=inplace_us):
        before = scl.ledger()["deferred"]
        for who in range(n):
            got = sheet.run(program, x, [np.int32(who)] * n, [0.25] * n)
            for rank, out in got.items():
                results.setdefault(rank, []).append(out)
                for k, dtype in enumerate(kinds):
                    mine = [v[k] for v in x]
                    part = [np.resize(v, (n, v.size // n))[rank] for v in mine]
                    what = f"{dtype.__name__} on rank {rank}, rank {who} late"
                    expected = {
                        "psum": right(_sum(mine)),
                        "psum_scatter": right(_sum(part)),
                        "all_gather": right(np.stack(mine)),
                        "ppermute": right(mine[rank - 1]),
                        "barrier": right(mine[rank]),
                    }
                    sheet.same_trees(out[k], expected, what)
        deferred = scl.ledger()["deferred"] - before
    return results, deferred
