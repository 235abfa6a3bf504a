"""Options of a finetuning run."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from data_pipelines.command_line import Place
from data_pipelines.errors import UserError
from models.core.ranges import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range
from pretrain.options import How, check_options
from pretrain.recipe import LENGTH

RANGES = {
    "examples": COUNT,
    "lora": COUNT_OR_NONE,
    "peak": NOT_NEGATIVE,
    "decay": NOT_NEGATIVE,
    "layer_decay": Range("above 0 and at most 1", lambda x: 0 < x <= 1),
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
    """Options that runs on one task and on several share."""

    source: Annotated[Place, arg(name="from")]
    """The model to finetune: a run's work directory, or a Hugging Face folder."""
    workdir: Place
    """Directory for checkpoints, metrics and logs; the run resumes if it already holds one."""
    epochs: float = 3.0
    """Number of passes over the training examples."""
    batch_size: int = 32
    """Number of rows in a batch."""
    length: int = 128
    """Maximum number of tokens in a row."""
    peak: float = 5e-5
    """Peak learning rate; it decays linearly from there to 0."""
    warmup: float = 0.1
    """Share of the steps used to warm up the learning rate."""
    decay: float = 0.01
    """Weight decay of matrices and embeddings."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each layer to the one below it."""
    frozen: tuple[str, ...] = ()
    """Parameters to freeze: embeddings, layers, layers[0:6], or any other parameter path."""
    lora: int = 0
    """Rank of the LoRA matrices on the attention's queries and values; only these and the head are trained. An export
    merges them into the weights. 0 turns LoRA off."""
    from_scratch: bool = False
    """Start from random weights, with only the model's config and tokenizer: shows what its pretraining is worth."""
    examples: int | None = None
    """Number of training examples to use, the same ones for every seed; by default all."""
    seed: int = 0
    """Random seed of the head's initial weights, the order of rows and dropout."""
    log_every: int = 10
    """Steps between two log lines with metrics."""
    eval_every: int | None = None
    """Steps between two evaluations on --dev; by default one epoch."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; by default one epoch."""
    patience: int = 0
    """Stop after this many evaluations without a new best one; 0 never stops early."""
    coordinator: str | None = None
    """HOST:PORT of process 0; needed unless Cloud TPU, GKE, Slurm or Open MPI connects the processes."""
    processes: int | None = None
    """Number of processes, with --coordinator."""
    process: int | None = None
    """Index of this process, from 0, with --coordinator."""
    track: tuple[str, ...] = ()
    """Also send metrics to wandb (Weights & Biases), trackio (Hugging Face), or both."""

    def __post_init__(self):
        check_options(self, RANGES)
        if self.lora and self.frozen:
            raise UserError("--frozen: --lora already freezes everything but the head; leave one of them out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Training):
    """Options of a run on one task."""

    train: Path
    """Training file: .tsv or .csv with a header line, .jsonl or .parquet. answer reads SQuAD's .json instead, and tag
    also reads .conll and the like."""
    dev: Path
    """Held-out file, evaluated after each epoch; the best checkpoint on it is kept."""
