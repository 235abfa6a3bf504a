"""Transformers' classes with heads for tasks, beside ours."""

import numpy as np
import torch

from models.core.parameters import leaves
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference


def model_and_parameters(config, heads, folder, factor=8):
    """A torch model with these heads, None for those of pretraining, and its weights as ours.   factor: of matrices, so
    that scores differ."""
    model = reference.torch_model(config, "model", heads=heads)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= factor
    return model, _ours(model, config, heads, folder / "model")


def check_gradients(model, gradients, config, heads, folder):
    """Ours are those that a backward pass left in the torch model, which is used up."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    theirs, ours = (dict(leaves(of)) for of in (_ours(model, config, heads, folder / "gradients"), gradients))
    assert theirs.keys() == ours.keys()
    # A shift of all scores changes no softmax: the gradients of such biases are rounding.
    whole = np.sqrt(sum(np.square(array).sum() for array in theirs.values()))
    for path, gradient in theirs.items():
        difference = np.linalg.norm(ours[path] - gradient)
        assert difference <= 2e-5 * np.linalg.norm(gradient) + 1e-7 * whole, path


def _ours(model, config, heads, folder):
    model.save_pretrained(folder)
    return reference.load(folder, config, parameter_shapes(config, heads), folder)
