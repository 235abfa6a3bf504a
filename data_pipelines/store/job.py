"""What all units of work and all parts of a corpus share; it travels to other processes and machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.formats.source import Source
from data_pipelines.formats.table import FORMATS
from data_pipelines.formats.values import KINDS
from data_pipelines.store.fields import BY_TOKEN, BY_TOKEN_BEFORE, STORED, Field, check_name, token_dtype
from data_pipelines.text.encoding import Encoder
from data_pipelines.text.steps import STEPS


@dataclass(frozen=True)
class Job:
    """sources: where documents come from. vocab_size: of the tokenizer. fields: name -> Field, of the whole corpus.
    heldout: share of the documents to keep for evaluation. parts: how many the plan has. steps: the text steps that
    every document goes through."""

    sources: tuple[Source, ...]
    vocab_size: int
    fields: dict[str, Field]
    heldout: float = 0.01
    parts: int = 1
    steps: tuple[str, ...] = ()

    def stored(self, per: str) -> dict[str, Field]:
        """The fields that are written per token, sentence or document."""
        return {name: field for name, field in self.fields.items() if field.per == per and field.kept == STORED}


def word_starts_of(encoder: Encoder) -> tuple[str, np.ndarray | None]:
    """How word starts are kept, and the table bool [vocab] where they are looked up."""
    if encoder.word_starts is not None:
        return BY_TOKEN, encoder.word_starts
    if encoder.word_ends is not None:
        return BY_TOKEN_BEFORE, encoder.word_ends
    return STORED, None


def planned(
    sources: Sequence[Source], vocab_size: int, word_starts: str, steps: Sequence[str] = ()
) -> dict[str, Field]:
    """The fields of a corpus that is to be made of these sources by these text steps. UserError where two differ in
    what a field is. word_starts: how they are kept."""
    languages = sorted({source.language for source in sources})
    segments = dict.fromkeys(chain(*(FORMATS[source.kind].segments(source.options) for source in sources)))
    fields = {
        "tokens": Field(token_dtype(vocab_size)),
        "word_starts": Field("bool", kept=word_starts),
        "sources": Field("uint16", per="document", values=tuple(map(str, sources))),
        "languages": Field("uint16", per="document", values=tuple(languages)),
    }
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
                raise UserError(f"{where}: field {name!r} is another elsewhere; prepare it by itself")
    return fields
