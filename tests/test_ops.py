"""The operators against numpy, on real ranks: values, bits, groups, meshes."""

from __future__ import annotations

import sys

import pytest
from live import values_on_ranks as values
from live.ranks import on_layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

DTYPES = [
    "bool",
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3fnuz", "float8_e4m3", "float8_e3m4", "int4", "uint4"),
]

every_layout = on_layouts((2, 1), (3, 1), (1, 4), (2, 2), (4, 1))


@on_layouts((3, 1), (1, 4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(ranks, dtype):
    ranks(values.every_operator, dtype, check_vma=True)


@on_layouts((2, 1), (2, 2), (4, 1))
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "uint8"])
def test_every_layout_unchecked(ranks, dtype):
    ranks(values.every_operator, dtype, check_vma=False)


@on_layouts((2, 1), (1, 4), (2, 2))
@pytest.mark.parametrize(
    "dtype, count",
    [("float32", 262144 + 17), ("bfloat16", 3_000_000), ("uint8", 1048576 + 1)],
)
def test_large(ranks, dtype, count):
    ranks(values.large, dtype, count)


@on_layouts((3, 1), (1, 4))
@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
def test_each_algorithm_gives_the_same_bits(ranks, algorithm):
    ranks(values.large, "float32", 100_003, algorithm)
    ranks(values.large, "float16", 100_003, algorithm)


@on_layouts((3, 1), (1, 4))
@pytest.mark.parametrize("check_vma", [True, False])
def test_pmean(ranks, check_vma):
    ranks(values.means, check_vma)


@every_layout
def test_a_pytree_is_one_operation(ranks):
    ranks(values.many_leaves, check_vma=True)


@on_layouts((3, 1), (1, 4))
def test_special_values(ranks):
    ranks(values.special_values)


@on_layouts((2, 1), (1, 4))
def test_constants(ranks):
    ranks(values.constants)
