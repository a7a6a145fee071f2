"""Symbolic contents of memory: which operand bytes a byte is made of."""

from __future__ import annotations

from bisect import bisect_right

# A byte at position x of some memory is the reduction, in this order, of byte
# x + delta of leaf `leaf` of rank `rank`, for each (rank, leaf, delta).  The empty
# tuple is a zero byte.
Value = tuple[tuple[int, int, int], ...]
ZERO: Value = ()
Segment = tuple[int, int, Value]  # [begin, end) holds the value


def shift(value: Value, by: int) -> Value:
    return (
        tuple((rank, leaf, delta + by) for rank, leaf, delta in value) if by else value
    )


class Contents:
    """The symbolic contents of one memory: disjoint segments, none if unwritten."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[Segment] = []

    def read(self, begin: int, end: int) -> list[Segment] | None:
        """The segments of [begin, end), or None if a byte of it was never written."""
        found: list[Segment] = []
        at = begin
        for lo, hi, value in self._segments[bisect_right(self._starts, begin) - 1 :]:
            if lo > at or at >= end:
                break
            if hi > at:
                found.append((at, min(hi, end), value))
                at = min(hi, end)
        return merged(found) if at >= end else None

    def write(self, begin: int, end: int, value: Value) -> None:
        first = max(bisect_right(self._starts, begin) - 1, 0)
        last = bisect_right(self._starts, end)
        fresh: list[Segment] = []
        for lo, hi, old in self._segments[first:last]:
            if lo < begin:
                fresh.append((lo, min(hi, begin), old))
            if hi > end:
                fresh.append((max(lo, end), hi, old))
        fresh = merged(sorted([*fresh, (begin, end, value)]))
        self._segments[first:last] = fresh
        self._starts[first:last] = [segment[0] for segment in fresh]


def merged(segments: list[Segment]) -> list[Segment]:
    """Ascending segments, empty ones dropped, equal neighbours joined."""
    joined: list[Segment] = []
    for lo, hi, value in segments:
        if lo >= hi:
            continue
        if joined and joined[-1][1] == lo and joined[-1][2] == value:
            joined[-1] = (joined[-1][0], hi, value)
        else:
            joined.append((lo, hi, value))
    return joined
