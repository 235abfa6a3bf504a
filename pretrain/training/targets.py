"""Targets of inputs, of a corpus's held-out documents or of a source, and what a model writes in their place."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_pipelines.batches import RowExamples
from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import spread
from data_pipelines.formats import table
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Source
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import Made, text_end
from models.core.parameters import Params
from pretrain.generation.decoding import generate
from pretrain.generation.settings import Decoding
from pretrain.objectives.next_token_prediction import delimiter
from pretrain.objectives.objective import Objective
from pretrain.objectives.protocols import EncoderDecoder
from pretrain.training.opened import Opened
from tpu.mesh import divided_by

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """An input.   tokens: with its control code, without what ends it.   text: of the input.   targets: those that are
    right."""

    tokens: list[int]
    text: str
    targets: tuple[str, ...]


def behind(opened: Opened, objectives: Sequence[Objective]) -> list[int]:
    """What stands between an input and its target: the token that ends an encoder's texts, or of a decoder's rows of
    input and target, where one of the objectives has such, the delimiter; nothing where a model knows no inputs.

    UserError for a tokenizer in which nothing ends an encoder's texts."""
    special = opened.tokenizer.special
    if isinstance(opened.module, EncoderDecoder):
        if (end := text_end(special)) is not None:
            return [end]
        raise UserError(
            f"{opened.source}: its tokenizer has no eod or sep token, one of which has to end inputs; give it one "
            "that has </s> or <sep>"
        )
    found = (delimiter(objective, special) for objective in objectives)
    return [token for token in found if token is not None][:1]


def ends(made: Made) -> set[int]:
    """The tokens that end texts."""
    return {made.special[role] for role in ("eod", "sep") if role in made.special}


def of_corpus(examples: RowExamples, made: Made, limit: int) -> list[Asked]:
    """Documents of rows of input and target, those of their fixed set, but whole; texts are of the stored tokens."""
    tokens = []
    for chosen in examples.fixed(limit):
        for plan, _, documents in examples.located(0, chosen)[0].groups:
            sides = (plan.input_begins, plan.inputs), (plan.target_begins, plan.targets)
            for document in documents:
                read = (plan.part.read(plan.split, "tokens", at[[document]], size[document])[0] for at, size in sides)
                lead = [] if plan.prefixes is None else [int(plan.prefixes[document])]
                tokens.append((lead, *(side.tolist() for side in read)))
    texts = zip(*(made.tokenizer.decode_batch([of[side] for of in tokens]) for side in (1, 2)), strict=True)
    return [Asked(lead + read, text, (target,)) for (lead, read, _), (text, target) in zip(tokens, texts, strict=True)]


def of_source(
    source: Source, made: Made, limit: int, lead: Sequence[int], out: Path | None = None
) -> tuple[list[Asked], list[str]]:
    """At most so many documents, spread over the source, whose first segment is the input and whose others are targets;
    and what is left out, in words.   lead: tokens before each input.   out: a file to be replaced.   UserError where
    there is no document, and where the file is one of the source."""
    names, problems = table.FORMATS[source.kind].segments(source.options), Problems()
    if len(names) < 2:
        has_fields = hasattr(source.options, "fields")
        cure = "a second --field, that of targets" if has_fields else "one of inputs and targets, like jsonl:"
        raise UserError(f"--source {source}: its documents have one text; give {cure}")
    documents: list[dict[str, str]] = []
    parts = [part for unit in table.plan([source], problems) for part in unit]
    files = {Path(one.path).resolve() for part in parts for one in (part, part.other) if one is not None}
    if out is not None and out.resolve() in files:
        raise UserError(f"--out {out}: is a file of --source {source}, which it would replace; give another")
    for part in parts:
        for document in table.read(source, part, problems):
            _add(documents, document)
    whole = [document for document in documents if document.keys() == {*names}]
    said = [f"{problem}: {seen['count']:,}, the first in {seen['first']}" for problem, seen in problems.items()]
    if not whole:
        reason = "; ".join(said) or "no text"
        raise UserError(f"--source {source}: has no document with {' and '.join(names)} ({reason}); give another")
    chosen = [whole[index] for indices in spread(len(whole), limit, len(whole)) for index in indices]
    tokens = Encoder(made.tokenizer).tokens([document[names[0]] for document in chosen])
    return [
        Asked([*lead, *of.tolist()], document[names[0]], tuple(document[name] for name in names[1:]))
        for of, document in zip(tokens, chosen, strict=True)
    ], said


def _add(documents: list[dict[str, str]], document: Document) -> None:
    """A document, or a further piece of the last one."""
    if not document.continues:
        documents.append({})
    for segment in document.segments:
        documents[-1][segment.name] = documents[-1].get(segment.name, "") + segment.text


def begun(
    asked: Sequence[Asked], opened: Opened, objectives: Sequence[Objective], decoding: Decoding
) -> list[list[int]]:
    """The prompts of inputs: of a run cut to what its rows hold, with what stands behind them. It is said how many
    are cut, and how many targets have more tokens than may be written.

    objectives: of which one has such rows.   UserError for a model that knows no inputs and targets, and for rows
    without room.
    """
    made, after = opened.tokenizer, behind(opened, objectives)
    if not after:
        raise UserError(
            f"--write, --source: {opened.source} reads no inputs with targets; take a run of an encoder and a decoder, "
            "or one with objective.layout=input-target"
        )
    room = None
    if opened.run is not None:
        length = opened.recipe.phases[opened.run.phase].length
        room = length - len(after) - (0 if isinstance(opened.module, EncoderDecoder) else decoding.max_tokens)
        if room < 1:
            said = f"leaves no room for an input in rows of {length} tokens"
            raise UserError(f"--max-tokens {decoding.max_tokens}: {said}; give fewer")
        if cut := sum(len(one.tokens) > room for one in asked):
            said = "%s of %s inputs have more than the %s tokens that rows have room for, and are cut"
            log.warning(said, f"{cut:,}", f"{len(asked):,}", f"{room:,}")
    sizes = list(map(len, Encoder(made.tokenizer).tokens([target for one in asked for target in one.targets])))
    if longer := sum(size > decoding.max_tokens for size in sizes):
        said = "%s of %s targets have more than --max-tokens %s tokens, the longest %s"
        log.warning(said, f"{longer:,}", f"{len(sizes):,}", decoding.max_tokens, f"{max(sizes):,}")
    return [[*one.tokens[:room], *after] for one in asked]


def write(opened: Opened, prompts: Sequence[Sequence[int]], decoding: Decoding, seed: int) -> list[str]:
    """What a model writes after each prompt up to the end of a text, with a progress bar on a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("writing targets"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(prompts))
        tell = functools.partial(bar.advance, task)
        return texts_after(opened.module, opened.params, opened.mesh, opened.tokenizer, prompts, decoding, seed, tell)


def texts_after(
    module: nn.Module,
    params: Params,
    mesh: Mesh,
    made: Made,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    seed: int = 0,
    tell: Callable[[int], object] = lambda texts: None,
) -> list[str]:
    """The same of a module, with parameters on a mesh.   tell: as of `generate`."""
    stop = ends(made)
    decoding = dataclasses.replace(decoding, stop=tuple(sorted(stop)))
    with divided_by(mesh):
        found = generate(module, params, prompts, decoding, seed, mesh=mesh, tell=tell)
    return made.tokenizer.decode_batch([text[:-1] if text[-1] in stop else text for (text,) in found])
