"""Our Transformer-XL computes what transformers' XLNet does when it is causal and gets scaled embeddings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from models.blocks.memory import Memory
from models.core.parameters import nest
from models.core.program import Program
from models.families.transformer_xl import FAMILY
from pretrain.objectives.adaptive_softmax import adaptive_cross_entropy

TINY = dataclasses.replace(
    FAMILY.sizes["tiny"], vocab_size=1003, width=64, heads=4, feed_forward=96, dropout=0.0, memory=12
)
# Not relu: of three million units one lies within rounding of its kink, and then counts in one gradient alone.
BASE = dataclasses.replace(
    FAMILY.sizes["base"], vocab_size=1003, cutoffs=(200, 500), dropout=0.0, memory=24, activation="gelu"
)
CLUSTERED = dataclasses.replace(TINY, cutoffs=(100, 400), divisor=2)
PROGRAMS = [Program(depth="scan"), Program(depth="unroll"), Program(depth="unroll", remat="full")]
NAMES = {  # ours -> (theirs, how theirs becomes ours)
    **{f"attention/{ours}/kernel": (f"rel_attn.{ours[0]}", "in") for ours in ("query", "key", "value")},
    "attention/position/kernel": ("rel_attn.r", "in"),
    "attention/output/kernel": ("rel_attn.o", "out"),
    "attention/norm/scale": ("rel_attn.layer_norm.weight", ""),
    "attention/norm/bias": ("rel_attn.layer_norm.bias", ""),
    "feed_forward/up/kernel": ("ff.layer_1.weight", "T"),
    "feed_forward/up/bias": ("ff.layer_1.bias", ""),
    "feed_forward/down/kernel": ("ff.layer_2.weight", "T"),
    "feed_forward/down/bias": ("ff.layer_2.bias", ""),
    "feed_forward/norm/scale": ("ff.layer_norm.weight", ""),
    "feed_forward/norm/bias": ("ff.layer_norm.bias", ""),
    "content_bias": ("rel_attn.r_w_bias", "flat"),
    "position_bias": ("rel_attn.r_r_bias", "flat"),
}
LAYOUTS = {
    "": lambda x: x,
    "T": np.transpose,
    "flat": np.ravel,
    "in": lambda x: x.reshape(len(x), -1),  # [width, heads, head_dim]
    "out": lambda x: x.reshape(len(x), -1).T,
}


def torch_layers(config):
    """transformers' XLNet as the layers of a Transformer-XL; u and v alike in all layers where they are shared."""
    model = transformers.XLNetModel(
        transformers.XLNetConfig(
            vocab_size=8, d_model=config.width, n_layer=config.depth, n_head=config.heads, dropout=0.0,
            d_inner=config.feed_forward, attn_type="uni", ff_activation=config.activation,
            layer_norm_eps=config.norm_epsilon, mem_len=config.memory,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter += torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.02)
        for layer in model.layer if config.shared_biases else ():
            for name in ("r_w_bias", "r_r_bias"):
                getattr(layer.rel_attn, name).copy_(getattr(model.layer[0].rel_attn, name))
    return model.eval()


def torch_vocabulary(config):
    """The clusters' tables, biases and projections, named as ours."""
    ends = (*config.clusters, config.vocab_size)
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    weights = {}
    for number, size in enumerate(sizes):
        name, narrow = f"cluster_{number}", config.width // config.divisor**number
        rows = size + (len(config.clusters) if number == 0 else 0)
        weights[f"{name}/tokens"] = torch.randn(rows, narrow) * 0.1
        weights[f"{name}/bias"] = torch.randn(rows) * 0.1
        if config.divisor > 1:
            weights[f"{name}/projection"] = torch.randn(narrow, config.width) * 0.1
            if number == 0:
                weights[f"{name}/output_projection"] = torch.randn(narrow, config.width) * 0.1
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def torch_loss(layers, vocabulary, config, tokens, targets, mems):
    """(mean loss, hidden states, new mems): the adaptive input and softmax written out token by token's cluster."""
    starts, ends = (0, *config.clusters), (*config.clusters, config.vocab_size)
    part = lambda number, name: vocabulary.get(f"cluster_{number}/{name}")
    embedded = torch.zeros(*tokens.shape, config.width)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        inside = (tokens >= start) & (tokens < end)
        rows = part(number, "tokens")[tokens[inside] - start]
        embedded[inside] = rows @ part(number, "projection") if config.divisor > 1 else rows
    out = layers(inputs_embeds=embedded * config.width**0.5, mems=mems, use_mems=True)
    hidden, flat = out.last_hidden_state.flatten(0, 1), targets.flatten()

    def log_probabilities(number):
        narrow = hidden
        if config.divisor > 1:
            output = part(number, "output_projection")
            narrow = hidden @ (part(number, "projection") if output is None else output).T
        return torch.log_softmax(narrow @ part(number, "tokens").T + part(number, "bias"), dim=-1)

    head, total = log_probabilities(0), 0.0
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        inside = (flat >= start) & (flat < end)
        if number == 0:
            total = total - head[inside, flat[inside]].sum()
        else:
            inner = log_probabilities(number)[inside, flat[inside] - start]
            total = total - (head[inside, config.clusters[0] + number - 1] + inner).sum()
    return total / len(flat), out.last_hidden_state, out.mems


def to_ours(layers, vocabulary, config, values):
    """Our nested dict from the values of torch's arrays, which may be weights or gradients."""
    theirs = [dict(layer.named_parameters()) for layer in layers.layer]
    flat = {}
    for ours, (name, layout) in NAMES.items():
        stacked = np.stack([LAYOUTS[layout](values(weights[name])) for weights in theirs])
        if "/" not in ours and config.shared_biases:
            flat[ours] = stacked
        else:
            flat[f"layers/{ours}"] = stacked
    for name, weight in vocabulary.items():
        array, padding = values(weight), [(0, 0)] * (weight.ndim - 1)
        flat[name] = array if "projection" in name else np.pad(array, [(0, -len(array) % 128), *padding])
    return flat


def check(config, program, bound, gradient_bound, rows=3, length=16, remembered=12):
    torch.manual_seed(0)
    layers, vocabulary = torch_layers(config), torch_vocabulary(config)
    ids = torch.randint(0, config.vocab_size, (rows, length + 1))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    mems = [torch.randn(remembered, rows, config.width) for _ in range(config.depth)] if remembered else None
    loss, hidden, new_mems = torch_loss(layers, vocabulary, config, tokens, targets, mems)
    loss.backward()

    weights = to_ours(layers, vocabulary, config, lambda array: array.detach().numpy())
    shared = ("content_bias", "position_bias") if config.shared_biases else ()
    params = nest({name: leaf[0] if name in shared else leaf for name, leaf in weights.items()})
    batch_first = lambda mems: np.stack([mem.numpy().swapaxes(0, 1) for mem in mems])
    hidden_mems = batch_first(mems or [torch.zeros(0, rows, config.width)] * config.depth)
    memory = Memory(hidden_mems, np.ones((rows, remembered), np.int32))
    module = FAMILY.module(config, program)

    def our_loss(params):
        apply = lambda *inputs, method: module.apply({"params": params}, *inputs, method=method)
        inputs = {"tokens": np.int32(tokens), "segments": np.ones(tokens.shape, np.int32)}
        ours, new = apply(inputs, memory, method="read")
        logits = apply(ours, method="token_logits")
        flat = jnp.asarray(np.int32(targets)).reshape(-1)
        if config.clusters:
            tails = apply(ours, method="tails")
            losses = adaptive_cross_entropy(logits, tails, flat, config.clusters)
        else:
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), flat[:, None], axis=1)
        return losses.mean(), (ours, new)

    (value, (ours, new)), gradients = jax.jit(jax.value_and_grad(our_loss, has_aux=True))(params)
    assert abs(float(value) - loss.item()) <= bound
    np.testing.assert_allclose(ours, hidden.detach().numpy(), rtol=0, atol=bound)
    if remembered:
        np.testing.assert_allclose(new.hidden, batch_first(new_mems), rtol=0, atol=bound)
    expected = to_ours(layers, vocabulary, config, lambda array: array.grad.numpy())
    for name, theirs in expected.items():
        leaf = gradients
        for key in name.split("/"):
            leaf = leaf[key]
        theirs = theirs.sum(axis=0) if name in shared else theirs
        norm = np.linalg.norm(theirs.astype(np.float64))
        assert norm >= 1e-6, name
        assert np.linalg.norm(leaf - theirs) <= gradient_bound * norm, name


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.depth}-{program.remat}")
def test_tiny_equals_torch_with_memory(program):
    check(TINY, program, 1e-5, 2e-5)


def test_tiny_equals_torch_without_memory():
    check(TINY, PROGRAMS[0], 1e-5, 2e-5, remembered=0)


def test_biases_of_each_layer_equal_torch():
    check(dataclasses.replace(TINY, shared_biases=False), PROGRAMS[0], 1e-5, 2e-5)


@pytest.mark.parametrize("divisor", [1, 2])
def test_adaptive_input_and_softmax_equal_torch(divisor):
    check(dataclasses.replace(CLUSTERED, divisor=divisor), PROGRAMS[0], 1e-5, 2e-5)


@pytest.mark.slow
def test_base_equals_torch():
    check(BASE, PROGRAMS[0], 1e-4, 5e-5, length=32, remembered=24)
