"""What would fail in a later phase fails before the first step, and what was compiled for that is what trains."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from data_pipelines.errors import UserError
from models.core.program import Program
from pretrain.objectives.objective import Term
from pretrain.recipe import Phase
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import loop, placement
from pretrain.training.assembly import assemble
from pretrain.training.placement import EVALUATE, TRAIN, compile_phases
from pretrain.training.run import run
from tests.pretrain import tiny, toys
from tpu.mesh import choose_mesh
from tpu.rules import shard_bytes

PHASES = (Phase(0.5, 32, 8), Phase(0.5, 16, 8))


pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def accelerator(monkeypatch):
    """What is done ahead on accelerators is done here."""
    monkeypatch.setattr(loop, "compiles_ahead", lambda mesh: True)


class Uncalled:
    """A jitted function that may be compiled, but not called: that would compile it once more."""

    def __init__(self, jitted):
        self.trace, self.lower = jitted.trace, jitted.lower


def test_a_second_phase_without_room_ends_the_run_before_the_first_step(
    accelerator, corpus_path, tmp_path, monkeypatch
):
    sizes = ("argument", "temp", "output", "alias", "generated_code")
    nothing = SimpleNamespace(**{f"{size}_size_in_bytes": 0 for size in sizes})

    def compile_(lowered):
        _, _, batch = lowered.in_avals[0][:3]
        if batch["tokens"].shape[1] == 16:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\nUsed 17.2G")
        return SimpleNamespace(memory_analysis=lambda: nothing)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    with pytest.raises(UserError) as caught:
        run(toys.recipe(phases=PHASES), tiny.options(corpus_path, tmp_path / "run"))
    said = str(caught.value)
    assert said.startswith("phase 2: the train step does not fit a device's memory; raise --microbatches")
    assert all(cure in said for cure in ("--remat full", "--mesh"))
    assert said.endswith(" or, in another --workdir, a smaller phases.1.batch_size")
    assert read_metrics(RunDirectory(tmp_path / "run"), "train") == []


def test_what_is_compiled_ahead_trains_and_evaluates(accelerator, corpus_path, tmp_path, monkeypatch, capsys):
    make = placement.stages
    uncalled = lambda program: program._replace(run=Uncalled(program.run))
    of_stage = lambda stage: stage._replace(train=uncalled(stage.train), evaluate=uncalled(stage.evaluate))
    monkeypatch.setattr(placement, "stages", lambda *of: [of_stage(stage) for stage in make(*of)])
    recipe = toys.recipe(steps=4, phases=PHASES)
    options = tiny.options(corpus_path, tmp_path / "run", eval_every=1)
    assert run(recipe, options) == 0
    assert len(read_metrics(RunDirectory(tmp_path / "run"), "eval")) == 4
    said = capsys.readouterr().out
    assert said.count("compiling phase") == 2 and "compiling phase 2 of 2: train step, evaluation\n" in said
    assert said.index("compiling phase 2") < said.index("phase 1 of 2: 8 rows of 32 tokens, steps")
    capsys.readouterr()
    run(recipe, dataclasses.replace(options, keep=1))
    assert "compiling" not in capsys.readouterr().out  # nothing is left to do


def test_a_phase_that_cannot_be_traced_fails_before_anything_is_written(corpus_path, tmp_path, monkeypatch):
    loss = toys.NextWord.loss

    def short(self, model, params, batch, *rest):
        assert batch["tokens"].shape[1] == 32, "too short"
        return loss(self, model, params, batch, *rest)

    monkeypatch.setattr(toys.NextWord, "loss", short)
    with pytest.raises(AssertionError, match="too short"):
        run(toys.recipe(phases=PHASES), tiny.options(corpus_path, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_what_finds_no_memory_in_its_first_step_says_what_makes_it_smaller(corpus_path, tmp_path, monkeypatch):
    loss = toys.NextWord.loss

    def large(self, model, params, batch, carry, moment):
        sums, *rest = loss(self, model, params, batch, carry, moment)
        column = jnp.sin(jax.lax.stop_gradient(sums["next"].sum) * jnp.arange(2**22))
        terabytes = jnp.outer(column, column)  # which no CPU gives
        return sums | {"next": Term(sums["next"].sum + jax.lax.sort(terabytes)[0, 0])}, *rest

    monkeypatch.setattr(toys.NextWord, "loss", large)
    with pytest.raises(UserError, match="phase 1: the train step does not fit .*raise --microbatches"):
        run(toys.recipe(), tiny.options(corpus_path, tmp_path / "run"))


@pytest.mark.parametrize("name, names", [(TRAIN, [TRAIN]), (EVALUATE, [EVALUATE]), ("checkpoint", [])])
def test_a_device_needs_room_for_the_state_beside_whatever_is_done(name, names):
    mesh = choose_mesh(None, jax.devices())
    (stage,) = placement.stages(assemble(toys.recipe(), Program()), mesh)
    stood_in = lambda memory: SimpleNamespace(
        local_devices=[SimpleNamespace(memory_stats=lambda: memory and {"bytes_limit": memory})]
    )
    room = shard_bytes(stage.train.arguments)
    with pytest.raises(UserError, match=f"phase 1: the {name} needs .* GiB, but a device has .*phases.0.batch_size"):
        compile_phases([stage._replace(mesh=stood_in(room))], {0: names}, print)
    for memory in (3 * room + 2**20, None):
        compile_phases([stage._replace(mesh=stood_in(memory))], {0: names}, print)
