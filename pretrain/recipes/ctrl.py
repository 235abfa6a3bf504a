r"""CTRL: next tokens of texts that start with a control code.

Keskar et al. 2019 (arXiv:1909.05858), section 3.2: 140 GB of text, batch 1024 at length 256, 800k steps, Adagrad with
rate 0.05 after 25k steps of warm-up, gradients clipped at 0.25, dropout 0.1 of embeddings and blocks, no decay; 246,534
tokens, learnt with newlines inside words. Adagrad's sums start at 0.1, as in TensorFlow. Original hardware: 256 cores
of TPU v3, two weeks. In the paper no token ends a document; here GPT-2's does, the last of the vocabulary.

    python -m data_pipelines prepare --source SOURCE --tokenizer character-bpe --specials ctrl --vocab-size 246534 \
        --out CORPUS
    python -m pretrain run ctrl-base --corpus CORPUS --workdir RUN
"""

from models.families.ctrl import FAMILY
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import COSINE_MINUTES, Paper
from pretrain.schedules import Schedule

_ADAGRAD = Optimizer("adagrad", epsilon=1e-7, decay=0.0, clip=0.25)
_PAPER = Paper("ctrl", "Keskar et al. 2019", FAMILY, NextTokenPrediction(), _ADAGRAD)

RECIPES = [
    _PAPER.recipe("tiny", COSINE_MINUTES, 3000, Phase(1.0, 128, 32), optimizer=Optimizer()),
    _PAPER.recipe("base", Schedule("constant", peak=0.05, warmup=25 / 800), 800_000, Phase(1.0, 256, 1024)),
]
