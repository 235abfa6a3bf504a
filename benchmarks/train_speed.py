"""How fast BERT trains on this CPU, beside Hugging Face's torch model: whole steps with gradient clipping and AdamW.

    python -m benchmarks.train_speed [--sizes tiny mini base] [--vocab 8192 30522] [--electra-sizes tiny mini]
                                     [--albert-sizes tiny base]

Every contestant is a process of its own on the same cores; they take turns. The same random batches, dropout 0.1,
float32, masked-token loss without pairs:
    scan, unroll       ours, the step that `pretrain run` takes, with the layers looped over or written out
    torch              Hugging Face's encoder with its head on the masked positions, as ours; torch's fused attention
    torch, all         BertForMaskedLM (AlbertForMaskedLM) as it comes, with logits at every position
    update             what of our step is the optimiser's: the same AdamW on given gradients, and nothing else
torch takes fused or foreach AdamW, whichever a trial finds faster, and the memory setting of
`pretrain.commands.platform`, which helps it too. The ratios are to the faster of ours. ELECTRA has no joint model
there to compare with.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import Step, milliseconds, ratio, take_turns
from data_pipelines.command_line import end_with, parse
from data_pipelines.errors import UserError
from pretrain.commands.platform import keep_memory, prepare_cpu

LENGTH, PREDICTIONS = 128, 20
BATCH = {"tiny": 32, "mini": 32, "base": 8}
ROUNDS = {"tiny": 30, "mini": 12, "base": 6}
WARM_UP = {"tiny": 8, "mini": 8, "base": 3}  # steps until the heap has settled
OURS, TORCH = ("scan", "unroll"), ("torch", "torch, all")
# Family -> (transformers' class, its trunk, its head)
REFERENCES = {"bert": ("BertForMaskedLM", "bert", "cls"), "albert": ("AlbertForMaskedLM", "albert", "predictions")}


@dataclasses.dataclass(frozen=True)
class Options:
    """sizes: of BERT.   electra_sizes: of ELECTRA.   albert_sizes: of ALBERT.   vocab: sizes of the vocabulary.
    threads: cores for each contestant, 0 for all.   rounds: timed steps; 0 chooses by size.
    """

    sizes: tuple[str, ...] = ("tiny", "mini", "base")
    electra_sizes: tuple[str, ...] = ()
    albert_sizes: tuple[str, ...] = ()
    vocab: tuple[int, ...] = (8192, 30522)
    threads: int = 0
    rounds: int = 0

    def __post_init__(self):
        for size in (*self.sizes, *self.electra_sizes, *self.albert_sizes):
            if size not in BATCH:
                raise UserError(f"size {size!r}: use one of {', '.join(BATCH)}")


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.train_speed")
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: options.threads or len(cores)]
    sizes = {"bert": options.sizes, "electra": options.electra_sizes, "albert": options.albert_sizes}
    models = [(family, size) for family, chosen in sizes.items() for size in chosen]
    console = Console(width=110)
    title = f"ms per training step, median of wall (CPU) time, {len(cores)} threads"
    table = Table("model", "vocab", "batch", *OURS, "update", *TORCH, "torch / ours", "all / ours", title=title)
    for family, size in models:
        for vocab in options.vocab:
            with console.status(f"{family}-{size}, vocabulary {vocab}"):
                times = measure(family, size, vocab, cores, options.rounds)
            table.add_row(f"{family}-{size}", f"{vocab:,}", f"{BATCH[size]}x{LENGTH}", *row(times))
    console.print(table)
    return 0


def row(times: dict[str, np.ndarray]) -> list[str]:
    """Cells of a table row from side -> seconds [rounds, (wall, CPU)]."""
    best = min(OURS, key=lambda side: np.median(times[side][:, 0]))
    shown = [milliseconds(times[side]) if side in times else "-" for side in (*OURS, "update", *TORCH)]
    return shown + [ratio(times[side], times[best]) if side in times else "-" for side in TORCH]


def measure(family: str, size: str, vocab: int, cores: list[int], rounds: int) -> dict[str, np.ndarray]:
    """Side -> seconds [rounds, (wall, CPU)] of a step."""
    batch = random_batch(vocab, BATCH[size])
    makers = {depth: functools.partial(our_step, depth, family, size, vocab, batch) for depth in OURS}
    makers["update"] = functools.partial(our_update, family, size, vocab)
    if family in REFERENCES:
        makers |= {side: functools.partial(torch_step, side, family, size, vocab, batch) for side in TORCH}
    return take_turns(makers, cores, rounds or ROUNDS[size], WARM_UP[size])


def random_batch(vocab: int, rows: int, length: int = LENGTH, slots: int = PREDICTIONS) -> dict[str, np.ndarray]:
    """Arrays of a batch in the form of `data_pipelines`: two segments, one token of padding per row."""
    rng = np.random.default_rng(0)
    positions = rng.permuted(np.tile(np.arange(length - 1, dtype=np.int32), (rows, 1)), axis=1)[:, :slots]
    batch = {
        "tokens": rng.integers(5, vocab, (rows, length), dtype=np.int32),
        "types": np.repeat([[0, 1]], length // 2, axis=1).repeat(rows, 0).astype(np.int32),
        "segments": np.ones((rows, length), np.int32),
        "prediction_positions": np.sort(positions, axis=1),
        "prediction_targets": rng.integers(5, vocab, (rows, slots), dtype=np.int32),
        "prediction_weights": np.ones((rows, slots), np.float32),
    }
    batch["segments"][:, -1] = 0
    return batch


def our_step(depth: str, family: str, size: str, vocab: int, batch: dict) -> Step:
    """The recipe's step, without a pair head."""
    prepare_cpu()
    return recipe_step(our_recipe(family, size, vocab), depth, batch)


def our_recipe(family: str, size: str, vocab: int):
    """As published but for dropout 0.1, AdamW and no pair head."""
    from pretrain.optimizers import Optimizer
    from pretrain.recipes.registry import find

    recipe = find(f"{family}-{size}")
    model = dataclasses.replace(recipe.model, vocab_size=vocab, dropout=0.1, attention_dropout=0.1)
    objective = recipe.objective
    if family in REFERENCES:
        model = dataclasses.replace(model, pair_head=False)
        objective = dataclasses.replace(objective, next_sentence=False, sentence_order=False)
    return dataclasses.replace(recipe, model=model, objective=objective, optimizer=Optimizer())


def our_update(family: str, size: str, vocab: int) -> Step:
    """The optimiser's part of a step, on gradients that are the parameters themselves."""
    prepare_cpu()
    import jax

    from models.core.program import default
    from pretrain.training.assembly import assemble, initial_params

    assembly = assemble(our_recipe(family, size, vocab), default("cpu"))
    params = initial_params(assembly)

    def update(params, moments):
        updates, moments = assembly.optimizer.update(params, moments, params, finite=True)
        return jax.tree.map(lambda p, u: p - 1e-4 * u, params, updates), moments

    state, compiled = (params, assembly.optimizer.init(params)), jax.jit(update, donate_argnums=(0, 1))

    def step() -> float:
        nonlocal state
        state = jax.block_until_ready(compiled(*state))
        return 0.0

    return step


def recipe_step(recipe, depth: str, batch: dict) -> Step:
    """A recipe's step on one batch again and again."""
    prepare_cpu()
    import jax

    from models.core.program import default
    from pretrain.training.assembly import assemble, initial_params, initial_state
    from pretrain.training.placement import stages
    from tpu.mesh import choose_mesh

    assembly = assemble(recipe, dataclasses.replace(default("cpu"), depth=depth))
    state, frozen = initial_state(assembly, initial_params(assembly), 0)
    compiled = stages(assembly, choose_mesh(None, jax.devices()))[0].train.run
    batch = jax.device_put(batch)

    def step() -> float:
        nonlocal state
        state, metrics = compiled(state, frozen, batch)
        return float(metrics.loss)

    return step


def torch_step(side: str, family: str, size: str, vocab: int, batch: dict) -> Step:
    """Hugging Face's model with AdamW and clipping as in the recipe."""
    keep_memory()
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cls, trunk, head = REFERENCES[family]
    model = getattr(transformers, cls)(torch_config(family, size, vocab)).train()
    inputs = {name: torch.from_numpy(array).long() for name, array in batch.items()}
    rows, length = inputs["tokens"].shape
    flat = (torch.arange(rows)[:, None] * length + inputs["prediction_positions"]).reshape(-1)
    targets = inputs["prediction_targets"].reshape(-1)
    labels = torch.full((rows * length,), -100).scatter(0, flat, targets).view(rows, length)
    names = {"input_ids": "tokens", "token_type_ids": "types", "attention_mask": "segments"}
    inputs = {theirs: inputs[ours] for theirs, ours in names.items()}

    def loss():
        if side == "torch, all":
            return model(**inputs, labels=labels).loss
        hidden = getattr(model, trunk)(**inputs).last_hidden_state
        logits = getattr(model, head)(hidden.reshape(rows * length, -1)[flat])
        return torch.nn.functional.cross_entropy(logits, targets)

    return torch_adamw(model, loss)


def torch_adamw(model, loss: Callable) -> Step:
    """A step of a torch model with clipping, by the faster of torch's two AdamWs."""
    import torch

    def step(optimizer) -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return value.item()

    adamw = lambda **how: torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.01, **how)
    steps = [functools.partial(step, adamw(fused=True)), functools.partial(step, adamw(foreach=True))]
    return min(steps, key=_seconds)


def _seconds(step: Step) -> float:
    """The faster of two steps, after one that allocates the optimiser's state."""
    step()
    return min(_wall(step) for _ in range(2))


def _wall(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def torch_config(family: str, size: str, vocab: int):
    """The recipe's model as Hugging Face's config, by the family's own export."""
    import transformers

    from pretrain.huggingface.export import config_fields

    fields = config_fields(our_recipe(family, size, vocab).model, "model", {"pad_token_id": 0})
    cls = getattr(transformers, REFERENCES[family][0])
    return cls.config_class(**fields, attn_implementation="sdpa")


if __name__ == "__main__":
    end_with(main)
