"""The declaration of a model family: its parameter table, sizes, heads and Hugging Face names.

Sharding, weight decay, per-layer optimizer rules, import, export and the golden tests all read the same table.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import numpy as np
from jax import Array

from models.core.parameters import Parameter
from models.core.program import Program


class Shape(Protocol):
    """The sizes of a batch; a training phase has these fields and more."""

    batch_size: int
    length: int


Inputs = Mapping[str, Array]  # a model's inputs from a batch: name -> [rows, *shape of the input]


class Input(NamedTuple):
    """An input array of a model, for one row.

    shape: numbers and names such as 'length'; a name stands for the same number in all inputs.
    required: whether rows without it are refused; the model itself checks for inputs that are not required.
    """

    shape: tuple[int | str, ...]
    dtype: str = "int32"
    required: bool = True


class Converter(NamedTuple):
    """A config field that has another form in config.json.

    path: of the field; dots lead into nested configs.   write: config -> the value in config.json.
    read: the contents of config.json -> the field's value; KeyError for a missing name that it needs.
    """

    path: str
    write: Callable[[Any], Any]
    read: Callable[[Mapping[str, Any]], Any]


def read_by(path: str, read: Callable[[Mapping[str, Any]], Any]) -> Converter:
    """Return the converter of a field whose value is written as it is."""
    return Converter(path, operator.attrgetter(path), read)


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A head: a module with its own parameters that reads hidden states.

    name: key of its parameters beside the trunk's.   module: (config, program) -> the Flax module, called with what it
    reads and the token embedding table.
    parameters: its rows of the parameter table.   reads: the head whose output it reads; '' for hidden states.
    """

    name: str
    module: Callable[[Any, Program], nn.Module]
    parameters: tuple[Parameter, ...]
    reads: str = ""

    @property
    def is_nameless(self) -> bool:
        """Whether no Hugging Face checkpoint has its parameters."""
        return not any(row.hf for row in self.parameters)


def dense_there(config: Any, heads: Collection[str]) -> list[str]:
    """Return how a class without sparse attention differs from the model as trained, see `HuggingFace.otherwise`."""
    pattern = getattr(config, "pattern", None)
    sparse = pattern is not None and pattern.name != type(pattern)().name
    return [f"all tokens see all, whatever model.pattern.name={pattern.name} says"] if sparse else []


class HuggingFace(NamedTuple):
    """One Hugging Face checkpoint that a family reads and writes; or, for a model without a class there, a folder of
    the same files in our own format.

    folder: its place in the export directory ('' for the directory itself).
    architectures: transformers class -> the heads of a model of this class.
    constants: entries of config.json that are the same for every model.
    fields: name in config.json -> config field; dots lead into nested configs ('generator.width'). A `Converter` for a
        field that has another form there.
    settings: the same for fields that belong to training, not to the weights, such as dropout rates.
    tied: tensor that is not stored -> the stored tensor that it equals.
    untied: tensor that may be missing because transformers saved it as if it were tied -> what to do then.
    prefix: of the names of all tensors that are not in heads.
    pair: the form of two texts, A and B, in training, with the roles of the special tokens around them; None if the
        tokenizer need not write pairs.
    prepare: options of `python -m data_pipelines prepare` that make a tokenizer which writes pairs in this form.
    otherwise: (config, heads) -> how the class differs from the model as trained, one phrase for each difference.
    assumed: name in config.json -> the value that it must have, if present; with another the class computes something
        else.
    of_softmax: tensors that classes with heads lack.
    zeros: tensors that models here lack; those of a folder must be zero.
    all_ids: whether the ids of special tokens must be numbers in config.json: for a token that the tokenizer lacks that
        of its end of texts.
    beside: how the names of tensors begin that no class has; they are in a file of that name beside the others.
    """

    architectures: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, Any]
    fields: Mapping[str, str | Converter]
    settings: Mapping[str, str | Converter]
    folder: str = ""
    tied: Mapping[str, str] = MappingProxyType({})
    prefix: str = ""
    pair: str | None = "cls A sep B sep"
    prepare: str = "--tokenizer wordpiece"
    otherwise: Callable[[Any, Collection[str]], list[str]] = dense_there
    assumed: Mapping[str, Any] = MappingProxyType({})
    untied: Mapping[str, str] = MappingProxyType({})
    of_softmax: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    all_ids: bool = False
    beside: str = ""


class Family(NamedTuple):
    """One model family.

    config: its frozen dataclass.
    sizes: published name -> config. But for BERT's, 'tiny' and 'mini' are not published; they train within minutes on a
        CPU, for the demo and the tests.
    inputs: name of a batch's array -> Input; objectives pass these to its methods and to `__call__`, which calls all
        parts once, for initialisation.
    trunk: (config, program) -> the Flax module; a `WithHeads` if the family has heads.
    table: config -> the trunk's rows of the parameter table, in a stable order.
    heads: the heads that can read the trunk.
    hf: checkpoint part -> HuggingFace.
    seen: (config, Shape) -> the share of (query, key) pairs that queries see, of all pairs that attention without
        blocks computes (the scope PAIRS).
    seen_by_pattern: the same of layers with a sparse pattern, if other layers have none.
    attention: its form, 'self' or 'relative', which kernels must match; '' without attention.
    attentions: (config, Shape, memory) -> the attentions that a kernel may compute.   memory: remembered tokens.
    continues: registry name of another family whose weights may initialise a model of this one -> path of a parameter
        here -> its path there, where they differ.
    differences: parameter -> the one that has to be added to it; folders, and models of other families, have the sum.
    """

    config: type
    sizes: dict[str, Any]
    inputs: Mapping[str, Input]
    trunk: Callable[..., nn.Module]
    table: Callable[[Any], list[Parameter]]
    hf: dict[str, HuggingFace]
    heads: tuple[Head, ...] = ()
    seen: Callable[[Any, Shape], float] = lambda config, shape: 1.0
    seen_by_pattern: Callable[[Any, Shape], float] | None = None
    attention: str = ""
    attentions: Callable[[Any, Shape, int], list] = lambda config, shape, memory: []
    continues: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    differences: Mapping[str, str] = MappingProxyType({})

    def module(self, config: Any, program: Program, heads: Collection[str] = ()) -> nn.Module:
        """Return the trunk with the heads of these names."""
        read = tuple(head for head in self.heads if head.name in heads)
        return self.trunk(config, program, heads=read) if read else self.trunk(config, program)

    def parameters(self, config: Any, heads: Collection[str] = ()) -> list[Parameter]:
        """Return the parameter table of `module`."""
        read = [head for head in self.heads if head.name in heads]
        return [*self.table(config), *(row for head in read for row in head.parameters)]

    def every_parameter(self, config: Any) -> list[Parameter]:
        """Return the parameter table with all heads of the family."""
        return self.parameters(config, [head.name for head in self.heads])

    def heads_with(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the heads of a model that trains the given ones: those of the Hugging Face class that has them and the
        fewest others, or, without such a class, these and the heads that they read. Heads that Hugging Face does not
        have are added."""
        named = [head for head in self.heads if head.name in names]
        read, beside = {head.reads for head in named} - {""}, tuple(head.name for head in named if head.is_nameless)
        wanted = {*names} - {*beside} | read
        classes = [heads for model in self.hf.values() for heads in model.architectures.values()]
        fitting = ((*heads, *beside) for heads in classes if wanted <= {*heads})
        return min(fitting, key=len, default=(*names, *sorted(read - {*names})))


def declare(
    usual: Mapping[str, Any] = MappingProxyType({}),
    parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({"model": {}}),
    **others: Any,
) -> Family:
    """Declare a family.

    usual, others: fields of `Family` and `HuggingFace`. Constants, fields and settings of `others` are added to the
    usual ones; other fields replace them.   parts: checkpoint part -> its own fields of `HuggingFace`, in the same way.
    """
    of_class = _changed(usual, others)
    of_family = {name: of_class.pop(name) for name in Family._fields if name in of_class}
    hf = {part: HuggingFace(**_changed(of_class, changes)) for part, changes in parts.items()}
    return Family(**of_family, hf=hf)


def _changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    added = ("constants", "fields", "settings")
    return {**fields, **changes, **{name: {**fields.get(name, {}), **changes.get(name, {})} for name in added}}


def unfit_inputs(declared: Mapping[str, Input], rows: Mapping[str, tuple]) -> list[str]:
    """Return how rows, name -> (shape, dtype, ...), differ from the declared inputs, one phrase for each input."""
    problems, sizes = [], {}
    for name, (shape, dtype, required) in declared.items():
        if name not in rows:
            problems += [f"{name} is missing"] * required
            continue
        row_shape, kind = rows[name][:2]
        fits = len(row_shape) == len(shape) and all(
            size == (sizes.setdefault(axis, size) if isinstance(axis, str) else axis)
            for axis, size in zip(shape, row_shape, strict=True)
        )
        if not fits or np.dtype(kind) != dtype:
            problems.append(f"{name} is {np.dtype(kind)}{list(row_shape)} in place of {dtype}{list(shape)}")
    return problems
