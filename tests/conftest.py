"""Fixtures of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import procs
import pytest

# `python -m pytest` puts the checkout first. Where it holds no native module, the
# installed package is the one to test.
if not procs.SOURCE_IS_BUILT:
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != str(procs.ROOT)]

from live.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Live ranks in the layout that `live.on_layouts` asks for.

    Tests of one layout are run together by pytest, whatever their files; one set
    is alive at a time.
    """
    live = Ranks(*request.param)
    yield live
    live.close()
