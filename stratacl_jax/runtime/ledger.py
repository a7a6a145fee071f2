"""What moved, and how: the counters of this process since `initialize()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Ledger(Mapping[str, Any]):
    """A snapshot of the counters; a read-only mapping, empty before `initialize()`.

    Collectives: operations, completed_in_place, deferred (handed to a worker
    thread), aborts, sleeps and wakes (system calls), pending, pool_threads.

    Operand bytes: eager_bytes (inside posts), direct_bytes (read by peers where XLA
    put them), staged_bytes (copied first) with staged_reasons: "mode" (the setting
    asks for it), "operand_outside" (memory that XLA did not allocate, as NumPy's, or
    from before `initialize()`), "result_outside" (as that, for results that peers
    would store to).

    Registration: registered_bytes and registered_by, a mapping of path to bytes and
    seconds: "own_pages" (brought in ahead of use), "peers_ahead" (mapped ahead of
    use), "first_use" (mapped when it was needed); extents and remaps (announced and
    withdrawn ranges), trims. ready_share: of the peers' operands, which were mapped
    before they were read; None if there were none. first_use_gap_min_s and
    first_use_gap_histogram_s: from an extent's being ready to the first collective
    operand in it, as {upper bound in seconds: count}.

    Memory: arena_used_bytes, arena_high_water_bytes, quarantined_bytes (held back
    after an abort), fallback_bytes (from libc, because the arena was full),
    page_faults (of the process, minor, since it started).
    """

    def __init__(self, raw: Mapping[str, Any]):
        self._values = dict(raw)
        if not raw:
            return
        values = self._values
        outside = values.pop("outside_bytes")
        late = values.pop("outside_result_bytes")
        values["staged_reasons"] = {
            "mode": values["staged_bytes"] - outside - late,
            "operand_outside": outside,
            "result_outside": late,
        }
        paths = {
            "own_pages": ("warm_bytes", "warm_ns"),
            "peers_ahead": ("populated_bytes", "populate_ns"),
            "first_use": ("jit_bytes", "jit_ns"),
        }
        values["registered_by"] = {
            path: {"bytes": values.pop(size), "seconds": values.pop(ns) * 1e-9}
            for path, (size, ns) in paths.items()
        }
        values["registered_bytes"] = sum(
            path["bytes"] for path in values["registered_by"].values()
        )
        ready, unready = values.pop("found_ready"), values.pop("found_unready")
        values["operands_ready"], values["operands_unready"] = ready, unready
        total = ready + unready
        values["ready_share"] = ready / total if total else None
        gap = values.pop("gap_min_ns")
        count = values.pop("gaps")
        values["first_use_gap_min_s"] = gap * 1e-9 if count else None
        values["first_use_gap_histogram_s"] = {
            2**i * 1e-6: n for i, n in enumerate(values.pop("gap_log2_us")) if n
        }

    def as_dict(self) -> dict[str, Any]:
        """A dictionary of its own, as JSON can hold it."""
        return dict(self._values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Ledger({self._values})"
