"""ELECTRA: replaced-token detection.

Clark et al. 2020 (arXiv:2003.10555), table 6: small: length 128, batch 128, rate 5e-4, 1M steps; base: length 512,
batch 256, rate 2e-4, 766k steps; large: length 512, batch 2048, rate 2e-4, 400k steps; Adam with epsilon 1e-6, decay
0.01, 10k steps of warm-up, linear decay; masking rate 15% (large 25%). Original hardware: small 1 V100, 4 days; base
16 TPU v3, 4 days. Expect on GLUE dev: small 79.9, base 85.1, large 89.0 (table 1 and 2).

    python -m pretrain run electra-small --corpus CORPUS --workdir RUN
"""

from data_pipelines.examples.masking import Masking
from models.electra import FAMILY
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule


def _recipe(size: str, length: int, batch_size: int, peak: float, steps: int, warmup: float, rate: float) -> Recipe:
    return Recipe(
        name=f"electra-{size}",
        source="Clark et al. 2020",
        model=FAMILY.sizes[size],
        objective=ReplacedTokenDetection(masking=Masking(rate=rate, mask=0.85, random=0.0)),
        optimizer=Optimizer(),
        schedule=Schedule(peak=peak, warmup=warmup),
        phases=(Phase(1.0, length, batch_size),),
        steps=steps,
    )


RECIPES = [
    # Tiny and mini are set up to train within minutes on a CPU.
    _recipe("tiny", 128, 32, 1e-3, 3000, 0.1, 0.15),
    _recipe("mini", 128, 32, 1e-3, 3000, 0.1, 0.15),
    _recipe("small", 128, 128, 5e-4, 1_000_000, 0.01, 0.15),
    _recipe("base", 512, 256, 2e-4, 766_000, 10 / 766, 0.15),
    _recipe("large", 512, 2048, 2e-4, 400_000, 0.025, 0.25),
]
