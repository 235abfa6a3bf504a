"""XLNet: permutation language modelling with two-stream attention and memory.

Yang et al. 2019 (arXiv:1906.08237), table 8: large: length 512, batch 8192, 500k steps, rate 4e-4, 40k steps of
warm-up, linear decay, Adam with epsilon 1e-6, decay 0.01, dropout 0.1, K = 6; memory 384, reused length and permutation
blocks of 256 as in its code. The paper's base has BERT-base's sizes; batch, steps and rate here are BERT-base's too.
Dropout is applied as in Hugging Face's XLNet, also inside the feed-forward block. Original hardware: 512 TPU v3 chips,
5.5 days (large). Expect on GLUE dev, single model: large MNLI 90.8, SST-2 97.0 (table 5).

Held-out rows are spread over the rows of a batch: with large batches raise --eval-examples, or memories stay short.

    python -m data_pipelines prepare --source SOURCE --tokenizer sentencepiece-unigram --cased --vocab-size 32000 \\
        --out CORPUS
    python -m pretrain run xlnet-base --corpus CORPUS --workdir RUN
"""

from data_pipelines.examples.permutations import Permuting
from models.families.xlnet import FAMILY
from pretrain.objectives.objective import Phase
from pretrain.objectives.permutation_language_model import PermutationLanguageModel
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("xlnet", "Yang et al. 2019", FAMILY, PermutationLanguageModel(permuting=Permuting()))
_SMALL = PermutationLanguageModel(permuting=Permuting(reuse_len=32, perm_size=32))

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 64, 16), objective=_SMALL),
    _PAPER.recipe("mini", Schedule(peak=5e-4, warmup=0.1), 3000, Phase(1.0, 64, 16), objective=_SMALL),
    _PAPER.recipe("base", Schedule(peak=1e-4, warmup=0.01), 1_000_000, Phase(1.0, 512, 256)),
    _PAPER.recipe("large", Schedule(peak=4e-4, warmup=0.08), 500_000, Phase(1.0, 512, 8192)),
]
