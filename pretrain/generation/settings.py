"""How a causal model's texts are chosen, and how strongly they are steered."""

import dataclasses
from typing import Annotated, Literal

import tyro

from data_pipelines.errors import UserError
from models.core.ranges import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, SHARE, Range
from pretrain.options import check_options

RANGES = {
    "max_tokens": COUNT,
    "temperature": Range("above 0; leave --sample out for the likeliest", POSITIVE.holds),
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
    "gamma": Range("at least 0 and at most 2", lambda x: 0 <= x <= 2),  # above it float32 loses powers of small norms
    "window": COUNT_OR_NONE,
    "kl_scale": NOT_NEGATIVE,
    "fusion": SHARE,
}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How texts are chosen, with the meaning and in the order that transformers' `generate` gives these settings."""

    max_tokens: int = 64
    """At most so many tokens after a prompt."""
    sample: bool = False
    """Draw tokens; otherwise the likeliest is taken."""
    temperature: float = 1.0
    """With --sample: divides the logits."""
    top_k: int = 0
    """With --sample: draw from so many of the likeliest alone; 0 for all."""
    top_p: float = 1.0
    """With --sample: draw from the likeliest alone that have this probability together."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that stand in the prompt or the text: above 1
    they are less likely; CTRL's paper takes 1.2 (section 4.1; there of the text alone)."""
    no_repeat_ngram_size: int = 0
    """No so many tokens in a row stand twice in a text, which a decoder's prompt is part of; 0: they may."""
    beams: int = 1
    """Beam search with so many."""
    length_penalty: float = 1.0
    """With --beams: a finished beam's log probability is divided by its length to this power; above 0 prefers longer
    texts."""
    early_stopping: bool | Literal["never"] = False
    """With --beams: a search ends when it has as many finished texts as beams (True), when the best beam divided by
    its length now is worse than they are (False), or by the length that makes it best (never)."""
    stop: Annotated[tuple[int, ...], tyro.conf.Suppress] = ()
    """A text ends with the first of these tokens."""

    def __post_init__(self):
        check_options(self, RANGES)
        if self.beams > 1 and self.sample:
            raise UserError(f"--beams {self.beams}: takes the likeliest, --sample draws; leave one of them out")
        drawn, searched = ("temperature", "top_k", "top_p"), ("length_penalty", "early_stopping")
        needs = dict.fromkeys(drawn, (self.sample, "--sample; add it"))
        needs |= dict.fromkeys(searched, (self.beams > 1, "--beams; give 2 or more"))
        for field, (there, cure) in needs.items():
            if not there and (value := getattr(self, field)) != getattr(Decoding, field):
                raise UserError(f"--{field.replace('_', '-')} {value}: has no effect without {cure}")


@dataclasses.dataclass(frozen=True)
class Steering:
    """Strengths of Dathathri et al. 2020, with the defaults of its authors' program."""

    step_size: float = 0.02
    """Of each step along the gradient (alpha in equation 3)."""
    iterations: int = 3
    """Steps before each token."""
    gamma: float = 1.5
    """The power of its norm by which a layer's gradient is divided (equation 3)."""
    window: int = 0
    """Only the keys and values of so many last tokens are changed; 0 for all."""
    kl_scale: float = 0.01
    """Weight of the divergence from the next token's unsteered distribution."""
    fusion: float = 0.9
    """Share of the steered distribution in the geometric mean with the unsteered one (gamma_gm in section 3.3)."""

    def __post_init__(self):
        check_options(self, STEERING_RANGES, "--steering.")
