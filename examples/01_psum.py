"""The three collectives on a few numbers, on every rank at once.

stratacl launch -n 4 examples/01_psum.py                          # 4 processes
stratacl launch -n 1 --devices-per-process 4 examples/01_psum.py  # 4 devices
stratacl launch -n 2 --devices-per-process 2 examples/01_psum.py  # 2 x 2
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stratacl_jax as scl

# Joins the ranks. Idempotent, and not even needed: the first collective does it.
scl.initialize()

# One axis over all devices of all processes; a rank is a device.
mesh = Mesh(np.array(jax.devices()), ("i",))
n = mesh.size
ring = [(rank, (rank + 1) % n) for rank in range(n)]


@jax.jit
def collectives(x):
    def on_one_rank(x):  # x: this rank's piece, shape (3,)
        return (
            scl.psum(x, "i"),  # the sum over ranks, shape (3,), the same on all
            scl.all_gather(x, "i"),  # everyone's x, shape (n, 3)
            scl.ppermute(x, "i", ring),  # the x of the rank before, shape (3,)
        )

    return jax.shard_map(
        on_one_rank, mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i"), P("i"))
    )(x)


# Rank r starts with [10r, 10r + 1, 10r + 2]. Each process makes its own part.
pieces = np.array([[10 * rank, 10 * rank + 1, 10 * rank + 2] for rank in range(n)])
pieces = pieces.astype(np.float32)
x = jax.make_array_from_callback(
    (n * 3,),
    NamedSharding(mesh, P("i")),
    lambda index: pieces.reshape(-1)[index],
)

total, gathered, received = collectives(x)

for a, b, c in zip(
    total.addressable_shards,
    gathered.addressable_shards,
    received.addressable_shards,
    strict=True,
):
    rank = list(mesh.devices).index(c.device)
    np.testing.assert_array_equal(a.data, pieces.sum(axis=0))
    np.testing.assert_array_equal(b.data, pieces)
    np.testing.assert_array_equal(c.data, pieces[rank - 1])
    print(
        f"rank {rank} of {n}: psum {np.asarray(a.data)}, "
        f"all_gather {b.data.shape}, ppermute {np.asarray(c.data)}: right"
    )
