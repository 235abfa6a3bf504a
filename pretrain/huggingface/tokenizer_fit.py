"""What a model needs of its corpus's tokenizer, and what whoever loads its export expects of it, for all families.

A tokenizer writes special tokens around a text and token types beside it. Training puts in its own, so it is only in
the exported model that the tokenizer's reach it.
"""

from data_pipelines.errors import UserError
from data_pipelines.tokenizers.made import Made, token_ids
from models.core.family import HuggingFace
from models.families.registry import family_of


def check_fit(setting: str, config, made: Made) -> None:
    """UserError where a tokenizer gives token types for which a model has no embeddings, or a special token another id
    than all models of a class have it."""
    expected, types = _expected(config), getattr(config, "types", None)
    if expected is None:
        return
    largest = max(made.tokenizer.encode("a").type_ids + made.tokenizer.encode("a", "b").type_ids)
    if types is not None and largest >= types:
        raise UserError(
            f"{setting}: its tokenizer gives token types up to {largest}, which model.types={types} has not; prepare "
            f"it with {expected.prepare}, or give --model.types {largest + 1}"
        )
    for name, index in token_ids(made).items():
        if (needed := expected.constants.get(name, index)) != index:
            raise UserError(
                f"{setting}: its tokenizer has {name}={index}, a {expected.constants['model_type']!r} model has "
                f"{needed}; prepare it with {expected.prepare}"
            )


def misfits(config, made: Made) -> list[str]:
    """What to say where an exported tokenizer will not write texts as the model was trained on them."""
    expected, written = _expected(config), _pair(made)
    if expected is None or expected.pair in (None, written):
        return []
    return [
        f"the tokenizer writes two texts as '{written}', this model is trained on '{expected.pair}': whoever loads its "
        f"export would have to write them so; prepare the corpus with {expected.prepare}"
    ]


def _expected(config) -> HuggingFace | None:
    """What says so, `pair` and `prepare`; None for a family that is not exported."""
    return next(iter(family_of(config).hf.values()), None)


def _pair(made: Made) -> str:
    """Two texts as a tokenizer writes them, in the words of `HuggingFace.pair`."""
    roles = {index: role for role, index in reversed(made.special.items())}  # a token of several: the first
    encoded, said = made.tokenizer.encode("a", "b"), []
    for text, index in zip(encoded.sequence_ids, encoded.ids, strict=True):
        token = roles.get(index, str(index)) if text is None else "AB"[text]
        if text is None or said[-1:] != [token]:  # else of a text of several tokens
            said.append(token)
    return " ".join(said)
