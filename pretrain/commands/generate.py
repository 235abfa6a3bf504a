"""`python -m pretrain generate`: what a decoder writes after prompts, an encoder-decoder for inputs and in place of
their sentinels, or what a model puts in place of masks."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from tyro.conf import arg

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import prefixes
from data_pipelines.tokenizers.made import Made
from models.core.ranges import SEED, Range
from pretrain.commands.common import OfModel, changed, import_models, parse_checked
from pretrain.generation.settings import Decoding, Steering
from pretrain.prompting.prompts import unescaped

if TYPE_CHECKING:
    from pretrain.training.opened import Opened

NUMBER = Range("at least 1 and at most 10000", lambda x: 1 <= x <= 10_000)
MASK = "[MASK]"  # in prompts, whatever the tokenizer calls it
OF_FILLINGS = "run", "prompt", "prompts", "number", "step", "best"  # the options that a masked model has a use for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(OfModel):
    """Continue prompts with a decoder, write targets of inputs (T5), or fill the [MASK]s in them (BERT)."""

    prompt: tuple[str, ...] = ()
    """The text to begin with, or several."""
    prompts: Path | None = None
    """A file with one on each line."""
    code: str | None = None
    """A control code of the corpus, to stand before each prompt."""
    number: int | None = None
    """Texts of each prompt, 1 unless given; fillings of each mask, 5 unless given."""
    decoding: Annotated[Decoding, arg(name="")] = Decoding()
    stop: tuple[str, ...] = ()
    """A text ends before this text, in which \\n is a newline, and where the model ends a document."""
    words: Path | None = None
    """Steer towards these words, one on each line of a file."""
    discriminator: Path | None = None
    """Steer towards a label of what `discriminator` has made in this folder."""
    label: str | None = None
    """Which."""
    steering: Steering = Steering()
    seed: int = 0
    """Of what is drawn."""
    mesh: str | None = None
    """How this machine's devices share the work, like tensor=4, as of `run`. By default one device does it."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Generate, arguments, "generate", {"seed": SEED, "number": NUMBER})
    if (options.discriminator is None) != (options.label is None):
        raise UserError("--discriminator and --label: give both, a folder and one of its labels, or neither")
    prompts = _prompts(options, "--prompt" in arguments)
    import_models()
    import jax

    from pretrain.generation.decoding import check_whole_rows, fills
    from pretrain.training.opened import open_model
    from tpu.mesh import named_mesh, row_mesh

    devices = jax.local_devices()
    mesh = row_mesh(devices, [1]) if options.mesh is None else named_mesh(options.mesh, devices)
    check_whole_rows(options.mesh, mesh)
    opened = open_model(options.run, options.step, mesh, options.best)
    if fills(opened.module):
        if given := _of_texts_alone(options):
            raise UserError(f"{', '.join(given)}: no effect on a model that fills masks; leave out what writes texts")
        _print_fillings(options, opened, prompts)
    else:
        _print_texts(options, opened, prompts)
    return 0


def _prompts(options: Generate, given: bool) -> list[str]:
    """given: whether --prompt is."""
    prompts = list(options.prompt)
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise UserError(f"--prompts {options.prompts}: cannot be read ({error}); give a text file") from None
        for number, line in enumerate(lines, 1):
            if not line.strip() and options.code is None:
                raise UserError(f"--prompts {options.prompts}, line {number}: is blank; write a prompt or remove it")
        prompts += lines
    if not prompts and options.code is not None:
        return [""]  # the text begins with the code alone
    if not prompts and given:
        raise UserError(f"generate: RUN is missing, or {options.run} is no text after --prompt; give RUN --prompt TEXT")
    if not prompts:
        raise UserError("generate: has no prompt; give --prompt TEXT, or --prompts FILE with one on each line")
    return prompts


def _of_texts_alone(options: Generate) -> list[str]:
    """The options given, other than their defaults, that say how texts are written."""
    of_all = changed(options, but=(*OF_FILLINGS, "decoding", "steering"))
    return [*changed(options.decoding), *of_all, *changed(options.steering, "--steering.")]


def _print_texts(options: Generate, opened: "Opened", prompts: list[str]) -> None:
    from pretrain.generation.decoding import generate
    from pretrain.objectives.protocols import EncoderDecoder
    from pretrain.training import targets
    from tpu.mesh import divided_by

    made, has_encoder = opened.tokenizer, isinstance(opened.module, EncoderDecoder)
    marks = sentinels(made)
    stops = [unescaped(written) for written in options.stop]
    ends = {tokens[0] for tokens in encode(made, stops) if len(tokens) == 1}
    ends |= targets.ends(made)
    decoding = dataclasses.replace(options.decoding, stop=tuple(sorted(ends)))
    number, program = options.number or 1, _program(options, opened)
    before = [] if options.code is None else [prefixes.token(made, options.code)]
    behind = targets.behind(opened, opened.objectives[:1])
    with_sentinels = lambda prompt: made.tokenizer.encode(prompt, add_special_tokens=False).ids
    encoded = [*map(with_sentinels, prompts)] if has_encoder else encode(made, prompts)
    if stops and has_encoder and any(marks & {*tokens} for tokens in encoded):
        raise UserError(f"--stop {options.stop[0]!r}: what is put in place of sentinels ends with them; leave it out")
    if behind and not has_encoder:
        print("the run's rows are input and target: each prompt is an input, after which its target is written")
    printed = [[] for _ in encoded] if behind else encoded
    begun = [before + tokens + behind for tokens in encoded]
    opened.warn_beyond_trained(max(map(len, begun)) + (0 if has_encoder else decoding.max_tokens - 1))
    doing("compiling, then writing")
    with divided_by(opened.mesh):
        texts = generate(opened.module, opened.params, begun, decoding, options.seed, number, opened.mesh, program)
    for index, (tokens, found) in enumerate(zip(printed, texts, strict=True)):
        for which, more in enumerate(found):
            if len(prompts) * len(found) > 1:
                print(f"== prompt {index + 1}, text {which + 1}")
            ended = more[:-1] if more[-1] in ends else more
            if not has_encoder or not marks & {*encoded[index]}:
                print(_text(made, tokens, ended, stops))
            elif (filled := in_place(made, encoded[index], ended)) != encoded[index]:
                print(seen(made, filled, prompts[index]))
            else:
                print("nothing was written for the prompt's sentinels; what was written is")
                print(made.tokenizer.decode(more, skip_special_tokens=False))


def _program(options: Generate, opened: "Opened") -> Callable:
    """What `generate` takes for its program; words of several tokens are named in a line. UserError for options that
    do not go together."""
    from models.blocks.embeddings import padded_vocab
    from pretrain.generation.loop import program
    from pretrain.steering.discriminator import load
    from pretrain.steering.loop import Aim, bag, steered_program

    aim, words, discriminator = Aim(), options.words, options.discriminator
    if words is None and discriminator is None:
        if options.steering != Steering():
            raise UserError("--steering: has no effect without --words or --discriminator; give one of them")
        return program
    if words is not None:
        tokens, left_out = bag(words, Encoder(opened.tokenizer.tokenizer), padded_vocab(opened.config.vocab_size))
        if left_out:
            print(f"left out of --words {words}, as they are several tokens: {', '.join(left_out)}")
        aim = aim._replace(words=tokens)
    if discriminator is not None:
        found = load(discriminator, opened.params)
        if options.label not in found.labels:
            raise UserError(unknown(f"--label: {discriminator} has no label", options.label, found.labels))
        label = np.int32(found.labels.index(options.label))
        aim = aim._replace(discriminator=(found.kernel, found.bias, label))
    return steered_program(aim, options.steering)


def sentinels(made: Made) -> set[int]:
    """Their tokens."""
    return {token for role, token in made.special.items() if role.startswith("sentinel_")}


def in_place(made: Made, prompt: list[int], more: list[int]) -> list[int]:
    """A prompt with what was written for its sentinels in their place; one that nothing was written for stays."""
    marks, found = sentinels(made), {}
    for token in more:
        if token in marks:
            span = found.setdefault(token, [])
        elif found:
            span.append(token)
    return [token for at in prompt for token in (found.get(at) or [at])]


def seen(made: Made, tokens: list[int], prompt: str) -> str:
    """The text of tokens; of special ones sentinels alone are in it, with the white space around them that the prompt
    has, which a tokenizer may drop."""
    unseen = {*made.special.values()} - sentinels(made)
    text = made.tokenizer.decode([token for token in tokens if token not in unseen], skip_special_tokens=False)
    kept = "|".join(re.escape(made.tokenizer.id_to_token(token)) for token in sentinels(made) & {*tokens})
    placed = re.compile(rf"\s*(?:{kept})\s*")
    there = iter(placed.findall(prompt))
    return placed.sub(lambda found: next(there, found[0]), text) if kept else text


def _text(made: Made, prompt: list[int], more: list[int], stop: Sequence[str]) -> str:
    """A prompt and what was written after it, up to the first of some texts there."""
    begin, text = made.tokenizer.decode(prompt), made.tokenizer.decode(prompt + more)
    ends = [text.find(one, len(begin)) for one in stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def _print_fillings(options: Generate, opened: "Opened", prompts: list[str]) -> None:
    """Rows as the model read them: between the tokens that begin and end one."""
    from pretrain.generation.decoding import fill

    made, mask = opened.tokenizer, opened.tokenizer.special["mask"]
    length = opened.recipe.phases[-1].length if opened.run else getattr(opened.config, "positions", 512)
    sizes = length, options.number or 5, getattr(opened.objective, "globals", 0)
    doing("compiling, then filling masks")
    for prompt in prompts:
        pieces = prompt.replace(made.tokenizer.id_to_token(mask), MASK).split(MASK)
        if len(pieces) == 1:
            raise UserError(f"--prompt {prompt!r}: this model fills masks; write {MASK} where a word is missing")
        # White space before a mask belongs to the word there.
        parts = encode(made, [piece.rstrip() for piece in pieces[:-1]] + pieces[-1:])
        row = [made.special["cls"], *parts[0]]
        for part in parts[1:]:
            row += [mask, *part]
        row.append(made.special["sep"])
        for place, found in enumerate(fill(opened.module, opened.params, row, mask, *sizes)):
            print(prompt if len(pieces) == 2 else f"{prompt} (mask {place + 1})")
            for token, probability in found:
                print(f"  {probability:.4f}  {made.tokenizer.decode([token], skip_special_tokens=False)}")


def encode(made: Made, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts, as those of a corpus: special tokens that a text spells are plain text."""
    return [tokens.tolist() for tokens in Encoder(made.tokenizer).tokens([*texts])]
