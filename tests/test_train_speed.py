"""Both sides of `benchmarks.train_speed` compute the same loss, and what is measured of them is said."""

import numpy as np
import pytest

from benchmarks import train_speed
from benchmarks.sides import Case, batch_of, recipe_of, torch_loss
from benchmarks.train_speed import Measured

ABOUT = {"device": "a GPU", "platform": "", "memory": 2e9}


def test_mfu_counts_the_same_flops_on_both_sides():
    seconds = {"ours": np.full((3, 2), 0.02), "torch": np.full((3, 2), 0.04)}
    about = {"ours": {**ABOUT, "peak": 1e12, "flops": 5e8}, "torch": ABOUT}
    measured = Measured(Case("bert-tiny", 4, 32, steps=10), seconds, about, {}, [])
    assert train_speed.of_side(measured, "ours") == ("2 (2)", "64,000", "25.0%", "2.0")
    assert train_speed.of_side(measured, "torch") == ("4 (4)", "32,000", "12.5%", "2.0")
    failed = measured._replace(failures={"torch": "torch: OutOfMemoryError: CUDA out of memory"})
    assert train_speed.of_side(failed, "torch") == ("out of memory", "-", "-", "-")


SIZES = {"width": 32, "heads": 2, "feed_forward": 64, "depth": 1, "vocab_size": 99}
SIZES |= {"dropout": 0.0, "attention_dropout": 0.0, "decoder_depth": 1}


@pytest.mark.parametrize("name", ["bert-tiny", "xlnet-tiny", "gpt2-tiny", "longformer-tiny", "t5-tiny"])
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
    params = jax.tree.map(random, parameter_shapes(recipe))

    def ours(params):
        keys = jax.numpy.zeros((2, 2), jax.numpy.uint32)
        terms, _, _ = objective.loss(assembly.model, params, batch, carry, Moment(keys, train=True))
        (term,) = terms
        return terms[term].sum / objective.weights(batch)[term]

    model, theirs = torch_loss(recipe, batch, torch.device("cpu"))
    with torch.no_grad():
        for key, tensor in tensors(params, recipe.model, "model").items():
            dict(model.named_parameters())[key].copy_(torch.from_numpy(np.array(tensor.array())))
    np.testing.assert_allclose(jax.jit(ours, compiler_options=QUICK)(params), theirs().item(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "electra-tiny", "xlnet-tiny", "gpt2-tiny", "t5-tiny"])
def test_bert_electra_xlnet_gpt2_and_t5_are_measured_on_a_cpu(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    toy = f"--only {name} --lengths 32 --tokens 64 --backend eager --rounds 2 --steps 1 --profile {tmp_path}"
    assert train_speed.main(toy.split()) == 0
    captured = capsys.readouterr()
    row = captured.out.splitlines()[-1].split("|")
    assert float(row[7]) > 0 and captured.err.count("ms a step") == 10
