"""Launches from their beginning to their end, in a cloud in which things go wrong; the hosts run the real script.

Each ends as who launched it would want: the run finished or said why not, the slice gone, each line of the log shown
once.
"""

import re

import pytest

from tests.tpu.cloud import COMPLAINTS as google
from tests.tpu.cloud import Life
from tests.tpu.stories import ONE, SPOT, TWO, VAIN, Story, gone, life, lives, steps

BOTH = (("n-w-0", 1), ("n-w-1", 1))
FULL = 'the request failed and is deleted: There is no more capacity in the zone "z"'
COSTS = "costs until you run python -m tpu delete --name n --bucket gs://b"
STORIES = {
    "a spot slice is deleted when the run is done": Story(
        said=("n is deleted when the run ends, successfully or not", "the run is done. The slice is deleted")
    ),
    "several hosts finish together": Story([*TWO, "--spot"]),
    # Spot capacity
    "the restarts are counted and nothing is left when they are used": Story(
        [*SPOT, "--restarts", "2"],
        {"lives": lives(*[life(number, end="preempted") for number in range(9)])},
        status=2,
        lines=steps(0, 1, 2),
        created=3,
        said=("--restarts: all used; the same command goes on from the last checkpoint",),
    ),
    "a request is suspended before it was ready": Story(at={90: lambda cloud: cloud.take("n")}, created=2),
    # Capacity
    "none at all is for the user to decide about": Story(
        ONE, {"full": [google.FULL]}, status=2, lines=[], said=(FULL,)
    ),
    "stuck in creation": Story(cloud={"stuck": 1}, created=2, said=("n was not created within 3600 s: recreating",)),
    # Google does not answer
    "a slice whose making was not answered is not made twice": Story(
        cloud={"lost_answers": [(" create ", google.CRASHED)]}
    ),
    "a bucket that is unavailable for a while is waited for": Story(files={"faults": "storage cp\n" * 14}),
    # Hosts
    "a host that dies alone comes back": Story(
        [*TWO, "--spot"],
        {
            "lives": lives(
                life(1, end=134), Life("step 2", 0, BOTH), second=[life(1, end="reboots"), Life("step 2", 0, BOTH)]
            )
        },
    ),
    "a run that hangs is not paid for for ever": Story(
        cloud={"lives": lives(life(1, end="lost"), life(2))},
        created=2,
        said=("its hosts printed nothing for 9000 s: recreating",),
    ),
    "the others abort where one failed, which start again not for ever": Story(
        [*TWO, "--spot"],
        {"lives": lives(life(1, end=134), *VAIN, second=[Life("Killed", 137)])},
        status=137,
        lines=None,
        said=("the run failed with status 137: n-w-1:",),
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_launch_ends_as_one_would_want(cloud, end, story):
    story.check(cloud, end)


def test_one_on_demand_is_kept_and_that_is_said_at_the_beginning_and_the_end(cloud, end):
    said = Story(ONE, {"lives": lives(life(1))}, at={1000: lambda _: None}, lines=steps(1), left=True).check(cloud, end)
    assert cloud.vms["n"]["state"] == "READY" and said.count(COSTS) == 2


def test_the_dry_run_is_what_a_run_does_that_nothing_disturbs(cloud, end):
    _, _, shown = end(*TWO, "--dry-run")
    assert not cloud.commands
    cloud.wait = cloud.making = 0
    end(*TWO)
    commands = [re.sub(r"/[-0-9]+\.txt", "/START.txt", command) for command in cloud.commands]
    assert [line for line in shown if not line.startswith("#")] == commands


def test_preempted_again_and_again(cloud, end):
    often = lives(*[life(number, end="preempted") for number in (1, 2, 3)], life(4))
    taken = ("n was preempted (SUSPENDED, PREEMPTED): recreating the slice in 30 s (49 restarts left)",)
    said = Story(cloud={"lives": often}, lines=steps(1, 2, 3, 4), created=4, said=taken).check(cloud, end)
    assert said.count("recreating the slice in 30 s") == 3  # a slice that has printed something was worth it


def test_no_capacity_after_a_preemption_is_waited_for(cloud, end):
    fill = {70: lambda cloud: cloud.full.extend([google.FULL] * 4)}
    story = Story(cloud={"lives": lives(life(1, end="preempted"), life(2))}, at=fill, created=6)
    waits = re.findall(r"recreating the slice in (\d+) s", story.check(cloud, end))
    assert waits == ["30", "60", "120", "240", "480"]


def test_a_long_wait_in_line(cloud, end):
    assert Story(cloud={"wait": 8_000}).check(cloud, end).count("WAITING_FOR_RESOURCES") == 1


def test_a_hiccup_while_a_slice_is_waited_for(cloud, end):
    said = Story(at={40: lambda cloud: cloud.faults.extend([(" list ", google.CRASHED)] * 9)}).check(cloud, end)
    waits = re.findall(r"does not answer .*: again in (\d+) s", said)
    assert waits == ["5", "10", "20", "40", "80", "160", "300", "300", "300"]


def test_uploads_that_fail_on_the_host_are_made_again(cloud, end):
    Story(files={"faults": "/log/\n/log/\n/ended/\n"}).check(cloud, end)
    assert not cloud.file("faults")
    assert cloud.log("n-w-0") == "step 1\nstep 2\n"


@pytest.mark.parametrize("text", ["null", "<html>502 Bad Gateway</html>"])
def test_a_listing_that_is_none_is_asked_for_again(cloud, end, monkeypatch, text):
    def disturb(cloud):
        answer, kinds = cloud.answer, ["queued-resources list", "tpu-vm list", "objects list"]

        def answer_oddly(command, folder):
            odd = next((kind for kind in kinds if kind in " ".join(command)), None)
            return (0, text, "") if odd and not kinds.remove(odd) else answer(command, folder)

        monkeypatch.setattr(cloud, "answer", answer_oddly)

    said = Story(at={40: disturb}).check(cloud, end)
    assert said.count(f"does not answer (gcloud: UNAVAILABLE: it printed {text!r}): again in 5 s") == 3


@pytest.mark.parametrize("number", [134, 75])
def test_a_run_that_aborts_or_is_told_to_end_starts_again_on_its_slice(cloud, end, number):
    often = lives(life(1, end=number), life(2, end=number), life(3))
    Story(cloud={"lives": often}, lines=steps(1, 2, 3)).check(cloud, end)
    assert {"40", "80"} <= set(cloud.file("slept").split())  # it backs off


def test_a_run_that_fails_at_once_leaves_no_slice(cloud, end):
    line = "error: --seed -1: must not be negative"
    said = (f"the run failed with status 2: n-w-0: {line}. The slice is deleted",)
    failing = lives(Life(f"starts\n{line}\nand ends", 2))
    Story(cloud={"lives": failing}, status=2, lines=["starts", line, "and ends"], said=said).check(cloud, end)


def test_a_set_up_that_fails(cloud, end):
    (cloud.folder / "no-setup").touch()
    status, said, lines = end(*SPOT)
    assert status == 1 and gone(cloud)
    assert lines.count("make: *** no space left on device") == 7  # it is tried again, as a mirror may be down
    assert "the run failed with status 1: n-w-0: error: the set-up failed" in said


def test_hosts_that_may_not_read_the_bucket_delete_their_slice(cloud, end):
    faults = {"unavailable": google.REFUSED, "faults": "storage cp\n" * 14 + "objects list\n" * 9}
    said = ("or its hosts, which have no roles/storage.objectUser on gs://b/n/launch",)
    Story(files=faults, status=2, lines=[], said=said).check(cloud, end)
    tries = ["5", "10", "20", "40", "80", "160"]  # seconds: to read, to report
    assert cloud.file("slept").split() == tries * 2 + ["20"] * 9  # and no second start


def silence(cloud):
    cloud.boot = lambda *_: None


def test_hosts_that_say_nothing_cost_no_longer_than_half_an_hour(cloud, end):
    said = ("its hosts wrote nothing to gs://b/n/launch", "It is deleted")
    Story(at={0: silence}, status=2, lines=[], said=said).check(cloud, end)
    assert 1800 < cloud.now < 2400


def test_a_slice_that_may_not_delete_itself_says_so_at_once_and_the_launcher_deletes_it(cloud, end):
    answer = google.DENIED.strip()
    (cloud.folder / "denied").write_text(google.DENIED)
    status, _, lines = end(*SPOT)
    assert status == 0 and gone(cloud)
    needs = "for which its service account needs roles/tpu.admin"
    assert lines[0] == f"warning: this slice may not delete itself, {needs} ({answer})"
    assert lines[2:] == steps(1, 2)


def test_slices_that_train_together(cloud, end):
    Story([*SPOT, "--gcloud-flag=--node-count=2", "--gcloud-flag=--network=mine"]).check(cloud, end)
    [create] = [command for command in cloud.commands if " create " in command]
    assert "--node-prefix=n" in create and "--node-count=2 --network=mine" in create
    assert cloud.log("n-0-w-0") == cloud.log("n-1-w-0") == "step 1\nstep 2\n"
