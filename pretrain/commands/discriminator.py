"""`python -m pretrain discriminator`: tells labelled texts apart by what a causal decoder makes of them."""

from pathlib import Path

import numpy as np

from data_pipelines.cloud import local_folder
from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import stored
from models.families.registry import name_of
from pretrain.commands.options import Discriminate
from pretrain.objectives.protocols import CausalDecoder
from pretrain.prompting.examples import objects, text_of
from pretrain.prompting.figures import mean
from pretrain.steering.discriminator import FILE, Discriminator, fingerprint, fit, hits, means, written
from pretrain.storage.run_directory import RunDirectory, write_whole
from pretrain.training.restore import restore
from pretrain.training.trained import merge


def train(options: Discriminate) -> None:
    """Write the discriminator and print in how many held-out texts it tells the label. UserError in one line."""
    _check_folder(options.out)
    texts, labels = _read(options.examples)
    names, numbers = np.unique(labels, return_inverse=True)
    order = np.random.default_rng(options.seed).permutation(len(texts))
    held, learned = np.split(order, [max(1, round(options.heldout * len(texts)))])
    if len(names) < 2 or len(np.unique(numbers[learned])) < len(names):
        raise UserError(f"--examples {options.examples}: give at least two labels, and more lines of each")
    directory = RunDirectory(options.run)
    restored = restore(directory, options.step)
    model, params = restored.assembly.model, merge(restored.params, restored.frozen)
    if not isinstance(model, CausalDecoder):
        raise UserError(f"{options.run}: a model of {name_of(model.config)} is no causal decoder; take one, like gpt2")
    with local_folder(directory.tokenizer) as folder:
        tokens = Encoder(stored.load(folder).tokenizer).tokens(texts)
    states = means(model, params, [some[: model.config.positions] for some in tokens], restored.mesh)
    kernel, bias = fit(states[learned], numbers[learned], len(names))
    discriminator = Discriminator(names.tolist(), kernel, bias, fingerprint(params), restored.step)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        write_whole(options.out / FILE, written(discriminator))
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot write there ({error.strerror}); choose another place") from None
    told = hits(states, numbers, kernel, bias)
    share, error = mean(told[held])
    print(
        f"step {restored.step}: held-out accuracy {share:.4f}"
        + (f" ± {error:.4f}" if error is not None else "")
        + f" of {len(held)} texts, "
        f"{told[learned].mean():.4f} of the {len(learned)} that it learned from; the commonest label is "
        f"{np.bincount(numbers).max() / len(numbers):.4f} of all"
    )
    if cut := sum(len(some) > model.config.positions for some in tokens):
        print(f"{cut} texts are longer than the model's {model.config.positions} positions; their beginnings were read")


def _check_folder(folder: Path) -> None:
    """UserError for one that holds anything but a discriminator."""
    if not folder.is_dir():
        return
    if others := sorted(path.name for path in folder.iterdir() if not path.name.startswith(FILE)):
        raise UserError(f"--out {folder}: holds {others[0]}, so it is no discriminator; give a new folder")


def _read(path: Path) -> tuple[list[str], list[str]]:
    """(texts, their labels)."""
    texts, labels = [], []
    for _, record, where in objects(path):
        texts.append(text_of(record, "text", where))
        labels.append(text_of(record, "label", where))
        if not texts[-1].strip():
            raise UserError(f"{where}: 'text' is empty; fill it")
    return texts, labels
