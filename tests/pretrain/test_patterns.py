"""Sparse patterns in recipes: said in one line where they cannot be, before anything is compiled."""

import dataclasses
import json

import pytest

from data_pipelines.errors import UserError
from models.attention.patterns.pattern import Pattern
from pretrain.__main__ import main
from pretrain.recipe import check, from_json, to_json
from pretrain.recipes.registry import RECIPES
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
    pattern = Pattern("longformer", windows=(8,), dilations=(1, 2))
    with pytest.raises(UserError, match=r"^phases\.0\.length=32 \(model\.generator\): model\.pattern\.dilations="):
        check(sparse(tiny.electra, pattern))


@pytest.mark.parametrize(
    "options, said",
    [
        (["--model.pattern.random", "9"], "phases.0.length=32: model.pattern.random=9: "),
        (["--model.pattern.window", "4"], "phases.0.length=32: model.pattern.window=4: must be odd"),
        (["--model.pattern.global-blocks", "9"], "phases.0.length=32: model.pattern.global_blocks=9: "),
    ],
)
def test_run_says_it_in_one_line(options, said, corpus_path, tmp_path, capsys):
    given = tiny.run_arguments(corpus_path, tmp_path / "run", "--model.pattern.name", "bigbird")
    given += ["--model.pattern.block", 4, *options]
    assert main([str(argument) for argument in given]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_recipes_with_a_pattern_survive_json_and_older_ones_are_dense():
    recipe = sparse(tiny.electra, Pattern("longformer", windows=(8, 16), dilations=(1,)))
    assert from_json(to_json(recipe)) == recipe
    written = json.loads(to_json(RECIPES["bert-base"]))
    del written["model"]["pattern"]
    assert from_json(json.dumps(written)) == RECIPES["bert-base"]
