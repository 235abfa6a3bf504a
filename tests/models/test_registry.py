"""Configs: what is refused, and what of two decides that they have other weights."""

import dataclasses

import pytest

from models.attention.patterns.pattern import Pattern
from models.core.family import dense_there
from models.families import registry
from models.families.bert import FAMILY, BertConfig
from models.families.electra import ElectraConfig, Tower
from models.families.transformer_xl import TransformerXLConfig


@dataclasses.dataclass(frozen=True)
class Cross:
    heads: int = 2
    dropout: float = 0.1


@dataclasses.dataclass(frozen=True)
class Config:
    """As of a family with a part that not all models have."""

    width: int = 16
    cross: Cross | None = None


def test_a_part_that_one_config_has_and_the_other_has_not_differs_in_every_field(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "toy", FAMILY._replace(config=Config, hf={}))
    without, with_it = Config(), Config(cross=Cross())
    assert registry.differing_fields(without, with_it) == {"cross.heads": (None, 2)}
    assert registry.differing_fields(with_it, without) == {"cross.heads": (2, None)}
    assert registry.differing_fields(with_it, Config(cross=Cross(dropout=0.0))) == {}
    assert registry.differing_fields(Config(cross=Cross(4)), with_it) == {"cross.heads": (4, 2)}


def test_a_dense_model_is_dense_there_too_whatever_is_in_fields_that_it_does_not_read():
    said = lambda name: dense_there(BertConfig(pattern=Pattern(name, block=128)), ())
    assert said("dense") == [] and len(said("bigbird")) == 1


BAD = [
    *((BertConfig, "width", 15), (BertConfig, "depth", 0), (BertConfig, "activation", "swish")),
    *((BertConfig, "dropout", 1.0), (BertConfig, "attention_dropout", -0.1)),
    *((TransformerXLConfig, "cutoffs", (30, 10)), (TransformerXLConfig, "divisor", 0)),
    *((TransformerXLConfig, "memory", -1), (TransformerXLConfig, "width", 15), (TransformerXLConfig, "heads", 3)),
    (TransformerXLConfig, "activation", "tanh"),
]


@pytest.mark.parametrize(("config", "field", "value"), BAD)
def test_impossible_configs_are_refused_by_the_field_name(config, field, value):
    with pytest.raises(ValueError, match=rf"model\.{field}="):
        config(**{field: value})


def test_a_tower_is_named_in_the_message():
    with pytest.raises(ValueError, match=r"model\.generator\.width=15"):
        ElectraConfig(generator=Tower(15, 2, 2, 16))
