"""`stratacl demo`: a few steps of it, and what it refuses."""

from __future__ import annotations

import math
import signal
import sys

import click.testing
import numpy as np
import procs
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

from stratacl_jax.demo import cli, corpus, demo

COMMAND = (sys.executable, "-P", "-m", "stratacl_jax", "demo")


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
    options = ("--steps", "4", "--layout", layout, "--max-seconds", "120")
    result = procs.run([*COMMAND, *options], deadline=150)
    assert result.code == 0, result
    assert "equal to rounding" in result.out
    for line in ("loss, step 4", "step, ms", "communication, ms"):
        assert line in result.out
    assert result.out.count("after step 4 of 4") == 2
    assert "13.0 MB of f32 gradients" in result.out


def test_nothing_is_left_after_an_interrupt() -> None:
    with procs.start([*COMMAND, "--steps", "25"], deadline=100) as child:
        child.wait_for("after step 5 of")  # it trains
        child.signal(signal.SIGINT)
        result = child.wait(within=20)
    assert result.code != 0
    assert "Traceback" not in result.err, result
