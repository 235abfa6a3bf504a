"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): frozen matrices W become W + ALPHA / rank * down @ up, where
only `down` and `up` are trained. Merging the products into W restores the model's own parameters."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from models.core.parameters import Parameter, Params, leaves, nest
from models.core.ranges import COUNT, check_ranges

LORA = "lora"  # prefix of the trained parameters' paths: lora/PATH OF THE MATRIX/down, .../up
ALPHA = 16.0  # section 4.1: tuning it amounts to tuning the learning rate


@dataclasses.dataclass(frozen=True)
class Lora:
    """The low-rank products of a recipe, which should freeze the matrices that they update."""

    rank: int = 8  # width of the narrow matrices
    targets: tuple[str, ...] = ("attention/query", "attention/value")  # ends of the matrices' paths, in all layers

    def __post_init__(self):
        check_ranges(self, {"rank": COUNT}, "lora.")


def with_products(table: Sequence[Parameter], lora: Lora | None) -> list[Parameter]:
    """Add the products to a parameter table; ValueError if a target matches no matrix."""
    rows = [*table]
    for target in lora.targets if lora else ():
        found = [row for row in table if row.path.removesuffix("/kernel").endswith(f"/{target}") and len(row.axes) > 1]
        matrices = [row for row in found if row.path.endswith("/kernel")]
        if not matrices:
            raise ValueError(f"lora.targets: no matrix's path ends with {target}; use one like attention/query")
        for row in matrices:
            *outer, above, below = row.axes
            rows.append(Parameter(f"{LORA}/{row.path}/down", (*outer, above, None), {}))
            rows.append(Parameter(f"{LORA}/{row.path}/up", (*outer, None, below), {}))
    return rows


def initial_products(key: Array, table: Sequence[Parameter], params: Params, lora: Lora) -> Params:
    """Initialize the products: `down` is normal with std width ** -0.5, `up` is 0, so that the model is unchanged."""
    shapes, made = {path: leaf.shape for path, leaf in leaves(params)}, {}
    for number, row in enumerate(row for row in with_products(table, lora) if row.path.startswith(f"{LORA}/")):
        *parents, name = row.path.split("/")
        *outer, above, below = shapes["/".join(parents[1:])]
        narrow = (*outer, above, lora.rank)
        down = above**-0.5 * jax.random.normal(jax.random.fold_in(key, number), narrow)
        made[row.path] = down if name == "down" else jnp.zeros((*outer, lora.rank, below))
    return nest(made)


def merged(params: Params) -> Params:
    """Add the products to their matrices; parameters without products are returned unchanged."""
    if LORA not in params:
        return params
    flat = dict(leaves({name: leaf for name, leaf in params.items() if name != LORA}))
    products = dict(leaves(params[LORA]))
    for matrix in (path.removesuffix("/down") for path in products if path.endswith("/down")):
        down, up = products[f"{matrix}/down"], products[f"{matrix}/up"]
        flat[matrix] = flat[matrix] + ALPHA / down.shape[-1] * jnp.matmul(down, up)
    return nest(flat)
