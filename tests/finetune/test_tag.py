"""Tagging: files of each form, rows in which every word is, a run with a CRF, and the loss of transformers' class."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from seqeval.metrics import classification_report
from seqeval.scheme import IOBES

from data_pipelines.tokenizers import stored
from finetune.__main__ import main
from finetune.metrics import of_tags
from finetune.sentences import NONE, rows_of
from finetune.tasks.tag import Tag
from models.blocks.crf import CRF
from models.blocks.heads import TAGGER
from models.families.registry import FAMILIES
from pretrain.huggingface.tensors import tensors
from pretrain.objectives.objective import Moment
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import model_of
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference, tiny
from tests.pretrain.hugging_face_folders import tokenizers  # noqa: F401 (a fixture)

CONFIG = dataclasses.replace(tiny.BERT, dropout=0.0, attention_dropout=0.0, labels=("O", "B-X", "I-X", "B-Y"))
WORDS = ["Kilo", "mu", "nade", "po", "risu", "te", "voza"]
TAGS = dict(zip(WORDS, ["B-X", "O", "I-X", "B-Y", "O", "O", "O"], strict=True))


def conll(path, sentences):
    path.write_text("\n".join("".join(f"{word}\t{TAGS[word]}\n" for word in words) for words in sentences), "utf-8")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of sentences of which some are longer than a row."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for name, rows in {"train": 32, "dev": 8}.items():
        conll(folder / f"{name}.conll", [rng.choice(WORDS, rng.integers(1, 16)) for _ in range(rows)])
    return folder


@pytest.fixture
def arguments(begun, files, tmp_path):
    """Of a run, with more of them."""
    given = ["--from", begun / "from", "--train", files / "train.conll", "--dev", files / "dev.conll"]
    size = ["--batch-size", 8, "--length", 8, "--epochs", 4, "--peak", 1e-2]
    run = ("run", "tag", *given, *size, "--workdir", tmp_path / "run", "--log-every", 8)
    return lambda *more: [*map(str, (*run, *more))]


def test_a_run_with_a_crf_answers_each_word_and_goes_to_transformers_without_it(arguments, files, tmp_path, caplog):
    run, out, hf = tmp_path / "run", tmp_path / "out.jsonl", tmp_path / "hf"
    at_the_end = ["--eval-every", "99", "--checkpoint-every", "99"]
    assert main(arguments("--crf", *at_the_end)) == 0
    assert "sentences are longer than --length: each is split into rows" in caplog.text
    (best,) = read_metrics(RunDirectory(run), "eval")
    assert best["score"] == best["f1"] > 0.5
    assert main(["eval", str(run), "--test", str(files / "dev.conll"), "--predictions", str(out)]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    read = Tag().read(files / "dev.conll")
    assert [tuple(one["words"]) for one in answers] == [one.words for one in read]
    right = [tag == said for one, answer in zip(read, answers, strict=True)
             for tag, said in zip(one.label, answer["tags"], strict=True)]  # fmt: skip
    assert np.mean(right) == pytest.approx(best["accuracy"])
    for _ in range(2):  # an export of the same run is replaced
        assert main(["export", str(run), "--to", str(hf)]) == 0
    assert "transformers has no class with a crf" in caplog.text
    assert load_file(hf / "crf.safetensors")["kernel"].shape == (4, 4)
    load = transformers.AutoModelForTokenClassification.from_pretrained
    model, info = load(hf, output_loading_info=True)
    assert not any(info.values()) and model.config.id2label[0] == "O"


def parts(task, folder):
    """(the model of a task, random parameters, transformers' model of the same, a batch)."""
    theirs = reference.torch_model(CONFIG, "model", heads=(TAGGER,))
    theirs.save_pretrained(folder)
    params = reference.load(folder, CONFIG, parameter_shapes(CONFIG, (TAGGER,)), folder)
    batch = reference.random_batch(CONFIG, 0)
    words = np.where((batch["tokens"] % 3 > 0) & (batch["segments"] > 0), np.arange(32), NONE)
    batch |= {"words": words, "labels": np.where(words == NONE, NONE, batch["tokens"] % 4).astype(np.int32)}
    return model_of(CONFIG, task.asks, reference.FLOAT32), params, theirs, batch


def test_logits_loss_and_gradients_are_transformers(tmp_path):
    task = Tag()
    model, params, theirs, batch = parts(task, tmp_path)
    labels = torch.from_numpy(np.where(batch["labels"] == NONE, -100, batch["labels"])).long()
    expected = theirs(**reference.torch_inputs(batch), labels=labels)
    expected.loss.backward()

    def loss(params):
        scores = task.scores(model, params, batch)
        return task.terms(scores, batch)["tag"].sum / task.weights(batch)["tag"], scores["logits"]

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    real, logits_there = batch["segments"] > 0, expected.logits.detach().numpy()
    assert np.abs(logits - logits_there)[real].max() <= 1e-5 * np.abs(logits_there).max()
    assert float(value) == pytest.approx(expected.loss.item(), rel=1e-5)
    of_torch = reference.torch_gradients(theirs)
    found = {name: one.array() for name, one in tensors(jax.device_get(gradients), CONFIG, "model").items()}
    assert {*found} == {*of_torch}
    whole = np.sqrt(sum(np.square(one).sum() for one in of_torch.values()))
    for name, one in of_torch.items():  # keys' biases change no softmax
        assert np.linalg.norm(found[name] - one) <= 2e-5 * np.linalg.norm(one) + 1e-7 * whole, name


def test_a_crf_without_transitions_is_the_softmax_of_first_pieces(tmp_path):
    softmax, crf = Tag(), Tag(crf=True)
    model, params, _, batch = parts(crf, tmp_path)
    shapes = parameter_shapes(CONFIG, (TAGGER, CRF))[CRF]
    params |= {CRF: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)}

    @jax.jit
    def both(params):
        terms = [task.loss(model, params, batch, {}, Moment(None, False))[0]["tag"].sum for task in (softmax, crf)]
        parts = [dataclasses.replace(task, part=(1, 3)) for task in (softmax, crf)]
        return terms, [task.scores(model, params, batch)["tags"] for task in (softmax, crf, *parts)]

    sums, (*tags, one, other) = both(params)
    assert one.max() == other.max() == 1  # of several tasks each has its own labels alone
    assert float(sums[0]) == pytest.approx(float(sums[1]), rel=1e-5)
    assert (tags[0] == tags[1])[batch["words"] != NONE].all()


@pytest.mark.parametrize("name", [name for name, of in FAMILIES.items() if TAGGER in {head.name for head in of.heads}])
def test_a_crf_stands_beside_the_heads_of_each_class_for_tagging(name):
    family = FAMILIES[name]
    assert family.heads_with((TAGGER, CRF)) == (*family.heads_with((TAGGER,)), CRF)


FORMS = {
    "a.conll": "-DOCSTART- -X- O\n\nThe DT B-X\ncat NN I-X\n\n\nsat VB O\n",
    "a.tsv": "The\tB-X\ncat\tI-X\n\nsat\tO",
    "of_sentences.tsv": "text_a\tlabel\nThe\2cat\tB-X \2I-X\nsat\tO\n",
    "a.conllu": "# text = The cat\n1-2\tThecat" + "\t_" * 8 + "\n1\tThe\t_\tB-X" + "\t_" * 6 + "\n1.1\tx" + "\t_" * 8
    + "\n2\tcat\t_\tI-X" + "\t_" * 6 + "\n\n1\tsat\t_\tO" + "\t_" * 6 + "\n",
    "a.jsonl": '{"words": ["The", "cat"], "tags": ["B-X", "I-X "]}\n{"words": ["sat"], "tags": ["O"]}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_sentences_of_each_kind_of_file_are_the_same(name, tmp_path):
    (tmp_path / name).write_text(FORMS[name])
    found = Tag().read(tmp_path / name)
    assert [(one.words, one.label) for one in found] == [(("The", "cat"), ("B-X", "I-X")), (("sat",), ("O",))]


def test_columns_may_be_others_and_tags_may_be_missing(tmp_path):
    file = tmp_path / "a.conll"
    file.write_text("1 the DT O\n2 cat NN B-X\n")
    (found,) = Tag(token_column=2, label_column=3).read(file)
    assert (found.words, found.label) == (("the", "cat"), ("DT", "NN"))
    file.write_text("the\ncat\n")
    (found,) = Tag().read(file, is_labelled=False)
    assert (found.words, found.label) == (("the", "cat"), None)


BAD = {
    "a.conll": ("the DT O\ncat NN\n", "a.conll, line 2: has 2 columns, but earlier lines have 3; correct it"),
    "b.conll": ("the\ncat\n", "b.conll, line 1: 'the' has no tag; give each word a tag"),
    "c.conll": ("\n\n", "c.conll: has no sentences; give another file"),
    "d.conll": ("the\tO\n\tO\n", "d.conll, line 2: needs a word in column 1 and its tag in column 2; correct it"),
    "a.tsv": ("text_a\tlabel\na\2b\tO\n", "a.tsv, line 2: has 2 words and 1 tags; give each word a tag"),
    "a.jsonl": (
        '{"words": ["a"], "tags": ["O", "O"]}',
        "a.jsonl, line 1: has 1 words and 2 tags; give each word a tag",
    ),
    "b.jsonl": ('{"words": "a", "tags": ["O"]}', "b.jsonl, line 1: words='a' is not a non-empty list; give one"),
    "c.jsonl": (
        '{"tokens": ["a"], "tags": ["O"]}',
        "c.jsonl, line 1: has no words, but has tokens, tags; name columns with --words",
    ),
    "e.conll": ("the\tO\na\tO\n", "--train: all words have the tag O; give at least two tags"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_file_is_one_line_that_names_it(name, arguments, tmp_path, capsys):
    content, message = BAD[name]
    (tmp_path / name).write_text(content)
    assert main(arguments("--train", tmp_path / name)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_tag_that_only_dev_has_is_named_with_its_line(arguments, tmp_path, capsys):
    (tmp_path / "dev.conll").write_text("mu\tO\n\nte\tB-Z\n")
    assert main(arguments("--dev", tmp_path / "dev.conll")) == 2
    assert "dev.conll, line 3: --train has no tag B-Z; did you mean" in capsys.readouterr().err


SENTENCES = [["the", "quick", "brownfox", "jumps", "over"], ["corpus"], ["judgements"] * 9]


@pytest.mark.parametrize("kind", ["wordpiece", "roberta", "gpt2", "t5"])
@pytest.mark.parametrize("length", [8, 80])
def test_each_word_is_in_one_row_with_all_of_its_pieces(tokenizers, kind, length):  # noqa: F811
    made = stored.load(tokenizers[kind])
    rows = rows_of(made, SENTENCES, length)
    assert (max(map(len, rows)) > 1) == (length == 8)
    for words, of in zip(SENTENCES, rows, strict=True):
        whole = made.tokenizer.encode(" ".join(words))
        special = sum(whole.special_tokens_mask)
        inner = [token for row in of for token, owner in zip(row.tokens, row.owners, strict=True) if owner != NONE]
        if all(len(made.tokenizer.encode(word, add_special_tokens=False)) <= length - special for word in words):
            assert inner == [one for one, is_special in zip(whole.ids, whole.special_tokens_mask, strict=True)
                             if not is_special]  # fmt: skip
        found = [word for row in of for word in row.words.tolist() if word != NONE]
        assert found == [*range(len(words))]
        for row in of:
            assert len(row.tokens) <= length and (row.owners == NONE).sum() == special
            assert all(row.owners[at] == word for at, word in enumerate(row.words) if word != NONE)
            # A row begins with a word's first piece, and its first pieces are the first of their words
            firsts = np.flatnonzero(np.diff(row.owners, prepend=NONE) * (row.owners != NONE))
            assert firsts.tolist() == np.flatnonzero(row.words != NONE).tolist()


def test_all_pieces_may_be_trained_and_a_word_without_any_is_outside_and_counted(tokenizers, tmp_path, caplog):  # noqa: F811
    made, labels = stored.load(tokenizers["wordpiece"]), ("B-X", "O")
    (tmp_path / "a.tsv").write_text("judgementses\tB-X\n\u200b\tB-X\nthe\tO\n")
    examples = Tag().read(tmp_path / "a.tsv")
    first, every = (Tag(pieces=pieces).encode(examples, made, labels, 32) for pieces in ("first", "all"))
    assert "a.tsv: 1 words have no piece in this vocabulary, the first in line 2" in caplog.text
    assert first.of_tokens["labels"].tolist().count(0) == 1 < every.of_tokens["labels"].tolist().count(0)
    said = [np.zeros(len(first.tokens), np.int32)]
    (answer,) = Tag().answers(examples, first, {"tags": said}, labels)
    assert answer == {"words": ["judgementses", "\u200b", "the"], "tags": ["B-X", "O", "B-X"]}


def test_spans_are_seqevals_and_plain_tags_have_an_accuracy():
    right = [["B-X", "E-X", "O", "S-Y"], ["S-X", "O"]]
    given = [["B-X", "E-X", "S-Y", "O"], ["S-X", "O"]]
    expected = classification_report(right, given, mode="strict", scheme=IOBES, output_dict=True)["micro avg"]
    labels = sorted({tag for of in right for tag in of})
    found = of_tags(right, given, labels)
    assert found["f1"] == pytest.approx(expected["f1-score"]) and found["accuracy"] == pytest.approx(4 / 6)
    other = lambda of: [[tag.replace("E-", "L-").replace("S-", "U-") for tag in one] for one in of]
    assert of_tags(other(right), other(given), ["O", "B-X", "L-X", "U-X", "U-Y"]) == found
    assert of_tags([["I-X", "I-X"]], [["B-X", "I-X"]], ["I-X", "B-X"])["f1"] == 1  # what begins a span as I does
    assert of_tags([["DT", "NN"]], [["DT", "DT"]], ["DT", "NN"]) == {"accuracy": 0.5}
