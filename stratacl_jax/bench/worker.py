"""A rank process of `stratacl bench`: compiles, checks and times cases."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratacl_jax.bench import cases
from stratacl_jax.bench.serve import Child, Handler, collectives, serve

AXIS = "i"
_SEED_CHAIN, _SEED_SINGLE = 1, 2
# Collectives as they stand in optimized HLO, ours and XLA's own.
_CALLS = re.compile(
    r"= .*\b(?:all-reduce|all-gather|collective-permute)(?:-start)?\("
    r'|custom_call_target="stratacl'
)


def make_handlers(child: Child) -> Mapping[str, Handler]:
    bench = Bench(child)
    return {"prepare": bench.prepare, "run": bench.run, "finish": bench.finish}


class Bench:
    """The one case that is loaded, and its compiled program."""

    _case: cases.Case

    def __init__(self, child: Child) -> None:
        import jax

        self._ops = collectives(child.impl)
        self._ranks = child.ranks
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))

    def prepare(self, case: dict[str, Any]) -> dict[str, Any]:
        """Compiles `case`, checks one call and one chain, and warms up.

        Returns:
          wrong: number of wrong elements on this process's ranks.
          program_s: seconds of one warm run of the chain.
        """
        self._case = chain = cases.Case(**case)
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

    def run(self, iterations: int, discard: int) -> float:
        """Runs the chain; returns the median of `iterations` times, seconds.

        The first `discard` runs are not timed: in them the ranks wait for the
        slowest to read its request.
        """
        gc.disable()
        try:
            times = [self._step() for _ in range(discard + iterations)]
        finally:
            gc.enable()
        return statistics.median(times[discard:])

    def finish(self) -> dict[str, Any]:
        """Checks the result of the last timed run and lets go of the case."""
        wrong = self._check()
        del self._program, self._state, self._result
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
        # An all_gather's chain goes on from where the last program ended.
        case = self._case
        calls = self._calls if case.op == "all_gather" else case.chain
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


def chain_body(ops: Any, case: cases.Case, x: Any) -> Any:
    """`case.chain` dependent collectives, unrolled; one rank's view.

    The dependency is free for psum and ppermute, whose result is the next
    operand: nothing but collectives is in the program. An all_gather's result
    is larger than its operand; one tiny in-place update (at most `cases.HEAD`
    elements) makes the next operand depend on it.

    Returns:
      (operand of the next program, result of the last collective). The operand
      is donated, and except for all_gather returned as it is.
    """
    from jax import lax

    n = case.ranks
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
    head = min(cases.HEAD, case.count)
    offset = (lax.axis_index(AXIS) + 1) % n * case.count
    for _ in range(case.chain):
        y = ops.all_gather(x, AXIS, tiled=True)
        x = lax.dynamic_update_slice(x, lax.dynamic_slice(y, (offset,), (head,)), (0,))
    return x, y


if __name__ == "__main__":
    serve(make_handlers)
