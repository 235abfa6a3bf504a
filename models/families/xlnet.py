"""XLNet (Yang et al. 2019, arXiv:1906.08237): a Transformer-XL that predicts tokens in any order.

Two streams share all weights: the content stream computes every position with its token; the query stream computes the
predicted positions without seeing their tokens. Finetuning uses the content stream only.

Hugging Face: XLNetLMHeadModel, and the classes with task heads.
"""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.distances import distance_table
from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask, chosen, remembering
from models.attention.operands import Biases, Types
from models.attention.relative import RelativeAttention, sinusoids
from models.blocks.config import RememberingConfig, sized
from models.blocks.crf import crf_head
from models.blocks.embeddings import padded_vocab, token_table
from models.blocks.feed_forward import FeedForward
from models.blocks.heads import CHOICE, CLASSIFIER, SPANS, TAGGER, WithHeads, task_head, tied_logits
from models.blocks.layer import layer_sizes
from models.blocks.memory import Memory, empty_memory, remember
from models.blocks.positions import gather_positions
from models.blocks.stack import stack
from models.blocks.tables import dense_parameters, norm_parameters, same_dropout
from models.core.family import Input, Inputs, Shape, declare
from models.core.noise import dropout, site
from models.core.parameters import LAYERS, Noise, Parameter, Slot, parameter
from models.core.program import Program
from models.core.sharding import constrain


@dataclasses.dataclass(frozen=True)
class XLNetConfig(RememberingConfig):
    """Sizes and rates of the model."""

    vocab_size: int = 32000  # number of tokens, without padding rows
    labels: tuple[str, ...] = ()  # classes of a task head


class XLNetLayer(nn.Module):
    """A post-norm layer of both streams: ([batch, length, width], [batch, n, width]) and its memory -> the same shapes.

    The last layer, which gets slots, returns only the query stream, because nothing reads the other; without a query
    stream (None) it returns the content stream at the slots.
    """

    config: XLNetConfig
    program: Program

    @nn.compact
    def __call__(self, streams: tuple[Array, Array], shared, noise: Noise, memory: Array, slots: Array | None):
        """shared: (table of distances, the content stream's (mask, types), the query stream's, how many leading
        positions to remember) -> (streams, new memory)."""
        config, sizes, dtype = self.config, layer_sizes(self.config), self.program.compute
        (content, query), (table, content_mask, query_mask, reuse) = streams, shared

        def bias(name, *rows):
            return parameter(self, name, nn.initializers.normal(config.init_std), (*rows, config.width))

        biases = Biases(bias("content_bias"), bias("position_bias"), bias("type_bias"), bias("types", 2))
        attention = RelativeAttention(sizes, self.program, name="attention")
        feed_forward = FeedForward(sizes, dtype, name="feed_forward")
        context = attention.context(jnp.concatenate([memory, content], axis=1), table)

        def advance(x: Array, mask_and_types: tuple[Mask, Types], noise: Noise) -> Array:
            mask, types = mask_and_types
            return feed_forward(attention(x, context, biases, mask, noise, types), noise, mask.axis)

        if query is None:
            if slots is not None:
                return advance(gather_positions(content, slots), query_mask, noise), None
            return (advance(content, content_mask, noise), None), None
        predicted = advance(query, query_mask, site(noise, 0))
        streams = (advance(content, content_mask, noise), predicted) if slots is None else predicted
        return streams, remember(memory, content[:, :reuse])


INPUTS = {
    **dict.fromkeys(("tokens", "types", "segments"), Input(("length",))),
    **dict.fromkeys(("ranks", "thresholds"), Input(("length",), required=False)),  # of a permutation, like `reversed`
    "reversed": Input((), required=False),
}


class XLNet(WithHeads):
    """Embeddings, layers of two streams, and output logits that share the embeddings."""

    config: XLNetConfig
    empty_memory = empty_memory

    def setup(self):
        super().setup()
        c = self.config
        self.tokens = token_table(self, c.vocab_size, c.width, c.init_std)
        # The query stream's first input, the same for every token.
        self.start = parameter(self, "start", nn.initializers.normal(c.init_std), (1, c.width))
        self.bias = parameter(self, "bias", nn.initializers.zeros, (padded_vocab(c.vocab_size),))

    def query(
        self, inputs: Inputs, memory: Memory, slots: Array, reuse: int | None = None, noise: Noise = None
    ) -> tuple[Array, Memory]:
        """Run both streams and return the query stream at slots i32[rows, n], whose tokens it does not see ->
        ([rows, n, width], the new memory, as long as before).

        The query at i sees the key at j of its segment if ranks[j] < thresholds[i], and all of its segment in the
        memory, whose tokens count as type 0. A row runs backwards if `reversed` is 1.
        reuse: how many leading positions to remember, None for all.   noise: u32[rows, 2] switches dropout on.
        """
        c, dtype = self.config, self.program.compute
        tokens, types, segments, ranks, thresholds, reversed = (inputs[name] for name in INPUTS)
        query = dropout(jnp.broadcast_to(self.start, (*slots.shape, c.width)), c.dropout, site(noise, 2)).astype(dtype)
        table = signed_table(memory.segments.shape[1], tokens.shape[1], c.width, reversed)
        table = dropout(table, c.dropout, site(noise, 3)).astype(dtype)
        shared = (table, *both_masks(types, segments, ranks, thresholds, slots, memory.segments), reuse)
        query, remembered = self.transform(tokens, query, shared, slots, memory.hidden, noise)
        return query, Memory(remembered, remember(memory.segments, segments[:, :reuse]))

    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """Run the content stream, where every token sees its whole segment -> [rows, length, width], or only the
        positions `slots` i32[rows, n] -> [rows, n, width]."""
        c, (tokens, types, segments) = self.config, (inputs[name] for name in ("tokens", "types", "segments"))
        length = tokens.shape[1]
        table = distance_table(sinusoids(length - 1, -length, c.width), c.dropout, site(noise, 3))
        mask = Mask(segments)
        slots_mask = None if slots is None else (chosen(mask, slots), Types(gather_positions(types, slots), types))
        shared = (table.astype(self.program.compute), (mask, Types(types, types)), slots_mask, None)
        return self.transform(tokens, None, shared, slots, self.empty_memory(len(tokens), 0).hidden, noise)[0]

    @nn.compact
    def transform(self, tokens: Array, query: Array | None, shared, slots: Array | None, memory: Array, noise: Noise):
        """Run the streams through all layers -> (the query stream, or without one the content stream, after dropout;
        the new memory).   shared: see `XLNetLayer`."""
        c, dtype = self.config, self.program.compute
        drop = lambda x, tag: dropout(x, c.dropout, site(noise, tag)).astype(dtype)
        embedded = jnp.take(constrain(self.tokens, "vocab", None), tokens, axis=0, mode="clip")
        content = constrain(drop(embedded, 0), "batch", "length", None)
        layer, noises = XLNetLayer(c, self.program, parent=None), site(noise, 1)
        x = content, query
        streams, remembered = stack(self, [layer], c.depth, x, shared, noises, self.program, slots, memory)
        return drop(streams if slots is not None else streams[0], 4), remembered

    def token_logits(self, hidden: Array) -> Array:
        """Return logits f32[rows * n, padded vocab] for hidden [rows, n, width]."""
        read = constrain(hidden.reshape(-1, hidden.shape[-1]), "batch", None)
        return tied_logits(read, self.tokens, self.bias, self.config.vocab_size)


def signed_table(memory: int, length: int, width: int, reversed: Array) -> Array:
    """Return the encodings of the distances memory + length - 1, ..., -length of each row: f32[batch, distances,
    width].
    reversed: i32[batch]; in a row that runs backwards all distances are negated, which flips the sign of the sines."""
    table = sinusoids(memory + length - 1, -length, width)
    backwards = table * np.repeat(np.float32([-1.0, 1.0]), width // 2)
    return jnp.where(reversed[:, None, None] > 0, backwards, table)


def both_masks(
    types: Array, segments: Array, ranks: Array, thresholds: Array, slots: Array, memory: Array
) -> tuple[tuple[Mask, Types], tuple[Mask, Types]]:
    """Return (mask, types) of the content stream and of the query stream.   memory: its segments; the other arguments
    as in `XLNet.query`."""
    mask = remembering(memory, Mask(segments, ranks, thresholds))
    of_keys = jnp.concatenate([jnp.zeros_like(memory), types], axis=1)
    content = dataclasses.replace(mask, itself=True), Types(types, of_keys)
    return content, (chosen(mask, slots), Types(gather_positions(types, slots), of_keys))


def parameters(config: XLNetConfig) -> list[Parameter]:
    """Return XLNet's parameter table; in Hugging Face's tensors heads have an axis of their own."""
    heads = (config.heads, config.width // config.heads)
    slot = lambda name, *form: {"model": Slot(f"transformer.{name}", *form)}
    layer = lambda name: {"model": f"transformer.layer.{{layer}}.{name}"}
    table = [
        Parameter("tokens", ("vocab", "embedding"), slot("word_embedding.weight")),
        Parameter("start", (None, "embedding"), slot("mask_emb", "", (1, 1, config.width))),
        Parameter("bias", ("vocab",), {"model": Slot("lm_loss.bias")}),
    ]
    for name, hf_name in {"query": "q", "key": "k", "value": "v", "position": "r", "output": "o"}.items():
        axes, layout = (("heads", "width"), "T") if name == "output" else (("width", "heads"), "")
        hf = slot(f"layer.{{layer}}.rel_attn.{hf_name}", layout, (config.width, *heads))
        table.append(Parameter(f"layers/attention/{name}/kernel", (LAYERS, *axes), hf))
    for name, hf_name in {"content": "w", "position": "r", "type": "s"}.items():
        hf = slot(f"layer.{{layer}}.rel_attn.r_{hf_name}_bias", "", heads)
        table.append(Parameter(f"layers/{name}_bias", (LAYERS, "heads"), hf))
    types = slot("layer.{layer}.rel_attn.seg_embed", "", (2, *heads))
    return [
        *table,
        Parameter("layers/types", (LAYERS, "type", "heads"), types),
        *norm_parameters("layers/attention/norm", (LAYERS, "width"), layer("rel_attn.layer_norm")),
        *dense_parameters("layers/feed_forward/up", (LAYERS, "width", "feed_forward"), layer("ff.layer_1")),
        *dense_parameters("layers/feed_forward/down", (LAYERS, "feed_forward", "width"), layer("ff.layer_2")),
        *norm_parameters("layers/feed_forward/norm", (LAYERS, "width"), layer("ff.layer_norm")),
    ]


def attentions(config: XLNetConfig, shape: Shape, memory: int) -> list[Attention]:
    """Return the attentions that a kernel may compute: the content stream's, and the query stream's, whose queries are
    the predicted positions."""
    sizes = (shape.length, config.width, config.heads, config.attention_dropout, memory)
    return [Attention(*sizes, chosen=chosen, ranked=True) for chosen in (False, True)]


_size = functools.partial(sized, XLNetConfig)
FAMILY = declare(
    config=XLNetConfig,
    sizes={
        "tiny": _size(2, 128, memory=48),
        "mini": _size(4, 256, memory=48),
        "base": _size(12, 768),  # Yang et al. 2019, appendix A.4 and the published checkpoints
        "large": _size(24, 1024),
    },
    inputs=INPUTS,
    trunk=XLNet,
    table=parameters,
    heads=(
        task_head(CLASSIFIER, "logits_proj", "sequence_summary.summary", "tanh", summary=True),
        task_head(TAGGER, "classifier", drops=False),
        crf_head(),
        task_head(SPANS, "qa_outputs", features=2, drops=False),
        task_head(CHOICE, "logits_proj", "sequence_summary.summary", "tanh", features=1, summary=True),
    ),
    architectures={
        "XLNetLMHeadModel": (),
        "XLNetForSequenceClassification": (CLASSIFIER,),
        "XLNetForTokenClassification": (TAGGER,),
        "XLNetForQuestionAnsweringSimple": (SPANS,),
        "XLNetForMultipleChoice": (CHOICE,),
    },
    constants={"model_type": "xlnet", "attn_type": "bi", "clamp_len": -1},
    fields={
        "vocab_size": "vocab_size",
        "d_model": "width",
        "n_layer": "depth",
        "n_head": "heads",
        "d_inner": "feed_forward",
        "ff_activation": "activation",
        "layer_norm_eps": "norm_epsilon",
    },
    settings={"dropout": "dropout", "summary_last_dropout": same_dropout("dropout"), "initializer_range": "init_std"},
    tied={"lm_loss.weight": "transformer.word_embedding.weight"},
    prefix="transformer.",
    pair="A sep B sep cls",
    prepare="--tokenizer sentencepiece-unigram --specials xlnet",
    assumed={"bi_data": False, "summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"},
    of_softmax=("lm_loss.bias",),
    attention="relative",
    attentions=attentions,
)
FAMILIES = {"xlnet": FAMILY}
