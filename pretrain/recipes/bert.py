"""BERT: masked tokens and next-sentence prediction on segment pairs.

Devlin et al. 2019 (arXiv:1810.04805), appendix A.2: batch 256, 1M steps, 90% at length 128 and 10% at 512, Adam
with rate 1e-4, decay 0.01, 10k steps of warm-up, linear decay. Original hardware: 16 TPU v2 chips (base), 64 (large),
4 days each. Smaller sizes: Turc et al. 2019 (arXiv:1908.08962). Expect on GLUE dev: base 82.2, large 84.0
(Clark et al. 2020, table 1).

    python -m pretrain run bert-base --corpus CORPUS --workdir RUN
"""

from models.families.bert import FAMILY
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule

_PHASES = (Phase(0.9, 128, 256), Phase(0.1, 512, 256))

_SMALL_SCALE = {"optimizer": Optimizer(), "schedule": Schedule(peak=1e-3, warmup=0.1), "phases": (Phase(1.0, 128, 32),)}

RECIPES = [
    # Tiny and mini are set up to train within minutes on a CPU.
    *(
        Recipe(
            name=f"bert-{size}",
            source="Turc et al. 2019",
            model=FAMILY.sizes[size],
            objective=MaskedLanguageModel(),
            steps=steps,
            **_SMALL_SCALE,
        )
        for size, steps in (("tiny", 3000), ("mini", 3000))
    ),
    *(
        Recipe(
            name=f"bert-{size}",
            source="Devlin et al. 2019" if size in ("base", "large") else "Turc et al. 2019",
            model=FAMILY.sizes[size],
            objective=MaskedLanguageModel(),
            optimizer=Optimizer(),
            schedule=Schedule(peak=1e-4, warmup=0.01),
            phases=_PHASES,
            steps=1_000_000,
        )
        for size in ("small", "medium", "base", "large")
    ),
]
