"""`python -m tpu plan` from the command line to its tables. XLA:CPU compiles here; its programs have no cycles."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest

from pretrain.commands.arguments import Target
from pretrain.commands.planning import plan_command, shaped, works
from pretrain.recipe import Phase
from pretrain.recipes.registry import RECIPES
from pretrain.training import placement
from pretrain.training.step import model_flops
from tests.pretrain import tiny, toys
from tests.pretrain.fields import replaced
from tpu import compiler, plan_report
from tpu import plan as plans
from tpu.__main__ import main
from tpu.compiler import Report
from tpu.kernel_costs import COSTS
from tpu.plan import plan
from tpu.rules import shard_bytes
from tpu.topologies import parse_topology

V5E = parse_topology("v5e:1x1")


def test_the_mesh_follows_the_mean_of_the_phases_by_their_steps():
    model = dataclasses.replace(tiny.BERT, positions=64)
    recipe = tiny.bert(model=model, phases=(Phase(0.75, 32, 8), Phase(0.25, 64, 8)))
    short, long = (model_flops(recipe, phase) for phase in recipe.phases)
    one, several = (placement.load_of(recipe, jax.devices()[:1] * number, None).flops for number in (1, 2))
    assert several == pytest.approx(0.75 * short + 0.25 * long) and one == 0  # there is nothing to choose


def test_phases_that_become_equal_are_planned_once():
    recipe = tiny.bert(phases=(Phase(0.9, 32, 8), Phase(0.1, 64, 8)))
    assert shaped(recipe, None, None).phases == recipe.phases
    assert shaped(recipe, 16, None).phases == (Phase(0.9, 32, 16), Phase(0.1, 64, 16))
    assert shaped(recipe, None, 48).phases == (Phase(1.0, 48, 8),)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("bert-base", "python -m tpu plan bert-base: missing: --topology"),
        ("bert-base --topology v5e:4x4 --mesh fsdp=3", "--mesh fsdp=3: it takes 3 devices, there are 16"),
        ("bert-base --topology v5e:4x4 --mesh data=16 --batch-size 8", "batch_size=8: is not a multiple of"),
        ("bert-base --topology v5e:4x4 --attention splash --model.heads 16", "set model.attention_dropout=0.1 to 0"),
        ("bert-base --topology v5e:4x4 --sequence-length 4096", "exceeds model.positions=512"),
        ("bert-base --topology v5e:4x4 --model.pattern.name bigbird", r"phases.0.length=128: .* at least 512 tokens"),
        ("", "name a recipe first"),
        ("--all --topologies", "--topologies: name at least one"),
    ],
)
def test_mistakes_are_one_line(arguments, says, capsys):
    assert main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(says, error)


PROGRAM = """HloModule step

ENTRY %main (a: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  ROOT %n = f32[64,128]{1,0} negate(%a), backend_config={"window_config":{"estimated_cycles":"9000000"}}
}
"""


@pytest.fixture
def on_cpu(monkeypatch):
    """Steps are made for this machine's device, and a stand-in compiles them: a MiB for each row -> their rows."""
    asked = []

    def answer(lowered, options, topology, cache):
        asked.append(lowered.in_avals[0][2]["tokens"].shape[0])
        return Report(2.0, 0, 0, 0, asked[-1] * 2**20, 0, PROGRAM)

    monkeypatch.setattr(plans, "compile_for_tpu", answer)
    monkeypatch.setattr(compiler, "devices", lambda topology, slices=1: jax.devices()[:1])
    monkeypatch.setattr(compiler, "prepare", lambda: None)
    toys.register(monkeypatch)
    monkeypatch.setitem(RECIPES, "toy", toys.recipe())
    return asked


def target(**changes):
    return Target(topology="v5e:1x1", dtype="float32", **changes)


def test_sizes_are_those_of_the_arguments(on_cpu, tmp_path):
    work, title = next(works(toys.recipe(), target(), V5E))
    planned = plan(work, V5E, {}, tmp_path)
    state, _, batch, _ = work.arguments
    floats = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert planned.parts["parameters"] == 4 * floats
    assert planned.parts["optimizer"] == 8 * floats + 4  # Adam counts its steps
    assert planned.parts["batch"] == shard_bytes(batch) > 0
    compiled = work.step.lower(*work.arguments).compile(compiler_options={"xla_backend_optimization_level": 0})
    assert sum(planned.parts.values()) == pytest.approx(compiled.memory_analysis().argument_size_in_bytes, rel=0.02)
    assert "toy on v5e:1x1 (v5litepod-1: 1 chips)" in title


def test_the_compilers_answers_are_kept_by_the_options_that_programs_were_jitted_with(on_cpu, monkeypatch, tmp_path):
    asked, given, report = [], {"xla_backend_optimization_level": 0}, Report(2.0, 0, 0, 0, 0, 0, "")
    monkeypatch.setattr(placement, "small_product_options", lambda mesh, looped: given)
    monkeypatch.setattr(plans, "compile_for_tpu", lambda lowered, options, *_: asked.append(options) or report)
    work, _ = next(works(toys.recipe(), target(microbatches=2), V5E))
    plan(work, V5E, {}, tmp_path)
    assert asked == [given, given]  # of the step and of the evaluation


def test_flops_of_the_program_are_the_models(on_cpu, tmp_path):
    """Three forward passes, plus little that the model's count leaves out."""
    recipe = shaped(RECIPES["bert-mini"], 8, 128)
    work, _ = next(works(recipe, target(depth="scan"), V5E))
    traced = work.step.trace(*work.arguments)
    counted = plans.flops(traced.jaxpr, {}).total
    assert work.model_flops < counted < 1.02 * work.model_flops
    again, _ = next(works(recipe, target(remat="full"), V5E))
    more = plans.flops(again.step.trace(*again.arguments).jaxpr, {}).total
    assert 1.2 < more / counted < 4 / 3  # the layers' forward pass once more


def test_the_attention_kernel_counts_by_arithmetic(on_cpu):
    work, title = next(works(shaped(RECIPES["bert-mini"], 8, 128), Target(topology="v5e:1x1", remat="none"), V5E))
    counted = plans.flops(work.step.trace(*work.arguments).jaxpr, COSTS)
    product = 3 * 2 * 8 * 128 * 128 * 256  # layers but the last, FLOPs of a multiply-add, rows, queries, keys, width
    assert counted.kernels == {"row_attention_forward": 2 * product, "row_attention_backward": 5 * product}
    assert counted.unknown == () and title.endswith("attention splash")
    assert work.model_flops < counted.total < 1.04 * work.model_flops  # scores are computed again


def test_the_kernel_of_relative_attention_counts_by_arithmetic(on_cpu):
    recipe = RECIPES["xlnet-mini"]
    for field, value in {"memory": 128, "depth": 3}.items():
        recipe = replaced(recipe, f"model.{field}", value)
    work, title = next(works(shaped(recipe, 8, 128), Target(topology="v5e:1x1", remat="none"), V5E))
    counted = plans.flops(work.step.trace(*work.arguments).jaxpr, COSTS)
    product = 2 * 8 * 128 * 256  # FLOPs of a multiply-add, rows, queries, width
    # Two layers of content queries, three of chosen ones; 256 keys, and as many distances and a block of 128 more.
    expected = {"whole_forward": 2 * 2 * 256 + 2 * 384, "whole_backward": 2 * 5 * 256 + 2 * 3 * 384}
    expected |= {"chosen_forward": 3 * 2 * 256 + 3 * 384, "chosen_backward": 3 * 5 * 256 + 3 * 3 * 384}
    assert counted.kernels == {f"relative_{name}": product * times for name, times in expected.items()}
    assert counted.unknown == () and title.endswith("attention relative")


def test_microbatches_reach_the_step(on_cpu):
    one, four = (next(works(toys.recipe(), target(microbatches=n), V5E))[0] for n in (1, 4))
    scans = lambda work: str(work.step.trace(*work.arguments).jaxpr).count("scan[")
    assert scans(four) > scans(one) and (one.rows_multiple, four.rows_multiple) == (1, 4)


def test_a_plan_is_printed_for_every_phase(on_cpu, capsys, tmp_path):
    arguments = "toy --topology v5e:1x1 --model.vocab-size 300 --batch-size 8 --sequence-length 16"
    assert plan_command([*arguments.split(), "--dtype", "float32", "--cache", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in ("phase 1 of 1: 8 rows of 16 tokens", "parameters", "optimizer", "fits", "model FLOPs per chip"):
        assert words in printed
    assert "6 ms" in printed  # 9 million cycles at 1.5 GHz
    # 97% of 15.75 GiB hold as many rows of 1 MiB, and of 9 batches that wait, as are tried last; the parameters are not
    # in the stand-in's answer.
    assert "largest batch that fits: 15635 rows of 16" in printed and on_cpu[0] == 8 and on_cpu[-1] == 15635


@pytest.mark.parametrize(
    "mfu, ratios, said",
    [
        (0.4, (0.8, 0.9), "40.0% (up to 50,"),
        (0.4, (0.8, 1.25), "40.0% (32 to 50,"),
        (0.004, (0.8, 1.25), "0.4% (0.3 to 0.5,"),
    ],
)
def test_a_range_ends_where_a_measurement_lay_to_that_side_of_its_estimate(mfu, ratios, said, monkeypatch):
    monkeypatch.setattr(plan_report, "RATIOS", dict(enumerate(("v5p", ratio) for ratio in ratios)))
    estimate = SimpleNamespace(seconds=1.0, kernels=0.0, compute=1.0, memory=0.0, collectives=0.0, exposed=0.0)
    planned = SimpleNamespace(
        estimate=estimate, tokens_per_second=1.0, mfu=mfu, topology=SimpleNamespace(generation="v5p")
    )
    assert plan_report.figures(planned)["estimated MFU"].startswith(said)


def test_all_writes_a_table(on_cpu, tmp_path):
    arguments = ["--all", "--topologies", "v5e:1x1", "--recipes", "toy", "--out", str(tmp_path / "plans")]
    assert plan_command([*arguments, "--cache", str(tmp_path)]) == 0
    table = (tmp_path / "plans" / "plans.md").read_text().splitlines()
    assert table[2].startswith("| toy | v5e:1x1 (v5litepod-1) | data=1 | 8 x 16 |")
    assert "estimates of XLA's TPU compiler, not measurements" in table[-1]
