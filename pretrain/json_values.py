"""Convert frozen dataclasses to JSON and back by their annotations: numbers, text, tuples, dataclasses, unions."""

import dataclasses
import types
import typing
from typing import Any

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError

KIND = "kind"  # names the class where an annotation leaves it open
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def plain(kind, value):
    """Convert a value with the annotation `kind` to what `json.dumps` takes; fields that are empty by default are left
    out while they are."""
    if dataclasses.is_dataclass(value):
        hints, fields = typing.get_type_hints(type(value)), {}
        for field in dataclasses.fields(value):
            given = getattr(value, field.name)
            if given != field.default or given not in (None, (), ""):
                fields[field.name] = plain(hints[field.name], given)
        return {KIND: type(value).__name__, **fields} if len(_classes(kind)) > 1 else fields
    if isinstance(value, tuple):
        return [plain(item_kind, item) for item_kind, item in zip(_of_items(kind, len(value)), value, strict=True)]
    return value


def build(kind, value, path: str) -> Any:
    """Invert `plain`: build a value with the annotation `kind` from parsed JSON. UserError naming the field at `path`,
    its value and the allowed types if that is impossible."""
    options = _options(kind)
    if isinstance(value, dict) and (classes := _classes(kind)):
        return _dataclass(classes, value, path)
    if isinstance(value, list) and (kinds := _of_items(kind, len(value))) is not None:
        return tuple(build(k, item, f"{path}.{i}") for i, (k, item) in enumerate(zip(kinds, value, strict=True)))
    if type(value) in options:
        return value
    if float in options and type(value) is int:
        return float(value)
    raise UserError(f"{path}={value!r}: must be {' or '.join(map(_words, options))}")


def _dataclass(classes: list[type], value: dict, path: str) -> Any:
    """Build a dataclass; if there are several classes, `KIND` names the one."""
    cls = classes[0]
    if len(classes) > 1:
        named = {cls.__name__: cls for cls in classes}
        if str(value.get(KIND)) not in named:
            raise UserError(unknown(f"{path}.{KIND}: unknown kind", str(value.get(KIND)), named))
        cls, value = named[value[KIND]], {name: field for name, field in value.items() if name != KIND}
    return make(cls, value, f"{path}.")


def make(cls: type, value: dict, prefix: str, **made) -> Any:
    """Make a dataclass from JSON fields.   made: fields already made.   prefix: of field names in messages."""
    hints = typing.get_type_hints(cls)
    for name in value:
        if name not in _names(cls):
            raise UserError(unknown(f"{prefix}{name}: this version has no field", name, _names(cls)))
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in value and field.name not in made:
            raise UserError(f"{prefix}{field.name} is missing; give it {_words(hints[field.name])}")
    fields = {name: build(hints[name], field, f"{prefix}{name}") for name, field in value.items()}
    try:
        return cls(**fields, **made)
    except (UserError, ValueError) as error:  # from the dataclass's own checks
        raise UserError(_with_path(str(error), cls, prefix)) from None


def _with_path(message: str, cls: type, prefix: str) -> str:
    """Complete the path in a dataclass's message, which may start at the field or at an object around it."""
    if message.partition("=")[0] in _names(cls):
        return prefix + message
    above, around, _ = f".{prefix}".rpartition(f".{message.partition('.')[0]}.")
    return f"{above}.{message}".removeprefix(".") if around else message


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _options(kind) -> tuple:
    """Return the members of a union; any other annotation by itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _classes(kind) -> list[type]:
    return [option for option in _options(kind) if dataclasses.is_dataclass(option)]


def _of_items(kind, length: int) -> tuple | None:
    """Return the annotations of a tuple's items, for the first tuple in `kind` that can have this length; else None."""
    for option in _options(kind):
        if typing.get_origin(option) is tuple:
            args = typing.get_args(option)
            args = args[:1] * length if args[1:] == (Ellipsis,) else args
            if len(args) == length:
                return args
    return None


def _words(kind) -> str:
    """Describe an annotation in words."""
    if typing.get_origin(kind) is tuple:
        args = typing.get_args(kind)
        return f"a list of {_words(args[0])}" if args[1:] == (Ellipsis,) else f"a list of {len(args)}"
    if dataclasses.is_dataclass(kind):
        return f"an object with {', '.join(_names(kind))}"
    return WORDS.get(kind) or " or ".join(map(_words, _options(kind)))


def once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object's fields (for `json.loads`); UserError for a field that occurs twice."""
    names = [name for name, _ in fields]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name}: occurs twice in one object; remove one of them")
    return dict(fields)
