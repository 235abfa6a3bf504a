"""ALBERT: masked n-grams and sentence-order prediction on segment pairs, by an encoder whose layers share parameters.

Lan et al. 2020 (arXiv:1909.11942), sections 4.1 and 4.2: batch 4096, 125k steps, LAMB with rate 0.00176, length 512
(10% of the rows are shorter), n-grams of up to 3 words with weights 1/n, SentencePiece with 30,000 tokens; 3,125 steps
of warm-up and linear decay, as in its code. No dropout, as in the second release of all sizes. Original hardware: 64 to
512 TPU v3 chips. Expect, at 125k steps without more data, on SQuAD 1.1 (F1), MNLI, SST-2: base 89.3, 81.6, 90.3; large
90.6, 83.5, 91.7; xlarge 92.5, 86.4, 92.4; xxlarge 94.1, 88.0, 95.2 (table 2).

    python -m data_pipelines prepare --source SOURCE --tokenizer sentencepiece-unigram --specials albert \\
        --vocab-size 30000 --out CORPUS
    python -m pretrain run albert-base --corpus CORPUS --workdir RUN
"""

from data_pipelines.examples.masking import Masking
from models.families.albert import FAMILY
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_MASKING = Masking(unit="word_starts", ngrams=(1.0, 1 / 2, 1 / 3))
_OBJECTIVE = MaskedLanguageModel(next_sentence=False, sentence_order=True, masking=_MASKING)
_PAPER = Paper("albert", "Lan et al. 2020", FAMILY, _OBJECTIVE, Optimizer("lamb"))
_SCHEDULE = Schedule(peak=1.76e-3, warmup=0.025)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32), optimizer=Optimizer()),
    *(
        _PAPER.recipe(size, _SCHEDULE, 125_000, Phase(1.0, 512, 4096))
        for size in ("base", "large", "xlarge", "xxlarge")
    ),
]
