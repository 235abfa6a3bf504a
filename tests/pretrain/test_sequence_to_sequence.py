"""What a decoder learns from inputs and targets: its start token, its layouts, its loss with label smoothing."""

import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.denoising import Denoising, Noises
from data_pipelines.examples.text_to_text import END, Pairs
from pretrain.objectives import sequence_to_sequence
from pretrain.objectives.objective import Moment
from pretrain.objectives.sequence_to_sequence import DENOISING, PhaseWithTargets, SequenceToSequence
from tests.data_pipelines.corpora import SPECIAL, numbered, rows_of, write_corpus
from tests.pretrain import tiny

PHASE = PhaseWithTargets(1.0, 16, 2, target_length=16)


@pytest.mark.parametrize(
    ("start", "model", "said"),
    [
        ("pad", 1, None),
        ("end", 2, None),
        ("pad", 2, "^objective.start=pad: is 1, the model starts with 2; set it to end"),
        ("end", 1, "^objective.start=end: is 2, the model starts with 1; set it to pad"),
        ("end", 9, "^--corpus c: targets can follow its pad token 1 or its end token 2, but the model starts .* 9"),
    ],
)
def test_targets_follow_the_token_that_the_model_begins_with(monkeypatch, start, model, said):
    monkeypatch.setattr(sequence_to_sequence, "start_of", lambda config: model)
    corpus = SimpleNamespace(path="c", special={"pad": 1, "sep": 2})
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        SequenceToSequence("input-target", start=start).check(tiny.T5, corpus, None)
    monkeypatch.setattr(sequence_to_sequence, "start_of", lambda config: 2)
    with pytest.raises(UserError, match="^objective.layout=prefix: .* the end token; use denoising or input-target"):
        SequenceToSequence("prefix").check(tiny.T5, corpus, None)


def test_layouts_are_made_with_what_they_read():
    noises = Noises(permute=0.0)
    assert SequenceToSequence(DENOISING, noises=noises).rows(PHASE) == Denoising(16, 16, noises)
    assert SequenceToSequence(DENOISING, start=END).rows(PHASE) == Denoising(16, 16, start=END)
    assert SequenceToSequence("input-target", start=END).rows(PHASE) == Pairs(16, 16, start=END)
    with pytest.raises(ValueError, match=r"^objective.noises: has no effect on objective.layout=prefix"):
        SequenceToSequence("prefix", noises=noises)
    with pytest.raises(ValueError, match=r"^objective.start: has no effect on objective.layout=span-corruption"):
        SequenceToSequence(start=END)
    with pytest.raises(ValueError, match="^objective.start='eos': use one of pad, end"):
        SequenceToSequence(DENOISING, start="eos")
    with pytest.raises(ValueError, match=r"^objective.label_smoothing=1.0: must be in \[0, 1\)"):
        SequenceToSequence(label_smoothing=1.0)


def test_the_unigram_model_of_noised_rows_knows_their_frames(tmp_path):
    corpus = Corpus(write_corpus(tmp_path / "c", numbered([[14, 14]] * 2)))
    objective = SequenceToSequence(DENOISING, start=END)
    weights = np.bincount(rows_of(objective.rows(PHASE), corpus)["targets"].ravel(), minlength=100)
    assert objective.token_counts(corpus, PHASE).tolist() == weights.tolist()
    assert SequenceToSequence(DENOISING).token_counts(corpus, PHASE)[SPECIAL["cls"]] == 0


class Fixed:
    """A model whose hidden states are given; 3 of its 16 rows are padding."""

    config = tiny.T5

    def __init__(self):
        random = np.random.default_rng(0)
        bias = np.where(np.arange(16) < 13, 0.0, -np.inf)
        hidden, table = (random.normal(size=shape) for shape in ((2, 5, 8), (16, 8)))
        self.factors = tuple(jnp.asarray(array, jnp.float32) for array in (hidden, table, bias))

    def apply(self, variables, *given, method):
        return self.factors if method == "softmax" else self.factors[0]


def test_label_smoothing_is_torchs_and_the_figure_is_the_plain_one():
    model, objective = Fixed(), SequenceToSequence(label_smoothing=0.2)
    batch = {"targets": np.arange(10).reshape(2, 5), "weights": np.float32([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])}
    terms, _, _ = objective.loss(model, {}, batch, {}, Moment((), train=False))
    factors, weights = objective.coefficients(0), objective.weights(batch)
    assert terms.keys() == factors.keys() == weights.keys()
    means = {name: float(term.sum / weights[name]) for name, term in terms.items()}
    hidden, table, _ = (torch.from_numpy(np.array(factor)) for factor in model.factors)
    logits, targets = (hidden @ table.T)[..., :13].reshape(10, 13)[:7], torch.arange(7)
    expected = lambda share: torch.nn.functional.cross_entropy(logits, targets, label_smoothing=share).item()
    assert means["lm"] == pytest.approx(expected(0.0), rel=1e-5)
    assert sum(factors[name] * means[name] for name in means) == pytest.approx(expected(0.2), rel=1e-5)
