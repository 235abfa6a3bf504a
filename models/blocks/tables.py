"""Parameter table rows and Hugging Face names of the blocks that families share."""

import operator
import re
from collections.abc import Mapping

from models.core.family import Converter, read_by
from models.core.parameters import LAYERS, Parameter, Slot

PADDING = 1  # id of the padding token in RoBERTa and its descendants, whose positions start after it


def embedding_parameters(prefix: str, hf: dict[str, str], before: int = 0) -> list[Parameter]:
    """Return the table rows of `Embeddings`.   hf: checkpoint part -> prefix of its names there.
    before: number of rows before the first token's in Hugging Face's position table, the `padding_positions`."""
    name = lambda suffix: {part: Slot(base + suffix) for part, base in hf.items()}
    axis = 0 if before else None
    places = {part: Slot(f"{base}position_embeddings.weight", axis=axis) for part, base in hf.items()}
    positions = {part: place._replace(before=before) for part, place in places.items()}
    return [
        Parameter(f"{prefix}/tokens", ("vocab", "embedding"), name("word_embeddings.weight")),
        *[Parameter(f"{prefix}/padding_positions", (None, "embedding"), places)] * (before > 0),
        Parameter(f"{prefix}/positions", ("position", "embedding"), positions),
        Parameter(f"{prefix}/types", ("type", "embedding"), name("token_type_embeddings.weight")),
        *norm_parameters(f"{prefix}/norm", ("embedding",), {part: f"{base}LayerNorm" for part, base in hf.items()}),
    ]


def norm_parameters(prefix: str, axes: tuple, hf: dict[str, str]) -> list[Parameter]:
    """Return the table rows of `Norm`."""
    return [
        Parameter(f"{prefix}/scale", axes, {part: Slot(f"{base}.weight") for part, base in hf.items()}),
        Parameter(f"{prefix}/bias", axes, {part: Slot(f"{base}.bias") for part, base in hf.items()}),
    ]


def dense_parameters(prefix: str, axes: tuple, hf: dict[str, str]) -> list[Parameter]:
    """Return the table rows of `Dense`.   axes: ([layers,] in, out)."""
    return [
        Parameter(f"{prefix}/kernel", axes, {part: Slot(f"{base}.weight", "T") for part, base in hf.items()}),
        Parameter(f"{prefix}/bias", axes[:-2] + axes[-1:], {part: Slot(f"{base}.bias") for part, base in hf.items()}),
    ]


PRODUCTS = "query", "key", "value"
# Last part of the path of a layer's norm or dense layer -> the axes of its scale or kernel
_AXES = {
    **dict.fromkeys((*PRODUCTS, "position"), ("width", "heads")),
    "output": ("heads", "width"),
    **dict.fromkeys(("up", "gate"), ("width", "feed_forward")),
    "down": ("feed_forward", "width"),
    "norm": ("width",),
}


def stacked_parameters(
    prefix: str, names: Mapping[str, str], hf: Mapping[str, str], biased: bool = True
) -> list[Parameter]:
    """Return the table rows of a stack of layers.

    names: path of a norm or dense layer, below the prefix -> its name in Hugging Face's layer.   hf: checkpoint part ->
    the name of a layer there.   biased: whether they have biases.
    """
    rows = []
    for path, name in names.items():
        axes = LAYERS, *_AXES[re.split("[/_]", path)[-1]]
        make = norm_parameters if len(axes) == 2 else dense_parameters
        both = make(f"{prefix}/{path}", axes, {part: f"{layer}.{name}" for part, layer in hf.items()})
        rows += both if biased else both[:1]
    return rows


# Names in a layer of BERT and its descendants, and of GPT and GPT-2
_BERT_LAYER = {
    **{f"attention/{name}": f"attention.self.{name}{{0}}" for name in PRODUCTS},
    "attention/output": "attention.output.dense",
    "attention/norm": "attention.output.LayerNorm",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
    "feed_forward/norm": "output.LayerNorm",
}
_GPT_LAYER = {
    **dict.fromkeys((f"attention/{name}" for name in PRODUCTS), "attn.c_attn"),
    "attention/output": "attn.c_proj",
    "attention/norm": "ln_1",
    "feed_forward/up": "mlp.c_fc",
    "feed_forward/down": "mlp.c_proj",
    "feed_forward/norm": "ln_2",
}


def layer_parameters(prefix: str, part: str, hf: str, projection: str = "") -> list[Parameter]:
    """Return the table rows of a stack of `TransformerLayer`.   hf: the model's prefix in Hugging Face, like 'bert'.
    projection: end of the names of queries, keys and values there."""
    names = {path: name.format(projection) for path, name in _BERT_LAYER.items()}
    return stacked_parameters(prefix, names, {part: f"{hf}.encoder.layer.{{layer}}"})


def gpt_parameters(tokens: str, positions: str) -> list[Parameter]:
    """Return the table rows of embeddings and of a stack of `TransformerLayer`, with the names of GPT and GPT-2.
    tokens, positions: the names of the embeddings in Hugging Face."""
    table = lambda name, axis, hf: Parameter(f"embeddings/{name}", (axis, "embedding"), {"model": Slot(f"{hf}.weight")})

    def stored(row: Parameter) -> Parameter:
        # As [in, out], like ours; one tensor holds query, key and value side by side.
        slot = row.hf["model"]
        axis = len(row.layer_axes) - 1 if "c_attn" in slot.name else None
        return row._replace(hf={"model": slot._replace(layout="", axis=axis)})

    layers = stacked_parameters("layers", _GPT_LAYER, {"model": "transformer.h.{layer}"})
    return [table("tokens", "vocab", tokens), table("positions", "position", positions), *map(stored, layers)]


def token_head_parameters(prefix: str, dense: str, norm: str, bias: str, part: str = "model") -> list[Parameter]:
    """Return the table rows of a `TokenHead`.   dense, norm, bias: its names in Hugging Face."""
    return [
        *dense_parameters(f"{prefix}/dense", ("width", "embedding"), {part: dense}),
        *norm_parameters(f"{prefix}/norm", ("embedding",), {part: norm}),
        Parameter(f"{prefix}/bias", ("vocab",), {part: Slot(bias)}),
    ]


def same_dropout(hf: str) -> Converter:
    """Write the model's dropout under one more name, for a class's heads; it is read under the name `hf` instead."""
    return read_by("dropout", operator.itemgetter(hf))


# Names in the config.json of BERT and its descendants -> config fields
HF_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "positions",
    "type_vocab_size": "types",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_epsilon",
}
HF_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "feed_forward",
}
HF_SETTINGS = {
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_std",
}
HF_ASSUMED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
# The same for GPT, GPT-2 and CTRL
GPT_FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "positions",
    "n_embd": "width",
    "n_layer": "depth",
    "n_head": "heads",
    "layer_norm_epsilon": "norm_epsilon",
}
GPT_SETTINGS = {"embd_pdrop": "dropout", "resid_pdrop": "dropout", "initializer_range": "init_std"}
# GPT's width inside the feed-forward block, which published config.json files may leave out
GPT_INNER = read_by("feed_forward", lambda fields: fields.get("n_inner") or 4 * fields["n_embd"])
# RoBERTa's position table has rows before the first token's, which "max_position_embeddings" includes
OFFSET_POSITIONS = Converter(
    "positions",
    lambda config: config.positions + PADDING + 1,
    lambda fields: fields["max_position_embeddings"] - PADDING - 1,
)
