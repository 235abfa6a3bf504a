"""Count the FLOPs of a traced program: matrix products and convolutions, in loops as often as they run, with
recomputation."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from tpu.kernel_costs import Call, Cost


class Flops(NamedTuple):
    """products: FLOPs outside of kernels.   kernels: name -> FLOPs inside.   unknown: kernels without a `Cost` or
    declared FLOPs.   calls: of kernels, (name, call, how often it runs over all devices)."""

    products: float
    kernels: dict[str, float]
    unknown: tuple[str, ...] = ()
    calls: tuple[tuple[str, Call, float], ...] = ()

    @property
    def total(self) -> float:
        return self.products + sum(self.kernels.values())


def flops(jaxpr: ClosedJaxpr, kernels: Mapping[str, Cost], counted_as: Callable[[str], float] | None = None) -> Flops:
    """Count the FLOPs of one run over all devices; a multiply-add counts as 2.

    kernels: by the beginning of the name given to `pl.pallas_call`; they declare their FLOPs. A conditional counts as
    its most expensive branch, a loop of unknown length as one iteration.   counted_as: scope (`jax.named_scope`) of a
    product, with the scopes around it -> how often its FLOPs count; by default once.
    """
    products, inside, unknown, calls = 0.0, {}, {}, []
    for equation, times, scope in _equations(jaxpr.jaxpr, 1, ""):
        kind = equation.primitive.name
        products += times * _cost(equation) * (counted_as(scope) if counted_as else 1.0)
        if kind == "pallas_call":
            name = str(equation.params.get("name_and_src_info") or equation.params.get("name"))
            known = next((key for key in kernels if name.startswith(key)), None)
            call = _call(equation)
            counted = None if known is None else kernels[known].flops(call)
            if counted is None:
                unknown[name] = None
            else:
                inside[known] = inside.get(known, 0.0) + times * counted
                calls.append((known, call, times))
    return Flops(products, inside, tuple(unknown), tuple(calls))


def _equations(jaxpr: Jaxpr, times: float, around: str):
    """Yield (equation, how often it runs over all devices, its scope) for a jaxpr and all jaxprs inside it."""
    for equation in jaxpr.eqns:
        scope = f"{around}/{equation.source_info.name_stack}"
        yield equation, times, scope
        kind, params = equation.primitive.name, equation.params
        if kind == "pallas_call":
            continue
        if kind == "cond":
            branches = [list(_equations(branch.jaxpr, times, scope)) for branch in params["branches"]]
            yield from max(branches, key=lambda found: sum(n * _cost(e) for e, n, _ in found))
            continue
        inner = times
        if kind == "scan":
            inner = times * params["length"]
        elif kind == "shard_map":
            inner = times * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        for value in params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr):
                    yield from _equations(part.jaxpr, inner, scope)
                elif isinstance(part, Jaxpr):
                    yield from _equations(part, inner, scope)


def _call(equation: Any) -> Call:
    arguments, results = (tuple(v.aval for v in vs) for vs in (equation.invars, equation.outvars))
    declared = equation.params["cost_estimate"]
    turns = math.prod(equation.params["grid_mapping"].grid)
    if declared is None:
        return Call(arguments, results, turns, None)
    return Call(arguments, results, turns, float(declared.flops), float(declared.transcendentals))


def _cost(equation: Any) -> float:
    costs = {"dot_general": _dot, "conv_general_dilated": _convolution}
    return costs.get(equation.primitive.name, lambda _: 0.0)(equation)


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval, equation.outvars[0].aval
    return 2.0 * math.prod(result.shape) * math.prod(left.shape[axis] for axis in contracted)


def _convolution(equation: Any) -> float:
    numbers = equation.params["dimension_numbers"]
    kernel, result = equation.invars[1].aval, equation.outvars[0].aval
    outputs = kernel.shape[numbers.rhs_spec[0]]
    return 2.0 * math.prod(result.shape) * math.prod(kernel.shape) / outputs
