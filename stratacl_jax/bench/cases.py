"""What a benchmark cell computes: sizes, chain lengths, data, expected values.

Pure numpy. The values are small integers times a power of two, chosen so that
a chain of K collectives neither overflows, nor meets a denormal, nor rounds
where the number of ranks is a power of two: "wrong" then means any difference.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

OPS = ("psum", "all_gather", "psum_scatter", "ppermute")
# Elements that carry the dependency of a chain whose results have not the
# shape of its operands (all_gather, psum_scatter).
HEAD = 64
# A block of random integers of this (prime) length is repeated: cheap to make,
# and no piece of it can pass for a piece of other power-of-two position.
_PERIOD = 1_000_003
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes from `64`, `4K`, `64M`, `1G` (powers of 1024; `KiB` works too)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise ValueError(f"not a size: {text!r}; write 64, 4K, 64M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]


def sweep(begin: int, end: int, factor: int, also: Sequence[int] = ()) -> list[int]:
    """Sizes begin, begin*factor, ..., and end itself, in bytes, ascending.

    Args:
      also: further sizes, taken where they lie between begin and end.
    """
    if begin > end:
        raise ValueError(f"begin ({begin} B) is larger than end ({end} B)")
    if factor < 2:
        raise ValueError(f"factor {factor} would never reach the end")
    sizes = {end, *(size for size in also if begin <= size <= end)}
    while begin < end:
        sizes.add(begin)
        begin *= factor
    return sorted(sizes)


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell: `chain` dependent calls of `op` in one program.

    `count` is the number of elements of one rank's operand.
    """

    op: str
    dtype: str
    count: int
    ranks: int
    chain: int

    @property
    def bytes(self) -> int:
        """The size column, as in nccl-tests: a rank's operand, but a rank's
        result (all operands together) for all_gather."""
        size = self.count * np.dtype(self.dtype).itemsize
        return size * self.ranks if self.op == "all_gather" else size

    @property
    def result_bytes(self) -> int:
        """What a rank must write, and read at least as much for."""
        size = self.count * np.dtype(self.dtype).itemsize
        return {
            "all_gather": size * self.ranks,
            "psum_scatter": size // self.ranks,
        }.get(self.op, size)

    @property
    def head(self) -> int:
        """Elements that carry the dependency of a chain."""
        block = self.count // self.ranks if self.op == "psum_scatter" else self.count
        return min(HEAD, block)

    @property
    def bus_factor(self) -> float:
        """busbw / algbw, as in nccl-tests."""
        n = self.ranks
        return {
            "psum": 2 * (n - 1) / n,
            "all_gather": (n - 1) / n,
            "psum_scatter": (n - 1) / n,
            "ppermute": 1.0,
        }[self.op]

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def make(
    op: str, size: int, dtype: str, ranks: int, *, single: bool, cores: int
) -> Case:
    """The case of `size` bytes (see `Case.bytes`), rounded down to what the ranks
    can share, one element (of each block) at least.

    Args:
      single: one call in a program, not a chain.
      cores: cores of this host; with more ranks than cores chains are short.
    """
    if op not in OPS:
        raise ValueError(f"unknown operator {op!r}; known: {', '.join(OPS)}")
    share = size // ranks if op == "all_gather" else size
    count = max(1, share // np.dtype(dtype).itemsize)
    if op == "psum_scatter":  # a block for each rank
        count = max(1, count // ranks) * ranks
    if single:
        chain = 1
    else:
        chain = next(k for limit, k in _CHAINS if size <= limit)
        if ranks > cores:
            chain = min(chain, 8)
        if op == "psum":
            chain = min(chain, _numbers(dtype, ranks).longest)
    return Case(op, dtype, count, ranks, chain)


# Long enough that the launch of the program (some 10 us) does not count, short
# enough for the slowest peer: (up to this many bytes, calls).
_CHAINS = (
    (4 << 10, 100),
    (64 << 10, 50),
    (1 << 20, 20),
    (8 << 20, 8),
    (math.inf, 4),
)


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """Which integers a psum chain may start from, and for how long."""

    amplitude: int  # inputs are integers of at most this magnitude
    longest: int  # calls until the range of the type is used up
    low: int  # exponent of the smallest normal number (0 for integers)
    high: int  # values stay below 2**high
    relative: float  # tolerance of an inexact result, a call
    exact: bool


def _numbers(dtype: str, ranks: int) -> _Numbers:
    kind = np.dtype(dtype)
    growth = math.log2(ranks)
    if np.issubdtype(kind, np.integer):
        high = np.iinfo(kind).bits - int(np.issubdtype(kind, np.signedinteger))
        high = min(high, 62)  # expected values are computed in int64
        low, digits, epsilon = 0, high, 0.0
    else:
        info = ml_dtypes.finfo(kind)
        high = math.floor(math.log2(float(info.max)))
        low = math.ceil(math.log2(float(info.smallest_normal)))
        digits, epsilon = info.nmant + 1, float(info.eps)
    amplitude = min(8, max(1, 2**digits // ranks // 2))
    room = high - low - math.log2(amplitude) - growth
    longest = 1 + (int(room / growth) if growth else 10**6)
    # Sums of narrow types are formed in f32, where these are exact, and rounded
    # once, except that stock JAX adds f16 in f16.
    exact = (
        epsilon == 0.0
        or (kind.itemsize < 4 and kind != np.float16)
        or (ranks & (ranks - 1) == 0 and amplitude * ranks <= 2**digits)
    )
    return _Numbers(amplitude, max(1, longest), low, high, 2 * ranks * epsilon, exact)


def amplitude(case: Case) -> int:
    """Operands of a chain are integers of at most this magnitude, scaled."""
    return _numbers(case.dtype, case.ranks).amplitude


def _integers(case: Case, rank: int, seed: int) -> np.ndarray:
    """A rank's random integers, int8."""
    limit = amplitude(case)
    unsigned = np.issubdtype(np.dtype(case.dtype), np.unsignedinteger)
    rng = np.random.default_rng((seed, rank))
    block = rng.integers(
        0 if unsigned else -limit,
        limit + 1,
        size=min(case.count, _PERIOD),
        dtype=np.int8,
    )
    return np.resize(block, case.count)


def _scale_exponent(case: Case) -> int:
    """Inputs are integers times 2**this: low enough for the chain's growth."""
    if case.op != "psum" or np.issubdtype(np.dtype(case.dtype), np.integer):
        return 0
    numbers = _numbers(case.dtype, case.ranks)
    bits = math.ceil(math.log2(case.ranks) * case.chain + math.log2(numbers.amplitude))
    return max(numbers.low, min(0, numbers.high - bits))


def operand(case: Case, rank: int, seed: int) -> np.ndarray:
    """The operand of `rank` at the start of a chain: shape (count,)."""
    values = _integers(case, rank, seed)
    kind = np.dtype(case.dtype)
    exponent = _scale_exponent(case)
    if exponent == 0:
        return values.astype(kind)
    if kind == np.float64:
        return np.ldexp(values.astype(np.float64), exponent)
    return np.ldexp(values.astype(np.float32), exponent).astype(kind)


def expected(case: Case, rank: int, seed: int, calls: int) -> np.ndarray:
    """The result on `rank` of the last of `calls` dependent collectives.

    Shape (count,); (ranks * count,) for all_gather, whose chain puts the first
    `head` elements of the next rank's operand in front of its own; (count /
    ranks,) for psum_scatter, whose chain turns `head` elements x of a rank's
    operand, those in the next rank's block, into amplitude - x and back.
    """
    n, head = case.ranks, case.head
    if case.op == "ppermute":  # a ring: rank r receives from r - 1
        return operand(case, (rank - calls) % n, seed)
    if case.op == "all_gather":
        parts = [operand(case, r, seed) for r in range(n)]
        heads = [p[:head].copy() for p in parts]
        for r, part in enumerate(parts):
            part[:head] = heads[(r + calls - 1) % n]
        return np.concatenate(parts)
    kind = np.dtype(case.dtype)
    if case.op == "psum_scatter":
        block = case.count // n
        mine = slice(rank * block, (rank + 1) * block)
        total = np.zeros(block, np.int64)
        for r in range(n):
            part = _integers(case, r, seed)[mine].astype(np.int64)
            if (r + 1) % n == rank and calls % 2 == 0:
                part[:head] = amplitude(case) - part[:head]
            total += part
        if np.issubdtype(kind, np.integer):
            return total.astype(kind)
        wide = np.float64 if kind == np.float64 else np.float32
        return total.astype(wide).astype(kind)  # exact, then rounded once
    total = np.zeros(case.count, np.int64)
    for r in range(n):
        total += _integers(case, r, seed)
    if np.issubdtype(kind, np.integer):
        return (total * n ** (calls - 1)).astype(kind)
    if kind.itemsize < 4:  # each call rounds
        value = np.ldexp(total.astype(np.float32), _scale_exponent(case)).astype(kind)
        for _ in range(calls - 1):
            value = (value.astype(np.float32) * np.float32(n)).astype(kind)
        return value
    factor = math.ldexp(float(n) ** (calls - 1), _scale_exponent(case))
    return (total * factor).astype(kind)


def count_wrong(case: Case, got: np.ndarray, want: np.ndarray, calls: int) -> int:
    """Number of elements of `got` that are not what numpy says."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return max(got.size, want.size, 1)
    numbers = _numbers(case.dtype, case.ranks)
    if case.op != "psum" or numbers.exact:
        return int(np.count_nonzero(~(got == want)))
    a, b = got.astype(np.float64), want.astype(np.float64)
    near = np.abs(a - b) <= numbers.relative * calls * np.abs(b)
    return int(np.count_nonzero(~near))
