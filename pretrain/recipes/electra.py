"""ELECTRA: replaced-token detection.

Clark et al. 2020 (arXiv:2003.10555), table 6: small: length 128, batch 128, rate 5e-4, 1M steps; base: length 512,
batch 256, rate 2e-4, 766k steps; large: length 512, batch 2048, rate 2e-4, 400k steps; Adam with epsilon 1e-6, decay
0.01, 10k steps of warm-up, linear decay; masking rate 15% (large 25%). Original hardware: small 1 V100, 4 days; base
16 TPU v3, 4 days. Expect on GLUE dev: small 79.9, base 85.1, large 89.0 (tables 1 and 2).

    python -m pretrain run electra-small --corpus CORPUS --workdir RUN
"""

import dataclasses

from data_pipelines.examples.masking import Masking
from models.families.electra import FAMILY
from pretrain.objectives.masked_language_model import PACKED
from pretrain.objectives.objective import Phase
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.recipe import Recipe
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("electra", "Clark et al. 2020", FAMILY, ReplacedTokenDetection(masking=Masking(mask=0.85, random=0.0)))


def _minutes(size: str, peak: float) -> Recipe:
    """Make a recipe that learns in minutes on a CPU, with a vocabulary of some 2,000 tokens.

    Short rows and small batches, since the number of updates matters most. Whole words are masked, since a
    discriminator first learns to find non-words. No dropout, since no text is seen often enough to be memorised. The
    initial standard deviation is larger than 0.02, which suits a width of 768.
    """
    masking = dataclasses.replace(_PAPER.objective.masking, unit="word_starts")
    objective = dataclasses.replace(_PAPER.objective, layout=PACKED, masking=masking)
    model = dataclasses.replace(FAMILY.sizes[size], dropout=0.0, attention_dropout=0.0, init_std=0.05)
    schedule = dataclasses.replace(MINUTES, peak=peak)
    return _PAPER.recipe(size, schedule, 3000, Phase(1.0, 32, 16), model=model, objective=objective)


_LARGE = ReplacedTokenDetection(masking=Masking(rate=0.25, mask=0.85, random=0.0))

RECIPES = [
    _minutes("tiny", 1e-3),
    _minutes("mini", 5e-4),
    _PAPER.recipe("small", Schedule(peak=5e-4, warmup=0.01), 1_000_000, Phase(1.0, 128, 128)),
    _PAPER.recipe("base", Schedule(peak=2e-4, warmup=10 / 766), 766_000, Phase(1.0, 512, 256)),
    _PAPER.recipe("large", Schedule(peak=2e-4, warmup=0.025), 400_000, Phase(1.0, 512, 2048), objective=_LARGE),
]
