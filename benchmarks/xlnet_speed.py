"""What XLNet's second stream costs on this CPU, beside BERT and beside Hugging Face's torch XLNet.

    python -m benchmarks.xlnet_speed [--sizes tiny base] [--vocab 8192]

Whole steps, as in `benchmarks.train_speed`: the same number of rows, positions and targets, no memory, dropout 0.1,
float32. Ours are the steps that `pretrain run` takes on a CPU; torch's has target_mapping, so that it too computes the
query stream and logits at the targets alone.
"""

import dataclasses
import functools
import os

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.train_speed import BATCH, LENGTH, ROUNDS, WARM_UP, random_batch, recipe_step, torch_adamw
from benchmarks.turns import Step, milliseconds, ratio, take_turns
from data_pipelines.command_line import end_with, parse
from data_pipelines.errors import UserError
from pretrain.commands.platform import keep_memory, prepare_cpu


@dataclasses.dataclass(frozen=True)
class Options:
    """sizes: of both models.   vocab: size of the vocabulary.   rounds: timed steps; 0 chooses by size."""

    sizes: tuple[str, ...] = ("tiny", "mini", "base")
    vocab: int = 8192
    rounds: int = 0

    def __post_init__(self):
        for size in self.sizes:
            if size not in BATCH:
                raise UserError(f"size {size!r}: use one of {', '.join(BATCH)}")


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.xlnet_speed")
    cores, console = sorted(os.sched_getaffinity(0)), Console(width=110)
    title = f"ms per training step, median of wall (CPU) time, {len(cores)} threads, vocabulary {options.vocab:,}"
    table = Table("size", "batch", "XLNet", "BERT", "torch XLNet", "XLNet / BERT", "torch / XLNet", title=title)
    for size in options.sizes:
        batch = permuted(random_batch(options.vocab, BATCH[size]))
        makers = {
            "xlnet": functools.partial(our_step, "xlnet", size, options.vocab, batch),
            "bert": functools.partial(our_step, "bert", size, options.vocab, batch),
            "torch": functools.partial(torch_step, size, options.vocab, batch),
        }
        with console.status(size):
            times = take_turns(makers, cores, options.rounds or ROUNDS[size], WARM_UP[size])
        xlnet, bert, torch = times.values()
        shown = [milliseconds(side) for side in times.values()]
        table.add_row(size, f"{BATCH[size]}x{LENGTH}", *shown, ratio(xlnet, bert), ratio(torch, xlnet))
    console.print(table)
    return 0


def permuted(batch: dict) -> dict[str, np.ndarray]:
    """A batch in which every row's tokens have an order of their own, its targets the last in it."""
    rng, (rows, length) = np.random.default_rng(1), batch["tokens"].shape
    slots = batch["prediction_positions"].shape[1]
    ranks = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (rows, 1)), axis=1)
    np.put_along_axis(ranks, batch["prediction_positions"], length + np.arange(slots, dtype=np.int32)[None], axis=1)
    thresholds = ranks + 1
    thresholds[np.arange(rows)[:, None], batch["prediction_positions"]] -= 1
    return batch | {"ranks": ranks, "thresholds": thresholds, "reversed": np.zeros(rows, np.int32)}


def our_step(family: str, size: str, vocab: int, batch: dict) -> Step:
    """The recipe's step, without memory or pairs."""
    prepare_cpu()
    from pretrain.recipes.registry import find

    recipe = find(f"{family}-{size}")
    changes = {"memory": 0} if family == "xlnet" else {"pair_head": False}
    model = dataclasses.replace(recipe.model, vocab_size=vocab, dropout=0.1, attention_dropout=0.1, **changes)
    objective = recipe.objective
    if family == "bert":
        objective = dataclasses.replace(objective, next_sentence=False)
    recipe = dataclasses.replace(recipe, model=model, objective=objective)
    return recipe_step(recipe, "unroll", batch)


def torch_step(size: str, vocab: int, batch: dict) -> Step:
    """Hugging Face's XLNetLMHeadModel on the same targets."""
    keep_memory()
    import torch
    from transformers import XLNetConfig, XLNetLMHeadModel

    from models.families.xlnet import FAMILY

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = dataclasses.replace(FAMILY.sizes[size], vocab_size=vocab)
    fields = {**FAMILY.hf["model"].fields, **FAMILY.hf["model"].settings}
    model = XLNetLMHeadModel(XLNetConfig(**{name: getattr(config, field) for name, field in fields.items()})).train()
    inputs = torch_inputs(batch)
    return torch_adamw(model, lambda: model(**inputs).loss)


def torch_inputs(batch: dict) -> dict:
    """A permuted batch as XLNetLMHeadModel takes it, with its labels."""
    import torch

    tensor = lambda array: torch.from_numpy(np.ascontiguousarray(array))
    hidden = batch["ranks"][:, None, :] >= batch["thresholds"][:, :, None]
    positions = tensor(batch["prediction_positions"]).long()
    return {
        "input_ids": tensor(batch["tokens"]).long(),
        "token_type_ids": tensor(batch["types"]).long(),
        "attention_mask": tensor((batch["segments"] > 0).astype(np.float32)),
        "perm_mask": tensor(hidden.astype(np.float32)),
        "target_mapping": torch.nn.functional.one_hot(positions, hidden.shape[-1]).float(),
        "labels": tensor(batch["prediction_targets"]).long(),
    }


if __name__ == "__main__":
    end_with(main)
