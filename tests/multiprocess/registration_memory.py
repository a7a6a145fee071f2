"""Where arrays lie, and what the ledger counts; shared by programs beside this."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stratacl_jax as scl
from stratacl_jax import _native


def pointer(x: jax.Array) -> int:
    return x.unsafe_buffer_pointer()


def in_arena(x: jax.Array) -> bool:
    """Whether the process's part of an array lies in its arena, all of it."""
    found = {
        _native.in_arena(pointer(s.data), s.data.nbytes) for s in x.addressable_shards
    }
    assert len(found) == 1, "some shards do and some do not"
    return found.pop()


@contextmanager
def moved() -> Iterator[dict[str, int]]:
    """What the ledger counts in the block, filled in at its end."""
    before = scl.ledger()
    now: dict[str, int] = {}
    yield now
    after = scl.ledger()
    for name in ("direct_bytes", "staged_bytes", "eager_bytes", "fallback_bytes"):
        now[name] = after[name] - before[name]
    for name, n in after["staged_reasons"].items():
        now[name] = n - before["staged_reasons"][name]


def copied(x: np.ndarray) -> np.ndarray:
    """The same values at an odd address, which JAX must copy from."""
    room = np.empty(x.nbytes + 1, np.uint8)
    odd = room[1:].view(x.dtype).reshape(x.shape)
    odd[...] = x
    return odd


def aligned(x: np.ndarray) -> np.ndarray:
    """The same values at an address that JAX is content with."""
    room = np.empty(x.nbytes + 64, np.uint8)
    skip = -room.ctypes.data % 64
    out = room[skip : skip + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def assemble(parts: list[jax.Array], mesh: Any) -> jax.Array:
    shape = (mesh.size, *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, P("i")), parts
    )


def place(x: np.ndarray, mesh: Any) -> jax.Array:
    """As `scatter`, always into memory of XLA's own."""
    mine = [
        (r, d)
        for r, d in enumerate(mesh.devices)
        if d.process_index == jax.process_index()
    ]
    parts = [jax.device_put(copied(x[r : r + 1]), d) for r, d in mine]
    return jax.block_until_ready(assemble(parts, mesh))


def settle(expected: int | None = None) -> int:
    """Arena bytes in use once XLA's threads have let go, or are as `expected`."""
    end = time.monotonic() + 20
    same, last = 0, -1
    while same < 20 and last != expected:
        used = scl.ledger()["arena_used_bytes"]
        same = same + 1 if used == last and expected is None else 0
        last = used
        assert time.monotonic() < end, f"{used} bytes are in use, not {expected}"
        time.sleep(0.005)
    return last
