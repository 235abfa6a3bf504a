"""ELECTRA: replaced-token detection.

Clark et al. 2020 (arXiv:2003.10555), table 6: small: length 128, batch 128, rate 5e-4, 1M steps; base: length 512,
batch 256, rate 2e-4, 766k steps; large: length 512, batch 2048, rate 2e-4, 400k steps; Adam with epsilon 1e-6, decay
0.01, 10k steps of warm-up, linear decay; masking rate 15% (large 25%). Original hardware: small 1 V100, 4 days; base
16 TPU v3, 4 days. Expect on GLUE dev: small 79.9, base 85.1, large 89.0 (table 1 and 2).

    python -m pretrain run electra-small --corpus CORPUS --workdir RUN
"""

import dataclasses

from data_pipelines.examples.masking import Masking
from models.families.electra import FAMILY
from pretrain.objectives.layouts import PACKED
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule


def _recipe(size: str, phase: Phase, peak: float, steps: int, warmup: float, rate: float) -> Recipe:
    return Recipe(
        name=f"electra-{size}",
        source="Clark et al. 2020",
        model=FAMILY.sizes[size],
        objective=ReplacedTokenDetection(masking=Masking(rate=rate, mask=0.85, random=0.0)),
        optimizer=Optimizer(),
        schedule=Schedule(peak=peak, warmup=warmup),
        phases=(phase,),
        steps=steps,
    )


def _minutes(size: str, peak: float) -> Recipe:
    """Set up to learn within minutes on a CPU, from a vocabulary of some 2,000 tokens.

    Short rows and small batches: the number of updates counts most. Whole words: what does not make a word is the first
    thing that a discriminator learns to find. No dropout: no text is seen often enough to be learned by heart. A wider
    start than 0.02, which suits a width of 768.
    """
    recipe = _recipe(size, Phase(1.0, 32, 16), peak, 3000, 0.1, 0.15)
    masking = dataclasses.replace(recipe.objective.masking, unit="word_starts")
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, dropout=0.0, attention_dropout=0.0, init_std=0.05),
        objective=dataclasses.replace(recipe.objective, layout=PACKED, masking=masking),
    )


RECIPES = [
    _minutes("tiny", 1e-3),
    _minutes("mini", 5e-4),
    _recipe("small", Phase(1.0, 128, 128), 5e-4, 1_000_000, 0.01, 0.15),
    _recipe("base", Phase(1.0, 512, 256), 2e-4, 766_000, 10 / 766, 0.15),
    _recipe("large", Phase(1.0, 512, 2048), 2e-4, 400_000, 0.025, 0.25),
]
