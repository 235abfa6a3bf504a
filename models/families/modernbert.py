"""ModernBERT (Warner et al. 2024, arXiv:2412.13663, section 2.1) and its twin, a causal decoder with the same layers
(Weller et al. 2025, arXiv:2507.11412, Ettin).

Rotary positions, norms before the blocks, gated feed-forward blocks, and no biases but that of the logits. Layers take
turns as in `models/attention/local_global.py`; a local layer of the decoder sees a window before each token.

Hugging Face: ModernBertForMaskedLM and the classes with task heads, and ModernBertDecoderForCausalLM. There the local
layers of a decoder see one token less than half of `local_attention` before each. Weights are drawn from a normal
distribution that is not cut off at two standard deviations, as it is there.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
from jax import Array

from models.attention.decoder import Decoder
from models.attention.local_global import PERIOD, attentions, seen, seen_by_pattern, through, views
from models.attention.mask import Mask
from models.attention.patterns.pattern import DENSE, Pattern
from models.blocks import heads
from models.blocks.activations import ACTIVATIONS
from models.blocks.config import TrunkConfig
from models.blocks.crf import crf_head
from models.blocks.dense import Dense
from models.blocks.embeddings import Embeddings, padded_vocab, padding_bias
from models.blocks.heads import TOKENS, WithHeads, task_head, tied_logits, usual_classes
from models.blocks.norm import Norm
from models.blocks.tables import HF_SIZES, PRODUCTS, dense_parameters, norm_parameters, stacked_parameters
from models.core.family import Converter, Family, Head, Input, Inputs, declare, read_by
from models.core.parameters import LAYERS, Noise, Parameter, Slot, parameter
from models.core.program import Program
from models.core.ranges import COUNT, POSITIVE, check_ranges
from models.core.sharding import constrain

TABLE = "model.embeddings.tok_embeddings.weight"
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in config.json
TRANSFORM = "head_transform"  # head whose output the other heads read
INPUTS = dict.fromkeys(("tokens", "segments"), Input(("length",)))


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(TrunkConfig):
    """Sizes and rates; the defaults are those of ModernBERT-base."""

    vocab_size: int = 50368  # number of tokens, without padding rows
    positions: int = 8192  # length of the longest row, in tokens; no table has so many rows
    depth: int = 22  # number of layers, one more than a multiple of 3
    feed_forward: int = 1152  # width inside the feed-forward block
    pattern: Pattern = Pattern("longformer", windows=(128,))  # the window of local layers; dense: all layers are global
    global_base: float = 160_000.0  # base of the rotary positions of global layers
    local_base: float = 10_000.0  # the same of local layers
    dropout: float = 0.1  # dropout rate of the attention's output
    attention_dropout: float = 0.0  # dropout rate of attention probabilities
    norm_epsilon: float = 1e-5  # added to the variance in norms
    labels: tuple[str, ...] = ()  # classes of a task head

    causal: ClassVar[bool] = False
    biases: ClassVar[bool] = False
    gated: ClassVar[bool] = True
    norm: ClassVar[str] = "unbiased"

    def __post_init__(self):
        check_ranges(self, {"positions": COUNT, "global_base": POSITIVE, "local_base": POSITIVE}, "model.")
        super().__post_init__()
        if self.depth % PERIOD != 1:
            low = max(1, (self.depth - 1) // PERIOD * PERIOD + 1)
            wrong = f"must be one more than a multiple of {PERIOD}; use {low} or {low + PERIOD}"
            raise ValueError(f"model.depth={self.depth}: {wrong}")
        if self.width // self.heads % 2:
            raise ValueError(f"model.heads={self.heads}: a head's {self.width // self.heads} numbers must be even")
        near = self.pattern
        if near.name not in (DENSE, "longformer") or len(near.windows) > 1 or near.dilations != (1,):
            wrong = "local layers have one window without dilation; use longformer with one of windows, or dense"
            raise ValueError(f"model.pattern.name={near.name!r}: {wrong}")

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial weights into the residual stream."""
        return self.init_std * (2 * self.depth) ** -0.5


@dataclasses.dataclass(frozen=True)
class ModernBertDecoderConfig(ModernBertConfig):
    """The fields with another default than the encoder's."""

    pattern: Pattern = Pattern("longformer", windows=(126,))  # 63 tokens before each
    causal: ClassVar[bool] = True


class Transform(nn.Module):
    """What stands before logits and scores: dense, GELU, norm."""

    config: ModernBertConfig
    program: Program

    @nn.compact
    def __call__(self, hidden: Array, table: Array | None = None) -> Array:
        """hidden [..., width] -> the same."""
        c, dtype = self.config, self.program.compute
        dense = Dense(c.width, c.output_std, dtype, bias=False, name="dense")
        return Norm(c.norm_epsilon, dtype, c.norm, name="norm")(ACTIVATIONS["gelu"](dense(hidden)))


class Logits(nn.Module):
    """Logits over the tied embeddings, with a bias."""

    vocab_size: int

    def setup(self):
        self.bias = parameter(self, "bias", nn.initializers.zeros, (padded_vocab(self.vocab_size),))

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [rows, n, width], table f32[padded, width] -> f32[rows * n, padded]."""
        hidden = constrain(hidden.reshape(-1, hidden.shape[-1]), "batch", None)
        return tied_logits(hidden, table, self.bias, self.vocab_size)


def embeddings(config: ModernBertConfig) -> Embeddings:
    """Return the embeddings of tokens with their norm."""
    return Embeddings(config.vocab_size, config.width, (), config.norm_epsilon, config.init_std, config.norm)


class ModernBert(WithHeads):
    """The encoder."""

    def setup(self):
        super().setup()
        c = self.config
        self.embeddings, self.norm = embeddings(c), Norm(c.norm_epsilon, self.program.compute, c.norm)

    @nn.compact
    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        x = self.embeddings(inputs).astype(self.program.compute)
        by_kind = views(self.config, Mask(inputs["segments"]))
        x, _ = through(self, self.config, x, by_kind, noise, self.program, slots)
        return constrain(self.norm(x), "batch", "length" if slots is None else None, None)


class ModernBertDecoder(Decoder):
    """The decoder; its logits have a transform and a bias."""

    def setup(self):
        WithHeads.setup(self)
        c = self.config
        self.embeddings, self.norm = embeddings(c), Norm(c.norm_epsilon, self.program.compute, c.norm)
        self.lm_head, self.predictions = Transform(c, self.program), Logits(c.vocab_size)

    def decode(self, inputs: Inputs, noise: Noise = None) -> Array:
        x = self.embed(inputs).astype(self.program.compute)
        return self.transform(x, Mask(inputs["segments"], causal=True), noise)[0]

    @nn.compact
    def transform(self, x: Array, mask, noise: Noise, cached: tuple[Array, Array] | None = None):
        by_kind = views(self.config, *((mask,) if cached is None else mask))
        x, new = through(self, self.config, x, by_kind, noise, self.program, None, cached)
        return constrain(self.norm(x), "batch", None if cached else "length", None), new

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        bias = self.predictions.bias + padding_bias(self.config.vocab_size)
        return self.lm_head(hidden), self.embeddings.tokens, bias


def _layers(prefix: str, numbers: dict[int, int], causal: bool, normed: bool) -> list[Parameter]:
    """Return the rows of a stack of layers.   numbers: layer in Hugging Face -> its place in the stack."""
    names = {
        "attention/norm": "attn_norm",
        **{f"attention/{name}": f"attn.{name[0]}_proj" if causal else "attn.Wqkv" for name in PRODUCTS},
        "attention/output": "attn.Wo",
        "feed_forward/norm": "mlp_norm",
        "feed_forward/up": "mlp.Wi",
        "feed_forward/gate": "mlp.Wi",
        "feed_forward/down": "mlp.Wo",
    }
    if normed:
        del names["attention/norm"]

    def placed(row: Parameter) -> Parameter:
        slot = row.hf["model"]
        axis = 0 if slot.name.endswith(("Wqkv.weight", "Wi.weight")) else None
        return row._replace(hf={"model": slot._replace(axis=axis, layers=numbers)})

    return [placed(row) for row in stacked_parameters(prefix, names, {"model": "model.layers.{layer}"}, biased=False)]


def _norm(path: str, name: str) -> Parameter:
    return norm_parameters(path, ("width",), {"model": name})[0]


def _transform_parameters(path: str, name: str) -> tuple[Parameter, ...]:
    kernel, _ = dense_parameters(f"{path}/dense", ("width", None), {"model": f"{name}.dense"})
    return kernel, _norm(f"{path}/norm", f"{name}.norm")


_BIAS = Parameter(f"{TOKENS}/bias", ("vocab",), {"model": Slot("decoder.bias")})


def parameters(config: ModernBertConfig) -> list[Parameter]:
    turns = config.depth // PERIOD
    numbers = [{PERIOD * turn + place + 1: turn for turn in range(turns)} for place in range(PERIOD)]
    return [
        Parameter("embeddings/tokens", ("vocab", "embedding"), {"model": Slot(TABLE)}),
        _norm("embeddings/norm", "model.embeddings.norm"),
        *_layers(f"first/{LAYERS}", {0: 0}, config.causal, normed=True),
        *(
            row
            for place in range(PERIOD if turns else 0)
            for row in _layers(f"{LAYERS}/{place}", numbers[place], config.causal, normed=False)
        ),
        _norm("norm", "model.final_norm"),
        *((*_transform_parameters("lm_head", "lm_head"), _BIAS) if config.causal else ()),
    ]


def _kinds(config: ModernBertConfig) -> list[str]:
    local = FULL if config.pattern.name == DENSE else SLIDING
    return [local if layer % PERIOD else FULL for layer in range(config.depth)]


def _pattern(fields: Mapping[str, Any]) -> str:
    """Read the name of the local layers' pattern; TypeError if layers take turns in another way."""
    kinds = fields.get("layer_types") or [FULL, SLIDING]
    local = {kind for layer, kind in enumerate(kinds) if layer % PERIOD}
    if {*kinds[::PERIOD]} != {FULL} or len(local) > 1:
        raise TypeError
    return DENSE if local == {FULL} else "longformer"


def _base(kind: str, older: str, default: float) -> Callable[[Mapping[str, Any]], float]:
    """Return how a base is read, from transformers 5's `rope_parameters` or its older name."""

    def read(fields: Mapping[str, Any]) -> float:
        rope = (fields.get("rope_parameters") or {}).get(kind) or {}
        if rope.get("rope_type", "default") != "default":
            raise TypeError
        return float(rope.get("rope_theta", fields.get(older, default)))

    return read


def _rope(config: ModernBertConfig) -> dict[str, dict[str, Any]]:
    """Return `rope_parameters` of config.json."""
    bases = {FULL: config.global_base, SLIDING: config.local_base}
    return {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}


def _fields(unseen: int) -> dict[str, str | Converter]:
    """Return the fields of config.json.   unseen: tokens on both sides by which a window is smaller than it says."""
    of_global, of_local = _base(FULL, "global_rope_theta", 160_000.0), _base(SLIDING, "local_rope_theta", 10_000.0)
    window = lambda fields: (fields.get("local_attention", 128) // 2 * 2 - unseen,)
    return {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "positions",
        **HF_SIZES,
        "hidden_activation": "activation",
        "norm_eps": "norm_epsilon",
        "layer_types": Converter("pattern.name", _kinds, _pattern),
        "local_attention": Converter("pattern.windows", lambda c: c.pattern.windows[0] + unseen, window),
        "rope_parameters": Converter("global_base", _rope, of_global),
        "global_rope_theta": read_by("global_base", of_global),
        "local_rope_theta": read_by("local_base", of_local),
    }


_OTHER_DROPOUT = ["dropout of the attention's output is that of its probabilities"]
ASSUMED = {"global_attn_every_n_layers": PERIOD, "classifier_activation": "gelu", "decoder_bias": True}
ASSUMED |= dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False)


def _sizes(kind: type) -> dict[str, ModernBertConfig]:
    """Return the sizes that both have."""
    sizes = {
        "tiny": (4, 128, 2, 192),
        # Warner et al. 2024, table 4
        "base": (22, 768, 12, 1152),
        "large": (28, 1024, 16, 2624),
        # Weller et al. 2025, table 1, whose 150m and 400m are base and large
        "17m": (7, 256, 4, 384),
        "32m": (10, 384, 6, 576),
        "68m": (19, 512, 8, 768),
        "1b": (28, 1792, 28, 3840),
    }
    fields = ("depth", "width", "heads", "feed_forward")
    return {name: kind(**dict(zip(fields, numbers, strict=True))) for name, numbers in sizes.items()}


def _family(config: type, model_type: str, unseen: int, **others: Any) -> Family:
    """Declare one of the twins.   unseen: see `_fields`.   others: as in `declare`."""
    return declare(
        config=config,
        sizes=_sizes(config),
        inputs=INPUTS,
        table=parameters,
        seen=seen,
        seen_by_pattern=seen_by_pattern,
        attention="self",
        attentions=attentions,
        constants={"model_type": model_type},
        fields=_fields(unseen),
        settings={
            "attention_dropout": "attention_dropout",
            "attention_output_dropout": "dropout",  # which transformers does not read
            "initializer_range": "init_std",
        },
        tied={"decoder.weight": TABLE},
        prefix="model.",
        pair=None,
        prepare="--tokenizer bpe",
        otherwise=lambda c, _: _OTHER_DROPOUT * (c.dropout != c.attention_dropout),
        assumed=ASSUMED,
        **others,
    )


_FROM_HEAD = {f"lm_head/{path}": f"{TRANSFORM}/{path}" for path in ("dense/kernel", "norm/scale")}
_TRANSFORM = Head(TRANSFORM, Transform, _transform_parameters(TRANSFORM, "head"))
_HEADS = (
    _TRANSFORM,
    Head(TOKENS, lambda c, program: Logits(c.vocab_size), (_BIAS,), reads=TRANSFORM),
    *(task_head(name, "classifier", reads=TRANSFORM) for name in (heads.CLASSIFIER, heads.TAGGER)),
    crf_head(),
    task_head(heads.SPANS, "classifier", features=2, reads=TRANSFORM),
    task_head(heads.CHOICE, "classifier", features=1, reads=TRANSFORM),
)
_DECODER_HEADS = _TRANSFORM, task_head(heads.CLASSIFIER, "classifier", reads=TRANSFORM, biased=False)
FAMILY = _family(
    ModernBertConfig,
    "modernbert",
    0,
    trunk=ModernBert,
    heads=_HEADS,
    architectures=usual_classes("ModernBert", _HEADS),
    continues={"modernbert-decoder": {there: here for here, there in _FROM_HEAD.items()}},
)
DECODER = _family(
    ModernBertDecoderConfig,
    "modernbert-decoder",
    2,
    trunk=ModernBertDecoder,
    heads=_DECODER_HEADS,
    architectures={"ModernBertDecoderForCausalLM": (), **usual_classes("ModernBertDecoder", _DECODER_HEADS)},
    all_ids=True,
    of_softmax=("lm_head.dense.weight", "lm_head.norm.weight", "decoder.bias"),
    continues={"modernbert": _FROM_HEAD},
)
FAMILIES = {"modernbert": FAMILY, "modernbert-decoder": DECODER}
