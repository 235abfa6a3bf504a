"""What is told of sources and tokenizers reaches the corpus."""

import gzip
import json
import re
import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import end_token
from data_pipelines.prepare import command, options, plan
from tests.data_pipelines.prepared import documents, run, splits


@pytest.mark.parametrize(
    "told, said",
    [
        ({"field": ("body",)}, "--field body: --source text:.* does not read it; leave it out"),
        ({"label_column": 0}, "--label-column 0: --source text:.* does not read it"),
        ({"kind": "jsonl", "documents": "blank-line"}, "--documents blank-line: --source jsonl:.* does not read it"),
        ({"tfds_dir": "x"}, "--tfds-dir x: --source text:.* does not read it"),
        ({"heldout": float("nan")}, "--heldout nan: give a share"),
        ({"heldout": -1}, "--heldout -1: give a share"),
        ({"heldout": 0.9}, "--heldout 0.9: give a share"),
        ({"processes": 0}, "--processes 0: give at least 1"),
        ({"vocab_size": 10**12}, f"--vocab-size {10**12}: use a number"),
        ({"vocab_size": 0}, "--vocab-size 0: use a number from 1"),
        ({"sentinels": -1}, "--sentinels -1: give a number from 0"),
        ({"part_size": 0}, "--part-size 0: give a number of MiB"),
        ({"steps": ("tag",)}, "--steps tag: there is no such step"),
        ({"task_prefix": ("a\n",)}, r"--task-prefix 'a\\n': has characters that do not print"),
        ({"task_prefix": ("a: ",)}, "--task-prefix 'a: ': stands before inputs that have targets, but --source text:"),
        ({"task_prefix": ("a: ", "b: ")}, "--task-prefix a:  --task-prefix b: : 2 for 1 sources"),
        ({"tokenizer": "wordpiece", "specials": "albert"}, "--specials albert: --tokenizer wordpiece does not have"),
        ({"tokenizer": "bpe", "specials": "albert"}, "--specials albert: .*bpe has roberta and gpt2"),
        *(
            ({"part": share}, f"--part {share}: give I/N with I from 0 to N - 1")
            for share in ("3", "3/3", "-1/3", "1/0", "a/b")
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name_before_a_source_is_looked_at(tmp_path, told, said):
    with pytest.raises(UserError, match=said):
        run(tmp_path / "out", f"{told.pop('kind', 'text')}:{tmp_path}/nothing", **told)
    with pytest.raises(UserError, match="--source is missing"):
        run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_option_that_one_of_the_sources_reads_is_taken(a_txt, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"body": "Another text."}')
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", f"jsonl:{tmp_path}/b.jsonl", field=("body",))
    assert len(documents(tmp_path / "out")) == 2


def test_without_beam_the_error_names_its_set_up(a_txt, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(UserError, match="^--runner needs Apache Beam: make setup-beam"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt", runner="direct")


@pytest.mark.parametrize("again", ["*.txt", "a.txt", "link.txt"])
def test_a_file_of_two_sources_is_refused(tmp_path, again):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("Some text.")
    if again == "link.txt":
        (tmp_path / again).symlink_to(tmp_path / "texts/a.txt")
    location = tmp_path / again if again == "link.txt" else tmp_path / "texts" / again
    with pytest.raises(UserError, match="txt: .*txt is also in --source text:.*/texts, .*stored twice; leave one"):
        run(tmp_path / "out", f"text:{tmp_path}/texts", f"text:{location}")


def test_each_source_may_have_its_language(tmp_path):
    for name in ("de", "en"):
        (tmp_path / f"{name}.text").write_text("Am 3. Mai kam er. Ja.")
    specs = f"text:{tmp_path}/de.text", f"text:{tmp_path}/en.text"
    manifest, _ = run(tmp_path / "out", *specs, language=("de", "en"))
    assert [len(sentences) for sentences in documents(tmp_path / "out")] == [2, 3]
    assert manifest["fields"]["languages"]["values"] == ["de", "en"]
    with pytest.raises(UserError, match="--language de --language en --language no: 3 for 2 sources; give one, or one"):
        run(tmp_path / "other", *specs, language=("de", "en", "no"))


@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer": "wordpiece", "vocab_size": 70}])
def test_sentinels_are_put_after_the_vocabulary_of_any_tokenizer(a_txt, tmp_path, tokenizer):
    plain, _ = run(tmp_path / "plain", f"text:{tmp_path}/a.txt", **tokenizer)
    manifest, _ = run(tmp_path / "out", f"text:{tmp_path}/a.txt", sentinels=3, **tokenizer)
    size = plain["vocab_size"]
    assert manifest["vocab_size"] == size + 3
    assert [manifest["special"][f"sentinel_{number}"] for number in range(3)] == [size + 2, size + 1, size]
    assert documents(tmp_path / "out") == documents(tmp_path / "plain")


@pytest.mark.parametrize("model_type", ["openai-gpt", "ctrl"])
def test_a_published_vocabulary_gets_a_token_that_ends_documents(tmp_path, model_type):
    """Theirs have none, which rows of next tokens say how to mend."""
    folder, source = tmp_path / "published", tmp_path / "a.txt"
    folder.mkdir()
    tokens = ["a@@", "a", "b", "ab"] if model_type == "ctrl" else ["a", "a</w>", "b</w>", "ab</w>"]
    words = {token: index for index, token in enumerate(["<unk>", *tokens])}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    source.write_text("ab a <|endoftext|>")
    run(tmp_path / "without", f"text:{source}", tokenizer=str(folder))
    with pytest.raises(UserError, match="no eod or sep token.*; prepare it with --end-of-text"):
        end_token(Corpus(tmp_path / "without"))
    manifest, _ = run(tmp_path / "out", f"text:{source}", tokenizer=str(folder), end_of_text=True)
    assert manifest["vocab_size"] == 6 and {"eod": 5, "bos": 5, "eos": 5}.items() <= manifest["special"].items()
    assert end_token(Corpus(tmp_path / "out")) == 5 not in Corpus(tmp_path / "out").parts[0].array("train", "tokens")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert theirs("ab a<|endoftext|>")["input_ids"] == [4, 2, 5] and theirs.eos_token_id == 5


@pytest.mark.parametrize("trained", [True, False])
def test_a_second_token_that_ends_documents_is_refused(a_txt, tmp_path, trained):
    bpe = {"tokenizer": "bpe", "specials": "gpt2", "vocab_size": 260}
    if not trained:
        run(tmp_path / "gpt2", f"text:{tmp_path}/a.txt", **bpe)
        bpe = {"tokenizer": str(tmp_path / "gpt2" / "tokenizer")}
    said = "a trained bpe tokenizer already ends documents" if trained else r"the tokenizer has <\|endoftext\|>"
    with pytest.raises(UserError, match=f"--end-of-text: {said}.*; leave it out"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt", **bpe, end_of_text=True)


@pytest.fixture
def small(monkeypatch):
    """A MiB is 10 kB, and a unit larger."""
    for module in (options, plan, command):
        monkeypatch.setattr(module, "MIB", 10_000)


def test_parts_have_the_size_that_is_told_also_where_units_are_larger(tmp_path, small):
    for name in "ab":
        (tmp_path / f"{name}.text").write_text("One line of text.\n\n" * 763)  # 14.5 kB
    specs = f"text:{tmp_path}/a.text", f"text:{tmp_path}/b.text"
    for size, parts in ((1, 3), (2, 1), (1024, 1)):
        manifest, _ = run(tmp_path / f"{size}", *specs, documents="blank-line", part_size=size)
        assert len(manifest["parts"]) == parts
        assert splits(manifest)["train"]["documents"] == 2 * 763


def test_steps_change_the_text_of_the_corpus_and_of_its_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("A <b>bold</b> word.")
    manifest, _ = run(tmp_path / "out", f"text:{tmp_path}/a.txt", steps=("nfc", "tags"))
    assert documents(tmp_path / "out") == [["A bold word ."]]
    assert manifest["steps"] == [("nfc", 1), ("tags", 1)]
    run(tmp_path / "words", f"text:{tmp_path}/a.txt", steps=("tags",), tokenizer="wordlevel", vocab_size=100)
    vocabulary = json.loads((tmp_path / "words" / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert [*vocabulary][-3:] == ["A", "bold", "word."]


def test_a_file_that_cannot_be_cut_and_is_larger_than_parts_is_said(tmp_path, small):
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(np.random.default_rng(0).choice(list(b"abcdefgh \n"), 19_000).astype(np.uint8).tobytes())
    _, printed = run(tmp_path / "out", f"text:{tmp_path}/a.txt.gz", part_size=1)
    assert re.search(r"a part has \d MiB of text, because .* cannot be cut; smaller files give smaller", printed)
    _, printed = run(tmp_path / "two", f"text:{tmp_path}/a.txt.gz", part_size=2)
    assert "cannot be cut" not in printed
