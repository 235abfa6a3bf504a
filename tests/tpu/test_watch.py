"""What a launcher reads in the states of a slice, in a log that grows and in hosts' reports."""

import pytest

from tests.tpu.cloud import COMPLAINTS as google
from tests.tpu.stories import ONE, gone
from tpu.gcloud import Gcloud, Slice
from tpu.watch import CUT, news, outcome, read_reports, stage


@pytest.fixture
def here(cloud, tmp_path):
    (cloud.folder / "bucket/b/n/launch/log/n-w-0").mkdir(parents=True)
    (cloud.folder / "bucket/b/n/launch/ended").mkdir()
    return Gcloud(Slice("n", "gs://b", "z", "p", "v4-8"), str(tmp_path))


@pytest.fixture
def log(cloud, here):
    """Its folder, and what reads on from what was read before."""
    shown = {}
    return cloud.folder / "bucket/b/n/launch/log/n-w-0", lambda: news(here, here.objects(), shown)


def test_a_log_that_grows_gives_each_whole_line_once(cloud, log):
    folder, read = log
    assert read() == []
    (folder / "1.txt").write_text("step 1\nste")
    assert read() == ["step 1\n"]
    (folder / "1.txt").write_text("step 1\nstep 2\n")
    (folder / "2.txt").write_text("step 3\n")
    (cloud.folder / "bucket/b/n/launch/log/n-w-00").mkdir()
    (cloud.folder / "bucket/b/n/launch/log/n-w-00/1.txt").write_text("another host's\n")
    assert read() == ["step 2\n", "step 3\n"]
    assert any("--range=7-" in command for command in cloud.commands)  # what was read is not read again
    past = len(cloud.commands)
    assert read() == [] and len(cloud.commands) == past + 1  # nor what has not grown


def test_a_log_that_is_cut_in_a_letter_or_is_no_text_gives_each_line_once(log):
    folder, read = log
    whole = "é 中\r\n".encode() + b"\xff\xfe\n" + "50%\r100%\n\x85 中\n".encode()
    found = []
    for size in range(len(whole) + 1):
        (folder / "1.txt").write_bytes(whole[:size])
        found += read()
    assert "".join(found) == whole.decode(errors="replace")


def test_a_reading_that_breaks_off_is_read_again_from_where_it_began(cloud, log):
    folder, read = log
    (folder / "1.txt").write_text("step 1\n")
    (folder / "2.txt").write_text("step 2\n")
    cloud.lost_answers.append(("/2.txt", google.CRASHED))
    assert read() == ["step 1\n", "step 2\n"]
    (folder / "2.txt").write_text("step 2\nstep 3\n")
    cloud.faults.append(("/2.txt", google.UNAVAILABLE))
    assert read() == ["step 3\n"]


def test_a_new_machine_writes_a_new_file_which_is_read_from_its_beginning(log):
    folder, read = log
    (folder / "20260101-000000-1.txt").write_text("step 1\nstep 2\nste")  # taken in mid-line
    assert read() == ["step 1\n", "step 2\n"]
    (folder / "20260101-000001-1.txt").write_text("step 2\n")
    assert read() == ["step 2\n"]


@pytest.mark.parametrize(
    "states, meant",
    [
        ([], "missing"),
        (["WAITING_FOR_RESOURCES"], "in line"),
        (["ACTIVE"], "passing"),  # its VM is not listed yet
        (["ACTIVE", "READY"], "up"),
        (["ACTIVE", "READY", "CREATING"], "passing"),
        (["ACTIVE", "READY", "PREEMPTED"], "ended"),
        (["SUSPENDING", "PREEMPTED"], "ending"),
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
    ],
)
def test_whose_report_is_the_runs(reports, meant):
    assert outcome(reports) == meant


@pytest.mark.parametrize("cut", ["", "134 lo"])
def test_a_report_that_a_full_disk_cut_off_is_a_failure_and_none_of_anothers(cloud, here, cut):
    ended = cloud.folder / "bucket/b/n/launch/ended"
    for name, text in (("n-w-0", cut), ("n-w-1", "134 lost\n")):
        (ended / name).write_text(text)
    reports = read_reports(here, here.objects())
    assert reports == {"n-w-0": CUT, "n-w-1": (134, "lost")}
    assert outcome(reports) == (1, "n-w-0: error: its report is empty or cut off: its disk is full")


@pytest.mark.parametrize("at_last, status", [("0 done\n", 0), ("0 do", 1)])
def test_a_report_that_is_cut_off_is_waited_for_but_not_for_ever(cloud, end, at_last, status):
    cloud.boot = lambda *_: None
    ended = cloud.folder / "bucket/b/n/launch/ended/n-w-0"

    def report(text):
        ended.parent.mkdir(exist_ok=True)
        ended.write_text(text)

    cloud.at += [[200, lambda: report("0")], [260, lambda: report(at_last)]]
    assert end(*ONE, "--spot")[0] == status and gone(cloud)
    assert cloud.now < 600
