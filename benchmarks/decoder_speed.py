"""How fast GPT-2 trains on this CPU, beside Hugging Face's torch model: whole steps with gradient clipping and AdamW.

    python -m benchmarks.decoder_speed [--sizes tiny mini small] [--rounds 12]

As `train_speed.py` measures encoders: every contestant is a process of its own on the same cores, and they take turns
at the same random batch, dropout 0.1, float32; torch with fused attention and the faster of its AdamWs.
    ours               the step that `pretrain run` takes
    torch              GPT2LMHeadModel as it comes, cross-entropy with the next tokens
The recipes' vocabularies are what a corpus has: 8,192 for tiny and mini, GPT-2's 50,257 for small.
"""

import dataclasses
import functools
import os

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.train_speed import recipe_step, torch_adamw
from benchmarks.turns import Step, milliseconds, ratio, take_turns
from data_pipelines.command_line import end_with, parse
from data_pipelines.errors import UserError
from pretrain.commands.platform import keep_memory

# Rows, length, vocabulary, timed steps
SHAPES = {"tiny": (32, 128, 8192, 20), "mini": (16, 256, 8192, 10), "small": (4, 256, 50257, 5)}
WARM_UP = 3  # steps until the heap has settled


@dataclasses.dataclass(frozen=True)
class Options:
    """sizes: of GPT-2.   rounds: timed steps; 0 chooses by size."""

    sizes: tuple[str, ...] = ("tiny", "mini", "small")
    rounds: int = 0

    def __post_init__(self):
        for size in self.sizes:
            if size not in SHAPES:
                raise UserError(f"size {size!r}: use one of {', '.join(SHAPES)}")


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.decoder_speed")
    cores = sorted(os.sched_getaffinity(0))
    title = f"ms per training step, median of wall (CPU) time, {len(cores)} threads"
    table = Table("model", "vocab", "batch", "ours", "torch", "torch / ours", title=title)
    for size in options.sizes:
        rows, length, vocab, rounds = SHAPES[size]
        makers = {"ours": functools.partial(our_step, size), "torch": functools.partial(torch_step, size)}
        times = take_turns(makers, cores, options.rounds or rounds, WARM_UP)
        cells = (milliseconds(times["ours"]), milliseconds(times["torch"]), ratio(times["torch"], times["ours"]))
        table.add_row(f"gpt2-{size}", f"{vocab:,}", f"{rows}x{length}", *cells)
    Console(width=110).print(table)
    return 0


def random_tokens(size: str) -> np.ndarray:
    """Of a batch, and the one after each row: i32[rows, length + 1]."""
    rows, length, vocab, _ = SHAPES[size]
    return np.random.default_rng(0).integers(5, vocab, (rows, length + 1), dtype=np.int32)


def our_recipe(size: str):
    """As published but for the vocabulary, dropout 0.1 and AdamW's usual rates."""
    from pretrain.optimizers import Optimizer
    from pretrain.recipes.registry import find

    recipe = find(f"gpt2-{size}")
    model = dataclasses.replace(recipe.model, vocab_size=SHAPES[size][2], dropout=0.1, attention_dropout=0.1)
    rows, length = SHAPES[size][:2]
    phase = dataclasses.replace(recipe.phases[0], batch_size=rows, length=length)
    return dataclasses.replace(recipe, model=model, phases=(phase,), optimizer=Optimizer())


def our_step(size: str) -> Step:
    """The recipe's step, with the layers written out."""
    tokens = random_tokens(size)
    ones = np.ones(tokens[:, 1:].shape)
    segments, weights = ones.astype(np.int32), ones.astype(np.float32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "weights": weights}
    return recipe_step(our_recipe(size), "unroll", batch)


def torch_step(size: str) -> Step:
    """Hugging Face's model with AdamW and clipping as in the recipe."""
    keep_memory()
    import torch
    import transformers

    from pretrain.huggingface.export import config_fields

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    fields = config_fields(our_recipe(size).model, "model", {"pad_token_id": 0})
    config = transformers.GPT2Config(**fields, use_cache=False, attn_implementation="sdpa")
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.from_numpy(random_tokens(size)).long()

    def loss():
        logits = model(tokens[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return torch_adamw(model, loss)


if __name__ == "__main__":
    end_with(main)
