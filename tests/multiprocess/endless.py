"""Sums for ever, and compares each; ends when a file appears.

Arguments: the file, and the seconds of rest after each sum.
"""

from __future__ import annotations

import os
import sys
import time

import jax
import jax.numpy as jnp
from ranks import check, mesh_of, psum, rows, say, scatter, spmd, total

import stratacl_jax as scl

scl.initialize()
MESH = mesh_of()
END, REST_S = sys.argv[1], float(sys.argv[2])
x = rows(MESH.size, 200_000, seed=os.getppid())  # of the launcher: another in each job
f = spmd(lambda v, k: psum(v + k), MESH)
v = scatter(x, MESH)


def step(k: int) -> None:
    shift = scatter(jnp.full((MESH.size, 1), k, jnp.float32), MESH)
    check(f(v, shift), total(x + k), f"step {k}")
    time.sleep(REST_S)


step(0)
say("summing")
steps = 1
# Rank 0 sees the file; that all ranks stop together is a sum, too.
while True:
    seen = jax.process_index() == 0 and os.path.exists(END)
    for _ in range(10):
        step(steps)
        steps += 1
    flag = jnp.full((MESH.size, 1), float(seen), jnp.float32)
    last = f(scatter(jnp.zeros((MESH.size, 1), jnp.float32), MESH), scatter(flag, MESH))
    if float(last.addressable_shards[0].data[0, 0]):
        break
say("sums", steps)
