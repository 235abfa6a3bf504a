"""Real clusters on this machine: processes that train together, stop together, and whose run others go on with."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from data_pipelines.errors import PassingError, UserError
from pretrain.__main__ import main
from pretrain.recipe import to_json
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.signals import EXIT_STOPPED
from tests.pretrain import tiny, toys
from tpu import __main__ as of_tpu
from tpu import chatter
from tpu import local as module
from tpu.cluster import HEARTBEAT_SECONDS, detected, explicit, join

ROOT = Path(__file__).parent.parent.parent
STEPS = 24


def arguments(corpus, workdir, recipe, *more):
    """Of `run` for the toy, or for a decoder with a memory."""
    few = ("--depth", "scan", "--steps", STEPS, "--checkpoint-every", 8, "--eval-every", 2, *more)
    if recipe != "toy":
        return [*map(str, tiny.memory_arguments(recipe, corpus, workdir, *few))]
    file = workdir.parent / "toy.json"
    file.write_text(to_json(toys.recipe()))
    given = ("--recipe", file, "--corpus", corpus, "--workdir", workdir, "--log-every", 1, "--eval-examples", 16)
    return ["run", *map(str, (*given, *few))]


# `python -m pretrain`, so slow that a signal finds it at work
PRETRAIN = """
import time
import pytest
from data_pipelines.command_line import end_with
from pretrain.__main__ import main
from pretrain.training import loop
from tests.pretrain import toys

def place_rows(*given, at_once=loop.place_rows):
    time.sleep(0.1)
    return at_once(*given)

toys.register(pytest.MonkeyPatch())
loop.place_rows = place_rows
end_with(main)
"""


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


SLOW = [pytest.param(f"{name}-tiny", marks=pytest.mark.slow) for name in ("transformer-xl", "xlnet")]


@pytest.fixture(scope="module", params=["toy", *SLOW])
def recipe(request):
    """All have a carry."""
    with pytest.MonkeyPatch.context() as patch:
        toys.register(patch)
        yield request.param


@pytest.fixture(scope="module")
def stopped(recipe, corpus_path, tmp_path_factory):
    """(work directory, what was said) of two processes of which the second got SIGTERM."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    mesh = "data=4" if recipe == "toy" else "data=2,fsdp=2"  # the toy's vocabulary is odd
    given = arguments(corpus_path, workdir, recipe, "--mesh", mesh)
    cluster = Cluster(2, 2, ["-c", PRETRAIN, *given])
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
    """All losses, evaluations and the carry at the end are those of one process with one device."""
    assert main(arguments(corpus, folder / "one", recipe)) == 0
    for kind, every in ("train", 1), ("eval", 2):
        found, alone = losses(workdir, kind), losses(folder / "one", kind)
        assert sorted(found) == sorted(alone) == list(range(every, STEPS + 1, every))
        np.testing.assert_allclose([found[step] for step in alone], list(alone.values()), rtol=1e-5)
    ended, alone = (tiny.final_state(run).carry for run in (workdir, folder / "one"))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4), ended, alone)


def test_one_process_goes_on_and_all_losses_are_those_of_one_device(stopped, recipe, corpus_path, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(stopped[0], workdir)
    assert main(arguments(corpus_path, workdir, recipe)) == 0
    assert "resuming from step" in capsys.readouterr().out
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


CANNOT_READ = """
import os
if os.environ["JAX_PROCESS_ID"] == "1":
    import pretrain.storage.checkpoints as stored
    def fail(*_): raise ConnectionError("no route to the bucket")
    stored.PAUSES, stored._load = (), fail
"""


def test_a_process_that_fails_ends_all_with_its_reason(stopped, recipe, corpus_path, tmp_path):
    """Nobody waits for it, and no checkpoint is set aside."""
    workdir = tmp_path / "run"
    shutil.copytree(stopped[0], workdir)
    before = RunDirectory(workdir).checkpoint_steps()
    given = arguments(corpus_path, workdir, recipe)
    status, said = Cluster(2, 1, ["-c", CANNOT_READ + PRETRAIN, *given]).end(timeout=300)
    assert status == PassingError.status, said
    assert re.search(r"\[0\] error: process 1: checkpoint .* cannot be read now", said), said
    assert re.search(r"\[1\] error: checkpoint .* route to the", said), said
    assert RunDirectory(workdir).checkpoint_steps() == before and "Traceback" not in said


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
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 4, False),  # who says it there is not asked again
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
    with pytest.raises(UserError, match="both must be whole numbers"):
        explicit(names | {"JAX_PROCESS_ID": "one"})


@pytest.mark.parametrize("address", ["", "localhost", "localhost:port", "a b:7000", "localhost:123456"])
def test_an_address_without_a_port_and_half_of_the_options_are_errors(address):
    with pytest.raises(UserError, match="give HOST:PORT of process 0"):
        join(address, 2, 0)
    with pytest.raises(UserError, match="--processes and --process missing"):
        join("localhost:1", None, None)


AGAIN = "Start the same command again: the run goes on from its last checkpoint\n"


@pytest.mark.parametrize(
    "ends, statuses, said",
    [
        (["os.abort()", "os.kill(os.getpid(), 9)"], [-6, -9], f"process 1 was killed by SIGKILL. {AGAIN}"),
        (["os._exit(1)", "os._exit(2)"], [1, 2], f"process 0 ended with status 1. {AGAIN}"),
        (["os._exit(2)"] * 2, [2, 2], ""),
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
