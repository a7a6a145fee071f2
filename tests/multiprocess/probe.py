"""Where collectives' operands lie, told by a custom call of the tests' own.

The library is built from probe.cc by the test that starts the ranks; its path is in
the environment.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

ENV = "TEST_PROBE_LIBRARY"


class Note(NamedTuple):
    address: int
    bytes: int
    tag: int


class Probe:
    """The library, loaded; `look` may then be called while programs are traced."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[ENV])
        self._library.ProbeTake.restype = ctypes.c_int64
        self._library.ProbeNapOn.argtypes = [ctypes.c_int, ctypes.c_double]
        jax.ffi.register_ffi_target(
            "probe_look", jax.ffi.pycapsule(self._library.ProbeLook), platform="cpu"
        )

    def look(self, x: Any, tag: int = 0) -> Any:
        """`x` itself, in the buffer it is in; notes where that is at each run."""
        call = jax.ffi.ffi_call(
            "probe_look",
            jax.typeof(x),
            input_output_aliases={0: 0},
            has_side_effect=True,
        )
        return call(x, tag=np.int64(tag))

    def take(self) -> Sequence[Note]:
        """What has been noted since the last time."""
        notes: list[Note] = []
        room = np.zeros((4096, 3), np.uint64)
        pointer = room.ctypes.data_as(ctypes.c_void_p)
        while True:
            n = self._library.ProbeTake(pointer, ctypes.c_int64(len(room)))
            notes += [Note(*map(int, row)) for row in room[:n]]
            if n < len(room):
                return notes

    def nap_on(self, number: int, seconds: float) -> None:
        """Makes a thread that gets the signal sleep, and no other."""
        assert self._library.ProbeNapOn(number, seconds) == 0
