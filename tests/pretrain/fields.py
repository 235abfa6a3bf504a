"""The fields of a recipe by their dotted paths, and for each another value."""

import dataclasses

from pretrain.storage.run_directory import flat

# Field, or how its path ends -> other values, where it is not twice the number, half of it or the opposite
OTHERS = {
    "vocab_size": [130], "window": [5], "activation": ["relu", "gelu"], "sharing": ["attention"], "groups": [2],
    "pattern.name": ["longformer"], "pattern.block": [2], "windows": [(4,)], "dilations": [(2,)], "cutoffs": [(50, 90)],
    "layout": ["packed-sentences", "segment-pairs"], "masking.random": [0.15], "ngrams": [(1.0, 0.5)],
    "permuting.reuse_len": [10], "permuting.k": [5], "permuting.context": [3], "permuting.perm_size": [4],
    "optimizer.name": ["lamb"], "schedule.name": ["cosine"], "schedule.steps": [15],
    "frozen": [("embeddings", "pooler")], "masking.unit": ["word_starts", "token"],
    "masking.fate": ["span", "unit"],
}  # fmt: skip

OF_STAGES = ("objective", "optimizer", "schedule", "global_base", "frozen", "tasks", "rates")


def fields_of(recipe) -> dict:
    """Dotted path -> value of every field, those of phases by their number but for what a stage changes (`test_stages`
    has these); a field may be a tuple."""
    sizes = [{name: size for name, size in vars(phase).items() if name not in OF_STAGES} for phase in recipe.phases]
    phases = {f"phases.{index}": of for index, of in enumerate(sizes)}
    fields = flat(dataclasses.asdict(dataclasses.replace(recipe, phases=())) | phases)
    return {path: value for path, value in fields.items() if path != "phases"}


def other(path: str, value):
    """Another value of the field at this path."""
    for end, values in OTHERS.items():
        if f".{path}".endswith(f".{end}"):
            return next(new for new in values if new != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    return value / 2 or 0.25 if isinstance(value, float) else f"{value}x"


def replaced(value, path: str, new):
    """A frozen dataclass (or a tuple) with the field at a dotted path changed."""
    if not path:
        return new
    name, _, rest = path.partition(".")
    if isinstance(value, tuple):
        return tuple(replaced(item, rest, new) if str(index) == name else item for index, item in enumerate(value))
    return dataclasses.replace(value, **{name: replaced(getattr(value, name), rest, new)})
