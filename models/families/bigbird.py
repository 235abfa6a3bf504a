"""BigBird ITC (Zaheer et al. 2020, arXiv:2007.14062): BERT for long rows, where a query sees few blocks of keys.

The blocks at both ends of a row are global ("internal transformer construction"), as are the tokens that `globals`
names. Attention dropout is applied, as in the paper; Hugging Face's sparse attention keeps the field but never applies
it.

Hugging Face: BigBirdForPreTraining, BigBirdForMaskedLM without the pair head, and the classes with task heads; the one
for question answering subtracts 1e6 from the scores of a question's tokens. Sparse attention there always has a window
of 3 blocks and 2 global blocks. It draws its own random blocks in training and uses the row's first block for each of
them in evaluation; rows of up to 5 + 2 * random blocks have dense attention.
"""

import dataclasses
from collections.abc import Collection

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.encoder import EncoderConfig, encoder_family
from models.attention.patterns.pattern import DENSE, Pattern
from models.blocks import heads
from models.blocks.activations import ACTIVATIONS
from models.blocks.dense import Dense
from models.blocks.heads import CLASSIFIER, POOLER, SPANS, TaskHead, bert_heads, pair_head, task_head
from models.blocks.norm import Norm
from models.blocks.tables import dense_parameters, norm_parameters
from models.core.family import Converter, Head
from models.core.noise import dropout, site
from models.core.parameters import Noise
from models.core.program import Program


@dataclasses.dataclass(frozen=True)
class BigBirdConfig(EncoderConfig):
    """The fields with other defaults than BERT's."""

    vocab_size: int = 50358  # number of tokens, without padding rows
    positions: int = 4096  # length of the longest sequence, in tokens
    activation: str = "gelu_new"  # activation function of the feed-forward block and the masked-token head
    pattern: Pattern = Pattern("bigbird")  # which keys a query sees


_ATTENTION = Converter(
    "pattern.name",
    lambda config: "original_full" if config.pattern.name == DENSE else "block_sparse",
    lambda fields: {"original_full": DENSE, "block_sparse": "bigbird"}.get(
        kind := fields.get("attention_type", "block_sparse"), kind
    ),
)


def dense_up_to(pattern: Pattern) -> int:
    """Return the longest row, in tokens, on which transformers' BigBird uses dense attention."""
    return (5 + 2 * pattern.random) * pattern.block


def _otherwise(config: BigBirdConfig, heads: Collection[str]) -> list[str]:
    pattern, differences = config.pattern, []
    if pattern.name == DENSE:
        return differences
    if (pattern.name, pattern.window, pattern.global_blocks) != ("bigbird", 3, 2):
        differences += ["the pattern is BigBird's, with a window of 3 blocks and 2 global ones"]
    if pattern.random:
        differences += [
            "other blocks are drawn in training (by NumPy, seeded with the layer's number), and in evaluation the "
            "first block stands for each drawn one"
        ]
    return [*differences, f"rows of up to {dense_up_to(pattern)} tokens have dense attention"]


class SpanHead(TaskHead):
    """Scores of starts and ends of spans, after one more feed-forward block, whose residual branch has no dropout.
    feed_forward: width inside this block."""

    feed_forward: int = 0
    norm_epsilon: float = 0.0

    @nn.compact
    def __call__(self, hidden: Array, noise: Noise = None) -> Array:
        dense = lambda width, name: Dense(width, self.init_std, self.dtype, name=name)
        dropped = dropout(hidden, self.first_dropout, site(noise, 0))
        inner = ACTIVATIONS[self.between](dense(self.feed_forward, "up")(dropped))
        block = dropout(dense(hidden.shape[-1], "down")(inner), self.dropout, site(noise, 1))
        hidden = Norm(self.norm_epsilon, self.dtype, name="norm")(hidden + block)
        return Dense(self.features, self.init_std, jnp.float32, name="scores")(hidden)


def _span_head(hf: str) -> Head:
    def module(c: BigBirdConfig, program: Program) -> SpanHead:
        sizes = {"feed_forward": c.feed_forward, "norm_epsilon": c.norm_epsilon}
        return SpanHead(2, c.activation, True, c.dropout, c.dropout, c.init_std, program.compute, **sizes)

    part = lambda name: {"model": f"{hf}.{name}"}
    rows = (
        *dense_parameters(f"{SPANS}/up", ("width", "feed_forward"), part("intermediate.dense")),
        *dense_parameters(f"{SPANS}/down", ("feed_forward", "width"), part("output.dense")),
        *norm_parameters(f"{SPANS}/norm", ("width",), part("output.LayerNorm")),
        *dense_parameters(f"{SPANS}/scores", ("width", None), part("qa_outputs")),
    )
    return Head(SPANS, module, rows)


FAMILY = encoder_family(
    config=BigBirdConfig,
    sizes={
        "tiny": BigBirdConfig(width=128, depth=2, heads=2, feed_forward=512),
        "base": BigBirdConfig(),  # Zaheer et al. 2020, table 8
        "large": BigBirdConfig(width=1024, depth=24, heads=16, feed_forward=4096),
    },
    heads=bert_heads(
        "bert.pooler",
        pair_head("cls.seq_relationship"),
        classifier=task_head(CLASSIFIER, "classifier.out_proj", "classifier.dense", between=None),
        spans=_span_head("qa_classifier"),
    ),
    # All classes but one include the pooler.
    architectures={
        "BigBirdForMaskedLM": (heads.TOKENS, POOLER),
        "BigBirdForPreTraining": (heads.TOKENS, POOLER, heads.PAIR),
        "BigBirdForSequenceClassification": (POOLER, CLASSIFIER),
        "BigBirdForTokenClassification": (POOLER, heads.TAGGER),
        "BigBirdForQuestionAnswering": (SPANS,),
        "BigBirdForMultipleChoice": (POOLER, heads.CHOICE),
    },
    model_type="big_bird",
    names="bert",
    decoder="cls.predictions",
    constants={"use_bias": True, "rescale_embeddings": False},
    settings={"attention_type": _ATTENTION, "block_size": "pattern.block", "num_random_blocks": "pattern.random"},
    prepare="--tokenizer sentencepiece-bpe --specials albert",
    otherwise=_otherwise,
    continues={"bert": {}, "roberta": {}},
)
FAMILIES = {"bigbird": FAMILY}
