"""Real clusters on this machine: processes that train together, stop together, and whose run others go on with."""

import functools
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
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.signals import EXIT_STOPPED
from tests.pretrain import tiny
from tpu import chatter
from tpu import cluster as clusters
from tpu import local as module
from tpu.cluster import HEARTBEAT_SECONDS, detected, explicit, join

ROOT = Path(__file__).parent.parent.parent
STEPS = 40


class Cluster:
    """`python -m tpu local` around a run of the tiny BERT, or one with other arguments."""

    def __init__(self, corpus, workdir, processes, devices, *more, arguments=tiny.run_arguments):
        run = [sys.executable, "-m", "pretrain", *arguments(corpus, workdir, "--depth", "scan", *more)]
        command = [sys.executable, "-m", "tpu", "local", "--processes", processes, "--devices", devices, "--", *run]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*map(str, command)], cwd=ROOT, start_new_session=True, **pipes)
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


def losses(workdir):
    return {entry["step"]: entry["loss"] for entry in read_metrics(RunDirectory(workdir), "train")}


@pytest.fixture(scope="module")
def alone(corpus_path, tmp_path_factory):
    """The losses of one process with one device."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    status, _, error = tiny.run_command(*tiny.run_arguments(corpus_path, workdir, "--depth", "scan"))
    assert status == 0, error
    return losses(workdir)


@pytest.fixture(scope="module")
def stopped(corpus_path, tmp_path_factory):
    """(work directory, what was said) of two processes of which the second got SIGTERM."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    cluster = Cluster(corpus_path, workdir, 2, 2, "--mesh", "data=2,fsdp=2")
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


def test_one_process_goes_on_and_all_losses_are_those_of_one_device(stopped, alone, corpus_path):
    workdir, _ = stopped
    status, out, error = tiny.run_command(*tiny.run_arguments(corpus_path, workdir, "--depth", "scan"))
    assert status == 0, error
    assert "resuming from step" in out
    found = losses(workdir)
    assert sorted(found) == sorted(alone) == list(range(1, STEPS + 1))
    np.testing.assert_allclose([found[step] for step in alone], list(alone.values()), rtol=1e-5)


def test_when_a_process_is_killed_the_other_ends_and_the_cure_is_printed(corpus_path, tmp_path, monkeypatch):
    monkeypatch.setenv("PRETRAIN_HEARTBEAT_SECONDS", "20")
    cluster = Cluster(corpus_path, tmp_path / "run", 2, 1, "--steps", 10**6)
    while not RunDirectory(tmp_path / "run").checkpoint_steps():
        cluster.until(r"train +\d")
    os.kill(cluster.children()[0], signal.SIGKILL)
    began = time.monotonic()
    status, said = cluster.end()
    assert status == 1 and time.monotonic() - began < HEARTBEAT_SECONDS + 30
    assert "process 0 was killed by SIGKILL" in said and "Start the same command again" in said
    assert said.count("another process of this run died") == 1
    assert not re.search(r"Gloo|Traceback|stack trace|@ +0x|[EF]\d{4} ", said), said
    assert RunDirectory(tmp_path / "run").checkpoint_steps()


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
        status, said = Cluster(corpus_path, tmp_path / machines, 2, 1, "--steps", 8).end()
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


def faulty(corpus, workdir, fault, *more):
    """(status, output, seconds) of a run of two processes of which the second has this fault."""
    run = [sys.executable, "-c", WITH_A_FAULT.format(fault=fault), *tiny.run_arguments(corpus, workdir, *more)]
    command = [sys.executable, "-m", "tpu", "local", "--devices", 1, "--", *run]
    began = time.monotonic()
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


CANNOT_READ = """
    import pretrain.storage.stored_state as stored
    def fail(*_): raise ConnectionError("no route to the bucket")
    stored.PAUSES, stored._load = (), fail
"""


def test_a_process_that_cannot_read_the_checkpoint_ends_all_and_nothing_is_set_aside(stopped, corpus_path, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(stopped[0], workdir)
    before = RunDirectory(workdir).checkpoint_steps()
    status, said, seconds = faulty(corpus_path, workdir, CANNOT_READ)
    assert status == PassingError.status and seconds < 300, said
    assert re.search(r"\[1\] error: checkpoint .* cannot be read now \(no route to the bucket\)", said)
    assert re.search(r"\[0\] error: process 1: checkpoint .* cannot be read now", said)
    assert RunDirectory(workdir).checkpoint_steps() == before and "Traceback" not in said


CANNOT_BUILD = """
    import pretrain.training.loop as loop
    def fail(*_): raise OSError(5, "Input/output error")
    loop.place_rows = fail
"""


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


@pytest.mark.slow
def test_a_process_that_fails_while_the_others_compute_ends_them_too_with_its_reason(corpus_path, tmp_path):
    status, said, seconds = faulty(corpus_path, tmp_path / "run", CANNOT_BUILD)
    assert status == 2 and seconds < 300, said
    assert "Input/output error" in said and re.search(r"\[0\] error: .*process 1", said)


CANNOT_SAVE = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
"""


@pytest.mark.slow
def test_a_process_whose_disk_is_full_ends_all_with_its_reason_and_nobody_waits_for_it(corpus_path, tmp_path):
    status, said, seconds = faulty(corpus_path, tmp_path / "run", CANNOT_SAVE)
    assert status == 2 and seconds < 300, said
    assert re.search(r"\[1\] error: .*cannot write there", said) and re.search(r"\[0\] error: process 1 ended", said)
    assert "Traceback" not in said


@pytest.mark.slow
def test_four_processes_go_on_where_two_stopped(corpus_path, tmp_path, alone):
    cluster = Cluster(corpus_path, tmp_path / "run", 2, 2)
    cluster.until(r"train +3 ")
    os.kill(cluster.children()[0], signal.SIGTERM)
    assert cluster.end()[0] == EXIT_STOPPED
    status, said = Cluster(corpus_path, tmp_path / "run", 4, 1, "--mesh", "fsdp=4").end()
    assert status == 0 and "resuming from step" in said, said
    found = losses(tmp_path / "run")
    np.testing.assert_allclose([found[step] for step in alone], list(alone.values()), rtol=1e-5)


def test_two_processes_train_a_decoder_like_one_device(corpus_path, tmp_path):
    arguments = functools.partial(tiny.run_arguments, recipe="gpt2-tiny")
    few = ("--steps", "12")
    status, said = Cluster(corpus_path, tmp_path / "two", 2, 1, "--mesh", "fsdp=2", *few, arguments=arguments).end()
    assert status == 0, said
    status, _, error = tiny.run_command(*arguments(corpus_path, tmp_path / "one", "--depth", "scan", *few))
    assert status == 0, error
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    np.testing.assert_allclose([two[step] for step in one], list(one.values()), rtol=1e-5)


@pytest.mark.parametrize("recipe", ["transformer-xl-tiny", pytest.param("xlnet-tiny", marks=pytest.mark.slow)])
def test_a_memory_is_shared_out_over_processes(recipe, corpus_path, tmp_path):
    arguments = functools.partial(tiny.memory_arguments, recipe)
    cluster = Cluster(corpus_path, tmp_path / "two", 2, 2, "--mesh", "data=2,fsdp=2", arguments=arguments)
    status, said = cluster.end()
    assert status == 0, said
    status, _, error = tiny.run_command(*arguments(corpus_path, tmp_path / "one", "--depth", "scan"))
    assert status == 0, error
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    np.testing.assert_allclose([two[step] for step in one], list(one.values()), rtol=1e-5)
    evaluated = [read_metrics(RunDirectory(tmp_path / name), "eval")[-1]["loss"] for name in ("two", "one")]
    np.testing.assert_allclose(*evaluated, rtol=1e-5)
    saved = [tiny.final_state(tmp_path / name).carry["hidden"] for name in ("two", "one")]
    np.testing.assert_allclose(*saved, atol=1e-4)


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
def test_wrong_commands_are_one_line(arguments, said):
    done = subprocess.run([sys.executable, "-m", "tpu", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
