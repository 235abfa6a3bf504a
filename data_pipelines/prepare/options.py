"""Options of `prepare`, and which of them determine the corpus."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data_pipelines.command_line import Place
from data_pipelines.errors import UserError
from data_pipelines.formats.source import Source
from data_pipelines.formats.table import parse
from data_pipelines.formats.values import CODE, Value, parse_value
from data_pipelines.store.fields import PLANNED, TAKEN, check_name
from data_pipelines.text.sentences import check_language
from data_pipelines.text.steps import check_steps
from data_pipelines.text.words import digests
from data_pipelines.tokenizers.table import KINDS, check_specials

LARGEST_VOCABULARY = 10_000_000  # trainers allocate it before they read
MIB = 1 << 20
MOST_SENTINELS = 10_000
# Options that do not change the corpus
MEANS = ("out", "processes", "part", "finish", "append", "runner")
# Options that --append takes from the command line; it takes all others from the corpus
OF_FORMATS = ("documents", "undecodable", "tfds_dir", "token_column", "label_column")
LEXICONS = "lexicons"  # in settings: segmenter of --units -> sha256 of its list
OF_SOURCES = ("source", "language", "field", "task_prefix", "code", "code_field", "part_size", *OF_FORMATS)


@dataclass(frozen=True)
class Prepare:
    """Tokenise text and store it as a corpus. After an interruption, the same command continues."""

    source: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """Text to read (repeatable): text:DIR_OR_PATTERN, jsonl:, parquet:, wikiextractor:, fasta:, conll:, parallel:,
    dialogue: or arrow: (files may be .gz .zst .bz2 .xz, local or behind gs://, s3:// or https://), tfds:NAME:SPLIT, or
    builtin (documentation that comes with Python)."""
    out: Place
    """The corpus to write: a directory, or gs://BUCKET/NAME."""
    tokenizer: str = "wordpiece"
    """Kind of tokenizer to train: wordpiece, sentencepiece-unigram, sentencepiece-bpe, wordlevel (whole words by
    frequency), bpe (byte-level), character-bpe (GPT's and CTRL's) or bytes (ByT5's). Or a tokenizer to use: a
    vocab.txt, a tokenizer.json, a spiece.model, a vocab.json with its merges.txt, or a Hugging Face folder."""
    vocab_size: int = 30_522
    """Size of a trained vocabulary: an upper limit, but with SentencePiece the exact size."""
    cased: bool = False
    """Keep case and accents, with a trained tokenizer, a vocab.txt or a spiece.model. XLNet's tokenizer strips accents
    all the same, as its Hugging Face class does."""
    keep_accents: bool = False
    """Keep accents even in lower-cased text, or with XLNet's special tokens."""
    specials: Literal["xlnet", "albert", "t5", "deberta", "roberta", "gpt2", "gpt", "ctrl"] | None = None
    """The model whose special tokens, and their places, a trained tokenizer gets. With SentencePiece: xlnet (default),
    albert, t5 or deberta (the last two keep case and accents); with bpe: roberta (default) or gpt2; with character-bpe:
    gpt (default) or ctrl."""
    sentinels: int | None = None
    """Number of T5 sentinels (<extra_id_0>, ...) to add after the vocabulary; 100 with --specials t5, else none."""
    end_of_text: bool = False
    """Add <|endoftext|>, which ends documents, after the vocabulary of a given tokenizer that lacks such a token, such
    as OpenAI's GPT's or CTRL's."""
    language: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Language of the text, for splitting sentences (default: en). Repeatable: one for each --source, in order. en,de
    stands for the languages of two segments, as in parallel sources; each sentence is then stored with its language."""
    documents: Literal["file", "blank-line"] = "file"
    """What a document is in text sources: a file, or a block of lines between blank lines."""
    field: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Field, column or feature with the text in jsonl, parquet, arrow and tfds sources (default: text). Repeatable:
    each field is then a segment of that name."""
    task_prefix: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to put before each input when documents are an input and its target: "translate English to German: ".
    Repeatable: one for each --source, in order, or one for all."""
    code: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Control code, a single token that stands before each document in next-token rows. Repeatable: one for each
    --source, in order, or one for all; with --code-field, every code that occurs."""
    code_field: str | None = None
    """Field or column with each document's control code, in jsonl, parquet, arrow and tfds sources."""
    values: tuple[str, ...] = ()
    """Fields or columns to store for each document: labels, of which there are few, unless a kind follows: year
    score:float count:int url:text. wikiextractor has id, url, title and revid; fasta id and description; conll id."""
    prefix: str | None = None
    """A label of --values, such as year, that stands before each document in next-token rows as a token."""
    token_column: int | None = None
    """Column with the token in conll sources, counted from 1. Default: the first; in CoNLL-U the second."""
    label_column: int | None = None
    """Column with the token's label in conll sources. Default: the last; in CoNLL-U the fourth. 0: read no labels."""
    undecodable: Literal["replace", "skip"] = "replace"
    """What to do with a document that is not UTF-8: replace the bad bytes by U+FFFD, or skip the document."""
    similar_words: str | None = None
    """A file with words that may stand for each other, for `--objective.masking.similar`: lines of synonyms, or vectors
    in word2vec's format, text or binary (of which the first 100,000 are read)."""
    similar_words_sha256: Annotated[str | None, tyro.conf.Suppress] = None
    """Of that file, when the command began."""
    steps: tuple[str, ...] = ()
    """Steps that clean the text before anything else, in this order: nfc, nfkc, control-characters, tags, empty-pairs,
    short (leaves out documents of fewer than 100 characters)."""
    units: tuple[str, ...] = ()
    """Where words or other units begin in Chinese text, NAME=SEGMENTER: word=jieba phrase=forward:FILE. Stored as
    NAME_starts, for masking; word replaces the tokenizer's words. forward:FILE and backward:FILE match the longest
    words of a list (one a line); jieba: the package; spaces: the text has spaces between words."""
    heldout: float = 0.01
    """Share of documents to hold out (0: none), chosen by hash; raised up to 0.05 if that is less than 50,000
    tokens."""
    tfds_dir: str | None = None
    """Directory that TFDS data sets are in, or are downloaded to."""
    part_size: int = 1024
    """Approximate MiB of text in each part of the corpus: 1024 are some 256 million tokens."""
    processes: int | None = None
    """Number of processes. Default: one for each core. The result does not depend on it."""
    part: str | None = None
    """I/N, as in 3/64: make every N-th part, from part I (0 to N - 1) on, for job arrays; then run --finish."""
    finish: bool = False
    """Write the manifest once all parts exist; otherwise list the missing parts."""
    append: bool = False
    """Add the text of --source to a finished corpus, as new parts, with the corpus's tokenizer and settings."""
    runner: Literal["direct", "dataflow", "flink", "spark"] | None = None
    """Make the parts with Apache Beam (`make setup-beam`). Arguments after -- go to the runner."""


def settings(options: Prepare) -> dict:
    """Return the options that determine the corpus, as JSON has them. Raises UserError for invalid ones."""
    if not options.source:
        raise UserError("--source is missing; give at least one, such as text:DIR or builtin")
    if not 0 <= options.heldout <= 0.5:
        raise UserError(f"--heldout {options.heldout}: give a share from 0 to 0.5")
    if not 1 <= options.vocab_size <= LARGEST_VOCABULARY:
        raise UserError(f"--vocab-size {options.vocab_size}: use a number from 1 to {LARGEST_VOCABULARY}")
    if not 0 <= (options.sentinels or 0) <= MOST_SENTINELS:
        raise UserError(f"--sentinels {options.sentinels}: give a number from 0 to {MOST_SENTINELS}")
    if options.processes is not None and options.processes < 1:
        raise UserError(f"--processes {options.processes}: give at least 1, or leave it out for all cores")
    if options.part_size < 1:
        raise UserError(f"--part-size {options.part_size}: give a number of MiB, at least 1")
    for code in options.code:
        if not code.strip() or not code.isprintable():
            raise UserError(f"--code {code!r}: is blank or has control characters; give it a name")
    for prefix in options.task_prefix:
        if not prefix.isprintable():
            raise UserError(f"--task-prefix {prefix!r}: has characters that do not print; leave them out")
    check_specials(options.tokenizer, options.specials)
    if options.end_of_text and options.tokenizer in KINDS:
        raise UserError(f"--end-of-text: a trained {options.tokenizer} tokenizer already ends documents; leave it out")
    check_steps(options.steps)
    share(options)
    result = {name: value for name, value in dataclasses.asdict(options).items() if name not in MEANS}
    result |= {LEXICONS: digests(options.units)}
    result |= {"language": languages(options), "field": options.field or ("text",), "sentinels": sentinels(options)}
    values_of(options)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in result.items()}


def sentinels(options: Prepare) -> int:
    """Return the number of sentinels in the corpus's vocabulary."""
    return (100 if options.specials == "t5" else 0) if options.sentinels is None else options.sentinels


def share(options: Prepare) -> tuple[int, int] | None:
    """Return (i, N) of --part i/N, None without it. Raises UserError."""
    chosen = [name for name in ("part", "finish", "runner") if getattr(options, name)]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other; give only one")
    if options.part is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", options.part)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--part {options.part}: give I/N with I from 0 to N - 1, as in 3/64")
    return int(found[1]), int(found[2])


def languages(options: Prepare) -> tuple[str, ...]:
    """Return the language of each source."""
    named = options.language or ("en",)
    for language in named:
        for code in language.split(","):
            check_language(code)
    return _of_each("language", named, len(options.source))


def _of_each(option: str, values: Sequence, sources: int) -> list:
    """Return an option's value for each source: one value for all, or one for each, in order."""
    if len(values) not in (1, sources):
        listed = " ".join(f"--{option} {value}" for value in values)
        raise UserError(f"{listed}: {len(values)} for {sources} sources; give one, or one for each --source")
    return [*values] if len(values) == sources else [*values] * sources


def values_of(options: Prepare) -> list[tuple[Value, ...]]:
    """Return, for each source, the values to store of its documents, with their control code if they have one."""
    named = tuple(parse_value(spec, options.prefix) for spec in options.values)
    names = [value.name for value in named] + [CODE] * bool(options.code)
    for name in names:
        check_name(name, (*TAKEN, *PLANNED))
        if names.count(name) > 1:
            raise UserError(f"--values {' '.join(options.values)}: {name} is given twice; give it once")
    if options.prefix is not None:
        if options.code:
            raise UserError(f"--prefix {options.prefix}: --code also stands before documents; leave one of them out")
        if not any(value.prefix and value.kind == "label" for value in named):
            raise UserError(f"--prefix {options.prefix}: is no label; give --values {options.prefix}, without a kind")
    field, known, sources = options.code_field, tuple(dict.fromkeys(options.code)), len(options.source)
    if field is not None and not known:
        raise UserError(f"--code-field {field}: needs --code; give --code for each code that occurs")
    if not known:
        return [named] * sources
    each = [known] * sources if field is not None else [(code,) for code in _of_each("code", options.code, sources)]
    return [(*named, Value(CODE, "label", field, codes, prefix=True)) for codes in each]


def sources_of(settings: dict) -> tuple[Source, ...]:
    """Return the sources that settings name."""
    choices = {name: settings[name] for name in OF_FORMATS}
    kept = {name: tuple(settings[name]) for name in ("code", "values")}
    kept |= {name: settings[name] for name in ("code_field", "prefix")}
    of_each = values_of(Prepare(tuple(settings["source"]), Path(), **kept))
    prefixes = _of_each("task-prefix", settings["task_prefix"] or [""], len(settings["source"]))
    specs = zip(settings["source"], settings["language"], of_each, prefixes, strict=True)
    choices |= {"fields": tuple(settings["field"]), "unit": settings["part_size"] * MIB}
    return tuple(
        parse(spec, language, values=of_source, task_prefix=prefix, **choices)
        for spec, language, of_source, prefix in specs
    )


def check_taken(options: Prepare, sources: Sequence[Source]) -> None:
    """Raise UserError for an option of a format if no source has that format."""
    taken = {field.name for source in sources for field in dataclasses.fields(source.options)}
    default = Prepare((), Path())
    for name in ("field", *OF_FORMATS):
        value = getattr(options, name)
        if value != getattr(default, name) and {"field": "fields"}.get(name, name) not in taken:
            text = " ".join(value) if isinstance(value, tuple) else value
            named = " ".join(f"--source {source}" for source in sources)
            raise UserError(f"--{name.replace('_', '-')} {text}: {named} does not read it; leave it out")


def inherit(options: Prepare, of_corpus: dict) -> Prepare:
    """Return the options for --append: those of sources from the command line, all others from the corpus. Raises
    UserError if the command line sets one of the others to another value."""
    default, inherited = Prepare((), Path()), {}
    for name, of_default in vars(default).items():
        if name in (*MEANS, *OF_SOURCES):
            continue
        value, stored = getattr(options, name), of_corpus[name]
        stored = tuple(stored) if isinstance(stored, list) else stored
        if value not in (stored, of_default):
            option = f"--{name.replace('_', '-')} {value}"
            raise UserError(f"{option}: the corpus has {stored}, which --append cannot change; leave it out")
        inherited[name] = stored
    now = dataclasses.replace(options, **inherited)
    for spec, digest in digests(now.units).items():
        if digest != of_corpus[LEXICONS][spec]:
            raise UserError(f"--units {spec}: the file has changed since the corpus was made; --append needs the same")
    return now
