"""DeBERTa: masked tokens by the enhanced mask decoder (V2), replaced-token detection (V3).

He et al. 2021 (arXiv:2006.03654), appendix, table of hyper-parameters for pre-training: base and large: length 512,
batch 2048, rate 2e-4, 1M steps, 10k steps of warm-up, linear decay; Adam with b2 0.999, epsilon 1e-6, decay 0.01; spans
of up to three words are masked (their shares as in the authors' code). Here V2's form (log buckets, shared projections,
128k tokens) has these sizes; the authors published it as xlarge and xxlarge, with a convolution, which is not
implemented. Expect of DeBERTa (V1) on dev sets: base MNLI 88.8, SQuAD 2.0 86.2 (F1); large 91.1, 90.7.

He et al. 2021b (arXiv:2111.09543), section 4.1: batch 8192, 500k steps, 10k steps of warm-up, b2 0.98, rate 5e-4
(small, base), 3e-4 (large); the generator has half of the layers. Length, masking rate and lambda, 50, are ELECTRA's,
and tokens are masked singly (the authors' code). Expect on dev sets: small MNLI 88.2, SQuAD 2.0 82.8 (F1); base 90.6,
88.4; large 91.8, 91.5.

    python -m data_pipelines prepare --source SOURCE --tokenizer sentencepiece-unigram --specials deberta \\
        --vocab-size 128001 --out CORPUS
    python -m pretrain run deberta-v3-base --corpus CORPUS --workdir RUN
"""

import dataclasses

from data_pipelines.examples.masking import Masking
from models.families.deberta import FAMILY, V3
from pretrain.objectives.masked_language_model import PACKED, PACKED_ACROSS, MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_SPANS = Masking(unit="word_starts", ngrams=(1.0, 1 / 2, 1 / 3))
_MASKED = MaskedLanguageModel(layout=PACKED_ACROSS, next_sentence=False, masking=_SPANS)
_DETECTION = ReplacedTokenDetection(layout=PACKED_ACROSS, masking=Masking(mask=1.0, random=0.0))
_V2 = Paper("deberta-v2", "He et al. 2021", FAMILY, _MASKED)
_V3 = Paper("deberta-v3", "He et al. 2021b", V3, _DETECTION, Optimizer(b2=0.98))
_OF_V2 = Schedule(peak=2e-4, warmup=0.01)


def _minutes() -> Recipe:
    """Make the V3 that learns in minutes on a CPU, as ELECTRA's does (`recipes/electra.py`)."""
    masking = dataclasses.replace(_DETECTION.masking, unit="word_starts")
    objective = dataclasses.replace(_DETECTION, layout=PACKED, masking=masking)
    model = dataclasses.replace(V3.sizes["tiny"], dropout=0.0, attention_dropout=0.0, init_std=0.05)
    return _V3.recipe("tiny", MINUTES, 3000, Phase(1.0, 32, 16), model=model, objective=objective)


RECIPES = [
    _V2.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32)),
    *(_V2.recipe(size, _OF_V2, 1_000_000, Phase(1.0, 512, 2048)) for size in ("base", "large")),
    _minutes(),
    *(_V3.recipe(size, Schedule(peak=5e-4, warmup=0.02), 500_000, Phase(1.0, 512, 8192)) for size in ("small", "base")),
    _V3.recipe("large", Schedule(peak=3e-4, warmup=0.02), 500_000, Phase(1.0, 512, 8192)),
]
