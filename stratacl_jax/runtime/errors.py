"""The error taxonomy, the same in C++ and in Python.

An error raised inside a compiled program reaches Python as XLA's own
exception; its message begins with one of these class names, and
`from_message` turns it into the class itself.
"""

from __future__ import annotations

import re


class StrataError(RuntimeError):
    """Base of everything this package raises on purpose."""


class InvalidUsage(StrataError):
    """The call cannot be right: the message says what to write instead."""


class Mismatch(StrataError):
    """Ranks called different collectives where one was expected."""


class PeerLost(StrataError):
    """A rank of the group died; the message names it."""


class DeadlineExceeded(StrataError):
    """A wait outlived STRATACL_TIMEOUT; the message names who is missing."""


class ResourceExhausted(StrataError):
    """Memory, address space or posting slots ran out."""


class Unsupported(StrataError):
    """Correct, but not available in this version or on this machine."""


_CLASSES = {
    cls.__name__: cls
    for cls in (
        InvalidUsage,
        Mismatch,
        PeerLost,
        DeadlineExceeded,
        ResourceExhausted,
        Unsupported,
    )
}
_TAG = re.compile(r"stratacl: (" + "|".join(_CLASSES) + r"): ")


def from_message(message: str) -> StrataError | None:
    """The taxonomy's exception for an XLA error text, or None if not ours."""
    found = _TAG.search(message)
    if found is None:
        return None
    return _CLASSES[found.group(1)](message[found.start() :])
