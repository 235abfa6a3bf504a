"""What `prepare` is told, and which of it the corpus depends on."""

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
from data_pipelines.tokenizers.table import KINDS, check_specials

LARGEST_VOCABULARY = 10_000_000  # trainers allocate it before they read
MIB = 1 << 20
MOST_SENTINELS = 10_000
# How it is made, on which the corpus does not depend
MEANS = ("out", "processes", "part", "finish", "append", "runner")
# What --append takes from the command line; the rest is the corpus's own
OF_FORMATS = ("documents", "undecodable", "tfds_dir", "token_column", "label_column")
OF_SOURCES = ("source", "language", "field", "task_prefix", "code", "code_field", "part_size", *OF_FORMATS)


@dataclass(frozen=True)
class Prepare:
    """Tokenise text and store it as a corpus. After a kill, the same command continues."""

    source: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """Repeatable. text:DIR_OR_PATTERN, jsonl:, parquet:, wikiextractor:, fasta:, conll:, parallel:, arrow: (files may
    be .gz .zst .bz2 .xz, on a disk or behind gs://, s3:// or https://), tfds:NAME:SPLIT, or builtin (documentation
    that comes with Python)."""
    out: Place
    """The corpus to make: a directory, or gs://BUCKET/NAME."""
    tokenizer: str = "wordpiece"
    """wordpiece, sentencepiece-unigram, sentencepiece-bpe, wordlevel (whole words by frequency), bpe (of bytes),
    character-bpe (GPT's and CTRL's) or bytes (ByT5's) to train one; or a vocab.txt, a tokenizer.json, a spiece.model, a
    vocab.json with its merges.txt, or a Hugging Face folder to use."""
    vocab_size: int = 30_522
    """Tokens of a trained tokenizer, at most; with SentencePiece exactly."""
    cased: bool = False
    """Keep case and accents, with a trained tokenizer, a vocab.txt or a spiece.model. XLNet's loses accents all the
    same, as its Hugging Face class does."""
    keep_accents: bool = False
    """Keep accents though case is not kept, or with XLNet's special tokens."""
    specials: Literal["xlnet", "albert", "t5", "roberta", "gpt2", "gpt", "ctrl"] | None = None
    """Whose special tokens a trained tokenizer has, and where they go: SentencePiece's xlnet (unless told), albert or
    t5 (which keeps case and accents), bpe's roberta (unless told) or gpt2, character-bpe's gpt (unless told) or
    ctrl."""
    sentinels: int | None = None
    """How many of T5's sentinels, <extra_id_0> and so on, to put after the vocabulary; with --specials t5 100 unless
    told."""
    end_of_text: bool = False
    """Put <|endoftext|>, which ends documents, after the vocabulary of a tokenizer that is given and has no such token,
    as OpenAI's GPT and CTRL."""
    language: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Of the text, for splitting sentences; en unless told. Repeatable: one for each --source, in their order. en,de is
    of two segments, as of parallel sources, whose sentences are then stored with their language."""
    documents: Literal["file", "blank-line"] = "file"
    """What is a document in a text source: each file, or what blank lines separate."""
    field: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """The field, column or feature with the text in jsonl, parquet and tfds sources; text unless told. Repeatable:
    each is then a segment of its name."""
    task_prefix: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to put before each input, where documents are an input and its target: "translate English to German: ".
    Repeatable: one for each --source, in their order, or one for all."""
    code: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A control code, one token of the vocabulary, that stands before each document in rows of next tokens. Repeatable:
    one for each --source, in their order, or one for all; with --code-field all that there are."""
    code_field: str | None = None
    """The field or column of jsonl, parquet, arrow and tfds sources that names each document's code."""
    values: tuple[str, ...] = ()
    """What to keep of each document: fields or columns of records, as labels, of which there are few, or as told: year
    score:float count:int url:text. wikiextractor has id, url, title and revid, fasta id and description, conll id."""
    prefix: str | None = None
    """The label of --values, as year, that stands before each document in rows of next tokens, as a token for each that
    there is; the --code unless told."""
    token_column: int | None = None
    """The column with the token in conll sources, from 1; the first, in CoNLL-U the second, unless told."""
    label_column: int | None = None
    """The column with its label; the last, in CoNLL-U the fourth, unless told. 0: labels are not read."""
    undecodable: Literal["replace", "skip"] = "replace"
    """What to do with a document that is not UTF-8: replace the bad bytes by U+FFFD, or skip the document."""
    steps: tuple[str, ...] = ()
    """What is done to the text before anything else, in the order given: nfc, nfkc, control-characters, tags,
    empty-pairs, short (leaves out documents of fewer than 100 characters)."""
    heldout: float = 0.01
    """Share of documents, chosen by hash, to keep for evaluation; raised up to 0.05 to reach 50,000 tokens. 0: none."""
    tfds_dir: str | None = None
    """Where TFDS data sets are, or are downloaded to."""
    part_size: int = 1024
    """MiB of text in each part of the corpus, about: 1024 are some 256 million tokens."""
    processes: int | None = None
    """How many to use; all cores by default. The result does not depend on it."""
    part: str | None = None
    """I/N, as in 3/64: make every N-th part from the I-th on (I from 0), for job arrays. --finish ends the work."""
    finish: bool = False
    """Write the manifest once all parts are there; says which are missing."""
    append: bool = False
    """Add parts with the text of --source to a finished corpus, with its own tokenizer and settings."""
    runner: Literal["direct", "dataflow", "flink", "spark"] | None = None
    """Make the parts with Apache Beam (`make setup-beam`); what follows -- goes to the runner."""


def settings(options: Prepare) -> dict:
    """What the result depends on, as JSON has it. UserError for what cannot be."""
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
            raise UserError(f"--task-prefix {prefix!r}: has characters that cannot be seen; leave them out")
    check_specials(options.tokenizer, options.specials)
    if options.end_of_text and options.tokenizer in KINDS:
        raise UserError(f"--end-of-text: a trained {options.tokenizer} tokenizer ends documents already; leave it out")
    check_steps(options.steps)
    share(options)
    said = {name: value for name, value in dataclasses.asdict(options).items() if name not in MEANS}
    said |= {"language": languages(options), "field": options.field or ("text",), "sentinels": sentinels(options)}
    values_of(options)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


def sentinels(options: Prepare) -> int:
    """How many a corpus's vocabulary has."""
    return (100 if options.specials == "t5" else 0) if options.sentinels is None else options.sentinels


def share(options: Prepare) -> tuple[int, int] | None:
    """(i, N) of --part i/N; None without it."""
    chosen = [name for name in ("part", "finish", "runner") if getattr(options, name)]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other; give one")
    if options.part is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", options.part)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--part {options.part}: give I/N with I from 0 to N - 1, as in 3/64")
    return int(found[1]), int(found[2])


def languages(options: Prepare) -> tuple[str, ...]:
    """Of each source."""
    given = options.language or ("en",)
    for language in given:
        for code in language.split(","):
            check_language(code)
    return _of_each("language", given, len(options.source))


def _of_each(option: str, given: Sequence, sources: int) -> list:
    """Of each source what an option gives: one for all, or one for each, in their order."""
    if len(given) not in (1, sources):
        said = " ".join(f"--{option} {one}" for one in given)
        raise UserError(f"{said}: {len(given)} for {sources} sources; give one, or one for each --source")
    return [*given] if len(given) == sources else [*given] * sources


def values_of(options: Prepare) -> list[tuple[Value, ...]]:
    """Of each source what is kept of its documents, with their control code, where they have one."""
    named = tuple(parse_value(spec, options.prefix) for spec in options.values)
    names = [value.name for value in named] + [CODE] * bool(options.code)
    for name in names:
        check_name(name, (*TAKEN, *PLANNED))
        if names.count(name) > 1:
            raise UserError(f"--values {' '.join(options.values)}: {name} is there twice; give it once")
    if options.prefix is not None:
        if options.code:
            raise UserError(f"--prefix {options.prefix}: the --code stands before documents; leave one of them out")
        if not any(value.prefix and value.kind == "label" for value in named):
            raise UserError(
                f"--prefix {options.prefix}: is no label of --values; give --values {options.prefix}, without a kind"
            )
    field, known, sources = options.code_field, tuple(dict.fromkeys(options.code)), len(options.source)
    if field is not None and not known:
        raise UserError(f"--code-field {field}: give --code for each code that there is")
    if not known:
        return [named] * sources
    each = [known] * sources if field is not None else [(code,) for code in _of_each("code", options.code, sources)]
    return [(*named, Value(CODE, "label", field, codes, prefix=True)) for codes in each]


def sources_of(settings: dict) -> tuple[Source, ...]:
    """The sources that settings name."""
    choices = {name: settings[name] for name in OF_FORMATS if name in settings}  # an older corpus lacks newer ones
    kept = {name: tuple(settings.get(name, ())) for name in ("code", "values")}
    kept |= {name: settings.get(name) for name in ("code_field", "prefix")}
    of_each = values_of(Prepare(tuple(settings["source"]), Path(), **kept))
    prefixes = _of_each("task-prefix", settings.get("task_prefix") or [""], len(settings["source"]))
    told = zip(settings["source"], settings["language"], of_each, prefixes, strict=True)
    choices |= {"fields": tuple(settings["field"]), "unit": settings["part_size"] * MIB}
    return tuple(
        parse(spec, language, values=of_source, task_prefix=prefix, **choices)
        for spec, language, of_source, prefix in told
    )


def check_taken(options: Prepare, sources: Sequence[Source]) -> None:
    """UserError for an option of formats that is told and that the format of no source has."""
    taken = {field.name for source in sources for field in dataclasses.fields(source.options)}
    default = Prepare((), Path())
    for name in ("field", *OF_FORMATS):
        told = getattr(options, name)
        if told != getattr(default, name) and {"field": "fields"}.get(name, name) not in taken:
            said = " ".join(told) if isinstance(told, tuple) else told
            given = " ".join(f"--source {source}" for source in sources)
            raise UserError(f"--{name.replace('_', '-')} {said}: {given} does not read it; leave it out")


def inherit(options: Prepare, of_corpus: dict) -> Prepare:
    """The options with which parts are added to a corpus: how its sources are read is told, the rest is its own.
    UserError for an option that is told otherwise."""
    default, own = Prepare((), Path()), {}
    for name, has in of_corpus.items():
        if name in OF_SOURCES:
            continue
        told, has = getattr(options, name), tuple(has) if isinstance(has, list) else has
        if told not in (has, getattr(default, name)):
            raise UserError(
                f"--{name.replace('_', '-')} {told}: the corpus has {has}, which --append cannot change; leave it out"
            )
        own[name] = has
    return dataclasses.replace(options, **own)
