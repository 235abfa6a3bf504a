"""`benchmarks.gpu` gives each row what could be measured of it, and both of its sides compute the same loss."""

import gzip
import json
import os

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu_sides import Case
from benchmarks.trace import longest

ROOM = 4  # rows that the stand-ins have memory for
ABOUT = {"device": "a GPU", "platform": "", "memory": 2e9}


class Side:
    """A stand-in for both sides."""

    def __init__(self, case):
        if case.rows > ROOM:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes")

    def __call__(self):
        return 0.0

    def about(self):
        return {"program": "bfloat16", "plain": [], "peak": 1e12, "flops": 1e9, **ABOUT}


class Broken(Side):
    def __init__(self, case):
        raise ValueError("sdpa is not there\nand more")


class Killed(Side):
    def __init__(self, case):
        pass

    def __call__(self):
        os._exit(9)


@pytest.fixture
def printed(capsys):
    """Cells of the rows that a run of the command prints."""

    def run(*arguments):
        assert gpu.main([*arguments, "--rounds", "2", "--steps", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| bert")]

    return run


def test_rows_are_halved_until_both_sides_have_room(printed, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "SIDES", {"ours": Side, "torch": Side})
    table = tmp_path / "table.md"
    ((_, tokens, rows, rate, *speeds, _, _, memory, _, program),) = printed(
        "--recipes", "bert-tiny", "--lengths", "32", "--tokens", "512", "--out", str(table)
    )
    assert (tokens, rows, rate, memory, program) == ("32", "4", "as published", "2.0", "bfloat16")
    assert all(float(speed.replace(",", "")) > 0 for speed in speeds)
    assert "bert-tiny" in table.read_text() and "a GPU" in table.read_text()


def test_a_side_that_cannot_be_run_says_why_and_the_others_go_on(printed, monkeypatch):
    monkeypatch.setattr(gpu, "SIDES", {"ours": Side, "torch": Broken})
    rows = printed("--recipes", "bert-tiny", "bert-mini", "--lengths", "32", "--tokens", "32")
    assert [row[0] for row in rows] == ["bert-tiny", "bert-mini"]
    for row in rows:
        assert row[5] == "torch: ValueError: sdpa is not there" and row[6] == "-"
        assert float(row[4].replace(",", "")) > 0


def test_a_process_that_was_killed_and_one_without_memory_are_said(printed, monkeypatch):
    monkeypatch.setattr(gpu, "SIDES", {"ours": Killed, "torch": Side})
    monkeypatch.setattr(gpu, "HALVINGS", 1)
    ((*_, ours, torch, _, mfu, _, _, _, _),) = printed("--recipes", "bert-tiny", "--lengths", "32", "--tokens", "512")
    assert (ours, torch, mfu) == ("ours: its process ended with status 9", "out of memory", "-")


def test_a_row_stands_without_its_trace(printed, monkeypatch, tmp_path):
    """Which the stand-ins cannot take."""
    monkeypatch.setattr(gpu, "SIDES", {"ours": Side, "torch": Side})
    (row,) = printed("--recipes", "bert-tiny", "--lengths", "32", "--tokens", "32", "--profile", str(tmp_path))
    assert all(float(cell.replace(",", "")) > 0 for cell in row[4:7])


def test_mfu_counts_the_same_flops_on_both_sides():
    seconds = {"ours": np.full((3, 2), 0.02), "torch": np.full((3, 2), 0.04)}
    about = {"ours": {**ABOUT, "peak": 1e12, "flops": 5e8}, "torch": ABOUT}
    measured = gpu.Measured(Case("bert-tiny", 4, 32, steps=10), seconds, about, {}, [])
    assert gpu.of_side(measured, "ours") == ("64,000", "25.0%", "2.0")
    assert gpu.of_side(measured, "torch") == ("32,000", "12.5%", "2.0")


def test_bert_large_stands_with_and_without_attention_dropout():
    rates = [(case.recipe, case.attention_dropout) for case in gpu.cases(gpu.Options(lengths=(512,)))]
    assert [rate for name, rate in rates if name == "bert-large"] == [None, 0.0]
    assert len(rates) == len(gpu.RECIPES) + 1


@pytest.mark.parametrize(
    "process, thread, expected",
    [
        ("/device:GPU:0", "Stream #14(Compute)", [("dot", 1.5), ("memcpy", 0.5)]),
        ("/host:CPU", "tf_XLAEigen", [("dot", 1.5), ("call", 0.25)]),
    ],
)
def test_the_longest_operations_of_a_trace(tmp_path, process, thread, expected):
    """On a GPU what its streams ran, named by an operation or not, and no line that repeats it."""
    said = lambda name, what, tid: {"ph": "M", "pid": 1, "tid": tid, "name": name, "args": {"name": what}}
    ran = lambda name, ms, tid, **args: {"ph": "X", "pid": 1, "tid": tid, "name": name, "dur": 1e3 * ms, "args": args}
    events = [said("process_name", process, 0), said("thread_name", thread, 2), said("thread_name", "XLA Ops", 3)]
    events += [ran("kernel", 1, 2, hlo_op="dot.1"), ran("kernel", 2, 2, hlo_op="dot.12"), ran("memcpy", 1, 2)]
    events += [ran("call", 0.5, 3, hlo_op="call")]
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    (folder / "host.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert longest(tmp_path, steps=2) == expected


SIZES = {"width": 32, "heads": 2, "feed_forward": 64, "vocab_size": 99, "dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize("name", ["bert-tiny", "xlnet-tiny", "gpt2-tiny"])
def test_both_sides_compute_the_same_loss(name):
    import dataclasses

    import jax
    import torch

    from benchmarks.gpu_sides import batch_of, recipe_of, torch_loss
    from models.core.program import Program
    from pretrain.huggingface.tensors import tensors
    from pretrain.objectives.objective import Moment
    from pretrain.training.assembly import assemble, initial_carry, initial_params
    from tests.models.programs import QUICK

    recipe = recipe_of(Case(name, 2, 16))
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, **SIZES, init_std=0.3))
    batch, assembly, objective = batch_of(recipe), assemble(recipe, Program()), recipe.objective
    params, carry = jax.tree.map(np.asarray, initial_params(assembly)), initial_carry(assembly, 0)[0]

    def ours(params):
        keys = jax.numpy.zeros((2, 2), jax.numpy.uint32)
        sums, _, _ = objective.loss(assembly.model, params, batch, carry, Moment(keys, train=True))
        (term,) = sums
        return sums[term] / objective.weights(batch)[term]

    model, theirs = torch_loss(recipe, batch, torch.device("cpu"))
    with torch.no_grad():
        for key, tensor in tensors(params, recipe.model, "model").items():
            dict(model.named_parameters())[key].copy_(torch.from_numpy(np.array(tensor.array())))
    np.testing.assert_allclose(jax.jit(ours, compiler_options=QUICK)(params), theirs().item(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "electra-tiny", "xlnet-tiny", "gpt2-tiny"])
def test_every_family_runs_on_a_cpu(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    toy = f"--recipes {name} --lengths 32 --tokens 64 --backend eager --rounds 2 --steps 1 --profile {tmp_path}"
    assert gpu.main(toy.split()) == 0
    captured = capsys.readouterr()
    row = captured.out.splitlines()[-1].split("|")
    assert float(row[7]) > 0 and captured.err.count("ms a step") == 10
