"""`python -m pretrain generate`: texts of a causal run, fillings of a masked one, mistakes in one line."""

import dataclasses
import os
import re
import types

import jax
import numpy as np
import pytest
import torch
import transformers

from data_pipelines.command_line import parse
from data_pipelines.tokenizers import stored
from pretrain.__main__ import main
from pretrain.commands.export import Export, export_model
from pretrain.commands.generate import Generate, encode, in_place
from pretrain.generation import decoding
from pretrain.generation.settings import Decoding
from pretrain.huggingface.export import export
from pretrain.objectives.objective import inputs_of
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import opened
from pretrain.training.opened import open_model, restore
from tests.pretrain import tiny
from tests.pretrain.hugging_face_folders import MODELS, fitting, random_params
from tpu.mesh import named_mesh


def printed(capsys, *arguments):
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def mistake(capsys, *arguments):
    assert main(["generate", *map(str, arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_texts_begin_with_their_prompts_and_differ_where_they_are_drawn(gpt2_run, tmp_path, capsys):
    (tmp_path / "prompts").write_text("the\nold river\n")
    given = [gpt2_run, "--prompts", tmp_path / "prompts", "--max-tokens", 8]
    drawn = printed(capsys, *given, "--sample", "--number", 2, "--seed", 3)
    assert re.findall("== (.*)\n", drawn) == [f"prompt {p}, text {t}" for p in (1, 2) for t in (1, 2)]
    first, second, third, fourth = re.split("== .*\n", drawn)[1:]
    assert first.startswith("the") and third.startswith("old river") and first != second and third != fourth
    assert printed(capsys, *given, "--sample", "--number", 2, "--seed", 3) == drawn


SHARED = """
import sys
from pretrain.__main__ import main
for mesh in [], ["--mesh", "tensor=2"], ["--mesh", "sequence=2"]:
    main(["generate", sys.argv[1], "--prompt", "the", "old", "--max-tokens", "3", "--words", sys.argv[2], *mesh])
    print("#")
"""


@pytest.mark.slow
def test_devices_of_a_mesh_write_the_steered_texts_of_one(gpt2_run, tmp_path):
    (tmp_path / "words").write_text("ba\nki\n")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    process = tiny.start(program=("-c", SHARED, gpt2_run, tmp_path / "words"), JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    out, err = process.communicate(timeout=400)
    alone, cut, sequence, _ = out.split("#\n")
    assert alone.startswith("== prompt 1") and alone == cut and sequence == ""
    said = "generation cannot shard over sequence; use data, fsdp or tensor"
    assert err == f"error: --mesh sequence=2: {said}\n"


def test_a_text_ends_before_what_stops_it(gpt2_run, capsys):
    given = [gpt2_run, "--prompt", "the", "--max-tokens", 8]
    whole = printed(capsys, *given).removesuffix("\n")
    inside = whole[len("the") + 2 :][:2]
    assert printed(capsys, *given, "--stop", inside).removesuffix("\n") == whole[: whole.index(inside, len("the"))]


def test_a_prompt_that_spells_a_special_token_is_plain_text_as_in_a_corpus(bytes_path):
    made = stored.load(bytes_path / "tokenizer")
    text = "an old <|endoftext|> river"
    (tokens,) = encode(made, [text])
    assert made.tokenizer.decode(tokens) == text and made.special["eod"] not in tokens
    assert encode(made, ["an old river"])[0] == made.tokenizer.encode("an old river", add_special_tokens=False).ids


def test_a_control_code_stands_before_each_prompt_and_is_not_printed(gpt2_run, capsys, monkeypatch):
    made, given = stored.load(gpt2_run / "tokenizer"), []
    words = sorted(token for token in made.tokenizer.get_vocab() if token.isalpha() and token.isascii())
    code = max(words, key=len)  # in no prompt
    again = lambda model, params, begun, *_, **__: given.extend(begun) or [[one[-1:]] for one in begun]
    monkeypatch.setattr(decoding, "generate", again)
    out = printed(capsys, gpt2_run, "--prompt", "ba", "ki", "--code", code)
    assert given == [[made.tokenizer.token_to_id(code), *tokens] for tokens in encode(made, ["ba", "ki"])]
    assert out.splitlines()[1].startswith("ba") and code not in out.splitlines()[3]
    printed(capsys, gpt2_run, "--code", code)  # alone
    assert given[2:] == [[made.tokenizer.token_to_id(code)]]
    said = mistake(capsys, gpt2_run, "--prompt", "ba", "--code", f"{code}qqqq")
    assert f"--code {code}qqqq: is not a token of the tokenizer; the nearest is" in said


def test_where_rows_are_input_and_target_a_prompt_is_the_input_and_its_target_is_written(gpt2_run, capsys, monkeypatch):
    """After the delimiter, as in training: here what ends documents."""
    made, given = stored.load(gpt2_run / "tokenizer"), []
    (written,) = encode(made, ["kimo"])
    monkeypatch.setattr(opened, "restore", tiny.restored_of_pairs)
    monkeypatch.setattr(decoding, "generate", lambda model, params, begun, *_, **__: given.extend(begun) or [[written]])
    out = printed(capsys, gpt2_run, "--prompt", "the old river")
    assert given == [[*encode(made, ["the old river"])[0], made.special["eod"]]]
    assert out.splitlines() == [
        "each prompt is an input, and its target is printed",
        "kimo",
    ]


def test_masks_are_filled_with_the_likeliest_tokens(bert_run, capsys):
    out = printed(capsys, bert_run, "--prompt", "the [MASK] of the", "--number", 3)
    head, *found = out.splitlines()
    assert head == "the [MASK] of the" and len(found) == 3
    restored = restore(RunDirectory(bert_run))
    model, made = restored.assembly.model, stored.load(bert_run / "tokenizer")
    (the,), (of, also) = encode(made, ["the", "of the"])
    row = np.array([[made.special["cls"], the, made.special["mask"], of, also, made.special["sep"]]])
    batch = inputs_of(model, {"tokens": row, "types": np.zeros_like(row), "segments": np.ones_like(row)})
    hidden = model.apply({"params": restored.params}, batch, method="encode")
    logits = model.apply({"params": restored.params}, hidden[:, 2:3], method="token_logits")[0]
    best = np.argsort(-logits)[:3]
    probabilities = np.asarray(jax.nn.softmax(logits))[best]
    expected = [
        (f"{p:.4f}", made.tokenizer.id_to_token(int(token))) for p, token in zip(probabilities, best, strict=True)
    ]
    assert [tuple(line.split()) for line in found] == expected


@pytest.fixture(scope="module")
def exported(gpt2_run, bert_run, electra_run, tmp_path_factory):
    """Work directory -> the folder of its export."""
    folder = tmp_path_factory.mktemp("exported")
    runs = {"gpt2": gpt2_run, "bert": bert_run, "electra": electra_run}
    for name, run in runs.items():
        export_model(Export(run=run, to=folder / name))
    return {run: folder / name for name, run in runs.items()}


def test_an_exported_folder_writes_what_its_run_does(exported, gpt2_run, capsys, tmp_path):
    given = ["--prompt", "the", "old river", "--max-tokens", 8]
    for more in ([], ["--sample", "--seed", 3], ["--beams", 2]):
        assert printed(capsys, exported[gpt2_run], *given, *more) == printed(capsys, gpt2_run, *given, *more)
    said = mistake(capsys, exported[gpt2_run], *given, "--step", 4)
    assert f"--step 4: {exported[gpt2_run]} is a Hugging Face folder, which has no checkpoints; leave it out" in said
    assert f"{tmp_path}: is neither a run (recipe.json) nor a Hugging Face" in mistake(capsys, tmp_path, *given)
    read = open_model(exported[gpt2_run], mesh=named_mesh("data=1", jax.local_devices()))
    assert (read.step, read.recipe, read.objective) == (None, None, None)


def test_an_exported_folder_fills_the_masks_that_its_run_does(exported, bert_run, electra_run, capsys):
    """An ELECTRA's is of two parts."""
    for run in bert_run, electra_run:
        given = ["--prompt", "the [MASK] of the", "--number", 3]
        assert printed(capsys, exported[run], *given) == printed(capsys, run, *given)


def test_a_unilm_fills_the_masks_of_prompts_and_writes_after_prompts_without(
    tmp_path, capsys, monkeypatch, tokenizer_path
):
    config = fitting(MODELS["unilm"][0], tokenizer_path)
    export(random_params(config), config, tokenizer_path, tmp_path / "unilm")
    asked, quick = [], stored.load(tokenizer_path).tokenizer.encode("quick", add_special_tokens=False).ids
    monkeypatch.setattr(decoding, "fill", lambda module, params, row, *rest: asked.append(row) or [[(quick[0], 1.0)]])
    monkeypatch.setattr(
        decoding, "generate", lambda module, params, given, *rest: asked.append(given) or [[[*quick, 3]]]
    )
    assert "  1.0000  " in printed(capsys, tmp_path / "unilm", "--prompt", "quick [MASK]")
    assert printed(capsys, tmp_path / "unilm", "--prompt", "quick").endswith("printed\nquick\n")
    assert asked == [[2, *quick, 4, 3], [[2, *quick, 3, 4]]]
    assert "give only one kind" in mistake(capsys, tmp_path / "unilm", "--prompt", "quick", "quick [MASK]")


def test_a_folder_that_transformers_wrote_is_read_and_exported_in_another_dtype(exported, gpt2_run, tmp_path, capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[gpt2_run])
    model.save_pretrained(tmp_path / "there")
    transformers.AutoTokenizer.from_pretrained(exported[gpt2_run]).save_pretrained(tmp_path / "there")
    given = ["--prompt", "the", "--max-tokens", 8]
    assert printed(capsys, tmp_path / "there", *given) == printed(capsys, gpt2_run, *given)
    for _ in range(2):  # the second takes the place of the first
        assert main(["export", str(tmp_path / "there"), "--to", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert main(["export", str(exported[gpt2_run]), "--to", str(tmp_path / "half")]) == 2
    assert "holds another run's export" in capsys.readouterr().err
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16


def test_what_only_a_run_has_is_missed_in_a_folder_by_eval(exported, gpt2_run, capsys):
    assert main(["eval", str(exported[gpt2_run])]) == 2
    assert "a Hugging Face folder has no held-out set; give a run" in capsys.readouterr().err


MISTAKES = [  # arguments, what is said, whether before the run is read
    ([], "no prompt is given; give --prompt TEXT, or --prompts FILE", False),
    (["--top-k", 5], "--top-k 5: has no effect without --sample", True),
    (["--sample", "--beams", 2], "--beams 2: cannot be combined with --sample; leave one", True),
    (["--sample", "--temperature", 0], "--temperature 0.0: must be above 0; leave out --sample", True),
    (["--temperature", 0.5], "--temperature 0.5: has no effect without --sample", True),
    (["--number", 2], "--number 2: greedy decoding and beam search give fewer texts", False),
    (["--max-tokens", 1000], "--max-tokens 1000 exceed the", False),
    (["--beams", 1000], "--beams 1000: the vocabulary has", False),
    (["--seed", 2**32], "--seed 4294967296: must be at least 0 and below 2**32", True),
    (["--stop", ""], "--stop: is given no value", True),
    (["--prompt", "b"], "--prompt: is given twice; give it once, with all its values", True),
    (["--number", 10_001], "--number 10001: must be at least 1 and at most 10000", True),
    (["--stop", "a", "\udcff"], "--stop '\\udcff': is not UTF-8", True),
    (["--length-penalty", 2], "--length-penalty 2.0: has no effect without --beams", True),
    (["--early-stopping", "never"], "--early-stopping never: has no effect without --beams; give 2 or more", True),
    (["--early-stopping", "true"], "--early-stopping 'true': use one of '", True),
]


@pytest.mark.parametrize(("arguments", "words", "early"), MISTAKES)
def test_a_mistake_is_one_line(gpt2_run, tmp_path, capsys, arguments, words, early):
    prompt = ["--prompt", "a"] if arguments else []
    assert words in mistake(capsys, tmp_path / "none" if early else gpt2_run, *prompt, *arguments)


def test_a_run_that_is_left_out_is_missed_though_the_prompt_was_taken_for_it(capsys):
    assert "generate: --prompt the: RUN or the prompt is missing" in mistake(capsys, "--prompt", "the")


def test_a_blank_line_among_prompts_and_a_file_that_is_not_there_are_named(tmp_path, capsys):
    (tmp_path / "prompts").write_text("the\n \nold\n")
    said = mistake(capsys, tmp_path / "none", "--prompt", "a", "--prompts", tmp_path / "prompts")
    assert f"--prompts {tmp_path}/prompts, line 2: is blank; write a prompt or remove it" in said
    said = mistake(capsys, tmp_path / "none", "--prompts", tmp_path / "nowhere")
    assert f"--prompts {tmp_path}/nowhere: cannot be read" in said and said.endswith("; give a text file\n")


def test_every_setting_of_decoding_is_an_option_but_its_tokens_that_stop():
    given = {"max_tokens": 3, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.5, "temperature": 0.7}
    given |= {"no_repeat_ngram_size": 2}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    drawn = parse(Generate, ["run", "--sample", *options, "--stop", "."], "generate")
    searching = {"beams": 3, "length_penalty": 0.5, "early_stopping": True}
    options = [word for name, value in searching.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    searched = parse(Generate, ["run", *options], "generate")
    assert drawn.decoding == Decoding(sample=True, **given) and drawn.stop == (".",)
    assert searched.decoding == Decoding(**searching)
    named = {*given, *searching, "sample", "stop"}
    assert named == {field.name for field in dataclasses.fields(Decoding)}


def test_a_masked_model_needs_a_mask_and_names_the_options_that_write_texts(bert_run, tmp_path, capsys):
    given = ["--prompt", "the [MASK]", "--words", tmp_path / "words", "--stop", ".", "--seed", 3, "--max-tokens", 64]
    given += ["--steering.step-size", 0.5, "--repetition-penalty", 1.2, "--sample", "--temperature", 0.9]
    said = mistake(capsys, bert_run, *given)
    named = "--sample, --temperature, --repetition-penalty, --stop, --words, --seed, --steering.step-size: no effect on"
    assert said.startswith(f"error: {named} a model that fills masks")
    assert "write [MASK] where a word is missing" in mistake(capsys, bert_run, "--prompt", "the")


def test_what_is_written_for_sentinels_stands_in_their_place():
    made = types.SimpleNamespace(special={"sentinel_0": 90, "sentinel_1": 91, "eod": 1})
    prompt = [5, 90, 6, 91]
    assert in_place(made, prompt, [90, 7, 8, 91, 9]) == [5, 7, 8, 6, 9]
    assert in_place(made, prompt, [3, 91, 9, 90, 7]) == [5, 7, 6, 9]  # before the first of them, and in any order
    assert in_place(made, prompt, [90, 7, 92]) == [5, 7, 92, 6, 91]  # one that nothing was written for stays
    assert in_place(made, [91, 5, 90, 90], [91, 90, 7]) == [91, 5, 7, 7]  # or written with nothing behind it
