"""status, logs, stop, delete."""

import pytest

from tests.tpu.cloud import NOT_FOUND, OK, queue, report, vm
from tpu.__main__ import main

PLACE = ["--name", "n", "--zone", "z", "--project", "p"]


def test_status_shows_the_slice_and_every_worker(cloud, capsys):
    cloud.on("queued-resources describe", queue("ACTIVE"))
    cloud.on("tpu-vm describe", vm("READY"))
    cloud.on("report", report("running", "ended 134"))
    assert main(["status", *PLACE]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "queued resource: ACTIVE",
        "VM: READY v5litepod-16 HEALTHY",
        "t1v-n-w-0: running",
        "t1v-n-w-1: ended 134",
    ]
    assert all("--zone=z --project=p" in command for command in cloud.commands())


def test_status_of_a_request_in_line_and_of_nothing(cloud, capsys):
    cloud.on("tpu-vm describe", NOT_FOUND)
    cloud.on("queued-resources describe", queue("WAITING_FOR_RESOURCES"), NOT_FOUND)
    assert main(["status", *PLACE]) == 0
    assert capsys.readouterr().out == "queued resource: WAITING_FOR_RESOURCES\n"
    assert main(["status", *PLACE]) == 2
    assert capsys.readouterr().err == "error: --name n: nothing of that name in --zone z\n"


def test_status_does_not_ask_workers_that_are_gone(cloud, capsys):
    cloud.on("tpu-vm describe", vm("PREEMPTED"))
    cloud.on("queued-resources describe", NOT_FOUND)
    assert main(["status", *PLACE]) == 0
    assert capsys.readouterr().out == "VM: PREEMPTED v5litepod-16 HEALTHY\n"


def test_logs_shows_the_last_lines_of_a_worker(cloud, capsys):
    cloud.on("ssh", [0, "step 1\nstep 2\n", ""])
    assert main(["logs", *PLACE]) == 0
    assert main(["logs", *PLACE, "--worker", "3", "--lines", "7", "--follow"]) == 0
    first, second = cloud.commands()
    assert "--worker=0" in first and "tail -n 100 run/log.txt" in first
    assert "--worker=3" in second and "tail -n 7 -F run/log.txt" in second
    assert capsys.readouterr().out == "step 1\nstep 2\n" * 2


def test_stop_ends_the_run_on_all_workers_and_says_that_the_slice_costs(cloud, capsys):
    cloud.on("worker.sh stop", report("stopped 75", "stopped 75"))
    assert main(["stop", *PLACE]) == 0
    assert "--worker=all" in cloud.commands()[0]
    printed = capsys.readouterr().out
    assert "t1v-n-w-1: stopped 75" in printed
    assert "n still costs: python -m tpu delete --name n --zone z" in printed


def test_a_run_that_does_not_stop_is_an_error(cloud, capsys):
    cloud.on("worker.sh stop", report("stopped 75", "running"))
    assert main(["stop", *PLACE]) == 2
    assert "still running after 600 s: stop again, or delete" in capsys.readouterr().err


@pytest.mark.parametrize(
    "request_, command", [(NOT_FOUND, "tpu-vm delete n"), (queue("SUSPENDED"), "queued-resources delete n")]
)
def test_delete_takes_what_brought_the_slice(cloud, capsys, request_, command):
    cloud.on("describe", request_)
    cloud.on("delete", OK)
    assert main(["delete", *PLACE]) == 0
    assert f"{command} --zone=z --project=p" in cloud.commands()[-1]
    assert ("--force" in cloud.commands()[-1]) == ("queued" in command)
    assert "deleted: " in capsys.readouterr().out


def test_deleting_nothing_is_an_error(cloud, capsys):
    cloud.on("tpus", NOT_FOUND)
    assert main(["delete", *PLACE]) == 2
    assert "--name n: nothing of that name in --zone z" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, shown",
    [
        ("status", ["tpu-vm describe n", "queued-resources describe n", "worker.sh report"]),
        ("logs", ["tail -n 100 run/log.txt"]),
        ("stop", ["worker.sh stop 600"]),
        ("delete", ["queued-resources describe n", "queued-resources delete n", "tpu-vm delete n"]),
    ],
)
def test_a_dry_run_prints_the_commands_and_runs_none(cloud, capsys, command, shown):
    assert main([command, *PLACE, "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == len(shown)
    for line, text in zip(lines, shown, strict=True):
        assert line.startswith("gcloud compute tpus ") and text in line and "--zone=z --project=p" in line
    assert not (cloud.folder / "calls").exists()
