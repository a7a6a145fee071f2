"""Results do not depend on where and how an operation is finished."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from live import denormals_on_ranks as denormals
from live.ranks import on_layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")


@on_layouts((2, 1), (1, 4), (2, 2))
def test_denormals_in_place_and_by_a_worker(ranks):
    in_place = ranks(denormals.continuation, 1_000_000)
    by_worker = ranks(denormals.continuation, 0)
    assert sum(deferred for _, deferred in in_place) == 0
    assert all(deferred > 0 for _, deferred in by_worker)
    for (one, _), (other, _) in zip(in_place, by_worker, strict=True):
        jax.tree.map(_same_bits, one, other)


def _same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.tobytes() == b.tobytes(), (a, b)
