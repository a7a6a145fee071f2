"""What `stratacl launch` runs in each rank: the user's program, prepared.

Executed by path, not with `-m`, so that nothing of the package and nothing of
JAX is imported before the user's own first line: a script may still set
`XLA_FLAGS` or `JAX_*` before its `import jax`. JAX joins the launcher's
coordination service the moment the script has imported it.

How a rank ends:

- The script returned: JAX's own exit functions run, then the rank waits at the
  *end barrier*, a socket to the launcher, until every rank has come to its end
  or is gone. It cannot outlast a dead peer, nor the launcher.
- The script raised or left with a non-zero code: its traceback is printed and
  the process goes at once. JAX's teardown is skipped, because it may wait for a
  program that can no longer finish.
"""

import atexit
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# How long exit functions of a failed rank may take before it goes regardless.
_LAST_WORDS_S = 2.0


def die_with(parent: int) -> None:
    """Makes the kernel end this process when its parent, the launcher, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(128 + signal.SIGKILL)


def arrange_end_barrier(fd: int) -> Callable[[], None]:
    """Registers the wait for the other ranks as the last exit function.

    Exit functions run last in, first out: being registered before JAX is
    imported puts the wait after JAX's teardown.
    """
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    owner = os.getpid()

    def wait_for_the_others() -> None:
        if os.getpid() != owner:  # a forked child leaving through sys.exit
            return
        try:
            sys.stdout.flush()
            channel.sendall(b"end\n")
            channel.recv(1)  # a byte when all are there, nothing when orphaned
        except OSError:
            pass

    return atexit.register(wait_for_the_others)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, as soon as the named module has been imported."""

    def __init__(self, name: str, function: Callable[[], None]):
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, function = spec.loader.exec_module, self._function

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            function()

        # On the instance only: the loader's class serves every other module.
        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def join_cluster() -> None:
    """Connects JAX to the launcher's coordination service."""
    # The same copy of the package as the launcher's, installed or not.
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.insert(0, home)
    try:
        # Not through _compat: it may be what is importing JAX just now.
        from stratacl_jax import _compat_distributed
    finally:
        sys.path.remove(home)
    _compat_distributed.join_launcher(
        os.environ["JAX_COORDINATOR_ADDRESS"],
        int(os.environ["STRATACL_NUM_PROCESSES"]),
        int(os.environ["STRATACL_PROCESS_ID"]),
    )


def run_script(path: str) -> None:
    """Runs a file as `python path` does, in a `__main__` that stays."""
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    if not os.path.isfile(path) or path.endswith((".zip", ".pyz")):
        sys.path.pop(0)  # runpy puts the directory or archive there
        runpy.run_path(path, run_name="__main__")
        return
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    run_as_main(code, __file__=path, __loader__=loader)


def run_module(name: str) -> None:
    """Runs a module as `python -m name` does, in a `__main__` that stays."""
    sys.path[0] = os.getcwd()
    if name.partition(".")[0] == "stratacl_jax":
        # The launcher's own copy, even where another lies in this directory.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
    loader = None if spec is None else spec.loader
    code = getattr(loader, "get_code", lambda _: None)(name)
    if spec is None or spec.origin is None or code is None:
        raise ModuleNotFoundError(f"no module named {name!r} to run", name=name)
    sys.argv[0] = spec.origin
    run_as_main(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def run_as_main(code: types.CodeType, **attributes: object) -> None:
    """Runs code as the module `__main__`, which stays for what comes after."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__cached__": None, **attributes})
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def exit_code(error: SystemExit) -> int:
    """The process exit code that Python gives a `SystemExit`."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def leave(code: int, end_barrier: Callable[[], None]) -> None:
    """Ends a failed rank at once: no barrier, no JAX teardown, no hang."""
    impatient = threading.Timer(_LAST_WORDS_S, os._exit, (code,))
    impatient.daemon = True
    impatient.start()
    distributed = sys.modules.get("stratacl_jax._compat_distributed")
    try:
        if distributed is not None:
            distributed.abandon()
        atexit.unregister(end_barrier)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def own_frames_removed(error: BaseException) -> types.TracebackType | None:
    """The traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def main() -> None:
    die_with(int(os.environ.pop("STRATACL_LAUNCHER_PID")))
    end_barrier = arrange_end_barrier(int(os.environ.pop("STRATACL_CONTROL_FD")))
    if "jax" in sys.modules:  # the site's configuration imports it
        join_cluster()
    else:
        sys.meta_path.insert(0, _AfterImport("jax", join_cluster))
    kind, target = sys.argv[1:3]
    sys.argv[:] = [target, *sys.argv[3:]]
    try:
        run_module(target) if kind == "module" else run_script(target)
    except SystemExit as error:
        code = exit_code(error)
        if code:
            leave(code, end_barrier)
    except BaseException as error:
        error = error.with_traceback(own_frames_removed(error))
        sys.excepthook(type(error), error, error.__traceback__)
        leave(130 if isinstance(error, KeyboardInterrupt) else 1, end_barrier)


if __name__ == "__main__":
    main()
