"""What gcloud prints when it fails, and the one line that the user reads."""

import pytest

from tests.tpu.cloud import COMPLAINTS as google
from tests.tpu.stories import NAME, ONE
from tpu.__main__ import main
from tpu.gcloud import Gcloud, GcloudError, Slice

HERE = Slice("n", "gs://b", "z", "p")
CREATE = "ERROR: (gcloud.compute.tpus.tpu-vm.create) "


@pytest.mark.parametrize(
    "complaint, kind, said",
    [
        (google.UNAVAILABLE, "transient", "Google Cloud does not answer (gcloud: HttpError accessing"),
        (google.CRASHED, "transient", "Google Cloud does not answer (gcloud: gcloud crashed (ConnectionError)"),
        (google.OFFLINE, "transient", "Google Cloud does not answer"),  # not a lost login
        (google.EXPIRED, "login", "run gcloud auth login"),
        (google.NO_LOGIN, "login", "run gcloud auth login"),
        (CREATE + "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests' per minute", "transient", ""),
        (google.QUOTA, "quota", "--type: exceeds your project's quota: ask for more"),
        (google.EXISTS, "exists", "someone else is creating it now"),
        (google.RACED, "raced", "someone else is launching it now"),
        (google.BUSY, "other", "gcloud: FAILED_PRECONDITION"),
        (google.NO_BUCKET, "gone", "--bucket: nothing is there; gcloud storage ls lists your buckets"),
        (
            CREATE + "INVALID_ARGUMENT: Cloud TPU received a bad request. the accelerator v5litepod-16 was not found",
            "offer",
            "gcloud compute tpus tpu-vm accelerator-types (or versions) list --zone=z",
        ),
        (CREATE + "PERMISSION_DENIED: Permission denied on 'locations/z' (or it may not exist).", "offer", "locations"),
        (google.REFUSED, "denied", "or, on the bucket, for roles/storage.objectUser (gcloud: "),
        (google.DENIED, "denied", "ask for roles/tpu.admin and roles/iam.serviceAccountUser"),
        (
            CREATE + "PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is disabled.",
            "denied",
            "gcloud services enable tpu.googleapis.com",
        ),
        ("", "other", "gcloud: it failed without a message"),
    ],
)
def test_what_a_complaint_means(complaint, kind, said):
    found = GcloudError(f"WARNING: an update is available\n{complaint}" if complaint else "", "z")
    assert found.kind == kind
    assert said in str(found) and "\n" not in str(found) and "an update" not in str(found)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """gcloud is a program that does what a test says."""

    def put(text):
        (tmp_path / "gcloud").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "gcloud").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return Gcloud(HERE, str(tmp_path))

    return put


def test_a_command_runs_in_its_folder_with_its_arguments_and_no_input(program, tmp_path):
    cloud = program('pwd; printf "<%s>" "$@"; cat')
    assert cloud.call(["gcloud", "a b", "*"]) == f"{tmp_path}\n<a b><*>"


def test_what_google_did_not_answer_is_asked_again(program, tmp_path, monkeypatch):
    (tmp_path / "unavailable").write_text(google.UNAVAILABLE)
    naps = []
    monkeypatch.setattr(Gcloud, "sleep", lambda self, seconds: naps.append(seconds))
    cloud = program("echo >> tries; [ $(wc -l < tries) -gt 2 ] && echo done || { cat unavailable >&2; exit 1; }")
    assert cloud.call(["gcloud"]) == "done\n"
    assert naps == [5, 10]


def test_a_failure_is_an_error_with_its_kind_or_fine(program, tmp_path):
    (tmp_path / "exists").write_text(google.EXISTS)
    cloud = program("cat exists >&2; exit 1")
    assert cloud.call(["gcloud"], fine="exists") == ""
    with pytest.raises(GcloudError, match="someone else is creating it now") as caught:
        cloud.call(["gcloud"], fine="gone")
    assert caught.value.kind == "exists"


@pytest.mark.parametrize("command", [ONE, *([one, *NAME] for one in ("status", "logs", "stop", "delete"))])
def test_a_missing_gcloud(command, tmp_path, monkeypatch, checkout, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(command) == 2
    assert "gcloud is not installed: https://cloud.google.com/sdk/docs/install" in capsys.readouterr().err
