"""RoBERTa: masked tokens of full sentences, packed across documents, in large batches.

Liu et al. 2019 (arXiv:1907.11692), sections 4 and 5, table 9: batch 8192 at length 512, 500k steps, Adam with b2 0.98,
epsilon 1e-6, decay 0.01, no clipping, linear decay; rate 6e-4 with 24k steps of warm-up (base), 4e-4 with 30k (large);
GPT-2's byte-level vocabulary of 50k; 160 GB of text. Original hardware: 1,024 V100, a day for 100k steps (large).
Expect on dev sets: base MNLI 87.6, SST-2 94.8; large MNLI 90.2, SST-2 96.4, SQuAD 1.1 94.6 (F1); with 256 rows, 1M
steps and BERT's 16 GB of text, base: MNLI 84.7, SST-2 92.5, SQuAD 1.1 90.4 (tables 2, 3 and 8).

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --vocab-size 50265 --out CORPUS
    python -m pretrain run roberta-base --corpus CORPUS --workdir RUN

The paper's other input formats: `--objective.layout document-sentences`, and with `--objective.next-sentence`
`segment-pairs` (BERT's) and `sentence-pairs`. `document-sentences` and `sentence-pairs` have shorter rows, for which
the paper raises the batch size (`--phases.0.batch-size`). Expect on SQuAD 1.1, MNLI, SST-2, for the layouts in this
order: 90.6, 84.7, 92.7; 90.4, 84.0, 92.9; 88.7, 82.9, 92.1 (table 2). Static masks, as in BERT's ten copies of the
data: `--objective.masking.copies 10` (table 1: MNLI 84.3, SST-2 92.5; with dynamic masks 84.0, 92.9).
"""

from models.families.roberta import FAMILY
from pretrain.objectives.masked_language_model import PACKED_ACROSS, MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_OBJECTIVE = MaskedLanguageModel(layout=PACKED_ACROSS, next_sentence=False)
_PAPER = Paper("roberta", "Liu et al. 2019", FAMILY, _OBJECTIVE, Optimizer(b2=0.98, clip=0.0))

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32)),
    _PAPER.recipe("base", Schedule(peak=6e-4, warmup=24 / 500), 500_000, Phase(1.0, 512, 8192)),
    _PAPER.recipe("large", Schedule(peak=4e-4, warmup=30 / 500), 500_000, Phase(1.0, 512, 8192)),
]
