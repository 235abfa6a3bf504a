"""`benchmarks.train_speed` gives each row what could be measured of it, and both of its sides compute the same loss."""

import os

import numpy as np
import pytest

from benchmarks import train_speed
from benchmarks.sides import Case, batch_of, recipe_of, torch_loss
from benchmarks.train_speed import Measured

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
    def __call__(self):
        os._exit(9)


@pytest.fixture
def printed(capsys, monkeypatch):
    """Cells of the row that a run of the command prints with such sides, each in a process of its own."""

    def run(ours, torch, *arguments):
        monkeypatch.setattr(train_speed, "SIDES", {"ours": ours, "torch": torch})
        arguments = ["--only", "bert-tiny", "--lengths", "32", "--rounds", "1", "--steps", "1", *arguments]
        assert train_speed.main(arguments) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| bert")]
        return [cell.strip() for cell in row.split("|")[1:-1]]

    return run


def test_rows_are_halved_until_both_sides_have_room_and_a_row_stands_without_its_trace(printed, tmp_path):
    """Which the stand-ins cannot take."""
    table = tmp_path / "table.md"
    _, rows, tokens, rate, *_, ours, theirs, _, _, memory, _, program = printed(
        Side, Side, "--tokens", "256", "--out", str(table), "--profile", str(tmp_path)
    )
    assert (tokens, rows, rate, memory, program) == ("32", "4", "as published", "2.0", "bfloat16")
    assert all(float(speed.replace(",", "")) > 0 for speed in (ours, theirs))
    assert "| bert-tiny |" in table.read_text() and "a GPU" in table.read_text()


def test_a_side_that_cannot_be_run_says_why_and_the_other_goes_on_alone(printed):
    _, _, _, _, ours, torch, compared, *_, mfu, _, _, _ = printed(Killed, Broken, "--tokens", "32")
    assert (ours, torch) == ("ours: its process ended with status 9", "torch: ValueError: sdpa is not there")
    assert compared == mfu == "-"


def test_mfu_counts_the_same_flops_on_both_sides():
    seconds = {"ours": np.full((3, 2), 0.02), "torch": np.full((3, 2), 0.04)}
    about = {"ours": {**ABOUT, "peak": 1e12, "flops": 5e8}, "torch": ABOUT}
    measured = Measured(Case("bert-tiny", 4, 32, steps=10), seconds, about, {}, [])
    assert train_speed.of_side(measured, "ours") == ("2 (2)", "64,000", "25.0%", "2.0")
    assert train_speed.of_side(measured, "torch") == ("4 (4)", "32,000", "12.5%", "2.0")
    failed = measured._replace(failures={"torch": "torch: OutOfMemoryError: CUDA out of memory"})
    assert train_speed.of_side(failed, "torch") == ("out of memory", "-", "-", "-")


SIZES = {"width": 32, "heads": 2, "feed_forward": 64, "depth": 1, "vocab_size": 99}
SIZES |= {"dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize("name", ["bert-tiny", "xlnet-tiny", "gpt2-tiny", "longformer-tiny"])
def test_both_sides_compute_the_same_loss(name):
    import jax
    import torch

    from models.attention.patterns.pattern import Pattern
    from models.core.program import Program
    from pretrain.huggingface.tensors import tensors
    from pretrain.objectives.objective import Moment
    from pretrain.training.assembly import assemble, initial_carry, parameter_shapes
    from tests.models.programs import QUICK

    pattern = {"pattern": Pattern("longformer", block=4, windows=(4,))} if name == "longformer-tiny" else {}
    recipe = recipe_of(Case(name, 2, 16, SIZES | pattern))
    batch, assembly, objective = batch_of(recipe), assemble(recipe, Program()), recipe.objective
    rng, carry = np.random.default_rng(0), initial_carry(assembly, 0)[0]
    random = lambda of: rng.normal(0, 0.3, of.shape).astype(of.dtype)
    params = jax.tree.map(random, parameter_shapes(assembly))

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
def test_bert_electra_xlnet_and_gpt2_are_measured_on_a_cpu(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    toy = f"--only {name} --lengths 32 --tokens 64 --backend eager --rounds 2 --steps 1 --profile {tmp_path}"
    assert train_speed.main(toy.split()) == 0
    captured = capsys.readouterr()
    row = captured.out.splitlines()[-1].split("|")
    assert float(row[7]) > 0 and captured.err.count("ms a step") == 10
