"""Optimisers against optax's, tensor by tensor."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from transformers.optimization import Adafactor

from models.core.parameters import LAYERS, decays, leaves, nest
from models.core.program import Program
from models.families.bert import FAMILY as BERT
from models.families.electra import FAMILY as ELECTRA
from models.families.registry import FAMILIES
from pretrain import optimizers
from pretrain.optimizers import Optimizer, clip, transformation
from pretrain.training.assembly import assemble, initial_params, transformation_in
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny
from tests.pretrain.fields import other, replaced

# An embedding, stacked matrices, biases and norms
TWO_LAYERS = dataclasses.replace(tiny.BERT, depth=2)
TABLE = [
    p for p in BERT.every_parameter(TWO_LAYERS) if p.path.startswith(("embeddings/t", "layers/feed_forward", "pair/"))
]
STEPS, VOCAB = 5, TWO_LAYERS.vocab_size


def random_tree(seed, scale=1.0):
    """One array per parameter of the table."""
    shapes = dict(leaves(parameter_shapes(TWO_LAYERS)))
    rng = np.random.default_rng(seed)
    draw = lambda path: (scale * rng.standard_normal(shapes[path].shape)).astype(np.float32)
    return nest({parameter.path: draw(parameter.path) for parameter in TABLE})


def unstacked(tree):
    """Every layer of every stack as an array of its own."""
    flat = dict(leaves(tree))
    separate = {}
    for parameter in TABLE:
        if parameter.axes[0] == LAYERS:
            for index, slice_ in enumerate(flat[parameter.path]):
                separate[f"{parameter.path}/{index}"] = slice_
        else:
            separate[parameter.path] = flat[parameter.path]
    return nest(separate)


def matrices(tree):
    """True at what decays, for a tree of unstacked arrays."""
    return jax.tree.map(lambda x: x.ndim >= 2, tree)


def trained(optimizer, params, rate=0.01, form=lambda tree: tree, steps=STEPS):
    """Parameters after a few updates with random gradients."""

    def advance(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

    params, advance = form(params), jax.jit(advance)
    state = jax.jit(optimizer.init)(params)
    for step in range(steps):
        params, state = advance(form(random_tree(step, 10.0 ** -(step % STEPS))), state, params)
    return jax.device_get(params)


def trained_by_optax(optimizer, params, steps=STEPS):
    return trained(optimizer, params, rate=-1.0, form=unstacked, steps=steps)


def assert_close(one, other):
    for (path, a), (_, b) in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=path)


def test_adamw_is_optax_adamw_with_a_mask_for_biases_and_norms():
    params = random_tree(99)
    ours = trained(transformation(Optimizer("adamw", b1=0.8, b2=0.95, epsilon=1e-3, decay=0.3), TABLE, VOCAB), params)
    theirs = optax.adamw(0.01, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.3, mask=matrices)
    assert_close(unstacked(ours), trained_by_optax(theirs, params))


def test_adagrad_is_optax_adagrad_and_passes_over_a_step_that_is_not_finite():
    params, adagrad = random_tree(99), transformation(Optimizer("adagrad", epsilon=1e-3, decay=0.0), TABLE, VOCAB)
    assert_close(trained(adagrad, params), trained(optax.adagrad(0.01, eps=1e-3), params, rate=-1.0))
    assert_state_stays(adagrad.update, adagrad.init(params), params)


def test_lamb_on_stacked_layers_is_lamb_on_each_layer():
    params = random_tree(99)
    ours = trained(transformation(Optimizer("lamb", b1=0.8, b2=0.95, epsilon=1e-3, decay=0.3), TABLE, VOCAB), params)
    ratio = optax.masked(optax.scale_by_trust_ratio(), matrices)
    adam = optax.scale_by_adam(0.8, 0.95, 1e-3)
    theirs = optax.chain(adam, optax.add_decayed_weights(0.3, matrices), ratio, optax.scale(-0.01))
    assert_close(unstacked(ours), trained_by_optax(theirs, params))


def test_lion_is_optax_lion_for_fifty_steps_and_passes_over_one_that_is_not_finite():
    params, lion = random_tree(99), transformation(Optimizer("lion", b1=0.8, b2=0.95, decay=0.3), TABLE, VOCAB)
    theirs = optax.lion(0.01, b1=0.8, b2=0.95, weight_decay=0.3, mask=matrices)
    assert_close(unstacked(trained(lion, params, steps=50)), trained_by_optax(theirs, params, steps=50))
    assert_state_stays(lion.update, lion.init(params), params)


def assert_state_stays(update, state, params):
    _, after = update(jax.tree.map(lambda leaf: leaf * np.nan, params), state, params, finite=False)
    assert tiny.equal(after, state)


def without_padding(tree):
    for path, leaf in leaves(tree):
        if path.endswith("tokens"):
            leaf[VOCAB:] = 0
    return tree


def assert_follows_torch(optimizer, torch_optimizers, steps):
    """On stacked layers, and on a padded table in the rows that are none.

    torch_optimizers: {path: tensor} of every layer's parameters -> torch's optimisers of them, at a rate of 0.01.
    """
    params = without_padding(random_tree(99))
    chain = transformation(optimizer, TABLE, VOCAB)
    state, update = chain.init(params), jax.jit(chain.update)
    rows = lambda path: VOCAB if path.endswith("tokens") else None
    of_torch = lambda tree: {path: torch.tensor(leaf[: rows(path)]) for path, leaf in leaves(unstacked(tree))}
    theirs = of_torch(params)
    others = torch_optimizers(theirs)
    for step in range(steps):
        gradients = without_padding(random_tree(step, 10.0 ** -(step % 3)))
        updates, state = update(gradients, state, params, finite=True)
        params = jax.tree.map(lambda p, u: np.asarray(p - 0.01 * u), params, updates)
        for path, gradient in of_torch(gradients).items():
            theirs[path].grad = gradient
        for one in others:
            one.step()
    for path, leaf in of_torch(params).items():
        size = theirs[path].abs().max()
        np.testing.assert_allclose(leaf / size, theirs[path] / size, atol=1e-5, err_msg=path)
    assert_state_stays(update, state, params)


def groups(tensors, decay):
    """Parameter groups, of which only matrices decay."""
    return [{"params": [leaf], "weight_decay": decay if leaf.ndim > 1 else 0.0} for leaf in tensors.values()]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adafactor_of_stacked_layers_is_transformers_on_each_layer_for_a_hundred_steps(decay):
    made = lambda leaves: [Adafactor(groups(leaves, decay), lr=0.01, relative_step=False, scale_parameter=True)]
    assert_follows_torch(Optimizer("adafactor", decay=decay), made, steps=100)


class StableAdamW(torch.optim.Optimizer):
    """Wortsman et al. 2023, algorithm 2, with running means debiased as in Adam."""

    def step(self):
        for group in self.param_groups:
            (leaf,), (b1, b2), epsilon = group["params"], group["betas"], group["eps"]
            of = self.state[leaf] or {"step": 0, "v": torch.zeros_like(leaf), "u": torch.zeros_like(leaf)}
            of["step"] += 1
            of["v"] = b1 * of["v"] + (1 - b1) * leaf.grad
            of["u"] = b2 * of["u"] + (1 - b2) * leaf.grad**2
            v, u = of["v"] / (1 - b1 ** of["step"]), of["u"] / (1 - b2 ** of["step"])
            rate = group["lr"] / max(1.0, (leaf.grad**2 / u.clamp(min=epsilon**2)).mean().sqrt().item())
            leaf.sub_(rate * group["weight_decay"] * leaf + rate * v / (u.sqrt() + epsilon))
            self.state[leaf] = of


def test_stable_adamw_divides_each_layers_step_by_how_far_gradients_exceed_what_adam_expects():
    adam = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3}
    ours = Optimizer("stable-adamw", b1=0.8, b2=0.95, epsilon=1e-3, decay=0.3)
    assert_follows_torch(ours, lambda leaves: [StableAdamW(groups(leaves, 0.3), adam)], steps=50)


def test_muon_is_torch_muon_on_each_layers_matrices_and_adamw_on_the_rest(monkeypatch):
    """torch rounds to bfloat16 for its products; here it does not."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)

    def made(leaves):
        of_layers = {path: leaf for path, leaf in leaves.items() if path.startswith("layers") and leaf.ndim == 2}
        rest = groups({path: leaf for path, leaf in leaves.items() if path not in of_layers}, 0.3)
        muon = torch.optim.Muon(of_layers.values(), lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.95), eps=1e-3)]

    assert_follows_torch(Optimizer("muon", b1=0.8, b2=0.95, epsilon=1e-3, decay=0.3), made, steps=50)


def test_muons_own_rule_is_for_the_kernels_of_layers_alone():
    for family in FAMILIES.values():
        for row in family.every_parameter(family.sizes["tiny"]):
            assert optimizers._is_matrix(row) == ("layers/" in row.path and row.path.endswith("kernel")), row.path


def test_muon_multiplies_in_the_programs_dtype():
    assembly = assemble(tiny.bert(optimizer=Optimizer("muon")), Program("bfloat16"))
    chain, shapes = transformation_in(assembly, 0), jax.eval_shape(lambda: initial_params(assembly))
    traced = str(jax.make_jaxpr(chain.update)(shapes, jax.eval_shape(chain.init, shapes), shapes))
    products = re.findall(r":(\w+)\[[\d,]+\] = dot_general", traced)
    assert products and {*products} == {"bf16"}


def test_lamb_keeps_a_matrix_of_zeros_moving():
    params = jax.tree.map(np.zeros_like, random_tree(0))
    moved = trained(transformation(Optimizer("lamb"), TABLE, VOCAB), params)
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for _, leaf in leaves(moved))


@pytest.mark.parametrize("family, config", [(BERT, tiny.BERT), (ELECTRA, tiny.ELECTRA)])
def test_exactly_matrices_and_embeddings_decay(family, config):
    for parameter in family.every_parameter(config):
        name = parameter.path.rsplit("/", 1)[-1]
        assert decays(parameter) == (name in ("kernel", "tokens", "positions", "types")), parameter.path


def test_gradients_are_scaled_to_the_limit_and_only_when_above_it():
    gradients = {"a": jnp.asarray([3.0]), "b": jnp.asarray([[4.0]])}
    norm = optax.global_norm(gradients)
    assert clip(gradients, norm, 0.5)["a"] == pytest.approx(0.3)
    assert clip(gradients, norm, 0.5)["b"] == pytest.approx(0.4)
    for limit in (5.0, 7.0, 0.0):
        assert tiny.equal(clip(gradients, norm, limit), gradients)


def test_the_rate_falls_from_layer_to_layer_and_is_lowest_in_embeddings():
    plain, decayed = (dict(leaves(update_of(Optimizer(layer_decay=rate)))) for rate in (1.0, 0.5))
    for parameter in TABLE:
        path, depth = parameter.path, max(len(plain[row.path]) for row in TABLE if row.axes[0] == "layers")
        if parameter.axes[0] == "layers":
            wanted = [0.5 ** (depth - layer) for layer in range(depth)]
        else:
            wanted = [0.5 ** (depth + 1) if path.startswith("embeddings") else 1.0]
        for layer, factor in enumerate(wanted):
            part = (lambda array, layer=layer: array[layer]) if len(wanted) > 1 else (lambda array: array)
            np.testing.assert_allclose(part(decayed[path]), factor * part(plain[path]), rtol=1e-6, err_msg=path)


def test_the_rate_falls_from_layer_to_layer_where_stacks_take_turns():
    """In a ModernBERT of 7 layers: the first alone, then 1 and 4, 2 and 5, 3 and 6."""
    config = dataclasses.replace(FAMILIES["modernbert"].sizes["tiny"], vocab_size=100, depth=7)
    table, shapes = FAMILIES["modernbert"].parameters(config), parameter_shapes(config)
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    factors = dict(leaves(optimizers._scale_by_depth(table, 0.5).update(ones, None, None)[0]))
    for stack, numbers in {"first/layers": [0], "layers/0": [1, 4], "layers/1": [2, 5], "layers/2": [3, 6]}.items():
        found = np.asarray(factors[f"{stack}/attention/output/kernel"])[:, 0, 0]
        np.testing.assert_allclose(found, [0.5 ** (7 - number) for number in numbers])
    assert (np.asarray(factors["embeddings/tokens"]) == 0.5**8).all() and (np.asarray(factors["norm/scale"]) == 1).all()


def update_of(optimizer):
    params, gradients = random_tree(1), random_tree(2)
    chain = transformation(optimizer, TABLE, VOCAB)
    state, update = jax.jit(chain.init)(params), jax.jit(chain.update)
    for _ in range(2):
        updates, state = update(gradients, state, params)
        gradients = random_tree(3, 0.1)
    return updates


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(Optimizer) if field.name not in ("clip", "ema")]
)
def test_every_field_changes_the_update(field):  # but clip, above, and ema, in test_average
    start = Optimizer(epsilon=0.1, decay=0.5)
    changed = replaced(start, field, other(f"optimizer.{field}", getattr(start, field)))
    assert not tiny.equal(update_of(start), update_of(changed))


@pytest.mark.parametrize(
    "family, below, above", [("albert", "project/bias", "predictions/bias"), ("mt5", "tokens", "lm_head")]
)
def test_what_lies_below_the_layers_is_not_what_reads_them(family, below, above):
    table = FAMILIES[family].every_parameter(FAMILIES[family].sizes["tiny"])
    ones = nest({row.path: np.ones([2] * len(row.axes), np.float32) for row in table})
    factors, _ = optimizers._scale_by_depth(table, 0.5).update(ones, None, None)
    factors = dict(leaves(factors))
    assert (factors[below] == 0.125).all() and (factors[above] == 1).all()
