"""How a run is run: none of this is the recipe's identity, all of it may change on resume."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

import tyro

from data_pipelines.command_line import Place, unknown
from data_pipelines.errors import UserError
from models.core.ranges import COUNT, COUNT_OR_NONE, Range
from pretrain.trackers import TRACKERS

AT_LEAST_1 = "microbatches", "log_every", "eval_examples", "checkpoint_every", "keep", "max_skipped", "processes"
AT_LEAST_0 = "eval_every", "keep_every", "patience", "process"
RANGES = dict.fromkeys(AT_LEAST_1, COUNT) | dict.fromkeys(AT_LEAST_0, COUNT_OR_NONE)
RANGES["workers"] = Range("at least 0 and at most 256", lambda x: 0 <= x <= 256)  # each is a process with a corpus open


def check_options(options, ranges: Mapping[str, Range], prefix: str = "--") -> None:
    """UserError for the first option that is out of its range; one that is None is not looked at."""
    for field, allowed in ranges.items():
        value = getattr(options, field)
        if value is not None and not allowed.holds(value):
            raise UserError(f"{prefix}{field.replace('_', '-')} {value}: must be {allowed.words}")


@dataclasses.dataclass(frozen=True)
class Where:
    """From where a run reads and where it writes."""

    corpus: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """Folder made by `python -m data_pipelines prepare`; from gs:// this host copies what it reads. Several have names:
    en=DIR,zh=DIR."""
    workdir: Place
    """Where the run keeps everything; the same directory resumes."""


@dataclasses.dataclass(frozen=True)
class How:
    """What `run` and `tpu plan` both let one choose."""

    microbatches: int = 1
    """Cut each batch into so many parts whose gradients add up: less memory, same mathematics."""
    dtype: str | None = None
    """float32 or bfloat16 for activations and products; by default what suits the platform."""
    depth: str | None = None
    """scan or unroll the layers; by default what suits the platform."""
    attention: str | None = None
    """xla, splash, pattern or relative (TPU), cudnn (GPU); dense or blocked, the plain forms of a sparse pattern; an
    error where that cannot run. By default the model's and platform's kernel where it can: bfloat16, but for pattern
    phases of a multiple of 128 positions, attention dropout in splash up to 1,024 of them, in cudnn none."""
    remat: str | None = None
    """What the backward pass computes again instead of keeping: none, dots (all but products) or full; by default what
    suits the platform."""
    mesh: str | None = None
    """How devices share the work, like data=4,fsdp=2; axes: slice, data, fsdp, sequence, tensor. By default all share
    the batch, and parameters are cut (fsdp) where a step is estimated to be more than 5% shorter or memory needs it."""


@dataclasses.dataclass(frozen=True)
class Options(How, Where):  # of bases the last one's fields come first
    """How and where to run."""

    init_from: str | None = None
    """Start from these weights: a Hugging Face folder, discriminator=DIR,generator=DIR, or another run's workdir."""
    init_heads_anew: bool = False
    """With --init-from: heads that it lacks start from random weights, and its other heads are left out."""
    extend: Literal["constant", "decay"] | None = None
    """With more --steps, which otherwise evaluate the schedule for the new total: a further phase goes on at the rate
    of the last step done, or falls linearly from it to final x peak; at a tenth of the peak where that was lower."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where nothing else (Cloud TPU, GKE, Slurm, Open MPI) brings the processes together."""
    processes: int | None = None
    """How many processes run, with --coordinator."""
    process: int | None = None
    """Which of them this is, from 0, with --coordinator."""
    workers: int = 0
    """Processes that build batches; 0 builds them in threads."""
    log_every: int = 10
    """Steps between two lines of figures."""
    eval_every: int = 500
    """Steps between two evaluations on the held-out set; 0 evaluates only at the end."""
    eval_examples: int = 1024
    """Rows of the fixed held-out set."""
    sample: bool = True
    """At each evaluation print what the model makes of a held-out text: its masks filled, or the text continued."""
    checkpoint_every: int = 500
    """Steps between two checkpoints."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Checkpoints at multiples of this step stay for good; 0 for none."""
    keep_best: bool = False
    """The checkpoint with the lowest held-out loss stays, too, and that of each task; an evaluation writes it."""
    patience: int = 0
    """Stop when so many evaluations have come after the best one; 0 never does."""
    max_skipped: int = 20
    """Stop after so many updates in a row with a loss or gradient that is not finite."""
    track: tuple[str, ...] = ()
    """Also send the figures to wandb (Weights & Biases), trackio (Hugging Face), or both."""
    profile: bool = False
    """Write a trace of ten steps to WORKDIR/profile, for TensorBoard or Perfetto."""

    def __post_init__(self):
        check_options(self, RANGES)
        for name, given in {"--keep-best": self.keep_best, f"--patience {self.patience}": self.patience}.items():
            if given and not self.eval_every:
                raise UserError(f"{name}: compares evaluations, and --eval-every 0 makes one alone; give more")
        for name in self.track:
            if name not in TRACKERS:
                raise UserError(unknown("--track: there is no", name, TRACKERS))
        if self.init_heads_anew and self.init_from is None:
            raise UserError("--init-heads-anew: give --init-from, whose heads it is about, or leave it out")
        if None not in (self.process, self.processes) and self.process >= self.processes:
            raise UserError(f"--process {self.process}: must be below --processes {self.processes}")
