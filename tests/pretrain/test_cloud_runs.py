"""A run whose corpus, work directory and export are in a bucket is the run that it would be on a local disk.

The storage is a stand-in that speaks HTTP; gcsfs, Orbax and TensorStore's driver are the real ones.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import cloud
from data_pipelines.cloud import entries, filesystem, place
from data_pipelines.corpus import Corpus
from data_pipelines.errors import PassingError, UserError
from models.core.parameters import leaves
from pretrain.__main__ import main
from pretrain.commands.export import Export, export_model
from pretrain.storage import journal
from pretrain.storage.checkpoints import Checkpoints
from pretrain.storage.journal import open_journal, read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.opened import restore
from pretrain.training.run import run
from pretrain.training.start import INIT_FROM, load_weights
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny, toys
from tests.pretrain.test_kills import figures

CORPUS, WORKDIR, EXPORT = (place(f"gs://bucket/{name}") for name in ("corpus", "runs/a", "hf/a"))
# Orbax leaves coroutines behind where a file does not load.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def bucket(storage, corpus_path):
    """The storage, with the corpus at CORPUS."""
    storage.upload_folder(corpus_path, "bucket", "corpus")
    return storage


@pytest.fixture(scope="module")
def kept():
    """Objects of one test for the next."""
    return {}


@pytest.fixture
def ten_steps(bucket, registered, kept):
    """The same with a toy's work directory after ten steps."""
    if not kept:
        assert train(10) == 0
        kept |= bucket.objects
    bucket.objects |= kept
    return bucket


def train(steps, corpus=CORPUS, workdir=WORKDIR, **changes):
    return run(toys.recipe(steps=steps), tiny.options(corpus, workdir, **changes))


def losses(workdir):
    return {entry["step"]: entry["loss"] for entry in read_metrics(RunDirectory(workdir), "train")}


def text(storage, name):
    return storage.objects["bucket", f"runs/a/{name}"][0].decode()


def mistake(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


class Killed(BaseException):
    """Ends a run on the spot."""


def test_killed_as_a_checkpoint_is_whole_and_started_again_it_ends_as_a_local_run_that_nothing_disturbed(
    bucket, corpus_path, tmp_path, monkeypatch, capsys
):
    save = Checkpoints.save

    def save_and_die(checkpoints, state, phase):
        save(checkpoints, state, phase)
        if state.step == 10:
            checkpoints.wait()
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoints, "save", save_and_die)
        patch.setattr(journal.Mirror, "close", lambda mirror: None)  # uploads nothing more
        train(20, log_every=1)
    assert max(losses(WORKDIR)) == 10  # what led to the checkpoint was there before it
    assert train(20, log_every=1) == train(20, corpus_path, tmp_path / "run", log_every=1) == 0
    out = capsys.readouterr().out
    assert "resuming from step 10" in out and f"done: 20 steps in {WORKDIR}" in out
    assert tiny.equal(tiny.final_state(WORKDIR), tiny.final_state(tmp_path / "run"))
    assert figures(WORKDIR) == figures(tmp_path / "run")
    assert [folder.name for folder in entries(WORKDIR / "tokenizer")]
    said = text(bucket, "log.txt")
    assert "starting from random weights" in said and "resuming from step" in said and "done: 20 steps" in said
    assert len([name for name in bucket.names("bucket") if "tensorboard/events" in name]) == 2

    assert main(["eval", str(WORKDIR)]) == main(["plot", str(WORKDIR), "--out", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_every_file_of_a_work_directory_is_in_the_bucket(bucket):
    assert train(15, keep=1, profile=True) == 0
    assert any(name.endswith(".xplane.pb") for name in bucket.names("bucket") if "runs/a/profile/" in name)
    assert json.loads(text(bucket, "run.json"))["corpus"] == "gs://bucket/corpus"
    assert RunDirectory(WORKDIR).checkpoint_steps() == [15] and not Path("gs:").exists()


@pytest.mark.slow
def test_a_new_machine_takes_compiled_programs_from_the_bucket(bucket, corpus_path, tmp_path):
    for machine in ("first", "second"):
        home = tmp_path / machine
        status, _, err = tiny.run_command(
            *tiny.run_arguments(corpus_path, "gs://bucket/runs/a", "--keep", 20, "--steps", 12),
            XDG_CACHE_HOME=str(home), JAX_COMPILATION_CACHE_DIR=str(home / "pretrain" / "xla"),  # as on accelerators
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_DEBUG_LOG_MODULES="jax._src.compiler",
        )  # fmt: skip
        assert status == 0 and "Error" not in err, err
        assert not home.exists()
        missed, found = (re.findall(f"{what} for '([^']*)'", err) for what in ("CACHE MISS", "cache hit"))
        assert (len(missed) > 10) == (machine == "first") and (len(found) > 10) == (machine == "second"), err
        assert RunDirectory(WORKDIR).checkpoint_steps() == [4, 8, 12]
        for name in [name for name in bucket.names("bucket") if re.match("runs/a/checkpoints/(8|12)/", name)]:
            del bucket.objects["bucket", name]  # as if it had been stopped after step 4
    assert missed == []


def test_a_half_written_checkpoint_does_not_count_and_is_written_again(ten_steps):
    for name in ten_steps.names("bucket"):
        if name.startswith("runs/a/checkpoints/10/") and name.endswith(("commit_success.txt", "manifest.ocdbt")):
            del ten_steps.objects["bucket", name]
    assert RunDirectory(WORKDIR).checkpoint_steps() == [5]
    assert train(10) == 0
    assert RunDirectory(WORKDIR).checkpoint_steps() == [5, 10] and max(losses(WORKDIR)) == 10
    del ten_steps.objects["bucket", "runs/a/recipe.json"]
    with pytest.raises(UserError, match="is damaged .checkpoints but no recipe.json"):
        train(10)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(ten_steps, caplog):
    for name in ten_steps.names("bucket"):
        if name.startswith("runs/a/checkpoints/10/default/d/") or "/10/default/ocdbt.process_0/d/" in name:
            ten_steps.put("bucket", name, b"damaged")
    assert train(15) == 0
    assert "checkpoint of step 10 is damaged" in caplog.text and "resuming from step 5" in caplog.text
    assert {"5", "10", "15"} & {folder.name for folder in entries(WORKDIR / "checkpoints")} == {"5", "10", "15"}
    assert any("/10.damaged/" in name for name in ten_steps.names("bucket"))


def test_what_has_grown_is_uploaded_once_and_what_fails_is_said_and_made_up_for(bucket, capsys):
    directory, log = RunDirectory(WORKDIR), ("bucket", "runs/a/log.txt")
    writer = open_journal(directory, 0, 10)
    writer.figures("train", 1, {"loss": 1.0})
    bucket.refuse = 403, "not now"
    writer.sync()
    said = capsys.readouterr().out
    assert "--workdir gs://bucket/runs/a: no access" in said and "will retry at the next checkpoint" in said
    bucket.refuse = None
    writer.sync()
    assert read_metrics(directory, "train") == [{"kind": "train", "step": 1, "loss": 1.0}]
    before = bucket.objects[log]
    writer.sync()
    assert bucket.objects[log] == before  # and of the same generation
    writer.figures("train", 2, {"loss": 1.0})
    bucket.refuse = 403, "never again"
    with pytest.raises(UserError, match="--workdir .*no access"):
        writer.close()


def test_an_export_to_the_bucket_is_the_export_to_a_disk_and_weights_come_from_both_there(
    bucket, uninterrupted, corpus_path, tmp_path, capsys
):
    bucket.upload_folder(uninterrupted, "bucket", "runs/a")
    export_model(Export(run=uninterrupted, to=tmp_path / "disk"))
    assert main(["export", str(WORKDIR), "--to", str(EXPORT)]) == 0
    assert str(EXPORT) in capsys.readouterr().out
    bucket.put("bucket", "hf/a/generation_config.json", b"of an earlier export")
    bucket.put("bucket", "hf/a/generator/config.json", b"of an earlier ELECTRA")
    export_model(Export(run=WORKDIR, to=EXPORT))  # in the place of the first
    filesystem().get(f"{EXPORT}/", f"{tmp_path}/cloud/", recursive=True)
    folders = tmp_path / "disk", tmp_path / "cloud"
    contents = [{file.name: file.read_bytes() for file in folder.rglob("*")} for folder in folders]
    assert contents[0].keys() == contents[1].keys()
    named = {"README.md", "export.json"}  # which have the name of the run
    assert {name for name in contents[0] if contents[0][name] != contents[1][name]} == named

    of_run = restore(RunDirectory(uninterrupted)).params
    for source in (WORKDIR, EXPORT):
        weights = load_weights(INIT_FROM, str(source), tiny.BERT, parameter_shapes(tiny.BERT), Corpus(corpus_path))
        for (path, expected), (_, found) in zip(leaves(of_run), leaves(weights), strict=True):
            rows = slice(tiny.BERT.vocab_size if len(expected) == 256 else None)
            np.testing.assert_array_equal(found[rows], expected[rows], err_msg=f"{source} {path}")
    for source, lacking in (EXPORT, tiny.ALBERT), (EXPORT.with_name("nowhere"), tiny.BERT):
        with pytest.raises(UserError, match=f"^{INIT_FROM} {source}: (is a 'bert' model|no such bucket or object)"):
            load_weights(INIT_FROM, str(source), lacking, parameter_shapes(lacking), Corpus(corpus_path))

    bucket.put("bucket", "hf/a/thesis.tex", b"")
    with pytest.raises(UserError, match="export --to gs://bucket/hf/a: holds thesis.tex, so it is not an export"):
        export_model(Export(run=WORKDIR, to=EXPORT))
    assert ("bucket", "hf/a/thesis.tex") in bucket.objects


def test_what_the_cloud_refuses_is_one_line(bucket, capsys, tmp_path):
    settings = ("run", "bert-tiny", "--corpus", CORPUS, "--workdir")
    assert "--workdir gs://other/run: no such bucket or object" in mistake(capsys, *settings, "gs://other/run")
    assert "gs://bucket/no: is neither a run" in mistake(capsys, "eval", "gs://bucket/no")
    assert "gs://bucket/no: has no metrics" in mistake(capsys, "plot", "gs://bucket/no", "--out", tmp_path / "x.png")
    assert "--out gs://bucket/x.png: give a local path" in mistake(
        capsys, "plot", WORKDIR, "--out", "gs://bucket/x.png"
    )
    bucket.refuse = 403, "robot@project does not have storage.objects.get access"
    plot = ("plot", WORKDIR, "--out", tmp_path / "x.png")
    for command in (("eval", WORKDIR), ("export", WORKDIR, "--to", EXPORT), plot):
        said = mistake(capsys, *command)
        assert str(WORKDIR) in said and "no access" in said and "robot" in said and "roles/storage" in said
    assert "no access" in mistake(capsys, *settings, WORKDIR)


OBJECTS, BUCKETS = "roles/storage.objectUser", "roles/storage.legacyBucketReader"


@pytest.mark.parametrize(
    "method, route, what, role",
    [
        ("POST", "/upload/", "write", OBJECTS),
        ("GET", "/download/", "read", OBJECTS),
        ("GET", r"/o/?$", "list", OBJECTS),
        ("DELETE", "", "delete", OBJECTS),
        ("GET", "/b/bucket/?$", "ask about the bucket", BUCKETS),
    ],
)
def test_a_right_that_is_missing_is_named_with_its_role_before_anything_is_read(bucket, method, route, what, role):
    def refuse(asked, path):
        return (403, "robot does not have access") if asked == method and re.search(route, path) else None

    bucket.refuse, bucket.reads = refuse, []
    said = rf"--workdir gs://bucket/new: no access to {what} there .*robot.*gs://bucket --role={role} --member"
    with pytest.raises(UserError, match=said) as error:
        run(tiny.bert(steps=1), tiny.options(CORPUS, place("gs://bucket/new")))
    assert error.value.status == 2 and [name for name in bucket.reads if "corpus" in name] == []


def test_a_machine_without_the_scope_is_told_so(bucket):
    bucket.refuse = 403, "Request had insufficient authentication scopes."
    with pytest.raises(UserError, match="access scopes do not let it write .*create the machine with scope"):
        cloud.check_rights(place("gs://bucket/new"), "--workdir gs://bucket/new")


def test_rights_are_tried_again_while_the_storage_is_busy_and_then_left_to_a_supervisor(bucket, monkeypatch):
    answers = iter([(503, "busy"), (429, "slow down")])
    bucket.refuse = lambda method, route: next(answers, None)
    folder = place("gs://bucket/new")
    cloud.check_rights(folder, "--workdir")
    assert next(answers, "all") == "all" and not [name for _, name in bucket.objects if name.startswith("new")]
    bucket.refuse = 503, "busy"
    monkeypatch.setattr("gcsfs.retry.random.random", lambda: -15.9)  # seconds that a pause is longer
    with pytest.raises(PassingError, match="--workdir: .*busy.*start the same command again") as error:
        cloud.check_rights(folder, "--workdir")
    assert error.value.status == 134


def test_access_lost_while_training_is_one_line(bucket, monkeypatch):
    save = Checkpoints.save

    def lose(checkpoints, state, phase):
        bucket.refuse = 403, "the key has expired"
        save(checkpoints, state, phase)

    monkeypatch.setattr(Checkpoints, "save", lose)
    with pytest.raises(UserError, match="--workdir gs://bucket/runs/a: .*the key has expired"):
        train(5)
