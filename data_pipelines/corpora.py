"""Which corpora `--corpus` names: one path, or several with names, as in en=gs://A,zh=DIR."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError

NAMED = re.compile(r"([\w.-]+)=(.*)", re.ASCII | re.DOTALL)


def named(text: str) -> dict[str, str]:
    """{name: path}, in the order given; {"": path} for a single path without a name. UserError for another form."""
    if not NAMED.match(text):
        return {"": text}
    found = {}
    for entry in text.split(","):
        form = NAMED.fullmatch(entry)
        if not form or not form[2]:
            raise UserError(f"--corpus {text}: {entry!r} is no NAME=PATH; give one path, or en=DIR,zh=DIR")
        if form[1] in found:
            raise UserError(f"--corpus {text}: {form[1]} is given twice; give each corpus a name of its own")
        found[form[1]] = form[2]
    return found


def written(paths: dict[str, str]) -> str:
    """What `named` reads so."""
    return ",".join(f"{name}={path}" if name else path for name, path in paths.items())


def open_corpora(text: str, states: Mapping[str, str]) -> dict[str, Corpus]:
    """The corpora that `--corpus` names; states: of some the fingerprint that it is opened with, if it ever had that
    one. UserError where one is none, and unless `check_alike`."""
    opened = {name: Corpus(path) for name, path in named(text).items()}
    for name, corpus in opened.items():
        if states.get(name) in [state["fingerprint"] for state in corpus.manifest.get("history", [])]:
            opened[name] = Corpus(corpus.source, states[name])
    check_alike(opened)
    return opened


def check_alike(corpora: Mapping[str, Corpus]) -> None:
    """Raises UserError unless all corpora have one set of special tokens and, as far as it decides tokens, one
    tokenizer."""
    (first, one), *others = corpora.items()
    for name, other in others:
        ours, theirs = _meaning(one), _meaning(other)
        if differing := [what for what in ours if ours[what] != theirs[what]]:
            raise UserError(
                f"--corpus {first}={one.source},{name}={other.source}: {name} has other {differing[0]} than {first}; "
                "prepare all corpora with one tokenizer, --tokenizer with the first one's tokenizer/ folder, and with "
                "the same codes"
            )


def _meaning(corpus: Corpus) -> dict[str, Any]:
    """What decides which tokens a text has, and what they mean."""
    file = corpus.tokenizer_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None
    written = json.loads(tokenizer.to_str()) if tokenizer else {}
    return {
        "vocabulary": (corpus.vocab_size, tokenizer and tokenizer.get_vocab()),
        "special tokens": corpus.special,
        "normalisation (case, accents, white space)": written.get("normalizer"),
        "splitting into words": written.get("pre_tokenizer"),
        "merges or scores": written.get("model"),
        "added tokens": written.get("added_tokens"),
    }
