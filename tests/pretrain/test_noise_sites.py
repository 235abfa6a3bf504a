"""No two places of a step draw the same noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.core import noise
from models.core.program import Program
from models.families.bart import BartTranslationConfig
from models.families.mobilebert import MobileBertConfig
from pretrain.objectives.objective import Moment
from pretrain.training.assembly import assemble, initial_carry, initial_params
from tests.pretrain import tiny
from tests.pretrain.fields import replaced

MAKE = (tiny.albert, tiny.bert, tiny.electra, tiny.etc, tiny.gpt2, tiny.transformer_xl, tiny.xlnet)
RECIPES = {recipe.name: recipe for recipe in (make() for make in MAKE)}
MOBILE = MobileBertConfig(vocab_size=195, positions=32, width=32, heads=2, embedding=16, bottleneck=24)
RECIPES["mobilebert"] = tiny.bert(model=MOBILE)
TRANSLATION = BartTranslationConfig(195, 32, 32, 1, 1, 2, 64, source_depth=1)
RECIPES["bart-translation"] = tiny.t5(model=TRANSLATION)
PLACES = {"albert": 7, "bart-translation": 21, "bert": 7, "electra": 12, "bigbird-etc": 14, "gpt2": 7, "mobilebert": 5}
PLACES |= {"transformer-xl": 11, "xlnet": 16}


@pytest.mark.parametrize("name", PLACES)
def test_every_place_has_keys_of_its_own(name, monkeypatch):
    depth = "model.discriminator.depth" if name == "electra" else "model.depth"
    recipe = replaced(replaced(RECIPES[name], "model.dropout", 0.1), "model.attention_dropout", 0.1)
    recipe = replaced(recipe, depth, 2)
    assembly = assemble(recipe, Program(depth="unroll"))
    carry, _ = initial_carry(assembly, 0)
    bits, drawn = noise.bits, []
    monkeypatch.setattr(noise, "bits", lambda keys, shape: drawn.append(keys) or bits(keys, shape))

    def keys_of_places(params, batch, keys):
        recipe.objective.loss(assembly.model, params, batch, carry, Moment(keys, True))
        return jnp.stack(drawn)

    rows, spec = recipe.phases[0].batch_size, recipe.objective.spec(recipe.phases[0])
    batch = {name: one.blank(rows) for name, one in spec.items()}
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(lambda: initial_params(assembly)))
    found = np.asarray(jax.jit(keys_of_places)(params, batch, noise.row_keys(0, 0, jnp.arange(rows))))
    assert len(found) == PLACES[name]
    assert len(np.unique(found.reshape(-1, 2), axis=0)) == PLACES[name] * rows
