"""An export is whole on disk before it is seen, as readable as other files, and names its tokenizer's tokens."""

import dataclasses
import io
import logging
import os
import stat
from pathlib import Path

import pytest
import transformers
from huggingface_hub import ModelCard
from rich.console import Console

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from models.families.registry import family_of
from pretrain.__main__ import main
from pretrain.commands import model_card
from pretrain.commands.model_card import draw_curves
from pretrain.huggingface.export import check_replaceable
from pretrain.recipe import resolve
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import run as runs
from tests.pretrain import tiny
from tests.pretrain.hugging_face_folders import MODELS
from tests.texts import write_texts


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_every_file_of_an_export_follows_the_umask(exported, mask):
    before = os.umask(mask)
    try:
        folder = exported("electra")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    assert modes["model.safetensors"] == 0o666 & ~mask and len(set(modes.values())) == 1


def test_everything_is_on_disk_before_the_export_takes_its_place_and_its_place_is_then(exported, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    resolve = lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    monkeypatch.setattr(os, "fsync", lambda file: events.append(("sync", resolve(file))) or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: events.append(("rename", paths[0])) or replace(*paths))
    folder = exported("electra")
    partial = folder.with_name(f".{folder.name}.partial")
    before = events[: events.index(("rename", partial))]
    synced = {path.relative_to(partial) for kind, path in before if kind == "sync"}
    assert synced == {path.relative_to(folder) for path in (folder, *folder.rglob("*"))}
    assert events[-1] == ("sync", folder.parent)


KINDS = ("albert", "electra", "pretraining", "xlnet")
PAIRS = [(kind, tokenizer) for kind in KINDS for tokenizer in ("wordpiece", "albert", "xlnet")]


@pytest.mark.parametrize("kind, tokenizer", PAIRS)
def test_the_config_names_the_tokenizer_s_tokens_and_an_unfit_tokenizer_is_warned_of(exported, caplog, kind, tokenizer):
    """Unfit is one that writes other rows than the model reads."""
    types = {"types": 3} if tokenizer == "xlnet" != kind else {}  # as many as it gives
    with caplog.at_level(logging.WARNING):
        folder = exported(kind, tokenizer, **types)
    config, theirs = transformers.AutoConfig.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for role in ("pad", "bos", "eos", "cls", "sep", "mask"):
        assert getattr(config, f"{role}_token_id") == getattr(theirs, f"{role}_token_id"), role
    ids = {config.pad_token_id, config.bos_token_id, config.eos_token_id}
    assert ids == {"wordpiece": {0, None}, "albert": {0, 2, 3}, "xlnet": {5, 1, 2}}[tokenizer]
    expected, fits = expected_of(kind), (tokenizer == "xlnet") == (kind == "xlnet")
    assert (expected.prepare in caplog.text) != fits
    assert (f"the model is trained on '{expected.pair}'" in caplog.text) != fits


def expected_of(kind):
    return next(iter(family_of(MODELS[kind][0]).hf.values()))


def test_a_tokenizer_with_more_token_types_than_the_model_is_refused_before_it_trains(tmp_path):
    source = write_texts(tmp_path / "texts", documents=40, seed=0)
    options = {"tokenizer": "sentencepiece-unigram", "vocab_size": 60, "heldout": 0.1, "processes": 1}
    prepare(Prepare((f"text:{source}",), tmp_path / "corpus", **options), Console(file=io.StringIO()))
    corpus = Corpus(tmp_path / "corpus")
    said = "--corpus .*: its tokenizer gives token types up to 2, but model.types=2; prepare it with"
    for recipe in (tiny.bert(), tiny.electra()):
        with pytest.raises(UserError, match=f"{said} --tokenizer wordpiece, or give --model.types 3"):
            resolve(recipe, corpus)
        resolve(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, types=3)), corpus)
    resolve(tiny.xlnet(), corpus)


def test_the_folder_that_one_is_in_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    for folder in (".", "..", tmp_path / "inside"):
        with pytest.raises(UserError, match="export --to .*: the export would replace the current directory"):
            check_replaceable(Path(folder), "run")


def test_a_run_says_at_its_start_that_its_export_will_not_fit(corpus_path, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "train", lambda run, state, carried: (state, 0))
    runs.run(tiny.xlnet(), tiny.options(corpus_path, tmp_path))
    log = RunDirectory(tmp_path).log.read_text()
    assert f"--corpus {corpus_path}: the tokenizer encodes a pair as 'cls A sep B sep', but the model is" in log
    assert "prepare the corpus with --tokenizer sentencepiece-unigram --specials xlnet" in log


def test_a_run_s_export_has_a_model_card_which_is_not_replaced_once_it_was_edited(
    uninterrupted, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(model_card, "draw_curves", draw_curves)
    folder, to = tmp_path / "hf", ["--to", str(tmp_path / "hf")]
    assert main(["export", str(uninterrupted), *to, "--license", "cc-by-sa-4.0"]) == 0
    card = ModelCard.load(folder / "README.md")
    header = {
        "license": "cc-by-sa-4.0",
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "language": ["en"],
    }
    assert header.items() <= card.data.to_dict().items()
    loss = read_metrics(RunDirectory(uninterrupted), "eval")[-1]["loss"]
    for text in ("BertForPreTraining.from_pretrained", "steps 0 to 12", "documents", f"| loss | {loss:.5g} |"):
        assert text in card.text
    assert str(uninterrupted.parent) not in card.text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")

    assert main(["export", str(uninterrupted), *to]) == 0  # the same run's, as it was written
    assert "license: unknown" in (folder / "README.md").read_text()
    (folder / "README.md").write_text("# Mine")
    assert main(["export", str(uninterrupted), *to]) == 2
    assert "README.md was edited" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == "# Mine"
