"""The parameter tables say exactly what the models' parameters are."""

import functools
import json
from collections import Counter

import numpy as np
import pytest

from models.blocks.crf import CRF
from models.blocks.embeddings import padded_vocab
from models.blocks.heads import TAGGER
from models.blocks.span_boundary import BOUNDARY
from models.core.parameters import LAYERS, count, decays, leaves, nest
from models.families import albert
from models.families.registry import FAMILIES
from tests.models import golden
from tests.models.shapes import parameter_shapes

SIZES = [
    pytest.param(family, config, id=f"{name}-{size}")
    for name, family in FAMILIES.items()
    for size, config in family.sizes.items()
]


def kinds():
    """Name, family, size and config of all; those whose parameters have the names and axes of others' are slow."""
    seen = set()
    for name, family in FAMILIES.items():
        for size, config in family.sizes.items():
            kind = name, *((row.path, row.axes) for row in family.every_parameter(config))
            yield pytest.param(name, size, id=f"{name}-{size}", marks=pytest.mark.slow if kind in seen else ())
            seen.add(kind)


@functools.cache
def golden_tables(name):
    return json.loads((golden.FOLDER / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_size_has_a_golden_table(name):
    assert list(golden_tables(name)) == list(FAMILIES[name].sizes)


def test_numbers_of_every_size_are_the_golden_ones():
    assert golden.configs() == json.loads(golden.CONFIGS.read_text("utf-8"))


@pytest.mark.parametrize(("name", "size"), kinds())
def test_tables_are_the_golden_ones(name, size):
    family = FAMILIES[name]
    found = golden.table(family, family.sizes[size])
    assert found == golden_tables(name)[size], "meant? then run `python -m tests.models.golden`"


def test_layers_that_share_attention_alone_have_that_of_their_group_in_hugging_face():
    config = albert.AlbertConfig(depth=4, groups=2, sharing="attention")
    slots = {parameter.path: parameter.hf["model"] for parameter in albert.parameters(config)}
    assert slots["layers/attention/query/kernel"].layers == {0: 0, 1: 0, 2: 1, 3: 1}
    assert slots["layers/feed_forward/up/kernel"].layers is None


@pytest.mark.parametrize(("name", "size"), kinds())
def test_the_table_lists_every_parameter_once_and_axes_name_every_dimension(name, size):
    family, config = FAMILIES[name], FAMILIES[name].sizes[size]
    shapes, sizes = dict(leaves(parameter_shapes(config, tuple(head.name for head in family.heads)))), {}
    assert sorted(parameter.path for parameter in family.every_parameter(config)) == sorted(shapes)
    for parameter in family.every_parameter(config):
        shape = shapes[parameter.path].shape
        assert len(shape) == len(parameter.axes), parameter.path
        assert shapes[parameter.path].dtype == np.float32
        assert LAYERS not in parameter.axes[1:], parameter.path
        tower = parameter.path.split("/")[0]  # a name means one size, at least within each part of the model
        for axis, size in zip(parameter.axes, shape, strict=True):
            if axis:
                assert sizes.setdefault((tower, axis), size) == size, (parameter.path, axis)
                assert axis != "vocab" or size == padded_vocab(config.vocab_size)


@pytest.mark.parametrize(("family", "config"), SIZES)
def test_every_parameter_has_names_in_a_checkpoint_and_no_class_one_twice(family, config):
    nameless = [row for head in family.heads if head.is_nameless for row in head.parameters]
    assert {row.path.split("/")[0] for row in nameless} <= {BOUNDARY, CRF, TAGGER}
    for parameter in family.every_parameter(config):
        assert bool(parameter.hf) == bool(family.hf and parameter not in nameless), parameter.path
        assert set(parameter.hf) <= set(family.hf), parameter.path
        own = parameter.path in [slot.name for slot in parameter.hf.values()]  # in a folder of our own form
        stacked = parameter.axes[0] == LAYERS and not own
        assert all(("{layer}" in slot.name) == stacked for slot in parameter.hf.values())
    for part, model in family.hf.items():
        for heads in model.architectures.values():
            slots = [(row.path, row.hf[part]) for row in family.parameters(config, heads) if part in row.hf]
            # What shares a tensor with others has a place of its own there.
            own = lambda path, slot: (slot.name, (*(slot.layers or ()),), path if slot.axis is not None else "")
            names = Counter(own(path, slot) for path, slot in slots)
            assert set(names.values()) == {1}


@pytest.mark.parametrize(("family", "config"), SIZES)
def test_biases_and_norms_do_not_decay_and_everything_else_does(family, config):
    for parameter in family.every_parameter(config):
        assert decays(parameter) != parameter.path.endswith(("bias", "scale")), parameter.path


def test_nest_is_the_inverse_of_leaves():
    tree = {"b": {"c": 1, "a": {"x": 2}}, "a": 3}
    assert list(leaves(tree)) == [("a", 3), ("b/a/x", 2), ("b/c", 1)]
    assert nest(dict(leaves(tree))) == tree


PUBLISHED = {  # parameters, how near; of the second Dai et al. 2019, table 1
    "bert": (110_106_428, 0),
    "transformer-xl": (151e6, 0.01),
    "xlnet": (116_750_336, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_base_has_its_published_number_of_parameters(name):
    config, (number, near) = FAMILIES[name].sizes["base"], PUBLISHED[name]
    padding = (padded_vocab(config.vocab_size) - config.vocab_size) * (config.width + 1)
    assert count(parameter_shapes(config)) - padding == pytest.approx(number, rel=near)
