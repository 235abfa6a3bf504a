"""What a launcher reads in the states of a slice, in a log that grows and in hosts' reports."""

import pytest

from tpu.gcloud import Gcloud, Slice
from tpu.watch import news, outcome, read_reports, stage


def test_a_log_that_grows_gives_each_whole_line_once(cloud, tmp_path):
    here, shown = Gcloud(Slice("n", "z", None), str(tmp_path)), {}
    log = cloud.folder / "bucket/b/n/launch/log/n-w-0"
    log.mkdir(parents=True)

    def read():
        return news(here, "gs://b/n/launch", "n-w-0", here.objects("gs://b/n/launch"), shown)

    assert read() == []
    (log / "1.txt").write_text("step 1\nste")
    assert read() == ["step 1\n"]
    (log / "1.txt").write_text("step 1\nstep 2\n")
    (log / "2.txt").write_text("step 3\n")
    (cloud.folder / "bucket/b/n/launch/log/n-w-00").mkdir()
    (cloud.folder / "bucket/b/n/launch/log/n-w-00/1.txt").write_text("another host's\n")
    assert read() == ["step 2\n", "step 3\n"]
    past = len(cloud.commands)
    assert read() == [] and len(cloud.commands) == past + 1  # what has not grown is not read


@pytest.mark.parametrize(
    "states, meant",
    [
        ([], "missing"),
        (["WAITING_FOR_RESOURCES"], "in line"),
        (["PROVISIONING", "CREATING"], "passing"),
        (["ACTIVE"], "passing"),  # its VM is not listed yet
        (["ACTIVE", "READY"], "up"),
        (["ACTIVE", "READY", "CREATING"], "passing"),
        (["ACTIVE", "READY", "PREEMPTED"], "ended"),
        (["SUSPENDING", "PREEMPTED"], "ending"),
        (["ACTIVE", "REPAIRING"], "passing"),
    ],
)
def test_what_states_come_to(states, meant):
    assert stage({str(number): (state, "") for number, state in enumerate(states)}) == meant


@pytest.mark.parametrize(
    "reports, meant",
    [
        ({"a": (0, "done"), "b": (0, "done")}, (0, "a: done")),
        ({"a": (0, "done"), "b": (134, "lost")}, (0, "a: done")),  # one that left too early for the others' farewell
        ({"a": (75, "stopped"), "b": (134, "lost")}, (75, "a: stopped")),
        ({"a": (134, "lost"), "b": (137, "Killed")}, (137, "b: Killed")),
        ({"a": (2, "error: process 1 ended, and this one with it: x"), "b": (2, "error: x")}, (2, "b: error: x")),
        ({"a": (0, "done"), "b": (1, "ValueError")}, (1, "b: ValueError")),
    ],
)
def test_whose_report_is_the_runs(reports, meant):
    assert outcome(reports) == meant


def test_a_report_that_a_full_disk_left_empty_is_a_failure(cloud, tmp_path):
    here, ended = Gcloud(Slice("n", "z", None), str(tmp_path)), cloud.folder / "bucket/b/n/launch/ended"
    ended.mkdir(parents=True)
    (ended / "n-w-0").touch()
    read = lambda: read_reports(here, "gs://b/n/launch", here.objects("gs://b/n/launch"))
    assert read() == {"n-w-0": (1, "error: its report is empty: its disk is full")}
    (ended / "n-w-1").write_text("134 lost\n")
    assert outcome(read()) == (1, "n-w-0: error: its report is empty: its disk is full")
