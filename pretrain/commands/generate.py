"""`python -m pretrain generate`: continue prompts, write targets of inputs, or fill sentinels or masks."""

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
OF_FILLINGS = "run", "prompt", "prompts", "number", "step", "best"  # options that also apply to filling masks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(OfModel):
    """Continue prompts with a decoder, write targets for them (T5, UniLM), or fill their [MASK]s (BERT, UniLM)."""

    prompt: tuple[str, ...] = ()
    """One or more prompts."""
    prompts: Path | None = None
    """Text file with one prompt per line."""
    code: str | None = None
    """Control code of the corpus to put before each prompt."""
    number: int | None = None
    """Number of texts per prompt (default 1), or of guesses per mask (default 5)."""
    decoding: Annotated[Decoding, arg(name="")] = Decoding()
    stop: tuple[str, ...] = ()
    """Strings that end a text (\\n is a newline); the model's end of a document always ends it."""
    words: Path | None = None
    """Text file of words to steer towards, one per line."""
    discriminator: Path | None = None
    """Folder written by `discriminator`: steer towards one of its labels."""
    label: str | None = None
    """Label to steer towards, with --discriminator."""
    steering: Steering = Steering()
    seed: int = 0
    """Random seed for sampling."""
    mesh: str | None = None
    """Mesh of this machine's devices, like tensor=4, as in `run`; by default one device."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Generate, arguments, "generate", {"seed": SEED, "number": NUMBER})
    if (options.discriminator is None) != (options.label is None):
        raise UserError("--discriminator and --label: give both, a folder and one of its labels, or neither")
    prompts = _prompts(options, has_option="--prompt" in arguments)
    import_models()
    import jax

    from pretrain.generation.decoding import check_whole_rows, fills
    from pretrain.objectives.protocols import ClozeWriter
    from pretrain.training.opened import open_model
    from tpu.mesh import named_mesh, row_mesh

    devices = jax.local_devices()
    mesh = row_mesh(devices, [1]) if options.mesh is None else named_mesh(options.mesh, devices)
    check_whole_rows(options.mesh, mesh)
    opened = open_model(options.run, options.step, mesh, options.best, options.ema)
    both = isinstance(opened.module, ClozeWriter)  # fills masks, and writes after prompts without
    masked = {len(_pieces(opened.tokenizer, prompt)) > 1 for prompt in prompts} if both else set()
    if len(masked) > 1:
        raise UserError("prompts with a [MASK] are filled, and after others a text is written: give only one kind")
    if fills(opened.module) and masked != {False}:
        useless = [*changed(options.decoding), *changed(options, but=(*OF_FILLINGS, "decoding", "steering"))]
        if useless := [*useless, *changed(options.steering, "--steering.")]:
            raise UserError(f"{', '.join(useless)}: no effect on a model that fills masks; leave them out")
        _print_fillings(options, opened, prompts)
    else:
        _print_texts(options, opened, prompts)
    return 0


def _prompts(options: Generate, has_option: bool) -> list[str]:
    """Collect the prompts.   has_option: whether --prompt is on the command line."""
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
        return [""]  # the control code alone is the prompt
    if not prompts and has_option:
        raise UserError(f"generate: --prompt {options.run}: RUN or the prompt is missing; give RUN --prompt TEXT")
    if not prompts:
        raise UserError("generate: no prompt is given; give --prompt TEXT, or --prompts FILE with one per line")
    return prompts


def _print_texts(options: Generate, opened: "Opened", prompts: list[str]) -> None:
    """Print the texts that a decoder or encoder-decoder generates."""
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
    before = targets.before_inputs(opened) + ([] if options.code is None else [prefixes.token(made, options.code)])
    separators = targets.separators(opened, opened.objectives[:1])
    with_sentinels = lambda prompt: made.tokenizer.encode(prompt, add_special_tokens=False).ids
    encoded = [*map(with_sentinels, prompts)] if has_encoder else encode(made, prompts)
    if stops and has_encoder and any(marks & {*tokens} for tokens in encoded):
        raise UserError(f"--stop {options.stop[0]!r}: has no effect on filling sentinels; leave it out")
    if separators and not has_encoder:
        print("each prompt is an input, and its target is printed")
    printed = [[] for _ in encoded] if separators else encoded
    inputs = [before + tokens + separators for tokens in encoded]
    opened.warn_beyond_trained(max(map(len, inputs)) + (0 if has_encoder else decoding.max_tokens - 1))
    doing("compiling, then generating")
    with divided_by(opened.mesh):
        texts = generate(opened.module, opened.params, inputs, decoding, options.seed, number, opened.mesh, program)
    for index, (tokens, continuations) in enumerate(zip(printed, texts, strict=True)):
        for which, more in enumerate(continuations):
            if len(prompts) * len(continuations) > 1:
                print(f"== prompt {index + 1}, text {which + 1}")
            ended = more[:-1] if more[-1] in ends else more
            if not has_encoder or not marks & {*encoded[index]}:
                print(_text(made, tokens, ended, stops))
            elif (filled := in_place(made, encoded[index], ended)) != encoded[index]:
                print(seen(made, filled, prompts[index]))
            else:
                print("the model filled none of the prompt's sentinels; it wrote")
                print(made.tokenizer.decode(more, skip_special_tokens=False))


def _program(options: Generate, opened: "Opened") -> Callable:
    """Choose the program of `generate`, steered or not; print which words are left out as they are several tokens.
    UserError for options that cannot be combined."""
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
            print(f"--words {words}: these are several tokens and are left out: {', '.join(left_out)}")
        aim = aim._replace(words=tokens)
    if discriminator is not None:
        loaded = load(discriminator, opened.params)
        if options.label not in loaded.labels:
            raise UserError(unknown(f"--label: {discriminator} has no label", options.label, loaded.labels))
        label = np.int32(loaded.labels.index(options.label))
        aim = aim._replace(discriminator=(loaded.kernel, loaded.bias, label))
    return steered_program(aim, options.steering)


def sentinels(made: Made) -> set[int]:
    """Return the tokens of a tokenizer that are sentinels."""
    return {token for role, token in made.special.items() if role.startswith("sentinel_")}


def in_place(made: Made, prompt: list[int], more: list[int]) -> list[int]:
    """Replace the sentinels of a prompt by the generated spans; a sentinel without a span stays."""
    marks, spans = sentinels(made), {}
    for token in more:
        if token in marks:
            span = spans.setdefault(token, [])
        elif spans:
            span.append(token)
    return [token for at in prompt for token in (spans.get(at) or [at])]


def seen(made: Made, tokens: list[int], prompt: str) -> str:
    """Decode tokens without special ones but sentinels, around which white space is as in the prompt."""
    unseen = {*made.special.values()} - sentinels(made)
    text = made.tokenizer.decode([token for token in tokens if token not in unseen], skip_special_tokens=False)
    kept = "|".join(re.escape(made.tokenizer.id_to_token(token)) for token in sentinels(made) & {*tokens})
    placed = re.compile(rf"\s*(?:{kept})\s*")
    as_in_prompt = iter(placed.findall(prompt))
    return placed.sub(lambda match: next(as_in_prompt, match[0]), text) if kept else text


def _text(made: Made, prompt: list[int], more: list[int], stop: Sequence[str]) -> str:
    """Decode a prompt and its continuation, which ends before the first stop string in it."""
    begin, text = made.tokenizer.decode(prompt), made.tokenizer.decode(prompt + more)
    ends = [text.find(string, len(begin)) for string in stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def _print_fillings(options: Generate, opened: "Opened", prompts: list[str]) -> None:
    """Print the likeliest tokens for each mask; prompts are read between [CLS] and [SEP]."""
    from pretrain.generation.decoding import fill

    made, mask = opened.tokenizer, opened.tokenizer.special["mask"]
    length = opened.recipe.phases[-1].length if opened.run else getattr(opened.config, "positions", 512)
    sizes = length, options.number or 5, getattr(opened.objective, "globals", 0)
    doing("compiling, then filling masks")
    for prompt in prompts:
        pieces = _pieces(made, prompt)
        if len(pieces) == 1:
            raise UserError(f"--prompt {prompt!r}: this model fills masks; write {MASK} where a word is missing")
        # White space before a mask belongs to the masked word.
        parts = encode(made, [piece.rstrip() for piece in pieces[:-1]] + pieces[-1:])
        row = [made.special["cls"], *parts[0]]
        for part in parts[1:]:
            row += [mask, *part]
        row.append(made.special["sep"])
        for place, guesses in enumerate(fill(opened.module, opened.params, row, mask, *sizes)):
            print(prompt if len(pieces) == 2 else f"{prompt} (mask {place + 1})")
            for token, probability in guesses:
                print(f"  {probability:.4f}  {made.tokenizer.decode([token], skip_special_tokens=False)}")


def _pieces(made: Made, prompt: str) -> list[str]:
    """Return the parts of a prompt between masks, in either spelling."""
    return prompt.replace(made.tokenizer.id_to_token(made.special["mask"]), MASK).split(MASK)


def encode(made: Made, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts as a corpus does: a special token spelled out in a text is plain text."""
    return [tokens.tolist() for tokens in Encoder(made.tokenizer).tokens([*texts])]
