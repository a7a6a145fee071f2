"""Data parallel training by hand: a small network learns a wave.

    stratacl launch -n 2 examples/02_data_parallel.py

Every rank computes the gradients of its share of the batch; one psum of the whole
pytree adds them up; every rank takes the same step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stratacl_jax as scl

STEPS, SAMPLES_PER_RANK, RATE = 300, 64, 0.05

scl.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
n = mesh.size


def init(rng):
    """Parameters of a 1-32-32-1 perceptron: the same on every rank."""
    sizes = [1, 32, 32, 1]
    return [
        (
            rng.normal(0, a**-0.5, (a, b)).astype(np.float32),
            np.zeros(b, np.float32),
        )
        for a, b in zip(sizes[:-1], sizes[1:], strict=True)
    ]


def loss_of(params, x, y):
    for weights, bias in params[:-1]:
        x = jnp.tanh(x @ weights + bias)
    weights, bias = params[-1]
    return jnp.mean((x @ weights + bias - y) ** 2)


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("data"), P("data")),
    out_specs=(P(), P()),
)
def step(params, x, y):
    # From here on each rank's copy counts as its own, so that the gradients are
    # those of its own samples and it is we who add them up.
    own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    loss, gradients = jax.value_and_grad(loss_of)(own, x, y)
    loss, gradients = scl.psum((loss, gradients), "data")  # one call for all
    params = jax.tree.map(lambda p, g: p - RATE * g / n, params, gradients)
    return params, loss / n


def split(values):
    """An array whose leading axis is cut over the ranks."""
    return jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, P("data")), lambda index: values[index]
    )


rng = np.random.default_rng(0)
params = init(rng)
samples = rng.uniform(-1, 1, (n * SAMPLES_PER_RANK, 1)).astype(np.float32)
x, y = split(samples), split(np.sin(4 * samples))

losses = []
for i in range(STEPS):
    params, loss = step(params, x, y)
    losses.append(float(loss))
    if jax.process_index() == 0 and (i % 50 == 0 or i == STEPS - 1):
        print(f"step {i:3d}: loss {losses[-1]:.5f}")

assert losses[-1] < losses[0] / 5, "the loss should have fallen"
