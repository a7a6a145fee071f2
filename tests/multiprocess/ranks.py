"""What the programs of this directory share: a mesh, arrays, numpy's answers.

They run under `stratacl launch`, one copy a process, started by tests/test_*.py.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stratacl_jax as scl


def mesh_of(ranks: Sequence[int] | None = None) -> Mesh:
    """One axis "i" over the given ranks, or all."""
    devices = sorted(jax.devices(), key=lambda d: d.id)
    chosen = devices if ranks is None else [devices[r] for r in ranks]
    return Mesh(np.array(chosen), ("i",))


def scatter(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Row r to rank r, as a block of shape (1, ...)."""
    return jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, P("i")), lambda index: rows[index]
    )


def spmd(function: Callable, mesh: Mesh) -> Callable:
    """The jitted program whose every rank maps its row to a row."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    )


def check(found: jax.Array, expected: np.ndarray, what: str = "") -> None:
    """Compares the rows that this process holds, exactly."""
    for shard in found.addressable_shards:
        mine, wanted = np.asarray(shard.data), expected[shard.index]
        # The fast way first: some tests compare thousands.
        if not (mine.shape == wanted.shape and np.array_equal(mine, wanted)):
            np.testing.assert_array_equal(mine, wanted, err_msg=what)
            raise AssertionError(f"shapes differ: {mine.shape}, {wanted.shape}; {what}")


def rows(n: int, columns: int = 5, seed: int = 0) -> np.ndarray:
    """Small whole numbers, different in each row and for each seed."""
    x = np.random.default_rng(seed).integers(-9, 10, (n, columns))
    return x.astype(np.float32)


def vary(x: jax.Array) -> jax.Array:
    """A replicated value as a row of the program's result."""
    return jax.lax.pcast(x, "i", to="varying")


def psum(x: jax.Array) -> jax.Array:
    return vary(scl.psum(x, "i"))


def total(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.sum(axis=0), x.shape)


def say(*words: object) -> None:
    """One line, whole, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def attempt(run: Callable[[], Any]) -> tuple[Any, str]:
    """What `run` returned, and the text of the StrataError that it raised.

    One of the two is empty; the error's class name comes first in its text. Any
    other exception is passed on.
    """
    try:
        with scl.translate_errors():
            return jax.block_until_ready(run()), ""
    except scl.StrataError as error:
        return None, f"{type(error).__name__}: {error}"


def error_of(run: Callable[[], object]) -> str:
    """The text of the StrataError that `run` must raise, class name first."""
    _, error = attempt(run)
    assert error, "no error was raised"
    return error


def must_contain(text: str, *parts: object) -> None:
    missing = [str(part) for part in parts if str(part) not in text]
    assert not missing, f"{missing} not in: {text}"


class DeathWatch:
    """Notes when another process dies, on this process's clock."""

    def __init__(self, pid: int):
        self._fd = os.pidfd_open(pid)
        self._at = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        select.select([self._fd], [], [])
        self._at = time.monotonic()
        os.close(self._fd)

    def time_of_death(self) -> float:
        self._thread.join(30.0)
        assert not self._thread.is_alive(), "the process has not died"
        return self._at


class Board:
    """Words that ranks leave for each other in a directory; not the fabric.

    Each write is a file renamed into place, so that no reader sees half a word.
    """

    def __init__(self, directory: str):
        self._directory = directory

    def post(self, name: str, text: object) -> None:
        path = os.path.join(self._directory, name)
        with open(path + f".{os.getpid()}", "w") as file:
            file.write(str(text))
        os.replace(path + f".{os.getpid()}", path)

    def read(self, name: str, patience: float = 60.0) -> str:
        end = time.monotonic() + patience
        path = os.path.join(self._directory, name)
        while not os.path.exists(path):
            if time.monotonic() > end:
                raise TimeoutError(f"nobody posted {name}")
            time.sleep(0.005)
        with open(path) as file:
            return file.read()

    def meet(self, name: str, ranks: int, rank: int) -> None:
        """Waits until all processes have come here."""
        self.post(f"{name}.{rank}", "here")
        for other in range(ranks):
            self.read(f"{name}.{other}")


def run_all(cases: Sequence[Callable[[], None]]) -> None:
    """Runs cases in order; prints "ok <name>" or the traceback of each."""
    failed = False
    for case in cases:
        begin = time.monotonic()
        try:
            case()
        except Exception:
            failed = True
            say(f"FAILED {case.__name__}\n{traceback.format_exc()}")
        else:
            say(f"ok {case.__name__} {time.monotonic() - begin:.2f} s")
    sys.exit(1 if failed else 0)
