"""Reading checkpoints: a failure that may pass is no damage, and whoever only reads changes nothing."""

import errno
import re
import shutil

import jax
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from pretrain.__main__ import main
from pretrain.storage import checkpoints
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import opened
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.opened import restore
from pretrain.training.run import run
from pretrain.training.start import load_weights
from tests.pretrain import tiny, toys
from tests.pretrain.test_checkpoints import DAMAGES, like, reopened, saved, state_at

# Orbax leaves coroutines behind where a file does not load.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TRANSIENT = {
    "a lost connection": ConnectionError("Connection reset by peer"),
    "a rate limit": ValueError("RESOURCE_EXHAUSTED: HTTP response code: 429"),
    "no memory on the device": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
    "a failing disk": OSError(errno.EIO, "Input/output error"),
    "another structure": ValueError("User-provided restore item and on-disk value metadata do not match"),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    toys.register(monkeypatch)
    monkeypatch.setattr(checkpoints, "PAUSES", (0, 0))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder of the checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    saved(folder, [1, 2])
    return folder


def failing(monkeypatch, error, times):
    """The next reads of arrays fail, wrapped as Orbax does."""
    handler, left = checkpoints.ocp.PyTreeCheckpointHandler, [error] * times
    whole = handler.restore

    def restore(self, *arguments, **named):
        if left:
            raise Exception("Encountered error while reading array index") from left.pop()
        return whole(self, *arguments, **named)

    monkeypatch.setattr(handler, "restore", restore)


def everything(folder):
    """(path, content or link, time of change) of all below a folder."""
    rows = []
    for file in sorted(folder.rglob("*")):
        rows.append((str(file), file.read_bytes() if file.is_file() else None, file.stat().st_mtime_ns))
    return rows


def test_what_may_pass_is_tried_again(two, monkeypatch, caplog):
    failing(monkeypatch, TRANSIENT["a lost connection"], times=2)
    assert tiny.equal(reopened(two).restore(like), state_at(2))
    assert caplog.text.count("cannot be read") == 2 and reopened(two).steps() == [1, 2]


@pytest.mark.parametrize("error", TRANSIENT.values(), ids=TRANSIENT)
def test_what_does_not_pass_is_an_error_and_no_older_checkpoint_is_taken(error, two, monkeypatch, caplog):
    before = everything(two)
    failing(monkeypatch, error, times=3)
    with pytest.raises(UserError, match="checkpoint .*2: cannot be read now .*is unchanged") as caught:
        reopened(two).restore(like)
    assert "\n" not in str(caught.value) and everything(two) == before
    assert caplog.text.count("cannot be read") == 2


@pytest.fixture(scope="module")
def trained(corpus_path, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        toys.register(patch)
        run(toys.recipe(steps=10), tiny.options(corpus_path, workdir))
    return workdir


def test_a_reader_leaves_a_work_directory_byte_for_byte_as_it_was(trained, corpus_path, tmp_path):
    assembly = assemble(RunDirectory(trained).read_recipe())
    shapes = jax.eval_shape(lambda: initial_params(assembly))
    # A live run's checkpoint that is being written must stay, too.
    (trained / "checkpoints" / "15.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
    before = everything(trained)
    assert main(["eval", str(trained), "--examples", "8"]) == 0
    assert everything(trained) == before
    assert main(["plot", str(trained), "--out", str(tmp_path / "curves.png")]) == 0
    assert everything(trained) == before
    load_weights("--init-from", str(trained), assembly.recipe.model, shapes, Corpus(corpus_path))
    assert everything(trained) == before


def test_a_checkpoint_of_a_version_with_other_parameters_is_an_error_that_says_so(trained, monkeypatch):
    whole = opened._parameters_alone

    def with_more(*of):
        state = whole(*of)
        return state._replace(params=state.params | {"more": state.params["bias"]})

    monkeypatch.setattr(opened, "_parameters_alone", with_more)
    with pytest.raises(UserError, match="has other parameters than the model in this version; resume with") as caught:
        restore(RunDirectory(trained))
    assert type(caught.value) is UserError


def test_a_reader_passes_over_a_damaged_checkpoint_and_leaves_it_where_it_is(trained, tmp_path, caplog):
    workdir = shutil.copytree(trained, tmp_path / "run")
    DAMAGES["all files empty"](workdir / "checkpoints" / "10")
    before = everything(workdir)
    assert restore(RunDirectory(workdir)).step == 5
    assert "step 10 is damaged" in caplog.text and "reading step 5 instead" in caplog.text
    assert everything(workdir) == before


def test_eval_leaves_out_what_is_damaged_or_gone_of_all_checkpoints(trained, tmp_path, monkeypatch, caplog, capsys):
    workdir = shutil.copytree(trained, tmp_path / "run")
    DAMAGES["all files empty"](workdir / "checkpoints" / "5")
    monkeypatch.setattr(RunDirectory, "checkpoint_steps", lambda _: [3, 5, 10])  # a live run has replaced 3
    assert main(["eval", str(workdir), "--all", "--examples", "8"]) == 0
    assert re.search("step 5 is skipped: checkpoint .*5: is damaged", caplog.text)
    assert "step 3 is skipped: " in caplog.text
    out = capsys.readouterr().out
    assert "step 10" in out and "step 5" not in out and "step 3" not in out


def test_a_reader_whose_checkpoints_a_live_run_has_replaced_meanwhile_reads_the_new_ones(trained, monkeypatch):
    folder, whole = RunDirectory(trained), RunDirectory.checkpoint_steps
    listings = iter([[3, 4]])  # as they were before the run went on
    monkeypatch.setattr(RunDirectory, "checkpoint_steps", lambda self: next(listings, None) or whole(self))
    assert restore(folder).step == 10
