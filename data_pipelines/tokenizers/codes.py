"""Control codes (Keskar et al. 2019): tokens that say of a text what it is, and stand before it."""

from collections.abc import Iterable, Mapping

from data_pipelines.errors import UserError, nearest
from data_pipelines.tokenizers.made import Made, vocabulary

ROLE = "code_"  # then the code itself
MARKS = ("</w>", "▁", "Ġ")  # of words, in tokens


def added(made: Made, codes: Iterable[str]) -> Made:
    """The tokenizer with a token for each code after its vocabulary, which no text ever cuts. UserError for a code
    that the vocabulary holds: texts would lose that token to it."""
    codes = list(dict.fromkeys(codes))
    for code in codes:
        if made.tokenizer.token_to_id(code) is not None:
            raise UserError(f"--code {code}: the trained tokenizer has that token for texts; name it anew, [{code}]")
    made.tokenizer.add_special_tokens(codes)
    return made._replace(special=made.special | {ROLE + code: made.tokenizer.token_to_id(code) for code in codes})


def found(made: Made, codes: Iterable[str]) -> Made:
    """The tokenizer with the roles of codes that its vocabulary has. UserError for one that is no token of its own."""
    roles = {}
    for code in codes:
        ids = made.tokenizer.encode(code, add_special_tokens=False).ids
        if len(ids) != 1 or ids[0] == made.special.get("unk"):
            raise UserError(
                f"--code {code}: no token of the tokenizer; the nearest is {_nearest(made, code)!r}: use a code that "
                "is one, or train a tokenizer, which gets a token for each"
            )
        roles[ROLE + code] = ids[0]
    return made._replace(special=made.special | roles)


def check(special: Mapping[str, int], codes: Iterable[str], whose: str) -> None:
    """UserError for a code without a role."""
    known = [role.removeprefix(ROLE) for role in special if role.startswith(ROLE)]
    for code in codes:
        if code not in known:
            said = f"the nearest that it has is {nearest(code, known)!r}" if known else "it has none"
            raise UserError(f"--code {code}: no code of {whose}; {said}")


def token(made: Made, code: str) -> int:
    """Of a code in a run's tokenizer: among the tokens that were added for codes, else in the vocabulary, where they
    are found as `found` does. UserError for another, naming the nearest."""
    tokens = made.tokenizer.get_added_tokens_decoder().items()
    others = {ROLE + one.content: index for index, one in tokens if one.special and index not in made.special.values()}
    if not others:
        return found(made, [code]).special[ROLE + code]
    check(others, [code], "the run's tokenizer")
    return others[ROLE + code]


def _nearest(made: Made, code: str) -> str:
    words = set()
    for token in vocabulary(made.tokenizer):
        for mark in MARKS:
            token = token.replace(mark, "")
        words.add(token)
    return nearest(code, sorted(words - {""}))
