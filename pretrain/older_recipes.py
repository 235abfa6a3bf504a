"""Recipe files of earlier versions, as this one writes them."""

from typing import Any

from data_pipelines.errors import UserError

# Fields that there were -> what they say by their value, as fields of now
OF_BEFORE = {
    "pair_head": lambda value: {},  # the objective says which heads a model has
    "whole_word": lambda value: {"unit": "word_starts" if value else "token"},
}


def renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Any object of a recipe's JSON, as `json.loads` hands it to its `object_hook`, with fields of now."""
    found = {}
    for name, value in fields.items():
        found |= OF_BEFORE[name](value) if name in OF_BEFORE else {name: value}
    return found


def brought_up_to_date(fields: dict[str, Any]) -> dict[str, Any]:
    """A recipe's JSON object with what has another name or place now. UserError for what no version has written."""
    schedule = fields.get("schedule")
    if not isinstance(schedule, dict) or "stretches" not in schedule:
        return fields
    kept = {name: value for name, value in schedule.items() if name not in ("stretches", "from_here")}
    fields, stretches = fields | {"schedule": kept}, schedule["stretches"]
    try:
        return _with_phases(fields, stretches) if stretches else fields
    except (KeyError, TypeError, IndexError, ZeroDivisionError):
        raise UserError("schedule.stretches: is damaged; restore the file from a copy") from None


def _with_phases(fields: dict[str, Any], stretches: list[dict[str, Any]]) -> dict[str, Any]:
    """A run that was made longer had stretches of its schedule, each from a step on: now its last phase is several."""
    *before, last = fields["phases"]
    steps, schedule = fields["steps"], fields["schedule"]
    ends = [*(stretch["since"] for stretch in stretches), steps]
    begin = steps - last["share"] * steps
    if ends[0] <= begin:
        raise UserError("schedule.stretches: begin before the last phase; go on with the version that wrote them")
    phases = [last | {"share": (ends[0] - begin) / steps}]
    for stretch, first, end in zip(stretches, ends, ends[1:], strict=False):
        rate, lowest = stretch["rate"], schedule["final"] * schedule["peak"]
        name = {"constant": "constant", "decay": "linear"}[stretch["kind"]]
        further = {"name": name, "peak": rate, "warmup": 0.0, "final": min(lowest / rate, 1.0)}
        phases.append(last | {"share": (end - first) / steps, "schedule": further})
    return fields | {"phases": [*before, *phases], "schedule": schedule | {"steps": stretches[0]["before"]}}
