"""A Transformer layer is torch's with the same weights, post-norm and pre-norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.attention.mask import Mask
from models.attention.transformer import TransformerLayer
from models.blocks.layer import LayerSizes
from models.core.program import Program
from tests.models.programs import with_gradients

SIZES = LayerSizes(8, 2, 16, "gelu", 0.0, 0.0, 1e-5, 0.5)
RNG = np.random.default_rng(0)
X, WEIGHTS = (RNG.normal(size=(2, 6, 8)).astype(np.float32) for _ in range(2))
SLOTS = np.array([[5, 0, 3], [2, 2, 4]], np.int32)


def layer_of(pre_norm):
    """(a layer, random parameters)"""
    layer = TransformerLayer(SIZES, Program(), pre_norm)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), X, Mask(jnp.ones((2, 6), jnp.int32)), None)["params"]
    rng = np.random.default_rng(1)
    return layer, jax.tree.map(lambda leaf: rng.normal(0.3, 0.5, leaf.shape).astype(np.float32), shapes)


def torch_layer(params, pre_norm):
    """torch's layer with these parameters."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=pre_norm)
    layer.load_state_dict({name: torch.tensor(np.array(x)) for name, x in torch_names(params).items()})
    return layer


def torch_names(params):
    """Parameters, or their gradients, by torch's names."""
    attention, feed_forward = params["attention"], params["feed_forward"]
    qkv = [attention[name] for name in ("query", "key", "value")]
    rows = {"self_attn.out_proj": attention["output"], "linear1": feed_forward["up"], "linear2": feed_forward["down"]}
    named = {
        "self_attn.in_proj_weight": np.concatenate([x["kernel"].T for x in qkv]),
        "self_attn.in_proj_bias": np.concatenate([x["bias"] for x in qkv]),
    }
    named |= {f"{name}.weight": x["kernel"].T for name, x in rows.items()}
    rows |= {"norm1": attention["norm"], "norm2": feed_forward["norm"]}
    named |= {f"{name}.weight": rows[name]["scale"] for name in ("norm1", "norm2")}
    return named | {f"{name}.bias": x["bias"] for name, x in rows.items()}


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_a_layer_is_torchs_in_outputs_and_gradients(pre_norm, causal):
    layer, params = layer_of(pre_norm)
    mask = Mask(jnp.ones((2, 6), jnp.int32), causal=causal)
    run = lambda params, x: layer.apply({"params": params}, x, mask, None)[0]
    ours, (of_params, of_x) = with_gradients(run, WEIGHTS)(params, X)
    theirs, x = torch_layer(params, pre_norm), torch.tensor(X, requires_grad=True)
    expected = theirs(x, src_mask=torch.nn.Transformer.generate_square_subsequent_mask(6) if causal else None)
    (expected * torch.tensor(WEIGHTS)).sum().backward()
    np.testing.assert_allclose(ours, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(of_x, x.grad, atol=2e-5)
    gradients = torch_names(jax.device_get(of_params))
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_a_layer_at_slots_is_the_whole_row_there(pre_norm):
    layer, params = layer_of(pre_norm)
    mask = Mask(jnp.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0]]), causal=True)
    run = lambda slots: layer.apply({"params": params}, X, mask, None, None, slots)[0]
    some, whole = jax.jit(lambda: (run(SLOTS), run(None)))()
    np.testing.assert_allclose(some, np.take_along_axis(whole, SLOTS[..., None], axis=1), atol=1e-5)
