"""Where a parameter lies in a Hugging Face checkpoint: behind rows that no model reads, under layers' own numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from models.core.parameters import LAYERS, Parameter, Slot
from pretrain.huggingface import tensors as places
from pretrain.huggingface.tensors import tensors

CONFIG = SimpleNamespace(vocab_size=10)
PARAMS = {"positions": np.ones((4, 6)), "even": np.arange(2.0), "odd": np.arange(2.0, 4.0)}
POSITIONS = Parameter("positions", ("position", "embedding"), {"model": Slot("wpe.weight", before=2)})
TURNS = [  # layers 0 and 2 are of one kind, 1 and 3 of another
    Parameter(name, (LAYERS,), {"model": Slot("h.{layer}.scale", layers={first: 0, first + 2: 1})})
    for first, name in enumerate(("even", "odd"))
]


@pytest.fixture
def stored(monkeypatch):
    """Parameters -> the tensors that are stored of them, by name."""

    def store(*parameters):
        monkeypatch.setattr(places, "family_of", lambda _: SimpleNamespace(every_parameter=lambda _: parameters))
        return {name: tensor.array() for name, tensor in tensors(PARAMS, CONFIG, "model").items()}

    return store


def test_rows_before_a_parameter_are_zeros(stored):
    np.testing.assert_array_equal(
        stored(POSITIONS)["wpe.weight"], np.repeat([[0.0], [1.0]], [2, 4], axis=0) * np.ones(6)
    )


def test_layers_that_take_turns_have_their_own_numbers(stored):
    assert stored(*TURNS) == {"h.0.scale": 0.0, "h.2.scale": 1.0, "h.1.scale": 2.0, "h.3.scale": 3.0}


def test_two_parameters_in_one_place_are_a_mistake_of_the_table(stored):
    with pytest.raises(ValueError, match="wpe.weight is assigned to both positions and positions"):
        stored(POSITIONS, POSITIONS)
