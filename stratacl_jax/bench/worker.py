"""A rank process of `stratacl bench`: compiles, checks and times cases."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np

from stratacl_jax.bench import cases
from stratacl_jax.bench.serve import Child, Handler, collectives, serve

AXIS = "i"
_SEED_CHAIN, _SEED_SINGLE = 1, 2
# Counters of ours that are reported for each operation.
LEDGER = (
    "operations",
    "deferred",
    "sleeps",
    "wakes",
    "page_faults",
    "eager_bytes",
    "staged_bytes",
    "direct_bytes",
)
# Collectives as they stand in optimized HLO, ours and XLA's own.
_CALLS = re.compile(
    r"= .*\b(?:all-reduce|all-gather|reduce-scatter|collective-permute)(?:-start)?\("
    r'|custom_call_target="stratacl'
)


def make_handlers(child: Child) -> Mapping[str, Handler]:
    bench = Bench(child)
    return {
        "prepare": bench.prepare,
        "run": bench.run,
        "copy": bench.copy,
        "finish": bench.finish,
    }


class Bench:
    """The one case that is loaded, and its compiled program."""

    _case: cases.Case
    _copies: list[tuple[np.ndarray, np.ndarray]]

    def __init__(self, child: Child) -> None:
        import jax

        self._child = child
        self._ops = collectives(child.impl)
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))

    def prepare(self, case: dict[str, Any]) -> dict[str, Any]:
        """Compiles `case`, checks one call and one chain, and warms up.

        Returns:
          wrong: number of wrong elements on this process's ranks.
          program_s: seconds of one warm run of the chain.
        """
        self._case = chain = cases.Case(**case)
        self._copies = []
        single = cases.Case(**{**case, "chain": 1})
        wrong = 0
        program = self._compile(single)
        state = self._operand(single, _SEED_SINGLE)
        _, result = program(state)
        wrong += self._wrong(single, result, _SEED_SINGLE, 1)
        if chain.chain > 1:
            program = self._compile(chain)
        self._program = program
        self._state, self._calls = self._operand(chain, _SEED_CHAIN), 0
        self._step()
        wrong += self._check()
        times = [self._step() for _ in range(2)]
        return {"wrong": wrong, "program_s": min(times)}

    def run(self, iterations: int, discard: int) -> dict[str, Any]:
        """Runs the chain.

        The first `discard` runs are not timed: in them the ranks wait for the
        slowest to read its request.

        Returns:
          program_s: median of `iterations` times, seconds.
          ledger: what this process's counters have gained; empty for stock JAX.
        """
        before = self._ledger()
        gc.disable()
        try:
            times = [self._step() for _ in range(discard + iterations)]
        finally:
            gc.enable()
        after = self._ledger()
        return {
            "program_s": statistics.median(times[discard:]),
            "ledger": {name: after[name] - before[name] for name in before},
        }

    def copy(self, seconds: float) -> float:
        """Copies as many bytes as a result has, on each local rank at once.

        Both buffers are warm and private: what plain copying costs here.

        Args:
          seconds: about how long to go on.

        Returns:
          Seconds of one copy: the slowest rank's median.
        """
        if not self._copies:
            size = self._case.result_bytes
            self._copies = [
                (np.zeros(size, np.uint8), np.ones(size, np.uint8))
                for _ in range(self._child.devices)
            ]
        with futures.ThreadPoolExecutor(len(self._copies)) as pool:
            ranks = [pool.submit(_copy, a, b, seconds) for a, b in self._copies]
            return max(rank.result() for rank in ranks)

    def _ledger(self) -> dict[str, int]:
        if self._child.impl != "ours":
            return {}
        now = self._ops.ledger()
        return {name: now[name] for name in LEDGER}

    def finish(self) -> dict[str, Any]:
        """Checks the result of the last timed run and lets go of the case."""
        wrong = self._check()
        del self._program, self._state, self._result, self._copies
        gc.collect()
        return {"wrong": wrong}

    def _step(self) -> float:
        start = time.perf_counter()
        self._state, self._result = self._program(self._state)
        self._result.block_until_ready()
        stop = time.perf_counter()
        self._calls += self._case.chain
        return stop - start

    def _check(self) -> int:
        case = self._case
        goes_on = case.op in ("all_gather", "psum_scatter")
        calls = self._calls if goes_on else case.chain
        return self._wrong(case, self._result, _SEED_CHAIN, calls)

    def _compile(self, case: cases.Case) -> Any:
        import jax
        from jax.sharding import PartitionSpec as P

        def body(x: Any) -> Any:
            return chain_body(self._ops, case, x)

        mapped = jax.shard_map(
            body,
            mesh=self._mesh,
            in_specs=P(AXIS),
            out_specs=(P(AXIS), P(AXIS)),
            check_vma=False,
        )
        shape = jax.ShapeDtypeStruct(
            (case.ranks * case.count,), case.dtype, sharding=self._sharding()
        )
        compiled = jax.jit(mapped, donate_argnums=0).lower(shape).compile()
        text = compiled.as_text() or ""
        calls = sum(1 for line in text.splitlines() if _CALLS.search(line))
        # A group of one has nothing to do, and XLA knows.
        if calls < case.chain and case.ranks > 1:
            raise RuntimeError(
                f"XLA left {calls} of {case.chain} collectives in the program: "
                "its time would mean nothing"
            )
        return compiled

    def _sharding(self) -> Any:
        import jax

        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(AXIS))

    def _operand(self, case: cases.Case, seed: int) -> Any:
        import jax

        def shard(index: Any) -> np.ndarray:
            rank = (index[0].start or 0) // case.count
            return cases.operand(case, rank, seed)

        return jax.make_array_from_callback(
            (case.ranks * case.count,), self._sharding(), shard
        )

    def _wrong(self, case: cases.Case, result: Any, seed: int, calls: int) -> int:
        wrong = 0
        for shard in result.addressable_shards:
            got = np.asarray(shard.data)
            rank = (shard.index[0].start or 0) // got.shape[0]
            want = cases.expected(case, rank, seed, calls)
            wrong += cases.count_wrong(case, got, want, calls)
        return wrong


def _copy(target: np.ndarray, source: np.ndarray, seconds: float) -> float:
    """Median seconds of copying `source` to `target`, both ways in turn."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
        target, source = source, target
    return statistics.median(times)


def chain_body(ops: Any, case: cases.Case, x: Any) -> Any:
    """`case.chain` dependent collectives, unrolled; one rank's view.

    The dependency is free for psum and ppermute, whose result is the next
    operand: nothing but collectives is in the program. Results of all_gather
    and psum_scatter have another shape; one tiny in-place update (at most
    `cases.HEAD` elements) makes the next operand depend on them.

    Returns:
      (operand of the next program, result of the last collective). The operand
      is donated, and returned as it is but for such updates.
    """
    import jax.numpy as jnp
    from jax import lax

    n, head = case.ranks, case.head
    if case.op == "psum":
        y = x
        for _ in range(case.chain):
            y = ops.psum(y, AXIS)
        return x, y
    if case.op == "ppermute":
        ring = [(r, (r + 1) % n) for r in range(n)]
        y = x
        for _ in range(case.chain):
            y = ops.ppermute(y, AXIS, ring)
        return x, y
    next_rank = (lax.axis_index(AXIS) + 1) % n
    if case.op == "all_gather":
        offset = next_rank * case.count
        for _ in range(case.chain):
            y = ops.all_gather(x, AXIS, tiled=True)
            first = lax.dynamic_slice(y, (offset,), (head,))
            x = lax.dynamic_update_slice(x, first, (0,))
        return x, y
    offset = next_rank * (case.count // n)
    limit = jnp.asarray(cases.amplitude(case), x.dtype)
    for _ in range(case.chain):
        y = ops.psum_scatter(x, AXIS, tiled=True)
        # No sum is a NaN or equal to the type's largest number, so all elements
        # are turned over; but only we know.
        flip = limit - lax.dynamic_slice(x, (offset,), (head,))
        fresh = jnp.where(y[:head] == _largest(x.dtype), limit, flip)
        x = lax.dynamic_update_slice(x, fresh, (offset,))
    return x, y


def _largest(dtype: Any) -> Any:
    import jax.numpy as jnp

    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return jnp.asarray(info(dtype).max, dtype)


if __name__ == "__main__":
    serve(make_handlers)
