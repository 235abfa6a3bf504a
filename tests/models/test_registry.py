"""What of two configs decides that they have other weights."""

import dataclasses

from models.attention.patterns.pattern import Pattern
from models.core.family import dense_there
from models.families import registry
from models.families.bert import FAMILY, BertConfig


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
    said = lambda name: dense_there(BertConfig(pattern=Pattern(name, block=128)))
    assert said("dense") == [] and len(said("bigbird")) == 1
