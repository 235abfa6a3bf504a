"""What objectives ask of models: a trunk that computes hidden states, and heads that read them.

Methods of a Flax module, called by `model.apply({"params": params}, ..., method="encode")`. inputs: the arrays that the
model's family declares; noise: u32[rows, 2], switches dropout on. Logits are of the padded vocabulary, -inf in padding.
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
        """-> hidden [rows, length, width], or at slots i32[rows, n] alone [rows, n, width]."""


@runtime_checkable
class TokenPredictor(Protocol):
    """A head for tokens."""

    def token_logits(self, hidden: Array) -> Array:
        """hidden [rows, n, width] -> logits f32[rows * n, vocab]."""


@runtime_checkable
class Generator(Protocol):
    """A small model of masked tokens, beside a trunk with shared embeddings."""

    def generate(self, inputs: Inputs, slots: Array, noise: Noise = None) -> Array:
        """slots i32[rows, n] -> logits f32[rows * n, vocab]."""


@runtime_checkable
class Detector(Protocol):
    """A head that tells replaced tokens."""

    def token_scores(self, hidden: Array) -> Array:
        """hidden [rows, n, width] -> logits f32[rows, n], positive for replaced."""


@runtime_checkable
class Remembering(Protocol):
    """What models with a memory have besides their trunk."""

    def empty_memory(self, rows: int, length: int | None = None) -> Memory:
        """A memory of nothing; length: how many positions, by default as many as in training."""


@runtime_checkable
class Recurrent(Remembering, Protocol):
    """A causal trunk with a memory."""

    def read(self, inputs: Inputs, memory: Memory, noise: Noise = None) -> tuple[Array, Memory]:
        """-> (hidden [rows, length, width], the new memory, as long as the one given)."""


@runtime_checkable
class AdaptivePredictor(TokenPredictor, Protocol):
    """A head for tokens whose rare ones are in clusters, if there are any."""

    @property
    def clusters(self) -> tuple[int, ...]:
        """The first token of each cluster but the first, ascending; none: a plain softmax."""

    def tails(self, hidden: Array) -> tuple[tuple[Array, Array, Array], ...]:
        """hidden [rows, n, width] -> the factors of each cluster's logits but the first's: ([rows * n, narrow],
        table f32[tokens, narrow], bias f32[tokens])."""


@runtime_checkable
class Writer(TokenPredictor, Protocol):
    """A causal trunk that goes on from a state of what it has read, and a head for the next token."""

    def begin(self, inputs: Inputs, room: int) -> tuple[Array, Any]:
        """Texts, padded on the left -> (hidden [rows, length, width], a state with room for so many further tokens)."""

    def advance(self, inputs: Inputs, state: Any) -> tuple[Array, Any]:
        """Further tokens of these texts -> (hidden [rows, n, width], the state with them)."""

    def take(self, state: Any, rows: Array) -> Any:
        """The state of rows i32[n] of another's."""


@runtime_checkable
class CausalDecoder(Writer, Protocol):
    """A causal trunk without memory, and a head for the next token."""

    def decode(self, inputs: Inputs, noise: Noise = None) -> Array:
        """-> hidden [rows, length, width]; a token's is of itself and the earlier ones of its segment."""

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """The factors of `token_logits`: hidden [rows, n, width], table f32[vocab, width], bias f32[vocab]."""


@runtime_checkable
class EncoderDecoder(Writer, Protocol):
    """An encoder and a decoder; the texts after which `begin` begins another one are the encoder's.

    start: the token before the first one of the decoder.
    """

    start: int

    def encode(self, inputs: Inputs, noise: Noise = None) -> Array:
        """-> the encoder's hidden [rows, length, width]."""

    def decode_targets(self, inputs: Inputs, noise: Noise = None) -> Array:
        """-> the decoder's hidden [rows, target_length, width]; a token's is of itself, of the earlier ones of its
        segment and of the encoder's."""

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """As of `CausalDecoder`."""


@runtime_checkable
class Permutable(Remembering, Protocol):
    """A trunk with a memory that computes what is known of tokens without themselves, in any order."""

    def query(
        self, inputs: Inputs, memory: Memory, slots: Array, reuse: int | None = None, noise: Noise = None
    ) -> tuple[Array, Memory]:
        """slots: i32[rows, n].   reuse: how many leading positions are remembered, None for all.

        -> (hidden [rows, n, width], the new memory, as long as the one given).
        """
