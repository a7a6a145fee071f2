"""Who may hold XLA's memory, how long, and from where it is given back."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from ranks import check, mesh_of, psum, rows, run_all, spmd, total
from registration_memory import (
    aligned,
    assemble,
    copied,
    in_arena,
    place,
    pointer,
    settle,
)

import stratacl_jax as scl
from stratacl_jax import _native

LARGE = 250_007
PRIME = 101

scl.initialize()
MESH = mesh_of()
N = MESH.size
ME = jax.process_index()
DEVICES = jax.local_devices()
MINE = [r for r, d in enumerate(MESH.devices) if d.process_index == ME]


def traffic(calls: int = 3) -> None:
    """Allocates, frees and communicates, so that whatever is free is written to."""
    x = rows(N, LARGE, seed=50)
    f = spmd(lambda v: psum(v + 1) - v, MESH)
    for _ in range(calls):
        check(f(place(x, MESH)), total(x + 1) - x)
        for device in DEVICES:
            jax.block_until_ready(
                [jax.device_put(copied(x[0] * 0 + 77), device) for _ in range(4)]
            )


def local(x: np.ndarray, device: Any = None) -> jax.Array:
    return jax.block_until_ready(jax.device_put(copied(x), device or DEVICES[0]))


def donating(body: Any) -> Any:
    mapped = jax.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    return jax.jit(mapped, donate_argnums=0)


# --- views and copies -----------------------------------------------------------------


def views_outlive_their_arrays() -> None:
    x = rows(N, LARGE)
    before = settle()
    y = spmd(psum, MESH)(place(x, MESH))
    views = [np.asarray(s.data) for s in y.addressable_shards]
    assert [v.ctypes.data for v in views] == [
        pointer(s.data) for s in y.addressable_shards
    ]
    parts = [v[0, 1000:2000:3] for v in views]  # of which nothing else is left
    raw = memoryview(views[0])
    del y
    traffic()
    for v in views:
        np.testing.assert_array_equal(v[0], total(x)[0])
    del views, v
    gc.collect()
    traffic()
    for part in parts:
        np.testing.assert_array_equal(part, total(x)[0, 1000:2000:3])
    np.testing.assert_array_equal(np.asarray(raw)[0], total(x)[0])
    held = scl.ledger()["arena_used_bytes"]
    assert held >= before + len(MINE) * 4 * LARGE
    raw.release()
    del parts, part, raw
    settle(before)


def views_given_up_by_another_thread() -> None:
    before = settle()
    x = np.arange(LARGE, dtype=np.float32)
    shelf = [np.asarray(local(x + k)) for k in range(8)]

    def take() -> None:
        while shelf:
            view = shelf.pop()
            assert view[-1] == view[0] + LARGE - 1
            del view

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    traffic(1)
    for thread in threads:
        thread.join()
    settle(before)


def pickles_and_copies() -> None:
    before = settle()
    x = rows(1, LARGE, seed=3)[0]
    y = local(x)
    made = [pickle.loads(pickle.dumps(y)), copy.copy(y), copy.deepcopy(y), jnp.array(y)]
    text = pickle.dumps(y)
    del y
    traffic(1)
    made.append(pickle.loads(text))
    for z in made:
        np.testing.assert_array_equal(np.asarray(z), x)
    del made, z
    settle(before)


# --- donation and aliases -------------------------------------------------------------


def a_chain_of_donations() -> None:
    """x = (psum(x) - x) mod p, in place, from all kinds of input."""
    step = donating(lambda v: (psum(v) - v) % PRIME)
    x = np.abs(rows(N, LARGE, seed=4))
    right = x
    for _ in range(9):
        right = (total(right) - right) % PRIME
    sources = [aligned(x[r : r + 1]) for r in MINE]
    odd = [copied(x[r : r + 1]) for r in MINE]
    inputs = {
        "memory of XLA's own": place(x, MESH),
        "NumPy's memory": assemble(
            [jax.device_put(s, d) for s, d in zip(sources, DEVICES, strict=True)], MESH
        ),
        "an unaligned slice": jax.block_until_ready(
            assemble(
                [jax.device_put(s, d) for s, d in zip(odd, DEVICES, strict=True)], MESH
            )
        ),
    }
    for what, y in inputs.items():
        if what == "an unaligned slice":
            for s in odd:
                s[...] = np.nan
        for _ in range(9):
            y = step(y)
        check(y, right, what)
    for r, source in zip(MINE, sources, strict=True):
        np.testing.assert_array_equal(source[0], x[r])


def donation_leaves_views_alone() -> None:
    step = donating(lambda v: psum(v) - v)
    x = rows(N, LARGE, seed=5)
    y = place(x, MESH)
    views = [np.asarray(s.data) for s in y.addressable_shards]
    z = step(y)
    del y
    check(z, total(x) - x)
    traffic(1)
    for r, view in zip(MINE, views, strict=True):
        np.testing.assert_array_equal(view[0], x[r])


def an_array_donated_twice() -> None:
    if len(DEVICES) > 1:
        return  # jaxlib 0.10.2 dies of it, whatever the program
    mapped = jax.shard_map(
        lambda a, b: psum(a) + b, mesh=MESH, in_specs=P("i"), out_specs=P("i")
    )
    f = jax.jit(mapped, donate_argnums=(0, 1))
    x = rows(N, LARGE, seed=6)
    y = place(x, MESH)
    try:
        f(y, y)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        assert "donat" in str(error).lower(), error
    else:
        raise AssertionError("one array was donated twice")
    check(f(place(x, MESH), place(x, MESH)), total(x) + x)


def one_array_in_many_roles() -> None:
    def body(v: jax.Array, w: jax.Array) -> Any:
        a = scl.psum((v, w, v), "i")
        b = scl.all_gather(v[0], "i")[None]
        c = scl.ppermute(w, "i", [(0, N - 1), (N - 1, 0)])
        return (*(jax.lax.pcast(s, "i", to="varying") for s in a), b, c, v, w, v)

    f = spmd(body, MESH)
    x = rows(N, LARGE, seed=7)
    swapped = np.zeros_like(x)
    swapped[0], swapped[N - 1] = x[N - 1], x[0]
    y = place(x, MESH)
    got = f(y, y)
    del y
    traffic(1)
    for k in (0, 1, 2):
        check(got[k], total(x), f"sum {k}")
    check(got[3], np.broadcast_to(x, (N, N, LARGE)))
    check(got[4], swapped)
    for k in (5, 6, 7):
        check(got[k], x, f"copy {k}")


def slices_and_other_shapes() -> None:
    """Operands that begin anywhere in a block."""

    def body(v: jax.Array) -> Any:
        whole = jnp.concatenate([v[0] * 2, v[0]])
        middle = jax.lax.dynamic_slice(whole, (LARGE // 3,), (LARGE,))
        return psum(middle)[None], psum(whole.reshape(2, -1)[1])[None]

    x = rows(N, LARGE, seed=8)
    whole = np.concatenate([x * 2, x], axis=1)
    got = spmd(body, MESH)(place(x, MESH))
    check(got[0], total(whole[:, LARGE // 3 :][:, :LARGE]))
    check(got[1], total(x))


# --- threads --------------------------------------------------------------------------


def operands_dropped_by_another_thread() -> None:
    """While they are being read, and before."""
    f = spmd(lambda v: psum(v) - v, MESH)
    before = settle()
    handed: list[jax.Array] = []
    there = threading.Condition()
    stop = False

    def drop() -> None:
        while True:
            with there:
                there.wait_for(lambda: handed or stop)
                if not handed:
                    return
                array = handed.pop()
            del array
            gc.collect(0)

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    x = rows(N, LARGE, seed=9)
    results = []
    for k in range(20):
        operand = place(x + k, MESH)
        y = f(operand)
        with there:
            handed.append(operand)
            del operand
            there.notify()
        results.append(y)
        if len(results) == 3:
            for back, z in enumerate(results):
                now = x + (k - 2 + back)
                check(z, total(now) - now, f"call {k - 2 + back}")
            results.clear()
            del z
        del y
    with there:
        stop = True
        there.notify_all()
    for thread in threads:
        thread.join()
    results.clear()
    settle(before)


# --- DLPack ---------------------------------------------------------------------------


def dlpack_out() -> None:
    before = settle()
    x = rows(1, LARGE, seed=10)[0]
    y = local(x)
    assert in_arena_one(y)
    seen = np.from_dlpack(y)
    assert seen.ctypes.data == pointer(y)
    again = jax.dlpack.from_dlpack(y)
    assert pointer(again) == pointer(y)
    capsule = y.__dlpack__()
    del y
    traffic(1)
    np.testing.assert_array_equal(seen, x)
    del seen
    gc.collect()
    traffic(1)
    np.testing.assert_array_equal(np.asarray(again), x)
    del again, capsule  # one that nobody has taken
    gc.collect()
    settle(before)


def dlpack_in() -> None:
    x = rows(N, LARGE, seed=11)
    sources = [aligned(x[r : r + 1]) for r in MINE]
    parts = [
        jax.device_put(jax.dlpack.from_dlpack(s), d)
        for s, d in zip(sources, DEVICES, strict=True)
    ]
    y = assemble(parts, MESH)
    del parts
    check(spmd(psum, MESH)(y), total(x))
    check(spmd(lambda v: scl.ppermute(v, "i", [(r, r) for r in range(N)]), MESH)(y), x)
    # XLA's memory by way of DLPack is read in place still.
    own = place(x, MESH)
    round_trip = [
        jax.device_put(jax.dlpack.from_dlpack(s.data), s.device)
        for s in own.addressable_shards
    ]
    del own
    y = assemble(round_trip, MESH)
    del round_trip
    traffic(1)
    check(spmd(psum, MESH)(y), total(x))


def in_arena_one(y: jax.Array) -> bool:
    return bool(_native.in_arena(pointer(y), y.nbytes))


# --- caches ---------------------------------------------------------------------------


def caches_cleared() -> None:
    """On all ranks, then on some, with arrays alive and their programs gone."""
    x = rows(N, LARGE, seed=12)
    f = spmd(lambda v: psum(v) % 7, MESH)
    y = f(place(x, MESH))
    jax.clear_caches()
    gc.collect()
    traffic(1)
    check(y, total(x) % 7)
    y = f(y)
    if ME % 2 == 0:
        jax.clear_caches()
    check(f(y), total(total(total(x) % 7) % 7) % 7)
    assert in_arena(y)


run_all(
    [
        views_outlive_their_arrays,
        views_given_up_by_another_thread,
        pickles_and_copies,
        a_chain_of_donations,
        donation_leaves_views_alone,
        an_array_donated_twice,
        one_array_in_many_roles,
        slices_and_other_shapes,
        operands_dropped_by_another_thread,
        dlpack_out,
        dlpack_in,
        caches_cleared,
    ]
)
