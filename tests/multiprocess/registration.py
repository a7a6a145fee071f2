"""Which memory XLA gets, and that collectives read it where it lies.

One argument: "here" (all that needs no other settings) or "modes".
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from ranks import check, mesh_of, psum, rows, run_all, scatter, spmd, total
from registration_memory import (
    aligned,
    assemble,
    copied,
    in_arena,
    moved,
    place,
    pointer,
    settle,
)

import stratacl_jax as scl
from stratacl_jax import _native

LARGE = 300_001  # float32: direct, and in two phases if it is summed
LARGE_BYTES = 4 * LARGE
DEVICES = jax.local_devices()
ME = jax.process_index()


# --- before initialize() ----------------------------------------------------------

MESH = mesh_of()
N = MESH.size
OLD = rows(N, LARGE, seed=1)
OLD_ARRAY = jax.block_until_ready(scatter(OLD, MESH))


def arrays_from_before() -> None:
    scl.initialize()
    assert not in_arena(OLD_ARRAY)
    between_processes = jax.process_count() > 1
    f = spmd(psum, MESH)
    with moved() as count:
        y = jax.block_until_ready(f(OLD_ARRAY))
    check(y, total(OLD))
    here = LARGE_BYTES * len(DEVICES)
    if between_processes:
        assert count["operand_outside"] == here, count
        assert count["direct_bytes"] == 0, count
    else:  # one address space: it can be read wherever it lies
        assert count["direct_bytes"] == here and count["staged_bytes"] == 0, count
    assert in_arena(y)
    with moved() as count:
        z = jax.block_until_ready(f(y))
    check(z, total(total(OLD)))
    assert count["direct_bytes"] == here and count["staged_bytes"] == 0, count
    # A donated old array lends its memory to the result, which peers store to.
    g = jax.jit(
        jax.shard_map(
            lambda v: psum(v) % 17, mesh=MESH, in_specs=P("i"), out_specs=P("i")
        ),
        donate_argnums=0,
    )
    check(g(OLD_ARRAY), total(OLD) % 17)
    assert OLD_ARRAY.is_deleted()


# --- which blocks -------------------------------------------------------------------


def sizes_and_places() -> None:
    eager = scl.config.eager_bytes
    device = DEVICES[-1]
    for n, expected in [
        (0, False),
        (1, False),
        (63, False),
        (eager // 2, False),
        (eager - 1, False),
        (eager, True),
        (eager + 1, True),
        (3 * eager + 7, True),
        (1 << 20, True),
        ((1 << 24) + 13, True),
    ]:
        x = np.arange(n, dtype=np.uint8)
        for make in (
            lambda x=x: jax.device_put(copied(x), device),
            lambda x=x: jax.device_put(jnp.asarray(copied(x)), device) + np.uint8(0),
        ):
            array = jax.block_until_ready(make())
            np.testing.assert_array_equal(np.asarray(array), x)
            if n:
                found = _native.in_arena(pointer(array), n)
                assert found == expected, f"{n} bytes: {found}"
                assert pointer(array) % 64 == 0
    outputs = jax.jit(
        lambda x: (x, x[::2] * 2, x.sum(), x.reshape(-1, 2), jnp.zeros((0, 3)))
    )(jax.device_put(copied(np.ones(1 << 16, np.float32)), device))
    places = [_native.in_arena(pointer(y), max(1, y.nbytes)) for y in outputs[:4]]
    assert places == [True, True, False, True], places


def empty_operands() -> None:
    f = spmd(
        lambda v: (psum(v), scl.ppermute(v, "i", [(0, N - 1)]), psum(v[:, :0])),
        MESH,
    )
    for columns in (0, 1, LARGE):
        x = rows(N, columns)
        for _ in range(2):
            got = f(place(x, MESH))
            check(got[0], total(x))
            check(got[2], x[:, :0])


def blocks_come_back() -> None:
    """What arrays take is given back, to the byte."""
    f = spmd(lambda v: psum(v * 2) - v, MESH)
    x = rows(N, LARGE)

    def round_trip() -> None:
        y = place(x, MESH)
        for _ in range(4):
            y = f(y)
        jax.block_until_ready(y)

    round_trip()
    before = settle()
    for _ in range(20):
        round_trip()
    settle(before)
    assert scl.ledger()["quarantined_bytes"] == 0


# --- threads ------------------------------------------------------------------------


def threads_make_and_drop_arrays() -> None:
    """Arrays of many threads, dropped by others, while a program communicates."""
    before = settle()
    handed: queue.Queue[Any] = queue.Queue(maxsize=40)
    failures: list[BaseException] = []
    double = jax.jit(lambda v: v * 2)
    stop = threading.Event()

    def guarded(body: Callable[..., None], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                body(*args)
            except BaseException as error:
                failures.append(error)
                stop.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def make(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for k in range(60):
            n = int(rng.integers(1, 200_000))
            x = rng.integers(-99, 99, n).astype(np.float32)
            array = jax.device_put(copied(x), DEVICES[k % len(DEVICES)])
            assert _native.in_arena(pointer(array), array.nbytes) == (4 * n >= 8192)
            handed.put((array, x))
        handed.put(None)

    def drop() -> None:
        while (item := handed.get()) is not None:
            array, x = item
            np.testing.assert_array_equal(np.asarray(array), x)
            del array, item

    def compute() -> None:
        x = jax.device_put(copied(np.ones(50_000, np.float32)), DEVICES[0])
        for _ in range(40):
            y = double(x)
            assert float(y[-1]) == 2.0

    threads = [guarded(make, 10 + k) for k in range(3)]
    threads += [guarded(drop) for _ in range(3)]
    threads += [guarded(compute)]
    f = spmd(lambda v: psum(v) % 13 - v, MESH)
    expected = rows(N, 100_003)
    y = place(expected, MESH)
    for _ in range(15):
        y = f(y)
        expected = total(expected) % 13 - expected
        check(y, expected)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    del y
    settle(before)


# --- NumPy's memory -----------------------------------------------------------------


def numpy_memory_without_a_copy() -> None:
    """Aligned arrays lie where NumPy put them; they may change after the call."""
    f = spmd(lambda v: (psum(v), scl.all_gather(v[0], "i").sum(axis=0)[None]), MESH)
    for k in range(6):
        x = rows(N, LARGE, seed=k)
        mine = [shard.index[0].start for shard in OLD_ROWS.addressable_shards]
        sources = [aligned(x[r : r + 1]) for r in mine]
        parts = [
            jax.device_put(source, shard.device)
            for source, shard in zip(sources, OLD_ROWS.addressable_shards, strict=True)
        ]
        # Else this says nothing.
        assert [pointer(p) for p in parts] == [s.ctypes.data for s in sources]
        array = assemble(parts, MESH)
        with moved() as count:
            got = jax.block_until_ready(f(array))
        for source in sources:
            source[...] = np.nan
        check(got[0], total(x), f"psum, call {k}")
        check(got[1], total(x), f"all_gather, call {k}")
        if jax.process_count() > 1:
            assert count["operand_outside"] == 2 * LARGE_BYTES * len(DEVICES), count
        del parts, array
        for source in sources:
            assert np.isnan(source).all()


def numpy_memory_that_is_copied() -> None:
    """What JAX has copied may change before the call is over."""
    f = spmd(lambda v: psum(v) - v, MESH)
    results = []
    for k in range(8):
        x = rows(N, LARGE, seed=k)
        odd = copied(x)
        # JAX copies behind the program's back, and wants that to have ended.
        array = jax.block_until_ready(scatter(odd, MESH))
        y = f(array)
        odd[...] = np.nan
        results.append((y, total(x) - x))
        del array, y
    for y, expected in results:
        check(y, expected)


def constants_of_a_program() -> None:
    table = np.arange(LARGE, dtype=np.float32)
    f = spmd(lambda v: psum(v + jnp.asarray(table)), MESH)
    x = rows(N, LARGE)
    check(f(place(x, MESH)), total(x + table))
    # The constant itself is the operand.
    g = spmd(
        lambda v: psum(jax.lax.pcast(jnp.asarray(table), "i", to="varying")) + v, MESH
    )
    check(g(scatter(x, MESH)), N * table + x)


# --- modes --------------------------------------------------------------------------


def with_registration(mode: str) -> None:
    scl.shutdown()
    scl.config.update("registration", mode)
    scl.initialize()
    mesh = mesh_of()
    x = rows(N, LARGE)
    programs: dict[str, Callable] = {
        "psum": spmd(psum, mesh),
        "all_gather": spmd(lambda v: scl.all_gather(v[0], "i")[None], mesh),
        "psum_scatter": spmd(
            lambda v: scl.psum_scatter(jnp.tile(v, (1, N))[0], "i", tiled=True)[None],
            mesh,
        ),
        "ppermute": spmd(
            lambda v: scl.ppermute(v, "i", [(r, (r + 1) % N) for r in range(N)]), mesh
        ),
    }
    right = {
        "psum": total(x),
        "all_gather": np.broadcast_to(x, (N, N, LARGE)),
        "psum_scatter": total(x),
        "ppermute": np.roll(x, 1, axis=0),
    }
    across = jax.process_count() > 1
    with moved() as count:
        for name, program in programs.items():
            for _ in range(3):
                check(program(place(x, mesh)), right[name], f"{name}, {mode}")
    # psum_scatter's operand is N times as large.
    all_bytes = 3 * (3 + N) * LARGE_BYTES * len(DEVICES)
    staged = mode == "staged" and across
    assert count["mode"] == (all_bytes if staged else 0), count
    assert count["direct_bytes"] == (0 if staged else all_bytes), count
    assert count["operand_outside"] == count["result_outside"] == 0, count
    ledger = scl.ledger()
    by = ledger["registered_by"]
    if mode == "staged":
        assert not in_arena(place(x, mesh))
    else:
        assert in_arena(place(x, mesh))
    if mode == "just_in_time":
        assert by["own_pages"]["bytes"] == by["peers_ahead"]["bytes"] == 0, by
        assert (by["first_use"]["bytes"] > 0) == across, by
    if mode == "on_allocation":
        assert by["own_pages"]["bytes"] > 0 and by["first_use"]["bytes"] == 0, by
        assert ledger["first_use_gap_min_s"] is not None


def all_modes() -> None:
    for mode in ("just_in_time", "staged", "on_allocation", "staged", "just_in_time"):
        with_registration(mode)


OLD_ROWS = scatter(rows(N, 1), MESH)

if sys.argv[1] == "here":
    run_all(
        [
            arrays_from_before,
            sizes_and_places,
            empty_operands,
            blocks_come_back,
            threads_make_and_drop_arrays,
            numpy_memory_without_a_copy,
            numpy_memory_that_is_copied,
            constants_of_a_program,
        ]
    )
else:
    scl.initialize()
    run_all([all_modes])
