"""Options of text generation: decoding and steering."""

import dataclasses
from typing import Annotated, Literal

import tyro

from data_pipelines.errors import UserError
from models.core.ranges import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, SHARE, Range
from pretrain.options import check_options

RANGES = {
    "max_tokens": COUNT,
    "temperature": Range("above 0; leave out --sample for greedy decoding", POSITIVE.holds),
    "top_k": COUNT_OR_NONE,
    "top_p": Range("above 0 and at most 1", lambda x: 0 < x <= 1),
    "repetition_penalty": POSITIVE,
    "no_repeat_ngram_size": COUNT_OR_NONE,
    "beams": COUNT,
    "length_penalty": Range("from -100 to 100", lambda x: abs(x) <= 100),
}
STEERING_RANGES = {
    "step_size": NOT_NEGATIVE,
    "iterations": COUNT_OR_NONE,
    "gamma": Range("at least 0 and at most 2", lambda x: 0 <= x <= 2),  # above 2, small norms underflow in float32
    "window": COUNT_OR_NONE,
    "kl_scale": NOT_NEGATIVE,
    "fusion": SHARE,
}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Options of decoding, with the meaning and the order of application of transformers' `generate`."""

    max_tokens: int = 64
    """Maximum number of tokens to generate after a prompt."""
    sample: bool = False
    """Sample tokens instead of taking the likeliest."""
    temperature: float = 1.0
    """With --sample: divide the logits by this."""
    top_k: int = 0
    """With --sample: sample from this many likeliest tokens only; 0 for all."""
    top_p: float = 1.0
    """With --sample: sample from the smallest set of likeliest tokens with this total probability; 1 for all."""
    repetition_penalty: float = 1.0
    """Divide positive logits and multiply negative ones of tokens that already occur in the prompt or the text; above 1
    they become less likely. CTRL's paper uses 1.2 (section 4.1; there for the text only)."""
    no_repeat_ngram_size: int = 0
    """Never repeat an n-gram of this many tokens in a text, including a decoder's prompt; 0 allows repetition."""
    beams: int = 1
    """Number of beams of beam search; 1 for none."""
    length_penalty: float = 1.0
    """With --beams: divide the log probability of a finished beam by its length to this power; above 0 prefers longer
    texts."""
    early_stopping: bool | Literal["never"] = False
    """With --beams: end the search when there are as many finished texts as beams (True), and all of them score better
    than the best open beam, given its length now (False) or its most favourable length (never)."""
    stop: Annotated[tuple[int, ...], tyro.conf.Suppress] = ()
    """Tokens that end a text."""

    def __post_init__(self):
        check_options(self, RANGES)
        if self.beams > 1 and self.sample:
            raise UserError(f"--beams {self.beams}: cannot be combined with --sample; leave one of them out")
        drawn, searched = ("temperature", "top_k", "top_p"), ("length_penalty", "early_stopping")
        needs = dict.fromkeys(drawn, (self.sample, "--sample; add it"))
        needs |= dict.fromkeys(searched, (self.beams > 1, "--beams; give 2 or more"))
        for field, (used, cure) in needs.items():
            if not used and (value := getattr(self, field)) != getattr(Decoding, field):
                raise UserError(f"--{field.replace('_', '-')} {value}: has no effect without {cure}")


@dataclasses.dataclass(frozen=True)
class Steering:
    """Options of steering (Dathathri et al. 2020), with the defaults of its authors' code."""

    step_size: float = 0.02
    """Size of each gradient step (alpha in equation 3)."""
    iterations: int = 3
    """Number of gradient steps before each token."""
    gamma: float = 1.5
    """Exponent of the norm that divides each layer's gradient (equation 3)."""
    window: int = 0
    """Change the keys and values of only this many last tokens; 0 for all."""
    kl_scale: float = 0.01
    """Weight of the KL divergence from the unsteered distribution of the next token."""
    fusion: float = 0.9
    """Weight of the steered distribution in the geometric mean with the unsteered one (gamma_gm in section 3.3)."""

    def __post_init__(self):
        check_options(self, STEERING_RANGES, "--steering.")
