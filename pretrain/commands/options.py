"""Options of the commands whose programs import JAX, which takes seconds: --help and a refusal need none of it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from models.core.ranges import COUNT, SEED, Range
from pretrain.commands.ranges import check_options
from pretrain.generation.settings import Decoding
from pretrain.prompting.prompts import Template
from pretrain.steering.settings import Steering

CACHE = Path.home() / ".cache" / "pretrain-plans"
NUMBER = Range("at least 1 and at most 10000", lambda x: 1 <= x <= 10_000)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a recipe is planned for; the fields that `pretrain run` has too mean the same."""

    topology: str = ""
    """A slice: GENERATION:SHAPE like v5e:4x4, or Google Cloud's name like v5litepod-16. Always to be given."""
    mesh: str | None = None
    """How the devices share the work, like data=4,fsdp=4; slice=2 for two slices. By default what suits the model."""
    microbatches: int = 1
    """Cut each batch into so many parts whose gradients add up."""
    dtype: str | None = None
    """float32 or bfloat16 for activations and products."""
    depth: str | None = None
    """scan or unroll the layers."""
    attention: str | None = None
    """xla, splash, pattern or relative; as of `pretrain run`."""
    remat: str | None = None
    """What the backward pass computes again instead of keeping: none, dots or full."""
    batch_size: int | None = None
    """Rows of every phase's batch, over all devices."""
    sequence_length: int | None = None
    """Tokens per row, in every phase."""
    largest: bool = True
    """Also find the largest batch that fits: two or three more compilations for each phase."""
    cache: Path = CACHE
    """Where the compiler's answers are kept."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """What to show of a recipe's pattern."""

    out: Path
    """The PNG (or PDF, SVG) file to write."""
    length: int | None = None
    """Tokens of a row; by default those of the longest phase."""
    layer: int | None = None
    """This layer alone, from 0."""
    head: int | None = None
    """This head alone, from 0."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue prompts with a causal decoder, or fill the [MASK]s in them with a masked language model."""

    run: Positional[Place]
    """Work directory of the run."""
    prompt: tuple[str, ...] = ()
    """The text to begin with, or several."""
    prompts: Path | None = None
    """A file with one on each line."""
    code: str | None = None
    """A control code of the corpus, to stand before each prompt."""
    number: int | None = None
    """Texts of each prompt, 1 unless given; fillings of each mask, 5 unless given."""
    max_tokens: int = 64
    """At most so many tokens after a prompt."""
    sample: bool = False
    """Draw tokens; otherwise the likeliest is taken."""
    temperature: float | None = None
    """With --sample: divides the logits, 1 unless given."""
    top_k: int = 0
    """With --sample: draw from so many of the likeliest alone; 0 for all."""
    top_p: float = 1.0
    """With --sample: draw from the likeliest alone that have this probability together."""
    repetition_penalty: float = 1.0
    """Makes tokens that stand in the text less likely, where above 1; CTRL's paper takes 1.2."""
    beams: int = 1
    """Beam search with so many."""
    length_penalty: float = 1.0
    """With --beams: above 0 prefers longer texts."""
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
    step: int | None = None
    """Which checkpoint; by default the newest."""
    mesh: str | None = None
    """How this machine's devices share the work, like tensor=4, as of `run`. By default one device does it."""

    def decoding(self, stop: tuple[int, ...]) -> Decoding:
        """UserError for settings that do not go together."""
        if not self.sample and self.temperature is not None:
            raise UserError(f"--temperature {self.temperature:g}: has no effect without --sample; add it")
        if self.beams == 1 and self.length_penalty != 1.0:
            raise UserError(f"--length-penalty {self.length_penalty:g}: has no effect without --beams; give 2 or more")
        if self.sample and self.temperature is not None and not self.temperature > 0:
            raise UserError(
                f"--temperature {self.temperature:g}: must be above 0; leave --sample out for the likeliest"
            )
        temperature = (1.0 if self.temperature is None else self.temperature) if self.sample else 0.0
        fields = {field.name for field in dataclasses.fields(Decoding)} & {*vars(self)}
        return Decoding(**{**{name: getattr(self, name) for name in fields}, "temperature": temperature, "stop": stop})


def parse_generate(arguments: Sequence[str]) -> tuple[Generate, list[str]]:
    """-> (options, prompts). UserError for what is wrong whatever the run is."""
    options = parse(Generate, arguments, "python -m pretrain generate")
    check_options(options, {"seed": SEED} | ({} if options.number is None else {"number": NUMBER}))
    options.decoding(())
    return options, _prompts(options)


def _prompts(options: Generate) -> list[str]:
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
    if not prompts:
        raise UserError("generate: has no prompt; give --prompt TEXT, or --prompts FILE with one on each line")
    return prompts


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Ask a causal decoder questions of a file, each after some of the others with their answers."""

    run: Positional[Place]
    """Work directory of the run."""
    examples: Path
    """A file of JSON lines: {"input", "target"}, or {"input", "choices", "answer"}."""
    shots: tuple[int, ...] = (0,)
    """How many answered examples stand before each question; one row of the table for each number."""
    seed: int = 0
    """Draws them, alike for all models."""
    score: Literal["likelihood", "greedy"] = "likelihood"
    """How likely targets are, or how many of them the likeliest text, token by token, equals."""
    stop: str = "\\n"
    """Greedy text ends before this, in which \\n is a newline."""
    max_tokens: int = 32
    """Greedy text has at most so many tokens."""
    template: Annotated[Template, arg(name="")] = Template()
    out: Path | None = None
    """A JSON file for the figures."""
    step: int | None = None
    """Which checkpoint; by default the newest."""
    mesh: str | None = None
    """How this machine's devices share the work, as of `run`, whose automatic mesh is the default."""


def parse_prompts(arguments: Sequence[str]) -> Prompts:
    """UserError for what is wrong whatever the run is."""
    options = parse(Prompts, arguments, "python -m pretrain prompts")
    if min(options.shots, default=-1) < 0:
        raise UserError("--shots: give numbers from 0 on, as in --shots 0 1 8")
    check_options(options, {"seed": SEED, "max_tokens": COUNT})
    if options.score == "likelihood":
        for option in "stop", "max_tokens":
            if (value := getattr(options, option)) != getattr(Prompts, option):
                raise UserError(f"--{option.replace('_', '-')} {value}: has no effect without --score greedy; add it")
    return options


@dataclasses.dataclass(frozen=True)
class Discriminate:
    """Train a linear layer that tells labelled texts by a run's mean hidden states, to steer what the run writes."""

    run: Positional[Place]
    """Work directory of the run, whose model stays as it is."""
    examples: Path
    """A file of JSON lines: {"text", "label"}."""
    out: Path
    """Folder to write, for `generate --discriminator`: new, empty, or with an earlier one, which is replaced."""
    heldout: float = 0.1
    """Share of the lines that it does not learn from, to measure how well it tells them."""
    seed: int = 0
    """Draws these."""
    step: int | None = None
    """Which checkpoint; by default the newest."""


def parse_discriminate(arguments: Sequence[str]) -> Discriminate:
    """UserError for a number that is out of its range."""
    options = parse(Discriminate, arguments, "python -m pretrain discriminator")
    check_options(options, {"heldout": Range("above 0 and below 1", lambda x: 0 < x < 1), "seed": SEED})
    return options
