"""Where a parameter lies in a Hugging Face checkpoint: in slices of tensors, under layers' or groups' names, behind
rows that no model reads; and config fields that are written in another form. Both ways, by a toy."""

import dataclasses
import json

import flax.linen as nn
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from data_pipelines.errors import UserError
from models.core.family import Converter, Family, HuggingFace
from models.core.parameters import LAYERS, Parameter, Slot, leaves, nest
from models.families.registry import FAMILIES
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import export
from pretrain.huggingface.load import load
from pretrain.huggingface.tensors import tensors

WIDTH = 6


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 10
    positions: int = 4
    depth: int = 4
    window: int = 8


SHAPES = {
    "positions": (4, WIDTH),
    "layers/up/kernel": (4, WIDTH, 3),
    "layers/gate/kernel": (4, WIDTH, 5),
    "shared/0/scale": (2, WIDTH),
    "shared/1/scale": (2, WIDTH),
    "grouped/scale": (2, WIDTH),
}


def parameters(config):
    axes, place = (LAYERS, "width", "heads"), lambda *slot, **more: {"model": Slot(*slot, **more)}
    fused = [
        Parameter(f"layers/{name}/kernel", axes, place("h.{layer}.Wi.weight", "T", axis=0)) for name in ("up", "gate")
    ]
    turns = [  # layers 0 and 2 are of one kind, 1 and 3 of another
        Parameter(f"shared/{turn}/scale", (LAYERS, "width"), place("h.{layer}.norm", layers={turn: 0, turn + 2: 1}))
        for turn in (0, 1)
    ]
    groups = place("h.{layer}.group", layers={0: 0, 1: 0, 2: 1, 3: 1})
    return [
        Parameter("positions", ("position", "embedding"), place("wpe.weight", before=2)),
        *fused,
        *turns,
        Parameter("grouped/scale", (LAYERS, "width"), groups),
    ]


FAMILY = Family(
    config=Config,
    sizes={},
    inputs={},
    module=lambda config, program: nn.Module(),
    parameters=parameters,
    hf={
        "model": HuggingFace(
            folder="",
            architectures={"Toy": {}},
            constants={"model_type": "toy"},
            fields={
                "vocab_size": "vocab_size",
                "n_layer": "depth",
                "n_positions": Converter("positions", lambda c: c.positions + 2, lambda f: f["n_positions"] - 2),
                "local": Converter("window", lambda c: 2 * c.window, lambda f: f["local"] // 2),
            },
            settings={},
            tied={},
            trunk="h.",
        )
    },
    flops=lambda config, shape, predictions: 0.0,
)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", FAMILY)
    rng = np.random.default_rng(0)
    return nest({path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()})


@pytest.fixture
def exported(toy, monkeypatch, tmp_path):
    """The folder of an export; of the tokenizer nothing is looked at."""
    monkeypatch.setattr("pretrain.huggingface.export.check_types", lambda *_: None)
    monkeypatch.setattr("pretrain.huggingface.export.check_ids", lambda *_: None)
    monkeypatch.setattr("pretrain.huggingface.export.misfits", lambda *_: [])
    monkeypatch.setattr("pretrain.huggingface.export.tokenizers.load", lambda _: None)
    monkeypatch.setattr("pretrain.huggingface.export.token_ids", lambda _: {})
    monkeypatch.setattr("pretrain.huggingface.load.check_vocabulary", lambda *_: None)
    export(toy, Config(), tmp_path, tmp_path / "out")
    return tmp_path / "out"


def load_toy(folder, toy):
    return dict(leaves(load(folder, Config(), toy, folder)))


def test_what_is_exported_is_loaded_again(exported, toy):
    loaded, before = load_toy(exported, toy), dict(leaves(toy))
    assert loaded.keys() == before.keys()
    for path, array in before.items():
        np.testing.assert_array_equal(loaded[path], array, err_msg=path)


def test_modernbert_s_fused_projection_is_transposed_and_of_unequal_parts(exported, toy):
    stored = load_file(exported / "model.safetensors")["h.1.Wi.weight"]
    assert stored.shape == (3 + 5, WIDTH)
    x = np.random.default_rng(1).normal(size=(3, WIDTH)).astype(np.float32)
    up, gate = torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(stored)).split([3, 5], dim=1)
    np.testing.assert_allclose(x @ toy["layers"]["up"]["kernel"][1], up, atol=1e-5)
    np.testing.assert_allclose(x @ toy["layers"]["gate"]["kernel"][1], gate, atol=1e-5)


def test_rows_before_the_positions_are_written_as_zeros_and_never_read(exported, toy):
    stored = load_file(exported / "model.safetensors")
    assert stored["wpe.weight"].shape == (2 + 4, WIDTH) and not stored["wpe.weight"][:2].any()
    np.testing.assert_array_equal(stored["wpe.weight"][2:], toy["positions"])
    stored["wpe.weight"][:2] = 7
    save_file(stored, exported / "model.safetensors")
    np.testing.assert_array_equal(load_toy(exported, toy)["positions"], toy["positions"])


def test_layers_that_take_turns_and_groups_of_layers_have_their_numbers(exported, toy):
    stored = load_file(exported / "model.safetensors")
    for number in range(4):
        np.testing.assert_array_equal(stored[f"h.{number}.norm"], toy["shared"][str(number % 2)]["scale"][number // 2])
        np.testing.assert_array_equal(stored[f"h.{number}.group"], toy["grouped"]["scale"][number // 2])


def test_layers_of_a_group_that_differ_are_an_error(exported, toy):
    stored = load_file(exported / "model.safetensors")
    stored["h.1.group"] = stored["h.1.group"] + 1
    save_file(stored, exported / "model.safetensors")
    with pytest.raises(UserError, match=r"h\.1\.group differs from h\.0\.group, but the model shares it"):
        load_toy(exported, toy)


def test_two_parameters_in_one_place_are_a_mistake_of_the_table(toy, monkeypatch):
    doubled = lambda config: [*parameters(config), Parameter("positions", (None, None), {"model": Slot("h.0.norm")})]
    monkeypatch.setitem(FAMILIES, "toy", FAMILY._replace(parameters=doubled))
    with pytest.raises(ValueError, match=r"h\.0\.norm is the place of shared/0/scale and of positions"):
        tensors(toy, Config(), "model")


def test_config_fields_are_written_and_read_in_their_own_form(exported):
    fields = json.loads((exported / "config.json").read_text())
    assert (fields["n_positions"], fields["local"], fields["n_layer"]) == (6, 16, 4)
    assert config_from(exported) == Config()
    (exported / "config.json").write_text(json.dumps(fields | {"local": 6}))
    assert config_from(exported).window == 3


@dataclasses.dataclass(frozen=True)
class Part:
    size: int


@dataclasses.dataclass(frozen=True)
class WithPart:
    vocab_size: int = 10
    part: Part | None = None


def test_a_nested_config_that_is_none_by_default_is_read(monkeypatch, tmp_path):
    model = FAMILY.hf["model"]._replace(fields={"vocab_size": "vocab_size", "part_size": "part.size"})
    monkeypatch.setitem(FAMILIES, "toy", FAMILY._replace(config=WithPart, hf={"model": model}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy", "vocab_size": 7, "part_size": 3}))
    assert config_from(tmp_path) == WithPart(7, Part(3))


def test_a_field_that_a_converter_needs_and_lacks_is_named(exported):
    fields = json.loads((exported / "config.json").read_text())
    del fields["local"]
    (exported / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="lacks local; add what the model has"):
        config_from(exported)
