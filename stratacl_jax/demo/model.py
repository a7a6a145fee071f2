"""A small transformer language model over bytes, in Flax nnx."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model: 3.3 million parameters, 13 MB of f32 gradients."""

    vocabulary: int = 256
    width: int = 256
    layers: int = 4
    heads: int = 8
    length: int = 64


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each after a norm, each added."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.project = nnx.Linear(width, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, width // self.heads)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.reshape(b, t, width))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Logits (batch, length, vocabulary) of the next byte at each position."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(shape.vocabulary, shape.width, rngs=rngs)
        self.positions = nnx.Embed(shape.length, shape.width, rngs=rngs)
        self.blocks = nnx.List(Block(shape, rngs) for _ in range(shape.layers))
        self.norm = nnx.LayerNorm(shape.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def mean_loss(model: Transformer, sequences: jax.Array) -> jax.Array:
    """Mean cross entropy, nats a byte, of sequences (batch, length + 1)."""
    logits = model(sequences[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:])
    return losses.mean()


def optimizer() -> optax.GradientTransformation:
    # The large epsilon keeps Adam from blowing differences of rounding up to
    # whole steps where a gradient is nearly zero: the two runs are compared.
    schedule = optax.linear_schedule(0.0, 2e-3, 10)
    return optax.adamw(schedule, eps=1e-6)
