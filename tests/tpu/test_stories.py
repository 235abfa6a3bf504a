"""Launches from their beginning to their end, in a cloud in which things go wrong; the hosts run the real script.

Each ends as who launched it would want: the run finished or said why not, the slice gone, each line of the log shown
once.
"""

import re

import pytest

from tests.tpu import cloud as google
from tests.tpu.cloud import Life
from tests.tpu.stories import ONE, TWO, gone, life, steps

# Nothing goes wrong


def test_a_spot_slice_is_deleted_when_the_run_is_done(cloud, end):
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert "n is deleted when the run has ended, well or not" in said
    assert "the run is done. The slice is deleted" in said


def test_one_on_demand_is_kept_and_that_is_said_at_the_beginning_and_the_end(cloud, end):
    cloud.lives["n-w-0"] = [life(1)]
    cloud.at.append([1000, lambda: None])
    status, said, lines = end(*ONE)
    assert (status, lines) == (0, steps(1))
    assert cloud.vms["n"]["state"] == "READY"
    assert said.count("costs until you run python -m tpu delete --name n --bucket gs://b") == 2


def test_several_hosts_finish_together(cloud, end):
    status, _, lines = end(*TWO, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert cloud.log("n-w-0") == cloud.log("n-w-1") == "step 1\nstep 2\n"


def test_the_dry_run_is_what_a_run_does_that_nothing_disturbs(cloud, end):
    _, _, shown = end(*TWO, "--dry-run")
    assert not cloud.commands
    cloud.wait = cloud.making = 0
    end(*TWO)
    commands = [re.sub(r"/[-0-9]+\.txt", "/START.txt", command) for command in cloud.commands]
    assert [line for line in shown if not line.startswith("#")] == commands


# Spot capacity


def test_what_is_preempted_is_made_again_and_goes_on(cloud, end):
    cloud.lives["n-w-0"] = [life(1, 2, end="preempted"), life(3)]
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2, 3)) and gone(cloud)
    assert cloud.created == 2
    assert "n was taken (SUSPENDED, PREEMPTED): made again in 30 s (49 restarts left)" in said


def test_preempted_again_and_again(cloud, end):
    cloud.lives["n-w-0"] = [life(number, end="preempted") for number in (1, 2, 3)] + [life(4)]
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2, 3, 4)) and gone(cloud)
    assert cloud.created == 4
    assert said.count("made again in 30 s") == 3  # a slice that has printed something was worth it


def test_the_restarts_are_counted_and_nothing_is_left_when_they_are_used(cloud, end):
    cloud.lives["n-w-0"] = [life(number, end="preempted") for number in range(9)]
    status, said, _ = end(*ONE, "--spot", "--restarts", "2")
    assert status == 2 and gone(cloud)
    assert cloud.created == 3
    assert "--restarts: all used; the same command goes on from the last checkpoint" in said


def test_a_request_that_is_suspended_before_it_was_ready(cloud, end):
    cloud.at.append([90, lambda: cloud.take("n")])
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert cloud.created == 2


# Capacity


def test_none_at_all_is_for_the_user_to_decide_about(cloud, end):
    cloud.full = [google.FULL]
    status, said, _ = end(*ONE)
    assert status == 2 and gone(cloud) and cloud.created == 1
    assert 'the request failed and is deleted: There is no more capacity in the zone "z"' in said


def test_none_after_a_preemption_is_waited_for(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end="preempted"), life(2)]
    cloud.at.append([70, lambda: cloud.full.extend([google.FULL] * 4)])
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert [int(seconds) for seconds in re.findall(r"made again in (\d+) s", said)] == [30, 60, 120, 240, 480]


def test_a_long_wait_in_line(cloud, end):
    cloud.wait = 40_000
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert said.count("WAITING_FOR_RESOURCES") == 1 and cloud.created == 1


def test_a_request_that_expires_is_taken_out_of_the_line(cloud, end):
    cloud.wait = 40_000
    failed = {"state": "FAILED", "failedData": {"error": {"code": 4, "message": "valid until 6h has passed"}}}
    cloud.at.append([21_600, lambda: cloud.requests.update(n=failed)])
    status, said, _ = end(*ONE, "--spot", "--valid-until-duration", "6h")
    assert status == 2 and gone(cloud)
    assert "the request failed and is deleted: valid until 6h has passed" in said
    assert any("--valid-until-duration=6h" in command for command in cloud.commands)


def test_too_small_a_quota(cloud, end):
    cloud.faults.append((" create ", google.QUOTA))
    status, said, _ = end(*ONE)
    assert status == 2 and gone(cloud) and "more than your project's quota: ask for more" in said


def test_stuck_in_creation(cloud, end):
    cloud.stuck = 1
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert cloud.created == 2
    assert "n was not made within 3600 s: made again" in said


# Google does not answer


@pytest.mark.parametrize("complaint", [google.UNAVAILABLE, google.CRASHED, google.OFFLINE])
def test_a_hiccup_while_a_slice_is_waited_for(cloud, end, complaint):
    cloud.at.append([40, lambda: cloud.faults.extend([(" list ", complaint)] * 9)])
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    waits = [int(seconds) for seconds in re.findall(r"does not answer .*: again in (\d+) s", said)]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_slice_whose_making_was_not_answered_is_not_made_twice(cloud, end):
    cloud.lost_answers.append((" create ", google.CRASHED))
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert cloud.created == 1


def test_a_slice_that_was_not_made_for_a_hiccup_is_made(cloud, end):
    cloud.faults.append((" create ", google.UNAVAILABLE))
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)


def test_another_machine_was_quicker(cloud, end):
    cloud.lost_answers.append((" create ", google.EXISTS))
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert cloud.created == 1


def test_a_reading_of_the_log_that_breaks_off_shows_no_line_twice(cloud, end):
    cloud.lost_answers.append(("/log/n-w-0/", google.CRASHED))
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)


def test_uploads_that_fail_on_the_host_are_made_again(cloud, end):
    (cloud.folder / "faults").write_text("/log/\n/log/\n/ended/\n")
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert not cloud.file("faults")
    assert cloud.log("n-w-0") == "step 1\nstep 2\n"


@pytest.mark.parametrize("text", ["", "null", "<html>502 Bad Gateway</html>"])
def test_a_listing_that_is_none_is_asked_for_again(cloud, end, monkeypatch, text):
    def disturb():
        answer, kinds = cloud.answer, ["queued-resources list", "tpu-vm list", "objects list"]

        def answer_oddly(command, folder):
            odd = next((kind for kind in kinds if kind in " ".join(command)), None)
            return (0, text, "") if odd and not kinds.remove(odd) else answer(command, folder)

        monkeypatch.setattr(cloud, "answer", answer_oddly)

    cloud.at.append([40, disturb])
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud) and cloud.created == 1
    assert said.count(f"does not answer (gcloud: UNAVAILABLE: it printed {text!r}): again in 5 s") == 3


# Hosts


@pytest.mark.parametrize("number", [134, 75])
def test_a_run_that_aborts_or_is_told_to_end_starts_again_on_its_slice(cloud, end, number):
    cloud.lives["n-w-0"] = [life(1, end=number), life(2, end=number), life(3)]
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2, 3)) and gone(cloud)
    assert cloud.created == 1
    assert {"40", "80"} <= set(cloud.file("slept").split())  # it backs off


def test_a_host_that_dies_alone_and_comes_back(cloud, end):
    both = (("n-w-0", 1), ("n-w-1", 1))
    cloud.lives["n-w-0"] = [life(1, end=134), Life("step 2", 0, both)]
    cloud.lives["n-w-1"] = [life(1, end="reboots"), Life("step 2", 0, both)]
    status, _, lines = end(*TWO, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert cloud.created == 1


def test_a_host_that_is_lost_while_its_vm_reads_ready(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end=134), *[Life(end=134)] * 5, life(2)]
    cloud.lives["n-w-1"] = [life(1, end="lost"), life(2)]
    status, said, lines = end(*TWO, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert cloud.created == 2
    assert "n-w-0: error: n-w-0 gave up after 6 starts without a new checkpoint: made again" in said


def test_the_host_script_that_is_killed_is_started_by_systemd(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end="reboots"), life(2)]
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)


@pytest.mark.parametrize("number, line", [(2, "error: --seed -1: must not be negative"), (1, "ValueError: an odd one")])
def test_a_run_that_fails_at_once_leaves_no_slice(cloud, end, number, line):
    cloud.lives["n-w-0"] = [Life(f"starts\n{line}\nand ends", number)]
    status, said, _ = end(*ONE, "--spot")
    assert status == number and gone(cloud)
    assert f"the run failed with status {number}: n-w-0: {line}. The slice is deleted" in said
    assert cloud.created == 1


def test_of_several_hosts_the_line_of_the_one_that_failed_is_shown(cloud, end):
    cloud.lives["n-w-0"] = [Life("error: process 1 ended, and this one with it: no space left", 2)]
    cloud.lives["n-w-1"] = [Life("error: --corpus gs://b/corpus: no space left on this host", 2)]
    status, said, _ = end(*TWO, "--spot")
    assert status == 2 and gone(cloud)
    assert "status 2: n-w-1: error: --corpus gs://b/corpus: no space left on this host." in said


def test_a_run_that_hangs_is_not_paid_for_for_ever(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end="lost"), life(2)]
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert "its hosts printed nothing for 9000 s: made again" in said


def test_the_others_abort_where_one_failed(cloud, end):
    """The one that aborts does not start again for ever."""
    cloud.lives["n-w-0"] = [life(1, end=134), *[Life(end=134)] * 5]
    cloud.lives["n-w-1"] = [Life("Killed", 137)]
    status, said, lines = end(*TWO, "--spot")
    assert status == 137 and gone(cloud) and cloud.created == 1
    assert "the run failed with status 137: n-w-1:" in said


def test_a_set_up_that_fails(cloud, end):
    (cloud.folder / "no-setup").touch()
    status, said, lines = end(*ONE, "--spot")
    assert status == 1 and gone(cloud)
    assert lines.count("make: *** no space left on device") == 7  # it is tried again, as a mirror may be down
    assert "the run failed with status 1: n-w-0: error: the set-up failed" in said


def test_hosts_that_may_not_read_the_bucket_delete_their_slice(cloud, end):
    (cloud.folder / "unavailable").write_text(google.REFUSED)
    (cloud.folder / "faults").write_text("storage cp\n" * 14 + "objects list\n" * 9)
    status, said, _ = end(*ONE, "--spot")
    assert status == 2 and gone(cloud)
    assert "or its hosts, which have no roles/storage.objectUser on gs://b/n/launch" in said
    tries = ["5", "10", "20", "40", "80", "160"]  # seconds: to read, to report
    assert cloud.file("slept").split() == tries * 2 + ["20"] * 9  # and no second start


def test_a_bucket_that_is_unavailable_for_a_while_is_waited_for(cloud, end):
    (cloud.folder / "faults").write_text("storage cp\n" * 14)
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud) and cloud.created == 1


def test_hosts_that_say_nothing_cost_no_longer_than_half_an_hour(cloud, end):
    cloud.boot = lambda *_: None
    status, said, _ = end(*ONE, "--spot")
    assert status == 2 and gone(cloud)
    assert "its hosts wrote nothing to gs://b/n/launch" in said and "It is deleted" in said
    assert 1800 < cloud.now < 2400


def test_nor_do_those_of_a_slice_that_was_made_again(cloud, end):
    def break_images():
        cloud.boot = lambda *_: None

    cloud.lives["n-w-0"] = [life(1, end="preempted")]
    cloud.at.append([140, break_images])
    status, said, lines = end(*ONE, "--spot")
    assert (status, gone(cloud), cloud.created, lines) == (2, True, 2, ["step 1"])
    assert "its hosts wrote nothing to gs://b/n/launch" in said and cloud.now < 2800


@pytest.mark.parametrize(
    "answer", [google.DENIED.splitlines()[-1], "ERROR: gcloud crashed (X): y"], ids=["denied", "crashed"]
)
def test_a_slice_that_may_not_delete_itself_says_so_at_once_and_the_launcher_deletes_it(cloud, end, answer):
    (cloud.folder / "denied").write_text(f"{answer}\n")
    status, _, lines = end(*ONE, "--spot")
    assert status == 0 and gone(cloud)
    needs = "for which its service account needs roles/tpu.admin"
    assert lines[0] == f"warning: this slice may not delete itself, {needs} ({answer})"
    assert lines[2:] == steps(1, 2)


def test_slices_that_train_together(cloud, end):
    status, _, lines = end(*ONE, "--spot", "--gcloud-flag=--node-count=2", "--gcloud-flag=--network=mine")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    [create] = [command for command in cloud.commands if " create " in command]
    assert "--node-prefix=n" in create and "--node-count=2 --network=mine" in create
    assert cloud.log("n-0-w-0") == cloud.log("n-1-w-0") == "step 1\nstep 2\n"
