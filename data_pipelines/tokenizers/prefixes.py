"""Tokens of values that stand before documents: control codes (Keskar et al. 2019), years and the like."""

import re
from collections.abc import Iterable, Mapping

from data_pipelines.errors import UserError, nearest
from data_pipelines.formats.values import CODE
from data_pipelines.tokenizers.made import Made, vocabulary

MARK = re.compile("</w>|[▁Ġ]")  # marks of words in tokens
MOST = 1000  # most values, since each gets a token


def role_of(name: str, value: str) -> str:
    """Return the role of a value's token among the special tokens of a corpus."""
    return f"{name}_{value}"


def added(made: Made, name: str, values: Iterable[str]) -> Made:
    """Add a token for each value after the vocabulary, unless it has one: of a code the code itself, of others
    [year:1999]. No text is ever cut into it. Raises UserError for a code that the vocabulary holds for texts."""
    tokens = {value: value if name == CODE else f"[{name}:{value}]" for value in values}
    for token in tokens.values() if name == CODE else ():
        if made.tokenizer.token_to_id(token) is not None:
            raise UserError(f"--code {token}: the trained tokenizer has that token for texts; rename it, as [{token}]")
    made.tokenizer.add_special_tokens([*tokens.values()])
    roles = {role_of(name, value): made.tokenizer.token_to_id(token) for value, token in tokens.items()}
    return made._replace(special=made.special | roles)


def check_values(name: str, values: Mapping[str, int]) -> Mapping[str, int]:
    """Return the values. Raises UserError for too many, and for one that cannot be in a token."""
    if len(values) > MOST:
        raise UserError(
            f"--prefix {name}: there are more than {MOST:,} different values, which would need a token each; use a "
            "label with fewer, such as a year or a class"
        )
    if strange := [value for value in values if not value.isprintable()]:
        raise UserError(f"--prefix {name}: {strange[0]!r} has characters that do not print; change it")
    return values


def found(made: Made, codes: Iterable[str]) -> Made:
    """Give codes that are in the vocabulary their roles. Raises UserError for a code that is not a single token."""
    roles = {}
    for code in codes:
        ids = made.tokenizer.encode(code, add_special_tokens=False).ids
        if len(ids) != 1 or ids[0] == made.special.get("unk"):
            near = nearest(code, sorted({MARK.sub("", token) for token in vocabulary(made.tokenizer)} - {""}))
            raise UserError(
                f"--code {code}: is not a token of the tokenizer; the nearest is {near!r}: use a code that is a token, "
                "or train a tokenizer, which gets a token for each code"
            )
        roles[role_of(CODE, code)] = ids[0]
    return made._replace(special=made.special | roles)


def check(special: Mapping[str, int], name: str, values: Iterable[str], whose: str) -> None:
    """Raise UserError for a value without a token."""
    known = [found.removeprefix(role_of(name, "")) for found in special if found.startswith(role_of(name, ""))]
    for value in values:
        if value not in known:
            hint = f"the nearest one is {nearest(value, known)!r}" if known else "it has none"
            raise UserError(f"{'--code' if name == CODE else name} {value}: is not a {name} of {whose}; {hint}")


def token(made: Made, code: str) -> int:
    """Return the token of a code in a run's tokenizer: a token that was added for values, else one of the vocabulary,
    as `found` looks it up. Raises UserError, naming the nearest code, if there is none."""
    tokens = made.tokenizer.get_added_tokens_decoder().items()
    others = {
        role_of(CODE, entry.content): at for at, entry in tokens if entry.special and at not in made.special.values()
    }
    codes = [entry for entry in others if not re.fullmatch(r"\[\w+:.*\]", entry.removeprefix(role_of(CODE, "")))]
    if role_of(CODE, code) not in others and not codes:
        return found(made, [code]).special[role_of(CODE, code)]
    check(others, CODE, [code], "the run's tokenizer")
    return others[role_of(CODE, code)]
