"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
