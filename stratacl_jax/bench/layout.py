"""How the ranks of a run are laid out: processes x devices of each process."""

from __future__ import annotations

import dataclasses
import re

MAX_RANKS = 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """`processes` processes that own `devices` JAX CPU devices each."""

    processes: int
    devices: int

    @property
    def ranks(self) -> int:
        """Number of ranks: one for each device."""
        return self.processes * self.devices

    def __str__(self) -> str:
        return f"{self.processes}x{self.devices}"


def parse(text: str, ranks: int | None) -> Layout:
    """Returns the layout that `text` names.

    Args:
      text: `processes` (one device in each process), `devices` (one process
        that owns all devices) or `PxD`, such as `2x2`.
      ranks: number of ranks; may be None only for `PxD`, which implies it.

    Raises:
      ValueError: unknown text, a count below one, or `PxD` whose product is
        not `ranks`.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match:
        layout = Layout(int(match[1]), int(match[2]))
        if ranks is not None and layout.ranks != ranks:
            raise ValueError(
                f"layout {text} has {layout.ranks} ranks, but --ranks is {ranks}; "
                "leave --ranks out or make them agree"
            )
    elif text in ("processes", "devices"):
        if ranks is None:
            raise ValueError(f"layout {text!r} needs a number of ranks")
        layout = Layout(ranks, 1) if text == "processes" else Layout(1, ranks)
    else:
        raise ValueError(
            f"unknown layout {text!r}; use processes, devices or PxD such as 2x2"
        )
    if not 1 <= layout.ranks <= MAX_RANKS:
        raise ValueError(
            f"{layout.ranks} ranks; between 1 and {MAX_RANKS} are possible"
        )
    return layout
