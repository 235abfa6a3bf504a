"""Whether a stored corpus is still what `prepare` wrote."""

from dataclasses import dataclass

from rich.console import Console
from tyro.conf import Positional

from data_pipelines.corpus import Corpus


@dataclass(frozen=True)
class Verify:
    """Hash every file of a corpus, the tokenizer's, too: status 0 where all is as `prepare` wrote it, else 2 and a line
    that names the file."""

    corpus: Positional[str]
    """A directory made by `prepare`, or gs://BUCKET/NAME and the like, which is copied to this host, part by part."""


def verify(options: Verify, console: Console) -> None:
    """UserError at the first file that differs."""
    corpus = Corpus(options.corpus)
    corpus.verify()
    parts, size = len(corpus.parts), sum(file["bytes"] for part in corpus.parts for file in part.entry.files.values())
    said = f"{corpus.source}: {parts} part{'s' * (parts > 1)}, {size / 1e6:,.1f} MB, as prepare wrote them"
    console.print(said, markup=False, soft_wrap=True)
