"""`stratacl demo`: a few steps of it, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys

import click.testing
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

from stratacl_jax.demo import cli, corpus, demo


def test_corpus_is_the_same_each_time() -> None:
    first, second = corpus.load(256 << 10), corpus.load(256 << 10)
    assert first.files > 1 and first.text.size == 256 << 10
    assert np.array_equal(first.text, second.text)


def test_batches_differ_by_step_and_repeat_by_seed() -> None:
    text = corpus.load(256 << 10)
    batch = corpus.batch(text, 3, 0, 4, 16)
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    assert np.array_equal(batch, corpus.batch(text, 3, 0, 4, 16))
    assert not np.array_equal(batch, corpus.batch(text, 4, 0, 4, 16))
    assert not np.array_equal(batch, corpus.batch(text, 3, 1, 4, 16))


def test_agreement() -> None:
    base = cli.Run(losses=[6.0, 3.0])
    assert cli.agreement(base, cli.Run(losses=[6.0, 3.0])) == 0
    assert cli.agreement(base, cli.Run(losses=[6.0, 2.0])) == pytest.approx(1 / 3)
    assert cli.agreement(base, cli.Run(losses=[6.0])) == 0  # cut short
    assert cli.agreement(base, cli.Run(losses=[math.nan, 3.0])) == math.inf


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "3"],
        ["--steps", "0"],
        ["--layout", "ring"],
        ["--layout", "2x2", "--ranks", "2"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    result = click.testing.CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("layout", ["processes", "devices"])
def test_few_steps(layout: str) -> None:
    command = [sys.executable, "-m", "stratacl_jax", "demo"]
    command += ["--steps", "4", "--layout", layout, "--max-seconds", "120"]
    result = subprocess.run(
        ["timeout", "-k", "5", "150", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal to rounding" in result.stdout
    assert "communication, ms" in result.stdout
