"""BigBird-ETC: masked tokens of long rows, with global tokens that stand for their sentences.

Zaheer et al. 2020 (arXiv:2007.14062), table 8 (base): 256 rows of 4,096, blocks of 84, window of 3 blocks, 256 global
tokens, no random blocks, Adam with rate 1e-4, 10k steps of warm-up, linear decay, dropout 0.1; large: blocks of 169.
Rows and global tokens of large are base's, which is ours. Original hardware: 64 TPU v3 chips; steps as BigBird's. The
paper begins with RoBERTa's weights, these recipes do not.

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --vocab-size 50265 --out CORPUS
    python -m pretrain run bigbird-etc-base --corpus CORPUS --workdir RUN
"""

from models.families.etc import FAMILY
from pretrain.objectives.masked_with_globals import GlobalPhase, MaskedWithGlobals
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("bigbird-etc", "Zaheer et al. 2020", FAMILY, MaskedWithGlobals())
_SCHEDULE = Schedule(peak=1e-4, warmup=0.02)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, GlobalPhase(1.0, 512, 8, globals=32)),
    _PAPER.recipe("base", _SCHEDULE, 500_000, GlobalPhase(1.0, 4096, 256)),
    _PAPER.recipe("large", _SCHEDULE, 500_000, GlobalPhase(1.0, 4096, 256)),
]
