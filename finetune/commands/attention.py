"""`python -m finetune attention`: shows what each attention head of a model attends to."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe may name a task)
from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from finetune.inside import are_special, attention_shares, looked
from finetune.rows import joined
from finetune.tables import show, store
from finetune.texts import encoded, fitting
from finetune.trees import best_heads, trees
from models.core.ranges import COUNT
from pretrain.commands.common import check_file, check_picture, save_picture
from pretrain.objectives.protocols import CausalDecoder
from pretrain.options import check_options
from pretrain.recipe import LENGTH
from pretrain.training.opened import open_model

NAMED = 40  # largest number of tokens with labels beside a map


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Draw the attention of each layer and head over a text, and print its entropy, distance and share on special
    tokens; or with --trees, find the attention head that best predicts each relation (Clark et al. 2019)."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    out: Path
    """File to write: PNG, PDF or SVG; .tsv with --trees."""
    text: tuple[str, ...] = ()
    """One text or a pair of texts."""
    trees: Path | None = None
    """CoNLL-U file with dependency trees, instead of --text."""
    cases: int = 50
    """With --trees, leave out relations with fewer words than this."""
    step: int | None = None
    """Step of the checkpoint; by default the newest."""
    length: int = 128
    """Maximum number of tokens in a text; longer sentences of --trees are split into rows."""

    def __post_init__(self):
        check_options(self, {"length": LENGTH, "cases": COUNT})
        if bool(self.text) == (self.trees is not None):
            raise UserError("--text: give either this or --trees")


def main(arguments: Sequence[str]) -> int:
    options = parse(Attention, arguments, "python -m finetune attention")
    if options.trees is not None:
        return _of_trees(options)
    if len(options.text) not in (1, 2):
        raise UserError(f"--text: has {len(options.text)} texts; give one or two")
    check_picture(options.out)
    check_file(options.out)
    tokens, special, shares = maps(options)
    names, lines = ("entropy (nats)", "mean distance", "share on special tokens"), []
    for layer, heads in enumerate(shares, 1):
        for head, figures in enumerate(zip(*of_heads(heads, special), strict=True), 1):
            lines.append({"layer": layer, "head": head} | dict(zip(names, map(float, figures), strict=True)))
    show(lines)
    print(_draw(tokens, shares, options.out))
    return 0


def _of_trees(options: Attention) -> int:
    if options.out.suffix != ".tsv":
        raise UserError(f"--out {options.out}: with --trees this is a table; give a name that ends in .tsv")
    check_file(options.out)
    given = trees(options.trees)
    opened = open_model(options.run, options.step)
    with busy("comparing attention with the trees"):
        lines, left_out = best_heads(opened, given, fitting(options.length, opened.config), options.cases)
    if not lines:
        raise UserError(f"--cases {options.cases}: {options.trees} has no relation with this many words; give fewer")
    show(lines)
    for reason, number in left_out.items():
        if number:
            print(f"left out: {number:,} words {reason}")
    store(lines, options.out)
    print(options.out)
    return 0


def maps(options: Attention) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the tokens, whether each is special bool[tokens], and attention f32[depth, heads, queries, keys]."""
    opened = open_model(options.run, options.step)
    made = opened.tokenizer
    length = fitting(options.length, opened.config)
    (row,) = encoded(made, [options.text], ["--text"], length, isinstance(opened.module, CausalDecoder))
    ((_, shares),) = looked(opened, joined([row]), attention_shares)
    named, size = [made.tokenizer.id_to_token(token) for token in row.tokens], len(row.tokens)
    return named, are_special(made, row.tokens), shares[:, 0, :, :size, :size]


def of_heads(shares: np.ndarray, special: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return means over the queries of attention f32[heads, queries, keys], f32[heads] each: the entropy in nats, the
    distance in tokens, and the share on special tokens bool[keys] (Clark et al. 2019, sections 3 and 5)."""
    place = np.arange(shares.shape[-1])
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(-1).mean(-1)
    distance = (shares * np.abs(place[:, None] - place)).sum(-1).mean(-1)
    return entropy, distance, shares[..., special].sum(-1).mean(-1)


def _draw(tokens: Sequence[str], shares: np.ndarray, out: Path) -> Path:
    """Draw a row of maps for each layer and a column for each head, with queries downwards and keys to the right."""
    from matplotlib.figure import Figure

    depth, heads = shares.shape[:2]
    side = max(1.5, 0.16 * len(tokens)) if len(tokens) <= NAMED else 2.5
    figure = Figure((1 + side * heads, 1 + side * depth), layout="constrained")
    grid = figure.subplots(depth, heads, squeeze=False)
    for (layer, head), axes in np.ndenumerate(grid):
        image = axes.imshow(shares[layer, head], cmap="Blues", vmin=0, vmax=shares.max())
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=7)
        names = tokens if len(tokens) <= NAMED else []
        axes.set_yticks(range(len(names)), names if head == 0 else [""] * len(names), fontsize=6)
        axes.set_xticks(range(len(names)), names if layer == depth - 1 else [""] * len(names), fontsize=6, rotation=90)
        axes.tick_params(length=0)
    figure.colorbar(image, ax=grid, shrink=0.5, label="share")
    return save_picture(figure, {}, 1, out)
