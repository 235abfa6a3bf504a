"""Options of a run that are not part of its recipe: all of them may change on resume."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
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
    """Raise UserError for the first option that is out of its range; options that are None are not checked."""
    for field, allowed in ranges.items():
        value = getattr(options, field)
        if value is not None and not allowed.holds(value):
            raise UserError(f"{prefix}{field.replace('_', '-')} {value}: must be {allowed.words}")


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a run reads its data and writes its results."""

    corpus: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """Folder written by `python -m data_pipelines prepare`; each host copies what it needs from gs://. Name several
    corpora like this: en=DIR,zh=DIR."""
    workdir: Place
    """Directory for checkpoints, metrics and logs; the run resumes if it already holds one."""


@dataclasses.dataclass(frozen=True)
class How:
    """Options that `run` and `tpu plan` share."""

    microbatches: int = 1
    """Split each batch into this many parts and accumulate their gradients: less memory, same result."""
    dtype: str | None = None
    """float32 or bfloat16 for activations and matrix products; by default bfloat16 on TPU and GPU."""
    depth: str | None = None
    """scan or unroll the layers; by default chosen for the platform."""
    attention: str | None = None
    """Attention kernel: xla; splash, pattern or relative (TPU); cudnn (GPU); or dense or blocked, without a kernel, for
    a sparse pattern. By default the model's kernel for the platform where it can run, else xla. Kernels need bfloat16
    and, except pattern, lengths that are multiples of 128. With attention dropout, splash takes at most 1,024
    positions and cudnn none."""
    remat: str | None = None
    """What the backward pass recomputes instead of storing: none, dots (all but matrix products) or full; by default
    chosen for the platform."""
    mesh: str | None = None
    """Device mesh, like data=4,fsdp=2; axes: slice, data, fsdp, sequence, tensor. By default the batch is sharded over
    all devices, and parameters too (fsdp) where memory requires it or a step is estimated to be over 5% faster."""


@dataclasses.dataclass(frozen=True)
class Options(How, Where):  # fields of the last base come first
    """Options of `run`."""

    init_from: str | None = None
    """Initial weights: a Hugging Face folder, discriminator=DIR,generator=DIR, or the workdir of another run."""
    init_heads_anew: bool = False
    """With --init-from: initialize missing heads at random, and ignore heads that the model does not have."""
    teacher: str | None = None
    """What to learn from: a Hugging Face folder or the workdir of a run, or NAME=PATH,NAME=PATH. It is read when the
    run starts and kept in the workdir. A recipe of masked or of next tokens that has no teacher learns this one's
    logits, beside its own loss."""
    soft_targets: Path | None = None
    """Folder written by `python -m pretrain annotate`: learn from it, with no teacher in the step."""
    extend: Literal["constant", "decay"] | None = None
    """With a larger --steps on resume: add a phase that keeps the last learning rate (constant) or decays it linearly
    to final x peak (decay), from at least peak / 10. By default the schedule is stretched to the new total."""
    coordinator: str | None = None
    """HOST:PORT of process 0; needed unless Cloud TPU, GKE, Slurm or Open MPI connects the processes."""
    processes: int | None = None
    """Number of processes, with --coordinator."""
    process: int | None = None
    """Index of this process, from 0, with --coordinator."""
    workers: int = 0
    """Number of processes that build batches; 0 builds them in threads."""
    log_every: int = 10
    """Steps between two log lines with metrics."""
    eval_every: int = 500
    """Steps between two evaluations on the held-out set; 0 evaluates only at the end of the run."""
    eval_examples: int = 1024
    """Number of held-out rows to evaluate on, always the same."""
    sample: bool = True
    """Also print a sample at each evaluation: a held-out text with its masks filled, or continued."""
    checkpoint_every: int = 500
    """Steps between two checkpoints."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Keep checkpoints at multiples of this step for good; 0 for none."""
    keep_best: bool = False
    """Also save and keep the checkpoint with the lowest held-out loss, and the best one of each task."""
    patience: int = 0
    """Stop after this many evaluations without a new best one; 0 never stops early."""
    max_skipped: int = 20
    """Stop after this many consecutive updates whose loss or gradient is not finite."""
    track: tuple[str, ...] = ()
    """Also send metrics to wandb (Weights & Biases), trackio (Hugging Face), or both."""
    profile: bool = False
    """Write a profile of ten steps to WORKDIR/profile, for TensorBoard or Perfetto."""

    def __post_init__(self):
        check_options(self, RANGES)
        for name, is_set in {"--keep-best": self.keep_best, f"--patience {self.patience}": self.patience}.items():
            if is_set and not self.eval_every:
                raise UserError(f"{name}: needs several evaluations, but --eval-every 0 makes only one; raise it")
        for name in self.track:
            if name not in TRACKERS:
                raise UserError(unknown("--track: unknown tracker", name, TRACKERS))
        if self.init_heads_anew and self.init_from is None:
            raise UserError("--init-heads-anew: has no effect without --init-from; add it, or leave this out")
        if None not in (self.teacher, self.soft_targets):
            raise UserError("--teacher, --soft-targets: a run learns from one of them; leave the other out")
        if None not in (self.process, self.processes) and self.process >= self.processes:
            raise UserError(f"--process {self.process}: must be below --processes {self.processes}")
