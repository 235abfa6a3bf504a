"""`python -m pretrain discriminator`: train a classifier of labelled texts on a causal decoder's hidden states."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipelines.durable import writing
from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from models.core.ranges import SEED, Range
from pretrain.commands.common import OfModel, check_apart, import_models, parse_checked
from pretrain.prompting.prompts import objects, text_of

HELDOUT = Range("above 0 and below 1", lambda x: 0 < x < 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discriminate(OfModel):
    """Train a linear classifier of labelled texts on a run's mean hidden states, to steer `generate`."""

    examples: Path
    """JSON Lines file of {"text", "label"}."""
    out: Path
    """Folder to write, for `generate --discriminator`: new, empty, or one with a discriminator, which is replaced."""
    heldout: float = 0.1
    """Share of the lines held out to measure accuracy."""
    seed: int = 0
    """Random seed of the draw of held-out lines."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Discriminate, arguments, "discriminator", {"heldout": HELDOUT, "seed": SEED})
    import_models()
    from pretrain.prompting.asking import mean, with_error
    from pretrain.steering.discriminator import FILE, Discriminator, fingerprint, fit, means
    from pretrain.storage.run_directory import write_whole
    from pretrain.training.opened import open_model

    inside = options.out.iterdir() if options.out.is_dir() else ()
    if others := sorted(path.name for path in inside if not path.name.startswith(FILE)):
        raise UserError(f"--out {options.out}: holds {others[0]}, so it is not a discriminator's; give a new folder")
    check_apart(options.out / FILE, options.examples)
    records = list(objects(options.examples))
    texts, labels = ([text_of(record, key, where) for record, where in records] for key in ("text", "label"))
    for text, (_, where) in zip(texts, records, strict=True):
        if not text.strip():
            raise UserError(f"{where}: 'text' is empty; fill it")
    names, numbers = np.unique(labels, return_inverse=True)
    order = np.random.default_rng(options.seed).permutation(len(texts))
    held, trained = np.split(order, [max(1, round(options.heldout * len(texts)))])
    if len(names) < 2 or len(np.unique(numbers[trained])) < len(names):
        raise UserError(f"--examples {options.examples}: give at least two labels, and more lines for each label")
    opened = open_model(options.run, options.step, best_of=options.best, ema=options.ema)
    opened.check_decodes()
    tokens, positions = Encoder(opened.tokenizer.tokenizer).tokens(texts), opened.config.positions
    states = means(opened.module, opened.params, [text[:positions] for text in tokens], opened.mesh)
    kernel, bias = fit(states[trained], numbers[trained], len(names))
    discriminator = Discriminator(names.tolist(), kernel, bias, fingerprint(opened.params), opened.step)
    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
        write_whole(options.out / FILE, json.dumps(discriminator._asdict(), default=np.ndarray.tolist))
    correct = (states @ kernel + bias).argmax(1) == numbers
    print(
        f"{opened.name}: accuracy {with_error(mean(correct[held]))} on {len(held)} held-out texts, "
        f"{correct[trained].mean():.4f} on {len(trained)} training texts; always the commonest label: "
        f"{np.bincount(numbers).max() / len(numbers):.4f}"
    )
    if cut := sum(len(text) > positions for text in tokens):
        print(f"{cut} texts are longer than the model's {positions} positions and were truncated")
    return 0
