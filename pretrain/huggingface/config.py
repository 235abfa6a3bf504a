"""Read a Hugging Face model's config.json as a family's config."""

import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipelines.command_line import as_option
from data_pipelines.errors import UserError
from data_pipelines.tokenizers.made import Made, token_ids
from models.core.family import Converter, Family, HuggingFace
from models.core.parameters import leaves, nest
from models.families.registry import FAMILIES, differing_fields, family_of, name_of, renamed
from pretrain.json_values import make, plain


def config_from(source: str | Path, family: Family | None = None) -> Any:
    """The config of the model that a source describes, see `folders`.

    family: as which it is read, where it can be; else that with a class which config.json names.

    UserError where a config.json is missing, damaged or incomplete, where no family reads it, or where the parts of
    one model disagree.
    """
    first = Path(str(source).split(",")[0].split("=", 1)[-1]) if is_listing(source) else Path(source)
    model_type, named = _read(first).get("model_type"), {*architectures(first)}
    families = [(model.constants["model_type"], one) for one in FAMILIES.values() for model in one.hf.values()]
    reading = [one for known, one in families if known == model_type]
    if not reading:
        known = ", ".join(dict.fromkeys(known for known, _ in families))
        raise UserError(f"{first}: config.json has model_type={model_type!r}; use one of {known}")
    if family not in reading:
        has = lambda one: any(named & {*model.architectures} for model in one.hf.values())
        family = next(filter(has, reading), reading[0])
    values: dict[str, Any] = {}
    for part, folder in folders(source, family).items():
        for path, value in _values(folder, family.hf[part]).items():
            if values.setdefault(path, value) != value:
                raise UserError(
                    f"{source}: model.{path} is {values[path]} in one part and {value} in {folder}; "
                    "give the parts of one model"
                )
    default = leaves(plain(family.config, family.config()))
    fields = {path: value for path, value in default if value is not None}
    if "labels" not in fields:  # a family without heads for tasks
        values.pop("labels", None)
    for path, value in values.items():
        fields[path.replace(".", "/")] = list(value) if isinstance(value, tuple) else value  # as JSON has it
    try:
        return make(family.config, nest(fields), "model.")
    except (ValueError, TypeError, UserError) as error:
        raise UserError(
            f"{source}: config.json describes a model that cannot be built ({error}); give another folder"
        ) from error


def folders(source: str | Path, family: Family) -> dict[str, Path]:
    """Checkpoint part -> folder. source: one folder laid out as `export` writes it, or 'part=DIR,part=DIR'."""
    if not is_listing(source):
        return {part: Path(source) / model.folder for part, model in family.hf.items()}
    found = {}
    for item in str(source).split(","):
        part, _, folder = item.partition("=")
        if part.strip() not in family.hf:
            raise UserError(f"{source}: no part {part.strip()!r}; the parts are {', '.join(family.hf)}")
        found[part.strip()] = Path(folder.strip())
    missing = [part for part in family.hf if part not in found]
    if missing:
        raise UserError(f"{source}: {', '.join(missing)} is missing; add {','.join(f'{p}=DIR' for p in missing)}")
    return found


def check_same(setting: str | Path, source, target) -> None:
    """UserError listing each field that the weights depend on and that differs."""
    if renamed(source, target) is None:
        kinds = [repr(name_of(config)) for config in (source, target)]
        raise UserError(f"{setting}: is {kinds[0]} and the recipe's model {kinds[1]}; take another recipe")
    differing = differing_fields(source, target)
    if not differing:
        return
    listed = ", ".join(f"model.{path} is {old} there and {new} here" for path, (old, new) in differing.items())
    flags = " ".join(as_option(f"model.{path}", old) for path, (old, _) in differing.items() if path != "vocab_size")
    cures = [f"set {flags}"] if flags else []
    if "vocab_size" in differing:
        cures.append("prepare the corpus with --tokenizer and that model's tokenizer")
    raise UserError(f"{setting}: {listed}; {' and '.join(cures)}, or give another model")


def check_class(setting: str, config) -> None:
    """UserError where models of this config's family have no form as a Hugging Face folder."""
    if not family_of(config).hf:
        raise UserError(
            f"{setting}: {name_of(config)} has no form as a Hugging Face folder; "
            "read weights from the run itself, --init-from RUN"
        )


def architectures(folder: Path) -> list[str]:
    """The transformers classes that config.json names."""
    return _read(folder).get("architectures") or []


def heads_in_folder(source: str | Path, config) -> set[str]:
    """The heads of a model, by the classes that its folders name; none where those are unknown, as of a bare trunk."""
    family = family_of(config)
    parts = folders(source, family).items()
    classes = [(family.hf[part].architectures, name) for part, folder in parts for name in architectures(folder)]
    return {head for known, name in classes for head in known.get(name, ())}


def is_listing(source: str | Path) -> bool:
    """Whether it is 'part=DIR,part=DIR'."""
    return "=" in str(source).split("/")[0] and not Path(source).is_dir()


def _read(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder}: has no config.json; give a folder that `export` or transformers wrote")
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{folder}: config.json cannot be read ({error}); copy the folder again") from error
    if not isinstance(fields, dict):
        raise UserError(f"{folder}: config.json is no JSON object; copy the folder again")
    return fields


def _values(folder: Path, model: HuggingFace) -> dict[str, Any]:
    """Config field -> its value in the folder's config.json."""
    fields = _read(folder)
    for name, value in model.constants.items():
        if fields.get(name) != value:
            raise UserError(f"{folder}: config.json has {name}={fields.get(name)!r}, needed is {value!r}")
    for name, value in model.assumed.items():
        if (said := fields.get(name, value)) != value:
            raise UserError(
                f"{folder}: config.json has {name}={said!r}, which this family does not compute; "
                f"give the folder of a model with {value!r}"
            )
    known, values, missing = {**model.fields, **model.settings}, {}, []
    for name, place in known.items():
        path, read = place[::2] if isinstance(place, Converter) else (place, operator.itemgetter(name))
        try:
            value = read(fields)
        except KeyError as error:
            missing += [error.args[0]] * (name in model.fields)
            continue
        except TypeError:
            raise UserError(f"{folder}: config.json has {name}={fields.get(name)!r}; give another folder") from None
        if values.setdefault(path, value) != value:
            raise UserError(
                f"{folder}: config.json has {name}={value!r} and {values[path]!r} for what is the same model.{path} "
                "here; give both one value"
            )
    if missing:
        raise UserError(f"{folder}: config.json lacks {', '.join(dict.fromkeys(missing))}; add what the model has")
    return values | _labels(folder, fields)


def _labels(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The field of labels, where config.json has some."""
    named = fields.get("id2label") or {}
    try:
        labels = [str(named[name]) for name in sorted(named, key=int)]
    except (TypeError, ValueError):
        raise UserError(f"{folder}: config.json has id2label={named!r}; number its labels from 0 on") from None
    return {"labels": tuple(labels)} if labels else {}


def check_fit(setting: str, config, made: Made) -> None:
    """UserError where a tokenizer gives token types for which a model has no embeddings, or a special token another id
    than all models of a class have it."""
    expected, types = _expected(config), getattr(config, "types", None)
    if expected is None:
        return
    largest = max(made.tokenizer.encode("a").type_ids + made.tokenizer.encode("a", "b").type_ids)
    if types is not None and largest >= types:
        raise UserError(
            f"{setting}: its tokenizer gives token types up to {largest}, which model.types={types} has not; prepare "
            f"it with {expected.prepare}, or give --model.types {largest + 1}"
        )
    for name, index in token_ids(made).items():
        if (needed := expected.constants.get(name, index)) != index:
            raise UserError(
                f"{setting}: its tokenizer has {name}={index}, a {expected.constants['model_type']!r} model has "
                f"{needed}; prepare it with {expected.prepare}"
            )


def misfits(config, made: Made) -> list[str]:
    """What to say where an exported tokenizer will not write texts as the model was trained on them."""
    expected, written = _expected(config), _pair(made)
    if expected is None or expected.pair in (None, written):
        return []
    return [
        f"the tokenizer writes two texts as '{written}', this model is trained on '{expected.pair}': whoever loads its "
        f"export would have to write them so; prepare the corpus with {expected.prepare}"
    ]


def _expected(config) -> HuggingFace | None:
    """What says so, `pair` and `prepare`; None for a family that is not exported."""
    return next(iter(family_of(config).hf.values()), None)


def _pair(made: Made) -> str:
    """Two texts as a tokenizer writes them, in the words of `HuggingFace.pair`."""
    roles = {index: role for role, index in reversed(made.special.items())}  # a token of several: the first
    encoded, said = made.tokenizer.encode("a", "b"), []
    for text, index in zip(encoded.sequence_ids, encoded.ids, strict=True):
        token = roles.get(index, str(index)) if text is None else "AB"[text]
        if text is None or said[-1:] != [token]:  # else of a text of several tokens
            said.append(token)
    return " ".join(said)
