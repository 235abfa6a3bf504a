"""Losses between a student and its teacher, each a sum over tokens, pairs of tokens or rows.

Soft targets: Hinton et al. 2015 (arXiv:1503.02531), section 2. Hidden states, embeddings and attention scores: Jiao et
al. 2020 (TinyBERT, arXiv:1909.10351), equations 7 to 9. Attention probabilities by KL: Sun et al. 2020 (MobileBERT,
arXiv:2004.02984), equation 2. Relations of values: Wang et al. 2020 (MiniLM, arXiv:2002.10957), equation 7; of queries
and keys: Wang et al. 2021 (arXiv:2012.15828), equation 6. Flow of solution procedure: Yim et al. 2017, equation 1.
Neuron selectivity: Huang & Wang 2017 (arXiv:1707.01219), section 4.1, with the polynomial kernel.
"""

import dataclasses
import itertools
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.blocks.products import table_scores
from models.core.inside import HIDDEN, PROJECTED
from models.core.ranges import COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, check_ranges
from models.core.sharding import parts_of

LOGITS, EMBEDDINGS, LAYERS_HIDDEN, SCORES, ATTENTION = "logits", "embeddings", "hidden", "scores", "attention"
RELATIONS = {"queries": 0, "keys": 1, "values": 2}  # place among what attention projects
KL, CROSS_ENTROPY, MSE, COSINE, FLOW, NEURONS = "kl", "cross-entropy", "mse", "cosine", "flow", "neurons"
MEASURES = {
    LOGITS: (KL, CROSS_ENTROPY, MSE),
    EMBEDDINGS: (MSE, COSINE),
    LAYERS_HIDDEN: (MSE, COSINE, FLOW, NEURONS),
    SCORES: (MSE,),
    ATTENTION: (KL, CROSS_ENTROPY, MSE),
    **dict.fromkeys(RELATIONS, (KL,)),
}
LOGITS_AT_ONCE = 2**26  # of a decoder, on a device
NAMED = EVERY, FIRST, LAST, TOP = "skip", "first", "last", "top"


@dataclasses.dataclass(frozen=True)
class Match:
    """A loss between a student and its teacher; its name in metrics is OF_BY."""

    # What is compared: logits, embeddings, hidden, scores, attention (probabilities), or relations between the
    # positions' queries, keys or values
    of: str = LOGITS
    by: str = KL  # how: kl, cross-entropy, mse, cosine; of hidden states also flow or neurons
    # The student's layers and the teacher's: skip (every n-th), first, last, top (the last of each), or pairs 1:3 2:6
    layers: str = EVERY
    weight: float = 1.0  # factor in the loss
    temperature: float = 1.0  # of soft targets; their loss is multiplied with its square
    weight_end: float | None = None  # the weight from step `steps` on, up to which it changes linearly
    temperature_end: float | None = None  # the same of the temperature
    steps: int = 0  # of these changes
    relation_heads: int = 0  # of relations: number of heads, by default the model's

    def __post_init__(self):
        if self.by not in MEASURES.get(self.of, ()):
            known = "; ".join(f"{of} by {', '.join(measures)}" for of, measures in MEASURES.items())
            raise ValueError(f"losses: there is no {self.of!r} by {self.by!r}; use {known}")
        ranges = dict.fromkeys(("steps", "relation_heads"), COUNT_OR_NONE)
        ranges |= {"weight": NOT_NEGATIVE, "temperature": POSITIVE}
        ends = {"weight_end": NOT_NEGATIVE, "temperature_end": POSITIVE}
        given = {name: allowed for name, allowed in ends.items() if getattr(self, name) is not None}
        check_ranges(self, ranges | given, "losses.")
        if bool(given) != bool(self.steps):
            raise ValueError(f"losses: {self.name} needs steps with the end of its weight or temperature, or neither")
        if (self.temperature, self.temperature_end) != (1.0, None) and self.by not in (KL, CROSS_ENTROPY):
            raise ValueError(f"losses.temperature={self.temperature}: has no effect by {self.by}; leave it out")
        if self.layers != EVERY and self.of in (LOGITS, EMBEDDINGS):
            raise ValueError(f"losses.layers={self.layers!r}: has no effect on {self.of}; leave it out")
        if self.relation_heads and self.of not in RELATIONS:
            raise ValueError(f"losses.relation_heads={self.relation_heads}: has no effect on {self.of}; leave it out")
        if self.layers not in NAMED and not re.fullmatch(r"\d+:\d+( \d+:\d+)*", self.layers):
            raise ValueError(f"losses.layers={self.layers!r}: use {', '.join(NAMED)}, or pairs like '1:3 2:6'")

    @property
    def name(self) -> str:
        """Name of its term in the loss."""
        return f"{self.of}_{self.by.replace('-', '_')}"

    @property
    def collection(self) -> str | None:
        """What the models must record for it (`models/core/inside.py`); None for logits."""
        return {LOGITS: None, EMBEDDINGS: HIDDEN, LAYERS_HIDDEN: HIDDEN}.get(self.of, PROJECTED)

    @property
    def projects(self) -> bool:
        """Whether the student's hidden states are compared one by one, so that another width needs a projection."""
        return self.collection == HIDDEN and self.by != NEURONS

    def weight_at(self, step: Array | int) -> Array | float:
        """Return the weight at a step."""
        return _moved(self.weight, self.weight_end, step, self.steps)

    def temperature_at(self, step: Array | int) -> Array | float:
        """Return the temperature at a step."""
        return _moved(self.temperature, self.temperature_end, step, self.steps)

    def pairs(self, student: int, teacher: int) -> list[tuple[int, int]]:
        """Return (the student's layer, the teacher's), from 1 on, for numbers of layers. ValueError if one of them
        lacks a layer, or if layers are skipped unevenly."""
        if self.layers == TOP:
            return [(student, teacher)]
        if ":" not in self.layers:
            return [*enumerate(teacher_layers(self.layers, student, teacher), 1)]
        found = [tuple(map(int, pair.split(":"))) for pair in self.layers.split()]
        for one, other in found:
            if not (1 <= one <= student and 1 <= other <= teacher):
                counts = f"the student has {student} layers, the teacher {teacher}"
                raise ValueError(f"layers={self.layers}: pairs layer {one} with {other}; {counts}")
        return found


def teacher_layers(which: str, student: int, teacher: int) -> list[int]:
    """Return the teacher's layer, from 1 on, for each of the student's.   which: skip, first, last, or numbers."""
    if which == EVERY:
        if teacher % student:
            raise ValueError(f"{EVERY}: {teacher} layers are not a multiple of {student}; give their numbers")
        return [layer * teacher // student for layer in range(1, student + 1)]
    if which in (FIRST, LAST):
        found = [layer + (teacher - student if which == LAST else 0) for layer in range(1, student + 1)]
    else:
        found = [int(number) if number.isdecimal() else 0 for number in which.split()]
    if len(found) != student or not all(1 <= layer <= teacher for layer in found):
        raise ValueError(
            f"{which}: does not name {student} of the teacher's {teacher} layers; use {EVERY}, {FIRST}, {LAST}, or one "
            "number for each layer of the student"
        )
    return found


def _moved(first: float, end: float | None, step: Array | int, steps: int) -> Array | float:
    return first if end is None else first + (end - first) * jnp.minimum(step / steps, 1.0)


class Side(NamedTuple):
    """What a loss compares of a model.   hidden, projected: as models record them.   logits: f32[n, vocab], -inf in
    padding; None if not read, or if they are the products of `factors` (`CausalDecoder.softmax`), made in blocks."""

    hidden: Array | None = None
    projected: tuple[Array, Array, Array] | None = None
    logits: Array | None = None
    factors: tuple[Array, Array, Array] | None = None


class Tokens(NamedTuple):
    """What tokens losses count.   segments: i32[rows, length], 0 in padding.   weights: f32 of the logits, [n] or for
    factors [rows, length].   causal: whether a token attends to no later one."""

    segments: Array
    weights: Array
    causal: bool

    @property
    def real(self) -> Array:
        """f32[rows, length], 1 for tokens."""
        return (self.segments > 0).astype(jnp.float32)

    @property
    def seen(self) -> Array:
        """bool[rows, 1, queries, keys], which pairs attend."""
        same = (self.segments[:, :, None] == self.segments[:, None, :]) & (self.segments > 0)[:, :, None]
        places = jnp.arange(self.segments.shape[1])
        return (same & (places[:, None] >= places) if self.causal else same)[:, None]


def denominator(match: Match, tokens: Tokens) -> Array:
    """Return f32[], by which the sum of a loss is divided."""
    if match.of == LOGITS:
        return tokens.weights.sum()
    if match.by in (FLOW, NEURONS):
        return tokens.real.max(axis=1).sum()
    if match.of == SCORES or (match.of, match.by) == (ATTENTION, MSE):
        return tokens.seen.sum(dtype=jnp.float32)  # more pairs than an int32 counts
    return tokens.real.sum()


def total(match: Match, ours: Side, theirs: Side, tokens: Tokens, temperature, projection: Array | None) -> Array:
    """Return the sum of a loss f32[], over all pairs of layers.   projection: [student's width, teacher's], or None."""
    if match.of == LOGITS and ours.factors is not None:
        return _of_factors(ours.factors, theirs.factors, match.by, temperature, tokens.weights)
    if match.of == LOGITS:
        return jnp.sum(soft(ours.logits, theirs.logits, match.by, temperature) * tokens.weights)
    depths = [len(side.hidden) - 1 if match.collection == HIDDEN else len(side.projected[0]) for side in (ours, theirs)]
    pairs = [(0, 0)] if match.of == EMBEDDINGS else match.pairs(*depths)
    if match.collection == PROJECTED:
        compare = jax.checkpoint(partial(_of_attention, match, temperature=temperature))
        select = lambda side, layer: [array[layer - 1] for array in side.projected]
        return sum(compare(select(ours, i), select(theirs, j), tokens.seen) for i, j in pairs)
    matrix = projection if match.projects else None
    project = (lambda x: x.astype(jnp.float32)) if matrix is None else partial(_projected, matrix)
    layers = [(project(ours.hidden[i]), theirs.hidden[j].astype(jnp.float32)) for i, j in pairs]
    if match.by == FLOW:
        start = project(ours.hidden[0]), theirs.hidden[0].astype(jnp.float32)
        return sum(_of_flow(*pair, tokens.real) for pair in itertools.pairwise([start, *layers]))
    compare = {MSE: _of_squares, COSINE: _of_cosines, NEURONS: _of_neurons}[match.by]
    return sum(compare(*pair, tokens.real) for pair in layers)


def _projected(projection: Array, hidden: Array) -> Array:
    return jnp.einsum("blw,wv->blv", hidden, projection.astype(hidden.dtype), preferred_element_type=jnp.float32)


def soft(ours: Array, theirs: Array, by: str, temperature: Array | float, seen: Array | None = None) -> Array:
    """Compute a loss between two distributions [..., n] -> f32[...].   ours, theirs: logits, -inf for what has no
    probability.   seen: bool[..., n], of what is there, by default where the teacher's are finite."""
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    theirs = theirs if seen is None else jnp.where(seen, theirs, -jnp.inf)
    if by == MSE:
        seen = jnp.isfinite(theirs)
        return jnp.square(jnp.where(seen, ours - theirs, 0.0)).sum(-1) / seen.sum(-1)
    lowest = jnp.finfo(jnp.float32).min
    theirs = jnp.maximum(theirs / temperature, lowest)
    seen = theirs > lowest
    ours = jnp.where(seen, ours / temperature, lowest)
    # Sums alone: log-probabilities as an array, written and read again, take twice the time. All is relative to the
    # largest logits: a large constant in them would cost digits.
    ours, theirs = (x - jax.lax.stop_gradient(x.max(-1, keepdims=True)) for x in (ours, theirs))
    p = jnp.exp(theirs)
    whole, of_ours = p.sum(-1), jnp.log(jnp.exp(ours).sum(-1))
    if by == KL:
        loss = jnp.sum(p * (theirs - ours), axis=-1) / whole + of_ours - jnp.log(whole)
    else:
        loss = of_ours - jnp.sum(p * ours, axis=-1) / whole
    return jnp.where(seen.any(-1), loss, 0.0) * temperature**2


def largest(logits: Array, k: int) -> tuple[Array, Array]:
    """Return what is stored of a teacher's logits [n, vocab]: the k likeliest tokens i32[n, k], and log-probabilities
    f32[n, k + 1], theirs and that of all other tokens together."""
    top, ids = jax.lax.top_k(logits, k)
    rest = jax.nn.logsumexp(jnp.put_along_axis(logits, ids, -jnp.inf, -1, inplace=False), -1, keepdims=True)
    return ids, jnp.concatenate([top, rest], -1) - jax.nn.logsumexp(logits, -1, keepdims=True)


def soft_of_stored(logits: Array, total: Array, logs: Array, temperature: Array | float) -> Array:
    """Compute `soft` by KL of what `largest` has stored -> f32[...]. All other tokens count as one, whose logit is the
    logarithm of the sum of their exponentials, also at a temperature.

    logits: the student's of the k tokens, [..., k].   total: [...], that logarithm for the vocabulary. The other tokens
    have what the k leave, which float32 knows to 1e-6.   logs: [..., k + 1].
    """
    share = jnp.exp(jax.nn.logsumexp(logits, -1) - total)
    rest = total + jnp.log1p(-jnp.minimum(share, 1 - 1e-6))
    return soft(jnp.concatenate([logits, rest[..., None]], -1), logs, KL, temperature)


def _of_factors(ours: tuple, theirs: tuple, by: str, temperature, weights: Array) -> Array:
    """Sum `soft` over the positions f32[rows, length] of two decoders, a block of them at a time."""
    (rows, length), vocab = weights.shape, len(ours[1])
    (devices,) = parts_of(("batch",), (rows,))
    block = min(max(1, LOGITS_AT_ONCE * devices // (rows * vocab)), length)

    def cut(x: Array) -> Array:  # [blocks, rows, block, ...]
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, block, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def of_block(parts: tuple[Array, Array, Array]) -> Array:
        logits = [
            table_scores(hidden.reshape(-1, hidden.shape[-1]), table, bias)
            for hidden, (_, table, bias) in zip(parts, (ours, theirs), strict=False)
        ]
        return jnp.sum(soft(*logits, by, temperature) * parts[2].reshape(-1))

    return jax.lax.map(of_block, (cut(ours[0]), cut(theirs[0]), cut(weights))).sum()


def _of_squares(ours: Array, theirs: Array, real: Array) -> Array:
    return jnp.sum(jnp.square(ours - theirs).mean(-1) * real)


def _of_cosines(ours: Array, theirs: Array, real: Array) -> Array:
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), -1) + 1e-12)  # whose gradient is finite for a vector of zeros
    return jnp.sum((1.0 - jnp.sum(ours * theirs, -1) / (norm(ours) * norm(theirs))) * real)


def _of_flow(before: tuple[Array, Array], after: tuple[Array, Array], real: Array) -> Array:
    """Compare the products of two layers' states, [width, width] a row, averaged over its tokens."""
    lengths = jnp.maximum(real.sum(1), 1.0)[:, None, None]
    ours, theirs = (jnp.einsum("blv,blw,bl->bvw", a, b, real) / lengths for a, b in zip(before, after, strict=True))
    return jnp.square(ours - theirs).mean((1, 2)).sum()


def _of_neurons(ours: Array, theirs: Array, real: Array) -> Array:
    """Compare which tokens of a row activate the neurons, each scaled to norm 1, by MMD with the kernel (x y)^2."""

    def gram(hidden: Array) -> Array:
        neurons = hidden * real[..., None]
        neurons /= jnp.sqrt(jnp.sum(jnp.square(neurons), axis=1, keepdims=True) + 1e-12)
        return jnp.einsum("bqw,bkw->bqk", neurons, neurons) / hidden.shape[-1]

    return jnp.square(gram(ours) - gram(theirs)).sum()


def _of_attention(match: Match, ours: list[Array], theirs: list[Array], seen: Array, temperature) -> Array:
    """Compare one layer's attention, or relations of what it projects, each [rows, length, heads, head_dim]."""
    if match.of in RELATIONS:
        both = ((side[RELATIONS[match.of]],) * 2 for side in (ours, theirs))
        heads = match.relation_heads
    else:
        both, heads = (side[:2] for side in (ours, theirs)), 0
    of_student, of_teacher = (_scores(*pair, heads) for pair in both)
    if match.of == SCORES:
        return jnp.sum(jnp.where(seen, jnp.square(of_student - of_teacher), 0.0).mean(1))
    if match.by == MSE:
        maps = (jax.nn.softmax(jnp.where(seen, x, jnp.finfo(jnp.float32).min), -1) for x in (of_student, of_teacher))
        of_student, of_teacher = maps
        return jnp.sum(jnp.where(seen, jnp.square(of_student - of_teacher), 0.0).mean(1))
    return jnp.sum(soft(of_student, of_teacher, match.by, temperature, seen).mean(1))


def _scores(q: Array, k: Array, heads: int) -> Array:
    """Return scaled products of all pairs, f32[rows, heads, queries, keys].   heads: 0 for those that there are."""
    if heads:
        q, k = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k))
    return jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
