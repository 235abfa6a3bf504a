"""Tokens per second of generation on this CPU, beside Hugging Face's torch in the same run.

    python -m benchmarks.generation_speed [--recipe gpt2-small] [--batches 1 8] [--prompt 64] [--tokens 128] [--beams 1]

The model of a recipe (GPT-2, T5) with random parameters, float32, greedy (or beams), each with its cache: a prompt is
read and so many tokens are written, none of which stops a text. Ours is `generate` with parameters that were made
`ready` before, as torch's model was loaded before; the call's program is compiled.
"""

import dataclasses
import functools
import os

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.sides import torch_models
from benchmarks.turns import Step, ratio, take_turns
from data_pipelines.command_line import end_with, parse
from pretrain.commands.platform import keep_memory, prepare_cpu


@dataclasses.dataclass(frozen=True)
class Options:
    """recipe: its name.   batches: numbers of prompts.   prompt: tokens of each.   tokens: written after each.
    beams: of beam search.   rounds: how often."""

    recipe: str = "gpt2-small"
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
    title = f"tokens/s by wall (CPU) time, {options.recipe}, {lengths}"
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


def prompts(options: Options, batch: int, vocab_size: int) -> np.ndarray:
    """i64[batch, prompt]."""
    return np.random.default_rng(0).integers(0, vocab_size, (batch, options.prompt))


def our_step(options: Options, batch: int) -> Step:
    """`generate` with the program that a CPU has by default."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    prepare_cpu()
    import jax

    from models.core import program
    from pretrain.generation.decoding import generate
    from pretrain.generation.loop import ready
    from pretrain.generation.settings import Decoding
    from pretrain.recipes.registry import find
    from pretrain.training.assembly import assemble, initial_params

    assembly = assemble(find(options.recipe), program.default())
    model, params = assembly.model, ready(assembly.model, jax.device_put(initial_params(assembly)))
    texts = prompts(options, batch, assembly.recipe.model.vocab_size).tolist()
    decoding = Decoding(max_tokens=options.tokens, beams=options.beams)
    return lambda: float(len(generate(model, params, texts, decoding)))


def torch_step(options: Options, batch: int) -> Step:
    """generate of Hugging Face's model, with its own attention of choice."""
    keep_memory()
    import torch

    from pretrain.recipes.registry import find

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    recipe = find(options.recipe)
    (model,) = torch_models(recipe)
    model = model.eval()
    tokens = torch.from_numpy(prompts(options, batch, recipe.model.vocab_size))
    settings = {"max_new_tokens": options.tokens, "do_sample": False, "num_beams": options.beams}
    settings |= {"use_cache": True, "pad_token_id": 0}
    before = 1 if model.config.is_encoder_decoder else options.prompt

    def step() -> float:
        with torch.inference_mode():
            written = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        assert written.shape[1] == before + options.tokens
        return 0.0

    return step


if __name__ == "__main__":
    end_with(main)
