"""Tokens per second of generation on this CPU, beside Hugging Face's torch in the same run.

    python -m benchmarks.generation_speed [--size small] [--batches 1 8] [--prompt 64] [--tokens 128] [--beams 1]

GPT-2 with random parameters, float32, greedy (or beams), each with its cache: a prompt is read and so many tokens are
written, none of which stops a text. Ours is `generate` with parameters that were made `ready` before, as torch's model
was loaded before; the call's program is compiled.
"""

import dataclasses
import functools
import os

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import Step, ratio, take_turns
from data_pipelines.command_line import end_with, parse
from pretrain.commands.platform import keep_memory, prepare_cpu


@dataclasses.dataclass(frozen=True)
class Options:
    """size: of GPT-2.   batches: numbers of prompts.   prompt: tokens of each.   tokens: written after each.
    beams: of beam search.   rounds: how often."""

    size: str = "small"
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 64
    tokens: int = 128
    beams: int = 1
    rounds: int = 5


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.generation_speed")
    cores, console = sorted(os.sched_getaffinity(0)), Console(width=110)
    lengths = f"{options.prompt} + {options.tokens} tokens, {len(cores)} threads"
    title = f"tokens/s by wall (CPU) time, gpt2-{options.size}, {lengths}"
    table = Table("batch", "beams", "ours", "torch", "ours / torch", title=title)
    for batch in options.batches:
        makers = {"ours": our_step, "torch": torch_step}
        makers = {side: functools.partial(make, options, batch) for side, make in makers.items()}
        with console.status(f"batch {batch}"):
            times = take_turns(makers, cores, options.rounds, warm_up=1)
        rates = [batch * options.tokens / np.median(side, 0) for side in times.values()]
        shown = ["{:.1f} ({:.1f})".format(*rate) for rate in rates]
        table.add_row(str(batch), str(options.beams), *shown, ratio(times["torch"], times["ours"]))
    console.print(table)
    return 0


def prompts(options: Options, batch: int) -> np.ndarray:
    """i64[batch, prompt]."""
    return np.random.default_rng(0).integers(0, 50257, (batch, options.prompt))


def our_step(options: Options, batch: int) -> Step:
    """`generate` with the program that a CPU has by default."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    prepare_cpu()
    import jax

    from models.core import program
    from models.families.gpt2 import FAMILY
    from pretrain.generation.decoding import generate
    from pretrain.generation.loop import ready
    from pretrain.generation.settings import Decoding

    model = FAMILY.module(FAMILY.sizes[options.size], program.default())
    row = {name: np.ones((1, 8), np.int32) for name in ("tokens", "segments")}
    params = ready(model, jax.jit(model.init)(jax.random.key(0), row)["params"])
    texts, decoding = prompts(options, batch).tolist(), Decoding(max_tokens=options.tokens, beams=options.beams)
    return lambda: float(len(generate(model, params, texts, decoding)))


def torch_step(options: Options, batch: int) -> Step:
    """GPT2LMHeadModel.generate, with its own attention of choice."""
    keep_memory()
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from models.families.gpt2 import FAMILY
    from pretrain.huggingface.export import config_fields

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    fields = config_fields(FAMILY.sizes[options.size], "model", (), {}) | {"eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**fields)).eval()
    tokens = torch.from_numpy(prompts(options, batch))
    settings = {"max_new_tokens": options.tokens, "do_sample": False, "num_beams": options.beams, "pad_token_id": 0}

    def step() -> float:
        with torch.inference_mode():
            written = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        assert written.shape[1] == options.prompt + options.tokens
        return 0.0

    return step


if __name__ == "__main__":
    end_with(main)
