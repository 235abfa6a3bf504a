"""`python -m pretrain generate`: texts of a causal run, fillings of a masked one, mistakes in one line."""

import re

import jax
import numpy as np
import pytest

from data_pipelines.tokenizers import stored
from pretrain.__main__ import main
from pretrain.commands.generate import encode
from pretrain.objectives.inputs import inputs_of
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.restore import restore


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


def test_masks_are_filled_with_the_likeliest_tokens(uninterrupted, capsys):
    out = printed(capsys, uninterrupted, "--prompt", "the [MASK] of the", "--number", 3)
    head, *found = out.splitlines()
    assert head == "the [MASK] of the" and len(found) == 3
    restored = restore(RunDirectory(uninterrupted), None, jax.local_devices()[:1])
    model, made = restored.assembly.model, stored.load(uninterrupted / "tokenizer")
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "has no prompt; give --prompt TEXT, or --prompts FILE"),
        (["--prompt", "a", "--top-k", 5], "--top-k 5: has no effect without --sample"),
        (["--prompt", "a", "--sample", "--beams", 2], "beams=2: draws nothing"),
        (["--prompt", "a", "--number", 2], "number=2: there are not so many texts"),
        (["--prompt", "a", "--max-tokens", 1000], "max_tokens=1000 are more than the"),
        (["--prompt", "a", "--beams", 1000], "beams=1000: the vocabulary has"),
    ],
)
def test_a_mistake_is_one_line(gpt2_run, capsys, arguments, words):
    assert words in mistake(capsys, gpt2_run, *arguments)


def test_a_masked_model_needs_a_mask(uninterrupted, capsys):
    assert "write [MASK] where a word is missing" in mistake(capsys, uninterrupted, "--prompt", "the")
