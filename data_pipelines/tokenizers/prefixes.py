"""Tokens of values, which stand before documents: control codes (Keskar et al. 2019), years and the like."""

import re
from collections.abc import Iterable, Mapping

from data_pipelines.errors import UserError, nearest
from data_pipelines.formats.values import CODE
from data_pipelines.tokenizers.made import Made, vocabulary

MARK = re.compile("</w>|[▁Ġ]")  # of words, in tokens
MOST = 1000  # values that get a token each


def role_of(name: str, value: str) -> str:
    """Of the token of a value, among the special tokens of a corpus."""
    return f"{name}_{value}"


def added(made: Made, name: str, values: Iterable[str]) -> Made:
    """The tokenizer with a token for each value after its vocabulary, unless it has it, which no text ever cuts: of a
    code itself, of others as [year:1999]. UserError for a code that the vocabulary holds: texts would lose that token
    to it."""
    tokens = {value: value if name == CODE else f"[{name}:{value}]" for value in values}
    for token in tokens.values() if name == CODE else ():
        if made.tokenizer.token_to_id(token) is not None:
            raise UserError(f"--code {token}: the trained tokenizer has that token for texts; name it anew, [{token}]")
    made.tokenizer.add_special_tokens([*tokens.values()])
    roles = {role_of(name, value): made.tokenizer.token_to_id(token) for value, token in tokens.items()}
    return made._replace(special=made.special | roles)


def check_values(name: str, values: Mapping[str, int]) -> Mapping[str, int]:
    """The values. UserError where they are more than may get a token each, or one is no name of a token."""
    if len(values) > MOST:
        raise UserError(
            f"--prefix {name}: there are more than {MOST:,} different values, of which each would be a token; take one "
            "of fewer, such as a year or a class"
        )
    if strange := [value for value in values if not value.isprintable()]:
        raise UserError(
            f"--prefix {name}: {strange[0]!r} has characters that do not print, which no token may have; change it"
        )
    return values


def found(made: Made, codes: Iterable[str]) -> Made:
    """The tokenizer with the roles of codes that its vocabulary has. UserError for one that is no token of its own."""
    roles = {}
    for code in codes:
        ids = made.tokenizer.encode(code, add_special_tokens=False).ids
        if len(ids) != 1 or ids[0] == made.special.get("unk"):
            near = nearest(code, sorted({MARK.sub("", token) for token in vocabulary(made.tokenizer)} - {""}))
            raise UserError(
                f"--code {code}: no token of the tokenizer; the nearest is {near!r}: use a code that is one, or train "
                "a tokenizer, which gets a token for each"
            )
        roles[role_of(CODE, code)] = ids[0]
    return made._replace(special=made.special | roles)


def check(special: Mapping[str, int], name: str, values: Iterable[str], whose: str) -> None:
    """UserError for a value without a token."""
    known = [found.removeprefix(role_of(name, "")) for found in special if found.startswith(role_of(name, ""))]
    for value in values:
        if value not in known:
            said = f"the nearest that it has is {nearest(value, known)!r}" if known else "it has none"
            raise UserError(f"{'--code' if name == CODE else name} {value}: no {name} of {whose}; {said}")


def token(made: Made, code: str) -> int:
    """Of a code in a run's tokenizer: among the tokens that were added for values, else in the vocabulary, where they
    are found as `found` does. UserError for another, naming the nearest."""
    tokens = made.tokenizer.get_added_tokens_decoder().items()
    others = {role_of(CODE, one.content): at for at, one in tokens if one.special and at not in made.special.values()}
    codes = [one for one in others if not re.fullmatch(r"\[\w+:.*\]", one.removeprefix(role_of(CODE, "")))]
    if role_of(CODE, code) not in others and not codes:
        return found(made, [code]).special[role_of(CODE, code)]
    check(others, CODE, [code], "the run's tokenizer")
    return others[role_of(CODE, code)]
