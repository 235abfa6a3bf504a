"""Transformer-XL: a causal language model with a memory of earlier segments.

Dai et al. 2019 (arXiv:1901.02860), WikiText-103: base: segments and memory of 150 tokens, batch 60; large: of 384,
batch 128; Adam with rate 2.5e-4, no decay, gradients clipped at 0.25, cosine to 0 (the paper's scripts: base 200k
steps; large 4M steps on TPUs with 16k of warm-up). The paper's test perplexities are 24.0 and 18.3 (table 1); its
scripts reach them in evaluation with a memory of 640 and 1600 and clamped distances, which this model does not have.

WikiText-103's vocabulary is its words by falling frequency, for which base and large have adaptive embeddings and
softmax. With articles as JSON Lines, one document each:

    python -m data_pipelines prepare --source jsonl:ARTICLES --tokenizer wordlevel --cased --vocab-size 267741 \\
        --out CORPUS
    python -m pretrain run transformer-xl-base --corpus CORPUS --workdir RUN

A vocabulary in another order, like SentencePiece's, needs a plain softmax: `--model.cutoffs` without numbers.
"""

from models.families.transformer_xl import FAMILY
from pretrain.objectives.causal_language_model import CausalLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_ADAM = Optimizer(epsilon=1e-8, decay=0.0, clip=0.25)
_PAPER = Paper("transformer-xl", "Dai et al. 2019", FAMILY, CausalLanguageModel(), _ADAM)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 16)),
    _PAPER.recipe("base", Schedule("cosine", peak=2.5e-4, warmup=0.0), 200_000, Phase(1.0, 150, 60)),
    _PAPER.recipe("large", Schedule("cosine", peak=2.5e-4, warmup=0.004), 4_000_000, Phase(1.0, 384, 128)),
]
