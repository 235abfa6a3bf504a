"""Rows of packed documents as a model reads them, and what the objective adds up."""

import dataclasses
import functools
import json
import math
import sys
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.__main__ import main as prepare
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.next_tokens import StridedDocuments
from data_pipelines.text.encoding import token_bytes
from models.attention.mask import Mask
from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.__main__ import main
from pretrain.commands import eval as evaluation
from pretrain.commands.eval import Eval, evaluate
from pretrain.objectives.next_token_prediction import NextTokenPrediction, StridedPerplexity
from pretrain.objectives.objective import Moment, Phase
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import evaluate as evaluators
from pretrain.training.assembly import assemble
from pretrain.training.evaluate import unigram
from tests.contract import cases
from tests.data_pipelines.corpora import SPECIAL, epoch, numbered, write_corpus
from tests.pretrain import tiny

CASE = cases.CASES["gpt2"]
MODEL, VARIABLES = FAMILIES["gpt2"].module(CASE.model, Program()), {"params": cases.params(CASE)}

DOCUMENTS = numbered([[6], [9], [4, 3]])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("c") / "c", DOCUMENTS, 100, special=SPECIAL | {"eod": 99}))


def row(objective, corpus):
    """The one row of the corpus."""
    return epoch(make_examples(objective.rows(Phase(1.0, 32, 1)), corpus, "train", 1, seed=0))


@functools.cache
def of_embeddings():
    """Gradients of a weighted sum of the losses by the embeddings that the layers read."""

    def loss(x, segments, weights, targets):
        hidden = MODEL.apply(VARIABLES, x, Mask(segments, causal=True), None, method="transform")[0]
        log = jax.nn.log_softmax(MODEL.apply(VARIABLES, hidden, method="token_logits"))
        return -jnp.sum(weights.reshape(-1) * log[jnp.arange(len(log)), targets.reshape(-1)])

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("separate", [True, False])
def test_a_documents_loss_depends_on_no_other_document_in_the_row_if_they_are_separate(corpus, separate):
    told = row(NextTokenPrediction(separate=True), corpus)["segments"]
    batch = row(NextTokenPrediction(separate=separate), corpus)
    x = MODEL.apply(VARIABLES, batch, method="embed")
    last = (told == told.max()).astype(np.float32)
    gradient = np.abs(of_embeddings()(x, batch["segments"], last, batch["targets"])).max(-1)
    assert gradient[last > 0].max() > 1e-3
    assert told.max() == 3 and (gradient[last == 0].max() == 0) == separate


def test_positions_that_restart_are_read(corpus):
    plain, anew = (row(NextTokenPrediction(restart=restart), corpus) for restart in (False, True))
    assert "positions" not in plain and anew["positions"].max() < 24
    table = VARIABLES["params"]["embeddings"]["positions"]
    moved = MODEL.apply(VARIABLES, anew, method="embed") - MODEL.apply(VARIABLES, plain, method="embed")
    np.testing.assert_allclose(moved[0], table[anew["positions"][0]] - table[: moved.shape[1]], atol=1e-6)


def test_z_loss_is_the_mean_square_of_the_log_normaliser(corpus):
    objective, batch = NextTokenPrediction(z_loss=0.25), row(NextTokenPrediction(), corpus)
    moment = Moment(np.zeros((1, 2), np.uint32), False)
    terms, *_ = objective.loss(MODEL, VARIABLES["params"], batch, {}, moment)
    hidden = MODEL.apply(VARIABLES, batch, method="decode")
    normaliser = jax.nn.logsumexp(MODEL.apply(VARIABLES, hidden, method="token_logits"), axis=-1)
    np.testing.assert_allclose(terms["z"].sum, (normaliser**2) @ batch["weights"].reshape(-1), rtol=1e-5)
    assert objective.weights(batch) == dict.fromkeys(("lm", "z"), batch["weights"].sum())
    assert objective.coefficients(0) == {"lm": 1.0, "z": 0.25}
    without = dataclasses.replace(objective, z_loss=0.0)
    assert without.coefficients(0) == {"lm": 1.0} and without.weights(batch).keys() == {"lm"}


def test_the_auxiliary_loss_is_the_inputs_with_its_own_mean():
    objective = NextTokenPrediction(layout="input-target", predict="target", auxiliary=0.5)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(5, 90, (2, 12)).astype(np.int32) for name in ("tokens", "targets")}
    of_target = (np.arange(12) >= np.array([[5], [8]])).astype(np.float32)
    batch |= {"segments": np.ones((2, 12), np.int32), "weights": of_target, "auxiliary_weights": 1 - of_target}
    moment = Moment(np.zeros((2, 2), np.uint32), False)
    loss = lambda params: (lambda terms: terms["lm"].sum / 11 + 0.5 * terms["auxiliary"].sum / 13)(
        objective.loss(MODEL, params, batch, {}, moment)[0]
    )

    def plain(params):
        hidden = MODEL.apply({"params": params}, batch, method="decode")
        log = jax.nn.log_softmax(MODEL.apply({"params": params}, hidden, method="token_logits"))
        losses = -log[jnp.arange(24), batch["targets"].reshape(-1)]
        main = of_target.reshape(-1)
        return losses @ main / 11 + 0.5 * (losses @ (1 - main)) / 13

    assert objective.weights(batch) == {"lm": 11, "auxiliary": 13}
    assert objective.coefficients(0) == {"lm": 1.0, "auxiliary": 0.5}
    found, expected = (jax.jit(jax.value_and_grad(f))(VARIABLES["params"]) for f in (loss, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layout": "pairs"}, "objective.layout='pairs': use one of documents, input-target"),
        ({"predict": "target"}, "objective.predict='target': needs objective.layout=input-target"),
        ({"layout": "input-target", "separate": True}, "a row is one document; leave out separate, restart"),
        ({"layout": "input-target", "auxiliary": 0.5}, "objective.auxiliary=0.5: needs objective.predict=target"),
        ({"layout": "input-target", "predict": "target", "auxiliary": 0.5, "z_loss": 1.0}, "objective.z_loss=1.0"),
    ],
)
def test_what_does_not_go_together_is_said(fields, said):
    with pytest.raises(ValueError, match=said):
        NextTokenPrediction(**fields)


LENGTH, STRIDE = 8, 3


@jax.jit
def log_probabilities(tokens):
    inputs = {"tokens": tokens[None], "segments": jnp.ones((1, LENGTH), jnp.int32)}
    hidden = MODEL.apply(VARIABLES, inputs, method="decode")
    return jax.nn.log_softmax(MODEL.apply(VARIABLES, hidden, method="token_logits"))


def plain_loop(document, end):
    """Nats of a document's tokens and of the end token behind; what stands before is an end token."""
    text, nats, done, begin = [end, *document, end], 0.0, 0, 0
    while done < len(text) - 1:
        stop = min(begin + LENGTH, len(text) - 1)
        row = np.pad(text[begin:stop], (0, LENGTH - (stop - begin)))  # which no token before sees
        log = log_probabilities(jnp.asarray(row, jnp.int32))
        nats -= sum(float(log[place - begin, text[place + 1]]) for place in range(done, stop))
        done, begin = stop, begin + STRIDE
    return nats


def strided(corpus):
    """(nats, tokens) of all rows."""
    objective, lone = StridedPerplexity(stride=STRIDE), Moment(np.zeros((64, 2), np.uint32), False)
    rows = epoch(make_examples(objective.rows(Phase(1.0, LENGTH, 1)), corpus, "train", 1, seed=0))
    terms, *_ = objective.loss(MODEL, VARIABLES["params"], rows, {}, lone)
    return terms["lm"].sum, objective.weights(rows)["lm"]


def test_the_perplexity_of_whole_documents_is_that_of_a_plain_loop(corpus):
    texts = [sum(document, []) for document in DOCUMENTS]
    nats, tokens = strided(corpus)
    np.testing.assert_allclose(nats, sum(plain_loop(text, 99) for text in texts), rtol=1e-5)
    assert tokens == sum(len(text) + 1 for text in texts)


BASELINES = {  # objective -> how often each document's end token is predicted, and whether its code is
    NextTokenPrediction(): (1, True),
    StridedPerplexity(): (1, False),
    NextTokenPrediction(layout="input-target"): (2, False),  # its delimiter, too
    NextTokenPrediction(layout="input-target", predict="target"): (1, False),
}


@pytest.mark.parametrize("objective", BASELINES, ids=["documents", "strided", "all", "target"])
def test_the_unigram_counts_what_stands_around_documents(tmp_path, objective):
    lines = [{"domain": domain, "a": "abc", "b": "b"} for domain in ("Law", "Food", "Law")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["prepare", "--source", f"jsonl:{tmp_path}/x.jsonl", "--tokenizer", "bytes", "--heldout", "0"]
    command += ["--field", "a", "--field", "b", "--code-field", "domain", "--code", "Law", "--code", "Food"]
    assert prepare([*command, "--out", str(tmp_path / "c")]) == 0
    corpus = Corpus(tmp_path / "c")
    ends, codes = BASELINES[objective]
    counts = corpus.token_counts() + 1.0
    counts[corpus.special["sep"]] += 3 * ends
    counts[corpus.special["code_Law"]] += 2 * codes
    counts[corpus.special["code_Food"]] += codes
    phase = Phase(1.0, 8, 1)
    rows = epoch(make_examples(objective.rows(phase), corpus, "train", 1, seed=0))
    nats = -np.log(counts / counts.sum())[rows["targets"]][rows["weights"] > 0]
    assert unigram(objective, phase, [rows], corpus, None)["lm_loss"] == pytest.approx(nats.mean())


def test_eval_with_a_stride_keeps_what_was_trained_and_refuses_input_and_target():
    trained = NextTokenPrediction(separate=True, restart=True, z_loss=0.25)
    striding = evaluation.striding(assemble(tiny.gpt2(objective=trained)), 3).recipe.objective
    assert striding == StridedPerplexity(separate=True, restart=True, z_loss=0.25, stride=3)
    assert striding.rows(Phase(1.0, 8, 1)) == StridedDocuments(8, 3, separate=True, restart=True)
    with pytest.raises(UserError, match="--stride 3: gpt2 reads rows of input and target"):
        evaluation.striding(assemble(tiny.gpt2(objective=NextTokenPrediction(layout="input-target"))), 3)


def test_eval_with_a_stride_reads_every_token_of_whole_documents(gpt2_run, capsys, monkeypatch):
    corpus = next(iter(RunDirectory(gpt2_run).open_corpora(None).values()))
    figures = evaluate(Eval(gpt2_run, examples=10**6, stride=16))
    expected = math.exp(figures["lm_loss"])
    assert "perplexity" in capsys.readouterr().out and figures["perplexity"] == pytest.approx(expected, rel=1e-5)
    size = token_bytes(corpus.tokenizer_path)
    tokens = np.concatenate([part.array("heldout", "tokens") for part in corpus.parts])
    nats = figures["lm_loss"] * (len(tokens) + corpus.size("heldout")["documents"])
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / size[tokens].sum(), rel=1e-5)
    read = []
    nothing = Mock(return_value={}, **{"baselines.return_value": {}})
    monkeypatch.setattr(evaluators, "Evaluators", lambda stage, corpora, examples: read.append(examples) or nothing)
    for more in (["--stride", "16"], [], ["--stride", "16", "--examples", "5"]):
        assert main(["eval", str(gpt2_run), *more]) == 0
    assert read == [sys.maxsize, 1024, 5]
