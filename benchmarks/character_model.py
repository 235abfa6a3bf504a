"""nanoGPT's CPU shape: our GPT-2 and the same model in plain torch, from the same weights, on the same characters.

    python -m benchmarks.character_model --text FILE [--threads 1]

4 layers, 4 heads, width 128, 12 rows of 64 characters, 2,000 steps of AdamW with a cosine, no dropout: what nanoGPT's
README trains on a CPU. The first 9 tenths of the text are trained on, the rest is held out, all of it. Each contestant
is a process of its own on the same cores; they take turns, 20 steps at a time:
    ours     the step that `pretrain run` takes
    torch    modules of torch alone, its fused attention and fused AdamW
"""

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.turns import Step, take_turns
from pretrain.commands.platform import keep_memory, prepare_cpu

LENGTH, ROWS, STEPS = 64, 12, 2000
TURN, WARM_UP = 20, 2  # steps in a turn, turns before any is timed
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options:
    """Train both and compare held-out losses and times."""

    text: Path
    """UTF-8; about 1 MB."""
    threads: int = 0
    """Cores for each contestant, 0 for all."""
    seed: int = 0
    """Of weights and batches."""


def main(options: Options) -> None:
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: options.threads or len(cores)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        number = store(options.text.read_text(), options.seed, folder)
        makers = {side: functools.partial(make, folder) for side, make in SIDES.items()}
        # Each turn is taken twice, once untimed. In the last round the held-out text is read, too: it does not count.
        times = take_turns(makers, cores, (STEPS // TURN - WARM_UP) // 2, WARM_UP)
        losses = {side: json.loads((folder / f"{side}.json").read_text()) for side in SIDES}
    table = Table("", "held out before", f"after {STEPS:,} steps", "ms a step: wall", "CPU", "time / torch's")
    table.title = f"{options.text.name}, {number} kinds of characters, seed {options.seed}, {len(cores)} threads"
    for side in SIDES:
        wall, cpu = np.median(times[side][:-1], 0) * 1e3 / TURN
        relative = np.median(times[side][:-1, 0] / times["torch"][:-1, 0])
        before, after = losses[side]
        table.add_row(side, f"{before:.4f}", f"{after:.4f}", f"{wall:.1f}", f"{cpu:.1f}", f"{relative:.2f}")
    Console(width=110).print(table)


def store(text: str, seed: int, folder: Path) -> int:
    """What both read: batches and the weights before training -> how many kinds of characters there are."""
    from pretrain.huggingface.tensors import tensors
    from pretrain.schedules import learning_rate
    from pretrain.training.assembly import initial_params

    kinds, ids = np.unique(list(text), return_inverse=True)
    train, held_out = np.split(ids.astype(np.int32), [len(ids) * 9 // 10])
    starts = np.random.default_rng(seed).integers(0, len(train) - LENGTH, (STEPS, ROWS))
    whole = len(held_out) // (ROWS * LENGTH + 1)
    rest = np.arange(whole * ROWS).reshape(whole, ROWS) * LENGTH
    window = np.arange(LENGTH + 1)
    recipe = our_recipe(len(kinds), seed)
    rates = [float(learning_rate(recipe.schedule, step, STEPS)) for step in range(STEPS)]
    # Batches are i32[batches, rows, length + 1]
    np.savez(
        folder / "batches.npz", train=train[starts[..., None] + window], heldout=held_out[rest[..., None] + window]
    )
    (folder / "run.json").write_text(json.dumps({"vocab": len(kinds), "seed": seed, "rates": rates}))
    import jax

    params = jax.tree.map(np.asarray, initial_params(assembled(recipe)))
    found = tensors(params, recipe.model, "model")
    np.savez(folder / "weights.npz", **{name: np.array(tensor.array()) for name, tensor in found.items()})
    return len(kinds)


def our_recipe(vocab: int, seed: int):
    """nanoGPT's, as a recipe."""
    from pretrain.recipes.registry import find

    recipe = find("gpt2-tiny")
    model = dataclasses.replace(
        recipe.model, vocab_size=vocab, positions=LENGTH, width=128, depth=4, heads=4, feed_forward=512,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return dataclasses.replace(
        recipe,
        model=model,
        optimizer=dataclasses.replace(recipe.optimizer, b2=0.99),
        schedule=dataclasses.replace(recipe.schedule, peak=1e-3, warmup=100 / STEPS, final=0.1),
        phases=(dataclasses.replace(recipe.phases[0], length=LENGTH, batch_size=ROWS),),
        steps=STEPS,
        seed=seed,
    )


def assembled(recipe):
    """As `pretrain run` does it on a CPU."""
    from models.core.program import default
    from pretrain.training.assembly import assemble

    return assemble(recipe, default("cpu"))


def turns(folder: Path, side: str, train: Callable, evaluate: Callable[[np.ndarray], float]) -> Step:
    """A turn: `train(step, tokens)`, which gives the loss, on the next batches. Held-out losses before the first and
    after the last are stored."""
    batches = np.load(folder / "batches.npz")
    training, held_out = batches["train"], batches["heldout"]
    losses, done = [float(np.mean([evaluate(tokens) for tokens in held_out]))], 0

    def turn() -> float:
        nonlocal done
        for step in range(done, done + TURN):
            value = train(step, training[step])
        done += TURN
        if done == STEPS:
            losses.append(float(np.mean([evaluate(tokens) for tokens in held_out])))
            (folder / f"{side}.json").write_text(json.dumps(losses))
        return float(value)

    return turn


def ours(folder: Path) -> Step:
    """The recipe's step and evaluation."""
    prepare_cpu()
    import jax

    from pretrain.training.assembly import initial_params, initial_state
    from pretrain.training.placement import stages
    from tpu.mesh import choose_mesh

    of = json.loads((folder / "run.json").read_text())
    assembly = assembled(our_recipe(of["vocab"], of["seed"]))
    stage = stages(assembly, choose_mesh(None, jax.devices()))[0]
    state, frozen = initial_state(assembly, initial_params(assembly), 0)

    def train(step: int, tokens: np.ndarray):
        nonlocal state
        state, metrics = stage.train.run(state, frozen, jax.device_put(batch_of(tokens)))
        return metrics.loss

    def evaluate(tokens: np.ndarray) -> float:
        first, zero = stage.first_evaluation_carry(), np.int32(0)
        evaluated, *_ = stage.evaluate.run(state.params, frozen, batch_of(tokens), zero, zero, first, zero)
        return float(evaluated.sums["lm"] / evaluated.weights["lm"])

    return turns(folder, "ours", train, evaluate)


def batch_of(tokens: np.ndarray) -> Batch:
    """As `PackedDocuments` makes it of one long document."""
    ones = np.ones((ROWS, LENGTH))
    segments, weights = ones.astype(np.int32), ones.astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "weights": weights}


def theirs(folder: Path) -> Step:
    """The same model in torch, by nanoGPT's loop."""
    keep_memory()
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rates = json.loads((folder / "run.json").read_text())["rates"]
    model = torch_model({name: torch.tensor(array) for name, array in np.load(folder / "weights.npz").items()})
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8, fused=True)

    def loss(tokens: np.ndarray):
        tokens = torch.from_numpy(tokens).long()
        return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def train(step: int, tokens: np.ndarray):
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        value = loss(tokens)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def evaluate(tokens: np.ndarray) -> float:
        with torch.no_grad():
            return loss(tokens).item()

    return turns(folder, "torch", train, evaluate)


def torch_model(weights: dict):
    """GPT-2 in plain torch, from tensors by the names of transformers' GPT2LMHeadModel: tokens -> logits."""
    from torch import nn
    from torch.nn import functional

    def linear(name: str) -> nn.Linear:
        weight = weights[f"{name}.weight"].T.contiguous()  # there [inputs, outputs]
        return filled(nn.Linear(weight.shape[1], weight.shape[0]), weight, weights[f"{name}.bias"])

    def norm(name: str) -> nn.LayerNorm:
        weight = weights[f"{name}.weight"]
        return filled(nn.LayerNorm(len(weight)), weight, weights[f"{name}.bias"])

    def filled(module, weight, bias):
        module.weight, module.bias = nn.Parameter(weight), nn.Parameter(bias)
        return module

    class Block(nn.Module):
        def __init__(self, name: str):
            super().__init__()
            self.before, self.between = norm(f"{name}.ln_1"), norm(f"{name}.ln_2")
            self.qkv, self.output = linear(f"{name}.attn.c_attn"), linear(f"{name}.attn.c_proj")
            self.up, self.down = linear(f"{name}.mlp.c_fc"), linear(f"{name}.mlp.c_proj")

        def forward(self, x):
            rows, length, width = x.shape
            qkv = self.qkv(self.before(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(*qkv, is_causal=True)
            x = x + self.output(seen.transpose(1, 2).reshape(rows, length, width))
            return x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Parameter(weights["transformer.wte.weight"])
            self.positions = nn.Parameter(weights["transformer.wpe.weight"])
            self.layers = nn.Sequential(*(Block(f"transformer.h.{layer}") for layer in range(4)))
            self.norm = norm("transformer.ln_f")

        def forward(self, tokens):
            x = functional.embedding(tokens, self.tokens) + self.positions[: tokens.shape[1]]
            return functional.linear(self.norm(self.layers(x)), self.tokens)

    return Model()


SIDES = {"ours": ours, "torch": theirs}


if __name__ == "__main__":
    main(tyro.cli(Options))
