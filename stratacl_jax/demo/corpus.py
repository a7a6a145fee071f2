"""Real text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig

import numpy as np

_SKIP = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes of text (uint8, shape (length,)) and the number of its files."""

    text: np.ndarray
    files: int


def load(limit: int = 4 << 20) -> Corpus:
    """Concatenates the library's .py files in sorted order, up to `limit` bytes.

    Raises:
      FileNotFoundError: this Python has no sources of its standard library.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if _SKIP.intersection(path.relative_to(root).parts):
            continue
        try:
            parts.append(path.read_bytes())
        except OSError:
            continue
        size += len(parts[-1])
        if size >= limit:
            break
    if size < 64 << 10:
        raise FileNotFoundError(f"no sources of Python's standard library in {root}")
    text = np.frombuffer(b"".join(parts), np.uint8)[:limit]
    return Corpus(text, len(parts))


def batch(
    corpus: Corpus, step: int, seed: int, sequences: int, length: int
) -> np.ndarray:
    """The sequences of one step, the same on every rank.

    Returns:
      int32, shape (sequences, length + 1): inputs and, shifted by one, targets.
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, corpus.text.size - length - 1, size=sequences)
    rows = [corpus.text[s : s + length + 1] for s in starts]
    return np.stack(rows).astype(np.int32)
