"""What gcloud prints when it fails, and the one line that the user reads."""

import pytest

from tests.tpu.cloud import REFUSED, failing
from tpu.__main__ import main
from tpu.gcloud import failure

PLACE = ["--name", "n", "--zone", "z"]
LAUNCH = ["launch", "bert-tiny", *PLACE, "--type", "v5e-16", "--bucket", "gs://b"]
CREATE = [
    (
        "RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone z.",
        "--type, --zone z: more than your project's quota: ask for more",
    ),
    (
        'There is no more capacity in the zone "z"; you can try in another zone where Cloud TPU Nodes are offered',
        "--zone z: has none of these TPUs free now: try another --zone, or wait in line with --queued",
    ),
    (
        '{"code": 8, "message": "Insufficient capacity."}',
        "--zone z: has none of these TPUs free now",
    ),
    (
        "INVALID_ARGUMENT: Cloud TPU received a bad request. the accelerator v5litepod-16 was not found in zone z",
        "--type: not offered in --zone z: gcloud compute tpus accelerator-types list --zone=z",
    ),
    (
        "INVALID_ARGUMENT: Cloud TPU received a bad request. runtime_version v2-alpha is not valid",
        "--runtime-version: not offered in --zone z: gcloud compute tpus tpu-vm versions list --zone=z",
    ),
    (
        "PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on resource '//tpu.googleapis.com/projects/p'",
        "ask for roles/tpu.admin and roles/iam.serviceAccountUser",
    ),
    ("INTERNAL: an odd thing\nhappened", "error: gcloud: INTERNAL: an odd thing happened\n"),
]
LOOK = [
    (
        "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login",
        "gcloud has no valid login: run gcloud auth login",
    ),
    (
        "There was a problem refreshing auth tokens for account a@b.c: invalid_grant: Bad Request",
        "gcloud has no valid login: run gcloud auth login",
    ),
    (
        "The required property [project] is not currently set.",
        "--project is missing: give it, or gcloud config set project ID",
    ),
    (
        "PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is disabled.",
        "the Cloud TPU API is off in this project: gcloud services enable tpu.googleapis.com",
    ),
    (
        "PERMISSION_DENIED: Permission denied on 'locations/z' (or it may not exist).",
        "--zone z: no such zone, or none with TPUs: gcloud compute tpus locations list",
    ),
]


@pytest.mark.parametrize("step, text, said", [("create", *case) for case in CREATE] + [("describe", *c) for c in LOOK])
def test_a_launch_that_cannot_have_its_slice_says_why_and_what_to_do(cloud, naps, checkout, capsys, step, text, said):
    cloud.on(f"tpu-vm {step}", failing(text))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert cloud.story()[-1] == step
    assert not naps


@pytest.mark.parametrize("text", ["One or more URLs matched no objects.", "gs://b not found: 404."])
def test_a_corpus_that_is_not_in_the_bucket_is_said_before_a_slice_is_made(cloud, naps, checkout, capsys, text):
    cloud.on("storage ls", failing(text))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    said = "--corpus gs://b/corpus: no corpus can be read there: copy one there: gcloud storage cp -r corpora/mine/*"
    assert said in capsys.readouterr().err
    assert cloud.story() == ["storage ls"]


def test_without_a_login_the_corpus_is_not_blamed(cloud, naps, checkout, capsys):
    cloud.on("storage ls", failing("You do not currently have an active account selected."))
    assert main(LAUNCH) == 2
    assert "error: gcloud has no valid login: run gcloud auth login" in capsys.readouterr().err


def test_an_ssh_agent_without_the_key(cloud, naps, checkout, capsys):
    text = 'SSH Key is not present in the SSH agent. Please run "ssh-add /home/u/.ssh/google_compute_engine" to add it'
    cloud.on("scp", failing(text))
    cloud.otherwise_healthy()
    assert main(LAUNCH) == 2
    assert "ssh-add ~/.ssh/google_compute_engine; then the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["launch", "status", "logs", "stop", "delete"])
def test_a_missing_gcloud(command, tmp_path, monkeypatch, checkout, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(LAUNCH if command == "launch" else [command, *PLACE]) == 2
    assert "gcloud is not installed: https://cloud.google.com/sdk/docs/install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--type", "v5e-17"], "--type v5e-17: v5e has no slice of 17"),
        (["--name", "My_TPU"], "--name My_TPU: lower-case letters"),
        (["--bucket", "b"], "--bucket b: must be a Cloud Storage path such as gs://my-bucket"),
        (["--workdir", "runs/a"], "--workdir runs/a: must be a gs:// path, because the VMs do not last"),
        (["--restarts", "-1"], "--restarts -1: must be at least 0"),
        (["--stepz", "3"], "unknown option --stepz; did you mean --steps?"),
        (["--model.depth", "many"], "--model.depth: invalid literal"),
    ],
)
def test_a_mistake_is_one_line_before_gcloud_is_asked(cloud, capsys, arguments, said):
    assert main([*LAUNCH, *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
    assert not (cloud.folder / "calls").exists()


def test_an_unknown_recipe_or_command(cloud, capsys):
    assert main(["launch", "bert-tny", *LAUNCH[2:]]) == 2
    assert "bert-tiny" in capsys.readouterr().err
    assert main(["lunch"]) == 2
    assert "unknown command lunch; did you mean launch?" in capsys.readouterr().err


def test_help_lists_commands_and_options(capsys):
    assert main([]) == 0
    assert "status --name N --zone Z" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["launch", "bert-tiny", "--help"])
    assert ended.value.code == 0
    assert "--runtime-version" in capsys.readouterr().out


def test_what_a_program_on_the_worker_writes_is_not_taken_for_gclouds_words():
    found = failure(1, "SSH: Attempting to connect to worker 0...\npip: quota, Connection refused\n", "n", "z")
    assert found.kind == "remote"
    assert str(found) == "--name n: the command on a worker ended with status 1: pip: quota, Connection refused"
    assert failure(255, REFUSED[2], "n", "z").kind == "ssh"
    assert failure(255, "Host key verification failed.\n", "n", "z").kind == "ssh"
