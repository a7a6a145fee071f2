"""The programs of `matching`, on ranks that compile with different XLA_FLAGS.

Each must be right on all ranks or refused on all; never may two calls be taken
for each other. Arguments: the flags of odd ranks, a directory.
"""

from __future__ import annotations

import os
import sys

ME = int(os.environ["STRATACL_PROCESS_ID"])
if ME % 2 == 1:
    os.environ["XLA_FLAGS"] = sys.argv[1]

# Afterwards: JAX reads the flags when it is imported.
import matching  # noqa: E402
from ranks import Board, attempt, check, psum, rows, say, scatter, spmd  # noqa: E402

import stratacl_jax as scl  # noqa: E402

BOARD = Board(sys.argv[2])
N = matching.N
# Their ranks make calls by the dozen before they look at one.
PIPELINED = (matching.pipelined_launches,)


def outcome(case) -> str:
    return attempt(case)[1].partition(":")[0] or "right"


for number, case in enumerate(matching.CASES):
    if case in PIPELINED:
        continue
    mine = outcome(case)
    BOARD.post(f"{number}.{ME}", mine)
    all_of_them = {BOARD.read(f"{number}.{r}") for r in range(N)}
    say(case.__name__, mine)
    assert len(all_of_them) == 1 and mine in ("right", "Mismatch"), all_of_them
    if mine == "Mismatch":
        # Ranks may have made a different number of calls when they noticed.
        BOARD.meet(f"{number}.leave", N, ME)
        scl.shutdown()
        scl.initialize()


def refused_by_one() -> None:
    """Rank 1 finds copies of a call, rank 0 has merged them; both then go on."""
    import jax

    @jax.jit
    def inner(v):
        return psum(v)

    x = rows(N)
    merged = spmd(lambda v: inner(v) + inner(v), matching.MESH)
    single = spmd(lambda v: psum(v) - v, matching.MESH)
    BOARD.post(f"refused.{ME}", outcome(lambda: merged(scatter(x, matching.MESH))))
    results = {BOARD.read(f"refused.{r}") for r in range(N)}
    assert results in ({"Mismatch"}, {"right"}), results
    for k in range(3):
        z = rows(N, seed=k)
        y = single(scatter(z, matching.MESH))
        check(y, matching.total(z) - z, "the next call")
    say("refused_by_one", *results)


refused_by_one()
say("ok")
