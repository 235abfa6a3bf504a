"""GPT: next tokens of books.

Radford et al. 2018, section 4.1: BooksCorpus, 100 epochs, batch 64 at length 512, Adam with rate 2.5e-4, 2,000 updates
of warm-up, cosine to 0, decay 0.01, 40,000 merges of lower-cased text. How many tokens an epoch has is not published;
the steps here are 118 billion tokens in all, which the 0.96 petaflop/s-days that are known of it come to. Original
hardware: 8 P600, a month. There no token ends a document; here GPT-2's does, the last of the vocabulary.

    python -m data_pipelines prepare --source SOURCE --tokenizer character-bpe --vocab-size 40478 --out CORPUS
    python -m pretrain run gpt-base --corpus CORPUS --workdir RUN
"""

from models.families.gpt import FAMILY
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule


def _recipe(size: str, phase: Phase, peak: float, warmup: float, steps: int) -> Recipe:
    return Recipe(
        name=f"gpt-{size}",
        source="Radford et al. 2018",
        model=FAMILY.sizes[size],
        objective=NextTokenPrediction(),
        optimizer=Optimizer(epsilon=1e-8),
        schedule=Schedule("cosine", peak=peak, warmup=warmup),
        phases=(phase,),
        steps=steps,
    )


RECIPES = [
    # Set up to train within minutes on a CPU.
    _recipe("tiny", Phase(1.0, 128, 32), 1e-3, 0.1, 3000),
    _recipe("base", Phase(1.0, 512, 64), 2.5e-4, 2000 / 3_600_000, 3_600_000),
]
