"""Launching: what is run, in which order, and what starts again. gcloud is a stand-in that fails as gcloud does."""

import shlex
import tarfile

import pytest

from tests.tpu.cloud import NOT_FOUND, OK, REFUSED, failing, queue, report, vm
from tpu import launch
from tpu.__main__ import main

ON = ["--name", "n", "--zone", "z", "--project", "p"]
LAUNCH = ["launch", "bert-tiny", *ON, "--type", "v5e-16", "--bucket", "gs://b"]
NEW = ["describe", "create", "describe"]
RUN = ["scp", "setup", "start", "follow", "report"]


@pytest.fixture(autouse=True)
def _small_code(checkout):
    pass


def test_a_launch_creates_installs_starts_and_follows(cloud, naps, capsys):
    cloud.otherwise_healthy()
    assert main([*LAUNCH, "--steps", "3", "--spot"]) == 0
    assert cloud.story() == ["storage ls", *NEW, *RUN]
    listed, _, create, _, copy, setup, start, follow, _ = cloud.commands()
    assert "gs://b/corpus/manifest.json" in listed
    assert "tpu-vm create n --zone=z --project=p --accelerator-type=v5litepod-16" in create
    assert "--version=v2-alpha-tpuv5-lite --spot" in create
    assert "pretrain-code.tar.gz n: --zone=z --project=p --worker=all" in copy
    assert "--worker=all" in setup
    assert "worker.sh start bert-tiny --corpus gs://b/corpus --workdir gs://b/n --steps 3'" in start
    assert "--worker=all" in start
    assert "--worker=0" in follow
    printed = capsys.readouterr().out
    assert "step 1\nstep 2\n" in printed
    assert "creating n: v5litepod-16, chips 16 (4x4), hosts 4, in z" in printed
    assert "the run is done" in printed
    assert "python -m tpu delete --name n --zone z" in printed
    assert not naps


def test_of_several_corpora_each_is_looked_for(cloud, naps):
    cloud.otherwise_healthy()
    main([*LAUNCH, "--corpus", "en=gs://c/en/,zh=corpora/zh"])
    assert [command.split()[2] for command in cloud.commands()[:2]] == ["ls", "ls"]
    assert "gs://c/en/manifest.json" in cloud.commands()[0] and "gs://b/corpora/zh/manifest.json" in cloud.commands()[1]
    assert any("--corpus en=gs://c/en,zh=gs://b/corpora/zh --workdir" in command for command in cloud.commands())


def test_corpus_workdir_and_image_can_be_named(cloud, naps):
    cloud.otherwise_healthy()
    main([*LAUNCH, "--corpus", "gs://c/d", "--workdir", "gs://e/f", "--runtime-version", "image"])
    assert "gs://c/d/manifest.json" in cloud.commands()[0]
    assert "--version=image" in cloud.commands()[2]
    assert any("--corpus gs://c/d --workdir gs://e/f" in command for command in cloud.commands())


def test_arguments_arrive_as_they_were_given(cloud, naps):
    cloud.otherwise_healthy()
    given = ["--init-from", "gs://b/it's $HOME; *"]
    assert main([*LAUNCH, *given]) == 0
    start = next(command for command in cloud.commands() if "worker.sh start" in command)
    remote = next(argument for argument in shlex.split(start) if "worker.sh start" in argument)
    assert shlex.split(remote)[-2:] == given  # as the host's shell takes it apart


def test_no_restarts_are_one_start(cloud, naps):
    cloud.otherwise_healthy()
    assert main([*LAUNCH, "--restarts", "0"]) == 0


def test_what_git_tracks_is_copied_and_nothing_else(checkout, tmp_path):
    with tarfile.open(launch.pack(checkout, tmp_path / "code.tar.gz")) as tar:
        assert sorted(tar.getnames()) == [".commit", "Makefile", "tpu/worker.sh"]


def test_without_git_there_is_nothing_to_copy(cloud, naps, tmp_path, monkeypatch, capsys):
    (tmp_path / "plain").mkdir()
    monkeypatch.setattr(launch, "ROOT", tmp_path / "plain")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    assert "launch copies the files that git tracks" in capsys.readouterr().err


def test_ssh_refused_twice_is_tried_again(cloud, naps, capsys):
    cloud.on("describe", NOT_FOUND, vm("READY"))
    cloud.on("scp", REFUSED, REFUSED, OK)
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 0
    assert cloud.story() == ["storage ls", *NEW, "scp", "describe", "scp", "describe", *RUN]
    assert naps == [5, 10]
    assert "ssh to n does not get through: again in 5 s" in capsys.readouterr().out


def test_ssh_that_stays_refused_is_an_error_with_the_cure(cloud, naps, capsys):
    cloud.on("scp", REFUSED)
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    said = capsys.readouterr().err
    assert "is port 22 open (gcloud compute firewall-rules create allow-ssh --allow=tcp:22)" in said
    assert said.count("\n") == 1
    assert naps == [5, 10, 20, 40, 80]


def test_a_preempted_slice_is_made_again_and_the_run_goes_on_in_the_same_workdir(cloud, naps, capsys):
    states = [NOT_FOUND, vm("READY"), *[vm("PREEMPTED")] * 3, NOT_FOUND, vm("READY")]
    cloud.on("tpu-vm describe", *states)
    cloud.on("follow", [255, "step 1\n", REFUSED[2]], [0, "step 2\n", ""])
    cloud.on("report", REFUSED, report("ended 0"))
    cloud.otherwise_healthy()
    assert main([*LAUNCH, "--spot"]) == 0
    again = ["describe", "queued-resources describe", "delete", *NEW, *RUN]
    assert cloud.story() == ["storage ls", *NEW, *RUN, "describe", "describe", *again]
    assert len({command for command in cloud.commands() if "worker.sh start" in command}) == 1
    assert [" create " in command and "--spot" in command for command in cloud.commands()].count(True) == 2
    printed = capsys.readouterr().out
    assert "the VM is gone: again in 30 s (50 restarts left)" in printed
    assert "n is PREEMPTED: deleting it" in printed
    assert naps == [30]


def test_waiting_for_capacity_after_a_preemption_backs_off_and_ends(cloud, naps, capsys):
    full = failing('There is no more capacity in the zone "z"; you can try in another zone')
    cloud.on("tpu-vm describe", NOT_FOUND, vm("READY"), *[vm("PREEMPTED")] * 3, NOT_FOUND)
    cloud.on("create", OK, full)
    cloud.on("follow", REFUSED)
    cloud.on("report", REFUSED)
    cloud.otherwise_healthy()
    assert main([*LAUNCH, "--restarts", "8"]) == 2
    assert naps == [30, 60, 120, 240, 480, 960, 1800, 1800]
    assert "--restarts 8: all used; the same command goes on from the last checkpoint" in capsys.readouterr().err


def test_a_slice_that_the_user_deleted_is_not_made_again(cloud, naps, capsys):
    cloud.on("tpu-vm describe", NOT_FOUND, vm("READY"), NOT_FOUND)
    cloud.on("follow", REFUSED)
    cloud.on("report", REFUSED)
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    assert cloud.story().count("create") == 1
    assert "--name n: someone deleted it; the same command makes it again and goes on" in capsys.readouterr().err


def test_a_run_that_was_told_to_end_starts_again_on_the_same_slice(cloud, naps):
    cloud.on("tpu-vm describe", NOT_FOUND, vm("READY"))
    cloud.on("report", report("ended 75"), report("ended 75", "running"), report("ended 0"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 0
    second = ["describe", "describe", "describe", "report", "kill", *RUN]
    assert cloud.story() == ["storage ls", *NEW, *RUN, *second]
    assert naps == [60, 30]


def test_a_run_that_was_stopped_by_the_user_is_left_alone(cloud, naps, capsys):
    cloud.on("report", report("stopped 75"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 75
    assert cloud.story() == ["storage ls", *NEW, *RUN]
    assert "the run was stopped (status 75); the same command goes on" in capsys.readouterr().out


@pytest.mark.parametrize("status, slept", [(2, []), (1, [60])])
def test_a_run_that_fails_on_a_healthy_slice_is_not_started_again(cloud, naps, capsys, status, slept):
    cloud.otherwise_healthy(status)
    assert main(LAUNCH) == status
    assert naps == slept
    assert cloud.story().count("start") == 1
    assert f"the run failed with status {status}" in capsys.readouterr().out


def test_a_run_that_dies_with_its_slice_starts_again(cloud, naps):
    cloud.on("tpu-vm describe", NOT_FOUND, vm("READY"), *[vm("TERMINATED")] * 3, NOT_FOUND, vm("READY"))
    cloud.on("report", report("ended 134"), report("ended 0"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 0
    assert cloud.story().count("create") == 2
    assert naps == [60, 30]


def test_the_log_goes_on_where_the_connection_broke(cloud, naps, capsys):
    cloud.on("follow 0", [255, "step 1\nstep 2\n", REFUSED[2]])
    cloud.on("follow 2", [0, "step 3\n", ""])
    cloud.on("report", report("running"), report("ended 0"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 0
    assert "step 1\nstep 2\n[launch] reconnecting\nstep 3\n" in capsys.readouterr().out


def test_a_queued_resource_is_waited_for(cloud, naps, capsys):
    waiting = [NOT_FOUND, queue("WAITING_FOR_RESOURCES"), queue("WAITING_FOR_RESOURCES"), queue("PROVISIONING")]
    cloud.on("queued-resources describe", *waiting, queue("ACTIVE"))
    cloud.otherwise_healthy()
    assert main([*LAUNCH, "--queued", "--spot"]) == 0
    ask = "queued-resources describe"
    assert cloud.story() == ["storage ls", "describe", ask, "queued-resources create", *[ask] * 4, "describe", *RUN]
    create = cloud.commands()[3]
    assert "queued-resources create n --zone=z --project=p --node-id=n --accelerator-type=v5litepod-16" in create
    assert "--runtime-version=v2-alpha-tpuv5-lite --spot" in create
    printed = capsys.readouterr().out
    assert printed.count("n is WAITING_FOR_RESOURCES") == 1
    assert "n is PROVISIONING" in printed
    assert naps == [20, 20, 20]


def test_a_suspended_queued_resource_is_replaced(cloud, naps):
    cloud.on("queued-resources describe", *[queue("SUSPENDED")] * 2, NOT_FOUND, queue("ACTIVE"))
    cloud.on("tpu-vm describe", NOT_FOUND, NOT_FOUND, vm("READY"))
    cloud.otherwise_healthy()
    assert main([*LAUNCH, "--queued"]) == 0
    assert cloud.story().count("queued-resources delete") == 1
    assert cloud.story().index("queued-resources delete") < cloud.story().index("queued-resources create")
    assert any("delete n --zone=z --project=p --force --quiet" in command for command in cloud.commands())


def test_a_queued_resource_that_fails_says_why(cloud, naps, capsys):
    failed = queue("FAILED", failedData={"error": {"code": 8, "message": "Valid until time has passed"}})
    cloud.on("queued-resources describe", NOT_FOUND, failed)
    cloud.otherwise_healthy()
    assert main([*LAUNCH, "--queued"]) == 2
    assert "--queued: the request failed (Valid until time has passed)" in capsys.readouterr().err


def test_the_same_command_comes_back_to_a_run_that_goes_on(cloud, naps, capsys):
    cloud.on("tpu-vm describe", vm("READY"))
    cloud.on("report", report("running", "running"), report("ended 0"))
    cloud.on("lines", [0, "120\n", ""])
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 0
    assert cloud.story() == ["storage ls", "describe", "describe", "report", "start", "lines", "follow", "report"]
    assert any("follow 100" in command for command in cloud.commands())
    assert "the run on n is going on" in capsys.readouterr().out


def test_another_run_on_the_slice_is_not_disturbed(cloud, naps, capsys):
    cloud.on("tpu-vm describe", vm("READY"))
    cloud.on("start", [3, "", "another run is going on here: python -m pretrain run bert-base\n"])
    cloud.on("report", report("running"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    said = capsys.readouterr().err
    assert "another run is going on here: python -m pretrain run bert-base" in said
    assert "python -m tpu stop first, or use another --name" in said


def test_a_slice_of_another_type_is_not_taken(cloud, naps, capsys):
    cloud.on("tpu-vm describe", vm("READY", "v4-8"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    assert "--type v5litepod-16: n exists and is a v4-8: use another --name" in capsys.readouterr().err
    assert "create" not in cloud.story()


def test_a_name_that_is_taken_meanwhile(cloud, naps, capsys):
    cloud.on("create", failing("ALREADY_EXISTS: Resource 'projects/p/locations/z/nodes/n' already exists"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    assert "--name n: exists already in z: use another --name, or python -m tpu delete first" in capsys.readouterr().err


def test_an_installation_that_fails_shows_its_last_line(cloud, naps, capsys):
    cloud.on("setup", [2, "", "SSH: Attempting to connect to worker 0...\nmake: *** no space left on device\n"])
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    assert "ended with status 2: make: *** no space left on device" in capsys.readouterr().err
    assert "start" not in cloud.story()


def test_a_lost_login_while_following_says_that_the_run_goes_on(cloud, naps, capsys):
    cloud.on("follow", failing("There was a problem refreshing your current auth tokens: expired"))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    said = capsys.readouterr().err
    assert "gcloud auth login" in said
    assert "The run itself goes on: the same command comes back to it" in said


def test_an_interrupt_leaves_the_run_alone(cloud, naps, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_follow", interrupted)
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 130
    assert "left n as it is. The same command comes back to it" in capsys.readouterr().out
    assert cloud.story() == ["storage ls", *NEW, "scp", "setup", "start"]


@pytest.mark.parametrize(
    "extra, said",
    [
        (["--phases.0.batch-size", "24"], "batch_size=24 is not a multiple of --microbatches 1 x the 16 parts"),
        (["--type", "v3-64"], "batch_size=32 is not a multiple of --microbatches 1 x the 64 parts"),  # two to a chip
        (["--microbatches", "4"], "the mesh data=16: choose a multiple of 64"),
        (["--mesh", "data=3"], "--mesh data=3: it takes 3 devices, there are 16"),
        (["--attention", "splash", "--dtype", "float32"], "--attention splash does not work here: --dtype is float32"),
        (["--stepz", "5"], "unknown option --stepz; did you mean --steps?"),
    ],
)
def test_what_could_not_run_there_is_said_before_anything_is_made(cloud, extra, said, capsys):
    assert main([*LAUNCH, *extra]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (cloud.folder / "calls").exists()


@pytest.mark.parametrize("more", [["--mesh", "data=4,tensor=4", "--microbatches", "8"], ["--mesh", "fsdp=16"]])
def test_a_mesh_of_the_run_is_that_of_the_slice(cloud, naps, more):
    cloud.otherwise_healthy()
    assert main([*LAUNCH, *more]) == 0
    assert any(" ".join(more) in command for command in cloud.commands() if "worker.sh start" in command)


@pytest.mark.parametrize("extra", [[], ["--queued"]])
def test_a_dry_run_prints_the_commands_of_the_real_one_and_runs_none(cloud, naps, capsys, extra):
    assert main([*LAUNCH, *extra, "--dry-run", "--steps", "3"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert not (cloud.folder / "calls").exists()
    cloud.on("queued-resources describe", NOT_FOUND, queue("ACTIVE"))
    cloud.otherwise_healthy()
    assert main([*LAUNCH, *extra, "--steps", "3"]) == 0
    ran = [command.replace(f"scp {launch.ARCHIVE}", "scp") for command in cloud.commands()]
    folder = next(word for word in " ".join(ran).split() if word.endswith(launch.ARCHIVE))
    assert shown[:-1] == [command.replace(folder, launch.ARCHIVE) for command in ran]
    assert " delete n " in shown[-1]
