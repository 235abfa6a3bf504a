"""Hidden states and attention of each layer beside transformers', linear probes beside scikit-learn's."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from data_pipelines.examples.layout import Feature
from finetune import probing
from finetune.__main__ import main
from finetune.commands.attention import of_heads
from finetune.inside import attention_shares, layer_states, plain
from finetune.probing import fit, predicted, standardised
from finetune.rows import Row, joined
from models.families.modernbert import ModernBertConfig
from models.families.registry import family_of
from tests.models.shapes import usual_heads
from tests.pretrain import reference, tiny

BERT, GPT2 = (
    dataclasses.replace(config, depth=2, width=16, feed_forward=32, positions=32) for config in (tiny.BERT, tiny.GPT2)
)
MODERN = ModernBertConfig(vocab_size=195, positions=32, width=32, depth=4, heads=2, feed_forward=48)


@pytest.mark.parametrize("config", [BERT, GPT2, MODERN], ids=["bert", "gpt2", "modernbert"])
def test_states_and_attention_of_each_layer_are_transformers(config, tmp_path):
    theirs = reference.torch_model(config, "model")
    theirs.save_pretrained(tmp_path / "model")
    params = reference.to_ours({"model": theirs}, config, tmp_path)
    module = family_of(config).module(config, reference.FLOAT32, usual_heads(config))
    batch = reference.random_batch(config, 0, rows=3, length=12, slots=2)
    inputs = reference.torch_inputs(batch)
    if config is not BERT:
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        expected = theirs(**inputs, output_hidden_states=True, output_attentions=True)
    opened = SimpleNamespace(module=module, source="here")
    model = plain(opened, {name: Feature((12,)) for name in ("tokens", "types", "segments")})
    look = jax.jit(lambda params, batch: (layer_states(model, params, batch), attention_shares(model, params, batch)))
    states, shares = look(params, batch)
    real = batch["segments"] > 0
    assert len(states) == len(expected.hidden_states) == 1 + config.depth
    assert len(shares) == len(expected.attentions) == config.depth
    for one, other in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(one[real], other.numpy()[real], rtol=1e-4, atol=1e-5)
    for one, other in zip(shares, expected.attentions, strict=True):
        np.testing.assert_allclose(one.swapaxes(1, 2)[real], other.numpy().swapaxes(1, 2)[real], atol=1e-5)


@pytest.fixture(scope="module")
def drawn():
    """States of two layers, of which the second tells the label."""
    rng = np.random.default_rng(0)
    labels, states = rng.integers(0, 3, 200), rng.normal(size=(200, 2, 4)).astype(np.float32)
    states[np.arange(200), 1, labels] += 1.5
    return states, labels


def test_a_probe_is_scikit_learns_and_a_mix_finds_the_layer_that_tells(drawn):
    states, labels = drawn
    probe = fit(states[:, 1:], labels, 3, penalty=5.0)
    expected = LogisticRegression(C=1 / 5.0, tol=1e-8, max_iter=1000).fit(states[:, 1], labels)
    scores = np.asarray(probe.scores(states[:, 1:]))
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(shares, expected.predict_proba(states[:, 1]), atol=2e-3)
    mix, first = fit(states, labels, 3), fit(states[:, :1], labels, 3)
    assert np.exp(mix.mix[1]) / np.exp(mix.mix).sum() > 0.8
    right = [(predicted(*of) == labels).mean() for of in ((mix, states), (first, states[:, :1]))]
    assert right[0] > right[1] + 0.2


def test_each_number_is_standardised_over_the_words_to_train_on(drawn):
    train, other = drawn[0] * 3 + 5, np.full((1, 2, 4), 5, np.float32)
    expected = (5 - train.mean(0)) / train.std(0)
    standardised(train, other)
    np.testing.assert_allclose((train.mean(0), train.std(0)), (np.zeros((2, 4)), np.ones((2, 4))), atol=1e-4)
    np.testing.assert_allclose(other[0], expected, rtol=1e-3)


def test_probes_read_the_word_off_its_own_states(begun, tmp_path, capsys):
    rng, words, files = np.random.default_rng(0), ["Kilo", "mu", "nade", "po", "te"], []
    for name, rows in {"train": 60, "dev": 20}.items():
        sentences = [rng.choice(words, rng.integers(1, 9)) for _ in range(rows)]
        text = "\n".join("".join(f"{word} {word[0].upper()}\n" for word in of) for of in sentences)
        (tmp_path / name).write_text(text)
        files += [f"--{name}", str(tmp_path / name)]
    assert main(["probe", str(begun / "from"), *files, "--out", str(tmp_path), "--length", "8", "--words", "200"]) == 0
    header, *rows = (line.split("\t") for line in (tmp_path / "probe.tsv").read_text().splitlines())
    assert header == ["layer", "accuracy", "share in the mix"]
    assert [row[0] for row in rows] == ["most frequent", "0 (embeddings)", "1", "mix of all", "last 1 side by side"]
    assert float(rows[0][1]) < 0.5 and all(float(row[1]) > 0.95 for row in rows[1:])
    assert float(rows[1][2]) + float(rows[2][2]) == pytest.approx(1)
    assert (tmp_path / "probe.png").stat().st_size and "words, see --words" in capsys.readouterr().out


def test_a_text_is_the_mean_of_its_tokens_that_are_not_special(monkeypatch):
    made = SimpleNamespace(special={"unk": 1, "cls": 2, "sep": 3})
    rows = joined([Row([2, 5, 1, 3]), Row([2, 3]), Row([2, 6, 3])])
    states = np.random.default_rng(0).normal(size=(2, 3, 8, 4)).astype(np.float32)
    batches = [([1, 2], states[:, 1:]), ([0], states[:, :1])]
    monkeypatch.setattr(probing, "looked", lambda *_: ((np.array(of), part) for of, part in batches))
    found = probing.text_states(SimpleNamespace(tokenizer=made), rows)
    expected = [states[:, 0, 1:3].mean(1), np.zeros((2, 4)), states[:, 2, 1]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    joined_layers = probing.side_by_side(np.concatenate([found, found + 1], axis=1), 3)
    np.testing.assert_allclose(joined_layers[0, 0], np.concatenate([found[0, 1], *(found[0] + 1)]))


def test_attention_of_a_text_is_drawn_with_a_line_for_each_head(begun, tmp_path, capsys):
    out = tmp_path / "a.png"
    assert main(["attention", str(begun / "from"), "--text", "Kilo mu", "te", "--out", str(out)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(lines) == 2 and out.stat().st_size
    assert main(["attention", str(begun / "from"), "--text", "a", "--trees", "b", "--out", str(out)]) == 2
    assert "--text: give either this or --trees" in capsys.readouterr().err
    assert main(["attention", str(begun / "from"), "--text", "a", "b", "c", "--out", str(out)]) == 2
    assert "--text: has 3 texts; give one or two" in capsys.readouterr().err


def test_figures_of_heads_are_those_of_their_shares():
    shares = np.stack([np.full((4, 4), 0.25), np.eye(4)[::-1]])
    entropy, distance, special = of_heads(shares, np.array([True, False, False, True]))
    np.testing.assert_allclose(entropy, [np.log(4), 0], atol=1e-6)
    np.testing.assert_allclose(distance, [(3 + 2 + 1) * 2 / 16 + (1 + 1 + 2) * 2 / 16, 2])
    np.testing.assert_allclose(special, [0.5, 0.5])
