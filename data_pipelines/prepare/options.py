"""What `prepare` is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Prepare:
    """Split text into sentences, tokenise it and store it as a corpus. After a kill, the same command continues."""

    source: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """Repeatable. text:DIR_OR_PATTERN, jsonl:PATTERN, parquet:PATTERN, wikiextractor:DIR_OR_PATTERN (files may be .gz
    .zst .bz2 .xz), tfds:NAME:SPLIT, or builtin (documentation that comes with Python)."""
    out: Path
    """The corpus to make: a directory."""
    tokenizer: str = "wordpiece"
    """wordpiece, sentencepiece-unigram, sentencepiece-bpe or wordlevel (whole words by frequency) to train one; or a
    vocab.txt, a tokenizer.json, a spiece.model or a Hugging Face folder to use."""
    vocab_size: int = 30_522
    """Tokens of a trained tokenizer, at most; with SentencePiece exactly."""
    cased: bool = False
    """Keep case and accents, with a trained tokenizer, a vocab.txt or a spiece.model. XLNet's loses accents all the
    same, as its Hugging Face class does."""
    keep_accents: bool = False
    """Keep accents though case is not kept, or with XLNet's special tokens."""
    specials: Literal["xlnet", "albert"] | None = None
    """Whose special tokens a trained SentencePiece has, and where they go; xlnet unless told."""
    language: str = "en"
    """Of the text, for splitting sentences."""
    documents: Literal["file", "blank-line"] = "file"
    """What is a document in a text source: each file, or what blank lines separate."""
    field: str = "text"
    """The field, column or feature with the text in jsonl, parquet and tfds sources."""
    undecodable: Literal["replace", "skip"] = "replace"
    """What to do with a document that is not UTF-8: replace the bad bytes by U+FFFD, or skip the document."""
    heldout: float = 0.01
    """Share of documents, chosen by hash, to keep for evaluation; raised up to 0.05 to reach 50,000 tokens. 0: none."""
    processes: int | None = None
    """How many to use; all cores by default. The result does not depend on it."""
    tfds_dir: str | None = None
    """Where TFDS data sets are, or are downloaded to."""
