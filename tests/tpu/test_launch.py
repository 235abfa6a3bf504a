"""Launching: what is sent to the hosts, which mistakes are said before anything is made, the commands to the letter."""

import itertools
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.tpu import stories
from tests.tpu.cloud import COMPLAINTS as google
from tpu import launch
from tpu.__main__ import main

LAUNCH = [*stories.LAUNCH, "--type", "v5e-16"]
TRANSCRIPTS = Path(__file__).parent / "transcripts"
TYPES = ("v4-32", "v5litepod-16", "v5p-8", "v6e-16", "tpu7x-8")
WAYS = {"spot": ["--spot", "--valid-until-duration=6h"], "queued": []}
WAYS["reserved"] = ["--gcloud-flag=--reserved", "--delete-when-ended"]


def transcript(capsys, kind, way):
    assert main([*LAUNCH[:-1], kind, *WAYS[way], "--dry-run", "--steps", "3"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind, way", itertools.product(TYPES, WAYS))
def test_the_commands_of_each_generation_to_the_letter(cloud, capsys, kind, way):
    file = TRANSCRIPTS / f"{kind}-{way}.txt"
    assert transcript(capsys, kind, way) == file.read_text()
    assert not cloud.commands


def test_generations_without_kernels_say_so(cloud, capsys):
    said = "; v3 has no fused attention: --attention xla is what it takes\n"
    assert said in transcript(capsys, "v3-8", "queued")


def test_the_settings_of_a_host(cloud):
    main([*LAUNCH, "--spot", "--restarts", "0", "--workdir", "gs://e/f", "--init-from", "gs://b/it's $HOME; *"])
    settings = (cloud.folder / "bucket/b/n/launch/settings.sh").read_text()
    assert settings == (
        '# {"name": "n", "bucket": "gs://b", "zone": "z", "project": "p", "type": "v5litepod-16", "count": 1}\n'
        "STATE=gs://b/n/launch\n"
        "HOSTS=4\n"
        "FIRST=n-w-0\n"
        "RUN=(bert-tiny --corpus gs://b/corpus --workdir gs://e/f --init-from 'gs://b/it'\"'\"'s $HOME; *')\n"
        "DELETE=(gcloud compute tpus queued-resources delete n --zone=z --project=p --force --quiet)\n"
    )
    given = "<gs://b/it's $HOME; *>"  # as the run's Python has it
    assert cloud.file("argument-list").endswith(given)


def test_of_several_corpora_each_is_looked_for(cloud):
    cloud.faults.append(("gs://b/corpora/zh", google.NO_BUCKET))
    (cloud.folder / "bucket/c/en").mkdir(parents=True)
    (cloud.folder / "bucket/c/en/manifest.json").touch()
    assert main([*LAUNCH, "--corpus", "en=gs://c/en/,zh=corpora/zh"]) == 2
    assert "gs://c/en/manifest.json" in cloud.commands[0] and "gs://b/corpora/zh/manifest.json" in cloud.commands[1]
    assert len(cloud.commands) == 2


def test_a_corpus_that_is_not_in_the_bucket_is_said_before_a_slice_is_made(cloud, capsys):
    (cloud.folder / "bucket/b/corpus/manifest.json").unlink()
    assert main(LAUNCH) == 2
    said = "--corpus gs://b/corpus: there is no corpus: copy one there: gcloud storage cp -r corpora/mine/*"
    assert said in capsys.readouterr().err
    assert len(cloud.commands) == 1


def test_without_a_login_the_corpus_is_not_blamed(cloud, capsys):
    cloud.faults.append(("storage ls", google.NO_LOGIN))
    assert main(LAUNCH) == 2
    assert "error: no valid login: run gcloud auth login" in capsys.readouterr().err


PROJECTLESS = [word for word in LAUNCH if word not in ("--project", "p")]


def test_without_a_project_there_is_one_line_and_nothing_is_made(cloud, capsys):
    cloud.project = ""
    assert main(PROJECTLESS) == 2
    said = "error: --project is missing: give it, or run gcloud config set project ID\n"
    assert capsys.readouterr().err == said
    assert cloud.commands == ["gcloud config get-value project --quiet"]


def test_the_dry_run_asks_for_the_project_as_a_run_does(cloud, capsys):
    assert main([*PROJECTLESS, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gcloud config get-value project --quiet"
    assert all("--project=PROJECT " in line for line in lines if " tpus " in line)


def test_what_git_tracks_is_copied_and_nothing_else(checkout, tmp_path):
    with tarfile.open(launch.pack(checkout, tmp_path / "code.tar.gz")) as tar:
        assert sorted(tar.getnames()) == [".commit", "Makefile", "tpu/vm.sh"]


def test_changes_that_are_not_committed_are_sent_and_that_is_said(cloud, checkout, capsys):
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", checkout, *who, "commit", "-q", "-a", "-m", "first"], check=True)
    assert main([*LAUNCH, "--dry-run"]) == 0
    assert "that git tracks here to the bucket\n" in capsys.readouterr().out
    (checkout / "Makefile").write_text("changed")
    main(LAUNCH)
    assert "that git tracks here to the bucket, with changes that are not committed\n" in capsys.readouterr().out
    with tarfile.open(cloud.folder / "bucket/b/n/launch/code.tar.gz") as tar:
        assert tar.extractfile("Makefile").read() == b"changed"


def test_without_git_there_is_nothing_to_copy(cloud, tmp_path, monkeypatch, capsys):
    (tmp_path / "plain" / "tpu").mkdir(parents=True)
    (tmp_path / "plain" / "tpu" / "vm.sh").touch()
    monkeypatch.setattr(launch, "ROOT", tmp_path / "plain")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert main(LAUNCH) == 2
    assert "launch copies the files that git tracks" in capsys.readouterr().err
    assert not cloud.created


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--type", "v5e-17"], "--type v5e-17: v5e has no slice of 17"),
        (["--name", "My_TPU"], "--name My_TPU: lower-case letters"),
        (["--bucket", "b"], "--bucket b: must be a Cloud Storage path such as gs://my-bucket"),
        (["--workdir", "runs/a"], "--workdir runs/a: must be a gs:// path, because the VMs do not last"),
        (["--workdir", "gs://b/*"], "--workdir gs://b/*: must be a gs:// path"),
        (["--corpus", "s3://b/c"], "--corpus s3://b/c: must be a gs:// path, or a path in the bucket"),
        (["--zone", "a b", "--dry-run"], "--zone a b: must be a zone such as us-west4-a"),
        (["--project", "My Project"], "--project My Project: must be a project such as my-project-1"),
        (["--valid-until-duration", "6x"], "--valid-until-duration 6x: must be a duration such as 90m, 6h or 2d"),
        (["--name", "corpus"], "--workdir gs://b/corpus: is a corpus or launch's own folder: give another --workdir"),
        (["--restarts", "-1"], "--restarts -1: must be at least 0"),
        (["--gcloud-flag=--zone=y"], "--gcloud-flag --zone=y: must be a flag of gcloud's create that launch does not"),
        (["--gcloud-flag=--node-count=x"], "--gcloud-flag --node-count=x: must be a flag of gcloud's create"),
        (["--init-from", "hf/bert"], "--init-from hf/bert: must be a gs:// path, because the VMs see no other"),
        (["--init-from", "discriminator=gs://b/d,generator=g"], "must be a gs:// path, because the VMs see no other"),
        (["--processes", "2"], "--processes 2: leave it out; hosts of a slice find each other"),
        (["--track", "wandb"], "--track wandb: leave it out; hosts of a slice have no tracker installed"),
        (["--stepz", "3"], "unknown option --stepz; did you mean --steps?"),
        (["--phases.0.batch-size", "24"], "batch_size=24: is not a multiple of --microbatches 1 x the 16 batch"),
        (["--type", "v3-64"], "batch_size=32: is not a multiple of --microbatches 1 x the 64 batch"),  # two to a chip
        (["--microbatches", "4"], "the mesh data=16; use a multiple of 64"),
        (["--attention", "splash", "--dtype", "float32"], "--attention splash does not work here: --dtype is float32"),
        (["--type", "v3-8", "--attention", "splash"], "--attention splash: no kernel compiles for TPU v3; use xla"),
        (["--gcloud-flag=--node-count=2", "--mesh", "data=8"], "--mesh data=8: it takes 16 devices, there are 32"),
    ],
)
def test_a_mistake_is_one_line_before_gcloud_is_asked(cloud, capsys, arguments, said):
    assert main([*LAUNCH, *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
    assert not cloud.commands


def test_an_unknown_recipe_or_command(cloud, capsys):
    assert main(["launch", "bert-tny", *LAUNCH[2:]]) == 2
    assert "bert-tiny" in capsys.readouterr().err
    assert main(["lunch"]) == 2
    assert "unknown command lunch; did you mean launch?" in capsys.readouterr().err


def test_help_lists_commands_and_options(capsys):
    assert main([]) == 0
    assert "status --name N --bucket gs://B" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["launch", "bert-tiny", "--help"])
    assert ended.value.code == 0
    assert "--runtime-version" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="no Google Cloud SDK here")
def test_google_knows_every_command_and_flag(tmp_path):
    lines = {line for file in TRANSCRIPTS.glob("*.txt") for line in file.read_text().splitlines() if line[:1] == "g"}
    host = re.findall(r"gcloud storage [^|&;\\\n]+", (launch.ROOT / "tpu" / "vm.sh").read_text())
    assert len(host) == 5
    lines |= {re.sub(r'"\$[^"]*"', "gs://b/n", line.removesuffix("2>")).strip() for line in host}
    lines.add("gcloud storage cat gs://b/n/launch/log/n-w-0/START.txt --range=7- --quiet")  # where a log goes on
    lines.add("gcloud config get-value project --quiet")
    lines.add(wrong := "gcloud compute tpus queued-resources create n --zone=z --odd=1")
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([{"command_string": line} for line in lines]))
    command = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"]
    environment = {**os.environ, "CLOUDSDK_CONFIG": str(tmp_path)}
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300, env=environment).stdout)
    assert len(found) == len(lines)
    assert [one["command_string"] for one in found if not one["success"]] == [wrong]
