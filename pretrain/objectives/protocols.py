"""The protocols of models that objectives use: a trunk that computes hidden states, and heads that read them.

They are methods of a Flax module, called by `model.apply({"params": params}, ..., method="encode")`. inputs: the arrays
that the model's family declares; noise: u32[rows, 2] turns dropout on. Logits cover the padded vocabulary, with -inf in
padding.
"""

from typing import Any, Protocol, runtime_checkable

from jax import Array

from models.blocks.memory import Memory
from models.core.family import Inputs
from models.core.parameters import Noise


@runtime_checkable
class Encoder(Protocol):
    """A trunk without memory."""

    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """Return hidden [rows, length, width], or only at slots i32[rows, n]: [rows, n, width]."""


@runtime_checkable
class TokenPredictor(Protocol):
    """A head that predicts tokens."""

    def token_logits(self, hidden: Array) -> Array:
        """hidden [rows, n, width] -> logits f32[rows * n, vocab]."""


@runtime_checkable
class Generator(Protocol):
    """A small masked language model that shares embeddings with a trunk."""

    def generate(self, inputs: Inputs, slots: Array, noise: Noise = None) -> Array:
        """slots i32[rows, n] -> logits f32[rows * n, vocab]."""


@runtime_checkable
class Detector(Protocol):
    """A head that detects replaced tokens."""

    def token_scores(self, hidden: Array) -> Array:
        """hidden [rows, n, width] -> logits f32[rows, n], positive for replaced tokens."""


@runtime_checkable
class Remembering(Protocol):
    """A model with a memory."""

    def empty_memory(self, rows: int, length: int | None = None) -> Memory:
        """Return an empty memory.   length: in positions, by default as in training."""


@runtime_checkable
class Recurrent(Remembering, Protocol):
    """A causal trunk with a memory."""

    def read(self, inputs: Inputs, memory: Memory, noise: Noise = None) -> tuple[Array, Memory]:
        """Return (hidden [rows, length, width], the new memory, as long as the old one)."""


@runtime_checkable
class AdaptivePredictor(TokenPredictor, Protocol):
    """A head that predicts tokens by an adaptive softmax, with clusters of rare tokens, if any."""

    @property
    def clusters(self) -> tuple[int, ...]:
        """Return the first token of each cluster but the first, ascending; () means a plain softmax."""

    def tails(self, hidden: Array) -> tuple[tuple[Array, Array, Array], ...]:
        """hidden [rows, n, width] -> for each cluster but the first, factors of its logits: (hidden [rows * n, narrow],
        table f32[tokens, narrow], bias f32[tokens])."""


@runtime_checkable
class Writer(TokenPredictor, Protocol):
    """A causal trunk that continues texts from a cached state, with a head for the next token."""

    def begin(self, inputs: Inputs, room: int) -> tuple[Array, Any]:
        """Read left-padded texts -> (hidden [rows, length, width], a state with room for `room` more tokens)."""

    def advance(self, inputs: Inputs, state: Any) -> tuple[Array, Any]:
        """Read further tokens of these texts -> (hidden [rows, n, width], the new state)."""

    def take(self, state: Any, rows: Array) -> Any:
        """Select rows i32[n] of a state."""


@runtime_checkable
class ClozeWriter(Encoder, Writer, Protocol):
    """An encoder that continues texts at a [MASK]: `begin` reads [CLS] source [SEP] [MASK], `advance` the token for the
    last [MASK], after which it puts another.   sides: types of the tokens of a source and of its target."""

    sides: tuple[int, int]


@runtime_checkable
class CausalDecoder(Writer, Protocol):
    """A causal trunk without a memory, and a head for the next token."""

    def decode(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Return hidden [rows, length, width]; each depends on its token and the earlier ones of its segment."""

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """Return the factors of `token_logits`: hidden [rows, n, width], table f32[vocab, width], bias f32[vocab]."""


@runtime_checkable
class EncoderDecoder(Writer, Protocol):
    """An encoder and a decoder; `begin` reads the encoder's texts.   start: token before the decoder's first one."""

    start: int

    def encode(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Return the encoder's hidden [rows, length, width]."""

    def decode_targets(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Return the decoder's hidden [rows, target_length, width], from earlier tokens and the encoder's."""

    def decode_again(self, inputs: Inputs, noise: Noise = None) -> Array:
        """Return the decoder's hidden [rows, length, width] for the encoder's texts."""

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """See `CausalDecoder`."""


@runtime_checkable
class Permutable(Remembering, Protocol):
    """A trunk with a memory and a query stream: hidden states that do not see their own token, in any order."""

    def query(
        self, inputs: Inputs, memory: Memory, slots: Array, reuse: int | None = None, noise: Noise = None
    ) -> tuple[Array, Memory]:
        """Return (hidden [rows, n, width] at slots i32[rows, n], the new memory, as long as the old one).

        reuse: number of leading positions to remember; None for all.
        """
