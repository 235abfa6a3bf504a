"""An export is whole on disk before it is seen, as readable as other files, and names its tokenizer's tokens."""

import dataclasses
import io
import logging
import os
import resource
import signal
import stat
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from rich.console import Console

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from data_pipelines.tokenizers import pieces, stored
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from models.core.parameters import leaves
from models.families.albert import AlbertConfig
from models.families.bert import BertConfig
from models.families.electra import ElectraConfig, Tower
from models.families.registry import FAMILIES, family_of
from models.families.xlnet import XLNetConfig
from pretrain.commands import run as runs
from pretrain.huggingface.export import check_replaceable, config_fields, export
from pretrain.huggingface.tensors import tensors
from pretrain.huggingface.tokenizer_fit import misfits
from pretrain.recipe import resolve
from pretrain.storage.run_directory import RunDirectory
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny
from tests.texts import write_texts

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a corpus of small texts, for tests only",
    "naïve words which very quickly become judgements",
] * 5
SIZES = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 24}
CONFIGS = {
    "albert": AlbertConfig(positions=64, embedding=8, **SIZES),
    "bert": BertConfig(positions=64, **SIZES),
    "electra": ElectraConfig(
        positions=64, embedding=16, discriminator=Tower(16, 2, 2, 24), generator=Tower(8, 2, 1, 12)
    ),
    "xlnet": XLNetConfig(**SIZES, memory=0),
}


@pytest.fixture(scope="module")
def tokenizer_paths(tmp_path_factory):
    """Kind of tokenizer -> its folder."""
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {"wordpiece": train("wordpiece", TEXTS, Training(80))}
    for name in pieces.FLAVOURS:
        made[name] = train("sentencepiece-unigram", TEXTS, Training(42, specials=name))
    for name, each in made.items():
        stored.save(each, folder / name)
    return {name: folder / name for name in made}


@pytest.fixture
def exported(tokenizer_paths, tmp_path):
    """(family, tokenizer) -> the folder of an export of random weights."""

    def write(family, tokenizer="wordpiece"):
        path = tokenizer_paths[tokenizer]
        size = stored.load(path).tokenizer.get_vocab_size()
        config = dataclasses.replace(CONFIGS[family], vocab_size=size)
        if tokenizer == "xlnet" and family != "xlnet":
            config = dataclasses.replace(config, types=3)  # as many as it gives
        rng = np.random.default_rng(0)
        draw = lambda leaf: rng.normal(0, 0.02, leaf.shape).astype(np.float32)
        export(jax.tree.map(draw, parameter_shapes(config)), config, path, tmp_path / "export")
        return tmp_path / "export"

    return write


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
    before = events[: events.index(("rename", folder.with_name(".export.partial")))]
    synced = {path.relative_to(folder.with_name(".export.partial")) for kind, path in before if kind == "sync"}
    assert synced == {path.relative_to(folder) for path in (folder, *folder.rglob("*"))}
    assert events[-1] == ("sync", folder.parent)


PAIRS = [(family, tokenizer) for family in CONFIGS for tokenizer in ("wordpiece", "albert", "xlnet")]


@pytest.mark.parametrize("family, tokenizer", PAIRS)
def test_the_config_names_the_tokenizer_s_tokens_and_no_others(exported, family, tokenizer):
    folder = exported(family, tokenizer)
    config, theirs = transformers.AutoConfig.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for role in ("pad", "bos", "eos", "cls", "sep", "mask"):
        assert getattr(config, f"{role}_token_id") == getattr(theirs, f"{role}_token_id"), role
    ids = {config.pad_token_id, config.bos_token_id, config.eos_token_id}
    assert ids == {"wordpiece": {0, None}, "albert": {0, 2, 3}, "xlnet": {5, 1, 2}}[tokenizer]


@pytest.mark.parametrize("tokenizer", ["wordpiece", "albert"])
def test_an_exported_bert_fills_masks_also_in_padded_pairs(exported, tokenizer):
    pipeline = transformers.pipeline("fill-mask", model=str(exported("bert", tokenizer)), device=-1)
    mask = pipeline.tokenizer.mask_token
    answers = pipeline([f"the {mask} fox", f"a corpus of small {mask} for the lazy dog"], batch_size=2)
    alone = pipeline(f"the {mask} fox")
    assert [answer["token"] for answer in answers[0]] == [answer["token"] for answer in alone]
    np.testing.assert_allclose([a["score"] for a in answers[0]], [a["score"] for a in alone], rtol=1e-4)


@pytest.mark.parametrize("tokenizer", ["xlnet", "albert", "wordpiece"])
def test_an_exported_xlnet_generates_until_its_own_end(exported, tokenizer):
    pipeline = transformers.pipeline("text-generation", model=str(exported("xlnet", tokenizer)), device=-1)
    told, tokens = pipeline.model.generation_config, pipeline.tokenizer
    named = (told.bos_token_id, told.eos_token_id, told.pad_token_id)
    assert named == (tokens.bos_token_id, tokens.eos_token_id, tokens.pad_token_id)
    assert pipeline("the quick", max_new_tokens=2, do_sample=False)[0]["generated_text"].startswith("the quick")


def test_a_tokenizer_with_more_token_types_than_the_model_is_refused_before_it_trains(tmp_path):
    source = write_texts(tmp_path / "texts", documents=40, seed=0)
    options = {"tokenizer": "sentencepiece-unigram", "vocab_size": 60, "heldout": 0.1, "processes": 1}
    prepare(Prepare((f"text:{source}",), tmp_path / "corpus", **options), Console(file=io.StringIO()))
    corpus = Corpus(tmp_path / "corpus")
    said = "--corpus .*: its tokenizer gives token types up to 2, which model.types=2 has not; prepare it with"
    for recipe in (tiny.bert(), tiny.electra()):
        with pytest.raises(UserError, match=f"{said} --tokenizer wordpiece, or give --model.types 3"):
            resolve(recipe, corpus)
        resolve(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, types=3)), corpus)
    resolve(tiny.xlnet(), corpus)


def test_a_full_disk_is_one_line_and_leaves_nothing(exported, tmp_path):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))  # config.json has room, the weights have none
    try:
        with pytest.raises(UserError, match=r"export --to .*: cannot be written \(.*too large"):
            exported("bert")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


def test_the_folder_that_one_is_in_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    for folder in (".", "..", tmp_path / "inside"):
        with pytest.raises(UserError, match="export --to .*: you are in this folder"):
            check_replaceable(Path(folder), "run")


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_nor_is_such_a_model_exported(tokenizer_paths, tmp_path, family):
    config = dataclasses.replace(CONFIGS[family], vocab_size=42)
    with pytest.raises(UserError, match="export --to .*: its tokenizer gives token types up to 2, which model.types=2"):
        export({}, config, tokenizer_paths["xlnet"], tmp_path / "export")
    assert not (tmp_path / "export").exists()


def expected_of(family):
    return next(iter(FAMILIES[family].hf.values()))


@pytest.mark.parametrize("family, tokenizer", PAIRS)
def test_a_tokenizer_that_writes_other_rows_than_the_model_reads_is_warned_of(exported, caplog, family, tokenizer):
    fits = (tokenizer == "xlnet") == (family == "xlnet")
    with caplog.at_level(logging.WARNING):
        exported(family, tokenizer)
    expected = expected_of(family)
    assert (expected.prepare in caplog.text) != fits
    assert (f"this model is trained on '{expected.pair}'" in caplog.text) != fits


def test_what_the_options_that_are_named_make_fits(tokenizer_paths):
    for family, config in CONFIGS.items():
        *_, flavour = expected_of(family).prepare.split()
        assert misfits(config, stored.load(tokenizer_paths[flavour])) == []


def test_a_run_says_at_its_start_that_its_export_will_not_fit(corpus_path, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "train", lambda run, state, carried: (state, 0))
    runs.run(tiny.xlnet(), tiny.options(corpus_path, tmp_path))
    log = RunDirectory(tmp_path).log.read_text()
    assert f"--corpus {corpus_path}: the tokenizer writes two texts as 'cls A sep B sep', this model is" in log
    assert "prepare the corpus with --tokenizer sentencepiece-unigram --specials xlnet" in log


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_every_kernel_is_stored_as_torch_multiplies_by_it(family):
    """Square ones, too, which no shape gives away: torch has [out, in]."""
    config = dataclasses.replace(CONFIGS[family], vocab_size=10)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), parameter_shapes(config))
    flat, seen = dict(leaves(params)), 0
    for part in family_of(config).hf:
        for name, tensor in tensors(params, config, part).items():
            path, view = tensor.pieces[0].origin[0], tensor.array()
            if path.endswith("/kernel"):
                kernel = flat[path] if flat[path].ndim == 2 else flat[path][int(name.split(".layer.")[1].split(".")[0])]
                np.testing.assert_array_equal(view, kernel.T, err_msg=name)
                seen += view.shape[0] == view.shape[1]
    assert seen >= 2 * 4  # queries, keys, values and outputs of two layers


def test_xlnet_s_projections_are_stored_as_torch_multiplies_by_them():
    """`XLNetRelativeAttention`: q, k, v, r by 'ibh,hnd->ibnd', o by 'ibnd,hnd->ibh'."""
    config = dataclasses.replace(CONFIGS["xlnet"], vocab_size=10)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), parameter_shapes(config))
    stored, ours = tensors(params, config, "model"), params["layers"]["attention"]
    x = rng.normal(size=(3, config.width)).astype(np.float32)
    for name, theirs in {"query": "q", "key": "k", "value": "v", "position": "r"}.items():
        view = stored[f"transformer.layer.1.rel_attn.{theirs}"].array()
        expected = np.einsum("bh,hnd->bnd", x, view).reshape(3, -1)
        np.testing.assert_allclose(x @ ours[name]["kernel"][1], expected, rtol=1e-5, atol=1e-5)
    view = stored["transformer.layer.1.rel_attn.o"].array()
    expected = np.einsum("bnd,hnd->bh", x.reshape(3, *view.shape[1:]), view)
    np.testing.assert_allclose(x @ ours["output"]["kernel"][1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_each_dropout_rate_keeps_its_name(family):
    config = dataclasses.replace(CONFIGS[family], dropout=0.2, attention_dropout=0.3)
    for part in family_of(config).hf:
        theirs = config_fields(config, part, {})
        assert (theirs["hidden_dropout_prob"], theirs["attention_probs_dropout_prob"]) == (0.2, 0.3)
