"""GPT-2: next tokens of text packed across documents.

Radford et al. 2019: WebText (40 GB), batch 512 at length 1024; rates were tuned by hand and are not published, nor is
the number of steps; the rates here are those of GPT-3's models of the same sizes (Brown et al. 2020, table 2.1), with
its Adam, clipping, decay and cosine to a tenth.

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --specials gpt2 --vocab-size 50257 --out CORPUS
    python -m pretrain run gpt2-small --corpus CORPUS --workdir RUN
"""

from models.families.gpt2 import FAMILY
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule


def _recipe(size: str, phase: Phase, peak: float, warmup: float, steps: int, final: float = 0.0) -> Recipe:
    return Recipe(
        name=f"gpt2-{size}",
        source="Radford et al. 2019",
        model=FAMILY.sizes[size],
        objective=NextTokenPrediction(),
        optimizer=Optimizer(b2=0.95, epsilon=1e-8, decay=0.1, clip=1.0),
        schedule=Schedule("cosine", peak=peak, warmup=warmup, final=final),
        phases=(phase,),
        steps=steps,
    )


RECIPES = [
    # Set up to train within minutes on a CPU.
    _recipe("tiny", Phase(1.0, 128, 32), 1e-3, 0.1, 3000),
    _recipe("mini", Phase(1.0, 256, 16), 1e-3, 0.1, 3000),
    *(
        _recipe(size, Phase(1.0, 1024, 512), peak, 0.01, 200_000, final=0.1)
        for size, peak in (("small", 6e-4), ("medium", 3e-4), ("large", 2.5e-4), ("xl", 2e-4))
    ),
]
