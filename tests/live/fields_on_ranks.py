"""What users of such systems ran into, on the ranks; see test_field_cases."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import stratacl_jax as scl
from live import sheet
from live.groups_on_ranks import groups_of
from live.values_on_ranks import scl_settings


def reuse_while_peers_read(
    operator: str, index_groups: Sequence[Sequence[int]], count: int, turns: int
) -> None:
    """The operand is overwritten in place right behind each call.

    Args:
      count: elements of one rank's result.
    """
    on = sheet.mesh()
    n, size = on.size, len(index_groups[0])
    whom = groups_of((n,), "i", index_groups)
    length = count * size if operator == "psum_scatter" else count
    x = [(np.arange(length, dtype=float) * (r + 1)) % 1009 for r in range(n)]
    sums = [sheet.total([x[m] for m in whom[r]]) for r in range(n)]
    parts = sums
    if operator == "psum_scatter":
        parts = [np.split(sums[r], size)[whom[r].index(r)] for r in range(n)]

    def call(v: Any, steps: Any) -> Any:
        # Ranks of one process come at different times, too.
        done = lax.fori_loop(
            0, steps, lambda _, s: s * 3 + 1, jnp.uint32(1) + 0 * steps
        )
        v = lax.optimization_barrier((v, done))[0]
        more: dict[str, Any] = {"axis_index_groups": index_groups}
        if operator == "psum":
            return scl.psum(v, "i", **more)
        return scl.psum_scatter(v, "i", tiled=True, **more)

    f = sheet.on_ranks(call, on, check_vma=False)
    overwrite = sheet.on_ranks(lambda v: v + 1, on, donate_argnums=0)
    current, kept = sheet.spread(x, on), sheet.spread(x, on)
    rng = random.Random(jax.process_index())
    for turn in range(turns):
        # The same on all processes, another rank in each turn.
        late = [np.int64(40_000 * (r == turn % n)) for r in range(n)]
        if turn % jax.process_count() == jax.process_index():
            time.sleep(rng.random() * 0.005)
        steps = sheet.spread(late, on)
        result = f(current, steps)
        former, current = current, overwrite(current)
        assert former.is_deleted()
        for rank, got in sheet.collect(result, on).items():
            what = f"{operator}, turn {turn}, rank {rank}"
            sheet.same(got, parts[rank] + turn * size, what)
    again = f(kept, steps)
    for rank, got in sheet.collect((kept, again), on).items():
        sheet.same(got[0], x[rank], f"the operand of rank {rank}")
        sheet.same(got[1], parts[rank], f"{operator} of what was kept, rank {rank}")


EXTREMES = {
    "float16": ("negative", "-inf", "inf"),
    "bfloat16": ("negative", "-inf", "inf"),
    "float32": ("negative", "-inf", "inf"),
    "float64": ("negative", "-inf", "inf"),
    "int8": ("negative", "min", "max"),
    "int32": ("negative", "min", "max"),
    "uint8": ("max",),
    "uint64": ("max",),
}


def extremes(index_groups: Sequence[Sequence[int]]) -> None:
    """Sums of negatives, infinities and extremes; a group of one changes no bit."""
    n = sheet.mesh().size
    whom = groups_of((n,), "i", index_groups)

    def value(name: str, kind: str, r: int) -> np.ndarray:
        dtype = np.dtype(getattr(jnp, name))
        if kind == "negative":
            return (-np.arange(1, 40) - r).astype(dtype)
        if kind in ("min", "max"):
            return np.full(39, getattr(np.iinfo(dtype), kind), dtype)
        return np.full(39, float(kind)).astype(dtype)

    names = [(name, kind) for name, kinds in EXTREMES.items() for kind in kinds]
    x = [[value(*which, r) for which in names] for r in range(n)]
    got = sheet.run(
        lambda v: [scl.psum(y, "i", axis_index_groups=index_groups) for y in v],
        x,
        check_vma=False,
    )
    for rank, out in got.items():
        for k, which in enumerate(names):
            right = sheet.total([x[m][k] for m in whom[rank]])
            sheet.same(out[k], right, f"{which} on rank {rank} in {whom[rank]}")

    # NaN payloads, denormals and the sign of zero.
    bits = np.array([0x7FC12345, 0xFFABCDEF, 1, 0x80000001, 0x80000000, 0], np.uint32)
    odd = [np.tile(bits.view(np.float32), repeat) for repeat in (1, 40, 5000)]
    got = sheet.run(
        lambda v: [scl.psum(y, "i", axis_index_groups=index_groups) for y in v],
        [odd] * n,
        check_vma=False,
    )
    for rank, out in got.items():
        if len(whom[rank]) == 1:
            for a, b in zip(out, odd, strict=True):
                assert a.tobytes() == b.tobytes(), (rank, a[:6].view(np.uint32))


PAIRS = ([[0, 1], [2, 3]], [[3, 0], [1, 2]])


def _twelve(k: int) -> tuple[str, Callable[[Any], Any]]:
    """The k-th of twelve calls: what it is, and itself."""
    kind, pairs = (
        ["psum", "all_gather", "psum_scatter", "ppermute"][k % 4],
        PAIRS[k // 4 % 2],
    )
    more: dict[str, Any] = {"axis_index_groups": pairs}
    perm = [e for a, b in pairs for e in ((a, b), (b, a))]
    calls: dict[str, Callable[[Any], Any]] = {
        "psum": lambda v: scl.psum(v, "i", **more),
        "all_gather": lambda v: scl.all_gather(v, "i", tiled=True, **more),
        "psum_scatter": lambda v: scl.psum_scatter(v, "i", tiled=True, **more),
        "ppermute": lambda v: scl.ppermute(v, "i", perm),
    }
    return kind, calls[kind]


def twelve_independent(turns: int) -> list[str]:
    """Nothing orders the calls; each process may order them as it likes.

    Returns:
      Of each turn the error, or "" for right values.
    """
    on = sheet.mesh()
    assert on.size == 4
    x = [
        [sheet.random(np.int32, (4, 8), (40, r, k)) for k in range(12)]
        for r in range(4)
    ]

    def program(x: Any) -> Any:
        out = []
        for k, v in enumerate(x):
            # Different work before and behind, so that a scheduler has a choice.
            for _ in range(k % 3):
                v = v @ v.T @ v
            y = _twelve(k)[1](v)
            out.append(y @ y.T if k % 2 else y)
        return out

    def before(k: int, v: np.ndarray) -> np.ndarray:
        for _ in range(k % 3):
            v = v @ v.T @ v
        return v

    v = [[before(k, x[r][k]) for k in range(12)] for r in range(4)]

    def check(out: Any) -> None:
        for rank, got in sheet.collect(out, on).items():
            for k in range(12):
                group = groups_of((4,), "i", PAIRS[k // 4 % 2])[rank]
                me = group.index(rank)
                mine = [v[m][k] for m in group]
                kind = _twelve(k)[0]
                right = {
                    "psum": sheet.total(mine),
                    "all_gather": np.concatenate(mine),
                    "psum_scatter": np.split(sheet.total(mine), 2)[me],
                    "ppermute": mine[1 - me],
                }[kind]
                right = right @ right.T if k % 2 else right
                sheet.same(got[k], right, f"{kind}, call {k}, rank {rank}")

    outcomes = []
    with scl_settings(timeout=30), np.errstate(over="ignore"):
        f = sheet.on_ranks(program, on, check_vma=False)
        args = sheet.spread(x, on)
        results = [f(args) for _ in range(turns)]  # no sync between them
        for out in results:
            outcomes.append(_outcome(lambda out=out: out))
            if not outcomes[-1]:
                check(out)
    return outcomes


def _outcome(run: Callable[[], Any]) -> str:
    """The class of the error that `run` ends in, and its text; "" if none."""
    try:
        with scl.translate_errors():
            jax.block_until_ready(run())
    except scl.StrataError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def clones() -> list[str]:
    """One function called thrice: right everywhere, or Mismatch everywhere."""
    on = sheet.mesh()
    inner = jax.jit(lambda v: scl.psum(v, "i") + v)
    x = [np.int32(r + 1) for r in range(on.size)]

    def program(v: Any) -> Any:
        return inner(v), inner(v * 10), inner(v * 100)

    outcomes = []
    with scl_settings(timeout=20):
        f, args = sheet.on_ranks(program, on), sheet.spread(x, on)
        for _ in range(3):
            outcomes.append(_outcome(lambda: f(args)))
            if not outcomes[-1]:
                for rank, got in sheet.collect(f(args), on).items():
                    whole = sum(x) + x[rank]
                    assert [int(v) for v in got] == [whole, 10 * whole, 100 * whole]
    return outcomes


def swapped_branches() -> list[str]:
    """A predicate that differs between processes, with other calls on each side."""
    on = sheet.mesh()

    def one(v: Any) -> Any:
        return scl.psum(scl.all_gather(v, "i"), "i")[0]

    def other(v: Any) -> Any:
        return scl.all_gather(scl.psum(v, "i"), "i")[0]

    def program(v: Any, mine: Any) -> Any:
        return lax.cond(mine, one, other, v)

    x = [np.float32(r) for r in range(on.size)]
    mine = [np.bool_(d.process_index % 2 == 0) for d in on.devices.flat]
    outcomes = []
    with scl_settings(timeout=30):
        f = sheet.on_ranks(program, on, check_vma=False)
        args = sheet.spread(x, on), sheet.spread(mine, on)
        outcomes.append(_outcome(lambda: f(*args)))
        # What comes next works, or says that it cannot.
        outcomes.append(
            _outcome(lambda: f(args[0], sheet.spread([np.True_] * on.size, on)))
        )
    return outcomes


def chain(count: int) -> None:
    """Nine steps in place: x = (psum(x) - x) mod p."""
    on = sheet.mesh()
    p = 10_007
    x = [np.random.default_rng((41, r)).integers(0, p, count) for r in range(on.size)]
    step = sheet.on_ranks(lambda v: (scl.psum(v, "i") - v) % p, on, donate_argnums=0)
    current, whole = sheet.spread(x, on), np.stack(x)
    for _ in range(9):
        current = step(current)
        whole = (whole.sum(0) - whole) % p
    for rank, got in sheet.collect(current, on).items():
        sheet.same(got, whole[rank], f"rank {rank}")


def numpy_source(offset: int, count: int) -> None:
    """An operand that may alias numpy's memory: left alone, and safe from changes.

    Args:
      offset: bytes from a multiple of 64 at which the source begins.
    """
    on = sheet.mesh()
    n = on.size
    x = [np.random.default_rng((42, r)).integers(0, 99, count) for r in range(n)]
    sources = {}
    for r, device in enumerate(on.devices.flat):
        if device in jax.local_devices():
            memory = np.empty(count * 8 + 128, np.uint8)
            start = -memory.ctypes.data % 64 + offset
            source = memory[start : start + count * 8].view(np.int64)
            source[:] = x[r]
            sources[r] = source
    sharding = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec("i"))
    shards = [
        jax.device_put(source[None], on.devices.flat[r])
        for r, source in sources.items()
    ]
    whole = jax.make_array_from_single_device_arrays((n, count), sharding, shards)
    f = sheet.on_ranks(lambda v: (scl.psum(v, "i"), scl.all_gather(v[:3], "i")), on)
    out = f(whole)
    jax.block_until_ready(out)
    for r, source in sources.items():
        assert (source == x[r]).all(), "the source was changed"
        source[:] = -1
    for rank, got in sheet.collect(out, on).items():
        sheet.same(got[0], sheet.total(x), f"rank {rank}")
        sheet.same(got[1], np.stack([v[:3] for v in x]), f"rank {rank}")


def one_comes_late(seconds: float) -> None:
    """Nobody computes, some wait for others that wait: that alone is no Mismatch."""
    on = sheet.mesh()
    n = on.size
    x = [sheet.random(np.int32, (n,), (43, r)) for r in range(n)]

    def program(v: Any) -> Any:
        # Rank 1 waits for 0, the last rank for both.
        v = v + scl.ppermute(v, "i", [(0, 1)])
        return scl.psum(v, "i"), scl.all_gather(v, "i"), scl.psum_scatter(v, "i")

    compiled = sheet.on_ranks(program, on).lower(sheet.spread(x, on)).compile()
    args = sheet.spread(x, on)
    if jax.process_index() == 0:
        time.sleep(seconds)
    y = [v + x[0] if r == 1 else v for r, v in enumerate(x)]
    for rank, got in sheet.collect(compiled(args), on).items():
        total = sheet.total(y)
        sheet.same_trees(got, (total, np.stack(y), total[rank]), f"rank {rank}")


def donated_twice() -> None:
    """One array as two donated operands: a clear error, and the ranks live on."""
    on = sheet.mesh()
    x = [np.float32(r) for r in range(on.size)]
    f = sheet.on_ranks(
        lambda a, b: (scl.psum(a, "i"), scl.psum(b * 2, "i")), on, donate_argnums=(0, 1)
    )
    array = sheet.spread(x, on)
    try:
        jax.block_until_ready(f(array, array))
    except Exception as error:
        assert "donat" in str(error), error
    else:
        raise AssertionError("it was accepted")
    for got in sheet.collect(f(sheet.spread(x, on), sheet.spread(x, on)), on).values():
        assert got == (sum(x), 2 * sum(x))
