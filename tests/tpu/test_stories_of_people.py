"""Launches that people interrupt, leave, stop, come back to and start again; as in `test_stories`."""

import pytest

from tests.tpu import cloud as google
from tests.tpu.cloud import Life
from tests.tpu.stories import NAME, ONE, gone, life, steps
from tpu import launch
from tpu.__main__ import main


def interrupt(cloud, seconds):
    def press():
        raise KeyboardInterrupt

    cloud.at.append([seconds, press])


def test_left_alone_it_ends_and_costs_nothing_and_another_machine_shows_its_log(cloud, end):
    interrupt(cloud, 30)
    assert end(*ONE, "--spot")[0] == 130
    cloud.sleep(3600)
    assert gone(cloud)
    created = cloud.created
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2))
    assert "the run is done" in said and cloud.created == created == 1


def test_another_machine_comes_back_while_it_goes_on(cloud, end):
    interrupt(cloud, 30)
    end(*ONE, "--spot")
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert "this run was launched before" in said and cloud.created == 1


def test_another_machine_does_not_take_a_run_that_is_silent_for_one_that_never_spoke(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end="lost"), life(2)]
    interrupt(cloud, 300)
    assert end(*ONE, "--spot")[0] == 130
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud)
    assert "its hosts printed nothing for 9000 s: made again" in said


@pytest.mark.parametrize("other", [["--zone", "y"], ["--type", "v5e-4"]])
def test_a_kept_slice_does_not_take_up_a_run_for_another_one(cloud, end, other):
    cloud.lives["n-w-0"] = [life(1, end=2), life(2)]
    assert end(*ONE)[0] == 2
    status, said, _ = end(*ONE, *other)
    assert status == 2 and "--name n: another slice of that name is in z: python -m tpu delete it first" in said
    cloud.sleep(3600)
    assert cloud.log("n-w-0") == "step 1\n"


def test_another_machine_makes_what_was_preempted_meanwhile(cloud, end):
    cloud.lives["n-w-0"] = [Life("\n".join(steps(*range(1, 31))), "preempted"), life(31)]
    interrupt(cloud, 30)
    end(*ONE, "--spot")
    cloud.sleep(3600)
    cloud.drop()
    code = cloud.commands.index(next(command for command in cloud.commands if "cp settings.sh" in command))
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(*range(11, 32))) and gone(cloud)  # the last lines, then what is new
    assert not any("storage cp" in command for command in cloud.commands[code + 1 :])  # it is the same run's code


def test_another_run_of_that_name_is_refused_while_the_first_goes_on(cloud, end):
    interrupt(cloud, 30)
    end(*ONE, "--spot", "--steps", "5")
    status, said, _ = end(*ONE, "--spot", "--steps", "6")
    assert status == 2
    assert "another command's run is going on there, with RUN=(bert-tiny --corpus" in said
    assert "--steps 5): python -m tpu stop or delete it first" in said


FIRST_LINE = '# {"name": "n", "bucket": "gs://b", "zone": "z", "project": "p", "type": "v5litepod-8", "count": 1}'


@pytest.mark.parametrize(
    "other, kept",
    [
        (["--type", "v5e-4"], FIRST_LINE),
        (["--type", "v5e-8", "--delete-when-ended"], "DELETE=()"),
        (["--type", "v5e-8", "--zone", "y"], FIRST_LINE),
    ],
)
def test_what_is_not_as_in_the_run_that_goes_on_is_named(cloud, end, other, kept):
    interrupt(cloud, 30)
    assert end(*ONE)[0] == 130
    status, said, _ = end(*ONE, *other)
    assert status == 2 and cloud.created == 1
    assert f"another command's run is going on there, with {kept}: python -m tpu stop" in said


def test_a_failed_run_is_launched_again_with_the_code_of_now(cloud, end, checkout):
    cloud.lives["n-w-0"] = [life(1, end=1), life(2)]
    assert end(*ONE, "--spot")[0] == 1
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, ["step 2"]) and gone(cloud)
    assert cloud.created == 2 and " ".join(cloud.commands).count("storage cp code.tar.gz") == 2


def test_a_run_that_has_printed_something_waits_for_capacity_whoever_launches_it(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end=1), life(2)]
    assert end(*ONE, "--spot")[0] == 1
    cloud.full = [google.FULL] * 2
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, ["step 2"]) and gone(cloud)
    assert said.count("n was taken (There is no more capacity") == 2


def test_another_recipe_under_the_name_of_a_run_that_ended_writes_over_nothing_of_it(cloud, end):
    cloud.lives["n-w-0"] = [life(1), life(2)]
    assert end(*ONE, "--spot")[0] == 0
    kept, (_, _, *others) = cloud.objects(), ONE
    settings = cloud.file("bucket/b/n/launch/settings.sh")
    status, said, _ = end("launch", "electra-tiny", *others, "--spot")
    assert status == 2 and cloud.created == 1
    assert "--name n: its work directory gs://b/n has a run of bert-tiny: give another --workdir, or use" in said
    assert cloud.objects() == kept and cloud.file("bucket/b/n/launch/settings.sh") == settings
    assert end("launch", "electra-tiny", *others, "--spot", "--workdir", "gs://b/m")[::2] == (0, ["step 2"])
    assert kept.items() <= cloud.objects().items()  # the old run's log is still there


def test_a_slice_that_is_kept_takes_the_next_run(cloud, end):
    cloud.lives["n-w-0"] = [life(1), life(2)]
    assert end(*ONE, "--steps", "1")[0] == 0
    status, _, lines = end(*ONE, "--steps", "2")
    assert (status, lines) == (0, ["step 2"])
    assert cloud.created == 1 and cloud.file("arguments").endswith("--steps 2\n")


def test_a_run_that_is_stopped_is_no_failure_and_does_not_start_again(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end="stop"), life(2)]
    status, said, lines = end(*ONE, "--spot")
    assert (status, lines) == (75, ["step 1"]) and gone(cloud)
    assert "the run was stopped; the same command goes on. The slice is deleted" in said
    assert end(*ONE, "--spot")[::2] == (0, ["step 2"]) and gone(cloud)


def test_what_was_asked_to_stop_while_it_was_away_goes_on_by_the_same_command(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end="preempted"), life(2)]
    interrupt(cloud, 200)
    assert end(*ONE, "--spot")[0] == 130
    cloud.drop()
    (cloud.folder / "bucket/b/n/launch/stop").write_text("stop\n")
    assert end(*ONE, "--spot")[::2] == (0, steps(1, 2)) and gone(cloud)


def test_what_someone_deleted_is_not_made_again(cloud, end):
    cloud.wait = 4000
    cloud.at.append([500, cloud.drop])
    status, said, _ = end(*ONE, "--spot")
    assert status == 2 and gone(cloud) and cloud.created == 1
    assert "--name n: someone deleted it" in said


def test_delete_on_another_machine_ends_who_watches(cloud, end):
    cloud.wait = 4000
    cloud.at.append([500, lambda: main(["delete", *NAME])])
    status, said, _ = end(*ONE, "--spot")
    assert status == 75 and gone(cloud) and cloud.created == 1
    assert "n is deleted; what is in the bucket stays" in said


def test_a_login_that_expires_ends_the_watching_and_not_the_run(cloud, end):
    cloud.at.append([90, lambda: cloud.faults.append((" list ", google.EXPIRED))])
    status, said, _ = end(*ONE, "--spot")
    assert status == 2 and "no valid login: run gcloud auth login" in said
    assert "a run that was launched goes on by itself" in said
    cloud.sleep(3600)
    assert gone(cloud)
    assert end(*ONE, "--spot")[::2] == (0, steps(1, 2))


def test_the_slice_of_another_run_whose_name_goes_on_with_a_number_is_none_of_this_one(cloud, end):
    cloud.vms["n-2"] = {"state": "READY", "acceleratorType": "v5litepod-8"}
    cloud.drop = lambda: [cloud.vms.pop("n", None), cloud.requests.clear()]
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and list(cloud.vms) == ["n-2"]


def test_a_slice_of_another_type_is_not_taken(cloud, end):
    cloud.vms["n"] = {"state": "READY", "acceleratorType": "v4-8"}
    status, said, _ = end(*ONE)
    assert status == 2 and "--type v5litepod-8: n exists and is a v4-8: use another --name" in said
    assert cloud.created == 0


def test_a_kept_slice_that_gave_up_is_not_made_again(cloud, end):
    """What is reserved may not come back."""
    cloud.lives["n-w-0"] = [life(1, end=134), *[Life(end=134)] * 5, life(2)]
    status, said, _ = end(*ONE)
    assert status == 134 and cloud.created == 1 and cloud.vms["n"]["state"] == "READY"
    assert "gave up after 6 starts" in said and said.count("costs until you run python -m tpu delete") == 2
    assert end(*ONE)[::2] == (0, ["step 2"]) and cloud.created == 1


def test_a_kept_slice_that_hangs_is_not_made_again(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end="lost")]
    status, said, _ = end(*ONE)
    assert status == 2 and cloud.created == 1 and cloud.vms["n"]["state"] == "READY"
    assert "--name n: its hosts printed nothing for 9000 s. It costs until you run python -m tpu delete" in said


@pytest.mark.parametrize("refusals, status", [(3, 0), (99, 2)])
def test_deleting_that_is_refused_for_a_while(cloud, end, refusals, status):
    cloud.stuck = 1
    cloud.faults += [(" delete ", google.BUSY)] * refusals
    ended, said, _ = end(*ONE, "--spot")
    assert ended == status and gone(cloud) == (status == 0)
    assert ("it still costs (the request is PROVISIONING, n is CREATING): gcloud: FAILED_PRECONDITION" in said) == (
        status == 2
    )


def test_what_ended_is_removed_by_another_launcher_first(cloud, end):
    cloud.lives["n-w-0"] = [life(1, end=134), *[Life(end=134)] * 5, life(2)]
    cloud.lost_answers.append(("storage rm", google.NO_BUCKET))
    assert end(*ONE, "--spot")[::2] == (0, steps(1, 2)) and gone(cloud)


def test_a_command_with_a_line_break_is_told_as_another(cloud, end):
    interrupt(cloud, 30)
    end(*ONE, "--spot", "--init-from", "gs://b/a\nb")
    status, said, _ = end(*ONE, "--spot")
    assert status == 2 and "another command's run is going on there, with RUN=(bert-tiny --corpus" in said


def test_one_slice_is_no_number_of_slices(cloud, end):
    assert end(*ONE, "--spot", "--gcloud-flag=--node-count=1")[::2] == (0, steps(1, 2))
    [create] = [command for command in cloud.commands if " create " in command]
    assert "--node-id=n" in create and "--node-count" not in create


def test_delete_ends_who_watches_a_kept_slice_without_a_word_on_costs(cloud, end):
    cloud.wait = 4000
    cloud.at.append([500, lambda: main(["delete", *NAME])])
    status, said, _ = end(*ONE)
    assert status == 75 and gone(cloud)
    assert "The slice is deleted" in said and said.count("costs until") == 1


@pytest.mark.parametrize("way", [[], ["--spot"]])
def test_what_was_made_after_delete_looked_is_deleted_too(cloud, end, monkeypatch, way):
    create = cloud.create

    def create_after_delete(*words):
        monkeypatch.setattr(cloud, "create", create)
        assert main(["delete", *NAME]) == 0
        create(*words)

    monkeypatch.setattr(cloud, "create", create_after_delete)
    status, said, _ = end(*ONE, *way)
    assert status == 75 and "The slice is deleted" in said and gone(cloud)


def test_an_upload_that_is_interrupted_is_made_again_by_the_same_command(cloud, end, monkeypatch):
    storage = cloud.storage

    def broken_off(words, folder, flags):
        if words[0] != "cp":
            return storage(words, folder, flags)
        storage([words[0], *words[-2:]], folder, flags)  # gcloud copies several files at once: any may be there first
        monkeypatch.setattr(cloud, "storage", storage)
        raise KeyboardInterrupt

    monkeypatch.setattr(cloud, "storage", broken_off)
    assert end(*ONE, "--spot")[0] == 130
    assert end(*ONE, "--spot")[::2] == (0, steps(1, 2)) and gone(cloud)
    assert (cloud.folder / "bucket/b/n/launch/code.tar.gz").exists()


@pytest.mark.parametrize("before", [[], ["--steps", "1"]])
def test_of_two_launches_at_the_same_time_in_two_zones_one_is_made(cloud, end, monkeypatch, before):
    if before:
        assert end(*ONE, "--spot", *before)[0] == 0
    created, pack = cloud.created, launch.pack

    def another_is_quicker(*words):
        monkeypatch.setattr(launch, "pack", pack)
        interrupt(cloud, 0)
        assert main([*ONE, "--spot", "--zone", "y"]) == 130
        return pack(*words)

    monkeypatch.setattr(launch, "pack", another_is_quicker)
    status, said, _ = end(*ONE, "--spot")
    assert status == 2 and "--name: somebody else launches it now" in said
    assert cloud.created == created + 1 and "--zone=y" in cloud.file("bucket/b/n/launch/settings.sh")


def test_reports_of_the_run_before_that_an_interrupted_launch_left_are_none_of_this_one(cloud, end, monkeypatch):
    cloud.lives["n-w-0"] = [life(1), life(2)]
    assert end(*ONE, "--spot", "--steps", "1")[0] == 0
    storage = cloud.storage

    def press(words, *others):
        if words[0] != "rm":
            return storage(words, *others)
        monkeypatch.setattr(cloud, "storage", storage)
        raise KeyboardInterrupt

    monkeypatch.setattr(cloud, "storage", press)
    assert end(*ONE, "--spot", "--steps", "2")[0] == 130
    assert end(*ONE, "--spot", "--steps", "2")[::2] == (0, steps(1, 2)) and gone(cloud)  # the log, and what is new
    assert end(*ONE, "--spot", "--steps", "2")[::2] == (0, steps(1, 2)) and cloud.created == 2  # it is done


@pytest.mark.parametrize("command", [[*ONE, "--spot"], ["delete", *NAME], ["stop", *NAME]])
def test_a_slice_of_that_name_whose_run_is_in_another_bucket_is_left_alone(cloud, end, command):
    assert end(*ONE, "--spot")[0] == 0
    theirs = cloud.file("bucket/b/n/launch/settings.sh").replace("gs://b", "gs://theirs")
    cloud.vms["n"] = {"state": "READY", "acceleratorType": "v5litepod-8", "metadata": {"pretrain-settings": theirs}}
    (cloud.folder / "bucket/b/n/launch/ended/n-w-0").write_text("1 error: to be launched again\n")
    status, said, _ = end(*command)
    assert status == 2 and cloud.vms and "--name n: is of another bucket's run in z of p: use another --name" in said


def test_a_slice_that_its_hosts_are_to_delete_is_no_slice_for_the_next_run(cloud, end):
    """They may not, or are about to."""

    def press():
        raise KeyboardInterrupt

    (cloud.folder / "denied").write_text(google.DENIED)
    cloud.lives["n-w-0"] = [life(1, end=2), life(2)]
    cloud.at.append([70, lambda: cloud.after(50, press)])  # when its hosts have ended
    assert end(*ONE, "--spot")[0] == 130 and cloud.vms
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines[-1]) == (0, "step 2") and gone(cloud) and cloud.created == 2


def test_a_slice_that_another_launcher_makes_again_is_awaited(cloud, end):
    cloud.making = 900

    def make_again():
        there = cloud.vms, cloud.requests
        cloud.vms, cloud.requests = {}, {}
        cloud.after(60, lambda: [cloud.vms.update(there[0]), cloud.requests.update(there[1])])

    cloud.at.append([200, make_again])
    status, _, lines = end(*ONE, "--spot")
    assert (status, lines) == (0, steps(1, 2)) and gone(cloud) and cloud.created == 1
