"""Recipes and runs small enough to train within seconds."""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.examples.permutations import Permuting
from data_pipelines.examples.span_corruption import Corruption, sizes_of
from models.families.albert import AlbertConfig
from models.families.bert import BertConfig
from models.families.deberta import DebertaV3Config
from models.families.electra import ElectraConfig, Tower
from models.families.etc import EtcConfig
from models.families.gpt2 import GPT2Config
from models.families.t5 import T5Config
from models.families.transformer_xl import TransformerXLConfig
from models.families.xlnet import XLNetConfig
from pretrain.objectives.causal_language_model import CausalLanguageModel
from pretrain.objectives.masked_language_model import GlobalPhase, MaskedLanguageModel, MaskedWithGlobals
from pretrain.objectives.next_token_prediction import INPUT_TARGET, NextTokenPrediction
from pretrain.objectives.permutation_language_model import PermutationLanguageModel
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets, SequenceToSequence
from pretrain.optimizers import Optimizer
from pretrain.options import Options
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule
from pretrain.storage.checkpoints import Checkpoints, phase_of
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import run as runs
from pretrain.training.assembly import assemble
from pretrain.training.opened import Restored, restore
from pretrain.training.placement import any_task, stages
from tpu.mesh import row_mesh

BERT = BertConfig(vocab_size=195, positions=32, width=32, depth=1, heads=2, feed_forward=64)
ALBERT = AlbertConfig(vocab_size=195, positions=32, embedding=16, width=32, depth=2, heads=2, feed_forward=64)
ELECTRA = ElectraConfig(
    vocab_size=195, positions=32, embedding=32, discriminator=Tower(32, 1, 2, 64), generator=Tower(16, 1, 1, 32)
)
DEBERTA_V3 = DebertaV3Config(
    vocab_size=195, positions=32, width=32, depth=2, generator_depth=1, heads=2, feed_forward=64, buckets=8, furthest=20
)
GPT2 = GPT2Config(vocab_size=340, positions=64, width=32, depth=1, heads=2, feed_forward=64, init_std=0.1)
TRANSFORMER_XL = TransformerXLConfig(
    vocab_size=195, width=32, depth=1, heads=2, feed_forward=64, memory=16, cutoffs=(), init_std=0.1
)
ETC = EtcConfig(vocab_size=195, width=32, depth=1, heads=2, feed_forward=64, block=4, distance=3, init_std=0.1)
XLNET = XLNetConfig(vocab_size=195, width=32, depth=1, heads=2, feed_forward=64, memory=16, init_std=0.1)


T5 = T5Config(vocab_size=195, width=32, depth=1, decoder_depth=1, heads=2, head_dim=16, feed_forward=64)
TARGET = sizes_of(32, Corruption()).target


def _recipe(name, model, objective, changes) -> Recipe:
    schedule, phases = Schedule(peak=1e-3, warmup=0.1), (Phase(1.0, 32, 8),)
    fields = {"optimizer": Optimizer(), "schedule": schedule, "phases": phases, "steps": 20} | changes
    return Recipe(**{"name": name, "source": "test", "model": model, "objective": objective} | fields)


def bert(**changes) -> Recipe:
    return _recipe("bert", BERT, MaskedLanguageModel(), changes)


def albert(**changes) -> Recipe:
    return _recipe("albert", ALBERT, MaskedLanguageModel(next_sentence=False, sentence_order=True), changes)


def etc(**changes) -> Recipe:
    return _recipe("bigbird-etc", ETC, MaskedWithGlobals(), {"phases": (GlobalPhase(1.0, 32, 8, globals=4),)} | changes)


def electra(**changes) -> Recipe:
    return _recipe("electra", ELECTRA, ReplacedTokenDetection(), changes)


def gpt2(**changes) -> Recipe:
    return _recipe("gpt2", GPT2, NextTokenPrediction(), changes)


def transformer_xl(**changes) -> Recipe:
    return _recipe("transformer-xl", TRANSFORMER_XL, CausalLanguageModel(), changes)


def xlnet(**changes) -> Recipe:
    return _recipe("xlnet", XLNET, PermutationLanguageModel(Permuting(reuse_len=8, perm_size=8, k=4)), changes)


def t5(**changes) -> Recipe:
    adafactor, phase = Optimizer("adafactor", decay=0.0), PhaseWithTargets(1.0, 32, 8, target_length=TARGET)
    return _recipe("t5", T5, SequenceToSequence(), {"optimizer": adafactor, "phases": (phase,)} | changes)


def restored_of_pairs(*arguments) -> Restored:
    """What `restore` gives, as if the run's rows were inputs and targets."""
    restored = restore(*arguments)
    recipe = restored.assembly.recipe
    recipe = dataclasses.replace(recipe, objective=dataclasses.replace(recipe.objective, layout=INPUT_TARGET))
    return restored._replace(assembly=restored.assembly._replace(recipe=recipe))


def options(corpus: Path, workdir: Path, **changes) -> Options:
    settings = {"log_every": 5, "eval_every": 0, "eval_examples": 16, "checkpoint_every": 5} | changes
    return Options(corpus=str(corpus), workdir=workdir, **settings)


def begun(recipe: Recipe, options: Options):
    """Begin a run, which ends with a checkpoint of step 1 before anything is compiled to train -> its parameters."""
    found = []

    def at_once(whole, state, carried):
        found.append(jax.device_get(state.params))
        whole.checkpoints.save(state._replace(step=jnp.int32(1)))
        whole.checkpoints.wait()
        return state, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "train", at_once)
        patch.setattr(runs, "trace", lambda stages, names: None)
        assert runs.run(recipe, options) == 0
    return found[0]


def equal(one, other) -> bool:
    """Two trees of arrays are the same bit for bit."""
    one, other = jax.tree.flatten(jax.device_get(one)), jax.tree.flatten(jax.device_get(other))
    pairs = zip(one[0], other[0], strict=True)
    return one[1] == other[1] and all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@functools.lru_cache(4)  # a test often asks for several states of a recipe, each of which would be traced
def _on_one_device(recipe: Recipe):
    return stages(assemble(recipe), row_mesh(jax.local_devices()[:1], [1]))


def final_state(workdir: Path, step: int | None = None):
    """The train state of a checkpoint, by default the newest, as NumPy arrays."""
    directory = RunDirectory(workdir)
    recipe = directory.read_recipe()
    placed, phase = _on_one_device(recipe), lambda at: phase_of(directory.checkpoints / str(at), recipe)
    checkpoints = Checkpoints(directory.checkpoints)
    try:
        return jax.device_get(checkpoints.restore(lambda at: any_task(placed, phase(at)).state, step))
    finally:
        checkpoints.close()


def start(*arguments, program: Sequence[str] = ("-m", "pretrain"), **environment) -> subprocess.Popen:
    """`python -m pretrain` with these arguments, or another program; output as text."""
    command = [sys.executable, *program, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True, **pipes)


def run_command(*arguments, timeout: float = 400, **environment) -> tuple[int, str, str]:
    """The same to its end -> (exit status, standard output, standard error)."""
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def run_arguments(corpus: Path, workdir: Path, *more, recipe: str = "bert-tiny") -> list:
    """Arguments of `run` for the model BERT above, or another of its sizes, 40 steps with a checkpoint every 4."""
    return [
        "run", recipe, "--corpus", corpus, "--workdir", workdir, "--steps", 40, "--checkpoint-every", 4,
        "--log-every", 1, "--eval-examples", 16, "--model.width", 32, "--model.heads", 2, "--model.feed-forward", 64,
        "--model.positions", 32, "--phases.0.length", 32, "--phases.0.batch-size", 8, *more,
    ]  # fmt: skip


def memory_arguments(recipe: str, corpus: Path, workdir: Path, *more) -> list:
    """Arguments of `run` for a tiny Transformer-XL or XLNet, 12 steps."""
    shape = ["--phases.0.length", 32, "--phases.0.batch-size", 8, "--model.memory", 16]
    shape += ["--objective.permuting.reuse-len", 8] if recipe.startswith("xlnet") else []
    return [
        "run", recipe, "--corpus", corpus, "--workdir", workdir, "--steps", 12, "--log-every", 1,
        "--eval-examples", 16, "--model.width", 32, "--model.heads", 2, "--model.feed-forward", 64, *shape, *more,
    ]  # fmt: skip
