"""`stratacl demo`: a small transformer, trained on us and on stock JAX."""

from stratacl_jax.demo.cli import demo

__all__ = ["demo"]
