"""A model begins with the weights of a shorter one, or of one of a family that it continues."""

import dataclasses
import functools
import json
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import with_sentinels
from models.attention.patterns.pattern import Pattern
from models.core.parameters import leaves
from models.core.program import Program
from models.families import registry
from models.families.bigbird import BigBirdConfig
from models.families.distilbert import DistilBertConfig
from models.families.longformer import LongformerConfig
from models.families.registry import family_of
from models.families.roberta import RobertaConfig
from models.families.unilm import UniLMConfig
from pretrain.huggingface.export import export
from pretrain.huggingface.load import load
from pretrain.training.start import load_weights
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference, tiny

LONG = dataclasses.replace(tiny.BERT, positions=80)
SIZES = {"vocab_size": 40, "width": 16, "depth": 2, "heads": 2, "feed_forward": 24}
ROBERTA = RobertaConfig(positions=16, **SIZES)
LONGFORMER = LongformerConfig(positions=40, pattern=Pattern("longformer", block=8, windows=(64,)), **SIZES)


@pytest.fixture(scope="module")
def trained(bert_run):
    return tiny.final_state(bert_run).params


@pytest.fixture(params=["run", "folder"])
def read(request, bert_run, trained, corpus_path, tmp_path):
    """(config, shapes, start, corpus) -> parameters that begin as those of the run, read from it or from its export."""
    of_run, source = Corpus(corpus_path), bert_run
    if request.param == "folder":
        source = tmp_path / "export"
        export(trained, tiny.BERT, of_run.tokenizer_path, source)
    return lambda config, shapes, start=None, corpus=of_run: load_weights(
        "--init-from", str(source), config, shapes, corpus, start
    )


def test_positions_are_copied_on_and_the_log_says_so(read, trained, caplog):
    with caplog.at_level(logging.WARNING):
        params = read(LONG, parameter_shapes(LONG))
    assert [r.getMessage() for r in caplog.records if "are repeated" in r.getMessage()][0].endswith(
        "its 32 positions are repeated up to 80"
    )
    before, after = dict(leaves(trained)), dict(leaves(params))
    table = before.pop("embeddings/positions")
    np.testing.assert_array_equal(after.pop("embeddings/positions"), np.concatenate([table, table, table[:16]]))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def test_another_sparse_pattern_is_said(read, trained, caplog):
    sparse = dataclasses.replace(tiny.BERT, pattern=Pattern("bigbird", block=4, random=1))
    with caplog.at_level(logging.WARNING):
        params = read(sparse, parameter_shapes(sparse))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, trained))
    said = "its weights are used with another sparse pattern: model.pattern.name is dense there and bigbird here"
    assert said in caplog.text and "positions" not in caplog.text


@pytest.fixture
def longer(corpus_path, tmp_path):
    """(config, corpus) with two tokens after all others."""
    made = stored.load(Corpus(corpus_path).tokenizer_path)
    stored.save(with_sentinels(made, 2), tmp_path / "longer")
    config = dataclasses.replace(tiny.BERT, vocab_size=tiny.BERT.vocab_size + 2)
    return config, SimpleNamespace(tokenizer_path=tmp_path / "longer")


def test_tokens_that_follow_a_model_s_begin_as_the_mean_of_the_others(read, trained, longer, caplog):
    """In the embeddings and in the head's bias; its own stay, padding is 0."""
    config, corpus = longer
    with caplog.at_level(logging.WARNING):
        params = read(config, parameter_shapes(config), corpus=corpus)
    assert "embeddings of 2 tokens that it lacks start as the mean of the others" in caplog.text
    before, after, size = dict(leaves(trained)), dict(leaves(params)), tiny.BERT.vocab_size
    for path in ("embeddings/tokens", "predictions/bias"):
        kept, table = before.pop(path)[:size], after.pop(path)
        np.testing.assert_array_equal(table[:size], kept)
        np.testing.assert_allclose(table[size : size + 2], [kept.mean(0)] * 2, rtol=1e-5)
        assert len(table) == 256 and not table[size + 2 :].any()
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def test_no_token_of_the_model_s_may_be_another_beside_those_that_follow(read, longer):
    config, corpus = longer
    file = corpus.tokenizer_path / "tokenizer.json"
    said = json.loads(file.read_text())
    vocab = said["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(said))
    with pytest.raises(UserError, match="its tokenizer gives .* the id .*; prepare the corpus with --tokenizer"):
        read(config, parameter_shapes(config), corpus=corpus)


def test_fewer_positions_are_refused(read):
    short = dataclasses.replace(tiny.BERT, positions=16)
    with pytest.raises(UserError, match="model.positions is 32 there and 16 here"):
        read(short, parameter_shapes(short))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """(config, start) -> parameters that begin as those of a RoBERTa in a folder of transformers."""
    folder = tmp_path_factory.mktemp("roberta")
    reference.torch_model(ROBERTA, "model").save_pretrained(folder)
    return lambda config, start=None: load(folder, config, parameter_shapes(config), folder, start)


def test_a_longformer_begins_as_the_roberta_that_it_goes_on_from(roberta, caplog):
    """With windows of the whole row it computes the same; so do its global tokens, by projections of their own."""
    with caplog.at_level(logging.WARNING):
        params = {config: roberta(config) for config in (ROBERTA, LONGFORMER)}
    assert "its 16 positions are repeated up to 40" in caplog.text
    tokens = np.random.default_rng(0).integers(5, 40, (2, 16)).astype(np.int32)
    segments = (np.arange(16) < np.array([[16], [11]])).astype(np.int32)
    inputs = {"tokens": tokens, "types": np.zeros_like(tokens), "segments": segments}
    chosen = {"globals": np.array([[0, 7], [3, -1]], np.int32)}
    short, long = (
        jax.jit(functools.partial(encoded, config))(params[config], given)
        for config, given in ((ROBERTA, inputs), (LONGFORMER, inputs | chosen))
    )
    np.testing.assert_allclose(long[segments > 0], short[segments > 0], rtol=0, atol=2e-6)


def encoded(config, params, inputs):
    model = family_of(config).module(config, Program(dtype="float32"))
    return model.apply({"params": params}, inputs, method="encode")


def test_the_fields_that_both_families_have_are_compared(roberta):
    with pytest.raises(UserError, match="model.norm_epsilon is 1e-05 there and 0.001 here"):
        roberta(dataclasses.replace(LONGFORMER, norm_epsilon=1e-3))


def continuing(monkeypatch, name, continues):
    monkeypatch.setitem(registry.FAMILIES, name, registry.FAMILIES[name]._replace(continues=continues))


def test_a_family_that_is_not_named_is_refused(roberta, bert_run, corpus_path, monkeypatch):
    for name in ("longformer", "bigbird"):
        continuing(monkeypatch, name, {})
    with pytest.raises(UserError, match="'roberta' model, but the recipe's is 'longformer'"):
        roberta(LONGFORMER)
    with pytest.raises(UserError, match="'bert' model, but the recipe's is 'bigbird'"):
        load_weights("--init-from", str(bert_run), BIGBIRD, parameter_shapes(BIGBIRD), Corpus(corpus_path))


def test_a_unilm_begins_as_a_bert_whose_token_types_are_repeated_for_its_tasks(bert_run, trained, corpus_path, caplog):
    config = UniLMConfig(**vars(tiny.BERT) | {"types": 6})
    params = load_weights("--init-from", str(bert_run), config, parameter_shapes(config), Corpus(corpus_path))
    for path, leaf in leaves(params):
        theirs = dict(leaves(trained))[path]
        rows = np.arange(6) % 2 if path == "embeddings/types" else slice(None)
        np.testing.assert_array_equal(leaf, theirs[rows], err_msg=path)
    assert "its 2 types are repeated up to 6" in caplog.text


def test_a_distilbert_begins_as_a_bert_of_its_sizes_without_token_types_and_pooler(bert_run, trained, corpus_path):
    fields = {field.name: getattr(tiny.BERT, field.name) for field in dataclasses.fields(DistilBertConfig)}
    config, theirs = DistilBertConfig(**fields), dict(leaves(trained))
    params = load_weights("--init-from", str(bert_run), config, parameter_shapes(config), Corpus(corpus_path))
    for path, leaf in leaves(params):
        np.testing.assert_array_equal(leaf, theirs.pop(path), err_msg=path)
    assert {path.split("/")[0] for path in theirs} == {"embeddings", "pooler", "pair"}
    assert {path for path in theirs if path.startswith("embeddings")} == {"embeddings/types"}


BIGBIRD = BigBirdConfig(**{**vars(tiny.BERT), "positions": 80, "pattern": Pattern("bigbird", block=8)})


def test_a_bigbird_begins_as_a_shorter_bert(bert_run, trained, corpus_path):
    params = load_weights("--init-from", str(bert_run), BIGBIRD, parameter_shapes(BIGBIRD), Corpus(corpus_path))
    for path, leaf in leaves(params):
        theirs = dict(leaves(trained))[path]
        rows = np.arange(80) % 32 if path == "embeddings/positions" else slice(None)
        np.testing.assert_array_equal(leaf, theirs[rows], err_msg=path)
