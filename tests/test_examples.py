"""Every example runs, in every layout."""

from __future__ import annotations

import pathlib

import procs
import pytest

EXAMPLES = procs.ROOT / "examples"
LAYOUTS = [(2, 1), (4, 1), (8, 1), (1, 4), (2, 2)]


def launch(example: str, processes: int, devices: int) -> list[str]:
    """Runs an example under `stratacl launch`; returns what the ranks printed."""
    command = procs.launch_command(
        EXAMPLES / example, processes=processes, devices=devices
    )
    result = procs.run(command, deadline=120)
    assert result.code == 0, result
    return result.out.splitlines()


@pytest.mark.parametrize("processes, devices", LAYOUTS)
def test_psum(processes: int, devices: int) -> None:
    lines = launch("01_psum.py", processes, devices)
    ranks = processes * devices
    right = [line for line in lines if line.endswith(": right")]
    assert len(right) == ranks
    for rank in range(ranks):
        assert any(f"rank {rank} of {ranks}:" in line for line in right)


@pytest.mark.parametrize("processes, devices", [(2, 1), (1, 2), (2, 2)])
def test_data_parallel(processes: int, devices: int) -> None:
    lines = launch("02_data_parallel.py", processes, devices)
    losses = [float(line.split()[-1]) for line in lines if "loss" in line]
    assert losses[-1] < losses[0] / 5


def test_every_example_is_tested() -> None:
    text = pathlib.Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text
