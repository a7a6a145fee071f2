"""A process is stopped past the deadline while it may store to its peers' results.

The others give up, and use the memory that XLA gave back; then the stopped one goes
on. Two processes or more. Argument: a directory.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from ranks import Board, attempt, check, mesh_of, must_contain, rows, say
from registration_memory import in_arena, place, pointer

import stratacl_jax as scl
from stratacl_jax import _native

BEFORE_POST, AFTER_POST, MID_STORES = 1, 2, 8
# Three parts, each stored by itself: two when the process is stopped are missing.
SIZES = (150_001, 220_003, 90_007)
RESULT_BYTES = 4 * sum(SIZES)

scl.config.update("timeout", 1.5)
scl.initialize()
ME, PROCESSES = jax.process_index(), jax.process_count()
MESH = mesh_of()
N = MESH.size
HERE = len(jax.local_devices())
BOARD = Board(sys.argv[1])
PIDS: list[int] = []


def total(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.sum(axis=0), x.shape)


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def program(donate: bool) -> Any:
    mapped = jax.shard_map(
        lambda v: jax.tree.map(lambda w: w % 13, psum_of(v)) if donate else psum_of(v),
        mesh=MESH,
        in_specs=P("i"),
        out_specs=P("i"),
    )
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def psum_of(tree: Any) -> Any:
    return jax.tree.map(
        lambda w: jax.lax.pcast(w, "i", to="varying"), scl.psum(tree, "i")
    )


def after(xs: list[np.ndarray], donate: bool) -> list[np.ndarray]:
    return [total(x) % 13 if donate else total(x) for x in xs]


def held() -> int:
    return int(scl.ledger()["quarantined_bytes"])


def until(done: Any, what: str) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def spans(array: jax.Array) -> list[tuple[int, int]]:
    return [
        (pointer(s.data), pointer(s.data) + s.data.nbytes)
        for s in array.addressable_shards
    ]


def run_round(number: int, point: int, victim: int, donate: bool) -> None:
    xs = [rows(N, n, seed=10 * number + k) for k, n in enumerate(SIZES)]
    f = program(donate)
    operands = [place(x, MESH) for x in xs]
    f = f.lower(operands).compile()
    BOARD.meet(f"{number}.compiled", PROCESSES, ME)
    for got, right in zip(f(operands), after(xs, donate), strict=True):
        check(got, right, "before anything happens")
    operands = [place(x, MESH) for x in xs]
    freed = [span for array in operands for span in spans(array)]
    used = int(scl.ledger()["arena_used_bytes"])
    del got
    if victim == ME:
        _native.set_fault(point, 0, signal.SIGSTOP)
    BOARD.meet(f"{number}.armed", PROCESSES, ME)

    _, error = attempt(lambda: f(operands))
    must_contain(error, "DeadlineExceeded: ", "psum of float32")
    del operands
    gc.collect()  # exceptions hold their frames, and those the arrays
    if victim == ME:
        _native.set_fault(0, 0, 0)
        BOARD.meet(f"{number}.resumed", PROCESSES, ME)
    else:
        assert is_stopped(PIDS[victim])
        must_contain(error, f"(pid {PIDS[victim]})")
        until(lambda: held() >= RESULT_BYTES * HERE, f"{held()} bytes are held")
        # All that XLA has given back is in use again.
        canaries: list[tuple[jax.Array, np.ndarray]] = []
        high = scl.ledger()["arena_high_water_bytes"]
        while scl.ledger()["arena_high_water_bytes"] == high or len(canaries) < 12:
            x = rows(N, SIZES[len(canaries) % 3], seed=900 + len(canaries))
            canaries.append((place(x, MESH), x))
            assert len(canaries) < 400
        assert all(in_arena(array) for array, _ in canaries)
        begins = [span[0] for array, _ in canaries for span in spans(array)]
        reused = sum(any(b <= at < e for at in begins) for b, e in freed)
        assert reused > 0, "the canaries sit somewhere else"
        assert held() >= RESULT_BYTES * HERE, "let go while the process is stopped"
        BOARD.post(f"{number}.ready.{ME}", "")
        for other in set(range(PROCESSES)) - {victim}:
            BOARD.read(f"{number}.ready.{other}")
        if min(set(range(PROCESSES)) - {victim}) == ME:
            os.kill(PIDS[victim], signal.SIGCONT)
        BOARD.meet(f"{number}.resumed", PROCESSES, ME)
        for array, x in canaries:
            check(array, x, "a canary")
        until(lambda: held() == 0, f"{held()} bytes are still held")
        for array, x in canaries:
            check(array, x, "a canary, later")
        del canaries, array
    until(lambda: held() == 0, f"{held()} bytes are still held")
    until(
        lambda: scl.ledger()["arena_used_bytes"] <= used,
        f"{scl.ledger()['arena_used_bytes'] - used} bytes are lost",
    )
    BOARD.meet(f"{number}.quiet", PROCESSES, ME)
    operands = [place(x, MESH) for x in xs]
    for got, right in zip(f(operands), after(xs, donate), strict=True):
        check(got, right, "the next call")
    say(f"round {number}: point {point}, process {victim}, ok")


BOARD.post(f"pid.{ME}", os.getpid())
PIDS += [int(BOARD.read(f"pid.{p}")) for p in range(PROCESSES)]
run_round(0, MID_STORES, 0, donate=False)
run_round(1, MID_STORES, PROCESSES - 1, donate=True)
run_round(2, AFTER_POST, 0, donate=True)
run_round(3, BEFORE_POST, PROCESSES - 1, donate=False)
say("ok")
