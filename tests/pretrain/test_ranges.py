"""Every number of every recipe and of the options, at the values that people mistype or compute by mistake."""

import json
import math
import re

import pytest

from data_pipelines.errors import UserError
from pretrain.options import Options
from pretrain.recipe import check, to_json
from pretrain.recipes.registry import RECIPES
from pretrain.storage.run_directory import flat
from tests.pretrain.fields import replaced

HUGE = 10**12  # a whole number beyond any size or count on a device
# Numbers of which 0 makes sense: none of it, or the first one. Nothing else tried here does.
NONE_OR_FIRST = r"dropout|decay|clip|warmup|final|peak|weight|mask|random|memory|len|b1|b2|every|workers|seed|process"
NONE_OR_FIRST += r"|ngrams\.\d|copies|global_blocks|objective\.globals|z_loss|auxiliary|patience|intermediate|stored"
NONE_OR_FIRST += r"|losses\.\d\.steps|relation_heads|own|ema|label_smoothing|permute|infill|delete|rotate"
ZERO = re.compile(rf"(.*[._])?({NONE_OR_FIRST})")
NEVER_ZERO = {"log_every", "checkpoint_every"}


def numbers(recipe):
    """(dotted path, value) of every number of a recipe."""
    fields = flat(json.loads(to_json(recipe)))
    if fields.get("objective.layout") != "denoising":  # which alone reads noises
        fields = {path: value for path, value in fields.items() if not path.startswith("objective.noises.")}
    return {path: value for path, value in fields.items() if type(value) in (int, float)}


def sensible(path, value) -> bool:
    return value == 0 and ZERO.fullmatch(path) is not None and path not in NEVER_ZERO


def tried(value):
    """What is tried in a number's place."""
    return (0, -1, math.nan, math.inf) + ((HUGE,) if type(value) is int else ())


def refusal(make) -> str | None:
    """The line that a mistake is answered with, None where nothing is wrong."""
    try:
        make()
    except (UserError, ValueError) as error:
        return str(error)
    return None


def assert_checked(path, value, said):
    """Accepted where the value makes sense; else one line names the field, the value and what there may be."""
    if sensible(path, value):
        assert said is None, (path, value, said)
        return
    assert said is not None, (path, value)
    field = next(name for name in reversed(path.split(".")) if not name.isdigit())
    assert "\n" not in said and re.search(r"must|is not a multiple", said), said
    assert field in said.replace("-", "_") and re.search(rf"(?<![\d.]){value}", said), (path, value, said)


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_of_a_recipe_is_checked(name):
    found = numbers(RECIPES[name])
    assert len(found) > 15 and {"seed", "steps", "schedule.peak", "phases.0.share"} < set(found)
    for path, value in found.items():
        for other in tried(value):
            assert_checked(path, other, refusal(lambda: check(replaced(RECIPES[name], path, other))))  # noqa: B023


def test_every_number_of_the_options_is_checked():
    given = {"corpus": "c", "workdir": "w", "processes": 2, "process": 1}
    found = {name: value for name, value in vars(Options(**given)).items() if type(value) is int}
    assert len(found) > 10
    for field, value in found.items():
        for other in tried(value):
            assert_checked(field, other, refusal(lambda: Options(**given | {field: other})))  # noqa: B023
