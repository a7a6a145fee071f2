"""The private parts of JAX that this package needs, and nothing else does.

Every name below is looked up once, here. On a JAX where one is missing the
import fails with a sentence that says so, instead of a traceback from the
middle of a lowering. Imported by `initialize()` and the operators, not by
`import stratacl_jax`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jaxlib

SUPPORTED = ((0, 10, 2), (0, 11, 0))  # from, and below


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def supported_jaxlib() -> bool:
    """Whether the installed jaxlib is in the tested range."""
    return SUPPORTED[0] <= _version(jaxlib.__version__) < SUPPORTED[1]


try:
    from jax._src import config as _config
    from jax._src import core as _core
    from jax._src import dispatch as _dispatch
    from jax._src import distributed as _distributed
    from jax._src import xla_bridge as _xla_bridge
    from jax._src.interpreters import pxla as _pxla
    from jax._src.lax import parallel as _parallel
    from jax._src.lib import _jax
    from jax._src.mesh import Mesh as _Mesh
    from jax._src.sharding_impls import SPMDAxisContext as _SPMDAxisContext

    NamedAxisEffect = _core.NamedAxisEffect
    apply_primitive = _dispatch.apply_primitive
    _get_axis_env = _core.get_axis_env
    _check_vma = _config._check_vma
    _auto_pcast = _config.auto_pcast
    _axis_groups = _pxla.axis_groups
    _axis_size = _parallel._axis_size
    check_axis_names = _parallel._check_axis_names
    collective_vma_rule = _parallel.collective_vma_rule
    _global_state = _distributed.global_state
    _backends_are_initialized = _xla_bridge.backends_are_initialized
    _Client = _jax.Client
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"stratacl_jax does not know jax {jax.__version__} (jaxlib "
        f"{jaxlib.__version__}): {error}. It is made for jax >= "
        f"{'.'.join(map(str, SUPPORTED[0]))}, < {'.'.join(map(str, SUPPORTED[1]))}"
    ) from error


# --- tracing ----------------------------------------------------------------


def check_vma() -> bool:
    """Whether the surrounding shard_map checks varying manual axes."""
    return bool(_check_vma.value)


def auto_pcast() -> bool:
    return bool(_auto_pcast.value)


def varying(x: Any) -> frozenset:
    """Mesh axes over which the value (or aval) differs between ranks."""
    aval: Any = x if isinstance(x, _core.AbstractValue) else jax.typeof(x)
    return frozenset(aval.mat.varying)


def with_varying(aval: Any, names: Iterable[Any]) -> Any:
    return aval.update(manual_axis_type=aval.mat.update(varying=frozenset(names)))


def axis_size(names: Sequence[Any], groups: Any = None) -> int:
    """Ranks in a group: the product of the axes, or the length of one group."""
    return _axis_size(tuple(names), groups)


def is_tracer(x: Any) -> bool:
    return isinstance(x, _core.Tracer)


# --- lowering ---------------------------------------------------------------


class _Calls:
    """How many of our calls a module has; rides in its keepalives."""

    def __init__(self) -> None:
        self.count = 0


def next_call(ctx: Any) -> int:
    """Ordinal of this call among ours in the module being lowered.

    Not JAX's channel iterator: a `jax.debug.print` on one rank would shift that.
    """
    keepalives = ctx.module_context.keepalives
    for item in keepalives:
        if isinstance(item, _Calls):
            break
    else:
        item = _Calls()
        keepalives.append(item)
    item.count += 1
    return item.count


def device_groups(
    ctx: Any, names: Sequence[Any], index_groups: Any
) -> list[list[int]] | str:
    """Device ids of every group, members in `axis_index` order.

    Returns a sentence instead where the call site has no such groups.
    """
    context = ctx.module_context.axis_context
    if not isinstance(context, _SPMDAxisContext):
        return "it was called outside jax.shard_map"
    mesh = context.mesh
    if not isinstance(mesh, _Mesh):
        return "its mesh is abstract: no devices are known where it is lowered"
    automatic = [
        name
        for name in mesh.axis_names
        if name not in context.manual_axes and mesh.shape[name] > 1
    ]
    if automatic:
        return (
            f"the mesh axes {automatic} are not manual here; pass all axis names to "
            "jax.shard_map"
        )
    positions: Sequence[Sequence[int]] = _axis_groups(context, tuple(names))
    if index_groups is not None:
        positions = [
            [group[i] for i in chosen] for group in positions for chosen in index_groups
        ]
    flat = mesh.devices.flat
    ids = [int(device.id) for device in flat]
    return [[ids[i] for i in group] for group in positions]


# --- compiling --------------------------------------------------------------

_hook_lock = threading.Lock()
_hooked = False


def hook_compiles(
    wanted: Callable[[Any], bool], begin: Callable[[], None], end: Callable[[], None]
) -> None:
    """Brackets every compilation or load of an executable that is `wanted`.

    XLA instantiates the custom calls of one module while it compiles it, on a
    thread of its own; equal calls can be told apart only if one knows where a
    module begins. Modules with collectives are compiled one at a time.
    """
    global _hooked
    if _hooked:
        return
    lock = threading.RLock()

    def bracket(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, program: Any, *args: Any, **kwargs: Any) -> Any:
            if not wanted(program):
                return original(self, program, *args, **kwargs)
            with lock:
                begin()
                try:
                    return original(self, program, *args, **kwargs)
                finally:
                    end()

        return call

    with _hook_lock:
        if _hooked:
            return
        for name in ("compile_and_load", "deserialize_executable"):
            setattr(_Client, name, bracket(getattr(_Client, name)))
        _hooked = True


# --- distributed ------------------------------------------------------------


def distributed_client() -> Any | None:
    """The coordination service's client, or None in a single-process program."""
    return _global_state.client


def process_index() -> int:
    return int(_global_state.process_id or 0)


def process_count() -> int:
    return int(_global_state.num_processes or 1)


def backend_started() -> bool:
    return bool(_backends_are_initialized())


def requested_cpu_devices() -> int | None:
    """Local CPU devices that the configuration asks for, if it does."""
    value = getattr(jax.config, "jax_num_cpu_devices", -1)
    return int(value) if value is not None and int(value) > 0 else None
