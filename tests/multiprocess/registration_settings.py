"""Joining the fabric when something about it is not as it should be.

Two processes or more. Prints nothing but the cases; what is said on stderr is looked
at by the test.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from ranks import attempt, check, error_of, mesh_of, psum, rows, run_all, spmd, total
from registration_memory import in_arena, moved, place

import stratacl_jax as scl
from stratacl_jax import _native

LARGE = 2_000_003
BYTES = 4 * LARGE
ME = jax.process_index()
MESH = mesh_of()
N = MESH.size
HERE = len(jax.local_devices())
REASON = "a jaxlib from a test"
arm = _native.arm


def settings_that_differ() -> None:
    """Every rank is told, and may try again."""
    for name, value, shown in [
        ("registration", "staged", ["on_allocation", "staged"]),
        ("registration", "just_in_time", ["just_in_time", "on_allocation"]),
        ("chunk_bytes", 65536, [65536, 262144]),
        ("algorithm", "one_shot", ["auto", "one_shot"]),
        ("arena_span", 32 << 30, [32 << 30, 64 << 30]),
        ("eager_bytes", 4096, [4096, 8192]),
    ]:
        if ME == N // HERE - 1:
            scl.config.update(name, value)
        error = error_of(scl.initialize)
        assert error.startswith("InvalidUsage: STRATACL_" + name.upper()), error
        assert f"differs between ranks: {shown}" in error, error
        assert not scl.is_initialized()
        scl.config.update(name, None)


def exact(programs: int = 1) -> dict[str, int]:
    """Runs some collectives; what the ledger counted meanwhile."""
    x = rows(N, LARGE, seed=3)
    f = spmd(lambda v: (psum(v), scl.ppermute(v, "i", [(0, N - 1), (N - 1, 0)])), MESH)
    swapped = np.zeros_like(x)
    swapped[0], swapped[N - 1] = x[N - 1], x[0]
    with moved() as count:
        for _ in range(3):
            array = place(x, MESH)
            got = jax.block_until_ready(f(array))
            check(got[0], total(x))
            check(got[1], swapped)
            del array, got
    return count


def ppermuted() -> int:
    """Bytes of the operands of `exact`'s ppermutes here."""
    ranks = [MESH.devices.tolist().index(d) for d in jax.local_devices()]
    return 3 * BYTES * sum(r in (0, N - 1) for r in ranks)


def an_unknown_jaxlib() -> None:
    """All is right, and copied; counted as what it is."""
    _native.arm = lambda threshold, limit: REASON
    scl.initialize()
    count = exact()
    assert not in_arena(place(rows(N, LARGE), MESH))
    assert count["direct_bytes"] == 0, count
    assert count["operand_outside"] == 3 * BYTES * HERE + ppermuted(), count
    assert count["result_outside"] == 3 * BYTES * HERE, count  # of the psums
    assert count["mode"] == 0, count
    scl.shutdown()
    # Not said again.
    scl.initialize()
    scl.shutdown()
    _native.arm = arm


def an_unknown_jaxlib_on_one_process() -> None:
    if ME == 0:
        _native.arm = lambda threshold, limit: REASON
    scl.initialize()
    count = exact()
    if ME == 0:
        assert count["direct_bytes"] == 0 and count["staged_bytes"] > 0, count
    else:
        assert count["direct_bytes"] > 0 and count["staged_bytes"] == 0, count
    scl.shutdown()
    _native.arm = arm


def failing_to_arm_is_not_final() -> None:
    scl.initialize()
    count = exact()
    assert count["staged_bytes"] == 0, count
    assert count["direct_bytes"] == 3 * BYTES * HERE + ppermuted(), count
    scl.shutdown()


def a_full_arena() -> None:
    """What does not fit comes from libc, and is copied; it fits again later."""
    scl.config.update("arena_limit", 24 << 20)
    scl.initialize()
    x = rows(N, LARGE)
    assert in_arena(place(x, MESH))
    with moved() as count:
        full = [place(x + k, MESH) for k in range(6)]
    assert not in_arena(full[-1])
    assert count["fallback_bytes"] > 0, count
    assert scl.ledger()["arena_used_bytes"] <= 24 << 20
    count = exact()
    assert count["operand_outside"] > 0 and count["result_outside"] > 0, count
    # Small windows too, beside the limit.
    f = spmd(psum, MESH)
    small = rows(N, 5000)
    check(f(place(small, MESH)), total(small))
    for k, array in enumerate(full):
        check(array, x + k)
    del array
    full.clear()
    assert in_arena(place(x, MESH))
    scl.shutdown()
    scl.config.update("arena_limit", None)


def a_limit_of_nothing() -> None:
    scl.config.update("arena_limit", 1)
    scl.initialize()
    count = exact()
    assert count["direct_bytes"] == 0, count
    assert count["fallback_bytes"] > 0, count
    assert scl.ledger()["arena_high_water_bytes"] > 0  # the windows
    scl.shutdown()
    scl.config.update("arena_limit", None)


def one_process_cannot_make_its_arena() -> None:
    """The others are told at once, whatever it was."""
    prepare = _native.prepare

    def fail(*_: Any) -> int:
        raise scl.ResourceExhausted("no memory for this test")

    for loser in (0, N // HERE - 1):
        if loser == ME:
            _native.prepare = fail
        _, error = attempt(scl.initialize)
        said = "" if loser == ME else f"process {loser}: "
        assert error == f"ResourceExhausted: {said}no memory for this test", error
        _native.prepare = prepare
    scl.initialize()
    exact()
    scl.shutdown()


run_all(
    [
        settings_that_differ,
        one_process_cannot_make_its_arena,
        an_unknown_jaxlib,
        an_unknown_jaxlib_on_one_process,
        failing_to_arm_is_not_final,
        a_full_arena,
        a_limit_of_nothing,
    ]
)
