"""Whatever a field of a recipe is annotated as comes back from JSON as it was, or the message says what it must be."""

import dataclasses
import json

import pytest

from data_pipelines.errors import UserError
from pretrain.json_values import build, plain
from pretrain.recipe import from_json, to_json
from tests.pretrain import tiny


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Twin:
    """Has the fields of `Inner`."""

    size: int
    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Outer:
    maybe: Inner | None = None
    either: Inner | Twin = Twin(1)
    number: int | None = None
    text_or_number: str | float = "none"
    several: tuple[Inner | Twin, ...] = ()
    pair: tuple[int, Inner] = (3, Inner(4))
    mixed: tuple[int | Inner | None, ...] = ()
    nested: tuple[tuple[int, str], ...] = ()
    one_or_two: tuple[int] | tuple[int, Inner] = (1,)
    flag: bool = False


VALUES = [
    Outer(),
    Outer(maybe=Inner(2)),
    Outer(either=Inner(2, 0.25)),
    Outer(several=(Twin(1), Inner(1), Twin(2))),
    Outer(pair=(5, Inner(6, 0.125))),
    Outer(mixed=(1, None, Inner(2))),
    Outer(nested=((1, "a"), (2, "b"))),
    Outer(one_or_two=(1, Inner(2))),
]


@pytest.mark.parametrize("value", VALUES)
def test_every_annotation_comes_back_as_it_was(value):
    again = build(Outer, json.loads(json.dumps(plain(Outer, value))), "outer")
    assert again == value and repr(again) == repr(value)


def test_a_whole_number_may_stand_for_a_number():
    assert repr(build(float, 3, "x")) == "3.0"


MISTAKES = [
    ({"number": "7"}, r"outer.number='7': must be a whole number or null$"),
    ({"number": True}, r"outer.number=True: must be a whole number or null"),
    ({"maybe": {"size": 1, "rat": 0.1}}, r"outer.maybe.rat: this version has no field rat; did you mean rate\?"),
    ({"maybe": {"rate": 0.1}}, r"outer.maybe.size is missing; give it a whole number"),
    ({"maybe": 3}, r"outer.maybe=3: must be an object with size, rate or null"),
    ({"either": {"size": 3}}, r"outer.either.kind: unknown kind None; use one of Inner, Twin"),
    ({"pair": [1]}, r"outer.pair=\[1\]: must be a list of 2"),
]


@pytest.mark.parametrize("fields, said", MISTAKES)
def test_a_mistake_is_named_with_its_place_its_value_and_what_it_may_be(fields, said):
    with pytest.raises(UserError, match=said):
        build(Outer, fields, "outer")


def edited(change) -> str:
    fields = json.loads(to_json(tiny.electra()))
    change(fields)
    return json.dumps(fields)


SPANS = {"kind": "sequence-to-sequence"}
RECIPE_MISTAKES = [
    (lambda f: f["model"].update(positions="wide"), r"model.positions='wide': must be a whole number"),
    (lambda f: f["model"].update(types=0), r"model.*types=0: must be at least 1"),
    (lambda f: f["model"].update(family="electa"), r"model.family: .* electa; did you mean electra\?"),
    (lambda f: f["model"].update(family=[]), r"model.family: this version has no \[\]; use one of "),
    (lambda f: f["objective"].update(kind="Guess"), r"objective.kind: this version has no Guess; use one of "),
    (
        lambda f: f["phases"][0].update(schedule={"name": "linear", "peak": -1.0}),
        r"^phases.0.schedule.peak=-1.0: must be at least 0",
    ),
    (
        lambda f: f["phases"][0].update(tasks=[{"name": "a", "objective": SPANS | {"corruption": {"density": 1.5}}}]),
        r"^phases.0.tasks.0.objective.corruption.density=1.5: must be above 0 and below 1",
    ),
    (lambda f: f.update(objective=SPANS | {"corruption": {"span": 0.5}}), r"^objective.corruption.span=0.5: must be"),
    (
        lambda f: f["phases"][0].update(objective=SPANS, target_length=0),
        r"^phases.0.target_length=0: must be at least 1",
    ),
    (lambda f: f.update(stepz=3), r"stepz: this version has no field stepz; did you mean steps\?"),
]


@pytest.mark.parametrize("change, said", RECIPE_MISTAKES)
def test_a_mistake_in_an_edited_recipe_is_one_line(change, said):
    with pytest.raises(UserError, match=said) as error:
        from_json(edited(change))
    assert "\n" not in str(error.value)


def test_recipes_name_registered_families_and_objectives():
    fields = json.loads(to_json(tiny.bert()))
    assert (fields["model"]["family"], fields["objective"]["kind"]) == ("bert", "masked-language-model")
    fields["phases"][0]["objective"] = None  # the recipe's
    assert from_json(json.dumps(fields)) == tiny.bert()


@pytest.mark.parametrize(
    "text, said", [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "is not a recipe")]
)
def test_a_file_that_holds_no_recipe(text, said):
    with pytest.raises(UserError, match=said):
        from_json(text)
