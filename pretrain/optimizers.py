"""Optimizers whose per-tensor rules come from the parameter table and act on each layer's slice of a stack."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from models.core.parameters import LAYERS, Parameter, Params, decays, leaves, nest
from models.core.ranges import NOT_NEGATIVE, POSITIVE, RATE, SHARE, check_choices, check_ranges
from models.core.sharding import constrain, current_rules

NAMES = ("adamw", "lamb", "adagrad", "adafactor", "lion", "stable-adamw", "muon")
# Constants of Adafactor
SQUARE = 1e-30  # added to squared gradients
SMALLEST = 1e-3  # lower bound of the parameters' root mean square, by which steps are scaled
DECAY = 0.8  # after t steps the running mean of squares keeps a share of 1 - t ** -DECAY
CLIP = 1.0  # upper bound of the update direction's root mean square
# Constants of Muon
MOMENTUM = 0.95  # decay rate of the running mean of a matrix's gradients
QUINTIC = (3.4445, -4.7750, 2.0315)  # of x, x x' x and (x x')^2 x in an iteration
ITERATIONS = 5
SIZE = 0.2  # root mean square of an orthogonal direction, about that of AdamW's
SMALLEST_NORM = 1e-7  # lower bound of the norm by which a matrix is divided
MATRIX_AXES = {"width", "inner", "bottleneck", "heads", "feed_forward"}  # between which Muon's matrices lead
# Names in the paths of parameters below the first layer
BELOW = {"embeddings", "tokens", "project", "start", "buckets", "buckets_norm"}
RANGES = {
    "layer_decay": SHARE,
    "b1": RATE,
    "b2": RATE,
    "epsilon": POSITIVE,
    "decay": NOT_NEGATIVE,
    "clip": NOT_NEGATIVE,
    "ema": RATE,
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """adamw: Adam with decoupled decay (Loshchilov & Hutter 2019).   lamb: You et al. 2020, algorithm 2.
    adagrad: Duchi et al. 2011, with sums of squares that start at 0.1; it ignores b1 and b2.
    adafactor: Shazeer & Stern 2018, with steps scaled by the parameters; it ignores b1, b2 and epsilon.
    lion: Chen et al. 2023, algorithm 2, which has b2=0.99; it ignores epsilon.
    stable-adamw: Wortsman et al. 2023, algorithm 2.   muon: Jordan et al. 2024 with the directions of Liu et al. 2025
    (equation 4) for the matrices of layers, which ignore b1, b2 and epsilon; AdamW for all other parameters."""

    name: str = "adamw"  # adamw, lamb, adagrad, adafactor, lion, stable-adamw or muon
    b1: float = 0.9  # decay rate of the running mean of gradients
    b2: float = 0.999  # decay rate of the running mean of squared gradients
    epsilon: float = 1e-6  # added to the square root of that mean
    decay: float = 0.01  # weight decay of matrices and embeddings, never of biases and norms
    clip: float = 1.0  # largest global gradient norm; 0 for no clipping
    ema: float = 0.0  # decay rate of a running mean of the weights, which `--ema` reads; 0 for none
    layer_decay: float = 1.0  # factor of the learning rate from layer to layer, downwards (Clark et al. 2020, app. B)

    def __post_init__(self):
        check_choices(self, {"name": NAMES}, "optimizer.")
        check_ranges(self, RANGES, "optimizer.")


def transformation(
    optimizer: Optimizer, table: list[Parameter], vocab_size: int, compute: DTypeLike = jnp.float32
) -> optax.GradientTransformation:
    """Build the transformation of gradients into update directions, without the learning rate.

    table: exactly the trained parameters.   vocab_size: rows of token tables without padding.   compute: dtype of
    Muon's matrix products. `update` also takes finite: bool[]; if it is False, the state does not change and the
    direction is meaningless.
    """
    decayed = nest({parameter.path: decays(parameter) for parameter in table})
    decay = optax.add_decayed_weights(optimizer.decay, decayed)
    by_depth = [_scale_by_depth(table, optimizer.layer_decay)] if optimizer.layer_decay != 1.0 else []
    adam = _scale_by_adam(optimizer.b1, optimizer.b2, optimizer.epsilon)
    steps = {
        "adamw": lambda: [adam, decay],
        "lamb": lambda: [adam, decay, _scale_by_trust_ratio(table)],
        "adagrad": lambda: [_if_finite(optax.scale_by_rss(0.1, optimizer.epsilon)), decay],
        "adafactor": lambda: [_scale_by_factored_squares(table, vocab_size), decay, _scale_by_size(table, vocab_size)],
        "lion": lambda: [_if_finite(optax.scale_by_lion(optimizer.b1, optimizer.b2)), decay],
        "stable-adamw": lambda: [_stabilise(optax.chain(adam, decay), optimizer, table, vocab_size)],
        "muon": lambda: [_scale_by_muon(adam, table, compute), decay],
    }
    means = [_weights_mean()] if optimizer.ema else []
    return optax.chain(*steps[optimizer.name](), *by_depth, *means)


def _weights_mean() -> optax.GradientTransformation:
    """Keep the state of a running mean of the weights, last in a chain; `with_weights` moves it, after an update."""
    init = lambda params: optax.EmaState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
    return optax.GradientTransformation(init, lambda directions, state, params=None: (directions, state))


def with_weights(optimizer: Optimizer, state: optax.OptState, params: Params, finite: Array) -> optax.OptState:
    """Move the running mean in an optimizer's state towards the new weights, unless the update was skipped."""
    if not optimizer.ema:
        return state
    *moments, (count, mean) = state
    # The rate rounded to float32, as in keep * m, would shrink the weights of a long mean
    mean = jax.tree.map(lambda m, p: jnp.where(finite, m + (1 - optimizer.ema) * (p - m), m), mean, params)
    return (*moments, optax.EmaState(count + jnp.where(finite, 1, 0), mean))


def mean_weights(optimizer: Optimizer, state: optax.OptState) -> Params:
    """Return the running mean of the weights, without its start at 0 (Kingma & Ba 2015, section 3)."""
    count, mean = state[-1]
    return jax.tree.map(lambda m: m / -jnp.expm1(count * math.log(optimizer.ema)), mean)


def clip(gradients: Params, norm: Array, limit: float) -> Params:
    """Scale gradients so that their global norm, given as `norm`, is at most `limit`; 0 means no limit."""
    if limit == 0:
        return gradients
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, gradients)


def _scale_by_adam(b1: float, b2: float, epsilon: float) -> optax.GradientTransformationExtraArgs:
    """Compute Adam's direction (Kingma & Ba 2015, algorithm 1), with the state of `optax.scale_by_adam`. XLA:CPU
    recomputes the moments for each use, and so keeps copies of the old ones. Behind a barrier the direction reads the
    new ones: 27 instead of 61 ms for 28 million parameters."""

    def update(gradients: Params, state: optax.ScaleByAdamState, params: Params, *, finite: Array | bool = True):
        decay = lambda rate, moments, x: jax.tree.map(
            lambda m, x: jnp.where(finite, rate * m + (1 - rate) * x, m), moments, x
        )
        mu = decay(b1, state.mu, gradients)
        nu = decay(b2, state.nu, jax.tree.map(jnp.square, gradients))
        mu, nu = jax.lax.platform_dependent((mu, nu), cpu=jax.lax.optimization_barrier, default=lambda x: x)
        count = state.count + jnp.where(finite, 1, 0)
        debias1, debias2 = 1 - b1**count, 1 - b2**count
        direction = jax.tree.map(lambda m, v: m / debias1 / (jnp.sqrt(v / debias2) + epsilon), mu, nu)
        return direction, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def _if_finite(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Let a transformation of optax keep its state after an update that is not finite."""

    def update(gradients: Params, state: Any, params: Params, *, finite: Array | bool = True):
        directions, new = transformation.update(gradients, state)
        return directions, jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)

    return optax.GradientTransformationExtraArgs(transformation.init, update)


def _stabilise(
    adamw: optax.GradientTransformationExtraArgs, optimizer: Optimizer, table: list[Parameter], vocab_size: int
) -> optax.GradientTransformationExtraArgs:
    """Compute StableAdamW's direction (Wortsman et al. 2023, algorithm 2): AdamW's, with its decay, divided for each
    parameter of each layer by the root mean square of gradient / root of its expected square, if that is above 1."""
    of_path = {parameter.path: parameter for parameter in table}

    def update(gradients: Params, state: Any, params: Params, *, finite: Array | bool = True):
        directions, state = adamw.update(gradients, state, params, finite=finite)
        nu, flat, debias = dict(leaves(state[0].nu)), dict(leaves(gradients)), 1 - optimizer.b2 ** state[0].count

        def divided(path: str, direction: Array) -> Array:
            expected = jnp.maximum(jnp.sqrt(nu[path] / debias), optimizer.epsilon)
            return direction / jnp.maximum(_root_mean_square(of_path[path], flat[path] / expected, vocab_size), 1.0)

        return nest({path: divided(path, direction) for path, direction in leaves(directions)}), state

    return optax.GradientTransformationExtraArgs(adamw.init, update)


def _is_matrix(parameter: Parameter) -> bool:
    """Return whether Muon's own rule applies: to matrices of layers, not to heads, biases, norms or any embeddings."""
    return parameter.axes[:1] == (LAYERS,) and len(parameter.axes) == 3 and {*parameter.axes[1:]} <= MATRIX_AXES


def _scale_by_muon(
    adam: optax.GradientTransformationExtraArgs, table: list[Parameter], compute: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """Compute Muon's direction: the orthogonalised Nesterov momentum of each layer's matrix, as large as AdamW's is, so
    that one learning rate and decay serve both (Liu et al. 2025, section 2.2); Adam's for the other parameters. The
    state is Adam's; matrices have only `mu`, and nu f[layers, 1, 1] of zeros."""
    matrices = {parameter.path for parameter in table if _is_matrix(parameter)}

    def init(params: Params) -> optax.ScaleByAdamState:  # only maps: optax also calls this on a tree that is no dict
        state = adam.init(params)
        kept = lambda keys, v: v[:, :1, :1] if "/".join(key.key for key in keys) in matrices else v
        return state._replace(nu=jax.tree_util.tree_map_with_path(kept, state.nu))

    def update(gradients: Params, state: optax.ScaleByAdamState, params: Params, *, finite: Array | bool = True):
        mean = lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g
        rest = lambda tree: nest({path: leaf for path, leaf in leaves(tree) if path not in matrices})
        of_rest = state._replace(mu=rest(state.mu), nu=rest(state.nu))
        by_adam, new = adam.update(rest(gradients), of_rest, rest(params), finite=finite)
        directions, mu = dict(leaves(by_adam)), dict(leaves(state.mu)) | dict(leaves(new.mu))
        for path, gradient in leaves(gradients):
            if path in matrices:
                mu[path] = jnp.where(finite, mean(mu[path], gradient), mu[path])
                directions[path] = _orthogonal(mean(mu[path], gradient), compute)
        nu = dict(leaves(state.nu)) | dict(leaves(new.nu))
        return nest(directions), new._replace(mu=nest(mu), nu=nest(nu))

    return optax.GradientTransformationExtraArgs(init, update)


def _orthogonal(stack: Array, compute: DTypeLike) -> Array:
    """Return f[layers, n, m] of the singular vectors of each layer's matrix, with singular values near 1, times 0.2
    sqrt(max(n, m)) (Jordan et al. 2024; Liu et al. 2025, equation 4). On a mesh each device along `fsdp` takes every so
    many layers, and receives their matrices whole."""
    layers, rows, columns = stack.shape
    rules, (linear, cubic, quintic) = current_rules(), QUINTIC
    devices = rules.mesh.shape["fsdp"] if rules else 1
    whole = lambda x: constrain(x, LAYERS, None, None)

    def orthogonal(matrices: Array) -> Array:  # [devices, rows, columns]
        x = whole(matrices.astype(compute))
        x = x.mT if rows > columns else x
        x = x / jnp.maximum(jnp.linalg.norm(x, axis=(1, 2), keepdims=True), SMALLEST_NORM)
        for _ in range(ITERATIONS):
            gram = x @ x.mT
            x = whole(linear * x + (cubic * gram + quintic * gram @ gram) @ x)
        return (x.mT if rows > columns else x).astype(stack.dtype)

    rounds = jnp.pad(stack, ((0, -layers % devices), (0, 0), (0, 0))).reshape(-1, devices, rows, columns)
    directions = jax.lax.map(orthogonal, rounds).reshape(-1, rows, columns)[:layers]
    return SIZE * max(rows, columns) ** 0.5 * directions


def _scale_by_trust_ratio(table: list[Parameter]) -> optax.GradientTransformation:
    """Multiply by LAMB's ||w|| / ||update|| for each matrix of each layer; not biases and norms, as in its code.
    `optax.lamb` would compute one norm over a stack of layers."""
    parameters = nest({parameter.path: parameter for parameter in table})

    def update(updates: Params, state, params: Params):
        def rescale(parameter: Parameter, u: Array, w: Array) -> Array:
            if not decays(parameter):
                return u
            axes = tuple(range(1 if parameter.axes[0] == LAYERS else 0, u.ndim))
            norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True))
            ratio = norm(w) / norm(u)
            return u * jnp.where((norm(w) > 0) & (norm(u) > 0), ratio, 1.0)

        is_parameter = lambda node: isinstance(node, Parameter)
        return jax.tree.map(rescale, parameters, updates, params, is_leaf=is_parameter), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale_by_depth(table: list[Parameter], decay: float) -> optax.GradientTransformation:
    """Scale directions by depth: with n layers by decay ** n in the first one to decay in the last one, by
    decay ** (n + 1) in embeddings, and not at all above the layers."""
    of_path = {parameter.path: parameter for parameter in table}

    def update(directions: Params, state: Any, params: Params):
        flat = dict(leaves(directions))
        stacked = {path: _numbers(row, len(flat[path])) for path, row in of_path.items() if row.axes[:1] == (LAYERS,)}
        depth = max((1 + numbers.max() for numbers in stacked.values()), default=0)

        def scaled(path: str, direction: Array) -> Array:
            if path in stacked:
                factors = decay ** jnp.asarray(depth - stacked[path], jnp.float32)
                return direction * factors.reshape(-1, *(1,) * (direction.ndim - 1))
            return direction * decay ** (depth + 1) if BELOW & {*path.split("/")} else direction

        return nest({path: scaled(path, direction) for path, direction in flat.items()}), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _numbers(parameter: Parameter, rows: int) -> np.ndarray:
    """Return the number of the layer in each row of a stack, which may have every third layer alone."""
    layers = next((slot.layers for slot in parameter.hf.values() if slot.layers), {})
    numbers = {row: number for number, row in layers.items()}
    return np.array([numbers[row] for row in range(rows)]) if len(numbers) == len(layers) > 0 else np.arange(rows)


class FactoredSquares(NamedTuple):
    """Running means of squared gradients.

    rows: means over the last axis of each matrix of each layer [..., n, 1]; for vectors, the means of each element.
    columns: means over the second-to-last axis [..., 1, m]; unused for vectors, [..., 1].   count: i32[], steps.
    """

    count: Array
    rows: Params
    columns: Params


def _scale_by_factored_squares(table: list[Parameter], vocab_size: int) -> optax.GradientTransformationExtraArgs:
    """Compute Adafactor's direction (Shazeer & Stern 2018, algorithm 4): gradients divided by the root of their running
    mean square, clipped for each parameter of each layer. Every matrix is factored, as in transformers."""
    of_path = {parameter.path: parameter for parameter in table}

    def factored(keys) -> bool:
        return decays(of_path["/".join(key.key for key in keys)])

    def init(params: Params) -> FactoredSquares:  # only maps: optax also calls this on a tree that is no dict
        def row(keys, leaf):
            return jnp.zeros_like(leaf[..., :1] if factored(keys) else leaf)

        def column(keys, leaf):
            return jnp.zeros_like(leaf[..., :1, :] if factored(keys) else leaf[..., :1])

        map_paths = jax.tree_util.tree_map_with_path
        return FactoredSquares(jnp.int32(0), map_paths(row, params), map_paths(column, params))

    def update(gradients: Params, state: FactoredSquares, params: Params, *, finite: Array | bool = True):
        count = state.count + jnp.where(finite, 1, 0)
        kept = 1.0 - count.astype(jnp.float32) ** -DECAY
        rows, columns, directions = dict(leaves(state.rows)), dict(leaves(state.columns)), {}

        def mean(old, new):
            return jnp.where(finite, kept * old + (1.0 - kept) * new, old)

        for path, gradient in leaves(gradients):
            squares, parameter = jnp.square(gradient) + SQUARE, of_path[path]
            if decays(parameter):
                row = rows[path] = mean(rows[path], squares.mean(-1, keepdims=True))
                column = columns[path] = mean(columns[path], squares.mean(-2, keepdims=True))
                inverse = jax.lax.rsqrt(row / row.mean(-2, keepdims=True)) * jax.lax.rsqrt(column)
            else:
                rows[path] = mean(rows[path], squares)
                inverse = jax.lax.rsqrt(rows[path])
            direction = gradient * inverse
            size = _root_mean_square(parameter, direction, vocab_size)
            directions[path] = direction / jnp.maximum(size / CLIP, 1.0)
        return nest(directions), FactoredSquares(count, nest(rows), nest(columns))

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_size(table: list[Parameter], vocab_size: int) -> optax.GradientTransformation:
    """Multiply directions by the root mean square of each parameter of each layer, at least `SMALLEST`."""
    of_path = {parameter.path: parameter for parameter in table}

    def update(directions: Params, state: Any, params: Params):
        sizes = {path: _root_mean_square(of_path[path], leaf, vocab_size) for path, leaf in leaves(params)}
        flat = leaves(directions)
        return nest({path: jnp.maximum(sizes[path], SMALLEST) * leaf for path, leaf in flat}), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _root_mean_square(parameter: Parameter, x: Array, vocab_size: int) -> Array:
    """Compute the root mean square of each layer's slice of x, which is shaped like the parameter, without counting the
    padding of a vocabulary, which is zeros -> f32[layers or 1, 1, ...]."""
    axes = tuple(range(parameter.axes[:1] == (LAYERS,), x.ndim))
    counted = 1
    for axis in axes:
        counted *= vocab_size if parameter.axes[axis] == "vocab" else x.shape[axis]
    return jnp.sqrt(jnp.square(x).sum(axes, keepdims=True) / counted)
