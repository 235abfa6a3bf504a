"""A stack computes what its layers compute one after the other: own, shared and unlike ones, however compiled."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.blocks.dense import Dense
from models.blocks.positions import gather_positions
from models.blocks.stack import stack
from models.core.noise import bits, fold, row_keys
from models.core.program import Program
from tests.models.programs import equations

X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
KEYS = row_keys(0, 0, jnp.arange(2))
SLOTS = np.array([[3, 0, 3], [1, 2, 2]])


class Mixer(nn.Module):
    """A layer of two parts, 'first' and 'second', which adds its own slice of an array and noise and puts out its
    input's sum."""

    inner: int = 8

    @nn.compact
    def __call__(self, x, shared, noise, state, slots):
        read = x if slots is None else gather_positions(x, slots)
        y = Dense(self.inner, 0.5, x.dtype, name="first")(read + shared)
        y = Dense(x.shape[-1], 0.5, x.dtype, name="second")(jnp.tanh(y))
        y = y if state is None else y + state
        y = y if noise is None else y + bits(noise, y.shape[1:]).astype(jnp.float32) * 2.0**-32
        return jnp.tanh(y), x.sum((1, 2))


class Shift(nn.Module):
    """An unlike layer with one vector."""

    @nn.compact
    def __call__(self, x, shared, noise, state, slots):
        read = x if slots is None else gather_positions(x, slots)
        return read * self.param("by", nn.initializers.normal(1.0), (x.shape[-1],)) + shared, x.sum((1, 2))


class Tower(nn.Module):
    """A stack alone."""

    program: Program = Program()
    pattern: tuple = (Mixer(parent=None),)
    depth: int = 4
    sharing: tuple = ()
    groups: int = 1

    @nn.compact
    def __call__(self, x, noise=None, slots=None, each=None):
        given = jnp.float32(0.1), noise, self.program, slots, each
        return stack(self, self.pattern, self.depth, x, *given, self.sharing, self.groups)


def params_of(tower):
    """Random parameters, and as shapes those that the tower has."""
    shapes = jax.eval_shape(tower.init, jax.random.key(0), X)["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)


def by_hand(tower, params, noise=None, slots=None, each=None):
    """The layers one after the other."""
    x, outputs, period = X, [], len(tower.pattern)
    turns = tower.depth // period
    for number in range(tower.depth):
        (turn, place), last = divmod(number, period), number == tower.depth - 1
        state, keys = None if each is None else each[number], None if noise is None else fold(noise, number)
        layers = params["layers"] if period == 1 else params["layers"][str(place)]
        row = {name: turn * tower.groups // turns if name in tower.sharing else turn for name in layers}
        weights = {name: jax.tree.map(lambda array, i=row[name]: array[i], tree) for name, tree in layers.items()}
        module = tower.pattern[place]
        x, output = module.apply({"params": weights}, x, jnp.float32(0.1), keys, state, slots if last else None)
        outputs.append(output)
    return x, jnp.stack(outputs)


def results(run, params):
    """(loss, outputs) and gradients."""

    def loss(params):
        x, outputs = run(params)
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(outputs)), (x, outputs)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


UNLIKE = {"pattern": (Mixer(5, parent=None), Shift(parent=None), Mixer(7, parent=None)), "depth": 6}
EACH = np.linspace(0, 1, 4, dtype=np.float32)
EVERYTHING = {"noise": KEYS, "slots": SLOTS, "each": EACH}
TOWERS = {  # name -> (a tower, what it is given besides x)
    "own": (Tower(), EVERYTHING),
    "read whole": (Tower(depth=3), {"noise": KEYS}),
    "of one layer": (Tower(depth=1), {"slots": SLOTS}),
    "all shared": (Tower(sharing=("first", "second"), groups=2), EVERYTHING),
    "one shared": (Tower(sharing=("second",)), EVERYTHING),
    "unlike, one shared": (Tower(**UNLIKE, sharing=("first",)), {"noise": KEYS, "slots": SLOTS}),
}
PROGRAMS = [Program(depth="scan", remat="dots"), Program(depth="unroll", remat="full")]


@functools.cache
def expected(name):
    tower, given = TOWERS[name]
    return results(lambda params: by_hand(tower, params, **given), params_of(tower))


@pytest.mark.parametrize("name, program", [("own", Program()), *itertools.product(TOWERS, PROGRAMS)], ids=str)
def test_layers_take_turns_layer_i_of_t_uses_set_i_groups_over_t_and_gradients_of_a_set_add_up(name, program):
    tower, given = TOWERS[name]
    run = lambda params: tower.clone(program=program).apply({"params": params}, X, **given)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6)
    jax.tree.map(compare, results(run, params_of(tower)), expected(name))


def test_parameters_of_another_depth_are_refused():
    tower = lambda depth: Tower(depth=depth)
    params = jax.eval_shape(tower(4).init, jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"layers/\w+ has parameters of 4 layers, not of 2"):
        jax.eval_shape(tower(2).apply, params, X)


def test_layers_are_stored_stacked_with_a_row_for_each_group_and_start_differently():
    for sharing in ((), ("first",)):
        layers = jax.jit(Tower(sharing=sharing, groups=2).init)(jax.random.key(0), X)["params"]["layers"]
        for name, sets in (("first", 2 if sharing else 4), ("second", 4)):
            assert layers[name]["kernel"].shape == (sets, 8, 8)
            assert len(np.unique(np.asarray(layers[name]["kernel"])[:, 0, 0])) == sets
    unlike = params_of(Tower(**UNLIKE, sharing=("by",)))["layers"]  # which one of the layers has
    assert unlike["0"]["first"]["kernel"].shape == (2, 8, 5) and unlike["1"]["by"].shape == (1, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pattern": UNLIKE["pattern"]}, "depth=4: is not a multiple of the pattern's 3 layers"),
        (UNLIKE | {"sharing": ("bye",)}, "sharing bye: unknown; the layers have by, first, second"),
        (
            {"sharing": ("first", "frist"), "groups": 4},
            "sharing frist: unknown; the layers have first, second",
        ),  # with all turns
        ({"sharing": ("first",), "groups": 3}, "groups=3: must divide the pattern's 4 turns"),
        ({"sharing": ("first",), "groups": 0}, "groups=0: must divide the pattern's 4 turns"),
    ],
)
def test_groups_that_share_nothing_or_that_no_layer_uses_are_errors(changes, said):
    with pytest.raises(ValueError, match=said):
        params_of(Tower(**changes))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_scan_over_shared_layers_holds_no_copy_of_them_for_every_layer(remat, groups):
    tower = Tower(Program(dtype="bfloat16", remat=remat), (Mixer(24, parent=None),), 6, ("first",), groups)
    low = jnp.asarray(X[:1], jnp.bfloat16)
    loss = lambda params: jnp.sum(tower.apply({"params": params}, low)[0].astype(jnp.float32))
    traced = jax.make_jaxpr(jax.grad(loss))(params_of(tower))
    shapes = {variable.aval.shape for equation in equations(traced.jaxpr) for variable in equation.outvars}
    stacked = {shape for shape in shapes if len(shape) == 3}
    # 'second' has a set for each layer, so its gradient is that large; of the shared 'first' nothing is.
    assert (6, 24, 8) in stacked
    assert not {shape for shape in stacked if shape[-2:] == (8, 24) and shape[0] > groups}
