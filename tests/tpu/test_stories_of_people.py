"""Launches that people interrupt, leave, stop, come back to and start again; as in `test_stories`."""

import pytest

from tests.tpu.cloud import COMPLAINTS as google
from tests.tpu.stories import NAME, ONE, SPOT, VAIN, Story, gone, interrupt, life, lives, steps
from tpu import launch
from tpu.__main__ import main

DELETED = Story(cloud={"wait": 4000}, at={500: lambda _: main(["delete", *NAME])}, status=75, lines=[])
STORIES = {
    "what someone deleted is not made again": DELETED._replace(
        at={500: lambda cloud: cloud.drop()}, status=2, said=("--name n: someone deleted it",)
    ),
    "delete on another machine ends who watches": DELETED._replace(said=("n is deleted; what is in the bucket stays",)),
    "a slice of another type is not taken": Story(
        ONE,
        {"vms": {"n": {"state": "READY", "acceleratorType": "v4-8"}}},
        status=2,
        lines=[],
        created=0,
        left=True,
        said=("--type v5litepod-8: n exists and is a v4-8: use another --name",),
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_launch_ends_as_one_would_want(cloud, end, story):
    story.check(cloud, end)


@pytest.fixture
def left(cloud, end):
    """A launch with these arguments that its user leaves soon."""

    def leave(*command, after=30):
        interrupt(cloud, after)
        assert end(*command)[0] == 130

    return leave


def test_left_alone_it_ends_and_costs_nothing_and_another_machine_shows_its_log(cloud, end, left):
    left(*SPOT)
    cloud.sleep(3600)
    assert gone(cloud)
    Story(said=("the run is done",)).check(cloud, end)


def test_a_kept_slice_does_not_take_up_a_run_for_another_one(cloud, end):
    cloud.lives = lives(life(1, end=2), life(2))
    assert end(*ONE)[0] == 2
    status, said, _ = end(*ONE, "--type", "v5e-4")
    assert status == 2 and "--name n: another slice of that name is in z: python -m tpu delete it first" in said
    cloud.sleep(3600)
    assert cloud.log("n-w-0") == "step 1\n"


def test_another_machine_makes_what_was_preempted_meanwhile(cloud, end, left):
    cloud.lives = lives(life(*range(1, 31), end="preempted"), life(31))
    left(*SPOT)
    cloud.sleep(3600)
    cloud.drop()
    code = cloud.commands.index(next(command for command in cloud.commands if "cp settings.sh" in command))
    Story(lines=steps(*range(11, 32)), created=2).check(cloud, end)  # the last lines, then what is new
    assert not any("storage cp" in command for command in cloud.commands[code + 1 :])  # it is the same run's code


FIRST_LINE = '# {"name": "n", "bucket": "gs://b", "zone": "z", "project": "p", "type": "v5litepod-8", "count": 1}'


RUN = "RUN=(bert-tiny --corpus gs://b/corpus --workdir gs://b/n"


@pytest.mark.parametrize(
    "first, other, kept",
    [
        ([], ["--type", "v5e-4"], FIRST_LINE),
        ([], ["--delete-when-ended"], "DELETE=()"),
        (["--steps", "5"], ["--steps", "6"], f"{RUN} --steps 5)"),
        (["--init-from", "gs://b/a\nb"], [], f"{RUN} --init-from 'gs://b/a"),
    ],
)
def test_what_is_not_as_in_the_run_that_goes_on_is_named(cloud, end, left, first, other, kept):
    left(*ONE, *first)
    status, said, _ = end(*ONE, *other)
    assert status == 2 and cloud.created == 1
    assert f"another command's run is going on there, with {kept}" in said
    assert ": python -m tpu stop or delete it first" in said


def test_a_failed_run_is_launched_again_with_the_code_of_now_and_waits_for_capacity(cloud, end):
    """It has printed something, whoever launched it."""
    cloud.lives = lives(life(1, end=1), life(2))
    assert end(*SPOT)[0] == 1
    said = Story(cloud={"full": [google.FULL] * 2}, lines=["step 2"], created=4).check(cloud, end)
    assert said.count("n was preempted (There is no more capacity") == 2
    assert " ".join(cloud.commands).count("storage cp code.tar.gz") == 2


def test_another_recipe_under_the_name_of_a_run_that_ended_writes_over_nothing_of_it(cloud, end):
    cloud.lives = lives(life(1), life(2))
    assert end(*SPOT)[0] == 0
    kept, (_, _, *others) = cloud.objects(), ONE
    settings = cloud.file("bucket/b/n/launch/settings.sh")
    status, said, _ = end("launch", "electra-tiny", *others, "--spot")
    assert status == 2 and cloud.created == 1
    assert "--name n: its work directory gs://b/n has a run of bert-tiny: give another --workdir, or use" in said
    assert cloud.objects() == kept and cloud.file("bucket/b/n/launch/settings.sh") == settings
    assert end("launch", "electra-tiny", *others, "--spot", "--workdir", "gs://b/m")[::2] == (0, ["step 2"])
    assert kept.items() <= cloud.objects().items()  # the old run's log is still there


def test_a_slice_that_is_kept_takes_the_next_run(cloud, end):
    cloud.lives = lives(life(1), life(2))
    assert end(*ONE, "--steps", "1")[0] == 0
    status, _, lines = end(*ONE, "--steps", "2")
    assert (status, lines) == (0, ["step 2"])
    assert cloud.created == 1 and cloud.file("arguments").endswith("--steps 2\n")


def test_a_run_that_is_stopped_is_no_failure_and_does_not_start_again(cloud, end):
    cloud.lives = lives(life(1, end="stop"), life(2))
    status, said, lines = end(*SPOT)
    assert (status, lines) == (75, ["step 1"]) and gone(cloud)
    assert "the run was stopped; the same command goes on. The slice is deleted" in said
    assert end(*SPOT)[::2] == (0, ["step 2"]) and gone(cloud)


def test_a_login_that_expires_ends_the_watching_and_not_the_run(cloud, end):
    said = ("no valid login: run gcloud auth login", "runs that were launched before go on")
    expire = {90: lambda cloud: cloud.faults.append((" list ", google.EXPIRED))}
    Story(at=expire, status=2, lines=[], said=said, left=True).check(cloud, end)
    cloud.sleep(3600)
    assert gone(cloud)
    Story().check(cloud, end)


def test_the_slice_of_another_run_whose_name_goes_on_with_a_number_is_none_of_this_one(cloud, end):
    cloud.vms["n-2"] = {"state": "READY", "acceleratorType": "v5litepod-8"}
    cloud.drop = lambda: [cloud.vms.pop("n", None), cloud.requests.clear()]
    status, _, lines = end(*SPOT)
    assert (status, lines) == (0, steps(1, 2)) and list(cloud.vms) == ["n-2"]


def test_a_kept_slice_that_gave_up_is_not_made_again(cloud, end):
    """What is reserved may not come back."""
    cloud.lives = lives(life(1, end=134), *VAIN, life(2))
    status, said, _ = end(*ONE)
    assert status == 134 and cloud.created == 1 and cloud.vms["n"]["state"] == "READY"
    assert "gave up after 6 starts" in said and said.count("costs until you run python -m tpu delete") == 2
    assert end(*ONE)[::2] == (0, ["step 2"]) and cloud.created == 1


@pytest.mark.parametrize("refusals, status", [(3, 0), (99, 2)])
def test_deleting_that_is_refused_for_a_while(cloud, end, refusals, status):
    cloud.stuck = 1
    cloud.faults += [(" delete ", google.BUSY)] * refusals
    ended, said, _ = end(*SPOT)
    assert ended == status and gone(cloud) == (status == 0)
    assert (
        "it still exists and costs money (the request is PROVISIONING, n is CREATING): gcloud: FAILED_PRECONDITION"
        in said
    ) == (status == 2)


def test_an_upload_that_is_interrupted_is_made_again_by_the_same_command(cloud, end, monkeypatch):
    storage = cloud.storage

    def broken_off(words, folder, flags):
        if words[0] != "cp":
            return storage(words, folder, flags)
        storage([words[0], *words[-2:]], folder, flags)  # gcloud copies several files at once: any may be there first
        monkeypatch.setattr(cloud, "storage", storage)
        raise KeyboardInterrupt

    monkeypatch.setattr(cloud, "storage", broken_off)
    assert end(*SPOT)[0] == 130
    Story().check(cloud, end)
    assert (cloud.folder / "bucket/b/n/launch/code.tar.gz").exists()


def test_of_two_launches_at_the_same_time_in_two_zones_one_is_made(cloud, end, monkeypatch):
    pack = launch.pack

    def another_is_quicker(*words):
        monkeypatch.setattr(launch, "pack", pack)
        interrupt(cloud, 0)
        assert main([*SPOT, "--zone", "y"]) == 130
        return pack(*words)

    monkeypatch.setattr(launch, "pack", another_is_quicker)
    status, said, _ = end(*SPOT)
    assert status == 2 and "--name: someone else is launching it now" in said
    assert cloud.created == 1 and "--zone=y" in cloud.file("bucket/b/n/launch/settings.sh")


@pytest.mark.parametrize("command", [[*SPOT], ["delete", *NAME], ["stop", *NAME]])
def test_a_slice_of_that_name_whose_run_is_in_another_bucket_is_left_alone(cloud, end, command):
    assert end(*SPOT)[0] == 0
    theirs = cloud.file("bucket/b/n/launch/settings.sh").replace("gs://b", "gs://theirs")
    cloud.vms["n"] = {"state": "READY", "acceleratorType": "v5litepod-8", "metadata": {"pretrain-settings": theirs}}
    (cloud.folder / "bucket/b/n/launch/ended/n-w-0").write_text("1 error: to be launched again\n")
    status, said, _ = end(*command)
    assert (
        status == 2 and cloud.vms and "--name n: belongs to another bucket's run in z of p: use another --name" in said
    )
