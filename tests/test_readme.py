"""What the README shows works, and its two commands are what it says."""

from __future__ import annotations

import re

import procs
import pytest

README = (procs.ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_commands():
    assert blocks("sh")[:2] == [
        "pip install . && stratacl demo\n",
        "pip install '.[test]' && pytest\n",
    ]


@pytest.mark.parametrize("processes, devices", [(2, 1), (1, 3), (2, 2)])
def test_usage_example(tmp_path, processes, devices):
    (program,) = blocks("python")
    result = procs.run_ranks(
        program, directory=tmp_path, processes=processes, devices=devices
    )
    assert result.code == 0, result
    ranks = processes * devices
    means = [sum(r * 8.0 + k for r in range(ranks)) / ranks for k in range(8)]
    found = re.findall(r"\[(\s*\d+\.[\d.\s]*)\]", result.out)
    assert len(found) == processes, result
    for line in found:
        assert [float(word) for word in line.split()] == means, result


def test_links():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (procs.ROOT / target).exists(), target
