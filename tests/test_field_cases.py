"""What public users of such systems ran into, with inputs of our own."""

from __future__ import annotations

import sys

import pytest
from live import fields_on_ranks as fields
from live import groups_on_ranks as groups
from live.ranks import on_layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

# Pairs that lie in different processes of (2, 4), and in one.
ACROSS = [[0, 4], [1, 5], [2, 6], [3, 7]]
WITHIN = [[0, 2], [1, 3], [4, 6], [5, 7]]

KIB = 1024 // 8  # elements of float64


@on_layouts((2, 4))
@pytest.mark.parametrize("operator", ["psum", "psum_scatter"])
@pytest.mark.parametrize("pairs", [ACROSS, WITHIN], ids=["across", "within"])
@pytest.mark.parametrize(
    "count, turns",
    [(64 * KIB, 50), (1024 * KIB, 20), (4096 * KIB - 13, 6), (12288 * KIB, 3)],
    ids=["64K", "1M", "4M", "12M"],
)
def test_an_operand_is_overwritten_behind_the_call(
    ranks, operator, pairs, count, turns
):
    ranks(fields.reuse_while_peers_read, operator, pairs, count, turns, deadline=120)


@on_layouts((2, 4))
@pytest.mark.parametrize(
    "index_groups",
    [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[7], [3, 1], [0, 2, 4, 5, 6]],
        [[0, 1, 2], [3, 4, 5, 6, 7]],
        [[r] for r in range(8)],
    ],
    ids=["8", "1_2_5", "3_5", "all_1"],
)
def test_identities_of_the_sum(ranks, index_groups):
    ranks(fields.extremes, index_groups)


@on_layouts((2, 4))
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_the_listed_order_in_groups(ranks, check_vma):
    listed = [[3, 0], [1, 2], [6, 4], [5, 7]]
    ranks(groups.groups, (), (), ("i",), listed, check_vma)


@on_layouts((1, 4), (2, 2), (4, 1))
def test_twelve_independent_collectives(ranks):
    for outcomes in ranks(fields.twelve_independent, turns=10):
        assert outcomes == [""] * 10


# What the processes with odd numbers are compiled with.
DIVERGENT = [
    (layout, flags)
    for layout in [(2, 2), (4, 1)]
    for flags in [
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        "--xla_disable_hlo_passes=fusion,cse --xla_backend_optimization_level=0",
    ]
]
different_compilers = pytest.mark.parametrize(
    "ranks",
    [(*layout, flags) for layout, flags in DIVERGENT],
    ids=[f"{p}x{d}-{flags.split('=')[0][6:]}" for (p, d), flags in DIVERGENT],
    indirect=True,
)


def _right_or_mismatch(found):
    """Right values throughout, or Mismatch on every process, with its cause."""
    outcomes = [outcome for of_process in found for outcome in of_process]
    kinds = {outcome.split(":")[0] for outcome in outcomes}
    assert kinds in ({""}, {"Mismatch"}), outcomes
    for of_process in found:
        assert kinds == {""} or "XLA_FLAGS" in of_process[0], of_process


@different_compilers
def test_twelve_independent_collectives_of_different_compilers(ranks):
    _right_or_mismatch(ranks(fields.twelve_independent, turns=3))


@different_compilers
def test_copies_of_a_call_and_different_compilers(ranks):
    _right_or_mismatch(ranks(fields.clones))


@on_layouts((3, 1))
def test_a_rank_comes_late(ranks):
    ranks(fields.one_comes_late, seconds=3.5)


@on_layouts((2, 2), (4, 1))
def test_a_predicate_that_differs_between_ranks(ranks):
    for first, second in ranks(fields.swapped_branches, deadline=60):
        assert first.startswith("Mismatch:"), first
        assert "psum" in first and "all_gather" in first, first
        assert second == "" or "shutdown" in second, second


@on_layouts((2, 1), (1, 4), (2, 2))
@pytest.mark.parametrize("count", [5, 1001, 100_003])
def test_a_chain_in_place(ranks, count):
    ranks(fields.chain, count)


@on_layouts((2, 1), (1, 4))
@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("count", [3, 50_001])
def test_an_operand_in_numpy_memory(ranks, offset, count):
    ranks(fields.numpy_source, offset, count)


# One device a process: with several, jaxlib itself dies of this.
@on_layouts((2, 1), (3, 1))
def test_one_array_donated_twice(ranks):
    ranks(fields.donated_twice)
