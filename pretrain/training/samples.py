"""Samples that each evaluation prints: a held-out row's masks filled, its text continued or its target generated."""

from collections.abc import Mapping, Sequence
from functools import partial

import flax.linen as nn
import jax
import numpy as np
from jax import Array

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import Made, text_end
from models.core.family import Inputs
from models.core.parameters import Params
from models.core.program import Program
from pretrain.generation.decoding import fills, generate, log_probabilities
from pretrain.generation.settings import Decoding
from pretrain.lora import merged
from pretrain.objectives.objective import inputs_of
from pretrain.objectives.protocols import EncoderDecoder, Writer
from pretrain.training.assembly import merge
from pretrain.training.evaluate import Evaluator, Evaluators
from tpu.batches import on_host, place_rows
from tpu.mesh import divided_by, mesh_shape

TOKENS = 32  # number of tokens of the row to show, and to generate
SHOWN = "unk", "mask"  # roles of special tokens that stand in texts


def sample(evaluators: Evaluators, params: Params, frozen: Params) -> str | None:
    """Return the first held-out row with the model's predictions; None if the model neither fills masks nor generates.
    params, frozen: the model's, on the evaluators' mesh. All processes must call this together."""
    evaluator = next(iter(evaluators.of.values()))
    made, model = stored.load(evaluator.corpus.tokenizer_path), evaluator.stage.assembly.model
    row = {name: array[:1] for name, array in next(evaluator.batches()).items()}
    whole = merged(merge(params, frozen))
    if fills(model):
        return _filled(evaluator, whole, row, made) if "prediction_positions" in row else None
    writes = isinstance(model, Writer) and not getattr(model, "clusters", ())
    if writes and mesh_shape(evaluator.stage.mesh).sequence == 1:
        return _continued(evaluator, whole, row, made)
    return None


def _continued(evaluator: Evaluator, params: Params, row: Mapping[str, np.ndarray], made: Made) -> str:
    """Return the first tokens of the row's first segment, and what the model generates after them."""
    model, mesh, segments = evaluator.stage.assembly.model, evaluator.stage.mesh, row["segments"][0]
    most = min(TOKENS, getattr(model.config, "positions", 2 * TOKENS) // 2)
    prompt = row["tokens"][0][segments == segments[0]][:most].tolist()
    end = text_end(made.special)
    if isinstance(model, EncoderDecoder) and end not in (None, prompt[-1]):
        prompt.append(end)
    stop = tuple(made.special[role] for role in ("eod", "sep") if role in made.special)
    plain = model.clone(program=Program(model.program.dtype))
    try:
        with divided_by(mesh):
            ((written,),) = generate(plain, params, [prompt], Decoding(max_tokens=most, stop=stop), mesh=mesh)
    except UserError as error:
        return f"no sample: {error}"
    before, after = (" ".join(_decoded(made, tokens).split()) for tokens in (prompt, written))
    return f"sample: {before} -> {after}"


def _filled(evaluator: Evaluator, params: Params, row: Mapping[str, np.ndarray], made: Made) -> str:
    """Return the row's first tokens as text; a predicted token also shows the right one if that differs."""
    model, mesh = evaluator.stage.assembly.model, evaluator.stage.mesh
    copies = mesh_shape(mesh).batch_parts  # one row for each shard of the batch
    batch = {name: np.repeat(array, copies, axis=0) for name, array in row.items()}
    placed = place_rows(batch, np.arange(copies), copies, mesh)
    with divided_by(mesh):
        guesses = on_host(_likeliest(model, params, inputs_of(model, placed), placed["prediction_positions"]))[0]
    is_predicted = row["prediction_weights"][0] > 0
    places, right = (row[f"prediction_{name}"][0][is_predicted].tolist() for name in ("positions", "targets"))
    predicted = dict(zip(places, zip(guesses[is_predicted].tolist(), right, strict=True), strict=True))
    return f"sample: {_text(made, row['tokens'][0][:TOKENS].tolist(), predicted)}"


@partial(jax.jit, static_argnums=0)
def _likeliest(model: nn.Module, params: Params, inputs: Inputs, slots: Array) -> Array:
    """Return the likeliest tokens i32[rows, n] at slots i32[rows, n]."""
    return log_probabilities(model, params, inputs, slots).argmax(-1).reshape(slots.shape)


def _text(made: Made, tokens: Sequence[int], predicted: Mapping[int, tuple[int, int]]) -> str:
    """Decode tokens.   predicted: position -> (likeliest token, right token)."""
    parts, begin = [], 0
    for place in sorted(predicted):
        if place < len(tokens):
            guess, right = (made.tokenizer.decode([token], skip_special_tokens=False) for token in predicted[place])
            shown = f"[{guess}]" if guess == right else f"[{guess}, not {right}]"
            parts += [_decoded(made, tokens[begin:place]), shown]
            begin = place + 1
    return " ".join(filter(None, [*parts, _decoded(made, tokens[begin:])]))


def _decoded(made: Made, tokens: Sequence[int]) -> str:
    """Decode tokens, without special ones that frame the text."""
    frame = {token for role, token in made.special.items() if role not in SHOWN and not role.startswith("sentinel_")}
    shown = [token for token in tokens if token not in frame]
    return made.tokenizer.decode(shown, skip_special_tokens=False)
