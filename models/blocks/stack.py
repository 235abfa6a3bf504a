"""The stack of layers: repeated patterns of them, with parameters of their own or shared between them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.noise import fold
from models.core.parameters import LAYERS, Noise, Params
from models.core.program import KEPT, Program


class Stacked(NamedTuple):
    """What one place of the pattern has, with a row for each turn of the pattern.

    params: of the layers there; what is shared has a row for each group.   indices: the layers' numbers.
    states: those of the layers there.
    """

    params: Params
    indices: Array
    states: Any


def stack(
    parent: nn.Module,
    pattern: Sequence[nn.Module],
    depth: int,
    x,
    shared,
    noise: Noise,
    program: Program,
    slots: Array | None = None,
    states=None,
    groups: Mapping[str, int] | None = None,
):
    """Apply `depth` layers to x, [batch, length, width] or a pytree of arrays like it.

    -> (the last layer's x, what the layers put out beside it stacked [depth, ...]).

    pattern: unbound modules that take turns until there are `depth` layers, a multiple of their number. Each is called
    as layer(x, shared, noise, state, slots) -> (x, output) and keeps the shape of x; no output is None.
    shared: what all layers get, like a Mask.   noise: folded by the layer's number.
    slots: i32[batch, n], positions at which alone the last layer's output is read; the last layer alone gets them and
    gives [batch, n, width].   states: arrays [depth, ...], like a memory or a cache, of which `state` is the layer's.
    groups: name of a layer's parameters -> how many sets of them there are; of T turns, turn i uses the set i * groups
    // T. What is not named has one for each turn.

    The parameters are always stored stacked, whether the program scans or unrolls: under 'layers' [turns or groups,
    ...], or under 'layers/0', 'layers/1' ... for a pattern of several layers.
    """
    period, turns = len(pattern), depth // len(pattern)
    if depth % period:
        raise ValueError(f"depth={depth}: is not a multiple of the pattern's {period} layers")
    groups = groups or {}
    for name, number in groups.items():
        if not 1 <= number <= turns:
            raise ValueError(f"groups={number} of {name!r}: must be from 1 to the pattern's {turns} turns")
    sets = {name: number for name, number in groups.items() if number != turns}
    state = jax.tree.map(lambda array: array[0], states)

    def init(key: Array) -> dict:
        def of_place(place, keys):
            return _init(pattern[place], sets, turns, keys, x, shared, state)

        if period == 1:
            return of_place(0, key)
        return {str(place): of_place(place, key) for place, key in enumerate(jax.random.split(key, period))}

    # `param` would trace all layers' `init` once more wherever they are given, to compare shapes: layers do that.
    given = parent.get_variable("params", LAYERS)
    params = parent.param(LAYERS, init) if given is None else given
    for layer in [params] if period == 1 else params.values():
        _check_rows(layer, sets, turns)
    of_layers = set(params) if period == 1 else set().union(*params.values())
    if unknown := sorted(groups.keys() - of_layers):
        raise ValueError(f"groups of {', '.join(unknown)}: the layers have {', '.join(sorted(of_layers))}")
    numbers = jnp.arange(depth)
    stacked = [
        Stacked(
            params if period == 1 else params[str(place)],
            numbers[place::period],
            jax.tree.map(lambda array, place=place: array[place::period], states),
        )
        for place in range(period)
    ]
    layers = [_layer(module, shared, noise, program) for module in pattern]
    run = _scan if program.depth == "scan" else _unroll
    return run(layers, stacked, sets, turns, x, slots)


def _check_rows(params: Params, sets: Mapping[str, int], turns: int) -> None:
    """ValueError for stacks of another number of layers or sets."""
    for name, tree in params.items():
        rows, needed = {len(leaf) for leaf in jax.tree.leaves(tree)}, sets.get(name, turns)
        if rows - {needed}:
            raise ValueError(f"{LAYERS}/{name} has parameters of {max(rows - {needed})} layers, not of {needed}")


def _init(layer: nn.Module, sets: Mapping[str, int], turns: int, key: Array, x, shared, state) -> Params:
    """The parameters of one place of the pattern; no more sets of them are made than are kept of some."""
    one = lambda key: layer.init(key, x, shared, None, state, None)["params"]
    if not sets:
        return jax.vmap(one)(jax.random.split(key, turns))
    numbers = {name: sets.get(name, turns) for name in jax.eval_shape(one, key)}
    made = {number: jax.vmap(one)(jax.random.split(key, number)) for number in set(numbers.values())}
    return {name: made[number][name] for name, number in numbers.items()}


def _layer(module: nn.Module, shared, noise: Noise, program: Program) -> Callable:
    """(x, Stacked's row, slots) -> (x, output)."""

    def apply(x, row: Stacked, *slots: Array):
        own_noise = None if noise is None else fold(noise, row.indices)
        return module.apply({"params": row.params}, x, shared, own_noise, row.states, *(slots or (None,)))

    if program.remat == "none":
        return apply
    policy = _is_kept if program.remat == "dots" else None
    return jax.checkpoint(apply, policy=policy, prevent_cse=program.depth == "unroll")


def _scan(layers, stacked: list[Stacked], sets: Mapping[str, int], turns: int, x, slots: Array | None):
    """A loop over the turns, or where sets change one loop for each stretch between changes.

    Sets are taken out of the loops: a slice inside would be kept for the backward pass, once for every layer.
    """
    whole = turns if slots is None else turns - 1  # turns whose layers all compute every position
    own = [place._replace(params=_without(place.params, sets)) for place in stacked]
    outputs = []

    def turn(rows: list[Stacked], fixed: list[Params], x, *slots: Array):
        put = []
        for number, (layer, row, sets_of_turn) in enumerate(zip(layers, rows, fixed, strict=True)):
            row = row._replace(params=row.params | sets_of_turn)
            x, output = layer(x, row, *(slots if number == len(layers) - 1 else ()))
            put.append(output)
        return x, put

    for which, stretch in groupby(range(whole), functools.partial(_sets_of, sets, turns)):
        first, *_, last = [*stretch] * 2
        fixed = [_chosen(place.params, which) for place in stacked]
        rows = jax.tree.map(lambda array, a=first, b=last + 1: array[a:b], own)
        x, put = jax.lax.scan(lambda x, rows, fixed=fixed: turn(rows, fixed, x), x, rows)
        outputs.append(_interleaved(put))
    if slots is not None:
        rows = jax.tree.map(lambda array: array[-1], own)
        fixed = [_chosen(place.params, _sets_of(sets, turns, turns - 1)) for place in stacked]
        x, put = turn(rows, fixed, x, slots)
        outputs.append(_interleaved(jax.tree.map(lambda array: array[None], put)))
    return x, jax.tree.map(lambda *parts: parts[0] if len(parts) == 1 else jnp.concatenate(parts), *outputs)


def _unroll(layers, stacked: list[Stacked], sets: Mapping[str, int], turns: int, x, slots: Array | None):
    """Every layer by itself."""
    unstacked = [_unstack(place) for place in stacked]
    outputs = []
    for turn in range(turns):
        which = _sets_of(sets, turns, turn)
        for place, (layer, (params, indices, states)) in enumerate(zip(layers, unstacked, strict=True)):
            own = {name: trees[dict(which).get(name, turn)] for name, trees in params.items()}
            last = turn == turns - 1 and place == len(layers) - 1 and slots is not None
            x, output = layer(x, Stacked(own, indices[turn], states[turn]), *((slots,) if last else ()))
            outputs.append(output)
    return x, jax.tree.map(lambda *slices: jnp.stack(slices), *outputs)


def _unstack(place: Stacked) -> tuple[dict[str, list[Params]], list, list]:
    """Each array cut into its rows once: w[i] per layer copies more."""
    arrays, structure = jax.tree.flatten(place)
    rows = [jnp.unstack(array) for array in arrays]
    at = lambda i: structure.unflatten([row[min(i, len(row) - 1)] for row in rows])
    by_turn = [at(i) for i in range(max(map(len, rows)))]
    params = {name: [row.params[name] for row in by_turn] for name in place.params}
    return params, [row.indices for row in by_turn], [row.states for row in by_turn]


def _sets_of(sets: Mapping[str, int], turns: int, turn: int) -> tuple[tuple[str, int], ...]:
    """(name of shared parameters, the set of them that a turn uses)."""
    return tuple((name, turn * number // turns) for name, number in sets.items())


def _without(params: Params, sets: Mapping[str, int]) -> Params:
    return {name: tree for name, tree in params.items() if name not in sets}


def _chosen(params: Params, which: tuple[tuple[str, int], ...]) -> Params:
    return {name: jax.tree.map(lambda array, i=i: array[i], params[name]) for name, i in which if name in params}


def _interleaved(put: list):
    """The outputs of each place of the pattern [turns, ...] -> of the layers in turn [turns * places, ...]."""
    if len(put) == 1:
        return put[0]
    return jax.tree.map(lambda *of_places: jnp.stack(of_places, 1).reshape(-1, *of_places[0].shape[1:]), *put)


# Our own and cuDNN's, as JAX names what calls them. It would keep them in the recomputation, whatever is read of it.
_KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper")


def _is_kept(primitive, *avals, **parameters) -> bool:
    """The policy of remat 'dots'."""
    return primitive.name in _KERNELS or primitive.name == "name" and parameters["name"] == KEPT
