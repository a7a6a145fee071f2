"""Collectives at memory speed for JAX on CPU hosts.

Names, signatures and semantics are those of `jax.lax`; call them inside
`jax.shard_map`. Importing this has no side effects: the fabric is joined by
`initialize()`, or by the first operator that is lowered.
"""

from .ops.all_gather import all_gather
from .ops.barrier import barrier
from .ops.ppermute import ppermute
from .ops.psum import pmean, psum
from .ops.psum_scatter import psum_scatter
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
