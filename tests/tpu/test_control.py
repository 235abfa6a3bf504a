"""status, logs, stop, delete, with no more than the run's name and bucket."""

import re

import pytest

from tests.tpu.cloud import INSTALLING, Life
from tests.tpu.stories import NAME, TWO, interrupt
from tpu.__main__ import main


@pytest.fixture
def waiting(cloud, capsys):
    """A run whose slice waits in line, and nobody watches."""
    interrupt(cloud, 30)
    assert main(TWO) == 130
    capsys.readouterr()
    return cloud


def test_status_of_a_request_in_line_of_hosts_and_of_nothing(waiting, capsys):
    assert main(["status", *NAME]) == 0
    assert capsys.readouterr().out == "the request: WAITING_FOR_RESOURCES\n"
    waiting.lives["n-w-0"] = [Life("step 1", "lost")]
    waiting.lives["n-w-1"] = [Life("error: the disk is full", 2)]
    waiting.sleep(200)
    assert main(["status", *NAME]) == 0
    assert re.sub(r"\d{4}-[^ ]+\+0000\n", "TIME\n", capsys.readouterr().out).splitlines() == [
        "the request: ACTIVE",
        "n: READY v4-16",
        "n-w-0: last heard TIME",
        "n-w-1: ended with 2 error: the disk is full",
    ]
    waiting.drop()
    main(["status", *NAME])
    assert capsys.readouterr().out.startswith("n: not there\n")


@pytest.mark.parametrize("command", ["status", "logs", "stop", "delete"])
def test_a_run_that_was_never_launched_and_a_bucket_that_is_none(cloud, capsys, command):
    assert main([command, "--name", "n", "--bucket", "b"]) == 2
    assert capsys.readouterr().err == "error: --bucket b: must be a Cloud Storage path such as gs://my-bucket\n"
    assert cloud.commands == []
    assert main([command, *NAME]) == 2
    assert capsys.readouterr().err == "error: --name n: launch has no run of that name in gs://b\n"


def test_logs_are_those_of_a_host_over_all_its_starts(waiting, capsys):
    assert main(["logs", *NAME]) == 2
    assert "printed nothing yet; hosts with a log: none" in capsys.readouterr().err
    waiting.lives["n-w-0"] = [Life("step 1\nstep 2", 134), Life("step 3", 0)]
    waiting.lives["n-w-1"] = [Life("other 1", 134), Life("other 2", 0)]
    waiting.sleep(200)
    for words, printed in ([], "step 1\nstep 2\nstep 3\n"), (["--host", "n-w-1"], "other 1\nother 2\n"):
        assert main(["logs", *NAME, *words]) == 0
        assert capsys.readouterr().out.replace(INSTALLING, "") == printed
    assert main(["logs", *NAME, "--host", "n-w-7"]) == 2
    assert "--host n-w-7: printed nothing yet; hosts with a log: n-w-0, n-w-1" in capsys.readouterr().err


def test_stop_waits_until_the_run_has_ended(waiting, capsys):
    waiting.lives = {host: [Life("step 1", "told")] for host in ("n-w-0", "n-w-1")}
    assert main(["stop", *NAME]) == 0
    printed = capsys.readouterr().out
    assert "n: READY v4-16\nn-w-0: ended with 75 stopped\n" in printed
    assert printed.endswith("[launch] n costs until you run python -m tpu delete --name n --bucket gs://b\n")


def test_a_run_that_does_not_stop_is_an_error(waiting, capsys):
    waiting.wait = 1e9
    waiting.at = []
    assert main(["stop", *NAME]) == 2
    cure = "see python -m tpu status, then stop again, or python -m tpu delete"
    assert f"--name n: has not ended in 900 s: {cure}" in capsys.readouterr().err


def test_a_slice_is_deleted_in_the_project_that_was_gclouds_at_launch(cloud, capsys):
    assert main(["launch", "bert-tiny", *NAME, "--zone", "z", "--type", "v5e-8"]) == 0
    cloud.project = "other\n"
    assert main(["delete", *NAME]) == 0 and not cloud.vms
    tpus = [command for command in cloud.commands if " tpus " in command]
    assert len(tpus) > 4 and all("--project=p " in command for command in tpus)


def test_delete_where_nothing_is_does_not_say_that_it_deleted(waiting, capsys):
    waiting.drop()
    assert main(["delete", *NAME]) == 0
    assert capsys.readouterr().out == "[launch] no slice of that name in z of p; nothing was deleted\n"
