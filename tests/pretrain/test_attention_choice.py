"""A run takes its platform's attention kernel where that can run, and says why where it cannot; nothing falls back."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.attention.kernels import cudnn
from models.attention.kernels.kernel import Attention
from models.attention.kernels.table import KERNELS
from models.attention.mask import Mask
from models.attention.multi_head import plain_form
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.plain import attention as dense
from models.attention.sparse import attention as blocked
from models.core.program import Program
from models.families.registry import FAMILIES, family_of
from models.families.transformer_xl import TransformerXLConfig
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.objective import Moment, Teacher
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets
from pretrain.recipe import Phase, every_task
from pretrain.recipes.registry import RECIPES
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import attention_choice
from pretrain.training.assembly import assemble, initial_params, parameter_shapes
from pretrain.training.attention_choice import (
    chosen_program,
    for_evaluation,
    form_of_pattern,
    why_plain,
    with_kernels,
)
from pretrain.training.placement import stages
from pretrain.training.run import run
from tests.pretrain import tiny, toys
from tests.pretrain.test_options import rows_and_keys
from tpu.generations import GENERATIONS
from tpu.mesh import AXES, row_mesh


def bert(length=128, rate=0.0, **changes):
    sizes = {"depth": 2, "attention_dropout": rate, "positions": 512} | changes
    model = dataclasses.replace(tiny.BERT, **sizes)
    return tiny.bert(model=model, phases=(Phase(1.0, length, 8),))


def gpt2(length=128, **changes):
    """A decoder with dropout."""
    model = dataclasses.replace(tiny.GPT2, **{"depth": 2, "width": 128} | changes)
    return tiny.gpt2(model=model, phases=(Phase(1.0, length, 8),))


def electra(heads=1):
    generator = dataclasses.replace(tiny.ELECTRA.generator, depth=2, width=48, heads=heads)
    model = dataclasses.replace(tiny.ELECTRA, attention_dropout=0.0, positions=128, generator=generator)
    return tiny.electra(model=model, phases=(Phase(1.0, 128, 8),))


def t5(length=128, target=29):
    """An encoder beside a decoder, with dropout."""
    model = dataclasses.replace(tiny.T5, head_dim=64)
    return tiny.t5(model=model, phases=(PhaseWithTargets(1.0, length, 8, target_length=target),))


def transformer_xl(length=128, evaluation_memory=None, **changes):
    """A model whose kernel has dropout."""
    model = TransformerXLConfig(**{"width": 128, "heads": 2, "memory": 128, "attention_dropout": 0.1} | changes)
    recipe = tiny.transformer_xl(model=model, phases=(Phase(1.0, length, 8),))
    objective = dataclasses.replace(recipe.objective, evaluation_memory=evaluation_memory)
    return dataclasses.replace(recipe, objective=objective)


def xlnet(length, memory):
    model = dataclasses.replace(tiny.XLNET, depth=2, width=128, memory=memory)
    return tiny.xlnet(model=model, phases=(Phase(1.0, length, 8),))


def sparse(length=128, **changes):
    """A model whose kernel has dropout, with a pattern."""
    sizes = {"width": 128, "heads": 2, "pattern": Pattern("bigbird", block=64, random=0, global_blocks=1)} | changes
    return bert(length, 0.1, **sizes)


# (recipe, platform, what keeps its kernel from it)
REASONS = [
    (bert(), "tpu", {}, None),
    (bert(rate=0.1, width=128), "tpu", {}, None),
    (bert(rate=0.1), "tpu", {}, "32, 64 or 128, or set model.attention_dropout=0.1 to 0"),
    (gpt2(), "tpu", {}, None),
    (bert(64), "tpu", {}, "splash does not work here: length=64: choose a multiple of 128"),
    (bert(depth=1), "tpu", {}, "splash does not work here: the output of the only layer is needed at few positions"),
    (bert(), "tpu", {"dtype": "float32"}, "splash does not work here: --dtype is float32: use bfloat16"),
    (bert(), "gpu", {}, None),
    (bert(width=24), "gpu", {}, "model.heads=2 in model.width=24 have 12 numbers each: choose a multiple of 8"),
    (t5(), "tpu", {}, None),
    (t5(1152), "tpu", {}, "splash does not work here: length=1152: choose at most 1024"),
    (t5(target=1025), "tpu", {}, "splash does not work here: target-length=1025: choose at most 1024"),
    (t5(), "gpu", {}, "scores have a bias, which it does not add"),
    (electra(), "gpu", {}, None),
    (electra(4), "gpu", {}, "model.generator.heads=4 in model.generator.width=48 have 12 numbers each"),
    (transformer_xl(), "tpu", {}, None),
    (transformer_xl(64), "tpu", {}, "relative does not work here: length=64: choose a multiple of 128"),
    (transformer_xl(width=192), "tpu", {}, "model.heads=2 in model.width=192 do not fill blocks of 128"),
    (transformer_xl(1024), "tpu", {}, "length=1024 with memory=128 has 2176 distances, more than 2048: lower them"),
    (xlnet(768, 512), "tpu", {}, "length=768 with memory=512 has 2304 distances"),  # of the predicted positions
    (xlnet(512, 384), "tpu", {}, None),
    (sparse(), "tpu", {}, None),
    (sparse(256, depth=1), "tpu", {}, None),
    (sparse(2**17), "tpu", {}, "length=131072 with 256 keys for a query does not fit into vector memory"),
]


@pytest.mark.parametrize("recipe, platform, changes, said", REASONS)
def test_a_kernel_is_taken_by_itself_where_it_can_run_else_the_run_says_why(recipe, platform, changes, said, tmp_path):
    options = tiny.options(tmp_path, tmp_path, **changes)
    program = chosen_program(recipe, options, platform=platform)
    reasons = why_plain(assemble(recipe, program), options, platform=platform)
    form = assemble(recipe).family.attention, getattr(recipe.model, "pattern", Pattern()).name != "dense"
    kernel = next(one.name for one in KERNELS.values() if (one.form, one.sparse) == form and platform in one.platforms)
    if said is None:
        assert program.attention == kernel and reasons == []
    else:
        assert program.attention == "xla" and "attention xla: " in reasons[0] and said in reasons[0]
        with pytest.raises(UserError, match=rf"--attention {kernel} does not work here: .*; or use xla$"):
            chosen_program(recipe, dataclasses.replace(options, attention=kernel), platform=platform)


@pytest.mark.parametrize(
    "recipe, platform, named, said",
    [
        (bert(), "cpu", "splash", "is not available for bert on cpu; use xla$"),
        (transformer_xl(), "tpu", "splash", "is not available for transformer-xl on tpu; use xla or relative"),
        (bert(), "tpu", "nonsense", "^--attention: unknown attention nonsense; use one of splash, xla$"),
        (bert(), "tpu", "splash+", "'' is not a kernel, and '[+]' joins kernels; use xla or splash$"),
        (sparse(), "tpu", "dense+blocked", "'dense' is not a kernel, and '[+]' joins kernels; use xla or pattern$"),
        (bert(), "tpu", "dense", r"bert has no sparse pattern \(model.pattern.name\); use xla or"),
    ],
)
def test_what_is_for_another_platform_model_or_pattern_is_an_error(recipe, platform, named, said, tmp_path):
    line = said if said.startswith("^") else f"--attention {re.escape(named)}: {said}"
    with pytest.raises(UserError, match=line):
        chosen_program(recipe, tiny.options(tmp_path, tmp_path, attention=named), platform=platform)


def test_where_no_kernel_compiles_the_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_choice, "generation_of", lambda kind: GENERATIONS["v3"])
    recipe, options, mesh = bert(), tiny.options(tmp_path, tmp_path), row_mesh(jax.devices()[:1], [8])
    program = chosen_program(recipe, options, mesh, "tpu")
    why = ["attention xla: splash does not work here: no kernel compiles for TPU v3"]
    assert program.attention == "xla" and why_plain(assemble(recipe, program), options, mesh, "tpu") == why
    with pytest.raises(UserError, match="--attention splash does not work here: no kernel compiles for TPU v3; or use"):
        chosen_program(recipe, dataclasses.replace(options, attention="splash"), mesh, "tpu")


def test_a_generation_without_room_for_a_bias_says_so(tmp_path, monkeypatch):
    options, mesh = tiny.options(tmp_path, tmp_path), row_mesh(jax.devices()[:1], [8])
    for name, length, kernel in (("v4", 768, "splash"), ("v4", 1024, "xla"), ("v5p", 1024, "splash")):
        monkeypatch.setattr(attention_choice, "generation_of", lambda kind, name=name: GENERATIONS[name])
        recipe = t5(length)
        program = chosen_program(recipe, options, mesh, "tpu")
        assert program.attention == kernel
        said = why_plain(assemble(recipe, program), options, mesh, "tpu")
        why = "TPU v4 has no room for a bias of 1024 tokens: use at most 768"
        assert said == ([f"attention xla: splash does not work here: {why}"] if kernel == "xla" else [])


@pytest.mark.parametrize("recipe, form", [(transformer_xl(64), "xla"), (sparse(), "dense"), (sparse(), "blocked")])
def test_what_asks_for_plain_operations_gets_them_in_silence(recipe, form, tmp_path):
    options = tiny.options(tmp_path, tmp_path, attention=form)
    program = chosen_program(recipe, options, platform="tpu")
    assert program.attention == form and why_plain(assemble(recipe, program), options, platform="tpu") == []


def test_plain_operations_take_blocks_above_the_crossover_and_the_run_says_so():
    model = dataclasses.replace(tiny.BERT, positions=128, pattern=Pattern("bigbird", block=8))
    said = {}
    for length in (80, 88):  # 80 keys are read
        said[length] = form_of_pattern(assemble(tiny.bert(model=model, phases=(Phase(1.0, length, 8),))))
        blocks = jax.tree.map(lambda array: array[0], blocks_of(model.pattern, 2, 2, length))
        mask = Mask(jnp.ones((1, length), jnp.int32), blocks=blocks)
        assert plain_form("xla", mask).mix is (dense if length == 80 else blocked)
        assert plain_form("dense", mask).mix is dense and plain_form("blocked", mask).mix is blocked
    assert said == {
        80: ["attention xla: the sparse pattern in rows of 80 tokens is computed densely (up to 80)"],
        88: ["attention xla: the sparse pattern in rows of 88 tokens is computed in blocks (above 80)"],
    }
    assert form_of_pattern(assemble(bert())) == []


def test_few_layers_with_a_kernel_are_unrolled_unless_the_run_says_otherwise(tmp_path):
    options = lambda changes: tiny.options(tmp_path, tmp_path, **changes)
    chosen = lambda recipe, **changes: chosen_program(recipe, options(changes), platform="tpu")
    assert [chosen(sparse(depth=depth)).depth for depth in (2, 12, 13)] == ["unroll", "unroll", "scan"]
    assert [chosen(bert(depth=depth)).depth for depth in (24, 25)] == ["unroll", "scan"]
    assert [chosen(gpt2(depth=depth)).depth for depth in (24, 25)] == ["unroll", "scan"]
    assert chosen(sparse(), depth="scan").depth == chosen(bert(), depth="scan").depth == "scan"
    assert chosen(sparse(), attention="xla").depth == chosen(bert(), attention="xla").depth == "scan"


CUTS = [((2, 2, 1, 2, 1), "unroll"), ((1, 2, 2, 1, 1), "unroll"), ((1, 1, 1, 1, 2), "scan")]


@pytest.mark.parametrize("shape, depth", CUTS)
def test_layers_are_scanned_where_a_mesh_cuts_a_layers_work(shape, depth, tmp_path):
    mesh = Mesh(np.full(shape, jax.devices()[0]), AXES)
    recipe = bert(256, width=256, heads=4)
    assert chosen_program(recipe, tiny.options(tmp_path, tmp_path), mesh, "tpu").depth == depth


def test_layers_that_share_parameters_are_scanned(tmp_path):
    options = tiny.options(tmp_path, tmp_path)
    chosen = [chosen_program(RECIPES[name], options, platform="tpu") for name in ("albert-base", "bert-base")]
    assert [(program.attention, program.depth) for program in chosen] == [("splash", "scan"), ("splash", "unroll")]


def test_of_the_recipes_whose_queries_see_all_only_those_of_short_rows_are_plain_on_tpus(tmp_path):
    options, form = tiny.options(tmp_path, tmp_path), lambda model: family_of(model).attention
    dense = lambda model: form(model) == "self" and getattr(model, "pattern", Pattern()).name == "dense"
    chosen = {name: chosen_program(recipe, options, platform="tpu") for name, recipe in RECIPES.items()}
    of_kernels = {name: recipe for name, recipe in RECIPES.items() if dense(recipe.model) and name[:5] != "unilm"}
    plain = {name for name in of_kernels if chosen[name].attention == "xla"}
    unfit = {"tinybert-4", "mobilebert-ib-bert"}  # heads of 26 and of 256 numbers
    assert plain == unfit | {name for name, recipe in of_kernels.items() if recipe.phases[0].length < 128}
    assert {"electra-tiny", "transformer-base"} <= plain


def test_every_phase_is_asked_for(tmp_path):
    recipe = dataclasses.replace(bert(), phases=(Phase(0.9, 128, 8), Phase(0.1, 200, 8)))
    options = tiny.options(tmp_path, tmp_path, attention="splash")
    with pytest.raises(UserError, match="length=200: choose a multiple of 128"):
        chosen_program(recipe, options, platform="tpu")


def test_an_evaluation_that_the_kernel_cannot_run_is_plain_and_the_run_says_so(tmp_path):
    recipe, options = transformer_xl(evaluation_memory=100), tiny.options(tmp_path, tmp_path, attention="relative")
    program = chosen_program(recipe, options, platform="tpu")
    assembly = assemble(recipe, program)
    said = why_plain(assembly, options, platform="tpu")
    assert said == ["evaluation uses attention xla: memory=100: choose a multiple of 128"]
    mesh = row_mesh(jax.devices(), [1])
    assert program.attention == "relative"
    assert for_evaluation(assembly, *every_task(recipe)[0][::2], mesh).model.program == dataclasses.replace(
        program, attention="xla"
    )
    same = assembly._replace(recipe=transformer_xl(evaluation_memory=256))
    assert (
        for_evaluation(same, *every_task(same.recipe)[0][::2], mesh) is same
        and why_plain(same, options, platform="tpu") == []
    )
    for of, kernels in ((assembly, 0), (same, 1)):
        evaluate = stages(of, mesh)[0].evaluate
        traced = evaluate.run.trace(*evaluate.arguments)
        assert str(traced.jaxpr).count("name=relative_whole_forward") == kernels


def test_a_run_says_once_why_attention_is_not_the_kernel(corpus_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    attentions = lambda config, shape, memory: [Attention(shape.length, 128, 1, 0.0)]
    monkeypatch.setitem(FAMILIES, "bag", toys.FAMILY._replace(attention="self", attentions=attentions))
    monkeypatch.setitem(KERNELS, "splash", KERNELS["splash"]._replace(platforms=("cpu",)))
    run(toys.recipe(steps=1), tiny.options(corpus_path, tmp_path))
    log = RunDirectory(tmp_path).log.read_text()
    assert log.count("attention xla: splash does not work here: length=16: choose a multiple of 128") == 1


@pytest.mark.parametrize(
    "teacher, named, attention",
    [
        (bert(depth=3), None, "splash"),
        (bert(depth=3), "xla", "xla"),
        (bert(rate=0.1), None, "xla"),
        (transformer_xl(), None, "xla"),
        (sparse(), None, "xla"),
    ],
)
def test_a_teacher_has_the_kernel_of_its_student_where_that_can_compute_its_attention(
    teacher, named, attention, tmp_path
):
    recipe = dataclasses.replace(bert(), teachers=(Teacher("teacher", "", teacher.model),), objective=Distillation())
    mesh = row_mesh(jax.devices(), [1])
    program = chosen_program(recipe, tiny.options(tmp_path, tmp_path, attention=named), mesh, "tpu")
    found = with_kernels(assemble(recipe, program), mesh)
    assert found.model.program == program and program.attention == (named or "splash")
    assert found.teachers["teacher"].program == dataclasses.replace(program, attention=attention)


def test_a_mesh_that_does_not_divide_a_teacher_names_it(tmp_path):
    teachers = (Teacher("large", "", bert(heads=1).model),)
    recipe = dataclasses.replace(bert(), teachers=teachers, objective=Distillation(taught_by=("large",)))
    mesh = Mesh(np.full([2 if axis == "tensor" else 1 for axis in AXES], jax.devices()[0]), AXES)
    program = chosen_program(recipe, tiny.options(tmp_path, tmp_path), mesh, "tpu")
    with pytest.raises(UserError, match="^the teacher large: --mesh tensor=2 does not divide heads, which is 1"):
        with_kernels(assemble(recipe, program), mesh)


@pytest.mark.parametrize(
    "recipe, kernel",
    [
        (bert(), "splash"),
        (electra(), "splash"),
        (bert(), "cudnn"),
        (transformer_xl(), "relative"),
        (xlnet(384, 128), "relative"),
        (t5(), "splash"),
    ],
)
def test_the_choice_is_asked_what_the_trace_asks(recipe, kernel, monkeypatch):
    """Neither accepts what the other refuses."""
    asked, family = set(), assemble(recipe).family
    recording = lambda of: asked.add(of._replace(part="")) or []
    monkeypatch.setitem(KERNELS, kernel, KERNELS[kernel]._replace(obstacles=recording))
    monkeypatch.setattr(cudnn, "cudnn", lambda q, k, v, mask, **_: q)  # JAX's traces on a machine with a GPU alone
    assembly = assemble(recipe, Program(dtype="bfloat16", attention=kernel))
    params = parameter_shapes(recipe)
    asked.clear()  # of the initialisation
    carry, _ = recipe.objective.carry(assembly.model, recipe.phases[0], True)
    loss = lambda params, batch, keys: recipe.objective.loss(assembly.model, params, batch, carry, Moment(keys, True))
    jax.eval_shape(loss, params, *rows_and_keys(recipe))
    phase, memory = recipe.phases[0], recipe.objective.memory(recipe.model, train=True)
    assert asked == {of._replace(part="") for of in family.attentions(recipe.model, phase, memory)}


def test_on_a_gpu_a_layer_calls_cudnn_once_forward_and_once_backward(tmp_path, monkeypatch):
    """What remat 'dots' computes again has no kernel in it; lowered for a GPU that is not there."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    recipe = bert(depth=3)
    program = chosen_program(recipe, tiny.options(tmp_path, tmp_path), platform="gpu")
    assert (program.attention, program.depth, program.remat) == ("cudnn", "scan", "dots")
    step = stages(assemble(recipe, program), row_mesh(jax.devices(), [1]))[0].train
    text = step.run.trace(*step.arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert [text.count(f"@__cudnn$fmhaScaleBiasSoftmax{way}(") for way in ("", "Backward")] == [1, 1]


def test_parameters_begin_the_same_with_a_kernel_that_cannot_be_mapped_over_layers():
    recipe = bert(heads=2)
    made = lambda attention: initial_params(assemble(recipe, Program(attention=attention)))
    assert tiny.equal(made("cudnn"), made("xla"))
