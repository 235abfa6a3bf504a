"""The training loop: phases, steps, metrics, evaluations, checkpoints, and the end of a run."""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np

from data_pipelines.cloud import in_cloud, remove_folder, upload
from data_pipelines.errors import UserError
from data_pipelines.loader import Loader
from data_pipelines.mixture import Mixture, Tasks
from models.core.parameters import Params
from pretrain.recipe import boundaries, group_of, phase_at
from pretrain.storage.best import best, is_enough, losses
from pretrain.storage.checkpoints import TrainState
from pretrain.training.assembly import same_training
from pretrain.training.data import phase_batches
from pretrain.training.evaluate import Evaluators
from pretrain.training.evaluate import figures as figures_of
from pretrain.training.placement import (
    CHECKPOINT,
    EVALUATE,
    TRAIN,
    Stage,
    any_task,
    compile_phases,
    compiles_ahead,
    no_memory,
    of_phase,
    place_given,
)
from pretrain.training.samples import sample
from pretrain.training.signals import EXIT_STOPPED
from pretrain.training.start import Run
from pretrain.training.step import Metrics, model_flops
from tpu.batches import host_rows, place_rows
from tpu.chips import peak_flops
from tpu.cluster import from_first

STOPPED_SECONDS = 5  # after a stop signal, most seconds to wait for checks of the data that was read
Evaluator = Callable[[Params, Params, int], dict[str, float]]  # like `evaluate.Evaluators`
PROFILED = range(5, 15)  # steps after the start that are traced, once compilation is over


def train(run: Run, state: TrainState, entered: int) -> tuple[TrainState, int]:
    """Train from a state to the recipe's last step -> (state, exit status: 0 or EXIT_STOPPED).   entered: the phase
    that the state belongs to. UserError if too many updates in a row were not finite, or if the disk is full."""
    ends, recipe = boundaries(run.recipe), run.recipe
    step, every = int(state.step), run.options.eval_every
    run = _compiled(run, step)
    if step and every and step % every == 0 and step < recipe.steps and step not in run.evaluations:
        _evaluate(run, state, entered, _evaluator(run, entered))  # lost to a kill
    evaluator = None
    batches = phase_batches(recipe, run.corpora, step, run.directory.examples, run.journal.say)
    while (step := int(state.step)) < recipe.steps and not _enough(run):
        phase = phase_at(recipe, step)
        run.journal.say(f"phase {phase + 1} of {len(ends)}: {recipe.phases[phase]}, steps {step} to {ends[phase]}")
        evaluator = _evaluator(run, phase)
        if phase != entered:
            state, entered = _enter(run, state, entered, phase), phase
        with no_memory(phase, TRAIN):  # a step may fail wherever it is awaited; evaluation and saving name themselves
            state, stopped = _train_phase(run, state, phase, ends[phase], batches[phase], evaluator)
        if stopped:
            run.checkpoints.wait()
            run.journal.say(f"{run.stop.signal}: saved step {int(state.step)}; the same command resumes there")
            return state, EXIT_STOPPED
    if step < recipe.steps:
        run.journal.say(f"--patience {run.options.patience}: stopped, no better evaluation since that many")
    _save(run, state, entered)
    if step not in run.evaluations:
        _evaluate(run, state, entered, evaluator or _evaluator(run, entered))
    run.checkpoints.wait()
    return state, 0


def _enter(run: Run, state: TrainState, before: int, phase: int) -> TrainState:
    """Return the state with which a phase begins: with a new carry, and with a new optimizer state if the phase trains
    other parameters or uses another optimizer."""
    stage = any_task(run.stages, phase)
    state = state._replace(carry=stage.first_carry())
    if not same_training(run.recipe, before, phase) or any_task(run.stages, before).untrained() != stage.untrained():
        state = state._replace(opt_state=stage.first_moments(state.params))
    return state


def _train_phase(
    run: Run, state: TrainState, phase: int, end: int, batches: Tasks, evaluator: Evaluator
) -> tuple[TrainState, bool]:
    """Train up to step `end`, or save and stop on a stop request -> (state, whether it stopped)."""
    options, stages = run.options, of_phase(run.stages, phase)
    first, mine = int(state.step), host_rows(run.mesh, batches.batch_size)
    given = place_given(any_task(run.stages, phase))
    meter, started = Meter(run, stages, batches), set()
    run.journal.doing(f"compiling phase {phase + 1}")
    with Loader(batches, first, end, mine, processes=options.workers) as loader, ExitStack() as trace:
        for step, rows in loader:
            if run.stop.reached(step):
                _save(run, state, phase, stopped=True)  # before the trace is written, which takes time
                return state, True
            if options.profile and step - first == PROFILED.start:
                trace.enter_context(_traced(run))
            if step - first == PROFILED.stop:
                trace.close()
            task, _ = batches.at(step)
            batch = place_rows(rows, mine, batches.batch_size, run.mesh)
            if task and task not in started:  # on a CPU the first step of each task compiles
                run.journal.doing(f"compiling task {task}")
            started.add(task)
            with jax.transfer_guard("disallow"):
                state, metrics = stages[task].train.run(state, run.frozen, batch, given)
            done = step + 1
            run.journal.progress(done)
            meter.add(task, metrics)
            if done % options.log_every == 0 or done == end or done == first + 1:
                meter.report(done)
            if done % options.checkpoint_every == 0 and done < run.recipe.steps:
                with meter.paused():
                    _save(run, state, phase)
            if options.eval_every and done % options.eval_every == 0 and done < run.recipe.steps:
                with meter.paused():
                    _evaluate(run, state, phase, evaluator)
                if _enough(run):
                    break
    return state, False


def _compiled(run: Run, step: int) -> Run:
    """Compile the programs of the remaining steps, if that is done ahead."""
    if step >= run.recipe.steps or not compiles_ahead(run.mesh):
        return run
    last = len(run.recipe.phases) - 1

    def names(phase):
        evaluates = run.evaluators is None and (run.options.eval_every or phase == last)
        return [TRAIN, EVALUATE] if evaluates else [TRAIN]

    wanted = {phase: names(phase) for phase in range(phase_at(run.recipe, step), last + 1)}
    return run._replace(stages=compile_phases(run.stages, wanted, run.journal.say))


def _enough(run: Run) -> bool:
    return is_enough(run.recipe, run.evaluations, run.options.patience)


def _evaluator(run: Run, phase: int) -> Evaluator:
    make = run.evaluators or Evaluators
    return make(of_phase(run.stages, phase), run.corpora, run.options.eval_examples)


def _save(run: Run, state: TrainState, phase: int, stopped: bool = False) -> None:
    for corpus in run.corpora.values():  # never save what was trained on damaged text
        corpus.checks.wait(seconds=STOPPED_SECONDS if stopped else None)
    from_first("--workdir", run.directory.check_there)
    run.journal.sync()
    with no_memory(phase, CHECKPOINT):
        run.checkpoints.save(state, phase)


def _evaluate(run: Run, state: TrainState, phase: int, evaluator: Evaluator) -> None:
    run.journal.doing("evaluating")
    step = int(state.step)
    with no_memory(phase, EVALUATE):
        figures = evaluator(state.params, run.frozen, step)
        said = sample(evaluator, state.params, run.frozen) if run.options.sample and not run.evaluators else None
    if not figures:  # nothing is measured in this phase
        return
    run.evaluations[step] = losses(run.recipe, figures)
    run.journal.figures("eval", step, figures)
    if said:
        run.journal.say(said)
    run.journal.sync()
    if run.options.keep_best and step in best(run.recipe, run.evaluations, [*run.checkpoints.steps(), step]).values():
        _save(run, state, phase)


@contextmanager
def _traced(run: Run) -> Iterator[None]:
    """Profile this context into the work directory."""
    target = run.directory.path / "profile"
    folder = Path(tempfile.gettempdir()) / f"profile-{os.getpid()}" if in_cloud(target) else target
    with jax.profiler.trace(str(folder)):
        yield
    if in_cloud(target):
        upload(folder, target)
        remove_folder(folder)
    run.journal.say(f"profile written to {target}")


class Meter:
    """Collects metrics between two reports, without waiting for the devices.   stages: of a phase, by task."""

    def __init__(self, run: Run, stages: Mapping[str, Stage], batches: Tasks):
        self.run, self.stages, self.batches = run, stages, batches
        self.waiting: list[tuple[str, Metrics]] = []  # (task, metrics) of each step
        self.since: float | None = None  # None until the first step has compiled
        self.before_pauses = 0.0  # seconds spent on the waiting steps before pauses

    def add(self, task: str, metrics: Metrics) -> None:
        self.waiting.append((task, metrics))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the steps so far, and exclude the time in this context from the speed."""
        jax.block_until_ready(self.waiting)
        if self.since is not None:
            self.before_pauses += self._running()
        yield
        self.since = time.perf_counter()

    def _running(self) -> float:
        return time.perf_counter() - self.since

    def report(self, step: int) -> None:
        """Write the metrics since the last report; UserError if updates keep being skipped."""
        if not self.waiting:
            return
        tasks, metrics = zip(*jax.device_get(self.waiting), strict=True)
        seconds = None if self.since is None else self.before_pauses + self._running()
        figures = self._means(tasks, metrics) | self._sources(step)
        if seconds is not None:
            figures |= self._speed(seconds / len(metrics), tasks, step)
        self.run.journal.figures("train", step, figures)
        self.waiting, self.before_pauses, self.since = [], 0.0, time.perf_counter()
        skipped_in_row = int(metrics[-1].skipped[1])
        if skipped_in_row >= self.run.options.max_skipped:
            raise UserError(
                f"step {step}: loss or gradient was not finite in the last {skipped_in_row} updates, which were "
                f"skipped; continue with --init-from {self.run.directory.path} in another --workdir, with a lower "
                f"--schedule.peak (now {self.run.recipe.schedule.peak}) or a longer --schedule.warmup"
            )

    def _means(self, tasks: Sequence[str], metrics: Sequence[Metrics]) -> dict[str, float]:
        figures = {"loss": _mean(step.loss for step in metrics)}
        for task in dict.fromkeys(group_of(name) for name in self.stages if name in tasks):
            of_task = [step for name, step in zip(tasks, metrics, strict=True) if group_of(name) == task]
            counts = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *[step.counts for step in of_task])
            objective = next(stage.task.objective for name, stage in self.stages.items() if group_of(name) == task)
            task_figures = figures_of(objective, [step.sums for step in of_task], counts)
            if task:
                task_figures = {"loss": _mean(step.loss for step in of_task)} | task_figures
            figures |= {f"{task}/{name}" if task else name: value for name, value in task_figures.items()}
        figures["gradient_norm"] = _mean(step.gradient_norm for step in metrics)
        figures["learning_rate"] = float(metrics[-1].learning_rate)
        if metrics[-1].skipped[0]:
            figures["skipped_updates"] = int(metrics[-1].skipped[0])
        return figures

    def _sources(self, step: int) -> dict[str, float]:
        """Count the rows and epochs of each corpus of a mixture so far, as if all phases had this one's batches."""
        figures = {}
        for task, mixture in self.batches.batches.items():
            if isinstance(mixture, Mixture):
                for name, rows in mixture.rows_before(self.batches.before(step)[task]).items():
                    place = f"{task}/{name}" if task else name
                    figures |= {f"{place}/rows": rows, f"{place}/epochs": mixture.sources[name].epochs(rows)}
        return figures

    def _speed(self, seconds: float, tasks: Sequence[str], step: int) -> dict[str, float]:
        stage = self.stages[tasks[0]]
        of_tasks = [self.stages[task].task for task in tasks]
        flops = _mean(model_flops(self.run.recipe, stage.phase, task) for task in of_tasks)
        tokens = stage.phase.batch_size * _mean(task.objective.rows(stage.phase).tokens for task in of_tasks)
        figures = {
            "step_ms": 1000 * seconds,
            "tokens_per_s": tokens / seconds,
            "model_tflops_per_s": flops / seconds / 1e12,
            "seconds_left": float(round(seconds * (self.run.recipe.steps - step))),
        }
        device = self.run.mesh.devices.flat[0]
        if peak := peak_flops(device.device_kind):
            figures["mfu"] = flops / seconds / (peak * self.run.mesh.size)
        return figures


def _mean(values: Iterable) -> float:
    return float(np.mean([*values]))
