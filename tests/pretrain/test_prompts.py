"""In-context evaluation: what is asked, how it is cut into tokens, and how likely the answers are."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored
from pretrain.__main__ import main
from pretrain.commands.export import Export, export_model
from pretrain.prompting import asking
from pretrain.prompting.prompts import LONGEST_LINE, Example, Prompt, Prompter, Template, Tokens, drawn, read
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import opened
from pretrain.training.assembly import assemble
from pretrain.training.opened import Restored, restore
from tests.pretrain import tiny

QUESTIONS = [
    {"input": "Ba kilo", "target": "muna"},
    {"input": "The naïve", "choices": ["de ki", "日本", "lo"], "answer": "lo"},
    {"input": "", "choices": ["Kilo muna.", "Muna kilo de."], "answer": 0},
    {"input": "poba suri de\t", "choices": ["a", "te vo"], "answer": 1},
]


@pytest.fixture
def file(tmp_path):
    """Records, or lines as they are -> a file of them."""

    def write(*lines):
        written = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        (tmp_path / "tasks.jsonl").write_bytes(b"\n".join(written))
        return tmp_path / "tasks.jsonl"

    return write


def prompter(file, run, room=64, template=None):
    return Prompter(read(file), stored.load(run / "tokenizer"), template or Template(), room)


def test_examples_are_targets_or_choices_with_an_answer(file):
    examples = read(file(*QUESTIONS[:2], b"", QUESTIONS[3] | {"other": 1}))
    asked = [one._replace(where="") for one in examples[:2]]
    assert asked == [Example("", "Ba kilo", ("muna",), 0), Example("", "The naïve", ("de ki", "日本", "lo"), 2)]
    assert examples[2].where.endswith(", line 4") and examples[2].target == "te vo"
    with pytest.raises(UserError, match="has no examples"):
        read(file(b"", b" "))
    with pytest.raises(UserError, match="cannot be read .No such file"):
        read(Path("none.jsonl"))


MISTAKES = {
    "no JSON": (b"{", "is not JSON"),
    "half a character": (b'{"input": "a", "target": "\\ud800"}', "is not JSON in UTF-8"),
    "no object": ([1], "is not a JSON object"),
    "no input": ({"target": "a"}, "'input' is missing (keys: 'target')"),
    "a number": ({"input": 3, "target": "a"}, "'input' is 3; give a string"),
    "an empty target": ({"input": "a", "target": " \n"}, "'target' has an empty text"),
    "doubled choices": ({"input": "a", "choices": ["b", "b"], "answer": 0}, 'has "b" twice'),
    "both": ({"input": "a", "choices": ["b", "c"], "target": "b"}, "'choices' and 'target'"),
    "no answer": ({"input": "a", "choices": ["b", "c"]}, "no 'answer'"),
    "true for an answer": ({"input": "a", "choices": ["b", "c"], "answer": True}, "'answer' is true"),
    "a huge line": (b'{"input": "' + b"a" * LONGEST_LINE, "is longer than 4 MiB"),
}


@pytest.mark.parametrize("line, said", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_naming_file_and_line(file, line, said):
    path = file(QUESTIONS[0], line)
    with pytest.raises(UserError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"--examples {path}, line 2: ") and said in message
    assert "\n" not in message and len(message) < 400


def test_shots_are_drawn_by_the_seed_from_the_others_and_more_begin_with_other_ones():
    for index in range(6):
        five = drawn(6, index, 5, seed=1)
        assert sorted([*five, index]) == [*range(6)]
        assert drawn(6, index, 2, seed=1) == five[-2:]
    of_seed = lambda seed: [drawn(50, index, 3, seed) for index in range(50)]
    assert of_seed(1) == of_seed(1) != of_seed(2)
    often = np.bincount(np.ravel([drawn(5, 2, 1, seed) for seed in range(400)]), minlength=5)
    assert often[2] == 0 and (abs(often[[0, 1, 3, 4]] - 100) < 40).all()


def test_a_prompt_is_the_template_s_and_ends_before_the_target(file, gpt2_run):
    path = file(*QUESTIONS)
    made = prompter(path, gpt2_run, template=Template(separator=" =>\\t", between="\\n"))
    for with_target in (True, False):
        asked = made(1, seed=0, with_target=with_target)
        for index, prompt in enumerate(asked):
            shot, one = made.examples[drawn(4, index, 1, 0)[0]], prompt.example
            ask = lambda example: f"{example.input} =>\t" if example.input else ""
            expected = f"{ask(shot)}{shot.target}\n{ask(one)}"
            decoded = [made.tokenizer.decode(text.tokens.tolist()) for text in prompt.texts]
            assert decoded == [expected + choice for choice in (one.choices if with_target else [""])]
            assert one.where.endswith(f", line {index + 1}") and prompt.left_out == 0


def test_a_token_over_the_boundary_is_the_target_s(file, gpt2_run):
    """' muna' is encoded as in the middle of a text, with its blank."""
    made = prompter(file({"input": "Ba kilo", "target": "ba"}), gpt2_run)
    (text,) = made(0, 0, True)[0].texts
    ids = made.tokenizer.encode("Ba kilo ba").ids
    assert text.tokens.tolist() == ids and made.tokenizer.id_to_token(ids[text.first]).startswith("Ġ")
    assert made.tokenizer.decode(ids[: text.first]) == "Ba kilo"
    (alone,) = made(0, 0, False)[0].texts
    assert alone.tokens.tolist() == ids[: text.first]


def test_a_prompt_without_tokens_begins_like_a_document_after_another(file, gpt2_run):
    made = prompter(file({"input": "", "target": "Kilo muna"}), gpt2_run)
    (text,) = made(0, 0, True)[0].texts
    assert text.first == 1 and made.tokenizer.id_to_token(text.tokens[0]) == "<|endoftext|>"
    assert made.tokenizer.decode(text.tokens[1:].tolist()) == "Kilo muna"


def test_rows_of_input_and_target_are_asked_with_their_delimiter(file, gpt2_run, capsys, monkeypatch):
    """As `InputTarget` makes them; greedy, too."""
    asked = []

    def heard(model, params, everything, *_, **__):
        asked.extend(everything)
        return [np.zeros(len(prompt.texts)) for prompt in everything] if len(asked) == 1 else [""]

    monkeypatch.setattr(opened, "restore", tiny.restored_of_pairs)
    monkeypatch.setattr(asking, "log_likelihoods", heard)
    monkeypatch.setattr(asking, "answers", heard)
    arguments = ["prompts", str(gpt2_run), "--examples", str(file(QUESTIONS[1]))]
    assert main(arguments) == 0 and main([*arguments, "--score", "greedy"]) == 0
    assert "prompts use the delimiter between input and target" in capsys.readouterr().out
    made = stored.load(gpt2_run / "tokenizer")
    ids = lambda text: made.tokenizer.encode(text).ids
    before = [*ids("The naïve"), made.special["eod"]]
    choices = [before + ids(choice) for choice in QUESTIONS[1]["choices"]]
    assert [text.tokens.tolist() for text in asked[0].texts] == choices
    assert [text.tokens.tolist() for text in asked[1].texts] == [before]
    assert {text.first for prompt in asked for text in prompt.texts} == {len(before)}
    mistakes = {
        ("--shots", "1"): "--shots 1: the run was trained on rows",
        ("--separator", "x"): "--separator, --between: the",
    }
    for more, said in mistakes.items():
        assert main([*arguments, *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("before", ["ba", ""])
def test_a_target_without_a_token_is_one_line_naming_file_and_line(file, corpus_path, before):
    path = file(QUESTIONS[0], {"input": before, "target": "\u200b"})
    with pytest.raises(UserError, match=r"^--examples .*tasks.jsonl, line 2: .* has no tokens for '\\u200b'") as caught:
        prompter(path, corpus_path)(0, 0, True)
    assert "\n" not in str(caught.value)
    prompter(path, corpus_path)(0, 0, False)  # a prompt alone has no target


def test_a_text_that_the_tokenizer_loses_stops_nothing_and_stands_between_no_examples(file, corpus_path, bytes_path):
    keeps = prompter(file(*QUESTIONS[:2]), bytes_path).keeps
    assert keeps("\n") and keeps("\n\n") and keeps(" END") and keeps("END ")
    words = prompter(file(*QUESTIONS[:2]), corpus_path)  # of WordPiece, whose white space is all alike
    assert words.keeps(".") and words.keeps(" ba") and not words.keeps("\n")
    with pytest.raises(UserError, match=r"^--stop '\\n': the run's tokenizer drops it, .*; give another"):
        asking.answers(None, None, [], words, "\n", 4, None)
    with pytest.raises(UserError, match=r"^--between '.*n': the run's tokenizer drops it, .*; give another"):
        words(1, 0, False)


def test_shots_without_room_are_left_out_whole_from_the_front_alike_for_all_choices(file, gpt2_run):
    path = file(*QUESTIONS)
    whole = prompter(path, gpt2_run, 1000)(3, 0, True)
    longest = max(len(text.tokens) for prompt in whole for text in prompt.texts) - 1
    assert [prompt.left_out for prompt in prompter(path, gpt2_run, longest)(3, 0, True)] == [0] * 4
    cut = prompter(path, gpt2_run, longest - 1)(3, 0, True)
    assert sum(prompt.left_out for prompt in cut) == 1
    fewer = prompter(path, gpt2_run, 1000)(2, 0, True)
    for index, prompt in enumerate(cut):
        expected = (fewer if prompt.left_out else whole)[index].texts
        assert [text.tokens.tolist() for text in prompt.texts] == [text.tokens.tolist() for text in expected]
    with pytest.raises(UserError, match=r"line 2: takes \d+ tokens without any shot, but only 3 fit; shorten it"):
        prompter(file({"input": "a", "target": "b"}, QUESTIONS[0]), gpt2_run, 3)(0, 0, True)
    with pytest.raises(UserError, match="--shots 4: besides the question there are 3; give fewer"):
        prompter(file(*QUESTIONS), gpt2_run)(4, 0, True)


@pytest.fixture(scope="module")
def in_transformers(gpt2_run, tmp_path_factory):
    """(model, tokenizer) of the run's export."""
    folder = tmp_path_factory.mktemp("exports") / "gpt2"
    export_model(Export(run=gpt2_run, to=folder))
    load = lambda kind: kind.from_pretrained(folder)
    return load(transformers.AutoModelForCausalLM).eval(), load(transformers.AutoTokenizer)


def theirs(model, tokenizer, text, place):
    """ln p of the tokens that do not end within the first `place` characters, by transformers."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids = torch.tensor([encoded["input_ids"]])
    with torch.no_grad():
        by_token = torch.log_softmax(model(ids).logits[0], -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return sum(by_token[i - 1].item() for i, (_, end) in enumerate(encoded["offset_mapping"]) if i and end > place)


def test_likelihoods_equal_those_of_the_export_in_transformers(file, gpt2_run, in_transformers, monkeypatch):
    monkeypatch.setattr(asking, "SHORTEST", 8)
    monkeypatch.setattr(asking, "BATCH", 64)
    monkeypatch.setattr(asking, "TARGETS", 7)
    made = prompter(file(*QUESTIONS), gpt2_run)
    asked = made(0, 0, True) + made(2, 0, True)
    run = restore(RunDirectory(gpt2_run))
    found = np.concatenate(asking.log_likelihoods(run.assembly.model, run.params, asked, run.mesh))
    expected = []
    for index, prompt in enumerate(asked):
        used = drawn(4, index % 4, 2, 0) if index >= 4 else []
        before = Template().prompt([made.examples[shot] for shot in used], prompt.example) or "<|endoftext|>"
        expected += [theirs(*in_transformers, before + choice, len(before)) for choice in prompt.example.choices]
    assert len(found) == 16 and np.ptp(found) > 5
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_figures_are_per_token_and_per_byte_and_choices_are_the_best_by_each():
    tokens = lambda number: Tokens(np.zeros(number + 3, np.int32), 3)
    asked = lambda choices, answer, *sizes: Prompt(Example("", "", choices, answer), 0, tuple(map(tokens, sizes)))
    told_of = [asked(("ab",), 0, 1), asked(("ab", "éééé"), 1, 2, 3), asked(("a", "bbb"), 1, 1, 2)]
    found = [np.array([-2.0]), np.array([-3.0, -4.0]), np.array([-1.0, -3.0])]
    told = asking.of_likelihoods(told_of, found)
    value = {name: figure[0] for name, figure in told.items()}
    assert value["nats per token"] == pytest.approx((2 + 4 + 3) / (1 + 3 + 2))
    assert value["nats per byte"] == pytest.approx((2 + 4 + 3) / (2 + 8 + 3))
    # by sum: -3 > -4 and -1 > -3; per token: -3/2 < -4/3 and -1 > -3/2; per byte: -3/2 < -4/8 and -1 = -3/3
    assert [value[f"accuracy {by}"] for by in ("by sum", "per token", "per byte")] == [0.0, 0.5, 0.5]
    assert told["accuracy per token"][1] == pytest.approx(0.5) and asking.mean([1.0]) == (1.0, None)
    assert "accuracy by sum" not in asking.of_likelihoods(told_of[:1], found[:1])


def test_greedy_answers_are_transformers_s_up_to_the_stop_and_match_letter_for_letter(file, gpt2_run, in_transformers):
    model, tokenizer = in_transformers
    made, run = prompter(file(*QUESTIONS), gpt2_run, room=48), restore(RunDirectory(gpt2_run))
    asked = made(1, 0, False)
    ask = lambda stop: asking.answers(run.assembly.model, run.params, asked, made, stop, 12, run.mesh)
    whole = []
    for prompt in asked:
        ids = torch.from_numpy(prompt.texts[0].tokens).long()[None]
        limits = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        whole.append(tokenizer.decode(model.generate(ids, **limits)[0, ids.shape[1] :], skip_special_tokens=True))
    assert ask("\n") == [text.split("\n")[0] for text in whole]
    stop = whole[0].strip()[1]
    assert ask(stop) == [text.split(stop)[0] for text in whole] != whole
    told = asking.of_answers(asked, ["muna ", " lo.", "Kilo muna.", "Te vo"])
    assert told["exact match"] == pytest.approx((0.5, (1 / 3) ** 0.5 / 2))


def test_the_error_of_a_ratio_is_that_of_drawing_again():
    rng = np.random.default_rng(0)
    below = rng.integers(1, 9, (2000, 100))
    above = below * rng.normal(2, 0.5, below.shape)
    ratios, errors = zip(*map(asking._ratio, above, below), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.05)


def test_the_command_prints_a_row_for_each_number_of_shots_and_writes_them(file, gpt2_run, tmp_path, capsys):
    path, out = file(*QUESTIONS), tmp_path / "figures.json"
    arguments = ["prompts", str(gpt2_run), "--examples", str(path), "--shots", "0", "3", "--seed", "5"]
    assert main([*arguments, "--out", str(out), "--separator", ": " * 8]) == 0
    printed = capsys.readouterr().out
    told = json.loads(out.read_text())
    assert (told["seed"], told["separator"], told["step"]) == (5, ": " * 8, 4)
    assert [row["shots"] for row in told["rows"]] == [0, 3] and told["rows"][0]["left_out"] == [0, 0, 0, 0]
    assert sum(told["rows"][1]["left_out"]) > 0 and "of 4 prompts" in printed
    for row in told["rows"]:
        assert f"{row['figures']['nats per token']['value']:.4f}" in printed
    assert main([*arguments, "--score", "greedy", "--max-tokens", "40"]) == 0
    assert "exact match" in capsys.readouterr().out
    assert main([*arguments, "--out", str(out / "x.json")]) == 2
    said = capsys.readouterr()
    assert "cannot write there" in said.err and not said.out  # before anything is asked


def test_an_exported_folder_is_asked_as_its_run_is(file, gpt2_run, tmp_path):
    export_model(Export(run=gpt2_run, to=tmp_path / "hf"))
    path, told = file(*QUESTIONS), {}
    for source in gpt2_run, tmp_path / "hf":
        out = tmp_path / f"{source.name}.json"
        assert main(["prompts", str(source), "--examples", str(path), "--shots", "0", "1", "--out", str(out)]) == 0
        told[source] = json.loads(out.read_text())
    of_run, of_folder = told.values()
    assert (of_run["step"], of_folder["step"]) == (4, None) and of_folder["run"] == str(tmp_path / "hf")
    for rows in zip(of_run["rows"], of_folder["rows"], strict=True):
        values = [{name: figure["value"] for name, figure in row["figures"].items()} for row in rows]
        assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_what_cannot_be_asked_is_one_line(file, gpt2_run, capsys, monkeypatch):
    path = file(*QUESTIONS)
    (path.parent / "link").symlink_to(path)
    arguments = ["prompts", str(gpt2_run), "--examples", str(path)]
    mistakes = {
        ("--out", str(path.parent / "link")): "link: would replace the file of --examples; give another",
        ("--shots", "-1"): "give numbers from 0 on",
        ("--seed", str(2**32)): "--seed 4294967296: must be at least 0 and below 2**32",
        ("--stop", "", "--score", "greedy"): "--stop: is given no value",
        ("--max-tokens", "31"): "--max-tokens 31: has no effect without --score greedy",
        ("--out", "s3://bucket/x.json"): "--out s3://bucket/x.json: give a local path",
        ("--max-tokens", "64", "--score", "greedy"): "--max-tokens 64: the model has 64 positions; give fewer",
        ("--max-tokens", "62", "--score", "greedy"): "but only 2 fit; shorten it",
    }
    for more, said in mistakes.items():
        assert main([*arguments, *more]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    monkeypatch.setattr(opened, "restore", lambda *_: Restored(assemble(tiny.bert()), 0, 0, {}, {}, None, []))
    assert main(arguments) == 2
    assert "a bert model is no causal decoder; use one, like gpt2" in capsys.readouterr().err
