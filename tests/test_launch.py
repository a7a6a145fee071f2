"""`stratacl launch`, with real ranks."""

import os
import re
import signal
import subprocess
import sys
import time

import procs
import pytest

from stratacl_jax import launch
from stratacl_jax.runtime.errors import InvalidUsage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")

PSUM = """
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("i",))
    psum = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    x = jax.make_array_from_callback(
        (n,), NamedSharding(mesh, P("i")), lambda at: jnp.arange(1.0, n + 1)[at])
"""


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if "[Gloo]" not in line)


# -- in order


@pytest.mark.parametrize("processes, devices", [(2, 1), (1, 2), (2, 2)])
def test_stock_psum_in_every_layout(tmp_path, processes, devices):
    source = (
        PSUM
        + """
    print("sum", float(psum(x)[0]), jax.process_index(), jax.local_device_count())
    """
    )
    result = procs.run_ranks(
        source, directory=tmp_path, processes=processes, devices=devices
    )
    assert result.code == 0, result
    total = sum(range(1, processes * devices + 1))
    assert lines(result.out) == [
        f"[{i}] sum {total}.0 {i} {devices}" for i in range(processes)
    ], result
    assert result.err == "", result


def test_arguments_labels_streams_and_main(tmp_path):
    source = """
    import os, sys
    rank = os.environ["STRATACL_PROCESS_ID"]
    class Here: pass
    import pickle
    pickle.loads(pickle.dumps(Here()))
    import multiprocessing
    assert sys.modules["__main__"].__file__ == sys.argv[0] == __file__
    assert sys.path[0] == os.path.dirname(os.path.abspath(__file__)), sys.path
    assert "stratacl_jax" not in sys.modules and "jax" not in sys.modules
    print(sys.argv[1:])
    print("to err", file=sys.stderr)
    sys.stdout.write("no newline")
    """
    result = procs.run_ranks(
        source, "--steps", "3", "-n", "x y", directory=tmp_path, processes=3
    )
    assert result.code == 0, result
    expected = []
    for i in range(3):
        expected += [f"[{i}] ['--steps', '3', '-n', 'x y']", f"[{i}] no newline"]
    assert lines(result.out) == sorted(expected)
    assert lines(result.err) == [f"[{i}] to err" for i in range(3)]


def test_no_label_passes_output_through(tmp_path):
    result = procs.run_ranks(
        "print('plain')", directory=tmp_path, options=["--no-label"]
    )
    assert result.code == 0 and result.out == "plain\nplain\n", result


def test_module_mode(tmp_path):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    procs.script(
        package,
        """
        import os, sys
        from . import __name__ as parent
        file = os.path.basename(sys.argv[0])
        print(parent, __name__, __spec__.name, file, sys.argv[1:])
        """,
        "__main__.py",
    )
    command = procs.launch_command("some_package", "-v", options=["-m"])
    result = procs.run(command, cwd=tmp_path)
    assert result.code == 0, result
    said = "some_package __main__ some_package.__main__ __main__.py ['-v']"
    assert lines(result.out) == [f"[0] {said}", f"[1] {said}"]


@pytest.mark.parametrize("arguments", ["", "'localhost:1', 2, int(rank)"])
def test_program_that_initializes_by_itself(tmp_path, arguments):
    source = f"""
    import os
    rank = os.environ["STRATACL_PROCESS_ID"]
    import jax
    from jax.distributed import initialize
    initialize({arguments})
    assert jax.distributed.is_initialized()
    """
    result = procs.run_ranks(
        source
        + PSUM
        + """
    print("sum", float(psum(x)[0]))
    try:
        jax.distributed.initialize()
    except RuntimeError as error:
        print("again:", "before any JAX calls" in str(error))
    jax.distributed.shutdown()
    """,
        directory=tmp_path,
    )
    assert result.code == 0, result
    assert lines(result.out) == [
        *("[0] again: True", "[0] sum 3.0"),
        *("[1] again: True", "[1] sum 3.0"),
    ]


def test_program_that_initializes_for_another_job(tmp_path):
    source = """
    import jax
    jax.distributed.initialize("localhost:1", num_processes=4)
    """
    result = procs.run_ranks(source, directory=tmp_path)
    assert result.code == 1, result
    assert "num_processes=4" in result.err and "num_processes=2" in result.err


def test_environment_may_be_set_before_jax_is_imported(tmp_path):
    source = """
    import os
    os.environ["JAX_ENABLE_X64"] = "1"
    import jax
    print(jax.numpy.zeros(1).dtype)
    """
    result = procs.run_ranks(source, directory=tmp_path)
    assert lines(result.out) == ["[0] float64", "[1] float64"], result


def test_early_rank_waits_for_late_one(tmp_path):
    source = """
    import os, time, jax
    jax.devices()
    if os.environ["STRATACL_PROCESS_ID"] == "1":
        time.sleep(2)
        print("late", jax.process_index())
    """
    result = procs.run_ranks(source, directory=tmp_path)
    assert result.code == 0 and lines(result.out) == ["[1] late 1"], result


def test_rank_that_leaves_without_a_word_holds_nobody(tmp_path):
    source = """
    import os, jax
    jax.devices()
    if jax.process_index() == 1:
        os._exit(0)
    """
    result = procs.run_ranks(source, directory=tmp_path)
    assert result.code == 0 and result.seconds < 15, result


def test_children_of_ranks_end_with_the_job(tmp_path):
    source = """
    import subprocess
    subprocess.Popen(["sleep", "600"])
    print("started")
    """
    result = procs.run_ranks(source, directory=tmp_path)  # fails if any is left
    assert result.code == 0 and result.seconds < 15, result


# -- failures


@pytest.mark.parametrize(
    "statement, code, told",
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("sys.exit('gone wrong')", 1, "exited with code 1"),
        ("raise ValueError('from the script')", 1, "exited with code 1"),
        ("os._exit(9)", 9, "exited with code 9"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
def test_first_failure_ends_all(tmp_path, statement, code, told):
    source = f"""
    import os, signal, sys, threading
    if os.environ["STRATACL_PROCESS_ID"] == "1":
        {statement}
    threading.Event().wait()
    """
    env = {"PYTHONFAULTHANDLER": ""}
    result = procs.run_ranks(
        source, directory=tmp_path, options=["--grace", "0.2"], env=env
    )
    assert result.code == code, result
    assert re.search(rf"stratacl launch: rank 1 \(pid \d+\) {told}\n", result.err)
    assert result.err.count("stratacl launch:") == 1, result
    if "raise" in statement:
        trace = [s[4:] for s in result.err.splitlines() if s.startswith("[1] ")]
        assert trace[0] == "Traceback (most recent call last):", result
        assert trace[-1] == "ValueError: from the script", result
        assert not any("_launched" in line for line in trace), result
    if "gone wrong" in statement:
        assert "[1] gone wrong" in result.err, result
    assert result.seconds < 20, result


def test_rank_deaf_to_sigterm_is_ended(tmp_path):
    source = (
        PSUM
        + """
    import threading
    psum(x).block_until_ready()
    if jax.process_index() == 1:
        raise ValueError("from the script")
    threading.Event().wait()
    """
    )
    result = procs.run_ranks(source, directory=tmp_path, options=["--grace", "0.5"])
    assert result.code == 1 and "[1] ValueError: from the script" in result.err, result
    assert result.seconds < 20, result


def test_death_of_rank_0_leaves_the_others_time_to_speak(tmp_path):
    source = """
    import os, time, jax
    from jax._src import distributed
    client = distributed.global_state.client
    jax.devices()
    client.wait_at_barrier("met", 30_000)
    if jax.process_index() == 0:
        os.kill(os.getpid(), 9)
    time.sleep(1.5)
    client.key_value_set("still", "served")
    print("survivor", client.blocking_key_value_get("still", 1000))
    raise SystemExit(3)
    """
    result = procs.run_ranks(source, directory=tmp_path)
    assert result.code == 137, result
    assert lines(result.out) == ["[1] survivor served"], result


def test_survivor_that_raises_leaves_at_once(tmp_path):
    source = (
        PSUM
        + """
    import os, time
    psum(x).block_until_ready()
    if jax.process_index() == 0:
        os._exit(5)
    time.sleep(0.5)
    psum(x).block_until_ready()
    """
    )
    result = procs.run_ranks(source, directory=tmp_path, options=["--grace", "20"])
    assert result.code == 5, result
    assert "[1] Traceback" in result.err and result.seconds < 15, result


def test_rank_at_its_end_does_not_wait_for_a_failed_job(tmp_path):
    source = """
    import os, time
    time.sleep(0.5)
    if os.environ["STRATACL_PROCESS_ID"] == "1":
        raise SystemExit(3)
    """
    result = procs.run_ranks(source, directory=tmp_path, options=["--grace", "30"])
    assert result.code == 3 and result.seconds < 15, result


def test_coordination_service_that_cannot_start(tmp_path):
    # A jaxlib without the parts we use.
    fake = tmp_path / "elsewhere" / "jaxlib"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("_jax = None")
    path = procs.script(tmp_path, "import time; time.sleep(600)")
    source = f"""
    import os, sys
    from stratacl_jax import launch
    os.environ["PYTHONPATH"] = {str(fake.parent)!r}
    sys.exit(launch.run(launch.Options([{str(path)!r}], 2)))
    """
    starter = procs.script(tmp_path, source, "starter.py")
    result = procs.run([sys.executable, str(starter)])
    assert result.code == 1, result
    assert "coordination service ended unexpectedly" in result.err, result
    assert "this version of JAX has no coordination service" in result.err, result


def test_failure_before_all_have_connected(tmp_path):
    source = """
    import os
    if os.environ["STRATACL_PROCESS_ID"] == "1":
        raise SystemExit(4)
    import jax
    """
    result = procs.run_ranks(source, directory=tmp_path, options=["--grace", "0.5"])
    assert result.code == 4 and result.seconds < 15, result


def test_exit_functions_of_a_failing_rank_run(tmp_path):
    source = """
    import atexit
    atexit.register(print, "tidied")
    import jax
    jax.devices()
    raise RuntimeError
    """
    result = procs.run_ranks(source, directory=tmp_path)
    assert result.code == 1, result
    assert lines(result.out) == ["[0] tidied", "[1] tidied"], result


# -- signals

WAITING = """
    import os, time, jax
    jax.devices()
    print("ready")
    try:
        time.sleep(600)
    finally:
        print("leaving")
"""


def test_one_interrupt_is_enough(tmp_path):
    path = procs.script(tmp_path, WAITING)
    with procs.start(procs.launch_command(path)) as child:
        child.wait_for("ready", 2)
        begun = time.monotonic()
        child.signal(signal.SIGINT)
        result = child.wait()
    assert result.code == 130 and time.monotonic() - begun < 6, result
    assert result.out.count("leaving") == 2, result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_the_job(tmp_path, number):
    path = procs.script(tmp_path, WAITING)
    command = procs.launch_command(path, options=["--grace", "1"])
    with procs.start(command) as child:
        child.wait_for("ready", 2)
        begun = time.monotonic()
        child.signal(number)
        result = child.wait()
    assert result.code == 128 + number and time.monotonic() - begun < 8, result


def test_death_of_the_launcher_ends_the_ranks_and_their_children(tmp_path):
    source = """
    import subprocess, time, jax
    jax.devices()
    subprocess.Popen(["sleep", "600"])
    print("ready")
    time.sleep(600)
    """
    path = procs.script(tmp_path, source)
    with procs.start(procs.launch_command(path)) as child:
        child.wait_for("ready", 2)
        child.signal(signal.SIGKILL)
        child.wait()  # fails if anything is left


def test_time_limit(tmp_path):
    result = procs.run_ranks(
        "import time; time.sleep(600)", directory=tmp_path, options=["--timeout", "1"]
    )
    assert result.code == 124 and "time limit" in result.err, result


def test_reader_that_leaves_ends_the_job(tmp_path):
    path = procs.script(tmp_path, "while True: print('more')")
    command = " ".join(procs.launch_command(path)) + " | head -n 1"
    result = procs.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"])
    assert result.code == 141 and result.seconds < 15, result


# -- bad input


@pytest.mark.parametrize(
    "options, message",
    [
        (launch.Options([], 2), "name a script"),
        (launch.Options([__file__], 0), "processes is 0"),
        (launch.Options([__file__], 1, 0), "devices_per_process is 0"),
        (launch.Options([__file__], 1, grace=-1), "times are positive"),
        (launch.Options(["/no/such/file.py"], 1), "no such script"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidUsage, match=message):
        launch.run(options)


def test_bad_command_line():
    result = procs.run(procs.launch_command("/no/such/file.py"))
    assert result.code == 2, result
    assert result.err.strip().splitlines()[-1].endswith("/no/such/file.py"), result
    assert "Traceback" not in result.err, result


def test_unknown_module():
    result = procs.run(procs.launch_command("no_such_module", options=["-m"]))
    assert result.code == 1 and "no module named 'no_such_module'" in result.err


def test_rank_environment():
    options = launch.Options(["x.py"], 3, 4)
    env = launch.rank_environment(options, 1, "127.0.0.1:5", {"NPROC": "64"})
    assert env["NPROC"] == "64"
    assert env["JAX_NUM_CPU_DEVICES"] == "4"
    assert env["STRATACL_PROCESS_ID"] == "1" and env["JAX_PLATFORMS"] == "cpu"
    env = launch.rank_environment(options, 1, "127.0.0.1:5", {"NPROC": "1"})
    assert env["NPROC"] == "10"
    env = launch.rank_environment(
        launch.Options(["x.py"], 1), 0, "127.0.0.1:5", {"JAX_PLATFORMS": "cpu,cuda"}
    )
    assert int(env["NPROC"]) >= 4 and env["JAX_PLATFORMS"] == "cpu,cuda"


def test_statuses():
    assert launch.exit_code(-signal.SIGKILL) == 137
    assert launch.describe_status(-signal.SIGTERM) == "was killed by SIGTERM"
    assert launch.describe_status(3) == "exited with code 3"


def test_command_line_without_its_optional_parts():
    result = procs.run([sys.executable, "-P", "-m", "stratacl_jax", "--help"])
    assert result.code == 0, result
    for command in ("launch", "info", "demo", "bench"):
        assert command in result.out


def test_leftover_processes_fail_a_test():
    with pytest.raises(AssertionError, match="left processes behind"):
        procs.run(["bash", "-c", "setsid sleep 600 & exit 0"])
    assert not subprocess.run(
        ["pgrep", "-f", "^sleep 600$", "-s", "0"], capture_output=True
    ).stdout


def test_deadline_shows_stacks():
    source = "import time\ndef stuck(): time.sleep(600)\nstuck()"
    with pytest.raises(AssertionError, match="in stuck") as caught:
        procs.run([sys.executable, "-c", source], deadline=1.0)
    assert "did not end in time" in str(caught.value)
    assert os.path.exists("/proc/self")
