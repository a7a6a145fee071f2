"""A rank process of `stratacl demo`: trains the model with psum'ed gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratacl_jax.bench.serve import Child, Handler, collectives, serve

AXIS = "data"
_CHAIN = 4


def make_handlers(child: Child) -> Mapping[str, Handler]:
    trainer = Trainer(child)
    return {
        "setup": trainer.setup,
        "steps": trainer.steps,
        "communication": trainer.communication,
    }


class Trainer:
    """Parameters, optimizer state and compiled step; replicated on all ranks."""

    def __init__(self, child: Child) -> None:
        import jax

        self._ops = collectives(child.impl)
        self._emit = child.emit
        self._ranks = child.ranks
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))

    def setup(self, sequences: int, seed: int) -> dict[str, Any]:
        """Builds and compiles everything.

        Args:
          sequences: of the global batch, a multiple of the number of ranks.
          seed: of the parameters and of the order of the data.
        """
        import jax
        from flax import nnx
        from jax.sharding import NamedSharding, PartitionSpec

        from stratacl_jax.demo import corpus, model

        self._shape = model.Shape()
        self._sequences, self._seed = sequences, seed
        self._corpus = corpus.load()
        net = model.Transformer(self._shape, nnx.Rngs(seed))
        graph, params = nnx.split(net, nnx.Param)
        optimizer = model.optimizer()
        replicated, split = PartitionSpec(), PartitionSpec(AXIS)
        self._split = NamedSharding(self._mesh, split)
        everywhere = NamedSharding(self._mesh, replicated)

        def place(leaf: Any) -> Any:
            # Every process has made the same value: no communication.
            value = np.asarray(leaf)
            return jax.make_array_from_callback(
                value.shape, everywhere, lambda index: value[index]
            )

        self._params = jax.tree.map(place, params)
        self._opt_state = jax.tree.map(place, optimizer.init(params))
        psum, ranks = self._ops.psum, self._ranks

        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            def local_loss(params: Any) -> Any:
                return model.mean_loss(nnx.merge(graph, params), batch)

            loss, grads = jax.value_and_grad(local_loss)(params)
            # The line this is all about: one pytree, one all-reduce.
            loss, grads = psum((loss, grads), AXIS)
            loss, grads = jax.tree.map(lambda x: x / ranks, (loss, grads))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = jax.tree.map(lambda p, u: p + u, params, updates)
            return params, opt_state, loss

        def chain(tree: Any) -> Any:
            for _ in range(_CHAIN):
                tree = psum(tree, AXIS)
            return tree

        def over_ranks(body: Any, in_specs: Any, out_specs: Any) -> Any:
            return jax.shard_map(
                body,
                mesh=self._mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )

        self._step = (
            jax.jit(
                over_ranks(step, (replicated, replicated, split), replicated),
                donate_argnums=(0, 1),
            )
            .lower(self._params, self._opt_state, self._batch(0))
            .compile()
        )
        self._chain = (
            jax.jit(over_ranks(chain, (replicated,), replicated))
            .lower(self._params)
            .compile()
        )
        leaves = jax.tree.leaves(self._params)
        return {
            "parameters": sum(leaf.size for leaf in leaves),
            "gradient_bytes": sum(leaf.nbytes for leaf in leaves),
            "arrays": len(leaves),
            "length": self._shape.length,
            "text_bytes": int(self._corpus.text.size),
            "text_files": self._corpus.files,
        }

    def steps(self, first: int, count: int) -> None:
        """Trains `count` steps; emits {step, loss, ms} after each."""
        import jax

        for step in range(first, first + count):
            batch = self._batch(step)
            start = time.perf_counter()
            result = self._step(self._params, self._opt_state, batch)
            self._params, self._opt_state, loss = jax.block_until_ready(result)
            ms = (time.perf_counter() - start) * 1e3
            self._emit({"step": step, "loss": float(loss), "ms": ms})

    def communication(self, repeats: int) -> float:
        """Milliseconds of one psum of a pytree shaped like the gradients: the
        median of `repeats` programs of four dependent ones, over four."""
        import jax

        times = []
        for _ in range(repeats + 1):  # the first only lines the ranks up
            start = time.perf_counter()
            jax.block_until_ready(self._chain(self._params))
            times.append((time.perf_counter() - start) * 1e3 / _CHAIN)
        return statistics.median(times[1:])

    def _batch(self, step: int) -> Any:
        import jax

        from stratacl_jax.demo import corpus

        length = self._shape.length
        rows = corpus.batch(self._corpus, step, self._seed, self._sequences, length)
        return jax.make_array_from_callback(
            rows.shape, self._split, lambda index: rows[index]
        )


if __name__ == "__main__":
    serve(make_handlers)
