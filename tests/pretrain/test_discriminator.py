"""A discriminator on a frozen model's mean hidden states, and bags of words: what steers."""

import json

import jax
import numpy as np
import pytest

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import stored
from pretrain.__main__ import main
from pretrain.generation.loop import program
from pretrain.generation.settings import Steering
from pretrain.steering import discriminator, loop
from pretrain.steering.loop import bag
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.opened import restore

TEXTS = [("Ba kilo muna.", "ba"), ("Te vo za.", "te")]


@pytest.fixture(scope="module")
def trained(gpt2_run, tmp_path_factory):
    """(what is printed, the folder) of a discriminator that knows texts by their first word."""
    folder = tmp_path_factory.mktemp("discriminator")
    rng = np.random.default_rng(0)
    others = ["poba suri", "de lo", "ki na ri", "su te vo"]
    lines = [{"text": f"{text} {rng.choice(others)}.", "label": label} for text, label in TEXTS * 40]
    lines[0]["text"] *= 30
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", lambda *text, **_: said.append(*text))
        arguments = ["--examples", str(folder / "lines.jsonl"), "--out", str(folder / "made"), "--heldout", "0.25"]
        assert main(["discriminator", str(gpt2_run), *arguments]) == 0
    return said, folder / "made"


def test_it_tells_held_out_texts_and_says_so(trained, gpt2_run):
    said, folder = trained
    run = restore(RunDirectory(gpt2_run))
    assert said[0].startswith(
        f"{gpt2_run} at step {run.step}: accuracy 1.0000 ± 0.0000 on 20 held-out texts, 1.0000 on 60"
    )
    assert "always the commonest label: 0.5000" in said[0] and said[1].startswith(
        "1 texts are longer than the model's 64"
    )
    found = discriminator.load(folder, run.params)
    assert found.labels == ["ba", "te"] and found.kernel.shape == (32, 2)
    encode = stored.load(gpt2_run / "tokenizer").tokenizer.encode
    tokens = [np.array(encode(text).ids, np.int32) for text, _ in TEXTS]
    states = discriminator.means(run.assembly.model, run.params, tokens, run.mesh)
    assert (states @ found.kernel + found.bias).argmax(1).tolist() == [0, 1]
    alone = {"tokens": tokens[0][None], "segments": np.ones_like(tokens[0])[None]}
    hidden = run.assembly.model.apply({"params": run.params}, alone, method="decode")
    np.testing.assert_allclose(states[0], hidden[0].mean(0), atol=1e-5)


def test_one_of_another_model_or_damaged_is_refused(trained, gpt2_run, tmp_path):
    restored = restore(RunDirectory(gpt2_run))
    params = restored.params
    said = f"was trained on another model at step {restored.step}; give --step {restored.step} if"
    with pytest.raises(UserError, match=said):
        discriminator.load(trained[1], jax.tree.map(lambda leaf: leaf + 1, params))
    with pytest.raises(UserError, match="cannot be read .No such file"):
        discriminator.load(tmp_path, params)
    (tmp_path / discriminator.FILE).write_text('{"labels": ["a"]}')
    with pytest.raises(UserError, match="is damaged .KeyError.*train it again"):
        discriminator.load(tmp_path, params)


MISTAKES = {
    "one label": ([{"text": "a", "label": "x"}] * 9, "give at least two labels"),
    "no label": ([{"text": "a"}], "line 1: 'label' is missing (keys: 'text')"),
    "a number": ([{"text": "a", "label": 1}], "line 1: 'label' is 1; give a string"),
}


@pytest.mark.parametrize("lines, said", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(lines, said, tmp_path, capsys):
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--examples", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path / "made")]
    assert main(["discriminator", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_the_step_is_the_one_that_is_asked_for(trained, gpt2_run, tmp_path, capsys):
    arguments = ["discriminator", str(gpt2_run), "--examples", str(trained[1].parent / "lines.jsonl")]
    assert main([*arguments, "--out", str(tmp_path / "made"), "--step", "3"]) == 2
    assert "has no checkpoint of step 3" in capsys.readouterr().err and not (tmp_path / "made").exists()


def test_a_folder_with_anything_else_is_not_written_into(trained, gpt2_run, tmp_path, capsys):
    arguments = ["discriminator", str(gpt2_run), "--examples", str(tmp_path / "none"), "--out"]
    assert main([*arguments, str(gpt2_run)]) == 2
    assert f"--out {gpt2_run}: holds checkpoints, so it is not a discriminator's" in capsys.readouterr().err
    assert main([*arguments, str(trained[1])]) == 2  # but into an earlier one
    assert "none: cannot be read" in capsys.readouterr().err
    lines = tmp_path / discriminator.FILE
    lines.touch()
    assert main(["discriminator", str(gpt2_run), "--examples", str(lines), "--out", str(tmp_path)]) == 2
    assert f"--out {lines}: would replace the file of --examples" in capsys.readouterr().err


def test_a_bag_has_its_words_of_one_token_as_they_stand_in_a_text(gpt2_run, tmp_path):
    tokenizer = stored.load(gpt2_run / "tokenizer").tokenizer
    whole = [token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ") and len(token) > 3][:3]
    (tmp_path / "words.txt").write_text("\n".join([*whole, "", "qqqq zzzz", f" {whole[0]} "]))
    words, left_out = bag(tmp_path / "words.txt", Encoder(tokenizer), 384)
    assert {tokenizer.id_to_token(int(token)) for token in words.nonzero()[0]} == {f"Ġ{word}" for word in whole}
    assert left_out == ["qqqq zzzz"] and len(words) == 384
    (tmp_path / "none.txt").write_text("qqqq\n")
    with pytest.raises(UserError, match="none of its 1 words is a single token of this model"):
        bag(tmp_path / "none.txt", Encoder(tokenizer), 384)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match="empty.txt: has no words; write one per line"):
        bag(tmp_path / "empty.txt", Encoder(tokenizer), 384)


def test_generate_takes_words_a_label_and_strengths(trained, gpt2_run, tmp_path, capsys, monkeypatch):
    (tmp_path / "words.txt").write_text("ba\nqqqq zzzz\n")
    given = []
    monkeypatch.setattr(loop, "steered_program", lambda *aim: given.append(aim) or program)
    arguments = ["generate", str(gpt2_run), "--prompt", "Ba kilo", "--max-tokens", "2"]
    options = ["--words", str(tmp_path / "words.txt"), "--discriminator", str(trained[1]), "--label", "te"]
    assert main([*arguments, *options, "--steering.step-size", "0.5", "--steering.window", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--words") and "several tokens and are left out: qqqq zzzz\nBa kilo" in out
    ((aim, strengths),) = given
    assert strengths == Steering(step_size=0.5, window=7) and aim.words.sum() == 1 and aim.discriminator[2] == 1
    mistakes = {
        ("--label", "te"): "--discriminator and --label: give both",
        ("--discriminator", str(trained[1]), "--label", "tte"): "has no label tte; did you mean te?",
        ("--steering.window", "3"): "--steering: has no effect without --words or --discriminator",
        (*options, "--beams", "2"): "--beams 2: steering works without beam search only",
    }
    monkeypatch.undo()
    for more, said in mistakes.items():
        assert main([*arguments, *more]) == 2
        assert said in capsys.readouterr().err
