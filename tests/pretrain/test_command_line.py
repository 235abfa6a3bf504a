"""The command line: every field can be reached, and every mistake is one line, before anything is compiled."""

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import jax
import pytest

from data_pipelines.command_line import as_option
from data_pipelines.errors import UserError
from pretrain.__main__ import COMMANDS, main
from pretrain.commands import recipes
from pretrain.commands.run import parse_run
from pretrain.huggingface.config import check_same
from pretrain.options import Options
from pretrain.recipes.registry import RECIPES
from tests.data_pipelines.corpora import random_documents, write_corpus
from tests.pretrain import tiny
from tests.pretrain.fields import fields_of, other


def mistake(capsys, *arguments) -> str:
    """The one line that a command says before it exits with 2."""
    assert main([str(argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


FIRST = ("convert_element_type", "stage", "_threefry_seed")  # numbers and keys, when JAX is first asked for some
LOWERED = []  # (event, name) of every program that JAX makes ready to compile
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, fun_name="", **__: LOWERED.append((event, fun_name))
)


def lowered() -> int:
    """Programs, but for those of FIRST."""
    return sum("jaxpr_to_mlir" in event and not any(one in name for one in FIRST) for event, name in LOWERED)


@pytest.fixture
def nothing_compiles():
    """Fails the test where a program is compiled."""
    before = lowered()
    yield
    assert lowered() == before, LOWERED[-12:]


def settings(corpus, workdir, *more):
    return ["run", "bert-tiny", "--corpus", corpus, "--workdir", workdir, *more]


# What is wrong -> (arguments after `run bert-tiny --corpus C --workdir W`, what the line says)
BIGBIRD = ["--model.pattern.name", "bigbird", "--model.pattern.block", 8]
LONGFORMER = ["--model.pattern.name", "longformer"]
MISTAKES = {
    "random blocks": ([*BIGBIRD, "--model.pattern.random", 12], "phases.0.length=128: model.pattern.random=12: a row"),
    "another's field": ([*BIGBIRD, "--model.pattern.windows", 64], "=[64]: has no effect with model.pattern.name=bigb"),
    "a dense field": (["--model.pattern.block", 32], "block=32: has no effect with model.pattern.name=dense, which"),
    "unknown field": (["--model.dept", 3], "unknown option --model.dept; did you mean --model.depth"),
    "unknown option": (["--keep-evry", 3], "unknown option --keep-evry; did you mean --keep-every"),
    "no number": (["--steps", "many"], "--steps 'many': give a whole number"),
    "too large a model": (["--model.width", 2_000_000_000], "parameters and their gradients take 298,0"),
    "too large a batch": (["--phases.0.batch-size", 2**24], "batch_size=16777216 of length=128: a step must"),
    "an option of several values twice": (["--frozen", "layers", "--frozen", "pair"], "--frozen: is given twice"),
    "steps": (["--steps", 0], "steps=0: must be at least 1"),
    "positions": (["--model.positions", 64], "phases.0.length=128: exceeds model.positions=64; lower it or raise that"),
    "length": (["--phases.0.length", 4], "phases.0.length=4: must be at least 8"),
    "shares": (["--phases.0.share", 0.5], "phases: the shares [0.5] must add up to 1"),
    "batch": (["--microbatches", 3], "batch_size=32: is not a multiple of --microbatches 3 x the 1 batch shards"),
    "peak": (["--schedule.peak", -1], "schedule.peak=-1.0: must be at least 0"),
    "beyond float32": (["--optimizer.decay", "1e300"], "optimizer.decay=1e+300: must be at least 0 and below 3.4e+38"),
    "no value": (["--mesh", ""], "--mesh: is given no value; give one, or leave it out"),
    "workers without end": (["--workers", 1000000], "--workers 1000000: must be at least 0 and at most 256"),
    "vocabulary": (["--model.vocab-size", 100], "--model.vocab-size 100: the corpus sets the vocabulary; leave"),
    "process": (["--processes", 2, "--process", 2], "--process 2: must be below --processes 2"),
    "dtype": (["--dtype", "float16"], "--dtype='float16': use one of float32, bfloat16"),
    "attention": (["--attention", "xls"], "--attention: unknown attention xls; did you mean xla"),
    "long block": ([*LONGFORMER, "--model.pattern.block", 129], "pattern.block=129 is longer"),
    "dilation": ([*LONGFORMER, "--model.pattern.dilations", 128], "=[128]: 128 reaches beyond a row of 128 tokens"),
    "heads": (["--model.heads", 3], "bert-tiny: model.width=128 is not a multiple of model.heads=3"),
    "layout": (["--objective.layout", "lines"], "objective.layout='lines': use one of segment-pairs"),
    "pairs": (["--objective.layout", "packed-sentences"], "objective.layout='packed-sentences': has no pairs"),
    "two labels": (
        ["--objective.sentence-order"],
        "objective.next_sentence=True, sentence_order=True: a pair has one label; unset one",
    ),
    "heads of nothing": (["--init-heads-anew"], "--init-heads-anew: has no effect without --init-from"),
    "frozen": (["--frozen", "layer"], "frozen: no parameters are below layer; did you mean layers"),
    "init from nowhere": (["--init-from", "no/such/folder"], "--init-from"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistaken_setting_is_one_line_before_anything_is_compiled(
    kind, corpus_path, tmp_path, capsys, nothing_compiles
):
    more, said = MISTAKES[kind]
    assert said in mistake(capsys, *settings(corpus_path, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["bigbird-base", "longformer-tiny"])
def test_a_recipe_s_own_pattern_may_be_made_dense_by_its_name_alone(name):
    parsed, _ = parse_run([name, "--corpus", "c", "--workdir", "w", "--model.pattern.name", "dense"])
    assert parsed.model.pattern.name == "dense"


def test_unknown_names_are_answered_with_known_ones(corpus_path, tmp_path, capsys):
    assert "no recipe 'bert-tny': did you mean bert-tiny" in mistake(capsys, "run", "bert-tny", "--corpus", corpus_path)
    assert "name a recipe first" in mistake(capsys, "run", "--corpus", corpus_path)
    assert "name a recipe first" in mistake(capsys, "run")
    assert "unknown command trian; did you mean run?" in mistake(capsys, "trian")


def test_what_is_missing_is_named(corpus_path, tmp_path, capsys):
    assert "--workdir" in mistake(capsys, "run", "bert-tiny", "--corpus", corpus_path)
    assert "--to" in mistake(capsys, "export", "somewhere")
    assert "--out" in mistake(capsys, "plot", "somewhere")
    assert "no run is given; name one or more" in mistake(capsys, "plot", "--out", tmp_path / "x.png")
    assert "run" in mistake(capsys, "eval").lower()
    assert not list(tmp_path.iterdir())


def test_a_saved_recipe_is_trained_with_what_is_given_after_it(tmp_path, capsys):
    assert main(["recipes", "--json", "xlnet-mini"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    more = ["--corpus", "c", "--workdir", "w", "--schedule.peak", "0.5"]
    parsed, options = parse_run(["--recipe", str(tmp_path / "mine.json"), *more])
    expected = RECIPES["xlnet-mini"]
    assert parsed == dataclasses.replace(expected, schedule=dataclasses.replace(expected.schedule, peak=0.5))
    assert options == Options("c", Path("w"))


def test_a_file_that_is_no_recipe_is_one_line(tmp_path, capsys):
    missing, broken = tmp_path / "missing.json", tmp_path / "broken.json"
    broken.write_text('{"name": "mine"')
    assert "missing.json: cannot be read (No such file" in mistake(capsys, "run", "--recipe", missing)
    assert "cannot be read" in mistake(capsys, "run", "--recipe", tmp_path)
    assert "broken.json: " in mistake(capsys, "run", "--recipe", broken)
    for nothing in ([], [""], ["--steps", 3]):
        assert "--recipe FILE.json" in mistake(capsys, "run", "--recipe", *nothing)
    assert "no recipe 'mine'" in mistake(capsys, "recipes", "--json", "mine")


def altered(corpus_path, folder, **changes):
    """A copy of the corpus with another manifest."""
    shutil.copytree(corpus_path, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder


# What is wrong -> (how the corpus is made, what the line says)
CORPORA = {
    "missing": (lambda good, folder: folder, "does not exist; make it with `python -m data_pipelines prepare"),
    "no corpus": (lambda good, folder: folder.parent, "has no manifest.json"),
    "of another version": (lambda good, folder: altered(good, folder, version=99), "has format version 99"),
    "no [MASK]": (
        lambda good, folder: altered(good, folder, special={"pad": 0, "unk": 1, "cls": 2, "sep": 3}),
        "has no mask token, which these rows need; prepare it with a tokenizer",
    ),
    "nothing held out": (lambda _, folder: write_corpus(folder, random_documents(0, 20)), "split has no documents"),
}


@pytest.mark.parametrize("recipe", ["bert-tiny", "electra-tiny"])
@pytest.mark.parametrize("kind", CORPORA)
def test_a_corpus_that_cannot_be_used_is_one_line(kind, recipe, corpus_path, tmp_path, capsys, nothing_compiles):
    make, said = CORPORA[kind]
    corpus = make(corpus_path, tmp_path / "corpus")
    assert said in mistake(capsys, "run", recipe, "--corpus", corpus, "--workdir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_cannot_be_made_is_one_line(corpus_path, tmp_path, capsys, nothing_compiles):
    (tmp_path / "file").touch()
    assert "--workdir" in mistake(capsys, *settings(corpus_path, tmp_path / "file" / "run"))
    said = mistake(capsys, *settings(corpus_path, tmp_path / "file"))
    assert said == f"error: --workdir {tmp_path / 'file'}: is a file; give a folder\n"


def test_reading_what_is_no_run_is_one_line(tmp_path, capsys, nothing_compiles):
    assert "is neither a run (recipe.json)" in mistake(capsys, "eval", tmp_path)
    assert "is neither a run (recipe.json)" in mistake(capsys, "export", tmp_path, "--to", tmp_path / "hf")
    assert "has no metrics to plot" in mistake(capsys, "plot", tmp_path, "--out", tmp_path / "x.png")
    assert "--examples 0: must be at least 1" in mistake(capsys, "eval", tmp_path, "--examples", 0)
    assert "--steps 0: must be at least 1" in mistake(capsys, "demo", "--folder", tmp_path / "demo", "--steps", 0)
    assert not list(tmp_path.iterdir())


GIVEN_WITH = {  # fields that do not go with those of all others -> what is given with them
    "model.pattern.windows": {"model.pattern.name": "longformer"},
    "model.pattern.dilations": {"model.pattern.name": "longformer"},
    "model.pattern.stride": {"model.pattern.name": "fixed"},
    "model.pattern.summary": {"model.pattern.name": "fixed"},
    "objective.sentence_order": {"objective.next_sentence": False},
    "objective.masking.similar": {"objective.masking.fate": "unit"},
}


@pytest.mark.parametrize("name", ["bert-small", "electra-tiny"])
def test_every_field_of_a_recipe_can_be_given(name):
    fields = fields_of(RECIPES[name])
    assert len(fields) > 40
    for path in ("model.vocab_size", "teachers", "lora", "model.labels"):  # the corpus's; of files, of finetuning
        fields.pop(path, None)
    given = {path: other(path, value) for path, value in fields.items()} | {"model.pattern.name": "bigbird"}
    apart = [{path: given.pop(path)} | GIVEN_WITH[path] for path in GIVEN_WITH if path in given]
    for several in (given, *apart):
        options = [word for path, value in several.items() for word in shlex.split(as_option(path, value))]
        found = fields_of(parse_run([name, "--corpus", "c", "--workdir", "w", *options])[0])
        assert {path: found[path] for path in several} == several


def test_help_names_every_command_and_before_a_recipe_is_named_every_recipe(capsys):
    assert main([]) == main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {command} " in said or f"  {command.ljust(5)}" in said for command in COMMANDS)
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    said = capsys.readouterr().out
    assert "--keep-every" in said and "--model.depth" not in said and all(name in said for name in RECIPES)


IN_A_NEW_PROCESS = """
import io, sys
from data_pipelines.progress import IMPORTING
from pretrain.__main__ import COMMANDS, main
from tpu.__main__ import COMMANDS as OF_TPU, main as tpu

class Terminal(io.StringIO):
    isatty = lambda self: True
    write = lambda self, text: said.append((text, "jax" in sys.modules))

for call, commands, refused in ((main, COMMANDS, {refused}), (tpu, OF_TPU, [["local", "--process", "2"]])):
    for arguments in [[command, "--help"] for command in commands] + refused:
        try:
            done = call(arguments)
        except SystemExit as left:
            done = left.code or 0
        assert done == (0 if "--help" in arguments else 2), (arguments, done)
        assert "jax" not in sys.modules, arguments
assert main(["recipes"]) == 0 and not {{"jax", "flax"}} & sys.modules.keys()
said, sys.stderr = [], Terminal()
assert main(["run", "bert-tiny", "--corpus", "no/such", "--workdir", "no/run"]) == 2
assert said[0] == (f"{{IMPORTING}} ...", False), said
assert "jax" in sys.modules and not {{"orbax", "tensorboardX"}} & sys.modules.keys()
said.clear()
assert main(["generate", "no-run", "--prompt", "the"]) == 2 and said[0][0] == f"{{IMPORTING}} ...", said
"""
REFUSED = [
    ["run", "--steps", "3"], ["generate", "RUN", "--top-q", "3"], ["generate", "RUN", "--top-k", "3"],
    ["generate", "RUN"], ["prompts", "RUN", "--examples", "FILE", "--shots", "-1"],
    ["discriminator", "RUN", "--examples", "FILE", "--out", "DIR", "--heldout", "2"],
    ["eval", "RUN", "--step", "3"],
]  # fmt: skip


def test_what_needs_no_model_imports_none_and_what_takes_seconds_is_said_on_a_terminal_before_it_begins():
    """Help, wrong options and recipes come without JAX, a mistaken path without what writes checkpoints."""
    process = tiny.start(program=("-c", IN_A_NEW_PROCESS.format(refused=REFUSED)))
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err


def test_a_mistake_in_a_real_process_exits_with_2_and_one_line(tmp_path):
    status, out, err = tiny.run_command("run", "bert-tiny", "--corpus", tmp_path / "no", "--workdir", tmp_path / "run")
    assert (status, out) == (2, "") and err.count("\n") == 1 and err.startswith("error: ")


def test_errors_are_for_users_only(monkeypatch):
    """What is not the user's to put right keeps its traceback."""
    monkeypatch.setattr(recipes, "main", lambda arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["recipes"])


@pytest.mark.parametrize("name, fields", [("transformer-xl-tiny", {"cutoffs": (50, 100)}), ("gpt2-tiny", {"depth": 3})])
def test_a_refusal_names_values_as_the_command_line_takes_them(name, fields):
    ours = RECIPES[name].model
    theirs = dataclasses.replace(ours, **fields)
    with pytest.raises(UserError) as refusal:
        check_same("there", theirs, ours)
    (options,) = re.findall("; set (.*), or give", str(refusal.value))
    assert parse_run([name, "--corpus", "c", "--workdir", "w", *shlex.split(options)])[0].model == theirs
    assert as_option("objective.next_sentence", False) == "--objective.no-next-sentence"
