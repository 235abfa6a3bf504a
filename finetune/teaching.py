"""Distillation in finetuning: a model learns a finetuned teacher's probabilities beside the labels of its file, and
before them what its layers compute (Jiao et al. 2020, TinyBERT, arXiv:1909.10351, section 3.2)."""

import abc
import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from finetune.rows import TaskRows
from finetune.task import FinetuningTask, Outputs
from models.core.ranges import NOT_NEGATIVE, POSITIVE, check_ranges
from pretrain.objectives import distillation
from pretrain.objectives.distillation import read_side
from pretrain.objectives.matching import EMBEDDINGS, EVERY, KL, LAYERS_HIDDEN, MSE, SCORES, Match, Tokens, soft
from pretrain.objectives.objective import Batch, Moment, Term, inputs_of, scope

TEACHER, SOFT = "teacher", "soft"  # names in the recipe and of the term in the loss
RANGES = {"temperature": POSITIVE} | dict.fromkeys(("soft_weight", "own_weight", "intermediate"), NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class Layers(distillation.Taught):
    """The stage before predictions: layers learn from the teacher's on the rows of a task, without their labels."""

    bucket: tuple[int, int] = (0, 0)  # of the task, like the next field
    causal: bool = False

    def rows(self, phase):
        return TaskRows(self.bucket[1], self.bucket[0], ())

    def tokens(self, batch):
        return Tokens(batch["segments"], 0.0, self.causal)

    def loss(self, model, params, batch, carry, moment):
        method = "decode" if self.causal else "encode"
        side = lambda apply, module, noise: read_side(apply, inputs_of(module, batch), noise, method, self.recorded)[1]
        ours = side(partial(model.apply, {"params": params}), model, moment.noise)
        return self.taught(params, batch, moment, ours, lambda of: side(of.apply, of.module, None)), carry, {}


@dataclasses.dataclass(frozen=True)
class Taught(FinetuningTask):
    """Base class of tasks that a teacher can teach (Hinton et al. 2015, arXiv:1503.02531, section 2). `scores` gives
    `logits`; those of a single label are numbers, compared by their squared difference."""

    term: ClassVar[str]  # name of the loss on the labels

    # Also learn the probabilities of this model, a finetuned run or a Hugging Face folder with the same tokenizer and
    # labels; it is read when the run starts and kept in the workdir
    teacher: str = ""
    temperature: float = 1.0  # with --teacher: of both models' probabilities; their loss is multiplied with its square
    soft_weight: float = 1.0  # with --teacher: factor of the loss between the model's and the teacher's probabilities
    own_weight: float = 1.0  # with --teacher: factor of the loss on the labels of --train
    # With --teacher: epochs before --epochs in which embeddings, hidden states and attention scores learn the teacher's
    intermediate: float = 0.0
    # With --intermediate: the model's layers and the teacher's: skip (every n-th), first, last, top or pairs '1:3 2:6'
    layers: str = EVERY

    def __post_init__(self):
        check_ranges(self, RANGES, "--")
        changed = [name for name in RANGES if getattr(self, name) != getattr(Taught, name)]
        if changed and not self.teacher:
            raise ValueError(f"--{changed[0].replace('_', '-')}: needs --teacher; give it, or leave this out")
        if self.layers != EVERY and not self.intermediate:
            raise ValueError(f"--layers {self.layers}: needs --intermediate; give it, or leave this out")
        self.inside()

    def inside(self) -> Layers:
        """Return the objective of the stage before predictions (equations 7 to 9)."""
        losses = Match(EMBEDDINGS, MSE), *(Match(of, MSE, self.layers) for of in (LAYERS_HIDDEN, SCORES))
        return Layers(losses, bucket=self.bucket, causal=self.causal)

    @property
    def teachers(self):
        return {TEACHER: self.asks} if self.teacher else {}

    @abc.abstractmethod
    def loss_weights(self, batch: Batch) -> Array:
        """Return the weight of each prediction in the losses, f32[rows, ...]; 0 where there is none."""

    def weights(self, batch):
        return dict.fromkeys((self.term, SOFT) if self.teacher else (self.term,), self.loss_weights(batch).sum())

    def coefficients(self, step):
        return {self.term: self.own_weight} | ({SOFT: self.soft_weight} if self.teacher else {})

    def loss(self, model, params, batch, carry, moment):
        outputs = self.scores(model, params, batch, moment.noise)
        return self.terms(outputs, batch) | self.soft_terms(batch, moment, outputs), carry, {}

    def soft_terms(self, batch: Batch, moment: Moment, *passes: Outputs) -> dict[str, Term]:
        """Return the loss between the scores of one or more passes and the teacher's, their mean; {} without one."""
        if not self.teacher:
            return {}
        teacher = moment.teachers[TEACHER]
        with jax.named_scope(scope(TEACHER)):
            theirs = self.scores(teacher.module, teacher.params, batch)["logits"]
        by = MSE if theirs.shape[-1] == 1 else KL
        losses = sum(soft(outputs["logits"], theirs, by, self.temperature) for outputs in passes)
        return {SOFT: Term(jnp.sum(self.loss_weights(batch) * losses) / len(passes))}
