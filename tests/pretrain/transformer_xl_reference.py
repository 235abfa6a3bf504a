"""Transformer-XL in torch: transformers' XLNet when it is causal and gets scaled embeddings; its adaptive input and
softmax are written out, each token by its cluster."""

import numpy as np
import torch
import transformers

from models.core.parameters import leaves

NAMES = {  # ours -> theirs
    **{f"attention/{ours}/kernel": f"rel_attn.{ours[0]}" for ours in ("query", "key", "value")},
    "attention/position/kernel": "rel_attn.r",
    "attention/output/kernel": "rel_attn.o",
    "attention/norm/scale": "rel_attn.layer_norm.weight",
    "attention/norm/bias": "rel_attn.layer_norm.bias",
    "feed_forward/up/kernel": "ff.layer_1.weight",
    "feed_forward/up/bias": "ff.layer_1.bias",
    "feed_forward/down/kernel": "ff.layer_2.weight",
    "feed_forward/down/bias": "ff.layer_2.bias",
    "feed_forward/norm/scale": "ff.layer_norm.weight",
    "feed_forward/norm/bias": "ff.layer_norm.bias",
    "content_bias": "rel_attn.r_w_bias",
    "position_bias": "rel_attn.r_r_bias",
}
TURNED = {f"{name}/kernel" for name in ("attention/output", "feed_forward/up", "feed_forward/down")}


def outputs(params, config, batch, memory):
    """(loss, parameter path -> gradient, the new memory's hidden states); params: ours, nested; memory: or None."""
    ours = dict(leaves(params))
    model, vocabulary = _layers(config, ours), _vocabulary(config, ours)
    tokens, targets = (torch.tensor(batch[name]).long() for name in ("tokens", "targets"))
    embedded = _embedded(vocabulary, config, tokens) * config.width**0.5
    mems = None if memory is None else [torch.tensor(layer.swapaxes(0, 1)) for layer in memory.hidden]
    out = model(inputs_embeds=embedded, mems=mems, use_mems=True)
    loss = _loss(vocabulary, config, out.last_hidden_state.flatten(0, 1), targets.flatten())
    loss.backward()
    remembered = np.stack([mem.detach().numpy().swapaxes(0, 1) for mem in out.mems])
    return loss.item(), _gradients(model, vocabulary, ours), remembered


def _layers(config, ours):
    model = transformers.XLNetModel(
        transformers.XLNetConfig(
            vocab_size=8, d_model=config.width, n_layer=config.depth, n_head=config.heads, dropout=0.0,
            d_inner=config.feed_forward, attn_type="uni", ff_activation=config.activation,
            layer_norm_eps=config.norm_epsilon, mem_len=config.memory,
        )
    )  # fmt: skip
    with torch.no_grad():
        for path, name in NAMES.items():
            for index, layer in enumerate(model.layer):
                array = ours[path] if path in ours else ours[f"layers/{path}"][index]
                weight = layer.get_parameter(name)
                weight.copy_(torch.tensor(array.T if path in TURNED else array).reshape(weight.shape))
    return model.eval()


def _vocabulary(config, ours):
    """The clusters' tables, biases and projections, named as ours, without rows of padding."""
    weights = {}
    for path, array in ours.items():
        if path.startswith("cluster_"):
            number = int(path.removeprefix("cluster_").split("/")[0])
            start, end = _ends(config)[number : number + 2]
            rows = end - start + (len(config.clusters) if number == 0 else 0)
            weights[path] = torch.tensor(array if "projection" in path else array[:rows], requires_grad=True)
    return weights


def _ends(config):
    return (0, *config.clusters, config.vocab_size)


def _embedded(vocabulary, config, tokens):
    embedded = torch.zeros(*tokens.shape, config.width)
    for number, (start, end) in enumerate(zip(_ends(config), _ends(config)[1:], strict=False)):
        inside = (tokens >= start) & (tokens < end)
        rows = vocabulary[f"cluster_{number}/tokens"][tokens[inside] - start]
        embedded[inside] = rows @ vocabulary[f"cluster_{number}/projection"] if config.divisor > 1 else rows
    return embedded


def _loss(vocabulary, config, hidden, targets):
    def log_probabilities(number):
        part = lambda name: vocabulary.get(f"cluster_{number}/{name}")
        narrow = hidden
        if config.divisor > 1:
            own = part("output_projection")
            narrow = hidden @ (part("projection") if own is None else own).T
        return torch.log_softmax(narrow @ part("tokens").T + part("bias"), dim=-1)

    head, total = log_probabilities(0), 0.0
    for number, (start, end) in enumerate(zip(_ends(config), _ends(config)[1:], strict=False)):
        inside = (targets >= start) & (targets < end)
        if number == 0:
            total = total - head[inside, targets[inside]].sum()
        else:
            inner = log_probabilities(number)[inside, targets[inside] - start]
            total = total - (head[inside, config.clusters[0] + number - 1] + inner).sum()
    return total / len(targets)


def _gradients(model, vocabulary, ours):
    found = {path: np.zeros_like(array) for path, array in ours.items()}
    for path, name in NAMES.items():
        for index, layer in enumerate(model.layer):
            gradient = layer.get_parameter(name).grad
            gradient = gradient.flatten(1).T if path in TURNED else gradient
            own = found[path] if path in ours else found[f"layers/{path}"][index]
            own += gradient.reshape(own.shape).numpy()  # what layers share is their sum
    for path, weight in vocabulary.items():
        found[path][: len(weight)] = weight.grad.numpy()
    return found
