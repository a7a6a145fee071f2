"""Groups, meshes, permutations, axes: who talks to whom, in which order.

The oracle works on positions in the mesh, from the definitions alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import stratacl_jax as scl
from live import sheet

# Inside a slot, behind the table, in the arena in one piece and in several.
SIZES = (5, 300, 5000, 200_003)


def groups_of(
    shape: Sequence[int], names: Sequence[str], index_groups: Any = None
) -> dict[int, list[int]]:
    """For each rank its group's ranks, as flat positions in the mesh, in order.

    Indices along several axes count with the last name fastest, whatever the order
    of the mesh's axes.
    """
    axes = ["ij".index(name) for name in names]
    others = [a for a in range(len(shape)) if a not in axes]
    grid = np.arange(math.prod(shape)).reshape(shape)
    rows = grid.transpose([*others, *axes]).reshape(
        -1, math.prod(shape[a] for a in axes)
    )
    found = {}
    for row in rows.tolist():
        for chosen in index_groups or [range(len(row))]:
            group = [row[i] for i in chosen]
            found.update(dict.fromkeys(group, group))
    return found


def groups(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    names: tuple[str, ...],
    index_groups: Any,
    check_vma: bool,
) -> None:
    """All operators over one choice of ranks."""
    on = sheet.mesh(shape, order)
    whom = groups_of(on.devices.shape, names, index_groups)
    equal = len({len(group) for group in whom.values()}) == 1
    summed = index_groups is None or not check_vma
    k = len(whom[0])
    axis: Any = names if len(names) > 1 else names[0]
    more: dict[str, Any] = {"axis_index_groups": index_groups}

    def program(x: Any, parts: Any) -> Any:
        out: dict[str, Any] = {}
        if summed:
            out["psum"] = [scl.psum(v, axis, **more) for v in x]
        if summed and equal:
            out["pmean"] = [scl.pmean(v, axis, **more) for v in x]
        if equal:
            out["all_gather"] = [scl.all_gather(v, axis, **more) for v in x]
            out["psum_scatter"] = [scl.psum_scatter(v, axis, **more) for v in parts]
        if index_groups is None:
            shift = [(r, (r + 1) % k) for r in range(k)]
            out["ppermute"] = [scl.ppermute(v, axis, shift) for v in x]
            out["barrier"] = scl.barrier(axis, x)
        return out

    # float32 with a wide range: another order of additions has other bits.
    x = [
        [sheet.random(np.float32, (size,), (10, r, size)) for size in SIZES[:3]]
        for r in range(on.size)
    ]
    parts = [
        [sheet.random(np.float32, (k, s), (11, r, s)) for s in (3, 2100)]
        for r in range(on.size)
    ]
    got = sheet.run(program, x, parts, on=on, check_vma=check_vma)
    for rank, out in got.items():
        group = whom[rank]
        me = group.index(rank)
        sums = [sheet.total(v) for v in zip(*(x[r] for r in group), strict=True)]
        of_parts = [
            sheet.total(v) for v in zip(*(parts[r] for r in group), strict=True)
        ]
        right = {
            "psum": sums,
            "pmean": [sheet.mean(v, k) for v in sums],
            "all_gather": [
                np.stack(v) for v in zip(*(x[r] for r in group), strict=True)
            ],
            "psum_scatter": [v[me % len(v)] for v in of_parts],
            "ppermute": x[group[me - 1]],
            "barrier": x[rank],
        }
        for operator, value in out.items():
            sheet.same_trees(value, right[operator], f"{operator} on rank {rank}")


def permutations(pairs: Sequence[tuple[int, int]], check_vma: bool) -> None:
    """ppermute along any pairs, of every size and several arrays at once."""
    n = sheet.mesh().size
    source = {d % n: s % n for s, d in pairs}
    tree = [
        {"a": sheet.random(np.int16, (5,), (12, r)), "b": np.float64(r + 0.5)}
        for r in range(n)
    ]
    x = [
        [sheet.random(np.float32, (size,), (13, r, size)) for size in (0, *SIZES)]
        for r in range(n)
    ]

    def program(x: Any, tree: Any) -> Any:
        return [scl.ppermute(v, "i", pairs) for v in x], scl.ppermute(tree, "i", pairs)

    zeros = ([np.zeros_like(v) for v in x[0]], {"a": np.zeros(5, np.int16), "b": 0.0})
    for rank, got in sheet.run(program, x, tree, check_vma=check_vma).items():
        s = source.get(rank)
        right = zeros if s is None else (x[s], tree[s])
        sheet.same_trees(got, right, f"rank {rank} of {list(pairs)}")


def axes(check_vma: bool) -> None:
    """Every dimension of all_gather and psum_scatter, stacked and tiled."""
    n = sheet.mesh().size
    x = [sheet.random(np.float32, (2, 3, 4), (14, r)) for r in range(n)]
    wide = [sheet.random(np.float32, (n, 2 * n, 3 * n), (15, r)) for r in range(n)]
    narrow = [sheet.random(np.float32, (n, n, n), (16, r)) for r in range(n)]
    stacked, tiled = range(-4, 4), range(-3, 3)

    def program(x: Any, wide: Any, narrow: Any) -> Any:
        return {
            "stacked": [scl.all_gather(x, "i", axis=d) for d in stacked],
            "tiled": [scl.all_gather(x, "i", axis=d, tiled=True) for d in tiled],
            "scattered": [
                scl.psum_scatter(narrow, "i", scatter_dimension=d) for d in tiled
            ],
            "dealt": [
                scl.psum_scatter(wide, "i", scatter_dimension=d, tiled=True)
                for d in tiled
            ],
        }

    whole, cube = sheet.total(wide), sheet.total(narrow)
    for rank, got in sheet.run(program, x, wide, narrow, check_vma=check_vma).items():
        right = {
            "stacked": [np.stack(x, d) for d in stacked],
            "tiled": [np.concatenate(x, d) for d in tiled],
            "scattered": [np.take(cube, rank, d) for d in tiled],
            "dealt": [np.split(whole, n, d)[rank] for d in tiled],
        }
        sheet.same_trees(got, right, f"rank {rank}")


def array_dimensions_among_the_names() -> None:
    """Integers among psum's axes are dimensions of the array."""
    n = sheet.mesh().size
    x = [sheet.random(np.int32, (3, 4), (17, r)) for r in range(n)]

    def program(x: Any) -> Any:
        return scl.psum(x, ("i", 0)), scl.psum(x, (1, "i")), scl.psum(x, (0, 1))

    for rank, got in sheet.run(program, x).items():
        whole = sheet.total(x)
        right = (
            whole.sum(0, dtype=np.int32),
            whole.sum(1, dtype=np.int32),
            np.asarray(x[rank].sum(dtype=np.int32)),
        )
        sheet.same_trees(got, right, f"rank {rank}")


def refuses(call: Callable[[Any], Any], kind: str, text: str, check_vma: bool) -> None:
    """A call inside shard_map ends in this exception on every rank, at once."""
    on = sheet.mesh()
    x = sheet.spread([np.arange(6.0)] * on.size, on)
    try:
        sheet.on_ranks(call, on, check_vma=check_vma)(x)
    except Exception as error:
        found = [base.__name__ for base in type(error).__mro__]
        assert kind in found, f"{type(error).__name__}: {error}"
        assert text in str(error), error
    else:
        raise AssertionError("it was accepted")
