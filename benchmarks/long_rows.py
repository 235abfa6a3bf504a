"""What long rows cost on this CPU: sparse patterns beside dense attention, and beside Hugging Face's torch models.

    python -m benchmarks.long_rows --out benchmarks/results/long_rows      # .md and .png
    python -m benchmarks.long_rows --depth 12 --lengths                    # the first table alone, of whole base models

Whole steps on random tokens, with AdamW and clipping, dropout 0.1 of hidden states and of attention, 15% of the tokens
predicted, float32; contestants are processes of their own on the same cores and take turns.

4,096 tokens: BERT in rows of 512, BigBird and Longformer in one row (the first token is global), and
`BigBirdForMaskedLM` (block_sparse) and `LongformerForMaskedLM` of the same sizes and pattern with logits at the
predicted positions alone, as ours.
16,384 tokens in rows of each length: BERT with dense attention, and BigBird with its blocks; times are also given in
those of rows of 512 with dense attention, taken in the same turns, so that what else the machine does falls out.
Memory is what the compiled step needs, by the compiler's own count. Dense steps above `memory` are not run.
"""

import dataclasses
import functools
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.turns import Step, milliseconds, take_turns
from data_pipelines.command_line import end_with, parse
from pretrain.commands.platform import keep_memory, prepare_cpu

TOKENS = 16_384  # of a batch where lengths are compared
SHORT, LONG = 512, 4096
DENSE, BLOCKED = "dense", "blocks"
# Expected of the time beside BERT's, of torch's beside ours, and of a token's in the longest rows beside rows of FROM.
MOST_OF_BERT, LEAST_OF_TORCH, MOST_GROWTH, FROM = 1.3, 1.4, 1.25, 1024
HEAD = (
    "| model | BERT, ms | ours, ms | Hugging Face, ms | ours / BERT | Hugging Face / ours |\n"
    "|---|---|---|---|---|---|\n"
)
LENGTHS_HEAD = (
    "| tokens a row | dense, ms | blocks, ms | dense, of 512's | blocks, of 512's | dense, GB | blocks, GB |\n"
    "|---|---|---|---|---|---|---|\n"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """depth: layers of the base models.   lengths: rows to compare.   width: of the models that are compared by length.
    vocab: size of the vocabulary.   rounds: timed steps.   memory: GB that a step may need to be run.   out: where the
    table (.md) and the curves (.png) go.
    """

    depth: int = 4
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384)
    width: int = 256
    vocab: int = 8192
    rounds: int = 3
    memory: float = 5.0
    out: Path | None = None


def main(arguments: list[str]) -> int:
    """Measure and print the tables -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.long_rows")
    cores = sorted(os.sched_getaffinity(0))
    text = heading(options, cores) + beside_others(options, cores)
    if options.lengths:
        rows = [by_length(length, options, cores) for length in options.lengths]
        text += lengths_text(rows, options)
        if options.out:
            curves(rows, options.out.with_suffix(".png"))
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text)
    return 0


def heading(options: Options, cores: list[int]) -> str:
    """What was measured, where and when."""
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "torch", "transformers"))
    where = f"{date.today()}, {len(cores)} {platform.machine()} cores, {versions}"
    return f"""# Long rows on a CPU

`python -m benchmarks.long_rows`, {where}, float32, dropout 0.1 of hidden states and of attention. Median ms of a
training step, wall (CPU) time; ratios, of wall (CPU) time, are medians over {options.rounds} rounds of steps taken turn
by turn.
"""


def beside_others(options: Options, cores: list[int]) -> str:
    """The comparison at 4,096 tokens."""
    changes = {"depth": options.depth, "vocab_size": options.vocab}
    ours = lambda name, length, rows: functools.partial(our_step, name, length, rows, "xla", changes)
    times = {}
    for family in ("BigBird", "Longformer"):
        sides = {
            "BERT": ours("bert-base", SHORT, LONG // SHORT),
            family: ours(f"{family.lower()}-base", LONG, 1),
            f"torch {family}": functools.partial(torch_step, family.lower(), changes),
        }
        times[family] = take_turns(sides, cores, options.rounds, warm_up=1)
    return beside_text(times, options)


def beside_text(times: dict[str, dict[str, np.ndarray]], options: Options) -> str:
    """Markdown of family -> side -> seconds [rounds, (wall, CPU)]."""
    lines = []
    for family, of_family in times.items():
        bert, own, torch = of_family.values()
        cells = [milliseconds(side) for side in (bert, own, torch)] + [ratios(own, bert), ratios(torch, own)]
        lines.append(f"| {family} | {' | '.join(cells)} |\n")
    return f"""
## {LONG:,} tokens a step

Width 768, 12 heads, {options.depth} layers (base has 12), {options.vocab:,} words; BERT in rows of {SHORT}, the others
in one. Expected: at most {MOST_OF_BERT} of BERT's time, Hugging Face's at least {LEAST_OF_TORCH} of ours.

{HEAD}{"".join(lines)}"""


def by_length(length: int, options: Options, cores: list[int]) -> dict:
    """Of one length: side -> (seconds [rounds, (wall, CPU)] or None, the same of dense rows of 512, GB)."""
    changes = {"width": options.width, "heads": options.width // 64, "feed_forward": 4 * options.width, "depth": 2}
    changes["vocab_size"] = options.vocab
    sized = lambda length: (length, TOKENS // length)
    asked = {DENSE: ("bert-base", *sized(length), "dense", changes)}
    if length > SHORT:  # shorter rows have no blocks to draw
        asked[BLOCKED] = ("bigbird-base", *sized(length), "blocked", changes)
    needed = {side: gigabytes(*what) for side, what in asked.items()}
    sides = {"reference": functools.partial(our_step, "bert-base", *sized(SHORT), "dense", changes)}
    sides |= {side: functools.partial(our_step, *what) for side, what in asked.items() if needed[side] < options.memory}
    times = take_turns(sides, cores, options.rounds, warm_up=1)
    return {"length": length} | {side: (times.get(side), times["reference"], needed[side]) for side in asked}


def lengths_text(rows: list[dict], options: Options) -> str:
    """Markdown of what `by_length` gives."""
    lines, of_short = [], {}
    for row in rows:
        cells = [f"{row['length']:,}"]
        sides = [row.get(side, (None, None, None)) for side in (DENSE, BLOCKED)]
        cells += ["-" if own is None else milliseconds(own) for own, _, _ in sides]
        cells += ["-" if own is None else ratios(own, reference) for own, reference, _ in sides]
        cells += ["-" if needed is None else f"{needed:.2f}" for _, _, needed in sides]
        lines.append("| " + " | ".join(cells) + " |\n")
        if BLOCKED in row:
            own, reference, _ = row[BLOCKED]
            of_short[row["length"]] = np.median(own / reference, axis=0)
    longest = max(of_short)
    grown = "{:.2f} ({:.2f})".format(*of_short[longest] / of_short[FROM]) if FROM in of_short else "unknown"
    return f"""
## {TOKENS:,} tokens a step, by the length of rows

BERT's and BigBird's layers with width {options.width}, {options.width // 64} heads and 2 layers (base has 768, 12 and
12), {options.vocab:,} words. Memory is what the step needs by the compiler's count, temporaries and arguments; steps
above {options.memory} GB were not run. From {FROM:,} to {longest:,} tokens a row the time a token with blocks is
multiplied by {grown} (expected: at most {MOST_GROWTH}).

{LENGTHS_HEAD}{"".join(lines)}"""


def ratios(slow: np.ndarray, fast: np.ndarray) -> str:
    """The medians over rounds of the ratios of wall (CPU) times."""
    return "{:.2f} ({:.2f})".format(*np.median(slow / fast, axis=0))


def curves(rows: list[dict], path: Path) -> None:
    """Time and memory over the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(10, 4))
    for side in (DENSE, BLOCKED):
        found = [(row["length"], *row[side]) for row in rows if side in row]
        timed = [(length, np.median(own / reference, 0)[1]) for length, own, reference, _ in found if own is not None]
        time.plot(*zip(*timed, strict=True), "o-", label=side)
        memory.plot([length for length, *_ in found], [needed for *_, needed in found], "o-", label=side)
    time.set_ylabel("CPU time a token, of dense rows of 512")
    memory.set_ylabel("GB that a step needs")
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("tokens a row")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def our_recipe(name: str, length: int, rows: int, changes: dict):
    """A recipe with dropout 0.1, AdamW, no pair head and one phase."""
    from pretrain.objectives.phase import Phase
    from pretrain.optimizers import Optimizer
    from pretrain.recipes.registry import find

    recipe = find(name)
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "pair_head": False}
    model = dataclasses.replace(recipe.model, positions=max(length, recipe.model.positions), **changes, **rates)
    objective = dataclasses.replace(recipe.objective, next_sentence=False, sentence_order=False)
    of_phase = {"model": model, "objective": objective, "optimizer": Optimizer(), "phases": (Phase(1.0, length, rows),)}
    return dataclasses.replace(recipe, **of_phase)


def compiled_step(recipe, form: str):
    """The recipe's assembly and its training step, compiled with a form of attention."""
    import jax

    from models.core.program import default
    from pretrain.training.assembly import assemble
    from pretrain.training.placement import stages
    from tpu.mesh import choose_mesh

    assembly = assemble(recipe, dataclasses.replace(default("cpu"), attention=form))
    train = stages(assembly, choose_mesh(None, jax.devices()))[0].train
    return assembly, train.run.lower(*train.arguments).compile()


def gigabytes(name: str, length: int, rows: int, form: str, changes: dict) -> float:
    """What a step needs at once, by the compiler's count."""
    prepare_cpu()
    _, compiled = compiled_step(our_recipe(name, length, rows, changes), form)
    of = compiled.memory_analysis()
    return (of.temp_size_in_bytes + of.argument_size_in_bytes) / 1e9


def our_step(name: str, length: int, rows: int, form: str, changes: dict) -> Step:
    """A recipe's step on one batch again and again."""
    prepare_cpu()
    import jax

    from pretrain.training.assembly import initial_params, initial_state

    recipe = our_recipe(name, length, rows, changes)
    assembly, compiled = compiled_step(recipe, form)
    state, frozen = initial_state(assembly, initial_params(assembly), 0)
    spec = recipe.objective.spec(recipe.phases[0])
    batch = jax.device_put(random_batch(spec, rows, length, recipe.model.vocab_size))

    def step() -> float:
        nonlocal state
        state, metrics = compiled(state, frozen, batch)
        return float(metrics.loss)

    return step


def random_batch(spec: dict, rows: int, length: int, vocab: int) -> dict[str, np.ndarray]:
    """Rows without padding, of random tokens, for a spec of arrays; the first token is the global one."""
    rng, of_name = np.random.default_rng(0), {}
    tokens = rng.integers(5, vocab, (rows, length), dtype=np.int32)
    slots = spec["prediction_positions"][0][0]
    chosen = rng.permuted(np.tile(np.arange(1, length, dtype=np.int32), (rows, 1)), axis=1)[:, :slots]
    of_name = {
        "tokens": tokens,
        "segments": np.ones((rows, length), np.int32),
        "prediction_positions": np.sort(chosen, axis=1),
        "prediction_targets": rng.integers(5, vocab, (rows, slots), dtype=np.int32),
        "prediction_weights": np.ones((rows, slots), np.float32),
    }
    zeros = {name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in spec.items()}
    return zeros | {name: array for name, array in of_name.items() if name in spec}


def torch_step(family: str, changes: dict) -> Step:
    """Hugging Face's model of the same sizes on the same tokens."""
    keep_memory()
    import torch
    import transformers

    from benchmarks.train_speed import torch_adamw

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    recipe = our_recipe(f"{family}-base", LONG, 1, changes)
    batch = random_batch(recipe.objective.spec(recipe.phases[0]), 1, LONG, recipe.model.vocab_size)
    sizes = {"vocab_size": changes["vocab_size"], "num_hidden_layers": changes["depth"]}
    if family == "bigbird":
        config = transformers.BigBirdConfig(**sizes, max_position_embeddings=LONG, attention_type="block_sparse")
        model = transformers.BigBirdForMaskedLM(config).train()
        trunk, head, extra = model.bert, model.cls, {}
    else:
        config = transformers.LongformerConfig(**sizes, max_position_embeddings=LONG + 2, attention_window=512)
        model = transformers.LongformerForMaskedLM(config).train()
        first = torch.arange(LONG)[None] == 0
        trunk, head, extra = model.longformer, model.lm_head, {"global_attention_mask": first.long()}
    tensor = lambda name: torch.from_numpy(batch[name]).long()
    tokens, slots, targets = tensor("tokens"), tensor("prediction_positions")[0], tensor("prediction_targets")[0]

    def loss():
        hidden = trunk(tokens, attention_mask=torch.ones_like(tokens), **extra).last_hidden_state
        return torch.nn.functional.cross_entropy(head(hidden[0, slots]), targets)

    return torch_adamw(model, loss)


if __name__ == "__main__":
    end_with(main)
