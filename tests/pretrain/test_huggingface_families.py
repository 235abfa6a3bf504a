"""What the folders of one family have that others have not: decoders' in several files and as they were published,
patterns that transformers computes otherwise, RoBERTa's padding and its pairs."""

import dataclasses
import io
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from rich.console import Console
from safetensors.numpy import load_file

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from models.attention.patterns.pattern import Pattern
from pretrain.huggingface import export as exports
from pretrain.huggingface.export import INDEX, WHOLE, export
from pretrain.huggingface.tensors import architecture, tensors
from pretrain.recipe import resolve
from pretrain.recipes.registry import RECIPES
from tests.pretrain import reference
from tests.pretrain.hugging_face_folders import BIGBIRD, LONGFORMER, load_like, random_params, rewrite
from tests.texts import write_texts


@pytest.mark.parametrize(
    ("kind", "dtype"), [("ctrl", "float32"), ("gpt", "float32"), ("gpt2", "float32"), ("gpt2", "bfloat16")]
)
def test_transformers_loads_a_decoder_in_several_files_whole(configs, tokenizers, tmp_path, monkeypatch, kind, dtype):
    config, params = configs[kind], random_params(configs[kind])
    monkeypatch.setattr(exports, "LIMIT", 8000)
    export(params, config, tokenizers[kind], tmp_path / "out", dtype)
    assert (tmp_path / "out" / INDEX).exists() and not (tmp_path / "out" / WHOLE).exists()
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded).__name__ == architecture(config, "model", params) and str(loaded.dtype) == f"torch.{dtype}"
    theirs, ours = dict(loaded.named_parameters()), tensors(params, config, "model")
    assert set(ours) == set(theirs)
    for key, tensor in ours.items():
        np.testing.assert_array_equal(theirs[key].detach().float(), tensor.array().astype(jnp.dtype(dtype)))
    monkeypatch.undo()
    export(params, config, tokenizers[kind], tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").glob("model*")] == [WHOLE]  # none of the larger one is left


@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_a_folder_as_it_was_published_loads(configs, tmp_path, kind):
    """A bare trunk, masks beside its weights, and no width inside the feed-forward block."""
    whole = reference.torch_model(configs[kind], "model")
    whole.save_pretrained(tmp_path / "whole")
    whole.transformer.save_pretrained(tmp_path / "bare")
    said = json.loads((tmp_path / "bare" / "config.json").read_text())
    said.pop("n_inner", None)
    (tmp_path / "bare" / "config.json").write_text(json.dumps(said))
    rewrite(tmp_path / "bare", lambda stored: stored.update({"h.1.attn.bias": np.ones((1, 1, 32, 32), np.float32)}))
    assert not any(key.startswith("transformer.") for key in load_file(tmp_path / "bare" / WHOLE))
    ours = [load_like(folder, configs[kind], folder) for folder in (tmp_path / "whole", tmp_path / "bare")]
    jax.tree.map(np.testing.assert_array_equal, *ours)


FEW = BIGBIRD.pattern
DILATED = dataclasses.replace(LONGFORMER.pattern, dilations=(1, 2))


@pytest.mark.parametrize(
    ("kind", "pattern", "expected"),
    [
        ("bigbird", FEW, "BigBirdForPreTraining other blocks are drawn .*; rows of up to 36 tokens have dense attenti"),
        ("bigbird", dataclasses.replace(FEW, window=5), "is BigBird's, with a window of 3 blocks and 2 global ones"),
        ("bigbird", Pattern(), None),
        ("longformer", LONGFORMER.pattern, None),
        ("longformer", DILATED, "LongformerForMaskedLM windows are not dilated"),
        ("longformer", FEW, "is Longformer's, not model.pattern.name=bigbird"),
        ("pretraining", FEW, "all tokens see all, whatever model.pattern.name=bigbird says"),
        ("pretraining", Pattern(), None),
    ],
)
def test_what_transformers_computes_otherwise_is_said_in_one_line(exported, caplog, kind, pattern, expected):
    with caplog.at_level(logging.WARNING):
        exported(kind, pattern=pattern)
    found = [record.getMessage() for record in caplog.records if " in a " in record.getMessage()]
    assert len(found) == (expected is not None)
    assert expected is None or re.search(expected, found[0])


def test_of_a_t5_whose_gate_is_an_exact_gelu_the_export_says_what_transformers_computes(exported, caplog):
    exported("t5", activation="gelu"), exported("t5", activation="gelu", gated=True)
    assert caplog.text.count("T5ForConditionalGeneration model.activation=gelu is gelu_new") == 1


def test_of_a_roberta_with_the_pair_head_all_else_loads_and_the_export_says_so(exported, caplog):
    with caplog.at_level(logging.WARNING):
        folder = exported("roberta pairs")
    assert "in a RobertaForPreTraining there is no head for pairs, as there is no such class" in caplog.text
    _, info = transformers.RobertaForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith(("pair.", "roberta.pooler.")) for name in info["unexpected_keys"])


def test_a_corpus_whose_padding_has_another_id_is_refused_before_training(corpus_path, tmp_path):
    recipe = RECIPES["roberta-tiny"]
    of_pairs = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, types=2))
    said = "--corpus .*: its tokenizer has pad_token_id=0, but a 'roberta' model has 1; prepare it with --tokenizer bpe"
    with pytest.raises(UserError, match=said):
        resolve(of_pairs, Corpus(corpus_path))
    source = write_texts(tmp_path / "texts", documents=40, seed=0)
    options = Prepare((f"text:{source}",), tmp_path / "corpus", tokenizer="bpe", vocab_size=300, processes=1)
    prepare(options, Console(file=io.StringIO()))
    assert resolve(recipe, Corpus(tmp_path / "corpus")).model.types == 1
