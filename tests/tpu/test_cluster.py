"""Real clusters on this machine: processes that train together, stop together, and whose run others go on with."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from data_pipelines.errors import PassingError, UserError
from pretrain.__main__ import main
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.signals import EXIT_STOPPED
from tests.pretrain import tiny
from tpu import __main__ as of_tpu
from tpu import chatter
from tpu import cluster as clusters
from tpu import local as module
from tpu.cluster import HEARTBEAT_SECONDS, detected, explicit, join

ROOT = Path(__file__).parent.parent.parent
STEPS = 40


def arguments(corpus, workdir, *more, recipe="transformer-xl-tiny"):
    """Of `run` for a decoder with a memory."""
    few = ("--depth", "scan", "--steps", STEPS, "--checkpoint-every", 8, "--eval-every", 2)
    return [*map(str, tiny.memory_arguments(recipe, corpus, workdir, *few, *more))]


PRETRAIN = ("-m", "pretrain")


class Cluster:
    """`python -m tpu local` around Python with these arguments."""

    def __init__(self, processes, devices, arguments):
        command = [sys.executable, "-m", "tpu", "local", "--processes", str(processes), "--devices", str(devices), "--"]
        command += [sys.executable, *map(str, arguments)]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        self.process = subprocess.Popen(command, cwd=ROOT, **how)
        self.said = ""

    def until(self, pattern):
        """Read lines until one matches."""
        for line in self.process.stdout:
            self.said += line
            if re.search(pattern, line):
                return
        raise AssertionError(self.said)

    def end(self, timeout=400):
        """(exit status, all that was said)"""
        out, _ = self.process.communicate(timeout=timeout)
        self.said += out
        return self.process.returncode, self.said

    def children(self):
        """Process numbers, in order."""
        own = self.process.pid
        return [int(one) for one in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


def losses(workdir, kind="train"):
    return {entry["step"]: entry["loss"] for entry in read_metrics(RunDirectory(workdir), kind)}


@pytest.fixture(scope="module", params=["transformer-xl-tiny", pytest.param("xlnet-tiny", marks=pytest.mark.slow)])
def recipe(request):
    return request.param


@pytest.fixture(scope="module")
def stopped(recipe, corpus_path, tmp_path_factory):
    """(work directory, what was said) of two processes of which the second got SIGTERM."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    given = arguments(corpus_path, workdir, "--mesh", "data=2,fsdp=2", recipe=recipe)
    cluster = Cluster(2, 2, [*PRETRAIN, *given])
    cluster.until(r"train +3 ")
    os.kill(cluster.children()[1], signal.SIGTERM)
    status, said = cluster.end()
    assert status == EXIT_STOPPED, said
    return workdir, said


def test_sigterm_to_one_process_stops_all_at_the_same_step(stopped):
    workdir, said = stopped
    step = int(re.search(r"SIGTERM: saved step (\d+)", said)[1])
    assert 3 <= step < STEPS
    assert max(RunDirectory(workdir).checkpoint_steps()) == step == max(losses(workdir))


def check_like_one(workdir, recipe, corpus, folder):
    """All losses, evaluations and the memory at the end are those of one process with one device."""
    assert main(arguments(corpus, folder / "one", recipe=recipe)) == 0
    for kind, every in ("train", 1), ("eval", 2):
        found, alone = losses(workdir, kind), losses(folder / "one", kind)
        assert sorted(found) == sorted(alone) == list(range(every, STEPS + 1, every))
        np.testing.assert_allclose([found[step] for step in alone], list(alone.values()), rtol=1e-5)
    saved = [tiny.final_state(run).carry["hidden"] for run in (workdir, folder / "one")]
    np.testing.assert_allclose(*saved, atol=1e-4)


def test_one_process_goes_on_and_all_losses_are_those_of_one_device(stopped, recipe, corpus_path, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(stopped[0], workdir)
    assert main(arguments(corpus_path, workdir, recipe=recipe)) == 0
    assert "resuming from step" in capsys.readouterr().out
    check_like_one(workdir, recipe, corpus_path, tmp_path)


@pytest.mark.slow
def test_four_processes_go_on_where_two_stopped(stopped, recipe, corpus_path, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(stopped[0], workdir)
    given = arguments(corpus_path, workdir, "--mesh", "fsdp=4", recipe=recipe)
    status, said = Cluster(4, 1, [*PRETRAIN, *given]).end()
    assert status == 0 and "resuming from step" in said, said
    check_like_one(workdir, recipe, corpus_path, tmp_path)


TOGETHER = """
import jax.numpy as jnp
from jax.experimental.multihost_utils import process_allgather
from tpu import cluster
cluster.join(None, None, None)
with cluster.ending_together():
    while True:
        print("together:", process_allgather(jnp.ones(4)).sum())
"""


def test_when_a_process_is_killed_the_other_ends_and_the_cure_is_printed(monkeypatch):
    monkeypatch.setenv("PRETRAIN_HEARTBEAT_SECONDS", "20")
    cluster = Cluster(2, 1, ["-c", TOGETHER])
    cluster.until("together: 8")
    os.kill(cluster.children()[0], signal.SIGKILL)
    began = time.monotonic()
    status, said = cluster.end()
    assert status == 1 and time.monotonic() - began < HEARTBEAT_SECONDS + 30
    assert "process 0 was killed by SIGKILL" in said and "Start the same command again" in said
    assert said.count("another process of this run died") == 1
    assert not re.search(r"Gloo|Traceback|stack trace|@ +0x|[EF]\d{4} ", said), said


AT_EXIT = """[Gloo] Rank 0 is connected to 1 peer ranks
a line of the run
E1122 06:48:28.933017    2624 coordination_service.cc:1520] [1] Shutdown barrier in coordination service has failed:
INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 heartbeat timeout.
"""


@pytest.mark.parametrize("found_first", ["", f"{chatter.LOST}\n"])
def test_a_process_that_is_gone_is_one_line_whether_python_or_cpp_finds_it_first(found_first):
    said = AT_EXIT.replace("E1122", f"{found_first}E1122") + found_first
    done = subprocess.run([sys.executable, chatter.__file__], input=said, capture_output=True, text=True)
    assert done.stdout == f"a line of the run\n{chatter.LOST}\n"


# Elsewhere a cluster has one fingerprint; the CPU backend's is another one in each process.
ONE_FINGERPRINT = """
import os
if os.environ.get("JAX_PROCESS_ID"):
    from jax._src import cache_key
    cache_key._hash_accelerator_config = lambda *_: None
"""


@pytest.mark.slow
def test_new_machines_compile_nothing_that_the_cluster_compiled_before(corpus_path, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(ONE_FINGERPRINT)
    settings = {
        "PYTHONPATH": tmp_path, "JAX_COMPILATION_CACHE_DIR": tmp_path / "shared", "HOME": tmp_path / "home",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0, "JAX_DEBUG_LOG_MODULES": "jax._src.compiler",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    for machines in ("first", "second"):
        given = tiny.run_arguments(corpus_path, tmp_path / machines, "--steps", 8)
        status, said = Cluster(2, 1, [*PRETRAIN, *given]).end()
        assert status == 0, said
    programs = {}
    for process in "01":
        for what in ("CACHE MISS", "cache hit"):
            lines = re.findall(rf"^\[{process}\] .*{what} for '([^']*)'", said, re.MULTILINE)
            programs[process, what] = sorted(lines)
    assert programs["0", "CACHE MISS"] == []
    assert programs["1", "cache hit"].count("jit_placed") == 2  # the steps of training and evaluation
    local = {"jit_slice", "jit_convert_element_type", "jit__lambda"}  # small, on a device of its own
    assert set(programs["1", "CACHE MISS"]) <= local


WITH_A_FAULT = """
import os, runpy, sys
if os.environ["JAX_PROCESS_ID"] == "1":
    {fault}
sys.argv = ["pretrain", *sys.argv[1:]]
runpy.run_module("pretrain", run_name="__main__")
"""
CANNOT_READ = """
    import pretrain.storage.stored_state as stored
    def fail(*_): raise ConnectionError("no route to the bucket")
    stored.PAUSES, stored._load = (), fail
"""
CANNOT_BUILD = """
    import pretrain.training.loop as loop
    def fail(*_): raise OSError(5, "Input/output error")
    loop.place_rows = fail
"""
CANNOT_SAVE = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
"""


@pytest.mark.parametrize(
    "fault, status, first, second",
    [
        (CANNOT_READ, PassingError.status, "process 1: checkpoint .* cannot be read now", "checkpoint .* route to the"),
        pytest.param(CANNOT_BUILD, 2, ".*process 1", ".*Input/output error", marks=pytest.mark.slow),
        pytest.param(CANNOT_SAVE, 2, "process 1 ended", ".*cannot write there", marks=pytest.mark.slow),
    ],
    ids=["reads nothing", "builds nothing", "saves nothing"],
)
def test_a_process_that_fails_ends_all_with_its_reason(fault, status, first, second, stopped, corpus_path, tmp_path):
    """Nobody waits for it, and no checkpoint is set aside."""
    workdir = tmp_path / "run"
    shutil.copytree(stopped[0], workdir)
    before = RunDirectory(workdir).checkpoint_steps()
    given = ["-c", WITH_A_FAULT.format(fault=fault), *arguments(corpus_path, workdir)]
    ended, said = Cluster(2, 1, given).end(timeout=300)
    assert ended == status, said
    assert re.search(rf"\[0\] error: {first}", said) and re.search(rf"\[1\] error: {second}", said), said
    assert RunDirectory(workdir).checkpoint_steps() == before and "Traceback" not in said


def test_an_error_that_nobody_can_be_told_of_any_more_is_one_line(monkeypatch, capfd):
    class Gone:
        def key_value_set(self, *_, **__):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: recvmsg:Connection reset by peer")

    monkeypatch.setattr(clusters, "several", lambda: True)
    monkeypatch.setattr(clusters, "_here", lambda: SimpleNamespace(client=Gone(), process_id=1))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended, clusters.ending_together():
        raise PassingError("busy")
    assert ended.value.code == PassingError.status
    assert capfd.readouterr().err == "error: busy\n"


@pytest.mark.parametrize(
    "environment, workers, several",
    [
        ({}, 1, False),
        ({}, 4, True),  # a Cloud TPU slice
        ({"SLURM_STEP_NUM_TASKS": "2"}, 1, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": ""}, 1, False),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, 1, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, 1, True),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, 1, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 4, False),  # who says it there is not asked again
        ({"TPU_SKIP_MDS_QUERY": "1"}, 4, False),
        ({"COLAB_RELEASE_TAG": "a"}, 4, False),
        ({"JAX_PLATFORMS": "cpu"}, 4, False),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, 1, True),
    ],
)
def test_the_environment_says_whether_there_is_a_cluster(environment, workers, several):
    assert detected(environment, lambda: workers) == several


def test_jax_s_own_variables_name_the_cluster():
    names = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert explicit(names) == ("a:1", 2, 1) and explicit({}) is None
    with pytest.raises(UserError, match="give both a whole number"):
        explicit(names | {"JAX_PROCESS_ID": "one"})


@pytest.mark.parametrize("address", ["", "localhost", "localhost:port", "a b:7000", "localhost:123456"])
def test_an_address_without_a_port_is_an_error(address):
    with pytest.raises(UserError, match="give HOST:PORT of process 0"):
        join(address, 2, 0)


def test_half_of_the_options_is_an_error():
    with pytest.raises(UserError, match="--processes and --process missing"):
        join("localhost:1", None, None)


def test_a_signal_while_processes_are_started_is_passed_on_to_all_of_them(monkeypatch, capsys):
    whole = module._start

    def start(options, command, address, index):
        process = whole(options, command, address, index)
        if index == 0:
            signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(module, "_start", start)
    begin = time.monotonic()
    status = module.local(module.Local(2, 1), [sys.executable, "-c", "import time; time.sleep(60)"])
    assert status == 1 and time.monotonic() - begin < 30


@pytest.mark.parametrize("shares", [True, False])
def test_the_port_where_processes_meet_is_kept_for_the_one_that_may_share_it(shares, capfd):
    take = f"""
import os, socket
host, _, port = os.environ["JAX_COORDINATOR_ADDRESS"].partition(":")
one = socket.socket()
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, {int(shares)})
one.bind((host, int(port)))
one.listen()
"""
    assert module.local(module.Local(1, 1), [sys.executable, "-c", take]) == (0 if shares else 1)
    assert ("Address already in use" in capfd.readouterr().out) != shares


AGAIN = "Start the same command again: the run goes on from its last checkpoint\n"


@pytest.mark.parametrize(
    "ends, statuses, said",
    [
        (["os.abort()", "os.kill(os.getpid(), 9)"], [-6, -9], f"process 1 was killed by SIGKILL. {AGAIN}"),
        (["os.kill(os.getpid(), 9)"] * 2, [-9, -9], f"process 0 was killed by SIGKILL. {AGAIN}"),
        (["os._exit(1)", "os._exit(2)"], [1, 2], f"process 0 ended with status 1. {AGAIN}"),
        (["os._exit(2)"] * 2, [2, 2], ""),
        (["os._exit(0)", "os._exit(1)"], [0, 1], ""),
    ],
)
def test_of_processes_found_dead_together_the_one_that_was_killed_is_said(ends, statuses, said, capsys):
    processes = [subprocess.Popen([sys.executable, "-c", f"import os; {end}"]) for end in ends]
    for process in processes:
        process.wait()
    assert module._wait(processes, []) == statuses
    assert capsys.readouterr().err == said


def test_of_others_that_still_run_it_is_said_that_they_end(monkeypatch, capsys):
    monkeypatch.setattr(module, "GRACE_SECONDS", 1)
    killed = "import os; os.kill(os.getpid(), 9)"
    processes = [subprocess.Popen([sys.executable, "-c", end]) for end in (killed, "import time; time.sleep(60)")]
    processes[0].wait()
    assert module._wait(processes, []) == [-9, -9]
    said = "process 0 was killed by SIGKILL: others cannot go on without it and end within 1 seconds. "
    assert capsys.readouterr().err == said + AGAIN


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("local",), "give the command after --"),
        (("local", "--processes", "0", "--", "true"), "--processes 0: must be at least 1"),
        (("nothing",), "unknown command nothing"),
        (("local", "--", "no/such/program"), "local: no/such/program cannot be started"),
    ],
)
def test_wrong_commands_are_one_line(arguments, said, capsys):
    assert of_tpu.main([*arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
