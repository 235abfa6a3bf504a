"""Sparse patterns in recipes: said in one line where they cannot be, before anything is compiled."""

import dataclasses

import numpy as np
import pytest
from matplotlib import pyplot

from data_pipelines.errors import UserError
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import Pattern
from models.attention.patterns.table import DRAWN, GLOBAL, WINDOW
from pretrain.__main__ import main
from pretrain.commands.pattern_picture import COLORS, NOTHING, canvas_of
from pretrain.recipe import check
from tests.pretrain import tiny

BIGBIRD = Pattern("bigbird", block=4, random=1)


def sparse(make, pattern=BIGBIRD):
    recipe = make()
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, pattern=pattern))


@pytest.mark.parametrize("make", [tiny.bert, tiny.electra])
def test_a_length_that_the_pattern_cannot_serve(make):
    check(sparse(make))
    with pytest.raises(UserError, match=r"^phases\.0\.length=32.*: model\.pattern\.random=4: .* rows of at least 36"):
        check(sparse(make, dataclasses.replace(BIGBIRD, random=4)))


def test_each_of_electra_s_two_encoders_is_checked():
    """The generator has one head, the discriminator two."""
    pattern = Pattern("longformer", block=8, windows=(8,), dilations=(1, 2))
    with pytest.raises(UserError, match=r"^phases\.0\.length=32 \(model\.generator\): model\.pattern\.dilations="):
        check(sparse(tiny.electra, pattern))


def shown(capsys, *arguments) -> str:
    """What `python -m pretrain pattern` says of these arguments."""
    assert main(["pattern", *map(str, arguments)]) == 0
    return capsys.readouterr().out


SPARSE = ["--model.pattern.name", "bigbird", "--model.pattern.block", 16]


def test_a_pattern_in_words_and_as_a_picture(tmp_path, capsys):
    file = tmp_path / "new" / "pattern.png"
    said = shown(capsys, "bert-tiny", *SPARSE, "--length", 256, "--out", file)
    keys = (2 * 16 + 14 * 8 - 2) / 16 * 16  # blocks: 2 rows see 16, the others 8, those beside global ones 7
    assert said == (
        "bert-tiny: bigbird, rows of 256 tokens in blocks of 16\n"
        f"  2 layers, 2 heads: a query attends to {keys:.1f} keys on average, {keys / 256:.1%} of the row; "
        f"tables of 768 bytes\n{file}\n"
    )
    picture = (pyplot.imread(file)[..., :3] * 255).round().astype(int)
    for kind in COLORS:
        assert (picture == COLORS[kind]).all(-1).sum() > 1000


def test_global_tokens_of_each_row_are_counted_and_the_first_is_drawn(tmp_path, capsys):
    file, windows = tmp_path / "x.png", ["--model.pattern.windows", 32, "--model.pattern.block", 16, "--length", 256]
    said = shown(capsys, "longformer-tiny", *windows, "--objective.globals", 1, "--out", file)
    keys = pairs(Pattern("longformer", block=16, windows=(32,)), 1, 1, 256, chosen=1)[0] / 256
    assert (
        f"a query attends to {keys:.1f} keys" in said and "with 1 global token in each row: its first token, " in said
    )
    picture = (pyplot.imread(file)[..., :3] * 255).round().astype(int)
    assert (picture == COLORS[GLOBAL]).all(-1).sum() > 1000


def test_every_table_is_at_its_layer_and_head():
    tables = [[np.full((3, 3), kind, np.uint8) for kind in row] for row in ((WINDOW, 0), (DRAWN, GLOBAL))]
    tables[0][1][2, 0] = GLOBAL
    canvas = canvas_of(tables)
    size = len(canvas) // 2
    assert size > 300 and canvas.shape == (2 * size + 1, 2 * size + 1, 3)
    at = lambda row, column: tuple(canvas[row, column].tolist())
    assert (at(0, 0), at(size - 1, size - 1)) == (COLORS[WINDOW],) * 2
    assert (at(0, size + 1), at(size - 1, size + 1)) == (NOTHING, COLORS[GLOBAL])
    assert (at(-1, 0), at(-1, -1)) == (COLORS[DRAWN], COLORS[GLOBAL])


def test_of_a_dense_recipe_there_is_nothing_to_draw(tmp_path, capsys):
    cures = {"bert-tiny": "give --model.pattern.name, as in --model.pattern.name bigbird", "xlnet-tiny": "give another"}
    for name, cure in cures.items():
        assert main(["pattern", name, "--out", str(tmp_path / "x.png")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {name}: has no sparse pattern, so there is nothing to draw; {cure}")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--length", 64], "--length 64: model.pattern.random=3: a row has 4 blocks of 16"),
        (["--layer", 2], "--layer 2: the model has 2; give one from 0 to 1"),
        (["--out", "pattern"], "--out pattern: is not an image format; use .png"),
        (["--length", 2**22], "--length 4194304: 2 x 2 tables of 262,144 x 262,144 blocks are too many to draw"),
        (["--objective.globals", 300], "objective.globals=300: must be from 0 (none) to the row's"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["pattern", "bert-tiny", *SPARSE, "--length", 256, "--out", "x.png", *options]
    assert main([str(argument) for argument in given]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
