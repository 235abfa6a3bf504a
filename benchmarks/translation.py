"""A tiny Transformer translates as well as the same model trained by plain torch on the same batches.

    python -m benchmarks.translation --multi30k DIR [--steps 4500] [--seeds 0 1] [--out TABLE.md]

DIR holds Multi30k's train.en, train.de, test_2016_flickr.en and .de. torch has transformers' MarianMTModel, which
begins with our initial weights, reads the batches of our loader, and takes steps of torch.optim.Adam on torch's
cross-entropy with label smoothing, at our learning rates; only dropout draws other numbers. Both are read by `pretrain
eval`, with 4 beams and a length penalty of 0.6. All runs are made at once, each in a process of its own.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.learning import table
from data_pipelines.command_line import end_with, parse
from pretrain.commands.platform import prepare

RECIPE, VOCABULARY = "transformer-tiny", 6000
SIDES = "ours", "torch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Train both sides, translate the test set, print the table."""

    multi30k: Path
    """Folder with the texts."""
    steps: int = 4500
    """Of each run."""
    seeds: tuple[int, ...] = (0, 1)
    """Of each side."""
    side: str = ""
    """ours or torch: only train this one."""
    folder: Path = Path("runs/translation")
    """For the corpus and the runs; finished parts are not done again."""
    out: Path | None = None
    """A file for the table."""


def main(arguments: list[str]) -> int:
    """Train, translate, print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.translation")
    prepare()
    if options.side == "torch":
        train_torch(options, options.seeds[0])
        return 0
    corpus = _parallel(options, "train")
    _call("data_pipelines prepare --source", corpus, "--tokenizer sentencepiece-bpe --specials t5 --vocab-size",
          VOCABULARY, "--out", options.folder / "corpus")  # fmt: skip
    runs = [(side, seed) for side in SIDES for seed in options.seeds]
    with ThreadPoolExecutor(len(runs)) as pool:
        rows = list(pool.map(lambda run: row(options, *run), runs))
    text = f"{time.strftime('%Y-%m-%d')}, `python -m benchmarks.translation {' '.join(arguments)}`\n\n{table(rows)}\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    return 0


def _parallel(options: Options, split: str) -> str:
    return f"parallel:{options.multi30k}/{split}.en,{options.multi30k}/{split}.de"


def _call(*command) -> str:
    """Run a command -> what it prints."""
    words = " ".join(map(str, command)).split()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def row(options: Options, side: str, seed: int) -> dict[str, str]:
    """Train a side and translate the test set."""
    begin, folder = time.monotonic(), options.folder / f"{side}-{seed}"
    if side == "torch":
        _call("benchmarks.translation --multi30k", options.multi30k, "--steps", options.steps, "--seeds", seed,
              "--side torch --folder", options.folder)  # fmt: skip
    else:
        _call("pretrain run", RECIPE, "--corpus", options.folder / "corpus", "--workdir", folder, "--steps",
              options.steps, "--seed", seed, "--dtype float32 --no-sample")  # fmt: skip
    minutes = (time.monotonic() - begin) / 60
    said = _call("pretrain eval", folder, "--source", _parallel(options, "test_2016_flickr"),
                 "--beams 4 --length-penalty 0.6 --max-tokens 48")  # fmt: skip
    figures = {name: re.search(rf"{name}\D+([\d.]+)", said)[1] for name in ("BLEU", "chrF")}
    return {"side": side, "seed": str(seed), "steps": str(options.steps), "minutes": f"{minutes:.1f}"} | figures


def train_torch(options: Options, seed: int) -> None:
    """Train transformers' model, and leave it as a folder; a finished one is taken as it is."""
    import torch
    import transformers

    from data_pipelines.corpus import Corpus
    from pretrain.recipe import every_task, resolve
    from pretrain.recipes.registry import find
    from pretrain.schedules import learning_rate, numbers
    from pretrain.training.data import training_batches

    folder, corpus = options.folder / f"torch-{seed}", Corpus(options.folder / "corpus")
    if folder.is_dir():
        return
    recipe = resolve(dataclasses.replace(find(RECIPE), steps=options.steps, seed=seed), corpus)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = transformers.MarianMTModel.from_pretrained(_initial(recipe, corpus, folder)).to(device).train()
    adam = recipe.optimizer
    optimizer = torch.optim.Adam(model.parameters(), betas=(adam.b1, adam.b2), eps=adam.epsilon)
    batches = training_batches(recipe, {"": corpus}, *every_task(recipe)[0][1:])
    given = numbers(recipe.schedule, recipe.steps)
    rows = np.arange(recipe.phases[0].batch_size)
    for step in range(recipe.steps):
        batch = {name: torch.from_numpy(array).to(device) for name, array in batches.batch(step, rows).items()}
        logits = model(
            batch["tokens"].long(), attention_mask=batch["segments"], decoder_input_ids=batch["decoder_tokens"].long()
        ).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1),
            batch["targets"].long().flatten(),
            reduction="none",
            label_smoothing=recipe.objective.label_smoothing,
        )
        weights = batch["weights"].flatten()
        for group in optimizer.param_groups:
            group["lr"] = float(learning_rate(recipe.schedule.name, given, step))
        optimizer.zero_grad()
        ((losses * weights).sum() / weights.sum()).backward()
        optimizer.step()
    begun = folder.with_suffix(".begun")
    model.save_pretrained(begun)
    begun.rename(folder)


def _initial(recipe, corpus, folder: Path) -> Path:
    """Our initial weights as a folder."""
    import jax

    from models.core.program import Program
    from pretrain.huggingface.export import export
    from pretrain.training.assembly import assemble, initial_params

    first = folder.with_suffix(".begun")
    shutil.rmtree(first, ignore_errors=True)
    params = jax.device_get(initial_params(assemble(recipe, Program())))
    export(params, recipe.model, corpus.tokenizer_path, first)
    return first


if __name__ == "__main__":
    end_with(main)
