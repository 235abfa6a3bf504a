"""A tokenizer with its special tokens by role."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, processors

from data_pipelines.errors import UserError

END_OF_TEXT = "<|endoftext|>"
# role -> its usual names; new tokenizers get the first. A tokenizer may lack any role
ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("<s>", "<bos>"),
    "eos": ("</s>", "<eos>"),
    "eod": ("<eod>", END_OF_TEXT),  # end of document
}
NUMBERED = re.compile(r"<extra_id_(\d+)>")  # T5's sentinels; the role is sentinel_0, ...
LANGUAGE = re.compile(r"([a-z]{2,3})_[A-Z]{2}")  # mBART's languages; the role is language_en, ...


class Made(NamedTuple):
    tokenizer: Tokenizer
    special: dict[str, int]  # role -> id
    config: dict  # entries of tokenizer_config.json other than the roles' tokens


def text_end(special: Mapping[str, int]) -> int | None:
    """Return the token that ends texts: the special token 'eod', else 'sep'; None if there is neither."""
    return special.get("eod", special.get("sep"))


def cloze_tokens(special: Mapping[str, int], setting: str | Path) -> tuple[int, int, int]:
    """Return the tokens cls, sep and mask, by which UniLM writes. UserError, which begins with the setting, without."""
    roles = "cls", "sep", "mask"
    if lacking := [role for role in roles if role not in special]:
        raise UserError(f"{setting}: its tokenizer has no {lacking[0]} token, with which it writes; use another model")
    return tuple(special[role] for role in roles)


def names_in(config: dict) -> dict[str, str]:
    """Return role -> token, from a tokenizer_config.json or a special_tokens_map.json."""
    named = {role: config.get(f"{role}_token") for role in ROLES}
    return {role: token["content"] if isinstance(token, dict) else token for role, token in named.items() if token}


def special_ids(tokenizer: Tokenizer, names: dict[str, str]) -> dict[str, int]:
    """Return role -> id of the roles that have a token, by the given names or else by the usual ones."""
    ids = {}
    for role, usual in ROLES.items():
        candidates = [names[role]] if role in names else usual
        found = [index for name in candidates if (index := tokenizer.token_to_id(name)) is not None]
        if found:
            ids[role] = found[0]
    added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for pattern, role in ((NUMBERED, "sentinel"), (LANGUAGE, "language")):
        matches = [(match, index) for token, index in added.items() if (match := pattern.fullmatch(token))]
        ids |= {f"{role}_{match[1]}": index for match, index in matches}
    return ids


def surround(tokenizer: Tokenizer, single: str, pair: str) -> None:
    """Put special tokens around a text and around two, as in "[CLS] $A [SEP]" and "[CLS] $A [SEP] $B:1 [SEP]:1"."""
    named = {token.split(":")[0] for token in single.split()} - {"$A"}
    ids = [(token, tokenizer.token_to_id(token)) for token in sorted(named)]
    tokenizer.post_processor = processors.TemplateProcessing(single, pair, ids)


def token_ids(made: Made) -> dict[str, int | None]:
    """Return 'bos_token_id', ... -> the id of that token, None if the tokenizer lacks it."""
    ids = {role: made.special.get(role) for role in ("pad", "cls", "sep", "mask")}
    names = names_in(made.config)
    ids |= {role: made.tokenizer.token_to_id(names[role]) if role in names else None for role in ("bos", "eos")}
    return {f"{role}_token_id": index for role, index in ids.items()}


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens by id; '' for an id without a token."""
    ids = tokenizer.get_vocab()
    tokens = [""] * (1 + max(ids.values()))
    for token, index in ids.items():
        tokens[index] = token
    return tokens


def named_tokens(made: Made) -> dict[str, str]:
    """Return the token of each role in ROLES that has one."""
    return {role: made.tokenizer.id_to_token(made.special[role]) for role in ROLES if role in made.special}


def with_end(made: Made) -> Made:
    """Add <|endoftext|> after the vocabulary, to end documents, and to begin and end texts if no other token does.
    Raises UserError if another token ends documents."""
    if "eod" in made.special:
        end = made.tokenizer.id_to_token(made.special["eod"])
        raise UserError(f"--end-of-text: the tokenizer has {end}, which ends documents; leave it out")
    made.tokenizer.add_special_tokens([END_OF_TEXT])
    names = {"bos": END_OF_TEXT, "eos": END_OF_TEXT, **named_tokens(made)}
    return made._replace(special=special_ids(made.tokenizer, names))


def with_sentinels(made: Made, number: int) -> Made:
    """Add T5's `number` sentinels after the vocabulary, in descending order: <extra_id_0> has the last id."""
    made.tokenizer.add_special_tokens([f"<extra_id_{index}>" for index in reversed(range(number))])
    return made._replace(special=special_ids(made.tokenizer, named_tokens(made)))
