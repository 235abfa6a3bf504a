"""BigBird-ETC in plain torch, from the equations: one matrix of (globals + length) squared, in which each pair says
whether it is seen, by which label and by which projections.

e_ij = x_i W^Q (x_j W^K + a_label(i, j))^T / sqrt(head_dim) over the j that i sees; z_i = sum_j softmax_j(e_ij) x_j W^V.
"""

import numpy as np
import torch
from torch.nn import functional

from models.core.parameters import leaves


def loss_and_gradients(params, config, batch) -> tuple[float, dict[str, np.ndarray]]:
    """Of the masked tokens of a batch of NumPy arrays; params: ours, nested. -> (loss, parameter path -> gradient)."""
    weights = {path: torch.tensor(np.array(array), requires_grad=True) for path, array in leaves(params)}
    hidden = encoded(weights, config, batch)
    rows = torch.arange(len(hidden))[:, None]
    read = hidden[rows, torch.tensor(batch["prediction_positions"]).long()]
    read = functional.gelu(linear(weights, "predictions/dense", read))
    read = norm(weights, "predictions/norm", read, config)
    logits = read @ weights["embeddings/tokens"].T + weights["predictions/bias"]
    logits = logits[..., : config.vocab_size].flatten(0, 1)
    losses = functional.cross_entropy(
        logits, torch.tensor(batch["prediction_targets"]).long().flatten(), reduction="none"
    )
    shares = torch.tensor(batch["prediction_weights"]).flatten()
    loss = (losses * shares).sum() / shares.sum()
    loss.backward()
    return loss.item(), {path: weight.grad.numpy() for path, weight in weights.items()}


def encoded(weights, config, batch) -> torch.Tensor:
    """The long tokens' hidden states [rows, length, width]."""
    long = norm(weights, "embeddings/norm", weights["embeddings/tokens"][torch.tensor(batch["tokens"]).long()], config)
    number = batch["global_segments"].shape[1]
    first = norm(weights, "embeddings/global_norm", weights["embeddings/global"], config)
    x = torch.cat([first.expand(len(long), number, -1), long], dim=1)  # global tokens first
    seen, label = pairs(config, batch)
    for layer in range(config.depth):
        own = {path[7:]: weight[layer] for path, weight in weights.items() if path.startswith("layers/")}
        x = norm(own, "attention/norm", x + attended(own, config, x, seen, label, number), config)
        inner = functional.gelu(linear(own, "feed_forward/up", x))
        x = norm(own, "feed_forward/norm", x + linear(own, "feed_forward/down", inner), config)
    return x[:, number:]


def pairs(config, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each two of the global and the long tokens: whether the one sees the other, bool, and by which label."""
    of = batch["global_of"]
    (rows, length), number = of.shape, batch["global_segments"].shape[1]
    segments = np.concatenate([batch["global_segments"], batch["segments"]], axis=1)
    seen = segments[:, :, None] == segments[:, None, :]
    label = np.zeros((rows, number + length, number + length), np.int64)
    for i in range(number + length):
        for j in range(number + length):
            if (i < number) == (j < number):  # of one kind
                label[:, i, j] = np.clip(j - i, -config.distance, config.distance) + config.distance
                if i >= number:
                    blocks_apart = abs((i - number) // config.block - (j - number) // config.block)
                    seen[:, i, j] &= blocks_apart <= (config.window - 1) // 2
            else:
                belongs = of[:, max(i, j) - number] == min(i, j)
                label[:, i, j] = np.where(belongs, 2 * config.distance + 1, 2 * config.distance + 2)
    return torch.tensor(seen), torch.tensor(label)


def attended(own, config, x, seen, label, number) -> torch.Tensor:
    """The projected output of attention [rows, globals + length, width]."""
    kinds = {"global": slice(0, number), "long": slice(number, None)}
    heads = lambda y: y.unflatten(-1, (config.heads, -1)).transpose(1, 2)
    outputs = []
    for kind in ("global", "long"):
        mine = kinds[kind]
        q = heads(linear(own, f"attention/{kind}_query", x[:, mine]))
        project = lambda what, kind=kind: heads(
            torch.cat([linear(own, f"attention/{kind}_to_{of}_{what}", x[:, kinds[of]]) for of in kinds], dim=1)
        )
        k, v = project("key"), project("value")
        relative = own[f"attention/{kind}_relative"].unflatten(-1, (config.heads, -1))  # [labels, heads, head_dim]
        a = relative[label[:, mine]].movedim(3, 1)  # [rows, heads, queries, keys, head_dim]
        scores = (q[:, :, :, None] * (k[:, :, None] + a)).sum(-1) / q.shape[-1] ** 0.5
        shares = scores.masked_fill(~seen[:, None, mine], float("-inf")).softmax(-1)
        outputs.append(linear(own, f"attention/{kind}_output", (shares @ v).transpose(1, 2).flatten(2)))
    return torch.cat(outputs, dim=1)


def linear(weights, name, x):
    return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]


def norm(weights, name, x, config):
    return functional.layer_norm(
        x, x.shape[-1:], weights[f"{name}/scale"], weights[f"{name}/bias"], config.norm_epsilon
    )
