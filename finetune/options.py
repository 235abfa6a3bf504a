"""How a run of finetuning is run."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from data_pipelines.command_line import Place
from data_pipelines.errors import UserError
from models.core.ranges import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, SEED, SHARE
from pretrain.options import How, check_options
from pretrain.recipe import LENGTH

RANGES = {
    "examples": COUNT,
    "lora": COUNT_OR_NONE,
    "peak": NOT_NEGATIVE,
    "decay": NOT_NEGATIVE,
    "layer_decay": SHARE,
    "epochs": POSITIVE,
    "batch_size": COUNT,
    "length": LENGTH,
    "warmup": SHARE,
    "seed": SEED,
    "eval_every": COUNT,
    "checkpoint_every": COUNT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(How):
    """What a run of finetuning begins with, and how it goes."""

    source: Annotated[Place, arg(name="from")]
    """The model: a run's work directory, or a Hugging Face folder."""
    workdir: Place
    """Where the run keeps everything; the same directory resumes."""
    epochs: float = 3.0
    """How often each example comes."""
    batch_size: int = 32
    """Rows of a step."""
    length: int = 128
    """Tokens of a row, at most."""
    peak: float = 5e-5
    """The highest learning rate, from which it falls linearly to 0."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises."""
    decay: float = 0.01
    """Weight decay of matrices and embeddings."""
    layer_decay: float = 1.0
    """Of the rate, from each layer to the one below."""
    frozen: tuple[str, ...] = ()
    """What stays as it is: embeddings, layers, layers[0:6], or any other path of parameters."""
    lora: int = 0
    """Rank of products that are trained in place of the attention's queries and values, while all but the head is
    frozen; an export has them merged. 0: none."""
    from_scratch: bool = False
    """Take the model's sizes and tokenizer alone, and begin with random weights: what its pretraining is worth."""
    examples: int | None = None
    """How many examples to train on, the same for all seeds; by default all."""
    seed: int = 0
    """Of the head's first weights, the order of rows and dropout."""
    log_every: int = 10
    """Steps between two lines of figures."""
    eval_every: int | None = None
    """Steps between two evaluations; by default those of an epoch."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; by default those of an epoch."""
    patience: int = 0
    """Stop when so many evaluations have come after the best one; 0 never does."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where nothing else (Cloud TPU, GKE, Slurm, Open MPI) brings the processes together."""
    processes: int | None = None
    """How many processes run, with --coordinator."""
    process: int | None = None
    """Which of them this is, from 0, with --coordinator."""
    track: tuple[str, ...] = ()
    """Also send the figures to wandb (Weights & Biases), trackio (Hugging Face), or both."""

    def __post_init__(self):
        check_options(self, RANGES)
        if self.lora and self.frozen:
            raise UserError("--frozen: --lora freezes all but the head; leave one of them out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Training):
    """The same of one task."""

    train: Path
    """File of the examples to train on: .tsv or .csv with a line of names, .jsonl or .parquet; of
    questions SQuAD's .json, of words .conll and the like."""
    dev: Path
    """File of the examples to evaluate on, after each epoch: the best checkpoint stays."""
