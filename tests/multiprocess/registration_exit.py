"""A rank that reads slowly, while the owner reuses what it reads.

One thread of a process sleeps at a point of the protocol, in the middle of a
collective; whoever is done uses its memory again at once. Arguments: the number of
runs, the nap in seconds; with a directory, whole processes are stopped instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from probe import Probe
from ranks import Board, check, mesh_of, psum, rows, run_all, say, spmd, total
from registration_memory import in_arena, place

import stratacl_jax as scl
from stratacl_jax import _native

RUNS, NAP_S = int(sys.argv[1]), float(sys.argv[2])
STOP = len(sys.argv) > 3
# After the post, before the last stage: where a peer has yet to read.
AFTER_POST, MID_STAGES, MID_STORES = 2, 3, 8
COLUMNS = 100_003

scl.initialize()
PROBE = Probe()
PROBE.nap_on(signal.SIGUSR2, NAP_S)
MESH = mesh_of()
N = MESH.size
ME, PROCESSES = jax.process_index(), jax.process_count()
RING = [(r, (r + 1) % N) for r in range(N)]


def ppermute(v: jax.Array) -> jax.Array:
    return scl.ppermute(v, "i", RING)


def all_gather(v: jax.Array) -> jax.Array:
    return scl.all_gather(v[0], "i")[None]


def psum_scatter(v: jax.Array) -> jax.Array:
    return scl.psum_scatter(jnp.tile(v[0], N), "i", tiled=True)[None]


def sum_of_blocks(v: jax.Array) -> jax.Array:
    return scl.all_gather(v, "i").sum(axis=0)


def within(collective: Callable[[jax.Array], jax.Array]) -> Callable:
    """The collective in the middle of a program: what it reads lies in XLA's own
    block, in which the rest of the program goes on writing."""

    def program(v: jax.Array) -> jax.Array:
        w = collective(v + 1)
        for _ in range(3):
            w = jnp.cumsum(w[:, ::-1] % 7, axis=1) % 5
        return w

    program.__name__ = f"{collective.__name__} within a program"
    return program


def after_within(right: Callable[[np.ndarray], np.ndarray]) -> Callable:
    def after(x: np.ndarray) -> np.ndarray:
        w = right(x + 1)
        for _ in range(3):
            w = np.cumsum(w[:, ::-1] % 7, axis=1, dtype=np.float32) % 5
        return w

    return after


def overwrite(v: jax.Array) -> jax.Array:
    return jnp.full_like(v, -12345.0) + v * 0


def stop_and_go(pid: int) -> threading.Thread:
    """Lets the process go on some time after it has stopped."""

    def watch() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    break
            time.sleep(0.002)
        time.sleep(NAP_S)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def runs(
    collective: Callable[[jax.Array], jax.Array],
    after: Callable[[np.ndarray], np.ndarray],
    points: list[int],
) -> Callable[[], None]:
    """The case that runs a collective again and again, with another slow one each
    time; its name is the collective's."""

    def case() -> None:
        f = spmd(collective, MESH)
        reuse = jax.jit(
            jax.shard_map(overwrite, mesh=MESH, in_specs=P("i"), out_specs=P("i")),
            donate_argnums=0,
        )
        bystander = place(rows(N, COLUMNS, seed=99), MESH)
        sources = [rows(N, COLUMNS, seed=k) for k in range(4)]
        jax.block_until_ready(reuse(f(place(sources[0], MESH))))
        begin = time.monotonic()
        right = 0
        for k in range(RUNS):
            x = sources[k % 4]
            operand = place(x, MESH)
            assert in_arena(operand)
            slow = k % PROCESSES
            thread = None
            if slow == ME:
                number = signal.SIGSTOP if STOP else signal.SIGUSR2
                _native.set_fault(points[k // PROCESSES % len(points)], 0, number)
            if STOP and (slow + 1) % PROCESSES == ME:
                thread = stop_and_go(PIDS[slow])
            got = f(operand)
            # Its memory is written to as soon as the call has ended here.
            gone = reuse(operand)
            check(got, after(x), f"run {k}")
            # So is the result's, where others might yet store to.
            again = reuse(got)
            fresh = [place(x * 0 - 1, MESH) for _ in range(2)]
            check(gone, np.full_like(x, -12345.0), f"operand's memory, run {k}")
            reused = np.asarray(again.addressable_shards[0].data)
            assert (reused == -12345.0).all(), f"result's memory, run {k}"
            for array in fresh:
                check(array, x * 0 - 1, f"new memory, run {k}")
            check(bystander, rows(N, COLUMNS, seed=99), f"memory in use, run {k}")
            if thread is not None:
                thread.join()
            _native.set_fault(0, 0, 0)
            right += 1
        # A nap is never shorter: else nobody has slept.
        least = RUNS * NAP_S * 0.8
        seconds = time.monotonic() - begin
        assert seconds > least, f"{RUNS} runs took {seconds:.2f} s: nobody was slow"
        say(f"{case.__name__}: {right} of {RUNS} right")

    case.__name__ = collective.__name__
    return case


def blocks(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, (N, *x.shape))


PIDS: list[int] = []
if STOP:
    board = Board(sys.argv[3])
    board.post(f"pid.{ME}", os.getpid())
    PIDS += [int(board.read(f"pid.{p}")) for p in range(PROCESSES)]


def next_door(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=0)


TWO_PHASE, ONE_SHOT = [AFTER_POST, MID_STORES], [MID_STAGES]
run_all(
    [
        runs(psum, total, TWO_PHASE),
        runs(all_gather, blocks, ONE_SHOT),
        runs(psum_scatter, total, ONE_SHOT),
        runs(ppermute, next_door, ONE_SHOT),
        runs(within(psum), after_within(total), TWO_PHASE),
        runs(within(sum_of_blocks), after_within(total), ONE_SHOT),
        runs(within(ppermute), after_within(next_door), ONE_SHOT),
    ]
)
