"""Draw and describe a recipe's sparse attention pattern."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from data_pipelines.errors import UserError
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import DENSE, Pattern, encoders, on_host
from models.attention.patterns.table import DRAWN, GLOBAL, WINDOW, table
from pretrain.commands.common import check_picture, save_picture
from pretrain.commands.pattern import Shown
from pretrain.recipe import LENGTH, Recipe, check_pattern, rows_of

COLORS = {WINDOW: (76, 114, 176), DRAWN: (221, 132, 82), GLOBAL: (85, 168, 104)}
DRAWN_AS = {"bigbird": "random"}  # label of DRAWN blocks; "further" for other patterns
NOTHING, BETWEEN = (255, 255, 255), (200, 200, 200)  # pairs that are not attended to; lines between tables
MOST = 2**28  # pairs of blocks in one picture, a byte each
LARGEST, USUAL = 2400, 900  # pixels per side: more blocks than LARGEST share pixels; fewer than USUAL get several each


class Grid(NamedTuple):
    """The tables of an encoder.   layers, heads: number -> label; a single entry if all are alike."""

    name: str
    layers: dict[int, str]
    heads: dict[int, str]
    tables: list[list[np.ndarray]]


def show_pattern(recipe: Recipe, shown: Shown) -> None:
    """Write the picture and print its description. UserError if it cannot be drawn."""
    check_picture(shown.out)
    index, phase = max(enumerate(recipe.phases), key=lambda numbered: numbered[1].length)
    length = phase.length if shown.length is None else shown.length
    if not LENGTH.holds(length):
        raise UserError(f"--length {length}: must be {LENGTH.words}")
    sizes_of = encoders(recipe.model)
    pattern = recipe.model.pattern if sizes_of else Pattern()
    if pattern.name == DENSE:
        raise UserError(
            f"{recipe.name}: has no sparse pattern, so there is nothing to draw; "
            f"give {'--model.pattern.name, as in --model.pattern.name bigbird' if sizes_of else 'another recipe'}"
        )
    check_pattern(recipe.model, length, f"--length {length}")
    rows_of(recipe.objective, dataclasses.replace(phase, length=length), f"phases.{index}.")
    depth, heads = (max(sizes) for sizes in zip(*sizes_of.values(), strict=True))
    for option, number, size in ("layer", shown.layer, depth), ("head", shown.head, heads):
        if number is not None and not 0 <= number < size:
            raise UserError(f"--{option} {number}: the model has {size}; give one from 0 to {size - 1}")
    chosen = getattr(recipe.objective, "globals", 0)
    print(f"{recipe.name}: {pattern.name}, rows of {length:,} tokens in blocks of {pattern.block}")
    for name, sizes in sizes_of.items():
        print(f"  {name}{': ' * bool(name)}{_words(pattern, *sizes, length, chosen)}")
    beside = getattr(phase, "globals", 0)
    if beside:
        print(f"  plus {_tokens(beside)} outside the row that attend to all tokens and that all tokens attend to")
    if chosen:
        print(f"  with {_tokens(chosen)} in each row: its first token, which is drawn, then separators")
    grids = [_grid(pattern, name, *sizes, length, beside, chosen, shown) for name, sizes in sizes_of.items()]
    print(_draw(f"{recipe.name}: {pattern.name}", pattern, length, [grid for grid in grids if grid.tables], shown.out))


def _tokens(number: int) -> str:
    return f"{number} global token{'s' * (number > 1)}"


def _words(pattern: Pattern, depth: int, heads: int, length: int, chosen: int) -> str:
    keys = pairs(pattern, depth, heads, length, chosen) / length
    layers = "" if keys.max() == keys.min() else f" ({keys.min():,.1f} to {keys.max():,.1f} by layer)"
    size = sum(array.nbytes for array in jax.tree.leaves(on_host(pattern, depth, heads, length)))
    return (
        f"{depth} layers, {heads} heads: a query attends to {keys.mean():,.1f} keys on average{layers}, "
        f"{keys.mean() / length:.1%} of the row; tables of {size:,} bytes"
    )


def _grid(
    pattern: Pattern, name: str, depth: int, heads: int, length: int, beside: int, chosen: int, shown: Shown
) -> Grid:
    """Make an encoder's tables.   beside, chosen: global tokens before the row, and in it, from its first token on."""
    arrays = jax.tree.leaves(on_host(pattern, depth, heads, length))
    alike = [all((array == array.take([0], axis)).all() for array in arrays) for axis in (0, 1)]
    layers = _listed("layer", shown.layer, depth, alike[0])
    of_heads = _listed("head", shown.head, heads, alike[1])
    before, number = (-(-beside // pattern.block), 0), -(-length // pattern.block)
    if len(layers) * len(of_heads) * number**2 > MOST:
        raise UserError(
            f"--length {length}: {len(layers)} x {len(of_heads)} tables of {number:,} x {number:,} blocks are too many "
            "to draw; give a shorter length, or --layer and --head"
        )

    def with_tokens(kinds: np.ndarray) -> np.ndarray:
        if chosen:
            kinds[0], kinds[:, 0] = np.where(kinds[0], kinds[0], GLOBAL), np.where(kinds[:, 0], kinds[:, 0], GLOBAL)
        return np.pad(kinds, before, constant_values=GLOBAL)

    tables = [[with_tokens(table(pattern, depth, heads, length, layer, head)) for head in of_heads] for layer in layers]
    return Grid(name, layers, of_heads, tables if of_heads else [])


def _listed(option: str, number: int | None, size: int, alike: bool) -> dict[int, str]:
    """Label the layers or heads to draw: number -> label."""
    if number is not None:
        return {number: f"{option} {number}"} if number < size else {}
    if alike:
        return {0: f"all {option}s"}
    return {index: str(index) if index else f"{option} 0" for index in range(size)}


def _draw(title: str, pattern: Pattern, length: int, grids: list[Grid], out: Path) -> Path:
    """Draw one panel per encoder, with a table for each of its layers (downwards) and heads (across)."""
    canvases = [canvas_of(grid.tables) for grid in grids]
    tall, wide = sum(len(canvas) for canvas in canvases), max(canvas.shape[1] for canvas in canvases)
    figure = Figure((wide / 110 + 1.5, tall / 110 + len(grids) + 1), layout="constrained")
    axes = figure.subplots(len(grids), squeeze=False, height_ratios=[len(canvas) for canvas in canvases])
    for panel, grid, canvas in zip(axes[:, 0], grids, canvases, strict=True):
        panel.imshow(canvas, interpolation="nearest")
        panel.set_title(f"{title} {grid.name}".strip(), fontsize="medium")
        panel.set_yticks(_middles(len(canvas), grid.layers), grid.layers.values(), fontsize="small")
        panel.set_xticks(_middles(canvas.shape[1], grid.heads), grid.heads.values(), fontsize="small")
        panel.tick_params(length=0)
    axes[-1, 0].set_xlabel(f"each square: keys (across) by queries (down), {length:,} tokens", fontsize="small")
    names = {WINDOW: "window", DRAWN: DRAWN_AS.get(pattern.name, "further"), GLOBAL: "global"}
    used = {kind for grid in grids for row in grid.tables for blocks in row for kind in np.unique(blocks).tolist()}
    colors = {name: np.array(COLORS[kind]) / 255 for kind, name in names.items() if kind in used}
    marks = {name: Rectangle((0, 0), 1, 1, color=color) for name, color in colors.items()}
    return save_picture(figure, marks, 3, out)


def _middles(size: int, names: Collection) -> np.ndarray:
    """Return the middles of equal parts of an axis, one per name."""
    return (np.arange(len(names)) + 0.5) * size / len(names)


def canvas_of(tables: list[list[np.ndarray]]) -> np.ndarray:
    """Arrange tables, layers down and heads across, with lines between them -> image u8[height, width, 3]."""
    rows, columns, number = len(tables), len(tables[0]), len(tables[0][0])
    share = -(-number * max(rows, columns) // LARGEST)  # blocks per pixel
    across = -(-number // share)
    scale = max(1, USUAL // (across * max(rows, columns)))  # pixels per block
    colors = np.array([NOTHING, *(COLORS[kind] for kind in (WINDOW, DRAWN, GLOBAL))], np.uint8)
    step = across * scale + 1
    canvas = np.full((rows * step - 1, columns * step - 1, 3), BETWEEN, np.uint8)
    for row, of_layer in enumerate(tables):
        for column, kinds in enumerate(of_layer):
            shared = np.pad(kinds, (0, across * share - number)).reshape(across, share, across, share).max((1, 3))
            place = np.s_[row * step : (row + 1) * step - 1, column * step : (column + 1) * step - 1]
            canvas[place] = colors[shared.repeat(scale, 0).repeat(scale, 1)]
    return canvas
