"""Inputs and targets of documents with two segments, and of texts that are cut in two, as a plain loop makes them."""

import numpy as np
import pytest

from data_pipelines.__main__ import main
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.text_to_text import Halves, Pairs
from tests.data_pipelines.corpora import SPECIAL, fits, numbered, write_corpus
from tests.data_pipelines.prepared import command

TEXTS = [("ab", "c"), ("translate this", "x"), ("a", "a target that is too long"), ("q", "r")]
END = SPECIAL["sep"]


def all_of(layout, corpus):
    examples = make_examples(layout, corpus, "train", 1, seed=3)
    batch = examples.build(0, np.arange(examples.number))
    assert fits(batch, layout)
    shifted = np.insert(batch["targets"][:, :-1], 0, corpus.special["pad"], axis=1)
    np.testing.assert_array_equal(batch["decoder_tokens"], shifted)
    np.testing.assert_array_equal(batch["weights"], batch["decoder_segments"])
    return batch


def real(batch, tokens, segments):
    """The tokens of each row without padding, which is zeros behind them."""
    assert not (batch[tokens] * (1 - batch[segments])).any()
    return [row[: int(of.sum())].tolist() for row, of in zip(batch[tokens], batch[segments], strict=True)]


@pytest.mark.parametrize("prefix", [[], ["--code", "Task"]])
def test_pairs_are_the_inputs_and_targets_of_documents_each_with_its_end(tmp_path, prefix):
    lines = [{"input": one, "target": other} for one, other in TEXTS]
    given = ["--tokenizer", "bytes", "--heldout", "0", "--field", "input", "--field", "target", *prefix]
    assert command(tmp_path / "c", *given, lines=lines) == 0
    corpus = Corpus(tmp_path / "c")
    code = [corpus.special["code_Task"]] if prefix else []
    batch, end = all_of(Pairs(12, 8), corpus), corpus.special["sep"]
    ids = lambda text: [byte + 3 for byte in text.encode()]
    expected = {(*(code + ids(one))[:11], end): [*ids(other)[:7], end] for one, other in TEXTS}
    found = zip(real(batch, "tokens", "segments"), real(batch, "targets", "decoder_segments"), strict=True)
    assert {tuple(one): other for one, other in found} == expected
    with pytest.raises(UserError, match="need two segments"):
        make_examples(Pairs(12, 8), Corpus(write_corpus(tmp_path / "one", numbered([[3]]))), "train", 1, seed=0)


def test_a_task_prefix_is_text_before_each_input_and_rows_without_input_or_target_are_counted(tmp_path, capsys):
    lines = [{"input": one, "target": other} for one, other in TEXTS]
    half = [{"input": "", "target": "x"}, {"input": "x", "target": " "}, {"input": "x", "target": None}]
    rest = [{"input": "x"}, {"input": 1, "target": "x"}]
    given = ["--tokenizer", "bytes", "--heldout", "0", "--field", "input", "--field", "target", "--task-prefix", "do: "]
    assert command(tmp_path / "c", *given, lines=lines + half + rest) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for said in ("3 pairs with an empty side", "1 records without the field", "1 records whose field is not text"):
        assert said in printed
    corpus = Corpus(tmp_path / "c")
    batch, spelled = all_of(Pairs(40, 40), corpus), lambda tokens: bytes(token - 3 for token in tokens[:-1]).decode()
    found = zip(real(batch, "tokens", "segments"), real(batch, "targets", "decoder_segments"), strict=True)
    assert {(spelled(one), spelled(other)) for one, other in found} == {(f"do: {one}", other) for one, other in TEXTS}
    main(["show", str(tmp_path / "c")])
    assert "inputs begin with: 'do: '" in capsys.readouterr().out
    again = ["--append", "--field", "input", "--field", "target", "--source", f"jsonl:{tmp_path}/0.jsonl"]
    assert command(tmp_path / "c", *again, "--task-prefix", "other: ") == 2
    assert "with no --code and --task-prefix 'do: ' and not" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("causal", [False, True])
def test_a_text_is_cut_anywhere_and_both_halves_are_it(tmp_path, causal):
    corpus = Corpus(write_corpus(tmp_path / "c", numbered([[n] for n in range(1, 40)]), 2000))
    layout = Halves(9, 12, causal=causal)
    batch, cuts, size = all_of(layout, corpus), set(), 11 if causal else 8
    seen = []
    for one, other in zip(real(batch, "tokens", "segments"), real(batch, "targets", "decoder_segments"), strict=True):
        assert one[-1] == other[-1] == END and len(one) + len(other) == size + 2
        cuts.add(len(one) - 1)
        seen += one[:-1] + other[:-1]
    assert cuts == ({0} if causal else {*range(1, 8)})
    assert {*range(5, 5 + sum(range(1, 40)))} <= {*seen}
    with pytest.raises(UserError, match="target_length=2: no room for text; use at least 3"):
        Halves(9, 2, causal=causal)
