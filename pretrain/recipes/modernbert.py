"""ModernBERT: 30% masked tokens in full rows of whole or cut documents, in two lengths; and Ettin's decoders, which
predict next tokens by the same recipe.

Warner et al. 2024 (arXiv:2412.13663), section 2.2, and its yamls/modernbert/modernbert-base-pretrain.yaml: 1.72T tokens
in rows of 1,024, then 250B in rows of 8,192 with rotary positions of base 160,000 in place of 10,000 in global layers,
then 50B in which the rate falls by 1 - sqrt. Rates are constant after a warm-up of 3B tokens: base 8e-4, then 3e-4 from
8,192 on; large (2B tokens of warm-up) 5e-4 for 900B tokens, then 5e-5. Batches grow from 768 to 4,608 rows over 50B
tokens (large: 448 to 4,928 over 10B) with equally many steps of each size, here in five phases; rows of 8,192 come in
batches of as many tokens (large: 608 rows, which meshes divide). StableAdamW with b2 0.98, without clipping; decay 1e-5
at the peak rate, whatever that is. Masked tokens are 80% [MASK], 10% random, 10% the same (src/sequence_packer.py).
Large begins there with base's weights, here with random ones.
Original hardware: 8 H100, 191 hours (base) and 420 (large) for rows of 1,024 (table 3). Expect on GLUE dev, table 5:
base MNLI 89.1, SST-2 96.0, RTE 87.4; large 90.8, 97.1, 92.1.

Ettin, Weller et al. 2025 (arXiv:2507.11412), pretraining/configs of its repository: 1.7T tokens, then 250B in which the
rate falls to half and 50B in which it falls to 2% of the peak, both by 1 - sqrt. Original hardware: 4 H100, 141 hours
(17m) to 2,170 (1b).

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --vocab-size 50368 --out CORPUS
    python -m pretrain run modernbert-base --corpus CORPUS --workdir RUN
"""

from data_pipelines.examples.masking import Masking
from models.families.modernbert import DECODER, FAMILY
from pretrain.objectives.masked_language_model import FILLED, MaskedLanguageModel
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

SHORT, LONG = 1024, 8192  # lengths of rows
GROWING = 5  # phases in which batches grow
BASE = 10_000.0  # of rotary positions in short rows
_ADAM = {"name": "stable-adamw", "b2": 0.98, "clip": 0.0}
_MASKED = MaskedLanguageModel(layout=FILLED, next_sentence=False, masking=Masking(rate=0.3))
_PAPER = Paper("modernbert", "Warner et al. 2024", FAMILY, _MASKED, Optimizer(**_ADAM))
_ETTIN = Paper("ettin-decoder", "Weller et al. 2025", DECODER, NextTokenPrediction(separate=True), Optimizer(**_ADAM))


def _recipe(
    paper: Paper,
    size: str,
    peak: float,
    decay: float,
    rows: tuple[int, int, int],
    growth: float,
    warmup: float,
    short: float,
    *later: tuple[float, int, Schedule],
) -> Recipe:
    """Make a recipe; numbers of tokens are in billions.

    decay: at the peak rate.   rows: of the first batches, of full ones, of long ones.   growth: tokens until batches
    are full.   warmup: tokens of warm-up.   short: tokens in short rows at the peak rate.   later: (tokens, length,
    schedule) of each phase after these.
    """
    first, full, of_long = rows
    sizes = [first + number * (full - first) // GROWING for number in range(GROWING)]
    each = round(growth * 1e9 / SHORT / sum(sizes))
    steps = [each] * GROWING + [round((short - growth) * 1e9 / SHORT / full)]
    begun, rising, left = sum(steps), 0, warmup * 1e9 / SHORT  # rows of warm-up that are left
    for number in sizes:
        rising, left = rising + min(each, left / number), max(left - each * number, 0.0)
    phases = [Phase(0.0, SHORT, number, global_base=BASE) for number in (*sizes, full)]
    for tokens, length, schedule in later:
        number, base = (full, BASE) if length == SHORT else (of_long, None)
        optimizer = Optimizer(decay=decay / schedule.peak, **_ADAM)
        steps.append(round(tokens * 1e9 / length / number))
        phases.append(Phase(0.0, length, number, global_base=base, schedule=schedule, optimizer=optimizer))
    schedule = Schedule("constant", peak, warmup=rising / begun)
    shares = [number / sum(steps) for number in steps]
    phases = [Phase(**vars(phase) | {"share": share}) for phase, share in zip(phases, shares, strict=True)]
    return paper.recipe(size, schedule, sum(steps), *phases, optimizer=Optimizer(decay=decay / peak, **_ADAM))


def _falling(peak: float, final: float = 0.0) -> Schedule:
    return Schedule("one-minus-sqrt", peak, warmup=0.0, final=final)


def _constant(peak: float) -> Schedule:
    return Schedule("constant", peak, warmup=0.0)


def _ettin(size: str, peak: float, decay: float, growth: float, warmup: float) -> Recipe:
    later = (250, LONG, _falling(peak, 0.5)), (50, LONG, _falling(peak / 2, 0.04))
    return _recipe(_ETTIN, size, peak, decay, (768, 4608, 576), growth, warmup, 1700, *later)


_OF_BASE = (250, LONG, _constant(3e-4)), (50, LONG, _falling(3e-4))
_OF_LARGE = (819, SHORT, _constant(5e-5)), (250, LONG, _constant(5e-5)), (50, LONG, _falling(5e-5))
RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 256, 16)),
    _recipe(_PAPER, "base", 8e-4, 1e-5, (768, 4608, 576), 50, 3, 1719, *_OF_BASE),
    _recipe(_PAPER, "large", 5e-4, 1e-5, (448, 4928, 608), 10, 2, 900, *_OF_LARGE),
    _ETTIN.recipe("tiny", MINUTES, 3000, Phase(1.0, 256, 16)),
    _ettin("17m", 3e-3, 3e-4, 125, 4),
    _ettin("32m", 3e-3, 3e-4, 100, 4),
    _ettin("68m", 3e-3, 3e-4, 75, 3),
    _ettin("base", 8e-4, 1e-5, 50, 3),
    _ettin("large", 5e-4, 1e-5, 10, 2),
    _ettin("1b", 5e-4, 5e-5, 3, 2),
]
