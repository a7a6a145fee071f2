"""How much of what real programs communicate is read where XLA put it.

Told twice: by the ledger, and by a custom call in front of each collective, which
notes where the very operand lies.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from probe import Probe
from ranks import check, mesh_of, run_all, say, scatter
from registration_memory import moved

import stratacl_jax as scl
from stratacl_jax import _native

SHARE = 0.99

scl.initialize()
PROBE = Probe()
MESH = mesh_of()
N = MESH.size
HERE = len(jax.local_devices())
ME = jax.process_index()


def looked(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, with a look at each of its operands."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return collective(jax.tree.map(PROBE.look, x), *args, **kwargs)

    return call


def every_operand_is_looked_at(text: str) -> int:
    """Checks a compiled program for it; returns the number of collectives."""
    source = dict(
        re.findall(r"(%[\w.-]+) = [^\n]*? (?:bitcast|copy-done)\((%[\w.-]+)\)", text)
    )
    calls = re.findall(
        r"custom-call\(([^)]*)\), custom_call_target=\"stratacl_collective\"", text
    )
    looks = set(
        re.findall(r"(%[\w.-]+) = [^\n]*custom_call_target=\"probe_look\"", text)
    )
    for operands in calls:
        for operand in re.findall(r"%[\w.-]+", operands):
            while operand in source:
                operand = source[operand]
            assert operand in looks, f"{operand} of {operands} is not looked at"
    return len(calls)


def report(what: str, count: dict[str, int]) -> None:
    """Compares what the ledger and what the looks say."""
    notes = PROBE.take()
    plan = scl.info()["address_plan"]
    begin = int(plan["arenas"][ME], 16)
    inside = outside = 0
    for note in notes:
        within = (
            begin <= note.address and note.address + note.bytes <= begin + plan["span"]
        )
        assert within == _native.in_arena(note.address, note.bytes)
        inside += note.bytes * within
        outside += note.bytes * (not within)
    total = count["direct_bytes"] + count["staged_bytes"] + count["eager_bytes"]
    assert inside + outside == total, (inside, outside, count)
    ledger_share, looks_share = count["direct_bytes"] / total, inside / total
    say(
        f"{what}: {total} bytes of operands in {len(notes)} arrays; direct "
        f"{ledger_share:.4%} by the ledger, {looks_share:.4%} by their addresses"
    )
    assert ledger_share >= SHARE, count
    assert looks_share >= SHARE, notes


# --- training -----------------------------------------------------------------------


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.into = nnx.Linear(24, 512, rngs=rngs)
        self.norm = nnx.LayerNorm(512, rngs=rngs)
        self.within = nnx.Linear(512, 640, rngs=rngs)
        self.out = nnx.Linear(640, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.gelu(self.into(x))
        return self.out(nnx.gelu(self.within(self.norm(x))))


def a_flax_train_step() -> None:
    graph, state = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    state = jax.tree.map(np.asarray, state)

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "i", to="varying"), params)
        loss, grads = jax.value_and_grad(loss_of)(own, x, y)
        loss, grads = looked(scl.psum)((loss, grads), "i")
        params = jax.tree.map(lambda p, g: p - 0.05 / N * g, params, grads)
        return params, loss / N

    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(P(), P("i"), P("i")), out_specs=(P(), P())
    )
    everywhere = NamedSharding(MESH, P())
    params = jax.tree.map(
        lambda v: jax.make_array_from_callback(v.shape, everywhere, lambda at: v[at]),
        state,
    )
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((N * 32, 24)).astype(np.float32) for _ in range(5)]
    answers = [np.stack([x.sum(1), x[:, 0], np.sin(x[:, 1])], 1) for x in batches]
    train = jax.jit(mapped, donate_argnums=0)
    lowered = train.lower(params, scatter(batches[0], MESH), scatter(answers[0], MESH))
    compiled = lowered.compile()
    assert every_operand_is_looked_at(compiled.as_text()) == 1

    losses = []
    with moved() as count:
        for x, y in zip(batches, answers, strict=True):
            params, loss = compiled(params, scatter(x, MESH), scatter(y, MESH))
            losses.append(float(loss))
    report("a Flax train step", count)

    # The same on one device.
    reference, expected = state, []
    gradient = jax.jit(jax.value_and_grad(loss_of))
    for x, y in zip(batches, answers, strict=True):
        parts = [
            gradient(reference, x[r * 32 : r * 32 + 32], y[r * 32 : r * 32 + 32])
            for r in range(N)
        ]
        loss, grads = jax.tree.map(lambda *v: sum(v[1:], v[0]), *parts)
        expected.append(float(loss) / N)
        reference = jax.tree.map(lambda p, g: p - 0.05 / N * g, reference, grads)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for got, right in zip(
        jax.tree.leaves(params), jax.tree.leaves(reference), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(got.addressable_shards[0].data), right, rtol=2e-3, atol=2e-5
        )


# --- experts ------------------------------------------------------------------------

TOKENS, WIDTH, ROOM = 192, 160, 64  # a rank's tokens; places an expert has for a rank


def a_mixture_of_experts() -> None:
    """Tokens go to the rank of their expert and back; exact, for they are whole."""

    def layer(x: jax.Array, expert: jax.Array) -> Any:
        x, expert = x[0], expert[0]
        mine = jax.lax.axis_index("i")
        chosen = jax.nn.one_hot(expert, N)
        place = (jnp.cumsum(chosen, 0) * chosen).sum(1).astype(int) - 1
        slot = chosen[:, :, None] * jax.nn.one_hot(place, ROOM)[:, None]
        boxes = jnp.einsum("tes,tw->esw", slot, x)
        everybodys = looked(scl.all_gather)(boxes, "i")  # from, to, place, width
        work = everybodys[:, mine] * (mine + 2.0)
        spread = jax.nn.one_hot(mine, N)[None, :, None, None] * work[:, None]
        back = looked(scl.psum_scatter)(spread, "i")
        out = jnp.einsum("tes,esw->tw", slot, back)
        load = looked(scl.psum)(chosen.sum(0), "i")
        # A copy for the neighbour, as a pipeline would pass it on.
        next_door = looked(scl.ppermute)(out, "i", [(r, (r + 1) % N) for r in range(N)])
        return out[None], next_door[None], jax.lax.pcast(load, "i", to="varying")[None]

    f = jax.jit(
        jax.shard_map(layer, mesh=MESH, in_specs=(P("i"), P("i")), out_specs=P("i"))
    )
    rng = np.random.default_rng(1)
    for k in range(4):
        x = rng.integers(-8, 9, (N, TOKENS, WIDTH)).astype(np.float32)
        expert = rng.integers(0, N, (N, TOKENS))
        if k == 2:
            expert[:] = N - 1  # most find no place
        if k == 0:
            text = f.lower(scatter(x, MESH), scatter(expert, MESH)).compile().as_text()
            assert every_operand_is_looked_at(text) == 4
        with moved() as count:
            got = jax.block_until_ready(f(scatter(x, MESH), scatter(expert, MESH)))
        if k == 3:
            report("a mixture of experts", count)
        else:
            PROBE.take()
        right = x * (expert[..., None] + 2.0)
        for r in range(N):
            for e in range(N):
                right[r, np.flatnonzero(expert[r] == e)[ROOM:]] = 0
        loads = np.stack([(expert == e).sum() for e in range(N)]).astype(np.float32)
        check(got[0], right, f"tokens, call {k}")
        check(got[1], np.roll(right, 1, axis=0), f"neighbours, call {k}")
        check(got[2], np.broadcast_to(loads, (N, N)), f"loads, call {k}")


run_all([a_flax_train_step, a_mixture_of_experts])
