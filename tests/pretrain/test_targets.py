"""`python -m pretrain eval` of inputs with targets: which are read, what a model is given of them, what is said."""

import errno
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from data_pipelines.batches import evaluation_batches
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats.table import parse
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import with_sentinels
from data_pipelines.tokenizers.training import Training
from models.core.program import Program
from models.families.t5 import T5
from pretrain import metrics
from pretrain.__main__ import main
from pretrain.commands.eval import Eval, held_out_inputs
from pretrain.commands.export import Export, export_model
from pretrain.commands.generate import encode, in_place, seen
from pretrain.generation import decoding
from pretrain.generation.settings import Decoding
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.sequence_to_sequence import SequenceToSequence
from pretrain.recipe import Phase
from pretrain.storage import run_directory
from pretrain.training import targets
from pretrain.training.assembly import assemble
from pretrain.training.data import data_lines
from pretrain.training.evaluate import Evaluator
from pretrain.training.opened import Opened, Restored
from tests.data_pipelines.tokenizers.trained import train
from tests.pretrain import tiny

NUMBER = 40
PAIRS = [(f"Zahl {n}" + ", lang" * (n % 7), f"number {n}: " + "far " * (n % 9) + "é世") for n in range(NUMBER)]
WHOLE = dict(PAIRS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    records = [json.dumps({"input": before, "target": after, "tone": "cold"}) for before, after in PAIRS]
    (folder / "a.jsonl").write_text("\n".join(records[::2])), (folder / "b.jsonl").write_text("\n".join(records[1::2]))
    options = {"field": ("input", "target"), "values": ("tone",), "prefix": "tone"}
    options |= {"tokenizer": "bytes", "sentinels": 2, "heldout": 0.3, "part_size": 1000, "processes": 1}
    prepare(Prepare((f"jsonl:{folder}",), folder / "corpus", **options), Console(file=io.StringIO()))
    return folder / "corpus"


@pytest.fixture(scope="module")
def t5_run(corpus, tmp_path_factory):
    """Of rows shorter than the texts."""
    workdir = tmp_path_factory.mktemp("t5") / "run"
    tiny.begun(tiny.t5(objective=SequenceToSequence(layout="input-target")), tiny.options(corpus, workdir))
    return workdir


@pytest.fixture
def heard(monkeypatch):
    """The prompts that are written after; what is written says which they are."""
    prompts = []

    def generate(model, params, given, decoding, seed, mesh, tell):
        prompts.append(given)
        tell(len(given))
        return [[[byte + 3 for byte in b"text %d" % number]] for number in range(len(given))]

    monkeypatch.setattr(targets, "generate", generate)
    return prompts


def figures(capsys, *arguments):
    """What is printed, by name, and the last line."""
    assert main(["eval", *map(str, arguments)]) == 0
    printed = capsys.readouterr().out.splitlines()
    cells = [line.split("│")[1:3] for line in printed if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in cells} | {"last": printed[-1]}


def mistake(capsys, *arguments):
    assert main(["eval", *map(str, arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


def fields(*names):
    return [word for name in names for word in ("--field", name)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_inputs_are_given_as_in_training_and_their_whole_targets_are_compared(
    corpus, t5_run, heard, capsys, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: {"loss": 1.5})
    given = ["--examples", 9, "--out", tmp_path / "new" / "out.jsonl", "--max-tokens", 30]
    found = figures(capsys, t5_run, "--write", *given)
    phase = tiny.t5().phases[0]
    rows = SequenceToSequence(layout="input-target").examples(Corpus(corpus), "heldout", phase, 0)
    real = [(batch["tokens"], batch["segments"]) for batch in evaluation_batches(rows, 9)]
    tokens = [row[mask > 0].tolist() for of in real for row, mask in zip(*of, strict=True) if mask.any()]
    assert heard == [tokens] and len(tokens) == 9 and len({*map(len, tokens)}) > 3
    assert max(map(len, tokens)) == phase.length and Corpus(corpus).special["tone_cold"] in tokens[0]
    written = lines(tmp_path / "new" / "out.jsonl")
    assert [line["written"] for line in written] == [f"text {number}" for number in range(9)]
    assert all(line["targets"] == [WHOLE[line["input"]]] for line in written)
    room = phase.length - 1
    cut = sum(len(line["input"].encode()) + 1 > room for line in written)  # after a token of the tone
    assert cut and f"{cut} of 9 inputs are longer than the {room} tokens that fit" in caplog.text
    longer = sum(len(line["targets"][0].encode()) > 30 for line in written)
    assert f"{longer} of 9 targets have more than --max-tokens 30 tokens, the longest" in caplog.text and longer > 1
    expected, _ = metrics.figures([f"text {n}" for n in range(9)], [line["targets"] for line in written])
    said = {name: float(found[name.replace("_", " ")]) for name in expected}
    assert said == pytest.approx(expected, abs=1e-4) and found["loss"] == "1.5000" and said["chrF"] > 1


def test_a_decoder_is_given_its_rows_up_to_their_delimiter_with_room_for_a_target(corpus):
    made, phase = stored.load(corpus / "tokenizer"), Phase(1.0, 64, 8)
    objective = NextTokenPrediction(layout="input-target")
    run = Restored(assemble(tiny.gpt2(objective=objective, phases=(phase,))), 5, 0, {}, {}, None, [])
    opened = Opened(Path("run"), None, {}, None, made, None, run)
    examples = objective.examples(Corpus(corpus), "heldout", phase, 0)
    asked = targets.of_corpus(examples, made, 100)
    end = made.special["sep"]
    rows = [row.tolist() for batch in evaluation_batches(examples, 100) for row in batch["tokens"]]
    expected = [row[: row.index(end)] for row in rows[: len(asked)]]
    prompts = targets.make_prompts(asked, opened, [NextTokenPrediction(), objective], Decoding(max_tokens=40))
    assert prompts == [[*before[:23], end] for before in expected] and max(map(len, expected)) > 23
    said = "--max-tokens 63: leaves no room for an input in rows of 64 tokens; give fewer"
    with pytest.raises(UserError, match=said):
        targets.make_prompts(asked, opened, [objective], Decoding(max_tokens=63))
    with pytest.raises(UserError, match="--write, --source: run does not map inputs to targets"):
        targets.make_prompts(asked, opened, [NextTokenPrediction()], Decoding())


def test_a_tokenizer_in_which_nothing_ends_inputs_is_told(corpus):
    made = stored.load(corpus / "tokenizer")
    opened = Opened(Path("hf"), T5(tiny.T5, Program()), {}, None, made, None)
    assert targets.separators(opened, []) == [made.special["sep"]]
    lacking = made._replace(special={"pad": 0, "eos": 1})
    with pytest.raises(UserError, match="^hf: its tokenizer has no eod or sep token to end inputs with; "):
        targets.separators(opened._replace(tokenizer=lacking), [])


def test_inputs_have_the_frame_of_training(corpus):
    made = stored.load(corpus / "tokenizer")
    made, end = made._replace(special=made.special | {"cls": 2}), made.special["sep"]
    for start, first in ((0, []), (end, [2])):
        opened = Opened(Path("hf"), T5(tiny.T5, Program(), start=start), {}, None, made, None)
        asked = [targets.Asked([9, 8], "", ("x",))]
        assert targets.make_prompts(asked, opened, [], Decoding()) == [[*first, 9, 8, end]]


def test_a_run_says_which_rows_leave_out_what_stands_before_documents(corpus):
    said = lambda recipe: data_lines(recipe, {"": Corpus(corpus)}, None)
    expected = f"--corpus {corpus}: the rows leave out the tone before each document"
    assert said(tiny.t5()) == said(tiny.t5(objective=SequenceToSequence("prefix"))) == [expected]
    for recipe in tiny.gpt2(), tiny.t5(objective=SequenceToSequence("input-target")):
        assert not said(recipe)


@pytest.fixture
def several(tmp_path):
    """A source of inputs with two targets each, and one that lacks one."""
    records = [{"de": f"Haus {n}", "one": f"text {n}", "two": f"house {n}"} for n in range(6)]
    text = "\n".join(json.dumps(one) for one in [*records[:3], {"de": "x", "one": "y"}, *records[3:]])
    (tmp_path / "several.jsonl").write_text(text)
    return f"jsonl:{tmp_path}/several.jsonl"


def test_a_source_has_one_target_of_an_input_or_several(t5_run, heard, several, capsys, tmp_path, caplog):
    given = ["--source", several, *fields("de", "one", "two"), "--code", "[tone:cold]", "--task-prefix", "say: "]
    given += ["--out", tmp_path / "out"]
    assert figures(capsys, t5_run, *given)["exact match"] == "100.0000"
    made = stored.load(t5_run / "tokenizer")
    before, end = made.tokenizer.token_to_id("[tone:cold]"), made.special["sep"]
    (prompts,) = heard
    assert prompts == [[before, *tokens, end] for tokens in encode(made, [f"say: Haus {n}" for n in range(6)])]
    expected = [
        {"input": f"say: Haus {n}", "targets": [f"text {n}", f"house {n}"], "written": f"text {n}"} for n in range(6)
    ]
    assert lines(tmp_path / "out") == expected
    assert "records without the field: 1, the first in" in caplog.text
    cut = figures(capsys, t5_run, "--source", several, *fields("de", "two"), "--bleu-tokenizer", "char")
    assert cut["exact match"] == "0.0000" and cut["last"].startswith("6 targets") and "|tok:char|" in cut["last"]
    figures(capsys, t5_run, *given, "--examples", 3)
    assert [line["input"] for line in lines(tmp_path / "out")] == ["say: Haus 0", "say: Haus 2", "say: Haus 4"]


def test_a_long_text_of_a_source_is_one_again(tmp_path, t5_run):
    long = "".join(f"line {n}\n" for n in range(80_000))  # of several pieces
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": long, "b": long[::-1]}))
    source = parse(f"jsonl:{tmp_path}/a.jsonl", fields=("a", "b"))
    asked, said = targets.of_source(source, stored.load(t5_run / "tokenizer"), 5, [])
    assert [(one.text, one.targets) for one in asked] == [(long, (long[::-1],))] and not said


def test_a_folder_writes_the_targets_that_its_run_writes(t5_run, tmp_path, capsys, caplog):
    export_model(Export(run=t5_run, to=tmp_path / "hf"))
    (tmp_path / "a").write_text("Zahl 3\nZahl 4\n"), (tmp_path / "b").write_text("number 3\nnumber 4\n")
    given = ["--source", f"parallel:{tmp_path}/a,{tmp_path}/b", "--max-tokens", 8, "--sample", "--seed", 3]
    found = [figures(capsys, run, *given, "--out", tmp_path / "out") for run in (t5_run, tmp_path / "hf")]
    written = lines(tmp_path / "out")
    assert found[0] == found[1] and any(line["written"] for line in written) and "are truncated" not in caplog.text
    figures(capsys, t5_run, *given[:-1], 4, "--out", tmp_path / "out")
    assert lines(tmp_path / "out") != written


def test_no_text_ends_what_is_put_in_place_of_sentinels(t5_run, capsys):
    assert main(["generate", str(t5_run), "--prompt", "One. Two <extra_id_0>", "--stop", "."]) == 2
    said = capsys.readouterr().err
    assert said == "error: --stop '.': has no effect on filling sentinels; leave it out\n"


def test_a_sentinel_that_nothing_is_written_for_stays_and_so_does_what_is_written_for_none(t5_run, capsys, monkeypatch):
    made = stored.load(t5_run / "tokenizer")
    first, second, end = (made.special[role] for role in ("sentinel_0", "sentinel_1", "sep"))
    (a,), (b,) = encode(made, ["a", "b"])
    texts = iter([[first, a, b, end], [second, end], [a, first, b]])
    monkeypatch.setattr(decoding, "generate", lambda model, params, begun, *_: [[next(texts)] for _ in begun])
    assert main(["generate", str(t5_run), "--prompt", "x <extra_id_0> y <extra_id_1>", "<extra_id_1> x", "x"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line[:2] != "=="] == [
        "x ab y <extra_id_1>",
        "the model filled none of the prompt's sentinels; it wrote",
        "<extra_id_1></s>",
        "ab",
    ]


SPACED = ["a <extra_id_0> b", "a<extra_id_0>b", "(<extra_id_0>), b", "a <extra_id_0> <extra_id_1> b", "<extra_id_0>\nb"]


@pytest.mark.parametrize("prompt", SPACED)
def test_a_sentinel_that_stays_has_the_white_space_of_the_prompt(prompt):
    made = with_sentinels(train("sentencepiece-unigram", ["a b (a), b"] * 9, Training(10, specials="t5")), 2)
    tokens = made.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert made.tokenizer.decode(tokens, skip_special_tokens=False) != prompt
    assert seen(made, tokens, prompt) == prompt
    (a,) = encode(made, ["a"])
    filled = in_place(made, tokens, [made.special["sentinel_1"], *a])
    assert seen(made, filled, prompt) == prompt.replace("<extra_id_1>", "a")


def test_a_disk_that_is_full_leaves_nothing_half_written(t5_run, heard, several, capsys, tmp_path, monkeypatch):
    def full(new, place):
        assert new.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_directory, "put", full)
    said = mistake(capsys, t5_run, "--source", several, *fields("de", "one"), "--out", tmp_path / "new" / "out")
    assert "new/out: cannot write there (No space left on device)" in said and heard
    assert not [*(tmp_path / "new").iterdir()]


MISTAKES = [
    (["--beams", 2, "--out", "x"], "--out, --beams: no effect without --write or --source; add one of them"),
    (["--write", "--code", "a"], "--code: no effect without --source; add it, or leave them out"),
    (["--all", "--source", "SOURCE"], "--all: no effect with --source, which only generates targets"),
    (["--all", "--best", "loss"], "--best loss: cannot be combined with --all; leave one of them out"),
    (["--write", "--beams", 2, "--sample"], "--beams 2: cannot be combined with --sample"),
    (["--source", "text:FILE"], "its documents have only one text; give a source of inputs and targets, like jsonl:"),
    (["--source", "SOURCE"], "--field input: "),
    (["--source", "SOURCE", "--field", "one", "--field", "three"], "--field three: "),
    (["--source", "parallel:EMPTY,EMPTY"], "files are empty"),
    (["--source", "parallel:EMPTY,EMPTY", "--field", "de"], "--field de: --source parallel:"),
    (["--source", "parallel:BLANK,BLANK"], "no document has source and target (pairs with an empty side: 2, the"),
    (["--source", "SOURCE", "--field", "de", "--field", "one", "--out", "EMPTY/x"], "EMPTY/x: cannot write there"),
    (["--source", "SOURCE", "--out", "FOLDER"], "FOLDER: is not a file; give a new file"),
    (["--source", "SOURCE", *fields("de"), "--out", "x" * 300], "cannot write there (File name too long)"),
    (["--source", "SOURCE", *fields("de")], "its documents have only one text; give a second --field for targets"),
    (
        ["--source", "SOURCE", *fields("one", "de", "one")],
        "--field one: is given twice, but each is a separate segment",
    ),
    (["--source", "SOURCE", *fields("de", "one"), "--out", "FOLDER/link"], "link: would replace a file of --source"),
    (["--source", "parallel:BLANK,FILE", "--out", "FILE"], "FILE: would replace a file of --source parallel:"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line(t5_run, heard, several, tmp_path, capsys, arguments, said):
    (tmp_path / "empty").touch(), (tmp_path / "blank").write_text(" \n \n")
    files = {"SOURCE": several, "FILE": several.partition(":")[2]}
    kept = Path(files["FILE"]).read_text()
    (tmp_path / "link").symlink_to(files["FILE"])
    files |= {"EMPTY": f"{tmp_path}/empty", "BLANK": f"{tmp_path}/blank", "FOLDER": str(tmp_path)}

    def placed(text):
        for name, file in files.items():
            text = str(text).replace(name, file)
        return text

    assert placed(said) in mistake(capsys, t5_run, *map(placed, arguments)) and not heard
    assert Path(files["FILE"]).read_text() == kept


def test_a_run_whose_rows_are_no_inputs_and_targets_says_so():
    of_spans = SimpleNamespace(of={"": SimpleNamespace(objective=SequenceToSequence())})
    with pytest.raises(UserError, match="--write: the run has no rows of input and target"):
        held_out_inputs(Eval(Path("run"), write=True), None, of_spans)
