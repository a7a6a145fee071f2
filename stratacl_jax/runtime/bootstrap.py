"""How the processes of a job meet: who, where in memory, and is it shared.

Everything goes through JAX's own coordination service and one abstract unix
socket a process; no port, no file. That two processes share memory is not
concluded from host names: each reads the other's random number *through the
mapping* and compares it with what the service says.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from . import errors
from .config import config
from .errors import (
    DeadlineExceeded,
    InvalidUsage,
    ResourceExhausted,
    StrataError,
    Unsupported,
)

_SO_PEERPIDFD = 77
_HELLO = struct.Struct("!i32s")


class _Board:
    """The coordination service's key-value store, one namespace an attempt."""

    def __init__(self, client: Any, attempt: int, me: int, n: int, timeout: float):
        self._client = client
        self._prefix = f"stratacl/{attempt}/"
        self._me = me
        self._n = n
        self._end = time.monotonic() + timeout
        self._timeout = timeout

    def _left_ms(self) -> int:
        return max(1, int((self._end - time.monotonic()) * 1000))

    def exchange(self, topic: str, mine: Any) -> list[Any]:
        """Publishes a value; returns everybody's, in process order."""
        key = self._prefix + topic + "/"
        self._client.key_value_set(key + str(self._me), json.dumps(mine))
        values = []
        for p in range(self._n):
            try:
                text = self._client.blocking_key_value_get(
                    key + str(p), self._left_ms()
                )
            except Exception as error:
                raise DeadlineExceeded(
                    f"process {p} did not come to stratacl_jax.initialize() within "
                    f"{self._timeout:g} s (STRATACL_TIMEOUT): {error}"
                ) from error
            values.append(json.loads(text))
        return values

    def seconds_left(self) -> float:
        return self._left_ms() / 1000


def agree_on_base(candidates: Sequence[int], free: Sequence[Sequence[bool]]) -> int:
    """The first candidate that is free in all processes.

    Raises:
      ResourceExhausted: there is none.
    """
    for i, base in enumerate(candidates):
        if all(mine[i] for mine in free):
            return base
    raise ResourceExhausted(
        "no range of addresses that is large enough is free in every process; raise "
        "RLIMIT_AS (ulimit -v), lower STRATACL_ARENA_SPAN, or drop arrays from before "
        "earlier shutdown() calls, each of which keeps a range"
    )


def _peer_pidfd(connection: socket.socket, said_pid: int) -> tuple[int, int]:
    """(pidfd, pid) of the process at the other end, checked."""
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    if uid != os.getuid():
        raise InvalidUsage(
            f"a process of user {uid} answered where one of user {os.getuid()} was "
            "expected; all ranks must run as one user"
        )
    if pid == said_pid:
        return os.pidfd_open(pid), pid
    # Another pid namespace: the kernel can still hand out the peer itself.
    with contextlib.suppress(OSError):
        fd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        return fd, said_pid
    raise Unsupported(
        "the ranks run in different pid namespaces and this kernel (< 6.5) has no "
        "SO_PEERPIDFD, so a rank's death could not be noticed; share the pid "
        "namespace (docker run --pid)"
    )


def _swap_descriptors(
    me: int,
    people: list[dict[str, Any]],
    listener: socket.socket,
    memfd: int,
    board: _Board,
) -> dict[int, tuple[int, int, int]]:
    """Exchanges memfds with everybody: {process: (memfd, pidfd, pid)}."""
    n = len(people)
    found: dict[int, tuple[int, int, int]] = {}
    failures: list[BaseException] = []
    hello = _HELLO.pack(me, people[me]["token"].encode())

    def meet(connection: socket.socket, expected: int | None) -> None:
        connection.settimeout(board.seconds_left())
        socket.send_fds(connection, [hello], [memfd])
        data, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        if len(data) != _HELLO.size or len(fds) != 1:
            raise InvalidUsage("a stranger answered on the fabric's socket")
        p, token = _HELLO.unpack(data)
        known = 0 <= p < n and token.decode("ascii", "replace") == people[p]["token"]
        if not known or (expected is not None and p != expected):
            os.close(fds[0])
            raise InvalidUsage("a stranger answered on the fabric's socket")
        pidfd, pid = _peer_pidfd(connection, people[p]["pid"])
        found[p] = (fds[0], pidfd, pid)

    def serve() -> None:
        try:
            while sum(p > me for p in found) < n - 1 - me:
                listener.settimeout(board.seconds_left())
                connection, _ = listener.accept()
                # A stranger on the socket is no reason to fail the job.
                with connection, contextlib.suppress(InvalidUsage):
                    meet(connection, None)
        except BaseException as error:
            failures.append(error)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    for p in range(me):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.settimeout(board.seconds_left())
                connection.connect("\0" + people[p]["socket"])
            except OSError as error:
                raise Unsupported(
                    f"process {p} ({people[p]['host']}) is not reachable through this "
                    f"host's memory ({error}); this version serves the ranks of one "
                    "host (one network namespace) only"
                ) from error
            meet(connection, p)
    server.join(board.seconds_left())
    if failures:
        raise failures[0]
    if server.is_alive() or len(found) != n - 1:
        missing = sorted(set(range(n)) - set(found) - {me})
        raise Unsupported(
            f"processes {missing} did not connect on this host; this version serves "
            "the ranks of one host only"
        )
    return found


def _fail_together(board: _Board, process: int, problem: StrataError | None) -> None:
    """Raises, if any process has a problem, in all of them."""
    said = None if problem is None else (type(problem).__name__, str(problem))
    answers = board.exchange("prepared", said)
    if problem is not None:
        raise problem
    for p, answer in enumerate(answers):
        if answer is not None:
            name, text = answer
            raise getattr(errors, name)(f"process {p}: {text}")


def connect(
    native: Any,
    client: Any,
    attempt: int,
    process: int,
    processes: int,
    span: int,
    eager_bytes: int,
    settings: dict[str, Any],
    fingerprint: str,
    timeout: float,
) -> dict[str, Any]:
    """Builds the fabric between all processes; `native.start` comes after it.

    What one process fails of, all fail of, with the same class of error.

    Args:
      attempt: how often this process has come here before; like all arguments but
        `process`, the same everywhere.

    Returns:
      base: address of the first arena; divergent: whether fingerprints differ.
    """
    candidates = list(native.candidate_bases())
    free = [native.range_is_free(base, span * processes) for base in candidates]
    if processes == 1:
        base = agree_on_base(candidates, [free])
        native.prepare(0, 1, base, span, eager_bytes, settings)
        return {"base": base, "divergent": False}

    board = _Board(client, attempt, process, processes, timeout)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = "stratacl-" + secrets.token_hex(16)
        listener.bind("\0" + name)
        listener.listen(processes)
        people = board.exchange(
            "hello",
            {
                "socket": name,
                "token": secrets.token_hex(16),
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "free": free,
                "span": span,
                "eager": eager_bytes,
                "chunk": settings["chunk_bytes"],
                "algorithm": config.algorithm,
                "registration": config.registration,
                "fingerprint": fingerprint,
            },
        )
        for key, variable in (
            ("span", "STRATACL_ARENA_SPAN"),
            ("eager", "STRATACL_EAGER_BYTES"),
            # Plans follow from these, and all ranks must have the same plans.
            ("chunk", "STRATACL_CHUNK_BYTES"),
            ("algorithm", "STRATACL_ALGORITHM"),
            ("registration", "STRATACL_REGISTRATION"),
        ):
            values = {person[key] for person in people}
            if len(values) > 1:
                raise InvalidUsage(
                    f"{variable} differs between ranks: {sorted(values)}; set one "
                    "value for all"
                )
        base = agree_on_base(candidates, [person["free"] for person in people])
        problem = None
        try:
            memfd = native.prepare(
                process, processes, base, span, eager_bytes, settings
            )
        except StrataError as error:
            problem = error
        _fail_together(board, process, problem)
        nonce = secrets.randbits(62) | 1
        native.set_nonce(nonce)
        peers = _swap_descriptors(process, people, listener, memfd, board)
        for p, (fd, pidfd, pid) in sorted(peers.items()):
            try:
                native.attach(p, fd)
            finally:
                os.close(fd)
            native.watch(p, pidfd, pid)
        native.watch(process, -1, os.getpid())
        nonces = board.exchange("nonce", nonce)
        for p, expected in enumerate(nonces):
            if native.read_nonce(p) != expected:
                raise Unsupported(
                    f"the memory of process {p} is not shared with this one although "
                    "its descriptor arrived"
                )
        board.exchange("ready", True)
    return {
        "base": base,
        "divergent": len({person["fingerprint"] for person in people}) > 1,
    }
