"""`python -m finetune attention`: what each head of a model looks at in a text."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe may name a task)
from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from finetune.tables import show, store
from finetune.texts import fitting
from models.core.ranges import COUNT
from pretrain.commands.common import check_file, check_picture, save_picture
from pretrain.options import check_options
from pretrain.recipe import LENGTH

NAMED = 40  # tokens, up to which they stand beside a map


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Draw the attention of each layer and head over a text, and say how wide, how far and at what it looks; or with
    --trees say which head finds the heads of words, by relation (Clark et al. 2019)."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    out: Path
    """The file to write: PNG, PDF or SVG, with --trees .tsv."""
    text: tuple[str, ...] = ()
    """One text or two."""
    trees: Path | None = None
    """In place of a text a CoNLL-U file of words with their heads and the relations to these."""
    cases: int = 50
    """With --trees, how many words a relation has at least, to have a line."""
    step: int | None = None
    """Which checkpoint; by default the newest."""
    length: int = 128
    """Tokens of a text, at most; longer sentences of --trees are cut into rows."""

    def __post_init__(self):
        check_options(self, {"length": LENGTH, "cases": COUNT})
        if bool(self.text) == (self.trees is not None):
            raise UserError("--text: or --trees says what is read; give one of the two")


def main(arguments: Sequence[str]) -> int:
    options = parse(Attention, arguments, "python -m finetune attention")
    if options.trees is not None:
        return _of_trees(options)
    if len(options.text) not in (1, 2):
        raise UserError(f"--text: are {len(options.text)} texts; give one or two")
    check_picture(options.out)
    check_file(options.out)
    tokens, special, shares = maps(options)
    names = "entropy (nats)", "mean distance", "share on special tokens"
    show(
        [
            {"layer": layer, "head": head} | dict(zip(names, map(float, figures), strict=True))
            for layer, heads in enumerate(shares, 1)
            for head, figures in enumerate(zip(*of_heads(heads, special), strict=True), 1)
        ]
    )
    print(_draw(tokens, shares, options.out))
    return 0


def _of_trees(options: Attention) -> int:
    from finetune.trees import best_heads, trees
    from pretrain.training.opened import open_model

    if options.out.suffix != ".tsv":
        raise UserError(f"--out {options.out}: with --trees it is a table; give a file that ends in .tsv")
    check_file(options.out)
    given = trees(options.trees)
    opened = open_model(options.run, options.step)
    with busy("looking at trees"):
        lines, left_out = best_heads(opened, given, fitting(options.length, opened.config), options.cases)
    if not lines:
        raise UserError(f"--cases {options.cases}: {options.trees} has no relation of so many words; give fewer")
    show(lines)
    for reason, number in left_out.items():
        if number:
            print(f"left out: {number:,} words {reason}")
    store(lines, options.out)
    print(options.out)
    return 0


def maps(options: Attention) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(the text's tokens; bool[tokens], whether they are special; f32[depth, heads, queries, keys])."""
    import jax

    from finetune.inside import are_special, attention_shares, unrolled
    from finetune.rows import TaskRows, joined
    from finetune.texts import encoded
    from pretrain.objectives.protocols import CausalDecoder
    from pretrain.training.opened import open_model

    opened = open_model(options.run, options.step)
    made = opened.tokenizer
    length = fitting(options.length, opened.config)
    (row,) = encoded(made, [options.text], ["--text"], length, isinstance(opened.module, CausalDecoder))
    layout = TaskRows(len(row.tokens), 0, ())
    model = unrolled(opened, layout.spec)
    batch = layout.padded(joined([row.tokens], [row.types], {}), np.zeros(1, int))
    shares = jax.jit(lambda params, batch: attention_shares(model, params, batch))(opened.params, batch)
    named = [made.tokenizer.id_to_token(token) for token in row.tokens]
    return named, are_special(made, row.tokens), np.asarray(shares)[:, 0]


def of_heads(shares: np.ndarray, special: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f32[heads] each, means over the queries of f32[heads, queries, keys]: the entropy in nats, how many tokens away
    what is looked at is, and the share of special tokens bool[keys] (Clark et al. 2019, sections 3 and 5)."""
    place = np.arange(shares.shape[-1])
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(-1).mean(-1)
    distance = (shares * np.abs(place[:, None] - place)).sum(-1).mean(-1)
    return entropy, distance, shares[..., special].sum(-1).mean(-1)


def _draw(tokens: Sequence[str], shares: np.ndarray, out: Path) -> Path:
    """A row of maps for each layer, a column for each head; queries downwards, keys to the right."""
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
