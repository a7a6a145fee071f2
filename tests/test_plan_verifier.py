"""Every plan the builder makes is proven, and the prover can say no."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from plan_verifier import PlanError, Problem, verify

S8, S32, U16, F16, F32, F64, BF16, C128 = 2, 4, 7, 10, 11, 12, 16, 18
F8 = 20  # moved, never reduced
BYTES = {S8: 1, S32: 4, U16: 2, F16: 2, F32: 4, F64: 8, BF16: 2, C128: 16, F8: 1}

SMALL_RANKS = [*range(1, 18)]
LARGE_RANKS = [32, 64]

# Counts of elements that are empty, single, odd, prime or one past a power of two.
ONE_LEAF = [[(n, F32)] for n in (0, 1, 3, 17, 251)] + [
    [(65537, S8)],
    [(16411, BF16)],
    [(4099, C128)],
]
MANY_LEAVES = [
    [(3, BF16), (0, F32), (65537, S8), (17, C128), (1, F64)],
    [(0, S8), (0, F64)],
    [(1, S8)] * 9 + [(1021, F32)],
    [(64, F16), (64, F16), (1, U16), (509, S32)],
]


@pytest.fixture(scope="session")
def build() -> Callable[[Problem], list[dict]]:
    """The plans of all ranks of a problem."""
    from stratacl_jax import _native

    def build_all(problem: Problem) -> list[dict]:
        return [
            _native.build_plan(**problem.arguments(me)) for me in range(problem.ranks)
        ]

    return build_all


def leaves_of(shapes: list[tuple[int, int]], multiple: int = 1) -> tuple:
    return tuple((count * multiple, t, BYTES[t]) for count, t in shapes)


def shapes_for(ranks: int) -> list[list[tuple[int, int]]]:
    """All of them for small groups; for large ones what still differs there."""
    if ranks <= 5 or ranks in (8, 17):
        return ONE_LEAF + MANY_LEAVES
    return [ONE_LEAF[2], ONE_LEAF[6], MANY_LEAVES[0]]


def chunks_for(ranks: int) -> tuple[int, ...]:
    if ranks <= 5:
        return (0, 1000, 16384)
    return (0, 20000) if ranks <= 17 else (0, 40000)


@pytest.mark.parametrize("ranks", SMALL_RANKS + LARGE_RANKS)
@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase", "auto"])
def test_psum(build, ranks: int, transport: str, algorithm: str) -> None:
    chunks = chunks_for(ranks) if transport == "staged" else (0,)
    for shapes, chunk in itertools.product(shapes_for(ranks), chunks):
        problem = Problem(
            "psum", ranks, leaves_of(shapes), "sum", (), transport, chunk, algorithm
        )
        plans = build(problem)
        verify(problem, plans)
        in_place = transport == "staged" or algorithm == "two_phase"
        if in_place and (ranks <= 8 or shapes in MANY_LEAVES):
            verify(problem, plans, in_place=True)


@pytest.mark.parametrize("ranks", SMALL_RANKS + LARGE_RANKS)
@pytest.mark.parametrize("op", ["psum_scatter", "all_gather"])
@pytest.mark.parametrize("transport", ["staged", "direct"])
def test_scatter_and_gather(build, ranks: int, op: str, transport: str) -> None:
    chunks = chunks_for(ranks) if transport == "staged" else (0,)
    for shapes, chunk in itertools.product(shapes_for(ranks), chunks):
        if op == "psum_scatter":
            leaves = leaves_of(shapes, multiple=ranks)
            chunk *= ranks
        else:
            leaves = leaves_of([*shapes, (5, F8)])
        problem = Problem(op, ranks, leaves, "max", (), transport, chunk)
        verify(problem, build(problem))


def some_permutations(ranks: int) -> list[tuple[tuple[int, int], ...]]:
    dice = random.Random(ranks)
    ring = tuple((r, (r + 1) % ranks) for r in range(ranks))
    itself = tuple((r, r) for r in range(ranks))
    asymmetric = []
    for _ in range(4):
        sources = dice.sample(range(ranks), dice.randint(0, ranks))
        targets = dice.sample(range(ranks), len(sources))
        asymmetric.append(tuple(zip(sources, targets, strict=True)))
    return [(), ring, itself, ((0, ranks - 1),), *asymmetric]


@pytest.mark.parametrize("ranks", SMALL_RANKS + LARGE_RANKS)
@pytest.mark.parametrize("transport", ["staged", "direct"])
def test_ppermute(build, ranks: int, transport: str) -> None:
    for permutation, chunk in itertools.product(some_permutations(ranks), (0, 9999)):
        for shapes in (ONE_LEAF[2], [*MANY_LEAVES[0], (5, F8)], MANY_LEAVES[1]):
            problem = Problem(
                "ppermute",
                ranks,
                leaves_of(shapes),
                "sum",
                permutation,
                transport,
                chunk,
            )
            plans = build(problem)
            verify(problem, plans)
            if transport == "staged":
                verify(problem, plans, in_place=True)


@pytest.mark.parametrize("ranks", SMALL_RANKS + LARGE_RANKS)
def test_barrier(build, ranks: int) -> None:
    problem = Problem("barrier", ranks)
    verify(problem, build(problem))


def test_ranks_touch_only_their_partners(build) -> None:
    problem = Problem("ppermute", 4, ((8, F32, 4),), permutation=((0, 1), (2, 2)))
    plans = build(problem)
    assert [plan["sources"] for plan in plans] == [[], [0], [], []]
    assert [plan["readers"] for plan in plans] == [[1], [], [], []]


# --- the prover can say no --------------------------------------------------------


def rejected(problem: Problem, plans: list[dict], **how) -> str:
    with pytest.raises(PlanError) as caught:
        verify(problem, plans, **how)
    return caught.value.kind


@pytest.fixture
def one_shot(build) -> tuple[Problem, list[dict]]:
    problem = Problem("psum", 3, ((1000, F32, 4),), algorithm="one_shot")
    plans = build(problem)
    verify(problem, plans)
    return problem, plans


def test_rejects_another_order(one_shot) -> None:
    problem, plans = one_shot
    srcs = plans[1]["stages"][1]["reduces"][0]["srcs"]
    srcs[0], srcs[1] = srcs[1], srcs[0]
    assert rejected(problem, plans) == "value"


def test_rejects_a_contribution_twice(one_shot) -> None:
    problem, plans = one_shot
    srcs = plans[1]["stages"][1]["reduces"][0]["srcs"]
    srcs.append(srcs[-1])
    assert rejected(problem, plans) == "value"


def test_rejects_a_missing_contribution(one_shot) -> None:
    problem, plans = one_shot
    del plans[1]["stages"][1]["reduces"][0]["srcs"][2]
    assert rejected(problem, plans) == "value"


def test_rejects_a_dropped_tail(one_shot) -> None:
    problem, plans = one_shot
    plans[1]["stages"][1]["reduces"][0]["count"] -= 1
    assert rejected(problem, plans) == "unwritten"


def test_rejects_another_reduction(one_shot) -> None:
    problem, plans = one_shot
    plans[1]["stages"][1]["reduces"][0]["op"] = "max"
    assert rejected(problem, plans) == "value"


def test_rejects_a_missing_need(one_shot) -> None:
    problem, plans = one_shot
    plans[1]["stages"][1]["needs"] = [0]
    assert rejected(problem, plans) == "structure"
    plans[1]["sources"] = [0]
    plans[2]["readers"] = [0]
    assert rejected(problem, plans) == "race"


def test_rejects_a_stage_too_early(one_shot) -> None:
    problem, plans = one_shot
    copy_stage, reduce_stage = plans[1]["stages"]
    copy_stage["reduces"], reduce_stage["reduces"] = reduce_stage["reduces"], []
    copy_stage["needs"] = [0, 2]
    assert rejected(problem, plans) == "race"


def test_rejects_overlapping_writes(one_shot) -> None:
    problem, plans = one_shot
    reduces = plans[1]["stages"][1]["reduces"]
    reduces.append(copy.deepcopy(reduces[0]))
    assert rejected(problem, plans) == "race"


def test_rejects_writing_twice(one_shot) -> None:
    problem, plans = one_shot
    plans[1]["stages"].append(copy.deepcopy(plans[1]["stages"][1]))
    assert rejected(problem, plans) == "twice"


def test_rejects_one_sided_readers(one_shot) -> None:
    problem, plans = one_shot
    plans[0]["readers"] = [1]
    assert rejected(problem, plans) == "structure"


def test_rejects_a_small_window(one_shot) -> None:
    problem, plans = one_shot
    plans[2]["window_bytes"] -= 1
    assert rejected(problem, plans) == "bounds"


def test_rejects_reading_a_peers_operand(one_shot) -> None:
    problem, plans = one_shot
    plans[0]["stages"][1]["reduces"][0]["srcs"][1] = ("input", 1, 0, 0)
    assert rejected(problem, plans) == "structure"


def test_rejects_writing_an_operand(one_shot) -> None:
    problem, plans = one_shot
    plans[0]["stages"][1]["reduces"][0]["dst"] = ("input", 0, 0, 0)
    assert rejected(problem, plans) == "structure"


def test_rejects_a_wait_for_a_stage_that_never_comes(build) -> None:
    problem = Problem("ppermute", 2, ((1000, F32, 4),), permutation=((0, 1),))
    plans = build(problem)
    verify(problem, plans)
    plans[0]["stages"] = []
    plans[1]["stages"].insert(1, {"slices": [], "reduces": [], "needs": [0]})
    assert rejected(problem, plans) == "deadlock"


def test_rejects_sums_of_sums(one_shot) -> None:
    """x0 + (x1 + x2), by way of the window, looks complete and in order."""
    problem, plans = one_shot
    window, count = ("window", 1, 0, 0), 1000
    reduce = plans[1]["stages"][1]["reduces"][0]
    first, second, third = reduce["srcs"]
    inner = {**reduce, "srcs": [("input", 1, 0, 0), third], "dst": window}
    outer = {**reduce, "srcs": [first, window], "count": count}
    for me in (0, 2):  # let nobody else read that window any more
        plans[me]["stages"][1]["reduces"] = []
    plans[1]["stages"][0]["slices"] = []
    plans[1]["stages"][1]["reduces"] = [inner]
    plans[1]["stages"].append({"slices": [], "reduces": [outer], "needs": []})
    assert rejected(problem, plans) == "value"


def test_rejects_missing_zeros(build) -> None:
    problem = Problem("ppermute", 3, ((1000, F32, 4),), permutation=((0, 1),))
    plans = build(problem)
    plans[2]["stages"][0]["slices"] = []
    assert rejected(problem, plans) == "unwritten"


def test_rejects_in_place_where_it_is_not_safe(build) -> None:
    problem = Problem(
        "psum", 3, ((1000, F32, 4),), transport="direct", algorithm="one_shot"
    )
    plans = build(problem)
    verify(problem, plans)
    assert rejected(problem, plans, in_place=True) == "race"


def test_rejects_a_barrier_that_forgets_a_rank(build) -> None:
    problem = Problem("barrier", 3)
    plans = build(problem)
    plans[0]["stages"][0]["needs"] = plans[0]["sources"] = [1]
    plans[2]["readers"] = [1]
    assert rejected(problem, plans) == "value"


def mutations(plans: list[dict]) -> Iterator[list[dict]]:
    """The plans with one need or one field changed, in every place in turn."""

    def mutant(me: int, k: int) -> tuple[list[dict], dict]:
        changed = copy.deepcopy(plans)
        return changed, changed[me]["stages"][k]

    places = [(me, k) for me, p in enumerate(plans) for k in range(len(p["stages"]))]
    for me, k in places:
        original = plans[me]["stages"][k]
        for peer in original["needs"]:
            changed, stage = mutant(me, k)
            stage["needs"].remove(peer)
            yield changed
        if k > 0 and (original["slices"] or original["reduces"]):
            # One step of the pipeline too early, needs and all.
            changed, stage = mutant(me, k)
            before = changed[me]["stages"][k - 1]
            for kind in ("slices", "reduces"):
                before[kind] += stage[kind]
                stage[kind] = []
            yield changed
        for kind in ("slices", "reduces"):
            for i, piece in enumerate(original[kind]):
                changed, stage = mutant(me, k)
                del stage[kind][i]
                yield changed
                for field, by in field_changes(piece):
                    changed, stage = mutant(me, k)
                    if field in ("src", "dst"):
                        *place, offset = piece[field]
                        stage[kind][i][field] = (*place, offset + by)
                    else:
                        stage[kind][i][field] += by
                    yield changed
                for j in range(len(piece.get("srcs", ())) - 1):
                    changed, stage = mutant(me, k)
                    srcs = stage[kind][i]["srcs"]
                    srcs[j], srcs[j + 1] = srcs[j + 1], srcs[j]
                    yield changed


def field_changes(piece: dict) -> Iterator[tuple[str, int]]:
    if "srcs" in piece:
        yield from (("count", -1), ("count", 1), ("dst", -4), ("dst", 4))
        return
    yield from (("src", -4), ("src", 4), ("dst", -4), ("dst", 4), ("bytes", -1))
    # To publish one byte more may be useless, but it is not wrong.
    if piece["dst"][0] != "window":
        yield ("bytes", 1)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(
            "psum",
            3,
            ((700, F32, 4), (301, BF16, 2)),
            chunk_bytes=1024,
            algorithm="two_phase",
        ),
        Problem("psum", 3, ((700, F32, 4),), chunk_bytes=1024, algorithm="one_shot"),
        Problem("psum", 3, ((700, F32, 4),), transport="direct", algorithm="two_phase"),
        Problem("psum_scatter", 3, ((600, F32, 4),), chunk_bytes=1024),
        Problem("all_gather", 3, ((600, F32, 4),), chunk_bytes=1024),
        Problem(
            "ppermute",
            3,
            ((600, F32, 4),),
            permutation=((0, 1), (1, 0)),
            chunk_bytes=1024,
        ),
    ],
    ids=lambda p: f"{p.op}-{p.algorithm}-{p.transport}",
)
def test_rejects_every_small_change(build, problem: Problem) -> None:
    plans = build(problem)
    verify(problem, plans)
    for mutant in mutations(plans):
        # Keep the summaries true, so that the change itself must be found.
        for plan in mutant:
            plan["sources"] = sorted({p for s in plan["stages"] for p in s["needs"]})
        for me, plan in enumerate(mutant):
            plan["readers"] = [
                r for r, other in enumerate(mutant) if me in other["sources"]
            ]
        rejected(problem, mutant)
