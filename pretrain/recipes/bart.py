"""BART: a decoder restores texts whose sentences are in another order and whose spans are masked.

Lewis et al. 2020 (arXiv:1910.13461), sections 2 and 4: rows of 512 tokens, 30% of them in spans of 3 tokens on average,
each replaced by one [MASK]; all sentences permuted. Large: 8,000 rows for 500k steps, RoBERTa's 160 GB of text. Base:
as in the comparison of noises, 1M steps on BERT's 16 GB. The paper does not give its number of rows (here BERT's 256),
nor an optimizer (here RoBERTa's). It has no dropout in the last 10% of the steps; here dropout stays. Expect of large:
SQuAD 1.1 94.6 (F1), MNLI 89.9, SST-2 96.6; CNN/DailyMail ROUGE-1 44.16 (tables 2 and 3).

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --specials roberta --vocab-size 50265 --out CORPUS
    python -m pretrain run bart-base --corpus CORPUS --workdir RUN

The paper's other noises, alone: `--objective.noises.permute 0 --objective.noises.infill 0` and `.mask 0.15`, `.delete
0.15` or `.rotate 1`. With infilling alone expect of base SQuAD 1.1 90.8, MNLI 84.0; with permutation alone 85.4, 81.5
(table 1).

Translation from a language that BART does not know (section 3.4): another encoder takes the place of its embeddings. At
first that encoder, the positions and the projections of the first layer's attention learn, then all. The paper gives no
numbers of these stages; here they are 80% and 20% of the steps.

    python -m pretrain run bart-translation-large --corpus PAIRS --workdir RUN --init-from BART --init-heads-anew
"""

from models.families.bart import FAMILY, TRANSLATION
from pretrain.objectives.next_token_prediction import INPUT_TARGET
from pretrain.objectives.sequence_to_sequence import DENOISING, PhaseWithTargets, SequenceToSequence
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_OBJECTIVE = SequenceToSequence(DENOISING, start="end")
_PAPER = Paper("bart", "Lewis et al. 2020", FAMILY, _OBJECTIVE, Optimizer(b2=0.98, clip=0.0))


def _phase(length: int, rows: int) -> PhaseWithTargets:
    return PhaseWithTargets(1.0, length, rows, target_length=length)


_PAIRS = SequenceToSequence(INPUT_TARGET, start="end", label_smoothing=0.1)
_TRANSLATION = _PAPER._replace(name="bart-translation", family=TRANSLATION, objective=_PAIRS)


def _translation(size: str, steps: int, rows: int, length: int) -> Recipe:
    first, depth = "encoder/layers[0:1]", TRANSLATION.sizes[size].depth
    frozen = ("tokens", "encoder/embedding_norm", "decoder/embedding_norm", "decoder/layers")
    frozen += (f"encoder/layers[1:{depth}]", f"{first}/feed_forward", f"{first}/attention/output")
    frozen += (f"{first}/attention/norm",)
    alone = PhaseWithTargets(0.8, length, rows, target_length=length, frozen=frozen)
    together = PhaseWithTargets(0.2, length, rows, target_length=length)
    return _TRANSLATION.recipe(size, Schedule(peak=3e-4, warmup=0.05), steps, alone, together)


RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, _phase(128, 32)),
    _PAPER.recipe("base", Schedule(peak=6e-4, warmup=24 / 500), 1_000_000, _phase(512, 256)),
    _PAPER.recipe("large", Schedule(peak=4e-4, warmup=30 / 500), 500_000, _phase(512, 8000)),
    _translation("tiny", 3000, 64, 48),
    _translation("large", 100_000, 384, 64),
]
