"""What a run prints of a held-out row at each evaluation."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.tokenizers import stored
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import samples
from pretrain.training.evaluate import Evaluators
from pretrain.training.opened import restore
from pretrain.training.placement import of_phase


@pytest.fixture
def sampled():
    """Work directory -> (what is said, the model's module and parameters, the first held-out row, the tokenizer)."""

    def of(workdir):
        directory = RunDirectory(workdir)
        restored, corpora = restore(directory), directory.open_corpora()
        evaluators = Evaluators(of_phase(restored.stages, 0), corpora, 8)
        row = {name: array[:1] for name, array in next(evaluators.of[""].batches()).items()}
        said = samples.sample(evaluators, restored.params, restored.frozen)
        made = stored.load(corpora[""].tokenizer_path)
        return said, restored.assembly.model, restored.whole, row, made

    return of


def test_a_masked_model_fills_the_masks_of_a_held_out_row(bert_run, sampled):
    said, model, params, row, made = sampled(bert_run)
    hidden = model.apply(
        {"params": params}, {name: row[name] for name in ("tokens", "types", "segments")}, method="encode"
    )
    guesses = model.apply({"params": params}, hidden[0], method="token_logits").argmax(-1)
    places, right = row["prediction_positions"][0], row["prediction_targets"][0]
    is_shown = (row["prediction_weights"][0] > 0) & (places < samples.TOKENS)
    named = lambda token: made.tokenizer.decode([int(token)], skip_special_tokens=False)
    expected = [
        (named(guesses[place]), named(token)) for place, token in zip(places[is_shown], right[is_shown], strict=True)
    ]
    found = [(one.split(", not ")[0], one.split(", not ")[-1]) for one in re.findall(r"\[([^\]]+)\]", said)]
    assert said.startswith("sample: ") and found == expected and len(expected) > 1


def test_a_decoder_continues_the_beginning_of_a_held_out_row(gpt2_run, sampled):
    said, model, params, row, made = sampled(gpt2_run)
    tokens = row["tokens"][0][row["segments"][0] > 0][: samples.TOKENS].tolist()
    prompt = " ".join(made.tokenizer.decode(tokens).split())
    for _ in range(2):  # the likeliest tokens, each by reading all that stands before it
        read = jnp.array([tokens])
        inputs = {"tokens": read, "segments": jnp.ones_like(read)}
        hidden = model.apply({"params": params}, inputs, method="decode")
        tokens.append(int(np.argmax(model.apply({"params": params}, hidden[:, -1:], method="token_logits")[-1])))
    assert said.startswith(f"sample: {prompt} -> ")
    assert said.removeprefix(f"sample: {prompt} -> ").startswith(made.tokenizer.decode(tokens[-2:]).strip())
