"""`stratacl bench`: measures the collectives against stock JAX."""

from stratacl_jax.bench.cli import bench

__all__ = ["bench"]
