"""The registry of model families, and the config fields that a model's weights depend on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.core.family import Family
from models.families import (
    albert,
    bart,
    bert,
    bigbird,
    ctrl,
    deberta,
    distilbert,
    electra,
    ernie,
    etc,
    gpt,
    gpt2,
    longformer,
    mobilebert,
    modernbert,
    roberta,
    t5,
    transformer,
    transformer_xl,
    unilm,
    xlnet,
)

FAMILIES: dict[str, Family] = {
    "albert": albert.FAMILY,
    "bart": bart.FAMILY,
    "bart-translation": bart.TRANSLATION,
    "bert": bert.FAMILY,
    "bigbird": bigbird.FAMILY,
    "bigbird-etc": etc.FAMILY,
    "ctrl": ctrl.FAMILY,
    "deberta-v2": deberta.FAMILY,
    "deberta-v3": deberta.V3,
    "distilbert": distilbert.FAMILY,
    "electra": electra.FAMILY,
    "electra-encoder": electra.ENCODER,
    "ernie": ernie.FAMILY,
    "gpt": gpt.FAMILY,
    "gpt2": gpt2.FAMILY,
    "longformer": longformer.FAMILY,
    "mobilebert": mobilebert.FAMILY,
    "modernbert": modernbert.FAMILY,
    "modernbert-decoder": modernbert.DECODER,
    "mt5": t5.MT5,
    "roberta": roberta.FAMILY,
    "t5": t5.FAMILY,
    "transformer": transformer.FAMILY,
    "transformer-xl": transformer_xl.FAMILY,
    "unilm": unilm.FAMILY,
    "xlnet": xlnet.FAMILY,
}


def family_of(config) -> Family:
    """Return the family of a config, by its type."""
    return next(family for family in FAMILIES.values() if family.config is type(config))


def name_of(config) -> str:
    """Return the name of a config's family."""
    return next(name for name, family in FAMILIES.items() if family.config is type(config))


def renamed(source, target) -> Mapping[str, str] | None:
    """Return how weights of a `source` model initialise a `target` model: path of a target's parameter -> its path in
    the source, where they differ; None if they cannot.
    """
    if type(source) is type(target):
        return {}
    return family_of(target).continues.get(name_of(source))


# Config fields that belong to training, not to the weights: they may change when training continues.
SETTINGS = ("dropout", "attention_dropout", "init_std", "memory", "pattern", "block", "window", "labels")
SETTINGS += ("global_base", "local_base")


def weight_fields(config, prefix: str = "") -> dict[str, Any]:
    """Return the fields that decide which weights a model has or what they mean, all except SETTINGS: path -> value;
    dots lead into nested configs."""
    fields = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), prefix + field.name
        if field.name in SETTINGS:
            continue
        if dataclasses.is_dataclass(value):
            fields |= weight_fields(value, f"{path}.")
        else:
            fields[path] = value
    return fields


def differing_fields(source, target) -> dict[str, tuple[Any, Any]]:
    """Return the weight fields that keep a `target` model from starting with the weights of a `source` model: path ->
    (value of source, value of target).

    Within a family, a field of a nested config that one of them lacks counts as None; between families only the fields
    of both are compared. The target may have more positions and token types, and more tokens if each has its own row.
    """
    old, new = weight_fields(source), weight_fields(target)
    compared = old | new if type(source) is type(target) else old.keys() & new.keys()
    both = {path: (old.get(path), new.get(path)) for path in compared}
    differing = {path: values for path, values in both.items() if values[0] != values[1]}
    extensible = {"positions", "types"}
    if "vocab_size" in differing and any("vocab" in row.axes for row in family_of(target).every_parameter(target)):
        extensible.add("vocab_size")
    return {path: (old, new) for path, (old, new) in differing.items() if path not in extensible or old > new}
