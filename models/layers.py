"""The blocks that families share: dense, norm, embeddings, the layer stack."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.noise import fold
from models.parameters import LAYERS, Keys
from models.program import KEPT, Program, kept
from models.sharding import constrain, current_rules


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """x times the standard normal distribution function (Hendrycks & Gimpel 2016), computed in float32."""
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.float32)
    below = 0.5 * (1.0 + jax.lax.erf(wide * 0.5**0.5))
    slope = below + wide * jnp.exp(-0.5 * jnp.square(wide)) * (2.0 * math.pi) ** -0.5
    return (wide * below).astype(x.dtype), slope.astype(x.dtype)


# The derivative shares its work with the value, so both are kept: the backward pass is one multiplication.
gelu.defvjp(lambda x: tuple(map(kept, _gelu_and_slope(x))), lambda slope, g: (g * slope,))

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(kept(x), approximate=True),
    "relu": lambda x: jax.nn.relu(kept(x)),
}


FEW_ROWS = 512  # below it XLA:CPU's products are faster in the other order; measured on AVX-512


class Dense(nn.Module):
    """x [..., in] -> x @ kernel + bias [..., features]; kernel f32[in, features], bias f32[features]."""

    features: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = self.parameters(x.shape[-1])
        return _add_bias(product(x.astype(self.dtype), kernel), bias)

    def parameters(self, inputs: int) -> tuple[Array, Array]:
        """Kernel and bias, float32 both."""
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (inputs, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return kernel, bias

    def contraction(self, equation: str, x: Array, kernel: Array) -> Array:
        """`contraction` in `dtype`."""
        return contraction(equation, x.astype(self.dtype), kernel).astype(self.dtype)


class Weights(Dense):
    """A dense layer's kernel and bias themselves, to be used together with those of others."""

    @nn.compact
    def __call__(self, inputs: int) -> tuple[Array, Array]:
        return self.parameters(inputs)


class ToHeads(Dense):
    """x [batch, length, in] -> x @ kernel + bias as [batch, heads, length, head_dim]: the form of attention kernels.

    XLA:TPU writes a product in this form at no cost; a transposition after it is a copy. Likewise in `FromHeads`.
    """

    heads: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = self.parameters(x.shape[-1])
        cut = lambda array: array.reshape(*array.shape[:-1], self.heads, -1)
        return _add_bias(self.contraction("blw,whd->bhld", x, cut(kernel)), cut(bias)[:, None, :])


class FromHeads(Dense):
    """x [batch, heads, length, head_dim] -> [batch, length, heads * head_dim] @ kernel + bias."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        heads, head_dim = x.shape[1], x.shape[3]
        kernel, bias = self.parameters(heads * head_dim)
        return _add_bias(self.contraction("bhld,hdw->blw", x, kernel.reshape(heads, head_dim, -1)), bias)


def _add_bias(y: Array, bias: Array) -> Array:
    """In float32, so that the bias's gradient, a sum over all rows, is too."""
    return (y.astype(jnp.float32) + bias).astype(y.dtype)


def product(x: Array, w: Array) -> Array:
    """x [..., in] @ w f32[in, out] -> [..., out] in x's dtype, with a weight gradient that is also fast on CPUs.

    The weight's gradient leaves the product in float32, here as in `contraction` and `tied_logits`: devices and
    microbatches add such gradients up, and a sum in bfloat16 would round at every addition.
    """
    if current_rules() is not None:  # rows and positions may be cut over different axes of the mesh
        return _product(x, w)
    # One [rows, in] x [in, out] product: XLA:CPU is slower on [batch, length, in].
    return _product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[-1])


@jax.custom_vjp
def _product(x: Array, w: Array) -> Array:
    return _product_forward(x, w)[0]


def _product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    return x @ w, (x, w)


def _product_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    leading = tuple(range(x.ndim - 1))
    if x.ndim == 2:
        return g @ w.T, row_product(x, g)
    return g @ w.T, jnp.tensordot(x, g, (leading, leading), preferred_element_type=jnp.float32)


_product.defvjp(_product_forward, _product_gradients)


def row_product(x: Array, g: Array) -> Array:
    """x [rows, in], g [rows, out] -> x.T @ g f32[in, out], the gradient of a weight."""
    direct = lambda x, g: jnp.matmul(x.T, g, preferred_element_type=jnp.float32)
    if x.shape[1] <= g.shape[1] or x.shape[0] < FEW_ROWS:
        return direct(x, g)
    # XLA:CPU's Eigen runs a tall x.T at half speed (48 against 98 GFLOP/s at 4096 x [512, 128]); the barrier keeps
    # XLA from undoing the exchange. With fewer rows the transposed copy costs more than it saves.
    exchanged = lambda x, g: jax.lax.optimization_barrier(direct(g, x)).T
    return jax.lax.platform_dependent(x, g, cpu=exchanged, default=direct)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contraction(equation: str, x: Array, w: Array) -> Array:
    """jnp.einsum(equation, x, w) as float32, multiplied in x's dtype; w float32, its gradient as in `product`."""
    return _contraction_forward(equation, x, w)[0]


def _contraction_forward(equation: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32), (x, w)


def _contraction_gradients(equation: str, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    of_x, of_w, of_g = equation.replace("->", ",").split(",")
    x, w = residuals
    g = g.astype(x.dtype)
    wide = jnp.einsum(f"{of_x},{of_g}->{of_w}", x, g, preferred_element_type=jnp.float32)
    return jnp.einsum(f"{of_g},{of_w}->{of_x}", g, w), wide


contraction.defvjp(_contraction_forward, _contraction_gradients)


class Norm(nn.Module):
    """Layer normalisation over the last axis in float32 (Ba et al. 2016, equation 4); returns `dtype`."""

    epsilon: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return _normalised(x, scale, bias, self.epsilon, self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalised(x: Array, scale: Array, bias: Array, epsilon: float, dtype: jnp.dtype) -> Array:
    return _norm_forward(x, scale, bias, epsilon, dtype)[0]


def _norm_forward(x, scale, bias, epsilon, dtype):
    x = kept(x)
    wide = x.astype(jnp.float32)
    mean = kept(wide.mean(-1, keepdims=True))
    if x.dtype == jnp.bfloat16:  # both sums in one pass; x's rounding hides more digits than the difference loses
        variance = jnp.maximum(jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean), 0.0)
    else:
        variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    inverse = kept(jax.lax.rsqrt(variance + epsilon))
    return ((wide - mean) * inverse * scale + bias).astype(dtype), (x, mean, inverse, scale)


def _norm_backward(epsilon, dtype, residuals, g):
    x, mean, inverse, scale = residuals
    g, leading = g.astype(jnp.float32), tuple(range(g.ndim - 1))
    hat = (x.astype(jnp.float32) - mean) * inverse
    scaled = g * scale
    dx = inverse * (scaled - scaled.mean(-1, keepdims=True) - hat * (scaled * hat).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (g * hat).sum(leading), g.sum(leading)


_normalised.defvjp(_norm_forward, _norm_backward)


def stack(
    parent: nn.Module,
    layer: nn.Module,
    depth: int,
    x,
    mask,
    keys: Keys,
    program: Program,
    positions: Array | None = None,
    each=None,
):
    """Apply `depth` layers of equal shape to x, [batch, length, width] or a pytree of arrays like it -> the last's x.

    The parameters are always stored stacked under 'layers' [depth, ...], whether the program scans or unrolls.
    layer: an unbound module, called as layer(x, mask, keys) -> x.
    positions: i32[batch, n], where the last layer's output is read; that layer is then called as
    layer(x, mask, keys, positions) -> [batch, n, width].
    each: arrays [depth, ...] of which each layer gets its slice, like a memory; it is then called as
    layer(x, mask, keys, slice) -> (x, output), and the result is (x, the outputs stacked [depth, ...]).
    """
    each = () if each is None else (each,)

    def init(key: Array) -> dict:
        own = jax.tree.map(lambda array: array[0], each)
        one = lambda k: layer.init(k, x, mask, None, *own)["params"]
        return jax.vmap(one)(jax.random.split(key, depth))

    def apply(x, of_layer, *positions: Array):
        params, index, own = of_layer
        layer_keys = None if keys is None else fold(keys, index)
        result = layer.apply({"params": params}, x, mask, layer_keys, *own, *positions)
        return result if own else (result, None)

    if program.remat != "none":
        policy = _is_kept if program.remat == "dots" else None
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=program.depth == "unroll")

    inputs = (parent.param(LAYERS, init), jnp.arange(depth), each)
    whole = depth if positions is None else depth - 1  # layers that compute every position
    if program.depth == "scan":
        x, outputs = jax.lax.scan(apply, x, jax.tree.map(lambda array: array[:whole], inputs))
        if positions is not None:
            x, output = apply(x, jax.tree.map(lambda array: array[-1], inputs), positions)
            outputs = jax.tree.map(lambda before, last: jnp.concatenate([before, last[None]]), outputs, output)
    else:
        arrays, structure = jax.tree.flatten(inputs)
        outputs = []
        for index, of_layer in enumerate(zip(*map(jnp.unstack, arrays), strict=True)):  # w[i] per layer copies more
            x, output = apply(x, structure.unflatten(of_layer), *(() if index < whole else (positions,)))
            outputs.append(output)
        outputs = jax.tree.map(lambda *slices: jnp.stack(slices), *outputs)
    return (x, outputs) if each else x


def _is_kept(primitive, *avals, **parameters) -> bool:
    """The policy of remat 'dots'. JAX would keep a kernel in the recomputation although nothing there reads it."""
    return primitive.name == "pallas_call" or primitive.name == "name" and parameters["name"] == KEPT


def padded_vocab(vocab_size: int) -> int:
    """Rows of the embedding table: the vocabulary rounded up to a multiple of 128, the lanes of a TPU."""
    return -(-vocab_size // 128) * 128


def token_table(module: nn.Module, vocab_size: int, width: int, init_std: float) -> Array:
    """The parameter 'tokens' of a module, an embedding table f32[padded, width]; its padding rows are 0.

    They stay so: `tied_logits` gives them no gradient, and a decay of 0 is 0. So no norm over the table, such as that
    of LAMB's trust ratio, counts them. Those of a checkpoint that has others are kept, decay, and are counted.
    """

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        drawn = nn.initializers.normal(init_std)(key, shape)
        return jnp.where(jnp.arange(shape[0])[:, None] < vocab_size, drawn, 0)

    return module.param("tokens", init, (padded_vocab(vocab_size), width))


def tied_logits(hidden: Array, table: Array, bias: Array, vocab_size: int) -> Array:
    """hidden [n, width], embedding table f32[padded, width], bias f32[padded] -> logits f32[n, padded].

    The padding rows get -inf, so that they carry no probability and no gradient.
    """
    logits = constrain(_scores(hidden, table, bias), "batch", "vocab")
    if table.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)


def gather_rows(x: Array, positions: Array) -> Array:
    """x [batch, length, ...] at positions i32[batch, n] -> [batch, n, ...]."""
    if current_rules() is None:
        return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(x, positions)
    # A product with ones and zeros takes each device's own rows; a gather sends rows to all devices.
    chosen = (positions[..., None] == jnp.arange(x.shape[1])).astype(x.dtype)
    taken = jnp.einsum("bnl,bl...->bn...", chosen, x, precision="highest")
    return constrain(taken, "batch", *(None,) * (x.ndim - 1))


@jax.custom_vjp
def _scores(hidden: Array, table: Array, bias: Array) -> Array:
    """hidden [n, width], table f32[vocab, width] -> their dot products plus bias f32[vocab]: f32[n, vocab]."""
    return _scores_forward(hidden, table, bias)[0]


def _scores_forward(hidden: Array, table: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
    table = constrain(table.astype(hidden.dtype), "vocab", None)  # gathered after the cast: half the bytes
    direct = lambda hidden, table: jnp.einsum("nw,vw->nv", hidden, table, preferred_element_type=jnp.float32)
    if hidden.shape[0] >= FEW_ROWS:
        return direct(hidden, table) + bias, (hidden, table)
    # With few rows Eigen is fast the other way round: 83 against 186 ms at [160, 768] x [30592, 768].
    exchanged = lambda hidden, table: jax.lax.optimization_barrier(direct(table, hidden)).T
    scores = jax.lax.platform_dependent(hidden, table, cpu=exchanged, default=direct)
    return scores + bias, (hidden, table)


def _scores_gradients(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array, Array]:
    hidden, table = residuals
    # XLA:CPU adds up wide rows at a thirtieth of the memory's speed: 85 against 3 ms at [640, 30592].
    by_product = lambda g: jnp.ones(g.shape[0], g.dtype) @ g
    bias = jax.lax.platform_dependent(g, cpu=by_product, default=lambda g: g.sum(0))
    g = g.astype(hidden.dtype)
    return g @ table, row_product(g, hidden), bias


_scores.defvjp(_scores_forward, _scores_gradients)
