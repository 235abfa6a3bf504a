"""All model families, found by their config's type; and what of a config a model's weights depend on."""

import dataclasses
from typing import Any

from models.core.family import Family
from models.families import albert, bert, bigbird, electra, roberta, transformer_xl, xlnet

FAMILIES: dict[str, Family] = {
    "albert": albert.FAMILY,
    "bert": bert.FAMILY,
    "bigbird": bigbird.FAMILY,
    "electra": electra.FAMILY,
    "roberta": roberta.FAMILY,
    "transformer-xl": transformer_xl.FAMILY,
    "xlnet": xlnet.FAMILY,
}


def family_of(config) -> Family:
    """The family whose config this is."""
    return next(family for family in FAMILIES.values() if family.config is type(config))


# Fields of any config that belong to a training: a model goes on with others.
SETTINGS = ("dropout", "attention_dropout", "init_std", "memory", "pattern")


def weight_fields(config, prefix: str = "") -> dict[str, Any]:
    """The fields that decide which weights a model has or what they mean: path -> value, dots into nested configs.

    All but SETTINGS, and but those that add or take away whole heads, which the parameters themselves show.
    """
    hf = family_of(config).hf.values() if not prefix else ()
    heads = {name for model in hf for fields in model.architectures.values() for name in fields}
    found = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), prefix + field.name
        if field.name in SETTINGS:
            continue
        if dataclasses.is_dataclass(value):
            found |= weight_fields(value, f"{path}.")
        elif field.name not in heads:
            found[path] = value
    return found


def differing_fields(theirs, ours) -> dict[str, tuple[Any, Any]]:
    """Path -> (their value, ours) of the weight fields of two configs of one family that differ.

    What only one of them has, of a nested config that is None in the other, is None in the other.
    """
    old, new = weight_fields(theirs), weight_fields(ours)
    both = {path: (old.get(path), new.get(path)) for path in old | new}
    return {path: values for path, values in both.items() if values[0] != values[1]}
