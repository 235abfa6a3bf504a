"""Programs that take less time to compile than the operations of a test one by one, and what is in a program."""

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

QUICK = {"xla_backend_optimization_level": 0}  # to compile


def with_gradients(function, weights):
    """A program that gives a function's outputs and the gradients of their weighted sum, a tuple, one an argument."""

    def both(*inputs):
        outputs, pull = jax.vjp(function, *inputs)
        return outputs, pull(weights.astype(outputs.dtype))

    return jax.jit(both, compiler_options=QUICK)


def equations(jaxpr):
    """Those of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from equations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
