"""BigBird-ITC: masked tokens in rows of 4,096; blocks of 64 attend to 3 around them, 3 random ones and 2 at the ends.

Zaheer et al. 2020 (arXiv:2007.14062), section 4 and table 8: 256 rows of 4,096 (large: 2,048 rows), Adam with rate
1e-4, 10k steps of warm-up, linear decay, dropout 0.1 also of attention, 15% of the tokens masked, starting from
RoBERTa's weights. Original hardware: 64 TPU v3 chips. The number of steps is ours. Longer documents are split, shorter
ones
joined: rows are packed across documents, with separators that attention does not stop at. Expect a loss of 1.678 bits
per masked token (base; RoBERTa in rows of 512: 1.846), 1.456 (large; 1.496), table 10.

    python -m data_pipelines prepare --source SOURCE --tokenizer sentencepiece-bpe --specials albert --cased \\
        --vocab-size 50358 --out CORPUS
    python -m pretrain run bigbird-base --corpus CORPUS --workdir RUN

To start from a BERT, which has another activation: `--init-from BERT --model.activation gelu`; its positions are
repeated. bigbird-dna-tiny: the same for nucleotides, in a size for CPUs (section 5; there GRCh37 with 32,000 tokens of
8.78 bases each; 1.12 bits per base, BERT in rows of 512: 1.23, table 5).

    python -m data_pipelines prepare --source fasta:GENOME --tokenizer bpe --vocab-size 4096 --out CORPUS
    python -m pretrain run bigbird-dna-tiny --corpus CORPUS --workdir RUN

BigBird-ETC: the same with global tokens that represent sentences; table 8 (base): blocks of 84, window of 3 blocks, 256
global tokens, no random blocks; large: blocks of 169. That large has the rows and global tokens of base is our choice.
The paper starts from RoBERTa's weights, these recipes do not.

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --vocab-size 50265 --out CORPUS
    python -m pretrain run bigbird-etc-base --corpus CORPUS --workdir RUN
"""

from models.families import etc
from models.families.bigbird import FAMILY
from pretrain.objectives.masked_language_model import PACKED_ACROSS, GlobalPhase, MaskedLanguageModel, MaskedWithGlobals
from pretrain.objectives.objective import Phase
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_OBJECTIVE = MaskedLanguageModel(layout=PACKED_ACROSS, next_sentence=False)
_PAPER = Paper("bigbird", "Zaheer et al. 2020", FAMILY, _OBJECTIVE)
_ETC = Paper("bigbird-etc", "Zaheer et al. 2020", etc.FAMILY, MaskedWithGlobals())
_SCHEDULE = Schedule(peak=1e-4, warmup=0.02)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 1024, 4)),
    _PAPER.recipe("dna-tiny", MINUTES, 3000, Phase(1.0, 1024, 4), model=FAMILY.sizes["tiny"]),
    _PAPER.recipe("base", _SCHEDULE, 500_000, Phase(1.0, 4096, 256)),
    _PAPER.recipe("large", _SCHEDULE, 500_000, Phase(1.0, 4096, 2048)),
    _ETC.recipe("tiny", MINUTES, 3000, GlobalPhase(1.0, 512, 8, globals=32)),
    *(_ETC.recipe(size, _SCHEDULE, 500_000, GlobalPhase(1.0, 4096, 256)) for size in ("base", "large")),
]
