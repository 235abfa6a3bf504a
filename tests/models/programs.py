"""Programs that take less time to compile than the operations of a test one by one, and what is in a program."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import ClosedJaxpr, Jaxpr

from models.attention.kernels.kernel import Kernel

QUICK = {"xla_backend_optimization_level": 0}  # to compile
STRICT = pltpu.InterpretParams(  # how to run a TPU kernel: what it must not read or do at the same time shows
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", num_cores_or_threads=2
)


def with_gradients(function, weights):
    """A program that gives a function's outputs and the gradients of their weighted sum, a tuple, one an argument."""

    def both(*inputs):
        outputs, pull = jax.vjp(function, *inputs)
        return outputs, pull(weights.astype(outputs.dtype))

    return jax.jit(both, compiler_options=QUICK)


def interpreted(kernel: Kernel) -> Kernel:
    """A kernel that runs as plain operations, on any platform."""

    def mixing(attention):
        found = kernel.mixing(attention)
        return found._replace(mix=functools.partial(found.mix, interpret=True))

    return kernel._replace(mixing=mixing)


def equations(jaxpr):
    """Those of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from equations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
