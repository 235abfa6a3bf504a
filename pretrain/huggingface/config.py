"""Read a Hugging Face model's config.json as a family's config, and check configs and tokenizers against each other."""

import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipelines.cloud import is_remote
from data_pipelines.command_line import as_option
from data_pipelines.errors import UserError
from data_pipelines.tokenizers.made import Made, token_ids
from models.core.family import Converter, Family, HuggingFace
from models.core.parameters import leaves, nest
from models.families.registry import FAMILIES, differing_fields, family_of, name_of, renamed
from pretrain.json_values import make, plain


def config_from(source: str | Path, family: Family | None = None) -> Any:
    """Read the config of the model in a source, see `folders`.   family: to read it as, if possible; else as the one
    whose constants config.json has and with a class that it names. UserError if a config.json is missing, damaged or
    incomplete, if no family reads it, or if the parts disagree."""
    first = next(iter(listed_parts(source).values()), Path(source))
    said, named = _read(first), {*architectures(first)}
    model_type = said.get("model_type")
    families = [(model.constants["model_type"], fam) for fam in FAMILIES.values() for model in fam.hf.values()]
    reading = [fam for known, fam in families if known == model_type]
    if not reading:
        known = ", ".join(dict.fromkeys(known for known, _ in families))
        raise UserError(f"{first}: config.json has model_type={model_type!r}; use one of {known}")
    suited = [fam for fam in reading if any(model.constants.items() <= said.items() for model in fam.hf.values())]
    if family not in (suited or reading):
        has = lambda fam: any(named & {*model.architectures} for model in fam.hf.values())
        # The one with most parts here, and most constants: any BERT has a number of token types, a UniLM its six.
        constants = lambda fam: max(len(model.constants) for model in fam.hf.values())
        suited = sorted(suited or reading, key=lambda fam: (-_parts_in(source, fam), -constants(fam)))
        family = next(filter(has, suited), suited[0])
    values: dict[str, Any] = {}
    for part, folder in folders(source, family).items():
        for path, value in _values(folder, family.hf[part]).items():
            if values.setdefault(path, value) != value:
                two = f"is {values[path]} in one part, {value} in {folder}"
                raise UserError(f"{source}: model.{path} {two}; give the parts of one model")
    default = family.config()
    fields = dict(leaves(plain(family.config, default)))
    if not hasattr(default, "labels"):  # a family without heads for tasks
        values.pop("labels", None)
    for path, value in values.items():
        fields[path.replace(".", "/")] = list(value) if isinstance(value, tuple) else value  # as in JSON
    try:
        return make(family.config, nest(fields), "model.")
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"{source}: config.json: no such model can be built ({error}); mend it") from error


def folders(source: str | Path, family: Family) -> dict[str, Path]:
    """Return checkpoint part -> folder.   source: one folder as written by `export`, or 'part=DIR,part=DIR'."""
    result = listed_parts(source)
    if not result:
        return {part: Path(source) / model.folder for part, model in family.hf.items()}
    if unknown := [part for part in result if part not in family.hf]:
        raise UserError(f"{source}: unknown part {unknown[0]!r}; use {', '.join(family.hf)}")
    if missing := [part for part in family.hf if part not in result]:
        raise UserError(f"{source}: {', '.join(missing)} is missing; add {','.join(f'{p}=DIR' for p in missing)}")
    return result


def _parts_in(source: str | Path, family: Family) -> int:
    """Return how many parts a family has, 0 if the source lacks one."""
    given = listed_parts(source)
    there = given or [part for part, folder in folders(source, family).items() if (folder / "config.json").is_file()]
    return len(there) if {*there} == {*family.hf} else 0


def check_same(setting: str | Path, source, target) -> None:
    """Raise UserError listing the fields that weights depend on and that differ."""
    if renamed(source, target) is None:
        kinds = [repr(name_of(config)) for config in (source, target)]
        raise UserError(f"{setting}: is a {kinds[0]} model, but the recipe's is {kinds[1]}; use another recipe")
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
    """Raise UserError if this config's family cannot be stored as a Hugging Face folder."""
    if not family_of(config).hf:
        raise UserError(f"{setting}: {name_of(config)} models have no Hugging Face class; give --init-from the run")


def architectures(folder: Path) -> list[str]:
    """Return the transformers classes that config.json names."""
    return _read(folder).get("architectures") or []


def heads_in_folder(source: str | Path, config) -> set[str]:
    """Return a model's heads by the classes that its folders name; none for unknown classes, like a bare trunk."""
    family = family_of(config)
    parts = folders(source, family).items()
    classes = [(family.hf[part].architectures, name) for part, folder in parts for name in architectures(folder)]
    return {head for known, name in classes for head in known.get(name, ())}


def listed_parts(source: str | Path) -> dict[str, Path]:
    """Return part -> folder of a source of the form 'part=DIR,part=DIR'; {} for a folder."""
    if "=" not in str(source).split("/")[0] or Path(source).is_dir():
        return {}
    items = [item.partition("=") for item in str(source).split(",")]
    if remote := [folder for _, _, folder in items if is_remote(folder)]:
        raise UserError(f"{remote[0]}: parts are read from local folders; copy them to this disk")
    return {part.strip(): Path(folder.strip()) for part, _, folder in items}


def _read(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; give one written by `export` or transformers")
    if not file.is_file():
        raise UserError(f"{folder}: has no config.json; give a folder written by `export` or transformers")
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{folder}: config.json cannot be read ({error}); copy the folder again") from error
    if not isinstance(fields, dict):
        raise UserError(f"{folder}: config.json is not a JSON object; copy the folder again")
    return fields


def _values(folder: Path, model: HuggingFace) -> dict[str, Any]:
    """Read config field -> value from the folder's config.json."""
    fields = _read(folder)
    for name, value in model.constants.items():
        if fields.get(name) != value:
            raise UserError(f"{folder}: config.json has {name}={fields.get(name)!r}, but needs {value!r}; give another")
    for name, value in model.assumed.items():
        if (actual := fields.get(name, value)) != value:
            raise UserError(f"{folder}: config.json has {name}={actual!r}, but needs {value!r}; give another")
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
            raise UserError(f"{folder}: config.json has {name}={value!r} and model.{path}={values[path]!r}; mend it")
    if missing:
        raise UserError(f"{folder}: config.json lacks {', '.join(dict.fromkeys(missing))}; add the model's values")
    return values | _labels(folder, fields)


def _labels(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `labels`, if config.json has labels."""
    named = fields.get("id2label") or {}
    try:
        labels = [str(named[name]) for name in sorted(named, key=int)]
    except (TypeError, ValueError):
        raise UserError(f"{folder}: config.json has id2label={named!r}; number its labels from 0 on") from None
    return {"labels": tuple(labels)} if labels else {}


def check_fit(setting: str, config, made: Made) -> None:
    """Raise UserError if a tokenizer gives token types that the model has no embeddings for, or if a special token has
    an id other than in all models of the family."""
    expected, types = _expected(config), getattr(config, "types", 0)
    if expected is None:
        return
    largest = max(made.tokenizer.encode("a").type_ids + made.tokenizer.encode("a", "b").type_ids)
    if types and largest >= types:
        raise UserError(
            f"{setting}: its tokenizer gives token types up to {largest}, but model.types={types}; prepare it with "
            f"{expected.prepare}, or give --model.types {largest + 1}"
        )
    for name, index in token_ids(made).items():
        if (needed := expected.constants.get(name, index)) != index:
            raise UserError(
                f"{setting}: its tokenizer has {name}={index}, but a {expected.constants['model_type']!r} model has "
                f"{needed}; prepare it with {expected.prepare}"
            )


def misfits(config, made: Made) -> list[str]:
    """List warnings if an exported tokenizer would encode text pairs differently than the model was trained on them."""
    expected, written = _expected(config), _pair(made)
    if expected is None or expected.pair in (None, written):
        return []
    return [
        f"the tokenizer encodes a pair as '{written}', but the model is trained on '{expected.pair}', which users of "
        f"an export would have to build themselves; prepare the corpus with {expected.prepare}"
    ]


def _expected(config) -> HuggingFace | None:
    """Return the family's expectations of a tokenizer; None if it is not exported."""
    return next(iter(family_of(config).hf.values()), None)


def _pair(made: Made) -> str:
    """Describe how a tokenizer encodes a pair, in the notation of `HuggingFace.pair`."""
    roles = {index: role for role, index in reversed(made.special.items())}  # of several roles of a token, the first
    encoded, parts = made.tokenizer.encode("a", "b"), []
    for text, index in zip(encoded.sequence_ids, encoded.ids, strict=True):
        token = roles.get(index, str(index)) if text is None else "AB"[text]
        if text is None or parts[-1:] != [token]:  # a text may have several tokens
            parts.append(token)
    return " ".join(parts)
