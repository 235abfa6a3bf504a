"""The stack of layers: a repeated pattern of layers with parameters of their own, or shared in groups."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.inside import HIDDEN, entries, recorded
from models.core.noise import fold
from models.core.parameters import LAYERS, Noise, Params
from models.core.program import KEPT, Program


class Stacked(NamedTuple):
    """The layers at one place of the pattern.

    params: their parameters, with a row for each repetition ("turn") of the pattern.   indices: the layers' numbers.
    states: the layers' states.   shared: parameters with a row for each group of turns.
    """

    params: Params
    indices: Array
    states: Any
    shared: Params


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
    sharing: Collection[str] = (),
    groups: int = 1,
):
    """Apply `depth` layers to x, [batch, length, width] or a pytree of arrays like it.

    -> (the last layer's x, the layers' other outputs, stacked [depth, ...]).

    pattern: unbound modules, repeated until there are `depth` layers, a multiple of their number. Each is called as
    layer(x, shared, noise, state, slots) -> (x, output) and keeps the shape of x; output may be None.
    shared: passed to all layers, like a Mask.   noise: folded with the layer's number.
    slots: i32[batch, n], the only positions at which the last layer's output is needed; only the last layer gets them,
    and returns [batch, n, width].   states: arrays [depth, ...], like a memory or a cache; a layer gets its own row.
    sharing: names of the parameters of a layer that turns share, in `groups` groups of consecutive turns.

    What a layer records (`models/core/inside.py`) is recorded by `parent`, stacked; there must be no slots then.

    Parameters are always stored stacked, whether the program scans or unrolls: under 'layers' [turns or groups, ...],
    or under 'layers/0', 'layers/1' ... for a pattern of several layers.
    """
    period, turns = len(pattern), depth // len(pattern)
    if depth % period:
        raise ValueError(f"depth={depth}: is not a multiple of the pattern's {period} layers")
    if groups < 1 or turns % groups:
        raise ValueError(f"groups={groups}: must divide the pattern's {turns} turns")
    rows = lambda name: groups if name in sharing else turns
    state = jax.tree.map(lambda array: array[0], states)

    def init(key: Array) -> Params:
        def init_place(module: nn.Module, key: Array) -> Params:
            init_layer = lambda key: module.init(key, x, shared, None, state, None)["params"]
            numbers = {turns, groups} if sharing else {turns}
            stacks = {number: jax.vmap(init_layer)(jax.random.split(key, number)) for number in numbers}
            return {name: stacks[rows(name)][name] for name in stacks[turns]}

        if period == 1:
            return init_place(pattern[0], key)
        return {str(place): init_place(pattern[place], key) for place, key in enumerate(jax.random.split(key, period))}

    # With existing parameters, `param` would trace `init` of all layers to compare shapes, which the layers do anyway.
    existing = parent.get_variable("params", LAYERS)
    params = parent.param(LAYERS, init) if existing is None else existing
    places = [params] if period == 1 else [params[str(place)] for place in range(period)]
    _check(places, sharing, rows)
    sharing = sharing if groups < turns else ()
    stacked = _stacked(places, states, sharing, depth)
    asked = recorded(parent)
    layers = [_layer(module, shared, noise, program, asked) for module in pattern]
    run = _scan if program.depth == "scan" else _unroll
    last, (outputs, found) = run(layers, stacked, turns, groups if sharing else 1, x, slots)
    if HIDDEN in asked:
        found[HIDDEN] = jnp.concatenate([x[None], found[HIDDEN]])
    for name, value in found.items():
        parent.sow(name, LAYERS, value)
    return last, outputs


def _stacked(places: list[Params], states, sharing: Collection[str], depth: int) -> list[Stacked]:
    """Return each place's part of the layers' parameters and states."""
    numbers, stacked = jnp.arange(depth), []
    for place, params in enumerate(places):
        indices, of_place = jax.tree.map(lambda array, place=place: array[place :: len(places)], (numbers, states))
        shared = {name: tree for name, tree in params.items() if name in sharing}
        others = {name: tree for name, tree in params.items() if name not in sharing}
        stacked.append(Stacked(others, indices, of_place, shared))
    return stacked


def _check(places: list[Params], sharing: Collection[str], rows: Callable[[str], int]) -> None:
    """Raise ValueError for stacks with a wrong number of layers or groups, and for a shared name that no layer has."""
    for name, tree in (item for place in places for item in place.items()):
        found = {len(leaf) for leaf in jax.tree.leaves(tree)} - {rows(name)}
        if found:
            raise ValueError(f"{LAYERS}/{name} has parameters of {max(found)} layers, not of {rows(name)}")
    known = set().union(*places)
    if unknown := sorted({*sharing} - known):
        raise ValueError(f"sharing {', '.join(unknown)}: unknown; the layers have {', '.join(sorted(known))}")


def _layer(module: nn.Module, shared, noise: Noise, program: Program, asked: list[str]) -> Callable:
    """Return a layer as a function: (x, one row of Stacked, slots) -> (x, (output, what it records of `asked`))."""

    def apply(x, row: Stacked, *slots: Array):
        keys = None if noise is None else fold(noise, row.indices)
        params, arguments = {"params": row.params | row.shared}, (x, shared, keys, row.states, *(slots or (None,)))
        (x, output), found = module.apply(params, *arguments, mutable=asked)
        found = {name: entries(found, name)[0] for name in found}
        return x, (output, found | ({HIDDEN: x} if HIDDEN in asked else {}))

    if program.remat == "none":
        return apply
    policy = _is_kept if program.remat == "dots" else None
    return jax.checkpoint(apply, policy=policy, prevent_cse=program.depth == "unroll")


def _scan(layers, stacked: list[Stacked], turns: int, groups: int, x, slots: Array | None):
    """Run each group's turns as a loop.

    Shared parameters are sliced outside of the loop: a slice inside would be kept for the backward pass of every layer.
    """
    outputs = []

    def turn(shared: list[Params], x, rows: list[Stacked], *slots: Array):
        put = []
        for number, (layer, row, of_group) in enumerate(zip(layers, rows, shared, strict=True)):
            x, output = layer(x, row._replace(shared=of_group), *(slots if number == len(layers) - 1 else ()))
            put.append(output)
        return x, put

    by_turn = [place._replace(shared={}) for place in stacked]
    for group in range(groups):
        shared = [jax.tree.map(lambda array, group=group: array[group], place.shared) for place in stacked]
        first, end = (number * turns // groups for number in (group, group + 1))
        at_slots = slots is not None and end == turns
        if first < end - at_slots:  # turns whose layers all compute every position
            rows = jax.tree.map(lambda array, of=slice(first, end - at_slots): array[of], by_turn)
            x, put = jax.lax.scan(lambda x, rows, shared=shared: turn(shared, x, rows), x, rows)
            outputs.append(_interleaved(put))
        if at_slots:
            x, put = turn(shared, x, jax.tree.map(lambda array: array[-1], by_turn), slots)
            outputs.append(_interleaved(jax.tree.map(lambda array: array[None], put)))
    return x, jax.tree.map(lambda *parts: parts[0] if len(parts) == 1 else jnp.concatenate(parts), *outputs)


def _unroll(layers, stacked: list[Stacked], turns: int, groups: int, x, slots: Array | None):
    """Run every layer without a loop."""
    by_turn = [_rows(place._replace(shared={}), turns) for place in stacked]
    shared = [_rows(place.shared, groups) for place in stacked]
    outputs = []
    for turn in range(turns):
        for place, layer in enumerate(layers):
            row = by_turn[place][turn]._replace(shared=shared[place][turn * groups // turns])
            last = slots is not None and (turn, place) == (turns - 1, len(layers) - 1)
            x, output = layer(x, row, *((slots,) if last else ()))
            outputs.append(output)
    return x, jax.tree.map(lambda *slices: jnp.stack(slices), *outputs)


def _rows(tree, number: int) -> list:
    """Cut each array into its rows once; indexing w[i] for each layer would copy more."""
    arrays, structure = jax.tree.flatten(tree)
    rows = [jnp.unstack(array) for array in arrays]
    return [structure.unflatten([row[i] for row in rows]) for i in range(number)]


def _interleaved(put: list):
    """Join the outputs of the pattern's places, [turns, ...] each, in the order of layers, [turns * places, ...]."""
    if len(put) == 1:
        return put[0]
    return jax.tree.map(lambda *of_places: jnp.stack(of_places, 1).reshape(-1, *of_places[0].shape[1:]), *put)


# Primitives of our own kernels and of cuDNN's. Unless their results are kept, remat runs them again, needed or not.
_KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper")


def _is_kept(primitive, *avals, **parameters) -> bool:
    """Decide what remat 'dots' keeps."""
    return primitive.name in _KERNELS or primitive.name == "name" and parameters["name"] == KEPT
