"""MacBERT: BERT that corrects words: what would be masked becomes a similar word; and the order of two pieces of text.

Cui et al. 2020 (arXiv:2004.13922), section 3: runs of 1 to 4 words with weights of 40, 30, 20 and 10%, 15% of the
tokens; 80% of the words become a similar one (random tokens if they have none), 10% become random, 10% stay; sentence
order in place of next sentences; BERT's sizes. Schedule, batches and lengths are BERT's here. `prepare` finds words by
`--units` and takes similar ones from `--similar-words`; the authors had both from tools for Chinese.

    python -m data_pipelines prepare --source SOURCE --language zh --units word=jieba \\
        --similar-words FILE --out CORPUS
    python -m pretrain run macbert-base --corpus CORPUS --workdir RUN
"""

from data_pipelines.examples.masking import Masking
from models.families.bert import FAMILY
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_MASKING = Masking(unit="word_starts", ngrams=(0.4, 0.3, 0.2, 0.1), fate="unit", similar=True)
_OBJECTIVE = MaskedLanguageModel(next_sentence=False, sentence_order=True, masking=_MASKING)
_PAPER = Paper("macbert", "Cui et al. 2020", FAMILY, _OBJECTIVE)
_PHASES = Phase(0.9, 128, 256), Phase(0.1, 512, 256)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32)),
    *(_PAPER.recipe(size, Schedule(peak=1e-4, warmup=0.01), 1_000_000, *_PHASES) for size in ("base", "large")),
]
