"""`python -m pretrain annotate`: stores what a teacher predicts of a corpus, for `run --soft-targets`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from data_pipelines.cloud import is_remote
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from pretrain.commands.arguments import parse_recipe
from pretrain.commands.common import import_models


@dataclasses.dataclass(frozen=True)
class Annotate:
    """Options of `annotate`."""

    corpus: Annotated[str, arg(metavar="PATH")]
    """Folder written by `python -m data_pipelines prepare`, with the teacher's tokenizer."""
    teacher: str
    """Hugging Face folder, or the workdir of a run."""
    out: Path | None = None
    """Folder to write, or to go on with after a kill; by default CORPUS-soft-targets, beside the corpus."""
    k: int = 256
    """Number of tokens to store of a place, those with the highest probabilities; all others count as one. Their
    share of the teacher's probability is printed: below 85%, give more. A smaller vocabulary is stored whole."""


def main(arguments: Sequence[str]) -> int:
    usage = "python -m pretrain annotate gpt2-tiny --corpus DIR --teacher DIR"
    purpose = "Store what a teacher predicts at all places of {}'s rows, once for all students with these rows."
    recipe, options = parse_recipe(arguments, Annotate, usage, purpose)
    if options.out is None and is_remote(options.corpus):
        raise UserError(f"--corpus {options.corpus}: is not on this disk, so soft targets need a folder; give --out")
    corpus = Corpus(options.corpus)
    import_models()
    from pretrain.training.annotating import annotate

    beside = corpus.path.resolve()
    out = options.out or beside.with_name(f"{beside.name}-soft-targets")
    k = min(options.k, corpus.vocab_size)
    parts, made, share = annotate(recipe, options.teacher, corpus, out, k)
    held = f"the {k} tokens of a place have {share:.1%} of the teacher's probability"
    print(f"{out}: {parts} parts, {made} of them made now; {held}")
    return 0
