"""Wrong use, on the ranks: each ends in an exception that says what to do.

Every function leaves the ranks fit for the next one.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import stratacl_jax as scl
from live import sheet
from live.values_on_ranks import scl_settings

X = np.arange(6.0)


def outcome(run: Callable[[], Any]) -> str:
    """The class of the exception that `run` ends in, and its text; "" if none."""
    try:
        with scl.translate_errors():
            jax.block_until_ready(run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- found while tracing: name -> (call, what the exception must say) -----------


def _keys() -> Any:
    return jax.random.split(jax.random.key(0), 6)


def _n() -> int:
    return sheet.mesh().size


REFUSED: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {}


def _refused(name: str, call: Callable[[Any], Any], *texts: str) -> None:
    REFUSED[name] = call, texts


for _name, _call in {
    "psum": lambda v, a: scl.psum(v, a),
    "pmean": lambda v, a: scl.pmean(v, a),
    "all_gather": lambda v, a: scl.all_gather(v, a),
    "psum_scatter": lambda v, a: scl.psum_scatter(v, a),
    "ppermute": lambda v, a: scl.ppermute(v, a, [(0, 1)]),
    "barrier": lambda v, a: scl.barrier(a, v),
}.items():
    _refused(
        f"{_name}, no such axis",
        lambda v, call=_call: call(v, "k"),
        *("NameError", "k", "shard_map"),
    )
    _refused(
        f"{_name}, one of two axes unknown",
        lambda v, call=_call: call(v, ("i", "k")),
        *("NameError", "k", "shard_map"),
    )
for _name, _call in {
    "psum": lambda v, g: scl.psum(v, "i", axis_index_groups=g),
    "pmean": lambda v, g: scl.pmean(v, "i", axis_index_groups=g),
    "all_gather": lambda v, g: scl.all_gather(v, "i", axis_index_groups=g),
    "psum_scatter": lambda v, g: scl.psum_scatter(v, "i", axis_index_groups=g),
}.items():
    for _what, _groups in {
        "an index missing": lambda: [[0]],
        "an index twice": lambda: [list(range(_n())), [0]],
        "an index too large": lambda: [list(range(1, _n() + 1))],
        "a negative index": lambda: [[r - 1 for r in range(_n())]],
    }.items():
        _refused(
            f"{_name}, {_what}",
            lambda v, call=_call, groups=_groups: call(v, groups()),
            *("ValueError", "axis_index_groups must cover all indices", _name),
        )
    if _name != "psum":
        _refused(
            f"{_name}, uneven groups",
            lambda v, call=_call: call(v, [[0], list(range(1, _n()))]),
            *("ValueError", "same size", _name),
        )
_refused(
    "psum of a constant, uneven groups",
    lambda v: scl.psum(1, "i", axis_index_groups=[[0], list(range(1, _n()))]),
    *("ValueError", "same size"),
)
_refused(
    "psum, groups and a dimension",
    lambda v: scl.psum(v, ("i", 0), axis_index_groups=[list(range(_n()))]),
    *("ValueError", "named axes only"),
)
_refused(
    "all_gather, axis out of range",
    lambda v: scl.all_gather(v, "i", axis=2),
    *("ValueError", "axis 2", "2 dimensions"),
)
_refused(
    "all_gather tiled, of a scalar",
    lambda v: scl.all_gather(v[0], "i", tiled=True),
    *("ValueError", "axis 0", "0 dimensions"),
)
_refused(
    "psum_scatter, dimension out of range",
    lambda v: scl.psum_scatter(v, "i", scatter_dimension=-2),
    *("ValueError", "scatter_dimension -2", "(6,)"),
)
_refused(
    "psum_scatter, wrong size",
    lambda v: scl.psum_scatter(v[:5], "i"),
    *("ValueError", "dimension 0 of shape (5,) must be"),
)
_refused(
    "psum_scatter tiled, wrong size",
    lambda v: scl.psum_scatter(jnp.resize(v, _n() * 2 + 1), "i", tiled=True),
    *("ValueError", "multiple of"),
)
_refused(
    "ppermute, source out of range",
    lambda v: scl.ppermute(v, "i", [(_n(), 0)]),
    *("ValueError", "source", "out of range"),
)
_refused(
    "ppermute, destination out of range",
    lambda v: scl.ppermute(v, "i", [(0, -_n() - 1)]),
    *("ValueError", "destination", "out of range"),
)
_refused(
    "ppermute, a source twice",
    lambda v: scl.ppermute(v, "i", [(0, 1), (-_n(), 0)]),
    *("ValueError", "source occurs twice"),
)
_refused(
    "ppermute, a destination twice",
    lambda v: scl.ppermute(v, "i", [(0, 1), (1, 1)]),
    *("ValueError", "destination occurs twice"),
)
for _name, _call in {
    "psum": lambda v: scl.psum(v, "i"),
    "all_gather": lambda v: scl.all_gather(v, "i"),
    "psum_scatter": lambda v: scl.psum_scatter(v, "i", tiled=True),
    "ppermute": lambda v: scl.ppermute(v, "i", [(0, 1)]),
}.items():
    _refused(
        f"{_name} of PRNG keys",
        lambda v, call=_call: call(_keys()),
        *("Unsupported", "key<", "key_data", _name),
    )


def refused() -> None:
    """Every call of the table: refused on every rank, before anything is sent."""
    x = sheet.spread([X] * _n(), sheet.mesh())
    for name, (call, texts) in REFUSED.items():
        said = outcome(lambda call=call: sheet.on_ranks(call, check_vma=False)(x))
        for text in texts:
            assert text in said, f"{name}: {said!r}"


def groups_under_vma() -> None:
    """psum in groups varies, which its type under check_vma cannot say."""
    x = sheet.spread([X] * _n(), sheet.mesh())
    whole = [list(range(_n()))]
    f = sheet.on_ranks(lambda v: scl.psum(v, "i", axis_index_groups=whole))
    said = outcome(lambda: f(x))
    assert said.startswith("NotImplementedError") and "check_vma=False" in said, said


def outside_of_shard_map() -> None:
    """On sharded operands under jit, and eagerly; on a mesh that is half manual."""
    x = sheet.spread([X] * _n(), sheet.mesh())
    for f in (
        lambda v: scl.psum(v, "i"),
        lambda v: scl.all_gather(v, "i"),
        lambda v: scl.psum_scatter(v, "i", tiled=True),
        lambda v: scl.ppermute(v, "i", [(0, 1)]),
        lambda v: scl.barrier("i", v),
    ):
        for run in (f, jax.jit(f)):
            said = outcome(lambda run=run: run(x))
            assert said.startswith("NameError") and "shard_map" in said, said


def partly_manual() -> None:
    """Other axes of the mesh, of more than one rank, left to the compiler."""
    mesh = sheet.mesh((2, _n() // 2))
    f = jax.shard_map(
        lambda v: scl.psum(v, "i"),
        mesh=mesh,
        in_specs=P("i"),
        out_specs=P(),
        axis_names={"i"},
    )
    sharding = jax.sharding.NamedSharding(mesh, P("i"))
    x = jax.make_array_from_callback((2,), sharding, lambda at: np.arange(2.0)[at])
    said = outcome(lambda: jax.jit(f)(x))
    assert said.startswith("Unsupported") and "['j']" in said, said
    assert "all axis names" in said, said


# --- initialize and shutdown ----------------------------------------------------


def _psum() -> Any:
    return sheet.on_ranks(lambda v: scl.psum(v, "i"))


def initialized_twice() -> None:
    """The same again is fine; other arguments are not."""
    with scl_settings(timeout=77):
        scl.initialize()
        scl.initialize(timeout=77)
        said = outcome(lambda: scl.initialize(timeout=78))
        assert said.startswith("InvalidUsage") and "shutdown()" in said, said
        for got in sheet.run(lambda v: scl.psum(v, "i"), [X] * _n()).values():
            sheet.same(got, X * _n())
        said = outcome(lambda: scl.config.update("timeout", 5))
        assert said.startswith("InvalidUsage") and "shutdown()" in said, said


def after_shutdown() -> None:
    """What was compiled before raises; what is compiled anew joins again."""
    on = sheet.mesh()
    scl.initialize()
    f, x = _psum(), sheet.spread([X] * on.size, on)
    compiled = f.lower(x).compile()
    compiled(x)
    scl.shutdown()
    scl.shutdown()
    assert not scl.is_initialized()
    said = outcome(lambda: compiled(x))
    assert said.startswith("InvalidUsage: ") and "initialize()" in said, said
    for got in sheet.collect(f(x), on).values():
        sheet.same(got, X * on.size)
    assert scl.is_initialized()
    said = outcome(lambda: compiled(x))
    assert said.startswith("InvalidUsage: ") and "compile again" in said, said
    for got in sheet.collect(f(x), on).values():
        sheet.same(got, X * on.size)


def some_have_left() -> str:
    """Process 0 leaves; the others call."""
    on = sheet.mesh()
    scl.initialize()
    f, x = _psum(), sheet.spread([X] * on.size, on)
    f(x)
    if jax.process_index() == 0:
        scl.shutdown()
        said = ""
    else:
        said = outcome(lambda: f(x))
        scl.shutdown()
    scl.initialize()
    for got in sheet.collect(_psum()(x), on).values():
        sheet.same(got, X * on.size)
    return said


def done_first() -> None:
    """Process 0 has sent, leaves at once; who reads it comes later."""
    on = sheet.mesh()
    sizes = (3, 500, 100_003)
    x = [
        [sheet.random(np.float32, (s,), (50, r, s)) for s in sizes]
        for r in range(on.size)
    ]
    pairs = [(0, 1)] if jax.local_device_count() == 1 else [(0, on.size - 1)]
    scl.initialize()
    f = sheet.on_ranks(lambda x: [scl.ppermute(v, "i", pairs) for v in x], on)
    args = sheet.spread(x, on)
    compiled = f.lower(args).compile()
    if jax.process_index() != 0:
        time.sleep(1.0)
    out = sheet.collect(compiled(args), on)
    scl.shutdown()
    scl.initialize()
    for rank, got in out.items():
        zeros = [np.zeros_like(v) for v in x[0]]
        sheet.same_trees(got, x[0] if rank == pairs[0][1] else zeros, f"rank {rank}")


def settings_that_differ() -> str:
    """One process has another eager limit; afterwards all can join again."""
    scl.shutdown()
    scl.config.update("eager_bytes", 4096 if jax.process_index() == 0 else 2048)
    said = outcome(scl.initialize)
    scl.config.update("eager_bytes", None)
    scl.initialize()
    for got in sheet.run(lambda v: scl.psum(v, "i"), [X] * _n()).values():
        sheet.same(got, X * _n())
    return said


# --- found while running ------------------------------------------------------------


def groups_that_differ() -> list[str]:
    """Processes group the ranks in other ways."""
    on = sheet.mesh()
    odd = jax.process_index() % 2 == 1
    pairs = [[0, 2], [1, 3]] if odd else [[0, 1], [2, 3]]
    with scl_settings(timeout=1.5):
        f = sheet.on_ranks(
            lambda v: scl.psum(v, "i", axis_index_groups=pairs), on, check_vma=False
        )
        x = sheet.spread([X] * 4, on)
        said = [outcome(lambda: f(x))]
    for got in sheet.run(lambda v: scl.psum(v, "i"), [X] * 4).values():
        sheet.same(got, X * 4)
    return said


def two_threads() -> tuple[str, str]:
    """A second thread launches while the first one's collective is under way."""
    on = sheet.mesh()
    last = jax.process_count() - 1
    with scl_settings(timeout=20):
        f, x = _psum(), sheet.spread([X] * on.size, on)
        compiled = f.lower(x).compile()

        def launch(said: list[str]) -> None:
            said.append(outcome(lambda: compiled(x)))

        first: list[str] = []
        second: list[str] = []
        threads = [threading.Thread(target=launch, args=(s,)) for s in (first, second)]
        if jax.process_index() == last:
            time.sleep(1.0)  # meanwhile the others' first operation waits for us
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        for thread in threads:
            thread.join()
    for got in sheet.run(lambda v: scl.psum(v, "i"), [X] * on.size).values():
        sheet.same(got, X * on.size)
    return first[0], second[0]


def many_threads(count: int, turns: int) -> list[str]:
    """Threads that launch without any order among them."""
    on = sheet.mesh()
    said: list[str] = []
    with scl_settings(timeout=20):
        f, x = _psum(), sheet.spread([X] * on.size, on)
        compiled = f.lower(x).compile()

        def launch() -> None:
            for _ in range(turns):
                out: list[Any] = []
                said.append(outcome(lambda out=out: out.append(compiled(x)) or out))
                if not said[-1]:
                    for got in sheet.collect(out[0], on).values():
                        sheet.same(got, X * on.size)

        threads = [threading.Thread(target=launch) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(said) == count * turns, "a thread ended early"
    return said


def forked(turns: int) -> list[str]:
    """A child by fork: collectives raise at once; the parent goes on undisturbed.

    Returns:
      What the child's three attempts ended in.
    """
    on = sheet.mesh()
    scl.initialize()
    f, x = _psum(), sheet.spread([X] * on.size, on)
    jax.block_until_ready(f(x))
    compiled = f.lower(x).compile()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, and rightly
        child = os.fork()
    if child == 0:
        try:
            os.close(read)
            attempts = (
                lambda: compiled(x),
                scl.initialize,
                lambda: sheet.on_ranks(lambda v: scl.barrier("i", v) + 1).lower(x),
            )
            with os.fdopen(write, "w") as pipe:
                for attempt in attempts:
                    pipe.write(outcome(attempt).replace("\n", " ") + "\n")
                pipe.write(f"{np.arange(10).sum()}\n")
        finally:
            os._exit(0)
    os.close(write)
    text = ""
    until = time.monotonic() + 20
    with os.fdopen(read) as pipe:
        while time.monotonic() < until:
            if not select.select([pipe], [], [], 0.1)[0]:
                continue
            piece = os.read(pipe.fileno(), 65536).decode()
            if not piece:
                break
            text += piece
        else:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, text
    for _ in range(turns):
        out = f(x)
    for got in sheet.collect(out, on).values():
        sheet.same(got, X * on.size)
    return text.splitlines()
