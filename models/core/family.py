"""What a model family declares once: its parameter table, sizes and Hugging Face names.

Sharding, weight decay, per-layer optimiser rules, import, export and the golden tests all read the same table.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import numpy as np
from jax import Array

from models.core.parameters import Parameter
from models.core.program import Program


class Shape(Protocol):
    """The sizes of a batch: the phase of a training, which may have more."""

    batch_size: int
    length: int


Inputs = Mapping[str, Array]  # what a model is given of a batch: name -> [rows, *its shape]


class Input(NamedTuple):
    """An array that a model is given of each row.

    shape: numbers and names, 'length' for one; where a name stands in several shapes it is the same number.
    required: whether rows without it are refused; the model looks whether it has those that are not.
    """

    shape: tuple[int | str, ...]
    dtype: str = "int32"
    required: bool = True


class Converter(NamedTuple):
    """A config field that config.json holds in another form.

    path: of the field; dots lead into nested configs.   write: config -> what config.json holds under the name.
    read: what config.json holds under all names -> the field's value; KeyError for a name that it lacks and needs.
    """

    path: str
    write: Callable[[Any], Any]
    read: Callable[[Mapping[str, Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """What reads hidden states, with parameters of its own.

    name: under which its parameters lie beside the trunk's.   module: (config, program) -> the Flax module, called
    with what it reads and the table of the tokens' embeddings.
    parameters: its rows of the parameter table.   reads: the head whose output it reads; '' for hidden states.
    """

    name: str
    module: Callable[[Any, Program], nn.Module]
    parameters: tuple[Parameter, ...]
    reads: str = ""

    @property
    def is_nameless(self) -> bool:
        """Whether its parameters have no place in Hugging Face."""
        return not any(row.hf for row in self.parameters)


def dense_there(config: Any, heads: Collection[str]) -> list[str]:
    """What a class without sparse attention computes otherwise."""
    pattern = getattr(config, "pattern", None)
    sparse = pattern is not None and pattern.name != type(pattern)().name
    return [f"all tokens see all, whatever model.pattern.name={pattern.name} says"] if sparse else []


class HuggingFace(NamedTuple):
    """One Hugging Face checkpoint that a family reads and writes; or, for a model that has no class there, a folder of
    our own of the same files.

    folder: where it lies below the export directory ('' for the directory itself).
    architectures: transformers class -> the heads of a model of this class.
    constants: what config.json says of every such model.
    fields: name in config.json -> config field it holds; dots lead into nested configs ('generator.width').
        A `Converter` where it holds it in another form.
    settings: the same for fields that belong to a training, not to the weights: dropout rates.
    tied: tensor that is not stored -> the stored one that it equals.
    untied: tensor that folders may lack which transformers wrote as if it were tied -> what to do then.
    trunk: how the names of all tensors below the heads begin.
    pair: two texts, A and B, as the model is trained on them, with the roles of the special tokens around them; None
        where nothing is expected of a tokenizer.
    prepare: the options of `python -m data_pipelines prepare` that make a tokenizer which writes that.
    otherwise: (config, heads) -> what the class computes otherwise than the model was trained, one phrase for each.
    assumed: name in config.json -> its value, where it says one; with another the class computes otherwise.
    of_softmax: tensors that its classes with heads lack.
    """

    folder: str
    architectures: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, Any]
    fields: Mapping[str, str | Converter]
    settings: Mapping[str, str | Converter]
    tied: Mapping[str, str]
    trunk: str
    pair: str | None = "cls A sep B sep"
    prepare: str = "--tokenizer wordpiece"
    otherwise: Callable[[Any, Collection[str]], list[str]] = dense_there
    assumed: Mapping[str, Any] = MappingProxyType({})
    untied: Mapping[str, str] = MappingProxyType({})
    of_softmax: tuple[str, ...] = ()


class Family(NamedTuple):
    """One model family.

    config: its frozen dataclass.   sizes: published name -> config.
    inputs: name -> Input, by the names of the rows' arrays: what objectives hand to its methods and to `__call__`,
        which calls all its parts once, for initialisation.
    trunk: (config, program) -> the Flax module; of a family with heads, a `WithHeads`.
    table: config -> the trunk's rows of the parameter table, in a stable order.
    heads: what may read the trunk.
    hf: checkpoint part -> HuggingFace.
    seen: (config, Shape) -> share of the pairs of a query and a key that queries see, of all that attention without
        blocks computes (the scope PAIRS).
    attention: its form, 'self' or 'relative', for which there are kernels; '' without attention.
    attentions: (config, Shape, memory) -> what a kernel is asked for, memory the earlier tokens that are remembered.
    continues: the registry's name of another family whose weights one of this may begin with -> path of a parameter ->
        the path there of that which it begins as, where it is not the same.
    """

    config: type
    sizes: dict[str, Any]
    inputs: Mapping[str, Input]
    trunk: Callable[..., nn.Module]
    table: Callable[[Any], list[Parameter]]
    hf: dict[str, HuggingFace]
    heads: tuple[Head, ...] = ()
    seen: Callable[[Any, Shape], float] = lambda config, shape: 1.0
    attention: str = ""
    attentions: Callable[[Any, Shape, int], list] = lambda config, shape, memory: []
    continues: Mapping[str, Mapping[str, str]] = MappingProxyType({})

    def module(self, config: Any, program: Program, heads: Collection[str] = ()) -> nn.Module:
        """The trunk with the heads of these names."""
        read = tuple(head for head in self.heads if head.name in heads)
        return self.trunk(config, program, heads=read) if read else self.trunk(config, program)

    def parameters(self, config: Any, heads: Collection[str] = ()) -> list[Parameter]:
        """The parameter table of `module`."""
        read = [head for head in self.heads if head.name in heads]
        return [*self.table(config), *(row for head in read for row in head.parameters)]

    def every_parameter(self, config: Any) -> list[Parameter]:
        """The same with the rows of all heads, whatever a model has."""
        return self.parameters(config, [head.name for head in self.heads])

    def heads_with(self, names: Collection[str]) -> tuple[str, ...]:
        """The heads of a model in which these are trained: those of the Hugging Face class that has them and the fewest
        others; where there is none, these and what they read. No class has those without a name there."""
        named = [head for head in self.heads if head.name in names]
        read, beside = {head.reads for head in named} - {""}, tuple(head.name for head in named if head.is_nameless)
        wanted = {*names} - {*beside} | read
        classes = [heads for model in self.hf.values() for heads in model.architectures.values()]
        fitting = ((*heads, *beside) for heads in classes if wanted <= {*heads})
        return min(fitting, key=len, default=(*names, *sorted(read - {*names})))


def unfit_inputs(declared: Mapping[str, Input], rows: Mapping[str, tuple]) -> list[str]:
    """What rows, name -> (shape, dtype, ...), lack of the declared inputs or have in another form."""
    found, sizes = [], {}
    for name, (shape, dtype, required) in declared.items():
        if name not in rows:
            found += [f"{name} is missing"] * required
            continue
        given, kind = rows[name][:2]
        fits = len(given) == len(shape) and all(
            size == (sizes.setdefault(axis, size) if isinstance(axis, str) else axis)
            for axis, size in zip(shape, given, strict=True)
        )
        if not fits or np.dtype(kind) != dtype:
            found.append(f"{name} is {np.dtype(kind)}{list(given)} in place of {dtype}{list(shape)}")
    return found
