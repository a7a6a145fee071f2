"""Wrong use ends in an exception that says what to do, and hangs nobody."""

from __future__ import annotations

import sys

import pytest
from live import bad_on_ranks as bad
from live.ranks import on_layouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")


@on_layouts((3, 1), (1, 4))
def test_calls_that_mean_nothing(ranks):
    ranks(bad.refused)
    ranks(bad.groups_under_vma)
    ranks(bad.outside_of_shard_map)


@on_layouts((4, 1), (2, 2))
def test_a_mesh_that_is_manual_in_part(ranks):
    ranks(bad.partly_manual)


@on_layouts((2, 1), (1, 4))
def test_initialize_and_shutdown(ranks):
    ranks(bad.initialized_twice)
    ranks(bad.after_shutdown)


@on_layouts((2, 1), (3, 1))
def test_some_leave_early(ranks):
    first, *others = ranks(bad.some_have_left)
    assert first == "" and all("shutdown()" in said for said in others), others
    ranks(bad.done_first)


@on_layouts((2, 1), (3, 1))
def test_settings_that_differ(ranks):
    for said in ranks(bad.settings_that_differ):
        assert said.startswith("InvalidUsage") and "STRATACL_EAGER_BYTES" in said, said


@on_layouts((4, 1))
def test_groups_that_differ(ranks):
    found = [said for (said,) in ranks(bad.groups_that_differ)]
    # 1 and 3 mean the same group; 0 waits for 1, and 2 for 3, who do not come.
    assert found[1] == found[3] == "", found
    for said in found[::2]:
        # They may find that the others are done and have left.
        late = said.startswith("InvalidUsage") and "shutdown()" in said
        assert late or said.split(":")[0] in ("DeadlineExceeded", "Mismatch"), said


@on_layouts((2, 1), (1, 4))
def test_two_threads_on_one_communicator(ranks):
    for first, second in ranks(bad.two_threads):
        for said in (first, second):
            kind = said.split(":")[0]
            assert kind in ("", "InvalidUsage"), said
            assert kind == "" or "thread" in said or "broken" in said, said


# One device a process: with several, XLA launches on threads that a fork does not
# copy, and nothing of ours is reached.
@on_layouts((2, 1), (3, 1))
def test_a_forked_child(ranks):
    for *attempts, total in ranks(bad.forked, 20):
        assert total == "45" and len(attempts) == 3, attempts
        for said in attempts:
            assert "fork()" in said and "InvalidUsage" in said, said
