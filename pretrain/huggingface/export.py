"""Writes parameters as Hugging Face folders for AutoTokenizer and, if transformers has the class, AutoModel."""

import contextlib
import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.numpy import save_file

from data_pipelines.cloud import entries, in_cloud, is_file
from data_pipelines.durable import put, sync
from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored as tokenizers
from data_pipelines.tokenizers.made import token_ids
from models.blocks.crf import CRF
from models.core.parameters import leaves, nest
from models.families.registry import FAMILIES, family_of
from pretrain.huggingface.config import check_class, check_fit, misfits
from pretrain.huggingface.tensors import Tensor, absent, architecture, fields, heads_beside, heads_in, summed, tensors

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
LIMIT = 5_000_000_000  # maximum bytes of tensors in a file, except for a single larger tensor
CARD, CURVES = "README.md", "curves.png"
BESIDE = [model.beside for family in FAMILIES.values() for model in family.hf.values() if model.beside]
FILES = ("config.json", "generation_config.json", "added_tokens.json", WHOLE, INDEX, CARD, CURVES)
FILES += tuple(f"{name}.safetensors" for name in (CRF, *BESIDE))
MARK = "export.json"  # identifies the run of an export and its steps, with the hash of its card
VOCABULARY_FILES = ("vocab.txt", "vocab.json", "merges.txt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *VOCABULARY_FILES)

log = logging.getLogger(__name__)


def export(
    params: Mapping,
    config,
    tokenizer_path: Path,
    folder: Path,
    dtype: str = "float32",
    run: str = "",
    write_card: Callable[[Path, str | None], None] | None = None,
    steps: Sequence[int] = (),
) -> None:
    """Write the weights, in one file or several, config.json and the tokenizer's files for each part of the model.

    params: nested dict of arrays.   config: the family's, with the tokenizer's vocab_size.
    tokenizer_path: folder of Hugging Face tokenizer files.   dtype: data type of the weights.
    run: its identity.   folder: new, empty, or an earlier export of the same run, which is replaced as a whole.
    write_card: writes README.md and its plot into a folder, given the transformers class of the top-level model.
    steps: of the checkpoints that the weights are of, or the mean of.
    UserError for any other folder, or if it cannot be written; then the earlier export is untouched.
    """
    folder = Path(folder)
    parts = family_of(config).hf
    check_class(f"export --to {folder}", config)
    check_replaceable(folder, run)
    made = tokenizers.load(tokenizer_path)
    check_fit(f"export --to {folder}", config, made)
    for misfit in misfits(config, made):
        log.warning("export --to %s: %s", folder, misfit)
    for part, model in parts.items():
        if architecture(config, part, params) is None:
            heads = ", ".join(heads_in(config, params)) or "none"
            raise UserError(f"export --to {folder}: no class has this model's heads ({heads}); use another objective")
        if otherwise := model.otherwise(config, params.keys()):
            log.warning("export --to %s: in a %s %s", folder, architecture(config, part, params), "; ".join(otherwise))
    ids = token_ids(made)
    arrays = nest(summed(dict(leaves(jax.tree.map(np.asarray, params))), config))
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for part in sorted(parts, key=lambda part: parts[part].folder):
            target = partial / parts[part].folder
            target.mkdir(parents=True)
            config_file = target / "config.json"
            config_file.write_text(_json(config_fields(config, part, params, ids, dtype)), "utf-8")
            lacks = absent(config, part, arrays)
            stored = {name: one for name, one in tensors(arrays, config, part).items() if name not in lacks}
            if beside := parts[part].beside:
                apart = {name: stored.pop(name) for name in [*stored] if name.startswith(f"{beside}.")}
                _save(_arrays(apart, jnp.dtype(dtype)), target / f"{beside}.safetensors", config_file)
            _write_tensors(stored, target, jnp.dtype(dtype), config_file)
            for head in heads_beside(config, params):
                _save(dict(leaves(arrays[head])), target / f"{head}.safetensors", config_file)
                message = "export --to %s: transformers has no class with a %s and ignores it; it is in %s.safetensors"
                log.warning(message, folder, head, head)
            for name in TOKENIZER_FILES:
                if (tokenizer_path / name).exists():
                    shutil.copyfile(tokenizer_path / name, target / name)
            file = target / "tokenizer_config.json"
            if (positions := getattr(config, "positions", None)) and file.exists():
                file.write_text(_json(json.loads(file.read_text("utf-8")) | {"model_max_length": positions}), "utf-8")
        if write_card:
            top = next((part for part in parts if not parts[part].folder), None)
            write_card(partial, top and architecture(config, top, params))
        (partial / MARK).write_text(_json({"run": run, "steps": [*steps], "card": _hash(partial / CARD)}), "utf-8")
        _replace(folder, partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"export --to {folder}: cannot be written ({error.strerror or error}); use another") from error


def _write_tensors(stored: Mapping[str, Tensor], folder: Path, dtype: np.dtype, mode_of: Path) -> None:
    """Write tensors into one file, or several with an index; only one file's tensors are copied in memory at a time.
    mode_of: file whose permissions to copy, as the library lets only the owner read."""

    def size(tensor: Tensor) -> int:
        return math.prod(tensor.shape) * dtype.itemsize

    split = split_state_dict_into_shards_factory(
        stored, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=LIMIT
    )
    for name, keys in split.filename_to_tensors.items():
        _save(_arrays({key: stored[key] for key in keys}, dtype), folder / name, mode_of)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(_json(index), "utf-8")


def _arrays(stored: Mapping[str, Tensor], dtype: np.dtype) -> dict[str, np.ndarray]:
    return {key: np.ascontiguousarray(tensor.array().astype(dtype, copy=False)) for key, tensor in stored.items()}


def _save(arrays: Mapping[str, np.ndarray], file: Path, mode_of: Path) -> None:
    try:
        save_file(arrays, file, metadata={"format": "pt"})
    except SafetensorError as error:  # raised when the disk is full, for example
        raise OSError(str(error)) from error
    shutil.copymode(mode_of, file)


def config_fields(
    config, part: str, names: Collection[str], ids: Mapping[str, int | None], dtype: str = "float32"
) -> dict:
    """Return config.json of one part.   names: as in `architecture`.   ids: `token_ids`, with nulls too, as
    transformers would otherwise use defaults of other tokenizers."""
    model = family_of(config).hf[part]
    # Else transformers ends the longest texts of a Marian with the token 0
    unforced = {"forced_eos_token_id": None} if model.constants.get("is_encoder_decoder") else {}
    if model.all_ids:
        end = next((ids[role] for role in ("eos_token_id", "sep_token_id") if ids.get(role) is not None), 0)
        ids = {name: end if number is None else number for name, number in ids.items()}
    return {
        "architectures": [name for name in [architecture(config, part, names)] if name],
        **model.constants,
        **fields(config, part),
        **_labels(config),
        **ids,
        **unforced,
        "dtype": dtype,
    }


def _labels(config) -> dict:
    """Return the fields of config.json that name the labels of a task's head."""
    labels = getattr(config, "labels", ())
    named = {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
    return named if labels else {}


def _json(fields: dict) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _hash(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if is_file(file) else None


def check_replaceable(folder: Path, run: str) -> None:
    """Raise UserError if the folder, local or gs://, holds anything but an earlier export of a run of this identity, or
    contains the current directory."""
    if not in_cloud(folder) and Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"export --to {folder}: the export would replace the current directory; give a new folder")
    inside = _check_only(folder, {model.folder for family in FAMILIES.values() for model in family.hf.values()} - {""})
    if not inside:
        return
    if MARK not in inside:
        raise UserError(f"export --to {folder}: holds {inside[0]} but no {MARK}: it is no export; give a new folder")
    mark = None
    with contextlib.suppress(ValueError):
        mark = json.loads((folder / MARK).read_bytes())
    if not isinstance(mark, dict) or mark.get("run") != run:
        raise UserError(f"export --to {folder}: holds another run's export; give a new folder, or remove this one")
    if CARD in inside and mark.get("card") != _hash(folder / CARD):
        raise UserError(f"export --to {folder}: its {CARD} was edited; give a new folder, or move that file away")


def _check_only(folder: Path, parts: set[str]) -> list[str]:
    """Return the names of the folder's entries. UserError if one does not belong to an export."""
    if is_file(folder):
        raise UserError(f"export --to {folder}: is a file; give a new folder")
    inside = sorted(entry.name for entry in entries(folder))
    known = (*FILES, *TOKENIZER_FILES, *parts, MARK)
    if foreign := [name for name in inside if name not in known and not SHARD.fullmatch(name)]:
        raise UserError(f"export --to {folder}: holds {foreign[0]}, so it is not an export; give a new folder")
    for part in parts.intersection(inside):
        _check_only(folder / part, set())
    return inside


def _replace(folder: Path, new: Path) -> None:
    """Replace `folder` by the folder `new`; a power cut leaves one or the other."""
    sync(new)
    previous = folder.with_name(f".{folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    put(new, folder)
    shutil.rmtree(previous, ignore_errors=True)
