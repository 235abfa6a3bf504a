"""All model families, found by their config's type; and what of a config a model's weights depend on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.core.family import Family
from models.families import (
    albert,
    bert,
    bigbird,
    ctrl,
    electra,
    etc,
    gpt,
    gpt2,
    longformer,
    roberta,
    t5,
    transformer_xl,
    xlnet,
)

FAMILIES: dict[str, Family] = {
    "albert": albert.FAMILY,
    "bert": bert.FAMILY,
    "bigbird": bigbird.FAMILY,
    "bigbird-etc": etc.FAMILY,
    "ctrl": ctrl.FAMILY,
    "electra": electra.FAMILY,
    "electra-encoder": electra.ENCODER,
    "gpt": gpt.FAMILY,
    "gpt2": gpt2.FAMILY,
    "longformer": longformer.FAMILY,
    "mt5": t5.MT5,
    "roberta": roberta.FAMILY,
    "t5": t5.FAMILY,
    "transformer-xl": transformer_xl.FAMILY,
    "xlnet": xlnet.FAMILY,
}


def family_of(config) -> Family:
    """The family whose config this is."""
    return next(family for family in FAMILIES.values() if family.config is type(config))


def name_of(config) -> str:
    """The name of the family whose config this is."""
    return next(name for name, family in FAMILIES.items() if family.config is type(config))


def renamed(source, target) -> Mapping[str, str] | None:
    """Path of a parameter of `target` -> that which it begins as of the model `source`, where it is not the same.

    None where a model of the one config cannot begin with the weights of one of the other.
    """
    if type(source) is type(target):
        return {}
    return family_of(target).continues.get(name_of(source))


# Fields of any config that belong to a training: a model goes on with others.
SETTINGS = ("dropout", "attention_dropout", "init_std", "memory", "pattern", "block", "window", "labels")


def weight_fields(config, prefix: str = "") -> dict[str, Any]:
    """The fields that decide which weights a model has or what they mean, all but SETTINGS: path -> value, dots into
    nested configs."""
    found = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), prefix + field.name
        if field.name in SETTINGS:
            continue
        if dataclasses.is_dataclass(value):
            found |= weight_fields(value, f"{path}.")
        else:
            found[path] = value
    return found


def differing_fields(source, target) -> dict[str, tuple[Any, Any]]:
    """Path -> (values of source, target) of the weight fields that keep a model of config `target` from beginning with
    the weights of one of `source`.

    What only one of them has, of a nested config that is None in the other, is None in the other; of two families the
    fields that both have. There may be more positions than the source has, and more tokens where each has a row of its
    own.
    """
    old, new = weight_fields(source), weight_fields(target)
    compared = old | new if type(source) is type(target) else old.keys() & new.keys()
    both = {path: (old.get(path), new.get(path)) for path in compared}
    differing = {path: values for path, values in both.items() if values[0] != values[1]}
    extensible = {"positions"}
    if "vocab_size" in differing and any("vocab" in row.axes for row in family_of(target).every_parameter(target)):
        extensible.add("vocab_size")
    return {path: (old, new) for path, (old, new) in differing.items() if path not in extensible or old > new}
