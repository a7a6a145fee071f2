"""Collectives at memory speed for JAX on CPU hosts.

Names, signatures and semantics are those of `jax.lax`; call them inside
`jax.shard_map`. Importing this has no side effects, not even the import of JAX:
the fabric is joined by `initialize()`, or by the first operator that is lowered.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .runtime.config import config
from .runtime.errors import (
    DeadlineExceeded,
    InvalidUsage,
    Mismatch,
    PeerLost,
    ResourceExhausted,
    StrataError,
    Unsupported,
)
from .runtime.world import (
    info,
    initialize,
    is_initialized,
    ledger,
    shutdown,
    translate_errors,
)

if TYPE_CHECKING:
    from .ops.all_gather import all_gather
    from .ops.barrier import barrier
    from .ops.ppermute import ppermute
    from .ops.psum import pmean, psum
    from .ops.psum_scatter import psum_scatter

__version__ = "0.1.0"

__all__ = [
    "DeadlineExceeded",
    "InvalidUsage",
    "Mismatch",
    "PeerLost",
    "ResourceExhausted",
    "StrataError",
    "Unsupported",
    "all_gather",
    "barrier",
    "config",
    "info",
    "initialize",
    "is_initialized",
    "ledger",
    "pmean",
    "ppermute",
    "psum",
    "psum_scatter",
    "shutdown",
    "translate_errors",
]

# Operators need JAX, which takes half a second to import; the command line and
# programs that set JAX's environment variables come first.
_OPERATORS = {
    "all_gather": "all_gather",
    "barrier": "barrier",
    "pmean": "psum",
    "ppermute": "ppermute",
    "psum": "psum",
    "psum_scatter": "psum_scatter",
}


def __getattr__(name: str) -> Any:
    if name not in _OPERATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".ops.{_OPERATORS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
