"""Stacks of shared and of unlike layers compute what their layers compute one after the other, however compiled."""

import functools

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

PROGRAMS = [Program(depth="scan"), Program(depth="scan", remat="dots"), Program(depth="unroll", remat="full")]
X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
KEYS = row_keys(0, 0, jnp.arange(2))
SLOTS = np.array([[3, 0, 3], [1, 2, 2]])


class Mixer(nn.Module):
    """A layer of two parts, 'first' and 'second', which adds its own slice of an array and noise and puts out its
    input's sum."""

    inner: int = 8

    @nn.compact
    def __call__(self, x, shared, noise, own, slots):
        read = x if slots is None else gather_positions(x, slots)
        y = Dense(self.inner, 0.5, x.dtype, name="first")(read + shared)
        y = Dense(x.shape[-1], 0.5, x.dtype, name="second")(jnp.tanh(y))
        y = y if own is None else y + own
        y = y if noise is None else y + bits(noise, y.shape[1:]).astype(jnp.float32) * 2.0**-32
        return jnp.tanh(y), x.sum((1, 2))


class Shift(nn.Module):
    """An unlike layer with one vector."""

    @nn.compact
    def __call__(self, x, shared, noise, own, slots):
        read = x if slots is None else gather_positions(x, slots)
        return read * self.param("by", nn.initializers.normal(1.0), (x.shape[-1],)) + shared, x.sum((1, 2))


class Tower(nn.Module):
    """A stack alone."""

    program: Program
    pattern: tuple = (Mixer(parent=None),)
    depth: int = 5
    groups: tuple = ()

    @nn.compact
    def __call__(self, x, noise=None, slots=None, each=None):
        shared = jnp.float32(0.1)
        return stack(
            self, self.pattern, self.depth, x, shared, noise, self.program, slots, each, groups=dict(self.groups)
        )


def by_hand(tower, layers, noise=None, slots=None, each=None):
    """The layers one after the other; layers: number -> its parameters."""
    x, outputs = X, []
    for number in range(tower.depth):
        module, last = tower.pattern[number % len(tower.pattern)], number == tower.depth - 1
        own, own_noise = None if each is None else each[number], None if noise is None else fold(noise, number)
        variables = {"params": layers(number)}
        x, output = module.apply(variables, x, jnp.float32(0.1), own_noise, own, slots if last else None)
        outputs.append(output)
    return x, jnp.stack(outputs)


def rows_of(params, sets, turns, turn):
    row = {name: turn * sets[name] // turns if name in sets else turn for name in params}
    return {name: jax.tree.map(lambda array, i=row[name]: array[i], tree) for name, tree in params.items()}


SHARED = [{"first": 1, "second": 1}, {"first": 2, "second": 2}, {"second": 3}]
EVERYTHING = {"noise": KEYS, "slots": SLOTS, "each": np.linspace(0, 1, 5, dtype=np.float32)}


@functools.cache
def expected(index):
    tower = Tower(Program(), groups=tuple(SHARED[index].items()))
    params = tower.init(jax.random.key(0), X)["params"]

    def loss(params):
        x, outputs = by_hand(tower, lambda i: rows_of(params["layers"], SHARED[index], 5, i), **EVERYTHING)
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(outputs)), (x, outputs)

    return tower, params, jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def check(tower, params, expected, extra):
    def loss(params):
        x, outputs = tower.apply({"params": params}, X, **extra)
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(outputs)), (x, outputs)

    got = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, expected)


@pytest.mark.parametrize("index", range(len(SHARED)))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.depth}-{program.remat}")
def test_layer_i_uses_the_set_i_groups_over_depth_and_gradients_of_a_set_add_up(program, index):
    tower, params, wanted = expected(index)
    check(tower.clone(program=program), params, wanted, EVERYTHING)


def test_shared_parameters_have_a_row_for_each_group_and_start_differently():
    layers = Tower(Program(), groups=(("first", 2),)).init(jax.random.key(0), X)["params"]["layers"]
    kernels = layers["first"]["kernel"], layers["second"]["kernel"]
    assert [len(kernel) for kernel in kernels] == [2, 5]
    assert all(len(np.unique(np.asarray(kernel)[:, 0, 0])) == len(kernel) for kernel in kernels)


@pytest.mark.parametrize("given", [{"noise": KEYS}, {"slots": SLOTS}], ids=["noise", "slots"])
@pytest.mark.parametrize("groups", [(), (("first", 1), ("second", 1))], ids=["own", "shared"])
@pytest.mark.parametrize("program", PROGRAMS[::2], ids=lambda program: f"{program.depth}-{program.remat}")
def test_unlike_layers_take_turns(program, groups, given):
    tower = Tower(program, (Mixer(5, parent=None), Shift(parent=None), Mixer(7, parent=None)), 6, groups)
    params = tower.init(jax.random.key(0), X)["params"]
    assert params["layers"]["0"]["first"]["kernel"].shape == (1 if groups else 2, 8, 5)
    assert params["layers"]["1"]["by"].shape == (2, 8)

    def loss(params):
        of_place = lambda i: params["layers"][str(i % 3)]
        x, outputs = by_hand(tower, lambda i: rows_of(of_place(i), dict(groups), 2, i // 3), **given)
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(outputs)), (x, outputs)

    check(tower, params, jax.jit(jax.value_and_grad(loss, has_aux=True))(params), given)


def test_the_depth_is_a_multiple_of_the_pattern():
    with pytest.raises(ValueError, match="depth=5: is not a multiple of the pattern's 2 layers"):
        Tower(Program(), (Mixer(parent=None), Shift(parent=None))).init(jax.random.key(0), X)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"frist": 1}, "groups of frist: the layers have first, second"),
        ({"first": 1, "frist": 5}, "groups of frist: the layers have first, second"),  # as many as there are turns
        ({"first": 6}, "groups=6 of 'first': must be from 1 to the pattern's 5 turns"),
        ({"first": 0}, "groups=0 of 'first': must be from 1 to the pattern's 5 turns"),
    ],
)
def test_groups_that_share_nothing_or_that_no_layer_uses_are_errors(groups, said):
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(Tower(Program(), groups=tuple(groups.items())).init, jax.random.key(0), X)


def test_groups_may_name_what_one_of_unlike_layers_has():
    tower = Tower(Program(), (Mixer(parent=None), Shift(parent=None)), 4, (("by", 1),))
    shapes = jax.eval_shape(tower.init, jax.random.key(0), X)["params"]["layers"]
    assert shapes["1"]["by"].shape == (1, 8)
    with pytest.raises(ValueError, match="groups of bye: the layers have by, first, second"):
        jax.eval_shape(tower.clone(groups=(("bye", 1),)).init, jax.random.key(0), X)


def shapes_in(jaxpr):
    """Of everything that a program computes, loops' insides too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda node: hasattr(node, "eqns")):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from shapes_in(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_scan_over_shared_layers_holds_no_copy_of_them_for_every_layer(remat, groups):
    tower = Tower(Program(dtype="bfloat16", remat=remat), (Mixer(24, parent=None),), 6, (("first", groups),))
    params = tower.init(jax.random.key(0), X)["params"]
    loss = lambda params: jnp.sum(
        tower.apply({"params": params}, jnp.asarray(X[:1], jnp.bfloat16))[0].astype(jnp.float32)
    )
    kernel = lambda shape: shape[-2:] == (8, 24) or shape[-2:] == (24, 8)
    found = {shape for shape in shapes_in(jax.make_jaxpr(jax.grad(loss))(params).jaxpr) if kernel(shape)}
    stacked = {shape for shape in found if len(shape) == 3}
    # 'second' has a set for each layer, so its gradient is that large; of the shared 'first' nothing is.
    assert (6, 24, 8) in stacked
    assert not {shape for shape in stacked if shape[-2:] == (8, 24) and shape[0] > groups}
