"""A toy family with an input that no built-in one has, a box of the page for every token, and rows that have them."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from data_pipelines.examples.layout import Feature
from data_pipelines.examples.packed_sentences import PackedSentences
from models.blocks.heads import TOKENS
from models.blocks.positions import gather_positions
from models.core.family import Family, Head, Input
from models.core.parameters import Parameter
from models.families.registry import FAMILIES
from pretrain.objectives.masked_language_model import LAYOUTS, MaskedLanguageModel
from tests.pretrain import toys


@dataclasses.dataclass(frozen=True)
class BoxedConfig:
    """Each token's box and the mean of the row's words."""

    vocab_size: int = 195
    width: int = 16


class Boxed(nn.Module):
    """The model gives a token's logits from its own box and the words of the row."""

    config: BoxedConfig
    program: object
    heads: tuple = ()

    def setup(self):
        normal, c = nn.initializers.normal(0.5), self.config
        self.words = self.param("words", normal, (c.vocab_size, c.width))
        self.boxes = self.param("boxes", normal, (4, c.width))
        self.out = self.param("out", normal, (c.width, c.vocab_size))

    def encode(self, inputs, noise=None, slots=None):
        x = self.words[inputs["tokens"]].mean(axis=1, keepdims=True) + inputs["boxes"] @ self.boxes
        return x if slots is None else gather_positions(x, slots)

    def apply_head(self, name, hidden):
        return jnp.tanh(hidden.reshape(-1, self.config.width)) @ self.out

    def __call__(self, inputs):
        return self.apply_head(TOKENS, self.encode(inputs))


FAMILY = Family(
    config=BoxedConfig,
    sizes={},
    inputs={
        "tokens": Input(("length",)),
        "boxes": Input(("length", 4), "float32"),
    },
    trunk=Boxed,
    heads=(Head(TOKENS, None, ()),),  # a part of the trunk
    table=lambda config: [
        Parameter("words", ("vocab", "width"), {}),
        Parameter("boxes", (None, "width"), {}),
        Parameter("out", ("width", "vocab"), {}),
    ],
    hf={},
)


class BoxedRows(PackedSentences):
    """Packed sentences whose boxes say which of four kinds the token is, also where it is masked."""

    @property
    def spec(self):
        return super().spec | {"boxes": Feature((self.length, 4), np.float32)}

    def build(self, chosen, keys):
        batch = super().build(chosen, keys)
        original, rows = batch["tokens"].copy(), np.arange(len(batch["tokens"]))[:, None]
        used = batch["prediction_weights"] > 0
        rows, slots = np.broadcast_to(rows, used.shape)[used], batch["prediction_positions"][used]
        original[rows, slots] = batch["prediction_targets"][used]
        return batch | {"boxes": 4 * np.eye(4, dtype=np.float32)[original % 4]}


def register(monkeypatch) -> None:
    """Make the family and the layout 'boxes' known, as built-in ones are."""
    monkeypatch.setitem(FAMILIES, "boxed", FAMILY)
    monkeypatch.setitem(LAYOUTS, "boxes", BoxedRows)


def recipe(layout="boxes", **changes):
    objective = MaskedLanguageModel(layout=layout, next_sentence=False)
    return toys.recipe(**{"model": BoxedConfig(), "objective": objective} | changes)
