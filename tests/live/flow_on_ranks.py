"""Collectives inside scan, while, cond, checkpoint and nested jit; donation.

Whole numbers, so that numpy's loop gives the only right answer.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import stratacl_jax as scl
from live import sheet

MODULUS = 9973


def _inputs(seed: int, shape: tuple[int, ...] = (7,)) -> list[np.ndarray]:
    return [
        np.random.default_rng((seed, r)).integers(0, MODULUS, shape)
        for r in range(sheet.mesh().size)
    ]


def _step(c: Any) -> Any:
    """All operators, one behind the other; what a rank holds stays its own."""
    n = lax.axis_size("i")
    ring = [(r, (r + 1) % n) for r in range(n)]
    parts = scl.all_gather(c * 3, "i")
    mixed = scl.psum_scatter(parts, "i") + scl.ppermute(c, "i", ring)
    return scl.barrier("i", (scl.psum(c, "i") + mixed + c) % MODULUS)


def _step_of_all(c: np.ndarray) -> np.ndarray:
    n = len(c)
    return (c.sum(0) + 3 * n * c + np.roll(c, 1, 0) + c) % MODULUS


def _steps_of_all(c: Any, count: int) -> np.ndarray:
    c = np.stack(c)
    for _ in range(count):
        c = _step_of_all(c)
    return c


def _check(got: dict[int, Any], right: Any) -> None:
    for rank, value in got.items():
        own = jax.tree.map(operator.itemgetter(rank), right)
        sheet.same_trees(value, own, f"rank {rank}")


def scan(check_vma: bool, unroll: int) -> None:
    """Carries and stacked results; unrolling makes copies of the calls."""
    x = _inputs(30)

    def body(c: Any, k: Any) -> Any:
        c = _step(c + k)
        return c, scl.psum(c, "i") % 10

    def program(c: Any) -> Any:
        return lax.scan(body, c, jnp.arange(6), unroll=unroll)

    c, out = np.stack(x), []
    for k in range(6):
        c = _step_of_all(c + k)
        out.append(np.broadcast_to(c.sum(0) % 10, c.shape))
    _check(sheet.run(program, x, check_vma=check_vma), (c, np.stack(out, 1)))


def loops(check_vma: bool) -> None:
    """fori, and while whose condition is a sum over the ranks."""
    x = _inputs(31)

    def unfinished(state: Any) -> Any:
        return (scl.psum(state[1][0], "i") % 5 != 0) & (state[0] < 40)

    def program(c: Any) -> Any:
        turns, last = lax.while_loop(
            unfinished, lambda s: (s[0] + 1, _step(s[1])), (0, c)
        )
        return lax.fori_loop(0, 5, lambda k, c: _step(c), c), last, turns

    c, turns = np.stack(x), 0
    while c[:, 0].sum() % 5 != 0 and turns < 40:
        c, turns = _step_of_all(c), turns + 1
    assert 0 < turns < 40
    right = _steps_of_all(x, 5), c, np.full(len(x), turns)
    _check(sheet.run(program, x, check_vma=check_vma), right)


def branches(check_vma: bool) -> None:
    """cond and switch in a scan: all ranks take one branch, with other calls in it."""
    x = _inputs(32)

    def doubled(c: Any) -> Any:
        return (scl.psum(c, "i") + 2 * c) % MODULUS

    def gathered(c: Any) -> Any:
        return (
            scl.all_gather(c, "i").sum(0) - scl.pmean(c * 0, "i").astype(int)
        ) % 7 + c

    def body(c: Any, k: Any) -> Any:
        odd = scl.psum(c[0], "i") % 2 == 1
        c = lax.cond(odd, doubled, gathered, c)
        return lax.switch(k % 3, [doubled, lambda c: c + 1, _step], c), odd

    def program(c: Any) -> Any:
        return lax.scan(body, c, jnp.arange(9))

    c, odds = np.stack(x), []
    for k in range(9):
        odds.append(c[:, 0].sum() % 2 == 1)
        total = c.sum(0)
        c = (total + 2 * c) % MODULUS if odds[-1] else total % 7 + c
        if k % 3 == 0:
            c = (c.sum(0) + 2 * c) % MODULUS
        c = c + 1 if k % 3 == 1 else _step_of_all(c) if k % 3 == 2 else c
    assert len(set(odds)) == 2, "the values take one branch only"
    right = c, np.broadcast_to(np.asarray(odds), (len(x), 9))
    _check(sheet.run(program, x, check_vma=check_vma), right)


def nested(check_vma: bool) -> None:
    """An inner jit called twice, a checkpoint under grad and scan, and vmap of scan."""
    x = _inputs(33, (4, 7))
    inner = jax.jit(_step)

    @jax.checkpoint
    def layer(c: Any, _: Any) -> Any:
        return scl.psum(c * c, "i") * c, None

    def loss(c: Any) -> Any:
        return jnp.sum(lax.scan(layer, c, None, length=2)[0])

    def program(c: Any) -> Any:
        def one(row: Any) -> Any:
            return lax.scan(lambda s, _: (_step(s), None), row, None, length=3)[0]

        small = (c % 3).astype(float)
        return inner(c) + inner(c + 1), jax.vmap(one)(c), jax.grad(loss)(small)

    def dense_loss(c: Any) -> Any:
        for _ in range(2):
            c = jnp.sum(c * c, 0) * c
        return jnp.sum(c)

    whole = np.stack(x)
    right = (
        _step_of_all(whole) + _step_of_all(whole + 1),
        _steps_of_all(x, 3),
        np.asarray(jax.grad(dense_loss)((whole % 3).astype(float))),
    )
    _check(sheet.run(program, x, check_vma=check_vma), right)


def donated(count: int) -> None:
    """A result in its operand's own memory, and other references left alone."""
    on = sheet.mesh()
    x = [v.astype(np.int64) for v in _inputs(34, (count,))]
    step = sheet.on_ranks(_step, on, donate_argnums=0)
    kept = sheet.spread(x, on)
    c = kept + 0
    for _ in range(5):
        former, c = c, step(c)
        assert former.is_deleted()
    _check(sheet.collect(c, on), _steps_of_all(x, 5))
    _check(sheet.collect(kept, on), np.stack(x))
