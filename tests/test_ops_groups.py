"""The operators over groups, meshes, permutations and dimensions, on real ranks."""

from __future__ import annotations

import sys

import pytest
from live import groups_on_ranks as groups
from live.ranks import on_layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

vma = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])

# (mesh, order of its devices, names, axis_index_groups)
OF_FOUR = {
    "pairs": ((), (), "i", [[0, 1], [2, 3]]),
    "strided": ((), (), "i", [[0, 2], [1, 3]]),
    "unsorted_pairs": ((), (), "i", [[3, 0], [1, 2]]),
    "unsorted_all": ((), (), "i", [[2, 0, 3, 1]]),
    "single": ((), (), "i", [[1], [3], [0], [2]]),
    "uneven": ((), (), "i", [[3], [2, 0, 1]]),
    "other_devices": ((), (2, 0, 3, 1), "i", None),
    "other_devices_groups": ((), (3, 1, 0, 2), "i", [[3, 1], [0, 2]]),
    "rows": ((2, 2), (), "i", None),
    "columns": ((2, 2), (), "j", None),
    "both": ((2, 2), (), "ij", None),
    "both_turned": ((2, 2), (), "ji", None),
    "both_groups": ((2, 2), (), "ij", [[3, 0], [1, 2]]),
    "turned_groups": ((2, 2), (1, 3, 0, 2), "ji", [[1, 0], [2, 3]]),
    "axis_of_one": ((4, 1), (), "j", None),
    "tuple_with_axis_of_one": ((1, 4), (), "ji", None),
}
OF_THREE = {
    "unsorted": ((), (), "i", [[2, 0, 1]]),
    "pair_and_single": ((), (), "i", [[2, 0], [1]]),
    "turned": ((3, 1), (2, 1, 0), "ij", None),
}
# Those whose groups lie across processes in every way.
ACROSS = ("unsorted_pairs", "unsorted_all", "uneven", "turned_groups", "both_turned")


def _table(cases):
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=name) for name, case in cases.items()]
    )


def _check(ranks, case, check_vma):
    shape, order, names, index_groups = case
    ranks(groups.groups, shape, order, tuple(names), index_groups, check_vma)


@on_layouts((2, 2), (1, 4))
@_table(OF_FOUR)
def test_groups(ranks, case):
    _check(ranks, case, check_vma=False)


@on_layouts((1, 4))
@_table(OF_FOUR)
def test_groups_checked(ranks, case):
    _check(ranks, case, check_vma=True)


@on_layouts((4, 1))
@_table({name: OF_FOUR[name] for name in ACROSS})
def test_groups_across_processes(ranks, case):
    _check(ranks, case, check_vma=False)


@on_layouts((3, 1))
@_table(OF_THREE)
def test_groups_of_three(ranks, case):
    _check(ranks, case, check_vma=case[3] is None)


@on_layouts((3, 1), (1, 4), (2, 2))
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0, 1)],
        [(1, 0)],
        [(0, 0)],
        [(0, 1), (1, 0)],
        [(0, 2), (1, 1), (2, 0)],
        [(0, 1), (1, 2)],
        [(2, 0), (0, 0 + 2), (1, 1)],
        [(-1, 0), (0, -1)],
    ],
    ids=lambda pairs: "_".join(f"{s}to{d}" for s, d in pairs) or "nobody",
)
def test_permutations(ranks, pairs):
    ranks(groups.permutations, pairs, check_vma=len(pairs) % 2 == 0)


@on_layouts((2, 1), (3, 1), (1, 4))
@vma
def test_dimensions(ranks, check_vma):
    ranks(groups.axes, check_vma)


@on_layouts((3, 1), (2, 2))
def test_array_dimensions_among_the_names(ranks):
    ranks(groups.array_dimensions_among_the_names)
