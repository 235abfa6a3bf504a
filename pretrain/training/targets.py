"""Read inputs with their targets from held-out documents or a source, and generate texts for the inputs."""

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
from data_pipelines.examples.text_to_text import opening
from data_pipelines.formats import table
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Source
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import Made, cloze_tokens, text_end
from models.core.parameters import Params
from pretrain.generation.decoding import generate
from pretrain.generation.settings import Decoding
from pretrain.objectives.next_token_prediction import delimiter
from pretrain.objectives.objective import Objective
from pretrain.objectives.protocols import ClozeWriter, EncoderDecoder
from pretrain.training.opened import Opened
from tpu.mesh import divided_by

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """An input with its targets.

    tokens: of the input with its control code, without the token that ends it.   text: the input.   targets: the
    reference texts.
    """

    tokens: list[int]
    text: str
    targets: tuple[str, ...]


def separators(opened: Opened, objectives: Sequence[Objective]) -> list[int]:
    """Return the tokens between an input and its target: an encoder's end token, [SEP] [MASK] for a `ClozeWriter`, or
    the delimiter of a decoder's rows of input and target if one of the objectives has such rows; else none.

    UserError if the tokenizer has no end token for an encoder."""
    special = opened.tokenizer.special
    if isinstance(opened.module, ClozeWriter):
        return [*cloze_tokens(special, opened.source)[1:]]
    if isinstance(opened.module, EncoderDecoder):
        if (end := text_end(special)) is not None:
            return [end]
        raise UserError(f"{opened.source}: its tokenizer has no eod or sep token to end inputs with; use one with </s>")
    delimiters = (delimiter(objective, special) for objective in objectives)
    return [token for token in delimiters if token is not None][:1]


def before_inputs(opened: Opened) -> list[int]:
    """Return the tokens that inputs of an encoder-decoder or a `ClozeWriter` begin with, as in training."""
    special = opened.tokenizer.special
    if isinstance(opened.module, ClozeWriter):
        return [cloze_tokens(special, opened.source)[0]]
    return opening(special, opened.module.start) if isinstance(opened.module, EncoderDecoder) else []


def ends(made: Made) -> set[int]:
    """Return the tokens that end texts."""
    return {made.special[role] for role in ("eod", "sep") if role in made.special}


def of_corpus(examples: RowExamples, made: Made, limit: int) -> list[Asked]:
    """Read the documents of the fixed held-out rows of input and target, but whole; texts are decoded from tokens."""
    tokens = []
    for chosen in examples.fixed(limit):
        for plan, _, documents in examples.located(0, chosen)[0].groups:
            sides = (plan.input_begins, plan.inputs), (plan.target_begins, plan.targets)
            for document in documents:
                read = (plan.part.read(plan.split, "tokens", at[[document]], size[document])[0] for at, size in sides)
                lead = [] if plan.prefixes is None else [int(plan.prefixes[document])]
                tokens.append((lead, *(side.tolist() for side in read)))
    texts = zip(*(made.tokenizer.decode_batch([row[side] for row in tokens]) for side in (1, 2)), strict=True)
    pairs = zip(tokens, texts, strict=True)
    return [Asked(lead + input_tokens, text, (target,)) for (lead, input_tokens, _), (text, target) in pairs]


def of_source(
    source: Source, made: Made, limit: int, lead: Sequence[int], out: Path | None = None
) -> tuple[list[Asked], list[str]]:
    """Read at most `limit` documents, spread over the source: the first segment is the input, the others are targets.
    -> (inputs, messages on what was left out).

    lead: tokens before each input.   out: file that will be replaced. UserError if there is no document, or if `out` is
    a file of the source.
    """
    names, problems = table.FORMATS[source.kind].segments(source.options), Problems()
    if len(names) < 2:
        has_fields = hasattr(source.options, "fields")
        cure = "a second --field for targets" if has_fields else "a source of inputs and targets, like jsonl:"
        raise UserError(f"--source {source}: its documents have only one text; give {cure}")
    documents: list[dict[str, str]] = []
    parts = [part for unit in table.plan([source], problems) for part in unit]
    files = {Path(file.path).resolve() for part in parts for file in (part, part.other) if file is not None}
    if out is not None and out.resolve() in files:
        raise UserError(f"--out {out}: would replace a file of --source {source}; give another file")
    for part in parts:
        for document in table.read(source, part, problems):
            _add(documents, document)
    whole = [document for document in documents if document.keys() == {*names}]
    left_out = [f"{problem}: {seen['count']:,}, the first in {seen['first']}" for problem, seen in problems.items()]
    if not whole:
        reason = "; ".join(left_out) or "no text"
        raise UserError(f"--source {source}: no document has {' and '.join(names)} ({reason}); give another source")
    chosen = [whole[index] for indices in spread(len(whole), limit, len(whole)) for index in indices]
    tokens = Encoder(made.tokenizer).tokens([document[names[0]] for document in chosen])
    return [
        Asked([*lead, *input_tokens.tolist()], document[names[0]], tuple(document[name] for name in names[1:]))
        for input_tokens, document in zip(tokens, chosen, strict=True)
    ], left_out


def _add(documents: list[dict[str, str]], document: Document) -> None:
    """Add a document, or a further piece of the last one."""
    if not document.continues:
        documents.append({})
    for segment in document.segments:
        documents[-1][segment.name] = documents[-1].get(segment.name, "") + segment.text


def make_prompts(
    asked: Sequence[Asked], opened: Opened, objectives: Sequence[Objective], decoding: Decoding
) -> list[list[int]]:
    """Make prompts of inputs, each with the tokens before its target, and truncated to the rows of a run. Warns how
    many are truncated, and how many targets are longer than --max-tokens. UserError if the model does not read inputs
    with targets, or if no input fits into a row."""
    made, first, after = opened.tokenizer, before_inputs(opened), separators(opened, objectives)
    if not after:
        raise UserError(
            f"--write, --source: {opened.source} does not map inputs to targets; use a run of an encoder-decoder, or "
            "one with objective.layout=input-target"
        )
    room = None
    if opened.run is not None:
        length = opened.recipe.phases[opened.run.phase].length
        in_row = 0 if isinstance(opened.module, EncoderDecoder) else decoding.max_tokens
        room = length - len(first) - len(after) - in_row
        if room < 1:
            reason = f"leaves no room for an input in rows of {length} tokens"
            raise UserError(f"--max-tokens {decoding.max_tokens}: {reason}; give fewer")
        if cut := sum(len(one.tokens) > room for one in asked):
            message = "%s of %s inputs are longer than the %s tokens that fit, and are truncated"
            log.warning(message, f"{cut:,}", f"{len(asked):,}", f"{room:,}")
    sizes = list(map(len, Encoder(made.tokenizer).tokens([target for one in asked for target in one.targets])))
    if longer := sum(size > decoding.max_tokens for size in sizes):
        message = "%s of %s targets have more than --max-tokens %s tokens, the longest %s"
        log.warning(message, f"{longer:,}", f"{len(sizes):,}", decoding.max_tokens, f"{max(sizes):,}")
    return [[*first, *one.tokens[:room], *after] for one in asked]


def write(opened: Opened, prompts: Sequence[Sequence[int]], decoding: Decoding, seed: int) -> list[str]:
    """Generate a text after each prompt, with a progress bar on a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("generating targets"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
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
    """Generate a text after each prompt, up to a token that ends texts.   tell: as in `generate`."""
    stop = ends(made)
    decoding = dataclasses.replace(decoding, stop=tuple(sorted(stop)))
    with divided_by(mesh):
        texts = generate(module, params, prompts, decoding, seed, mesh=mesh, tell=tell)
    return made.tokenizer.decode_batch([text[:-1] if text[-1] in stop else text for (text,) in texts])
