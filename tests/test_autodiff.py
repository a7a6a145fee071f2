"""Transformations of the operators on real ranks: derivatives, vmap, control flow."""

from __future__ import annotations

import sys

import pytest
from live import linear_on_ranks as linear
from live.ranks import on_layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

vma = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
operators = pytest.mark.parametrize("name", linear.TABLE)


@on_layouts((3, 1), (1, 4))
@operators
@vma
def test_derivatives(ranks, name, check_vma):
    ranks(linear.derivatives, name, check_vma)


@on_layouts((2, 1), (1, 4))
@vma
def test_eager(ranks, check_vma):
    ranks(linear.eager, check_vma)


@on_layouts((3, 1), (1, 4))
@operators
def test_vmap_is_the_loop(ranks, name):
    ranks(linear.batched, name, check_vma=ranks.processes == 1)


@on_layouts((2, 1), (1, 4))
@operators
def test_vmap_with_a_name(ranks, name):
    ranks(linear.named, name, check_vma=ranks.processes == 1)
