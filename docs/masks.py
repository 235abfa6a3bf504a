"""Draw docs/families/masks: which keys each query attends to, from the masks that the models use.

python docs/masks.py
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from data_pipelines.examples.unified_pairs import TASKS, of_tasks  # noqa: E402
from models.attention.local_global import GLOBAL, LOCAL, views  # noqa: E402
from models.attention.mask import Mask, remembering, visible  # noqa: E402
from models.attention.patterns.pattern import Pattern, on_host  # noqa: E402
from models.families.modernbert import ModernBertConfig, ModernBertDecoderConfig  # noqa: E402
from models.families.xlnet import both_masks  # noqa: E402

FOLDER = ROOT / "docs" / "families" / "masks"
COLORS = np.array([[255, 255, 255], [76, 114, 176], [221, 132, 82]], np.uint8)  # hidden, seen, seen in the memory
PAIR = ["[CLS]", "the", "lake", "froze", "[SEP]", "we", "skated", "on", "it", "[SEP]", "[PAD]", "[PAD]"]
TEXT = ["The", "lake", "froze", ".", "<end>", "We", "skated", "on", "it", ".", "<end>"]
INPUT, TARGET = (
    ["The", "lake", "<0>", ".", "We", "<1>", "on", "it", ".", "</s>"],
    ["<0>", "froze", "<1>", "skated", "</s>"],
)
NOISED = ["<s>", "We", "<mask>", "on", "it", ".", "The", "lake", "<mask>", ".", "</s>"]
WHOLE = ["<s>", "The", "lake", "froze", ".", "We", "skated", "on", "it", ".", "</s>"]
WORDS = ["the", "lake", "froze", "and", "we", "skated"]


class Panel(NamedTuple):
    """queries, keys: labels of the axes.   memory: number of keys, from the left, that are a memory."""

    title: str
    queries: list[str]
    keys: list[str]
    mask: Mask
    memory: int = 0


def rows(*numbers: int) -> jax.Array:
    """Return i32[1, length]."""
    return jnp.array([numbers], jnp.int32)


def panels() -> dict[str, list[Panel]]:
    """Return the panels of each picture by name."""
    real = rows(*(int(token != "[PAD]") for token in PAIR))
    text = rows(*[1] * len(TEXT))
    documents = rows(*[1] * 5, *[2] * 6)
    return {
        "encoder": [Panel("padding is hidden", PAIR, PAIR, Mask(real))],
        "decoder": [
            Panel("default: the whole row", TEXT, TEXT, Mask(text, causal=True)),
            Panel("--objective.separate", TEXT, TEXT, Mask(documents, causal=True)),
        ],
        "t5": encoder_decoder(INPUT, TARGET),
        "bart": encoder_decoder(NOISED, WHOLE),
        "unilm": unilm_panels(),
        "transformer-xl": [memory_panel()],
        "xlnet": xlnet_panels(),
        "bigbird": pattern_panels(Pattern("bigbird", block=4), 2),
        "modernbert": modernbert_panels(),
        "longformer": pattern_panels(Pattern("longformer", block=4, windows=(16,)), 1, globals_=rows(0)),
    }


def encoder_decoder(read: list[str], written: list[str]) -> list[Panel]:
    """Return the three masks of an encoder-decoder.   read, written: tokens of the input and the target."""
    of_input, of_target = rows(*[1] * len(read)), rows(*[1] * len(written))
    return [
        Panel("encoder", read, read, Mask(of_input)),
        Panel("decoder: the target", written, written, Mask(of_target, causal=True)),
        Panel("decoder: the input", written, read, Mask(of_input, queries=of_target, whole=True)),
    ]


def memory_panel() -> Panel:
    """Return the mask of `TransformerXL.read` for a memory of 5 tokens and a row."""
    row, before = TEXT[5:], TEXT[:5]
    ranks = jnp.arange(len(row))[None]
    mask = remembering(jnp.ones((1, 5), jnp.int32), Mask(rows(*[1] * len(row)), ranks, ranks + 1))
    return Panel("a row and its memory", row, before + row, mask, memory=5)


def unilm_panels() -> list[Panel]:
    """Return the masks of UniLM's tasks; in rows of one direction all is one text."""
    pair, second = PAIR[:10], np.array([[0] * 5 + [1] * 5])
    _, ranks = of_tasks(np.array(TASKS), second, np.ones((4, 10), np.int32))
    names = "bidirectional", "sequence to sequence", "left to right", "right to left"
    masks = (Mask(rows(*[1] * 10), row[None], row[None] + 1) for row in jnp.asarray(ranks))
    return [Panel(name, pair, pair, mask) for name, mask in zip(names, masks, strict=True)]


def xlnet_panels() -> list[Panel]:
    """Return XLNet's two masks; labels have each token's place in the order of prediction."""
    ranks, ones, memory = rows(3, 1, 5, 0, 4, 2), rows(*[1] * 6), jnp.zeros((1, 0), jnp.int32)
    (content, _), (query, _) = both_masks(jnp.zeros_like(ones), ones, ranks, ranks, jnp.arange(6)[None], memory)
    names = [f"{word} ({rank + 1})" for word, rank in zip(WORDS, ranks[0].tolist(), strict=True)]
    return [Panel("content stream", names, names, content), Panel("query stream", names, names, query)]


def pattern_panels(pattern: Pattern, heads: int, globals_: jax.Array | None = None) -> list[Panel]:
    """Return the masks of the first layer's heads, for rows of 64 tokens in blocks of 4."""
    of_layer = jax.tree.map(lambda array: jnp.asarray(array[0]), on_host(pattern, 1, heads, 64))
    mask = Mask(rows(*[1] * 64), blocks=of_layer, globals=globals_)
    seen = visible(mask)
    title = "head {}" if seen.shape[1] > 1 else "all heads"
    return [Panel(title.format(head + 1), [], [], mask) for head in range(seen.shape[1])]


def modernbert_panels() -> list[Panel]:
    """Return the masks of ModernBERT's two kinds of layers, and of a decoder's local ones, for rows of 64 tokens."""
    near, ones = Pattern("longformer", block=4, windows=(16,)), rows(*[1] * 64)
    of = lambda config, causal: views(config(width=8, heads=2, pattern=near), Mask(ones, causal=causal))
    encoder, decoder = of(ModernBertConfig, False), of(ModernBertDecoderConfig, True)
    return [
        Panel("global layers", [], [], encoder[GLOBAL].mask),
        Panel("local layers", [], [], encoder[LOCAL].mask),
        Panel("a decoder's local layers", [], [], decoder[LOCAL].mask),
    ]


def draw(panels: Iterable[Panel], out: Path) -> None:
    """Draw panels side by side; a dark square is a key (across) that a query (down) attends to."""
    panels = list(panels)
    height = 3.7 if len(panels) < 4 else 4.0  # room for the labels of wide panels
    figure = Figure((3.6 * len(panels), height), layout="constrained")
    for index, (axes, panel) in enumerate(zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)):
        seen = np.array(visible(panel.mask))[0]
        kinds = seen[min(index, len(seen) - 1)].astype(int)
        kinds[:, : panel.memory] *= 2
        axes.imshow(COLORS[kinds], interpolation="nearest")
        axes.set_title(panel.title, fontsize="medium")
        axes.set_xticks(range(len(panel.keys)), panel.keys, rotation=90, fontsize="x-small")
        axes.set_yticks(range(len(panel.queries)), panel.queries, fontsize="x-small")
        for across, number in zip("xy", kinds.shape[::-1], strict=True):
            getattr(axes, f"set_{across}ticks")(np.arange(0.5, number), minor=True)
        axes.grid(which="minor", color="0.85", linewidth=0.4)
        axes.tick_params(which="both", length=0)
        axes.set_xlabel("keys", fontsize="small")
    figure.axes[0].set_ylabel("queries", fontsize="small")
    figure.savefig(out, dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, of_picture in panels().items():
        draw(of_picture, FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")
