"""Settings: every `STRATACL_*` variable, declared once.

A value comes from the program (`stratacl_jax.config.update`), else from the
environment, else it is the default. The environment is read when a value is
wanted, not at import, until `initialize()` fixes what must not change under a
running fabric.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

from .errors import InvalidUsage

T = TypeVar("T")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SUFFIXES = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class _Kind(Generic[T]):
    """A form of values: how it is read, and what it is called in messages."""

    form: str
    parse: Callable[[Any], T]  # raises ValueError


def _number(kind: type, low: float, high: float, form: str) -> _Kind:
    def parse(value: Any) -> Any:
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        try:
            number = kind(value)
        except TypeError as error:
            raise ValueError from error
        if not low <= number <= high:  # false for NaN, too
            raise ValueError
        return number

    return _Kind(form, parse)


def _seconds() -> _Kind[float]:
    # A bound that keeps nanoseconds in 64 bits and a typo from meaning "never".
    return _number(float, 0.001, 1e9, "a number of seconds from 0.001 to 1e9")


def _size(low: int, high: int = 1 << 46, note: str = "") -> _Kind[int]:
    def parse(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            size = value
        else:
            match = _SIZE.fullmatch(str(value).strip())
            if match is None:
                raise ValueError
            size = int(match[1]) * _SUFFIXES[match[2].upper()]
        if not low <= size <= high:
            raise ValueError
        return size

    form = f"a size such as 65536, 64K, 2M or 64G, from {format_size(low)}{note}"
    return _Kind(form, parse)


def _choice(*names: str) -> _Kind[str]:
    def parse(value: Any) -> str:
        name = str(value).strip().lower()
        if name not in names:
            raise ValueError
        return name

    return _Kind("one of " + ", ".join(names), parse)


def _names() -> _Kind[str]:
    def parse(value: Any) -> str:
        names = [name.strip().lower() for name in str(value).split(",")]
        if not all(re.fullmatch(r"[a-z_]*", name) for name in names):
            raise ValueError
        return ",".join(name for name in names if name)

    return _Kind("names separated by commas, or nothing for all", parse)


def format_size(size: int) -> str:
    """64 GiB as "64G", 1000 as "1000": what `_size` reads, as short as it goes."""
    for suffix in reversed(_SUFFIXES):
        unit = _SUFFIXES[suffix]
        if size >= unit and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


class Setting(Generic[T]):
    """One setting, declared as an attribute of `Config`.

    Args:
      kind: what values look like.
      default: the value that holds if nobody says otherwise.
      unit: the unit of values, "" if they have none.
      doc: what it does, a sentence or two.
      fixed: whether it cannot change once `initialize()` has run.
    """

    name: str
    env: str

    def __init__(
        self, kind: _Kind[T], default: T, unit: str, doc: str, *, fixed: bool = True
    ):
        self.kind = kind
        self.default = default
        self.unit = unit
        self.doc = doc
        self.fixed = fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.env = "STRATACL_" + name.upper()

    @overload
    def __get__(self, config: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, config: Config, owner: type) -> T: ...
    def __get__(self, config: Config | None, owner: type) -> Any:
        return self if config is None else config._look_up(self)[0]

    def __set__(self, config: Config, value: Any) -> None:
        raise AttributeError(f"use config.update({self.name!r}, value)")

    def parse(self, value: Any, said: str) -> T:
        """Reads a value; `said` names its source in the message of an error."""
        try:
            return self.kind.parse(value)
        except ValueError:
            raise InvalidUsage(
                f"{said} is {value!r}; it must be {self.kind.form}"
            ) from None


class Config:
    """The settings in force. Attributes are values: `config.timeout` is a float.

    Write with `update` before `initialize()`, or set the environment variable
    `STRATACL_<NAME>`. Sizes take the suffixes K, M, G and T (powers of 1024).
    """

    timeout = Setting(
        _seconds(),
        300.0,
        "s",
        "The deadline of every wait: for peers to start, to post, to finish. Past "
        "it a collective raises DeadlineExceeded on every rank.",
    )
    warn_after = Setting(
        _seconds(),
        20.0,
        "s",
        "A wait that lasts longer is reported once, with the ranks it waits for.",
    )
    eager_bytes = Setting(
        _size(0, MIB, " to 1M"),
        8192,
        "bytes",
        "Operands up to this size travel inside the post and need no arena.",
    )
    chunk_bytes = Setting(
        _size(4096, GIB, " to 1G"),
        256 * KIB,
        "bytes",
        "Pieces in which a staged operand is copied, so that peers read the first "
        "while the next is still on its way.",
    )
    spin_us = Setting(
        _number(int, -1, 10**6, "a whole number from 0 to 1000000, or -1 for auto"),
        -1,
        "us",
        "How long a wait spins before it gives its core up; -1 spins only while "
        "there are as many cores as ranks.",
    )
    inplace_us = Setting(
        _number(int, 0, 10**6, "a whole number from 0 to 1000000"),
        300,
        "us",
        "How long a collective may wait on XLA's own thread before it hands the "
        "rest over to a worker.",
    )
    arena_span = Setting(
        _size(16 * GIB, note=" to 64T"),
        64 * GIB,
        "bytes",
        "Address space reserved for each process's arena in every process. No "
        "memory is used for it.",
    )
    arena_limit = Setting(
        _size(0, note=" to 64T (0: no limit)"),
        0,
        "bytes",
        "Arena memory that a process's arrays may take; 0 leaves it to the machine. "
        "More arrays lie outside and are copied to reach other ranks.",
    )
    registration = Setting(
        _choice("staged", "on_allocation", "just_in_time"),
        "on_allocation",
        "",
        "How operands reach peers: XLA's memory lies in the arena and is mapped by "
        "peers ahead of its use (on_allocation) or at first use (just_in_time), or "
        "operands are copied there (staged).",
    )
    algorithm = Setting(
        _choice("auto", "one_shot", "two_phase"),
        "auto",
        "",
        "How reductions run: each rank reads all (one_shot), or each reduces its "
        "part and stores it to all (two_phase). Results have the same bits.",
    )
    debug = Setting(
        _choice("warn", "info", "trace"),
        "warn",
        "",
        "What is logged.",
        fixed=False,
    )
    debug_subsys = Setting(
        _names(),
        "",
        "",
        "Subsystems that log; empty means all.",
        fixed=False,
    )

    def __init__(self, environ: Mapping[str, str] | None = None):
        self._environ = os.environ if environ is None else environ
        self._program: dict[str, Any] = {}
        # Values and origins as `initialize()` found them, while it is in force.
        self._frozen: dict[str, tuple[Any, str]] | None = None

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Every setting by name, in the order of their declaration."""
        return {k: v for k, v in vars(cls).items() if isinstance(v, Setting)}

    def update(self, name: str, value: Any) -> None:
        """Sets a setting from the program; `value=None` takes that back.

        Args:
          name: "timeout", or the variable's name, "STRATACL_TIMEOUT".
          value: a value, or its text as in the environment.

        Raises:
          InvalidUsage: no such setting, a value it cannot have, or a setting that
            `initialize()` has fixed.
        """
        settings = self.settings()
        key = name.lower().removeprefix("stratacl_")
        if key not in settings:
            raise InvalidUsage(f"no setting {name!r}{_similar(key, settings)}")
        setting = settings[key]
        if value is not None:
            value = setting.parse(value, f"config.update({name!r}): the value")
        if self._frozen is not None and setting.fixed:
            raise InvalidUsage(
                f"{setting.name} was fixed by initialize(): call "
                "config.update() before it, or shutdown() first"
            )
        if value is None:
            self._program.pop(key, None)
        else:
            self._program[key] = value

    def describe(self) -> list[dict[str, Any]]:
        """Every setting as a dictionary that JSON can hold.

        Returns:
          For each: name, env, value, default, unit, doc, and origin: "default",
          "environment" or "program".
        """
        rows = []
        for name, setting in self.settings().items():
            value, origin = self._look_up(setting)
            rows.append(
                {
                    "name": name,
                    "env": setting.env,
                    "value": value,
                    "default": setting.default,
                    "unit": setting.unit,
                    "origin": origin,
                    "doc": setting.doc,
                }
            )
        return rows

    def unknown_variables(self) -> list[str]:
        """`STRATACL_*` variables that are nobody's: a message for each."""
        settings = self.settings()
        known = {setting.env for setting in settings.values()} | _LAUNCHERS
        return [
            f"{name} is set and means nothing"
            + _similar(name.removeprefix("STRATACL_").lower(), settings)
            for name in sorted(self._environ)
            if name.startswith("STRATACL_") and name not in known
        ]

    def freeze(self) -> None:
        """Reads everything and fixes what is to be fixed; for `initialize()`.

        Raises:
          InvalidUsage: a variable in the environment has a value it cannot have.
        """
        found = {s: self._look_up(s) for s in self.settings().values()}
        self._frozen = {s.name: value for s, value in found.items() if s.fixed}

    def thaw(self) -> None:
        """Lets settings change again; for `shutdown()`."""
        self._frozen = None

    def _look_up(self, setting: Setting) -> tuple[Any, str]:
        """The value in force and where it comes from."""
        if self._frozen is not None and setting.fixed:
            return self._frozen[setting.name]
        if setting.name in self._program:
            return self._program[setting.name], "program"
        text = self._environ.get(setting.env, "")
        if text.strip():  # set but empty is not set
            return setting.parse(text, setting.env), "environment"
        return setting.default, "default"


# What `stratacl launch` tells its ranks.
_LAUNCHERS = {
    "STRATACL_LAUNCHED",
    "STRATACL_NUM_PROCESSES",
    "STRATACL_PROCESS_ID",
    "STRATACL_LAUNCHER_PID",
    "STRATACL_CONTROL_FD",
}


def _similar(name: str, settings: Mapping[str, Setting]) -> str:
    close = difflib.get_close_matches(name, settings, n=1)
    return f"; did you mean {close[0]} ({settings[close[0]].env})?" if close else ""


config = Config()
