"""What all units of work and parts of a corpus share, which is sent to other processes and machines; and the manifest,
which lists the parts. No array is read or moved here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data_pipelines.durable import sync
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Source
from data_pipelines.formats.table import FORMATS
from data_pipelines.formats.values import CODE, KINDS
from data_pipelines.manifest import VERSION, fields_of, fingerprint
from data_pipelines.store.fields import BY_TOKEN, BY_TOKEN_BEFORE, STORED, Field, check_name, token_dtype, valued
from data_pipelines.store.files import describe_files
from data_pipelines.text.encoding import Encoder
from data_pipelines.text.steps import STEPS
from data_pipelines.text.words import fields_of as fields_of_units


@dataclass(frozen=True)
class Job:
    """sources: where documents come from. vocab_size: of the tokenizer. fields: name -> Field, of the whole corpus.
    heldout: share of the documents to hold out for evaluation. parts: number of parts in the plan. steps: the text
    steps that every document goes through. units: (field, segmenter, digest of its lexicon or None) of --units."""

    sources: tuple[Source, ...]
    vocab_size: int
    fields: dict[str, Field]
    heldout: float = 0.01
    parts: int = 1
    steps: tuple[str, ...] = ()
    units: tuple[tuple[str, str, str | None], ...] = ()

    def stored(self, per: str) -> dict[str, Field]:
        """Return the fields that are written per token, sentence or document."""
        return {name: field for name, field in self.fields.items() if field.per == per and field.kept == STORED}


def word_starts_of(encoder: Encoder) -> tuple[str, np.ndarray | None]:
    """Return how word starts are kept, and the table bool [vocab] if they are looked up."""
    if encoder.word_starts is not None:
        return BY_TOKEN, encoder.word_starts
    if encoder.word_ends is not None:
        return BY_TOKEN_BEFORE, encoder.word_ends
    return STORED, None


def planned(
    sources: Sequence[Source], vocab_size: int, word_starts: str, steps: Sequence[str] = (), units: Sequence[str] = ()
) -> dict[str, Field]:
    """Return the fields of a corpus of these sources and text steps. Raises UserError if two of them define a field
    differently. word_starts: how the tokenizer's are kept. units: of --units."""
    languages = sorted({source.language for source in sources})
    segments = dict.fromkeys(chain(*(FORMATS[source.kind].segments(source.options) for source in sources)))
    fields = {
        "tokens": Field(token_dtype(vocab_size)),
        "word_starts": Field("bool", kept=word_starts),
        "sources": Field("uint16", per="document", values=tuple(map(str, sources))),
        "languages": Field("uint16", per="document", values=tuple(languages)),
    } | dict.fromkeys(fields_of_units(units), Field("bool"))
    if list(segments) != ["text"]:
        fields["segments"] = Field("uint8", per="sentence", values=tuple(segments))
    if any("," in language for language in languages):
        each = sorted({*",".join(languages).split(",")})
        fields["segment_languages"] = Field("uint16", per="sentence", values=tuple(each))
    for value in chain(*(source.values for source in sources)):
        fields[value.name] = KINDS[value.kind]._replace(prefix=value.prefix)
    annotators = [(f"--source {source}", FORMATS[source.kind].annotations(source.options)) for source in sources]
    annotators += [(f"--steps {step}", STEPS[step].fields) for step in steps]
    for where, annotations in annotators:
        for name, field in annotations.items():
            if fields.setdefault(check_name(name), field) != field:
                raise UserError(f"{where}: field {name!r} differs in another source or step; prepare it by itself")
    return fields


def write_tables(out: Path, tables: dict[str, np.ndarray]) -> None:
    """Write what is looked up by token or word to OUT/tables/."""
    (out / "tables").mkdir(exist_ok=True)
    for name, table in tables.items():
        np.save(out / "tables" / f"{name}.npy", table)
    sync(out / "tables")


def manifest_of(
    out: Path, summaries: list[dict], job: Job, special: dict[str, int], before: dict | None = None, **described
) -> dict:
    """Return the manifest of the corpus at `out`, which has its tokenizer/ and tables/.   summaries: of the new parts.
    special: role -> token. before: the manifest of the corpus that these are added to. described: further entries."""
    parts = [*(before["parts"] if before else []), *summaries]
    manifest = {
        "version": VERSION,
        "vocab_size": job.vocab_size,
        "special": special,
        "fields": {name: field.to_json() for name, field in _with_values(job.fields, parts, before).items()},
        "tokenizer": describe_files(out, "tokenizer/*"),
        "tables": before["tables"] if before else describe_files(out, "tables/*"),
        "parts": parts,
    }
    state = before and {"fingerprint": before["fingerprint"], "parts": len(before["parts"])}
    history = [*before["history"], state] if before else []
    counts = Problems()
    for part in parts:
        counts.merge(part["counts"])
    identity = {"fingerprint": fingerprint(manifest, [part["fingerprint"] for part in parts]), "history": history}
    return manifest | identity | described | {"counts": counts}


def check_added(before: dict, fields: dict[str, Field]) -> None:
    """Raise UserError if text with these fields cannot be added to the corpus with the manifest `before`."""
    old, new = (
        {name: field._replace(values=None) for name, field in each.items()} for each in (fields_of(before), fields)
    )
    if CODE in old.keys() - new.keys():
        known = fields_of(before)[CODE].values
        raise UserError(f"--append: the corpus has control codes; give --code too, as in --code {known[0]}")
    differing = [f"{name} only in the corpus" for name in old if name not in new]
    differing += [f"{name} only in these sources" for name in new if name not in old]
    differing += [f"{name} differ" for name in old if name in new and old[name] != new[name]]
    if differing:
        raise UserError(
            f"--append: these sources have other fields than the corpus ({', '.join(differing)}); prepare them into "
            "another --out, and train on a mixture"
        )


def _with_values(fields: dict[str, Field], parts: list[dict], before: dict | None) -> dict[str, Field]:
    """Return the fields with the values of all parts, in order; new labels of documents come last, sorted."""
    found, known, labels = {}, fields_of(before) if before else {}, valued(fields)
    for name, field in fields.items():
        if field.values is not None:
            values = [value for part in parts for value in part["values"][name]]
            if name in labels:
                values = [*(known[name].values if known else ()), *sorted(values)]
            field = field._replace(values=tuple(dict.fromkeys(values)))
        found[name] = field
    return found
