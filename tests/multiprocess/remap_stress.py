"""Arrays of random sizes come, go and are communicated, by four threads a process.

One thread launches the collectives; the others make arrays, compute with them, and
drop them elsewhere. Every value is compared. Arguments: seconds, a seed.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ranks import mesh_of, psum, say, spmd, total
from registration_memory import copied, place, settle

import stratacl_jax as scl

SECONDS, SEED = float(sys.argv[1]), int(sys.argv[2])
LONG = SECONDS >= 30
# In a long run everybody rests now and then with nothing in hand, so long that the
# arena gives its memory back.
BUSY_S, REST_S = 16.0, 8.0
MOST_BYTES = (24 if LONG else 8) << 20

scl.initialize()
MESH = mesh_of()
N = MESH.size
ME = jax.process_index()
RING = [(r, (r + 1) % N) for r in range(N)]


def size(rng: np.random.Generator, most: int = MOST_BYTES) -> int:
    """Elements of four bytes, as likely hundreds as millions."""
    return int(np.exp(rng.uniform(np.log(300), np.log(most / 4))))


# Small whole numbers without a period to speak of.
TABLE = np.random.default_rng(0).integers(-7, 8, MOST_BYTES // 4 + 9999)
TABLE = TABLE.astype(np.float32)


def values(n: int, salt: int) -> np.ndarray:
    """Numbers that differ from those of another salt."""
    return TABLE[7 * (salt % 1400) :][:n]


def same(array: Any, expected: np.ndarray, what: str) -> None:
    if not np.array_equal(np.asarray(array), expected):
        np.testing.assert_array_equal(np.asarray(array), expected, err_msg=what)


class Crew:
    """The threads, the clock, and what goes wrong."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.counts: dict[str, int] = {}
        self._begin = time.monotonic()
        self._threads: list[threading.Thread] = []

    def phase(self) -> int:
        """Odd while everybody rests."""
        if not LONG:
            return 0
        cycle, part = divmod(time.monotonic() - self._begin, BUSY_S + REST_S)
        return 2 * int(cycle) + (part > BUSY_S)

    def over(self) -> bool:
        return bool(self.failures) or time.monotonic() - self._begin > SECONDS

    def start(self, name: str, step: Callable[[], None], drop: Callable) -> None:
        """Runs `step` over and over; `drop` before each rest and at the end."""

        def run() -> None:
            self.counts[name] = 0
            try:
                while not self.over():
                    if self.phase() % 2:
                        drop()
                        while self.phase() % 2 and not self.over():
                            time.sleep(0.05)
                        continue
                    step()
                    self.counts[name] += 1
                    time.sleep(0.002)  # the one who communicates needs a core
                drop()
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=run, name=name)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS + 120)
            assert not thread.is_alive(), thread.name


class Maker:
    """Makes arrays, keeps some, and hands others to be dropped elsewhere."""

    def __init__(self, seed: int, handed: queue.Queue):
        self._rng = np.random.default_rng(seed)
        self._kept: list[tuple[Any, np.ndarray]] = []
        self._handed = handed
        self._made = 0

    def step(self) -> None:
        n = size(self._rng)
        x = values(n, self._made)
        self._made += 1
        device = jax.local_devices()[self._made % jax.local_device_count()]
        array: Any = jax.device_put(copied(x), device)
        if self._made % 5 == 0:  # a view that outlives its array
            array = np.asarray(array)
        self._kept.append((array, x))
        while len(self._kept) > 8:
            at = int(self._rng.integers(len(self._kept)))
            item = self._kept.pop(at)
            if self._made % 3 == 0:
                self._handed.put(item)
            else:
                same(*item, "kept by its maker")

    def drop(self) -> None:
        self._kept.clear()


class Computer:
    """Computes, with and without donation, and drops what others made."""

    def __init__(self, seed: int, handed: queue.Queue):
        self._rng = np.random.default_rng(seed)
        self._handed = handed
        self._sizes = [size(self._rng) for _ in range(5)]
        self._chain = jax.jit(lambda v: jnp.sort(v)[::-1] * 2 - 1)
        self._donating = jax.jit(lambda v: v * 3 + 1, donate_argnums=0)

    def step(self) -> None:
        x = values(self._sizes[int(self._rng.integers(5))], int(self._rng.integers(9)))
        device = jax.local_devices()[-1]
        y = self._donating(jax.device_put(copied(x), device))
        if x.size < 50_000:
            y = self._chain(y)
            right = np.sort(x * 3 + 1)[::-1] * 2 - 1
        else:
            right = x * 3 + 1
        same(y, right, "computed")
        self.drop()

    def drop(self) -> None:
        while not self._handed.empty():
            array, x = self._handed.get()
            same(array, x, "handed over")

    def rest(self) -> None:
        self.drop()
        if LONG:  # more than the arena keeps when it is free
            x = np.ones(80 << 20, np.float32)
            jax.block_until_ready(jax.device_put(copied(x), jax.local_devices()[0]))


class Launcher:
    """The collectives: the same ones on all ranks, of sizes that chance chose."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(SEED)
        self._kept: list[tuple[jax.Array, np.ndarray]] = []
        self._programs = []
        kinds: list[tuple[Callable, Callable]] = [
            (psum, total),
            (lambda v: psum(v * 2 - 1) + v, lambda x: total(x * 2 - 1) + x),
            (lambda v: scl.all_gather(v[0], "i")[None], self._blocks),
            (
                lambda v: scl.psum_scatter(jnp.tile(v[0], N), "i", tiled=True)[None],
                total,
            ),
            (lambda v: scl.ppermute(v, "i", RING), lambda x: np.roll(x, 1, axis=0)),
        ]
        for k in range(24 if LONG else 10):
            collective, right = kinds[k % len(kinds)]
            n = size(self._rng, MOST_BYTES if k % len(kinds) < 2 else MOST_BYTES // N)
            shape = jax.ShapeDtypeStruct(
                (N, n), np.float32, sharding=place(np.zeros((N, 1)), MESH).sharding
            )
            self._programs.append(
                (spmd(collective, MESH).lower(shape).compile(), right, n)
            )

    @staticmethod
    def _blocks(x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, (N, *x.shape))

    @staticmethod
    def _compare(y: jax.Array, expected: np.ndarray) -> None:
        for shard in y.addressable_shards:
            same(shard.data, expected[shard.index], f"a collective's, {y.shape}")

    def step(self) -> None:
        which = int(self._rng.integers(len(self._programs)))
        program, right, n = self._programs[which]
        salt = int(self._rng.integers(1000))
        x = np.stack([values(n, salt + r) for r in range(N)])
        self._kept.append((program(place(x, MESH)), right(x)))
        # Sometimes several in flight, compared later, in another order.
        most = 1 + int(self._rng.integers(3))
        while len(self._kept) > most:
            y, expected = self._kept.pop(int(self._rng.integers(len(self._kept))))
            self._compare(y, expected)

    def drop(self) -> None:
        for y, expected in self._kept:
            self._compare(y, expected)
        self._kept.clear()


class Agreement:
    """Whether all go on, and whether all rest: the ranks' clocks differ."""

    def __init__(self, crew: Crew):
        self._crew = crew
        self._sum = spmd(psum, MESH)
        self._ask()

    def _ask(self) -> tuple[bool, bool]:
        mine = [[self._crew.over(), self._crew.phase() % 2]]
        votes = self._sum(place(np.repeat(np.array(mine, np.int32), N, axis=0), MESH))
        over, rest = np.asarray(votes.addressable_shards[0].data)[0]
        return bool(over), bool(rest)

    def launch(self, launcher: Launcher) -> int:
        """Runs the launcher's steps until anybody is over; returns how many."""
        steps = 0
        while True:
            over, rest = self._ask()
            if over or rest:
                launcher.drop()
            if over:
                return steps
            if rest:
                time.sleep(REST_S)
                continue
            launcher.step()
            steps += 1


def main() -> None:
    launcher = Launcher()
    launcher.step()
    launcher.drop()
    before = settle()
    crew = Crew()
    agreement = Agreement(crew)
    handed: queue.Queue = queue.Queue()
    for k in range(2):
        maker = Maker(SEED * 100 + 10 * ME + k, handed)
        crew.start(f"maker {k}", maker.step, maker.drop)
    computer = Computer(SEED * 100 + 10 * ME + 5, handed)
    crew.start("computer", computer.step, computer.rest)
    steps = 0
    try:
        steps = agreement.launch(launcher)
    except BaseException as error:
        crew.failures.insert(0, error)
    crew.join()
    if crew.failures:
        raise crew.failures[0]
    computer.drop()
    ledger = scl.ledger()
    shown = ("direct_bytes", "arena_high_water_bytes", "trims", "remaps")
    figures = ", ".join(f"{name} {ledger[name]}" for name in shown)
    say(f"{steps} collectives, {crew.counts}; {figures}")
    assert ledger["staged_bytes"] == ledger["fallback_bytes"] == 0, ledger
    assert steps > 10 and min(crew.counts.values()) > 10
    if LONG:
        assert ledger["trims"] > 0, ledger
        assert ledger["remaps"] > 0 or jax.process_count() == 1, ledger
    settle(before)


main()
say("ok")
