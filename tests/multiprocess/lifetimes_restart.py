"""Leaving the fabric and joining it again, with arrays alive; forked children.

Arguments: "restart" or "fork", and a directory.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ranks import Board, check, error_of, mesh_of, psum, rows, run_all, spmd, total
from registration_memory import copied, in_arena, moved, place, pointer, settle

import stratacl_jax as scl
from stratacl_jax import _native

LARGE = 250_007
BOARD = Board(sys.argv[2])
MESH = mesh_of()
N = MESH.size
ME, PROCESSES = jax.process_index(), jax.process_count()
HERE = len(jax.local_devices())


def meet(name: str) -> None:
    BOARD.meet(name, PROCESSES, ME)


def summed(x: np.ndarray) -> jax.Array:
    y = spmd(psum, MESH)(place(x, MESH))
    check(y, total(x))
    return y


# --- leaving and joining again -------------------------------------------------------


def arrays_of_former_lives() -> None:
    """They stay as they are, serve as operands, and give their memory back."""
    kept: list[tuple[jax.Array, np.ndarray]] = []
    views: list[tuple[np.ndarray, np.ndarray]] = []
    for life in range(6):
        scl.initialize()
        x = rows(N, LARGE, seed=life)
        y = summed(x)
        assert in_arena(y)
        for old, right in kept:
            with moved() as count:
                check(jax.block_until_ready(spmd(psum, MESH)(old)), total(right))
            # An arena that was left is nobody's any more: what lies there is copied.
            copied_bytes = 4 * LARGE * HERE if PROCESSES > 1 else 0
            assert count["operand_outside"] == copied_bytes, count
            assert not in_arena(old)
        kept.append((y, total(x)))
        views.append((np.asarray(y.addressable_shards[0].data), total(x)[0]))
        if life == 3:
            del kept[:2], views[0], old
        scl.shutdown()
        for view, right in views:
            np.testing.assert_array_equal(view[0], right)
        check(place(x, MESH), x)
    scl.initialize()
    for y, right in kept:
        check(y, right)
    kept.clear()
    gc.collect()
    for view, right in views:
        np.testing.assert_array_equal(view[0], right)
    scl.shutdown()


def resident_arenas() -> int:
    """Bytes of memory behind the process's arenas, which are mappings like no other."""
    found, arena = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            arena = end - begin == scl.config.arena_span
        elif arena and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


def memory_of_former_lives() -> None:
    """Blocks freed after shutdown() take no memory, and empty arenas no addresses."""
    bases = set()
    mib = 1 << 20
    for _ in range(40):
        scl.initialize()
        bases.add(scl.info()["address_plan"]["base"])
        y = jax.device_put(copied(np.ones(16 * mib, np.uint8)))
        jax.block_until_ready(y)
        scl.shutdown()
        assert int(y[-1]) == 1
        del y
    assert len(bases) <= 3, bases
    jax.clear_caches()
    gc.collect()
    resident = resident_arenas()
    assert resident < 24 * mib, resident
    scl.initialize()
    y = jax.device_put(copied(np.ones(64 * mib, np.uint8)))
    jax.block_until_ready(y)
    assert resident_arenas() > 64 * mib
    scl.shutdown()
    assert 64 * mib < resident_arenas() < 96 * mib
    del y
    gc.collect()
    assert resident_arenas() < 24 * mib


def programs_of_former_lives() -> None:
    scl.initialize()
    x = rows(N, LARGE)
    operand = place(x, MESH)
    f = spmd(psum, MESH).lower(operand).compile()
    check(f(operand), total(x))
    scl.shutdown()
    assert "initialize()" in error_of(lambda: f(operand))
    scl.initialize()
    assert "after stratacl_jax.shutdown()" in error_of(lambda: f(operand))
    summed(x)
    scl.shutdown()


def posts_outlive_their_rank() -> None:
    """One that has sent may leave; who comes later still gets what was sent."""
    for columns in (3, 700, 1900):  # in the slot, and beside the table
        scl.initialize()
        x = rows(N, columns, seed=columns)
        pairs = [(r, (r + HERE) % N) for r in range(HERE)]  # of process 0 to the next
        f = spmd(lambda v, pairs=pairs: scl.ppermute(v, "i", pairs), MESH)
        operand = place(x, MESH)
        f = f.lower(operand).compile()
        meet(f"compiled.{columns}")
        expected = np.zeros_like(x)
        for source, to in pairs:
            expected[to] = x[source]
        if ME == 0:
            check(f(operand), expected)
            scl.shutdown()
            # And its memory is used again.
            again = [place(x * 0 - 5, MESH) for _ in range(20)]
            jax.block_until_ready(again)
            meet(f"left.{columns}")
        else:
            meet(f"left.{columns}")
            check(f(operand), expected)
            scl.shutdown()
        meet(f"end.{columns}")


# --- forked children ------------------------------------------------------------------


def child_of(body: Callable[[], Any]) -> int:
    """Runs it in a forked child; the exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr, flush=True)
        os._exit(code)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def numpy_worker(number: int, results: Any) -> None:
    rng = np.random.default_rng(number)
    a = rng.standard_normal((300, 300))
    results.put((number, float((a @ np.linalg.inv(a)).trace())))


def workers_that_fork() -> None:
    """Two of them compute with NumPy and end; the parent goes on."""
    scl.initialize()
    x = rows(N, LARGE, seed=20)
    f = spmd(lambda v: psum(v) % 13 - v, MESH)
    y, right = place(x, MESH), x
    y = f(y)
    right = total(right) % 13 - right
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=numpy_worker, args=(k, results)) for k in (1, 2)]
    for worker in workers:
        worker.start()
    for _ in range(50):
        y = f(y)
        right = total(right) % 13 - right
    check(y, right)
    traces = dict(results.get(timeout=60) for _ in workers)
    assert all(abs(traces[k] - 300) < 1e-6 for k in (1, 2)), traces
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    for _ in range(50):
        y = f(y)
        right = total(right) % 13 - right
    check(y, right)
    assert scl.ledger()["aborts"] == 0


def a_child_has_no_rank() -> None:
    x = rows(N, LARGE, seed=21)
    f = spmd(psum, MESH)
    operand = place(x, MESH)
    f = f.lower(operand).compile()
    check(f(operand), total(x))

    def collective() -> None:
        # XLA's threads have stayed behind, so that programs for several devices do not
        # even begin there; one that is not compiled yet is refused.
        if HERE == 1:
            assert "no rank" in error_of(lambda: f(operand))
        assert "no rank" in error_of(lambda: spmd(lambda v: psum(v + 1), MESH)(operand))
        assert "no rank" in error_of(scl.initialize)
        scl.shutdown()  # does nothing

    assert child_of(collective) == 0
    check(f(operand), total(x))


def a_child_drops_its_parents_arrays() -> None:
    before = settle()
    x = rows(1, LARGE, seed=22)[0]
    arrays = [jax.device_put(copied(x + k)) for k in range(4)]
    jax.block_until_ready(arrays)
    used = scl.ledger()["arena_used_bytes"]
    views = [np.asarray(a) for a in arrays]

    def drop() -> None:
        for k, view in enumerate(views):  # live shared pages
            np.testing.assert_array_equal(view, x + k)
        views.clear()
        arrays.clear()
        gc.collect()
        assert scl.ledger()["arena_used_bytes"] == used
        assert np.ones(1 << 20).sum() == 1 << 20

    for _ in range(3):
        assert child_of(drop) == 0
    assert scl.ledger()["arena_used_bytes"] == used
    for k, view in enumerate(views):
        np.testing.assert_array_equal(view, x + k)
    del view
    views.clear()
    arrays.clear()
    settle(before)


def children_that_die() -> None:
    """Their end is no rank's end, whatever it is."""
    x = rows(N, LARGE, seed=23)
    f = spmd(psum, MESH)
    for number in (6, 9, 11):
        assert child_of(lambda n=number: os.kill(os.getpid(), n)) == -number
        check(f(place(x, MESH)), total(x))


def a_copy_is_the_childs_own() -> None:
    x = rows(1, LARGE, seed=24)[0]
    y = jax.block_until_ready(jax.device_put(copied(x)))
    assert _native.in_arena(pointer(y), y.nbytes)

    def scribble() -> None:
        mine = np.array(y)
        mine[...] = -1

    assert child_of(scribble) == 0
    np.testing.assert_array_equal(np.asarray(y), x)


if sys.argv[1] == "restart":
    run_all(
        [
            arrays_of_former_lives,
            programs_of_former_lives,
            *([posts_outlive_their_rank] if PROCESSES > 1 else []),
            memory_of_former_lives,
        ]
    )
else:
    warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, of fork
    run_all(
        [
            workers_that_fork,
            a_child_has_no_rank,
            a_child_drops_its_parents_arrays,
            children_that_die,
            a_copy_is_the_childs_own,
        ]
    )
