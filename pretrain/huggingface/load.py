"""Read the weights of a Hugging Face model as parameters, and convert one model's parameters to another's initial ones.

The source is of the same family or of one that the target continues. If the target has more positions, the source's are
repeated; embeddings of further tokens start as the mean of the source's.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored as tokenizers
from models.attention.patterns.pattern import Pattern, fields_of
from models.blocks.embeddings import padded_vocab
from models.core.family import HuggingFace
from models.core.parameters import Params, leaves, nest
from models.families.registry import family_of, renamed
from pretrain.huggingface.config import architectures, check_class, check_same, config_from, folders
from pretrain.huggingface.export import INDEX, WHOLE
from pretrain.huggingface.tensors import Tensor, absent, architecture, heads_in, summed, tensors

LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Constants that old versions of transformers stored
BUFFERS = ("position_ids", "token_type_ids", ".attn.bias", ".attn.masked_bias", "pos_encoding")
ANEW = "start them anew with --init-heads-anew"
TOKEN, LABEL = "vocab", "label"  # axes of parameters with one row for each
REPEATED = {"position": "positions", "type": "types"}  # axes whose first rows are repeated for more -> config field

log = logging.getLogger(__name__)


def load(
    source: str | Path, config, shapes: Mapping, tokenizer_path: Path, start: Callable[[], Mapping] | None = None
) -> Params:
    """Load a Hugging Face model -> nested dict of float32 NumPy arrays; padding rows are zeros.

    Positions are repeated if `config` has more, and the source may be of a family that `config`'s continues.

    source: a folder as written by `export`, or 'discriminator=DIR,generator=DIR' for a model of several parts.
    config: of the model to initialize.   shapes: nested dict of arrays or ShapeDtypeStructs, its parameters.
    tokenizer_path: folder of the corpus's tokenizer, which must have the source's vocabulary.
    start: makes random parameters. Missing heads then start from them, and heads that the model does not have are left
    out; with None, each is an error.

    UserError for a differing config field or vocabulary, and for tensors that are missing, unexpected or of another
    shape. Reads safetensors only, in one file or sharded.
    """
    check_class(str(source), config)
    source_config = config_from(source, family_of(config))
    check_same(source, source_config, config)
    initial = {path: np.zeros(leaf.shape, np.float32) for path, leaf in leaves(shapes)}
    if start is not None:
        initial = {path: np.array(leaf) for path, leaf in leaves(start())}
    resized, read = _resized(initial, config, config, source_config), {}  # with the source's sizes
    names = counterparts(source_config, config)
    params = nest({name: resized[path] for path, name in names.items() if path in initial})
    for part, folder in folders(source, family_of(source_config)).items():
        check_vocabulary(folder, tokenizer_path, source_config, config)
        stored = _Tensors(folder, family_of(source_config).hf[part])
        for name, tensor in _wanted(stored, params, source_config, part, heads_anew=start is not None).items():
            array = stored.read(name)
            if array.shape != tensor.shape:
                raise UserError(f"{folder}: {name} has shape {array.shape}, not {tensor.shape}; copy it again")
            _take(tensor, array, read, part, f"{folder}: {name}")
    loaded = summed(to_target(str(source), dict(leaves(params)), source_config, config), config, sign=-1)
    check_heads(source, initial.keys() - loaded.keys(), (), anew=start is not None)
    return nest(initial | loaded)


def _take(tensor: Tensor, array: np.ndarray, read: dict[tuple, tuple[str, str]], part: str, setting: str) -> None:
    """Write a stored array into the parameters of its tensor.   read: origin of pieces read before -> (part, setting);
    UserError if the same parameter had another value."""
    for piece in tensor.pieces:
        new = array[piece.place]
        if piece.origin not in read:
            read[piece.origin] = part, setting
            piece.view[...] = new
        elif not np.array_equal(piece.view, new):
            other_part, other = read[piece.origin]
            another = f"the {other_part}'s" if other_part != part else other.split(": ")[-1]
            raise UserError(f"{setting} differs from {another}, but the model shares them; give the parts of one model")


def check_vocabulary(folder: Path, tokenizer_path: Path, source, target) -> None:
    """Raise UserError if the vocabulary of the folder's tokenizer differs from the corpus's, except for tokens added
    after those of the source model.   source, target: configs of the models."""
    before, after = _vocabulary(folder), _vocabulary(Path(tokenizer_path))
    if before == after:
        return
    if before is None:
        *names, last = tokenizers.FILES
        raise UserError(
            f"{folder}: has no {', '.join(names)} or {last} to compare with the corpus's tokenizer; write the model's "
            "into it (by save_pretrained of transformers' AutoTokenizer), and prepare the corpus with --tokenizer "
            f"{folder}"
        )
    differing = sorted(before.items() ^ after.items(), key=lambda item: item[::-1])
    token, index = differing[0]
    if index < source.vocab_size or any(token in before for token, _ in differing):
        raise UserError(
            f"{folder}: its tokenizer gives {token!r} the id {before.get(token)}, but "
            f"the corpus's {after.get(token)}; prepare the corpus with --tokenizer {folder}"
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Read token -> id; None if the folder has no tokenizer."""
    if not any((folder / name).exists() for name in tokenizers.FILES):
        return None
    try:
        return tokenizers.load(folder).tokenizer.get_vocab()
    except UserError as error:
        raise UserError(f"{folder}: its tokenizer cannot be read ({error}); copy the folder again") from error


class _Tensors:
    """Reads the tensors of a folder by name, one at a time. Legacy names are replaced, the prefix of the trunk is added
    where transformers omits it (a model without heads), and of tied tensors one may stand for the other."""

    def __init__(self, folder: Path, model: HuggingFace):
        self.folder = folder
        self.found = {}  # name -> (open file, name in the file)
        beside = folder / f"{model.beside}.safetensors"
        for file in (*_tensor_files(folder), *[beside] * beside.exists()):
            try:
                handle = safe_open(file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{folder}: {file.name} cannot be read ({error}); copy it again") from error
            for stored in handle.keys():  # noqa: SIM118 (not a dict)
                name = stored
                for old, new in LEGACY.items():
                    name = name.replace(old, new)
                self.found[name] = (handle, stored)
        if not any(name.startswith(model.prefix) for name in self.found):
            bare = lambda name: not (model.beside and name.startswith(model.beside))
            self.found = {model.prefix * bare(name) + name: place for name, place in self.found.items()}
        for target, source in model.tied.items():
            if target in self.found:
                self.found.setdefault(source, self.found[target])

    def read(self, name: str) -> np.ndarray:
        handle, stored = self.found[name]
        return handle.get_tensor(stored).astype(np.float32)


def _tensor_files(folder: Path) -> list[Path]:
    """List the files with weights: model.safetensors, or the shards in its index."""
    whole, index = folder / WHOLE, folder / INDEX
    if whole.exists():
        return [whole]
    if not index.exists():
        old = [name for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack") if (folder / name).exists()]
        cure = f"load {old[0]} with transformers and save it as safetensors" if old else "give a folder with weights"
        raise UserError(f"{folder}: has no {WHOLE}; {cure}")
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{folder}: {index.name} cannot be read ({error!r}); copy it again") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UserError(f"{folder}: {index.name} lists {', '.join(missing)}, which is missing; copy the folder again")
    return [folder / name for name in names]


def _wanted(stored: _Tensors, params: Params, config, part: str, heads_anew: bool) -> dict[str, Tensor]:
    """Select the tensors of a part to read. UserError for tensors that are missing or unexpected, and for unequal tied
    ones.   heads_anew: heads may be missing, and others are left out."""
    folder, model, spared = stored.folder, family_of(config).hf[part], absent(config, part, params)
    wanted = {
        name: tensor
        for name, tensor in tensors(params, config, part).items()
        if name in stored.found or name not in spared
    }
    known = {row.hf[part].name for row in family_of(config).every_parameter(config) if part in row.hf}
    needed = architecture(config, part, params) or f"model with {', '.join(heads_in(config, params))}"
    missing = [name for name in wanted if name not in stored.found]
    named = {head.name for head in family_of(config).heads}
    origins = {name: wanted[name].pieces[0].origin[0] for name in missing}
    heads = [
        name for name, path in origins.items() if path.partition("/")[0] in named or not name.startswith(model.prefix)
    ]
    if lacking := [name for name in missing if not heads_anew or name not in heads]:
        for name in model.untied.keys() & {*lacking}:
            raise UserError(f"{folder}: has no {name}; {model.untied[name]}")
        present = " or ".join(architectures(folder)) or "model"
        cause = "copy it again" if present == needed else f"it is a {present} and this recipe needs a {needed}"
        raise UserError(f"{folder}: has no {listed(lacking)}; {cause}" + (f"; {ANEW}" if missing == heads else ""))
    for target, source in model.tied.items():
        both = target in stored.found and source in stored.found
        if both and not np.array_equal(stored.read(target), stored.read(source)):
            raise UserError(f"{folder}: {target} differs from {source}, but this model ties them; give a tied model")
    for name in model.zeros:
        if name in stored.found and stored.read(name).any():
            raise UserError(f"{folder}: {name} is not zero, which this model has no place for; give another folder")
    others = [name for name in stored.found if name not in wanted and name not in (*model.tied, *model.zeros)]
    unexpected = [name for name in others if name not in known and not name.endswith(BUFFERS)]
    if heads_anew:
        unexpected = [name for name in unexpected if name.startswith(model.prefix)]
    if unexpected:
        raise UserError(f"{folder}: has {listed(unexpected)}, which this {needed} lacks; mend its config.json")
    check_heads(folder, missing, others, anew=True)
    return {name: tensor for name, tensor in wanted.items() if name not in missing}


def counterparts(source, target) -> dict[str, str]:
    """Map paths of parameters in a model of config `target` to those in one of `source` that they start from. Label
    scores are included if the source has these labels."""
    known = labels_of(source) == labels_of(target) or label_places(labels_of(source), labels_of(target)) is not None
    present = {row.path for row in family_of(source).every_parameter(source) if known or LABEL not in row.axes}
    new_names = renamed(source, target)
    names = {p.path: new_names.get(p.path, p.path) for p in family_of(target).every_parameter(target)}
    return {path: name for path, name in names.items() if name in present}


def labels_of(config) -> tuple[str, ...]:
    return getattr(config, "labels", ())


def label_places(before: Sequence[str], after: Sequence[str]) -> list[int] | None:
    """Return the indices of labels among others, which may belong to several tasks (TASK/LABEL); None if they are
    missing, or if more than one task has them."""
    tasks = dict.fromkeys(["", *(f"{label.partition('/')[0]}/" for label in before)])
    having = [task for task in tasks if after and {task + label for label in after} <= {*before}]
    return [before.index(having[0] + label) for label in after] if len(having) == 1 else None


def to_target(setting: str, params: Mapping[str, np.ndarray], source, target) -> dict[str, np.ndarray]:
    """Convert parameters of a model of config `source` to one of `target`: path -> array."""
    params = params if type(source) is type(target) else summed(params, source)
    named = {path: params[name] for path, name in counterparts(source, target).items() if name in params}
    for field in REPEATED.values():
        before, after = (getattr(config, field, None) for config in (source, target))
        if before and after and before != after:
            log.warning("%s: its %s %s are repeated up to %s", setting, f"{before:,}", field, f"{after:,}")
    if more := target.vocab_size - source.vocab_size:
        log.warning("%s: embeddings of %s tokens that it lacks start as the mean of the others", setting, f"{more:,}")
    if changed := other_pattern(source, target):
        log.warning("%s: its weights are used with another sparse pattern: %s", setting, changed)
    for field in ("global_base", "local_base"):
        before, after = (getattr(config, field, None) for config in (source, target))
        if None not in (before, after) and before != after:
            message = "%s: its weights are used with other rotary positions: model.%s is %g there and %g here"
            log.warning(message, setting, field, before, after)
    return _resized(named, target, source, target)


def check_heads(setting: str | Path, lacking: Collection[str], others: Collection[str], anew: bool) -> None:
    """Warn about heads that a source lacks, which start anew (UserError if they may not), and about others."""
    if lacking and not anew:
        raise UserError(f"{setting}: has no {listed(lacking)}; give the recipe the heads that it has, or {ANEW}")
    if lacking:
        log.warning("%s: these start from random weights: %s", setting, listed(lacking))
    if others:
        log.warning("%s: ignored %s, which this model does not use", setting, listed(others))


def listed(names: Collection[str]) -> str:
    """List the first few names."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def other_pattern(source, target) -> str:
    """Describe the fields in which the sparse patterns of two configs differ; '' if they are the same."""
    before, after = (getattr(config, "pattern", Pattern()) for config in (source, target))
    names = fields_of(after.name) if before.name == after.name else ("name",)
    both = {name: (getattr(before, name), getattr(after, name)) for name in names}
    return ", ".join(f"model.pattern.{name} is {x} there and {y} here" for name, (x, y) in both.items() if x != y)


def _resized(params: Mapping[str, np.ndarray], target, before, after) -> dict[str, np.ndarray]:
    """Resize parameters, with paths in a model of config `target`, from the sizes of config `before` to those of
    `after`: positions, types and tokens are cut off at the end, or further positions and types repeat the first ones
    and further tokens are the mean; labels are taken from `before` if it has them, else arbitrary ones."""
    axes = {parameter.path: parameter.axes for parameter in family_of(target).every_parameter(target)}
    resized = {}
    places, any_places = label_places(labels_of(before), labels_of(after)), np.arange(len(labels_of(after)) or 2)
    for path, array in params.items():
        if path not in axes:  # a low-rank product
            resized[path] = array
            continue
        for axis, field in enumerate(map(REPEATED.get, axes[path])):
            if (rows := getattr(after, field or "", None)) is not None:
                array = np.take(array, np.arange(rows) % array.shape[axis], axis)
        for axis in (axis for axis, name in enumerate(axes[path]) if name == LABEL):
            array = np.take(array, any_places % array.shape[axis] if places is None else places, axis)
        if TOKEN in axes[path] and before.vocab_size != after.vocab_size:
            array = _of_tokens(array, axes[path].index(TOKEN), before.vocab_size, after.vocab_size)
        resized[path] = array
    return resized


def _of_tokens(array: np.ndarray, axis: int, before: int, after: int) -> np.ndarray:
    rows = np.moveaxis(array, axis, 0)
    resized = np.zeros((padded_vocab(after), *rows.shape[1:]), array.dtype)
    kept = min(before, after)
    resized[:kept] = rows[:kept]
    resized[before:after] = rows[:before].mean(0)
    return np.moveaxis(resized, 0, axis)
