"""How a causal model's texts are chosen."""

import dataclasses

from data_pipelines.errors import UserError
from models.core.ranges import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, Range, check_ranges

TOP_P = Range("above 0 and at most 1", lambda x: 0 < x <= 1)
RANGES = {
    "max_tokens": COUNT,
    "temperature": NOT_NEGATIVE,
    "top_k": COUNT_OR_NONE,
    "top_p": TOP_P,
    "repetition_penalty": POSITIVE,
    "beams": COUNT,
    "length_penalty": Range("from -100 to 100", lambda x: abs(x) <= 100),
}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How texts are chosen, with the meaning and in the order that transformers' `generate` gives these settings.

    max_tokens: at most so many new ones.   temperature: divides the logits; 0 takes the likeliest token.
    top_k: only so many of the likeliest are drawn from; 0 for all.   top_p: only the likeliest that together have
    this probability.   repetition_penalty: divides the positive and multiplies the negative logits of tokens that
    are in the prompt or the text (Keskar et al. 2019, section 4.1, penalises those of the text alone).
    beams: of beam search, 1 for none.   length_penalty: a finished beam's log probability is divided by its length to
    this power.   stop: a text ends with the first of these tokens.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    beams: int = 1
    length_penalty: float = 1.0
    stop: tuple[int, ...] = ()

    def __post_init__(self):
        try:
            check_ranges(self, RANGES, "--")
        except ValueError as error:
            raise UserError(str(error)) from None
        if self.beams > 1 and self.temperature:
            raise UserError(f"--beams {self.beams}: takes the likeliest, --sample draws; leave one of them out")
        for field, unset in ("top_k", 0), ("top_p", 1.0):
            value = getattr(self, field)
            if value != unset and not self.temperature:
                raise UserError(f"--{field.replace('_', '-')} {value:g}: has no effect without --sample; add it")
