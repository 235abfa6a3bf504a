"""The contract's cases by other implementations: loss and every gradient, one file per family.

No one here wrote them, but for BigBird-ETC (`etc_reference.py`) and the clusters of Transformer-XL's vocabulary
(`transformer_xl_reference.py`), which are written again in tests/pretrain.

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
from pretrain.huggingface.tensors import summed, tensors
from pretrain.training.assembly import made_heads
from tests.contract import cases
from tests.contract.cases import Case
from tests.pretrain import etc_reference, reference, transformer_xl_reference


def with_parameters(case: Case, part: str, params: Params | None = None) -> torch.nn.Module:
    """The torch model of a part, with the case's parameters or others."""
    model = reference.torch_model(case.model, part, heads=made_heads(case.model, case.objective.asks))
    named = {name: array for name, array in model.named_parameters() if array.requires_grad}
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


def masked(label: str | None) -> Callable[..., tuple[float, dict]]:
    """Of a model with a masked-token head and one for pairs, whose label has this name in transformers, or without."""

    def reference_of(case: Case, prepare=lambda model: None) -> tuple[float, dict]:
        """prepare: what is done to the torch model before."""
        batch, model = cases.batch(case), with_parameters(case, "model")
        prepare(model)
        labels = {"labels": reference.token_labels(batch)}
        labels |= {label: reference.pair_labels(batch)} if label else {}
        inputs = reference.torch_inputs(batch, types=getattr(case.model, "types", 0))
        loss = model(**inputs, **labels).loss
        loss.backward()
        return loss.item(), our_gradients(case, {"model": model})

    return reference_of


def unilm(case: Case) -> tuple[float, dict]:
    """Of rows of the four tasks, with masks written out."""
    batch, model = cases.batch(case), with_parameters(case, "model")
    inputs = reference.torch_inputs(batch, types=case.model.types)
    inputs["attention_mask"] = reference.unilm_mask(batch["types"], batch["segments"])
    loss = model(**inputs, labels=reference.token_labels(batch)).loss
    loss.backward()
    return loss.item(), our_gradients(case, {"model": model})


def classified(case: Case) -> tuple[float, dict]:
    """Of a model with a head for classes of rows."""
    batch, model = cases.batch(case), with_parameters(case, "model")
    # -100 is passed over
    labels = torch.from_numpy(np.where(batch["labels"] < 0, -100, batch["labels"])).long()
    loss = model(**reference.torch_inputs(batch), labels=labels).loss
    loss.backward()
    return loss.item(), our_gradients(case, {"model": model})


def bigbird(case: Case) -> tuple[float, dict]:
    """With the blocks that ours draws."""
    with pytest.MonkeyPatch.context() as patch:
        reference.give_our_blocks(case.model, cases.LENGTH, patch)
        return masked("next_sentence_label")(case)


def deberta_v3(case: Case) -> tuple[float, dict]:
    """Of two torch models, of which the discriminator's embeddings are sums. Its loss reaches no other parameter of the
    generator than through them, and those not at all: its gradients are of the differences alone."""
    given, batch = cases.params(case), cases.batch(case)
    config = case.model
    whole = nest(summed(dict(leaves(given)), config))
    towers = {part: with_parameters(case, part, whole) for part in family_of(config).hf}
    made = reference.sampled(given, config, batch, cases.noise(cases.ROWS))
    loss = reference.deberta_v3_loss(towers, batch, *map(np.asarray, made))
    loss.backward()
    return loss.item(), our_gradients(case, towers)


def electra(case: Case) -> tuple[float, dict]:
    batch = cases.batch(case)
    towers = {part: with_parameters(case, part) for part in family_of(case.model).hf}
    made = reference.sampled(cases.params(case), case.model, batch, cases.noise(cases.ROWS))
    loss = reference.electra_loss(towers, batch, *map(np.asarray, made))
    loss.backward()
    return loss.item(), our_gradients(case, towers)


def xlnet_outputs(case: Case, causal: bool = False, **settings):
    """(the torch model, its outputs).   settings: of the torch model."""
    model = with_parameters(case, "model")
    for name, value in ({"mem_len": case.memory or 1, "reuse_len": None} | settings).items():
        setattr(model.transformer, name, value)
    return model, reference.xlnet_outputs(model, cases.batch(case), cases.memory(case), causal)


def xlnet(case: Case, **settings) -> tuple[float, dict]:
    model, out = xlnet_outputs(case, **settings)
    out.loss.backward()
    return out.loss.item(), our_gradients(case, {"model": model})


def transformer_xl(case: Case) -> tuple[float, dict]:
    given = cases.params(case), case.model, cases.batch(case), cases.memory(case)
    return transformer_xl_reference.outputs(*given)[:2]


def bigbird_etc(case: Case) -> tuple[float, dict]:
    return etc_reference.loss_and_gradients(cases.params(case), case.model, cases.batch(case))


def next_token(case: Case, prepare=lambda model: None) -> tuple[float, dict]:
    """prepare: what is done to the torch model before."""
    batch, model = cases.batch(case), with_parameters(case, "model")
    prepare(model)
    tensor = lambda name: torch.from_numpy(np.array(batch[name]))
    of_decoder = {"decoder_input_ids": tensor("decoder_tokens").long()} if model.config.is_encoder_decoder else {}
    logits = model(tensor("tokens").long(), attention_mask=tensor("segments"), **of_decoder).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, tensor("targets").long(), reduction="none")
    loss = (losses * tensor("weights")).sum() / tensor("weights").sum()
    loss.backward()
    return loss.item(), our_gradients(case, {"model": model})


REFERENCES = {
    "albert": masked("sentence_order_label"),
    "bart": next_token,
    "bart-translation": next_token,
    "bert": masked("next_sentence_label"),
    "bigbird": bigbird,
    "bigbird-etc": bigbird_etc,
    "ctrl": next_token,
    "deberta-v2": masked(None),
    "deberta-v3": deberta_v3,
    "distilbert": masked(None),
    "electra": electra,
    "electra-encoder": classified,
    "ernie": masked("next_sentence_label"),
    "gpt": next_token,
    "gpt2": next_token,
    "longformer": masked(None),
    "mobilebert": masked("next_sentence_label"),
    "modernbert": masked(None),
    "modernbert-decoder": next_token,
    "mt5": next_token,
    "roberta": masked(None),
    "t5": next_token,
    "transformer": next_token,
    "transformer-xl": transformer_xl,
    "unilm": unilm,
    "xlnet": xlnet,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or cases.CASES:
        loss, gradients = REFERENCES[name](cases.CASES[name])
        np.savez_compressed(Path(__file__).parent / "frozen" / f"{name}.npz", loss=np.float64(loss), **gradients)
        print(name, loss)
