"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860): a causal language model whose layers also attend to a memory of
the tokens before the row.

The vocabulary may be cut into clusters of falling frequency (adaptive input and softmax: Baevski & Auli 2019,
arXiv:1809.10853; Grave et al. 2017, arXiv:1609.04309). Hugging Face no longer has a class for this model: an export
holds `model.safetensors`, with the table's paths as names and layers stacked, and the config as `config.json`.
"""

import dataclasses
from itertools import pairwise

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.distances import distance_table
from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask, remembering
from models.attention.operands import Biases
from models.attention.relative import RelativeAttention, sinusoids
from models.blocks.config import RememberingConfig, sized
from models.blocks.embeddings import padded_vocab, token_table
from models.blocks.feed_forward import FeedForward
from models.blocks.heads import tied_logits
from models.blocks.layer import layer_sizes
from models.blocks.memory import Memory, empty_memory, remember
from models.blocks.products import product
from models.blocks.stack import stack
from models.blocks.tables import PRODUCTS, stacked_parameters
from models.core.family import Input, Inputs, declare, read_by
from models.core.noise import dropout, site
from models.core.parameters import LAYERS, Noise, Parameter, Slot, parameter
from models.core.program import Program
from models.core.ranges import COUNT, check_ranges
from models.core.sharding import constrain

PROJECTION_STD = 0.01  # of the clusters' initial projections, as in the original code


@dataclasses.dataclass(frozen=True)
class TransformerXLConfig(RememberingConfig):
    """Sizes and rates of the model."""

    vocab_size: int = 267735  # tokens, without padding rows; with cutoffs, numbered by falling frequency
    width: int = 410  # hidden size
    depth: int = 16  # number of layers
    heads: int = 10  # attention heads in each layer
    feed_forward: int = 2100  # width inside the feed-forward block
    activation: str = "relu"  # activation function of the feed-forward block
    attention_dropout: float = 0.0  # dropout rate of attention probabilities
    norm_epsilon: float = 1e-5  # added to the variance in norms
    memory: int = 150  # how many earlier tokens are remembered in training
    cutoffs: tuple[int, ...] = (20000, 40000, 200000)
    """First token of each cluster after the first one, ascending; cutoffs beyond the vocabulary have no effect."""
    divisor: int = 1  # each cluster's embeddings are narrower than those of the one before by this factor
    shared_biases: bool = True  # whether all layers have the same u and v

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, {"divisor": COUNT}, "model.")
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or not all(map(COUNT.holds, self.cutoffs)):
            raise ValueError(f"model.cutoffs={self.cutoffs}: must ascend, each {COUNT.words}")
        if self.width < self.divisor ** len(self.clusters):
            cure = f"the last cluster would have width 0; lower it, or raise model.width={self.width}"
            raise ValueError(f"model.divisor={self.divisor}: {cure}")

    @property
    def clusters(self) -> tuple[int, ...]:
        """The cutoffs within the vocabulary; without any, there is a plain softmax."""
        return tuple(cutoff for cutoff in self.cutoffs if cutoff < self.vocab_size)


class Cluster(nn.Module):
    """The embeddings of a cluster of tokens, which are also its output weights; they may be narrower than the model.

    rows: of the table, tokens first.   narrow: width of the table.   projection: whether a projection leads from it to
    the model's width.   separate_output: whether the logits have a projection of their own.
    """

    rows: int
    narrow: int
    width: int
    init_std: float
    projection: bool
    separate_output: bool

    def setup(self):
        small = nn.initializers.normal(PROJECTION_STD)
        self.tokens = token_table(self, self.rows, self.narrow, self.init_std)
        self.bias = parameter(self, "bias", nn.initializers.zeros, (padded_vocab(self.rows),))
        if self.projection:
            project = lambda name: parameter(self, name, small, (self.narrow, self.width))
            self.input_projection = project("projection")
            self.output_projection = project("output_projection") if self.separate_output else self.input_projection

    def __call__(self, tokens: Array) -> Array:
        """Embed tokens i32[batch, length], counted from the cluster's first -> f32[batch, length, width]."""
        embedded = jnp.take(constrain(self.tokens, "vocab", None), tokens, axis=0, mode="clip")
        return product(embedded, self.input_projection) if self.projection else embedded

    def logits(self, hidden: Array) -> Array:
        """Return logits f32[n, padded rows] for hidden [n, width]."""
        return tied_logits(self._narrowed(hidden), self.tokens, self.bias, self.rows)

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """Return the factors of the logits: hidden [n, narrow], table f32[padded, narrow], bias f32[padded]."""
        bias = jnp.where(jnp.arange(len(self.bias)) < self.rows, self.bias, -jnp.inf)
        return self._narrowed(hidden), self.tokens, bias

    def _narrowed(self, hidden: Array) -> Array:
        return product(hidden, self.output_projection.T) if self.projection else hidden


class TransformerXLLayer(nn.Module):
    """A post-norm layer: x [batch, length, width] and its memory -> the same shape and the new memory."""

    config: TransformerXLConfig
    program: Program

    @nn.compact
    def __call__(self, x: Array, shared, noise: Noise, memory: Array, slots: None) -> tuple[Array, Array]:
        """shared: (table of distances, mask of memory and x, shared Biases or None)."""
        config, sizes, dtype = self.config, layer_sizes(self.config), self.program.compute
        table, mask, biases = shared
        attention = RelativeAttention(sizes, self.program, name="attention")
        context = attention.context(jnp.concatenate([memory, x], axis=1), table)
        y = attention(x, context, biases or position_biases(self, config), mask, noise)
        feed_forward = FeedForward(sizes, dtype, name="feed_forward")
        return feed_forward(y, noise), remember(memory, x)


def position_biases(module: nn.Module, config) -> Biases:
    """Return u and v as parameters of a module."""

    def bias(name):
        return parameter(module, name, nn.initializers.normal(config.init_std), (config.width,))

    return Biases(bias("content_bias"), bias("position_bias"))


class TransformerXL(nn.Module):
    """Embeddings, layers, and output logits that share the embeddings."""

    config: TransformerXLConfig
    program: Program
    empty_memory = empty_memory

    @property
    def clusters(self) -> tuple[int, ...]:
        """The cutoffs of the config's clusters."""
        return self.config.clusters

    def setup(self):
        c = self.config
        self.cluster = [
            Cluster(rows, narrow, c.width, c.init_std, c.divisor > 1, separate_output=number == 0)
            for number, (rows, narrow) in enumerate(cluster_shapes(c))
        ]

    @nn.compact
    def read(self, inputs: Inputs, memory: Memory, noise: Noise = None) -> tuple[Array, Memory]:
        """Run the trunk -> (hidden [rows, length, width], the memory with these tokens, as long as before). Dropout is
        on if noise u32[rows, 2] is given.
        """
        tokens, segments = inputs["tokens"], inputs["segments"]
        c, dtype = self.config, self.program.compute
        drop = lambda x, tag: dropout(x, c.dropout, site(noise, tag)).astype(dtype)
        length, remembered = tokens.shape[1], memory.segments.shape[1]
        x = constrain(drop(self.embed(tokens), 0), "batch", "length", None)
        # One distance more than exists, which `shift` requires.
        table = distance_table(sinusoids(remembered + length - 1, -1, c.width), c.dropout, site(noise, 2)).astype(dtype)
        ranks = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = remembering(memory.segments, Mask(segments, ranks, ranks + 1))
        shared = (table, mask, position_biases(self, c) if c.shared_biases else None)
        layer = TransformerXLLayer(c, self.program, parent=None)
        x, hidden = stack(self, [layer], c.depth, x, shared, site(noise, 1), self.program, states=memory.hidden)
        return drop(x, 3), Memory(hidden, remember(memory.segments, segments))

    def begin(self, inputs: Inputs, room: int) -> tuple[Array, Memory]:
        """Read the first tokens of texts, with a memory that still keeps them when `room` more tokens have followed."""
        rows, places = inputs["tokens"].shape
        return self.read(inputs, self.empty_memory(rows, places + room))

    def advance(self, inputs: Inputs, memory: Memory) -> tuple[Array, Memory]:
        """Read more tokens."""
        return self.read(inputs, memory)

    def take(self, memory: Memory, rows: Array) -> Memory:
        """Return the memory with the given rows, i32[n]."""
        return Memory(memory.hidden[:, rows], memory.segments[rows])

    def embed(self, tokens: Array) -> Array:
        """Embed i32[batch, length] -> f32[batch, length, width], scaled by the square root of the width."""
        starts = (0, *self.config.clusters)
        embedded = self.cluster[0](tokens)
        for start, cluster in zip(starts[1:], self.cluster[1:], strict=True):
            embedded = jnp.where((tokens >= start)[..., None], cluster(tokens - start), embedded)
        return embedded * self.config.width**0.5

    def token_logits(self, hidden: Array) -> Array:
        """Return the next token's logits f32[rows * n, padded vocab] for hidden [rows, n, width]; padding of the
        vocabulary is -inf. With clusters, these are the logits of the first cluster, whose tokens are followed by one
        row for each other cluster.
        """
        return self.cluster[0].logits(hidden.reshape(-1, hidden.shape[-1]))

    def tails(self, hidden: Array) -> tuple[tuple[Array, Array, Array], ...]:
        """Return `Cluster.softmax` of each cluster but the first, for hidden [rows, n, width]."""
        return tuple(cluster.softmax(hidden.reshape(-1, hidden.shape[-1])) for cluster in self.cluster[1:])

    def __call__(self, inputs: Inputs):
        hidden, _ = self.read(inputs, self.empty_memory(len(inputs["tokens"])))
        return self.token_logits(hidden)


def cluster_shapes(config: TransformerXLConfig) -> list[tuple[int, int]]:
    """Return (rows, width of the embeddings) of each cluster; the first one has a row for each other cluster."""
    ends = (*config.clusters, config.vocab_size)
    rows = [ends[0] + len(config.clusters), *(end - start for start, end in pairwise(ends))]
    return [(number, config.width // config.divisor**index) for index, number in enumerate(rows)]


def parameters(config: TransformerXLConfig) -> list[Parameter]:
    layer = lambda path, *axes: Parameter(f"layers/{path}", (LAYERS, *axes), {})
    biases = ("content_bias", "position_bias")
    rows = "cluster" if config.clusters else "vocab"
    table = []
    for number in range(len(config.clusters) + 1):
        name = f"cluster_{number}"
        table += [Parameter(f"{name}/tokens", (rows, "embedding"), {}), Parameter(f"{name}/bias", (rows,), {})]
        if config.divisor > 1:
            table.append(Parameter(f"{name}/projection", ("embedding", "width"), {}))
            if number == 0:
                table.append(Parameter(f"{name}/output_projection", ("embedding", "width"), {}))
    if config.shared_biases:
        table += [Parameter(name, ("heads",), {}) for name in biases]
    else:
        table += [layer(name, "heads") for name in biases]
    products = (f"attention/{name}" for name in (*PRODUCTS, "position", "output"))
    table += stacked_parameters("layers", dict.fromkeys(products, ""), {}, biased=False)
    paths = "attention/norm", "feed_forward/up", "feed_forward/down", "feed_forward/norm"
    table += stacked_parameters("layers", dict.fromkeys(paths, ""), {})
    return [parameter._replace(hf={"model": Slot(parameter.path)}) for parameter in table]


FAMILY = declare(
    config=TransformerXLConfig,
    sizes={
        "tiny": sized(TransformerXLConfig, 2, 128, vocab_size=32000, memory=64, cutoffs=()),
        # run_wt103_base.sh and run_wt103_large.sh of the original code (Dai et al. 2019, table 1)
        "base": TransformerXLConfig(),
        "large": sized(TransformerXLConfig, 18, 1024, dropout=0.2, attention_dropout=0.2, memory=384, divisor=4),
    },
    inputs={"tokens": Input(("length",)), "segments": Input(("length",))},
    trunk=TransformerXL,
    table=parameters,
    architectures={"TransformerXL": ()},
    constants={"model_type": "transformer-xl"},
    fields={
        **{name: name for name in ("vocab_size", "width", "depth", "heads", "feed_forward", "activation")},
        **{name: name for name in ("norm_epsilon", "divisor", "shared_biases")},
        "cutoffs": read_by("cutoffs", lambda fields: tuple(fields["cutoffs"])),
    },
    settings={name: name for name in ("dropout", "attention_dropout", "init_std", "memory")},
    pair=None,
    prepare="--tokenizer wordlevel",
    attention="relative",
    attentions=lambda config, shape, memory: [
        Attention(shape.length, config.width, config.heads, config.attention_dropout, memory, ranked=True)
    ],
)
FAMILIES = {"transformer-xl": FAMILY}
