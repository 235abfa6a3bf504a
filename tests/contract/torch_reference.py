"""The contract's cases by implementations that no one here wrote: loss and every gradient, one file per family.

The tests read the files, and need no torch. To make them anew, or that of a new family:

    python -m tests.contract.torch_reference [FAMILY ...]
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.core.parameters import Params, leaves, nest
from models.families.registry import family_of
from pretrain.huggingface.tensors import tensors
from tests.contract import cases
from tests.contract.cases import Case
from tests.pretrain import (
    etc_reference,
    reference,
    test_bigbird_parity,
    test_electra_parity,
    test_transformer_xl_parity,
    test_xlnet_parity,
)


def with_parameters(case: Case, part: str, params: Params | None = None) -> torch.nn.Module:
    """The torch model of a part, with the case's parameters or others."""
    model = reference.torch_model(case.model, part)
    named = dict(model.named_parameters())
    ours = tensors(params or cases.params(case), case.model, part)
    assert set(ours) == set(named)
    with torch.no_grad():
        for name, tensor in ours.items():
            named[name].copy_(torch.from_numpy(np.array(tensor.array())))
    return model


def our_gradients(case: Case, models: dict[str, torch.nn.Module]) -> dict[str, np.ndarray]:
    """Parameter path -> gradient in our layout; that of a parameter which several parts share is their sum."""
    total = {path: np.zeros(array.shape, np.float32) for path, array in leaves(cases.params(case))}
    for part, model in models.items():
        own = {path: np.zeros_like(array) for path, array in total.items()}
        gradients = reference.torch_gradients(model)
        for name, tensor in tensors(nest(own), case.model, part).items():
            for piece in tensor.pieces:
                piece.view[...] += gradients[name][piece.place]
        total = {path: total[path] + own[path] for path in total}
    return total


def masked(label: str | None) -> Callable[[Case], tuple[float, dict]]:
    """Of a model with a masked-token head and one for pairs, whose label has this name in transformers, or without."""

    def reference_of(case: Case) -> tuple[float, dict]:
        batch, model = cases.batch(case), with_parameters(case, "model")
        labels = {"labels": reference.token_labels(batch)}
        labels |= {label: reference.pair_labels(batch)} if label else {}
        loss = model(**reference.torch_inputs(batch, types=case.model.types), **labels).loss
        loss.backward()
        return loss.item(), our_gradients(case, {"model": model})

    return reference_of


def bigbird(case: Case) -> tuple[float, dict]:
    """With the blocks that ours draws."""
    with pytest.MonkeyPatch.context() as patch:
        test_bigbird_parity.give_ours(case.model, cases.LENGTH, patch)
        return masked("next_sentence_label")(case)


def electra(case: Case) -> tuple[float, dict]:
    batch = cases.batch(case)
    towers = {part: with_parameters(case, part) for part in family_of(case.model).hf}
    keys = cases.noise(cases.ROWS)
    _, corrupted, originals = test_electra_parity.sampled(cases.params(case), case.model, batch, keys)
    discriminator, generator = test_electra_parity.torch_losses(
        towers, batch, np.asarray(corrupted), np.asarray(originals)
    )
    loss = generator.loss + 50.0 * discriminator.loss
    loss.backward()
    return loss.item(), our_gradients(case, towers)


def xlnet(case: Case) -> tuple[float, dict]:
    model = with_parameters(case, "model")
    model.transformer.mem_len, model.transformer.reuse_len = case.memory, None
    loss, _, _ = test_xlnet_parity.torch_outputs(model, cases.batch(case), cases.memory(case), causal=False)
    loss.backward()
    return loss.item(), our_gradients(case, {"model": model})


def transformer_xl(case: Case) -> tuple[float, dict]:
    """transformers' XLNet, causal, with scaled embeddings."""
    parity, config, batch = test_transformer_xl_parity, case.model, cases.batch(case)
    ours = dict(leaves(cases.params(case)))
    layers, vocabulary = parity.torch_layers(config), parity.torch_vocabulary(config)
    with torch.no_grad():
        for name, weight in vocabulary.items():
            weight.copy_(torch.from_numpy(ours[name][: len(weight)]))
        for path, (name, layout) in parity.NAMES.items():
            shared = path in ("content_bias", "position_bias")
            for index, layer in enumerate(layers.layer):
                weight = dict(layer.named_parameters())[name]
                array = ours[path] if shared else ours[f"layers/{path}"][index]
                array = array.T if layout in ("T", "out") else array  # the inverse of the parity test's layouts
                weight.copy_(torch.from_numpy(array.reshape(weight.shape).copy()))
    mems = [torch.from_numpy(layer.swapaxes(0, 1).copy()) for layer in cases.memory(case).hidden]
    tensor = lambda array: torch.from_numpy(np.array(array)).long()
    loss, _, _ = parity.torch_loss(layers, vocabulary, config, tensor(batch["tokens"]), tensor(batch["targets"]), mems)
    loss.backward()
    gradients = parity.to_ours(layers, vocabulary, config, lambda array: array.grad.numpy())
    for name in ("content_bias", "position_bias"):
        gradients[name] = gradients[name].sum(axis=0)
    return loss.item(), gradients


def next_token(case: Case) -> tuple[float, dict]:
    batch, model = cases.batch(case), with_parameters(case, "model")
    tensor = lambda name: torch.from_numpy(np.array(batch[name]))
    logits = model(tensor("tokens").long(), attention_mask=tensor("segments")).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, tensor("targets").long(), reduction="none")
    loss = (losses * tensor("weights")).sum() / tensor("weights").sum()
    loss.backward()
    return loss.item(), our_gradients(case, {"model": model})


REFERENCES = {
    "albert": masked("sentence_order_label"),
    "bert": masked("next_sentence_label"),
    "bigbird": bigbird,
    "bigbird-etc": lambda case: etc_reference.loss_and_gradients(cases.params(case), case.model, cases.batch(case)),
    "ctrl": next_token,
    "electra": electra,
    "gpt": next_token,
    "gpt2": next_token,
    "longformer": masked(None),
    "roberta": masked(None),
    "transformer-xl": transformer_xl,
    "xlnet": xlnet,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or cases.CASES:
        loss, gradients = REFERENCES[name](cases.CASES[name])
        np.savez_compressed(Path(__file__).parent / "frozen" / f"{name}.npz", loss=np.float64(loss), **gradients)
        print(name, loss)
