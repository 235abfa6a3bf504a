"""Read the weights of a Hugging Face model as our parameters; and how a model begins with the weights of any other: of
its own family or of one that it continues, whose rows for positions are copied on where it has more of them, and the
rows for more tokens are the mean of its."""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
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
from pretrain.huggingface.tensors import Tensor, absent, architecture, heads_in, tensors

LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Constants that old transformers stored
BUFFERS = ("position_ids", "token_type_ids", ".attn.bias", ".attn.masked_bias", "pos_encoding")
ANEW = "start them anew with --init-heads-anew"
POSITION, TOKEN, LABEL = "position", "vocab", "label"  # the axes of what has a row for each

log = logging.getLogger(__name__)


def load(
    source: str | Path, config, shapes: Mapping, tokenizer_path: Path, start: Callable[[], Mapping] | None = None
) -> Params:
    """The parameters of a Hugging Face model: a nested dict of float32 NumPy arrays; padding rows are zeros.

    Its positions are copied on where `config` has more, and it may be of a family that this one continues.

    source: a folder as `export` writes it, or 'discriminator=DIR,generator=DIR' for a model of several parts.
    config: what the model must be.   shapes: nested dict of arrays or ShapeDtypeStructs, the parameters of `config`.
    tokenizer_path: folder of the corpus's tokenizer, whose vocabulary must be the model's.
    start: gives random parameters. Then heads that the source lacks start from them, a trunk without any will do, and
    heads that this model has no place for are left out; without, each is an error.

    UserError for a config field that differs, another vocabulary, and tensors that are missing, unexpected or of
    another shape; safetensors only, in one file or sharded.
    """
    check_class(str(source), config)
    there = config_from(source, family_of(config))
    check_same(source, there, config)
    begun = {path: np.zeros(leaf.shape, np.float32) for path, leaf in leaves(shapes)}
    if start is not None:
        begun = {path: np.array(leaf) for path, leaf in leaves(start())}
    resized, read = _resized(begun, config, config, there), {}  # as there
    given = nest({name: resized[path] for path, name in counterparts(there, config).items() if path in begun})
    for part, folder in folders(source, family_of(there)).items():
        check_vocabulary(folder, tokenizer_path, there, config)
        stored = _Tensors(folder, family_of(there).hf[part])
        for name, tensor in _wanted(stored, given, there, part, heads_anew=start is not None).items():
            array = stored.read(name)
            if array.shape != tensor.shape:
                raise UserError(f"{folder}: {name} has shape {array.shape}, this model needs {tensor.shape}")
            _take(tensor, array, read, part, f"{folder}: {name}")
    found = to_target(str(source), dict(leaves(given)), there, config)
    check_heads(source, begun.keys() - found.keys(), (), anew=start is not None)
    return nest(begun | found)


def _take(tensor: Tensor, array: np.ndarray, read: dict[tuple, tuple[str, str]], part: str, setting: str) -> None:
    """Write a stored array into the parameters that its tensor holds.

    read: what was read before -> (part, setting); UserError where the same parameter has another value.
    """
    for piece in tensor.pieces:
        new = array[piece.place]
        if piece.origin not in read:
            read[piece.origin] = part, setting
            piece.view[...] = new
        elif not np.array_equal(piece.view, new):
            other_part, other = read[piece.origin]
            another = f"the {other_part}'s" if other_part != part else other.split(": ")[-1]
            raise UserError(f"{setting} differs from {another}, but the model shares it; give the parts of one model")


def check_vocabulary(folder: Path, tokenizer_path: Path, source, target) -> None:
    """UserError when the folder has a tokenizer whose vocabulary is not that of the corpus's tokenizer, but for tokens
    that follow all those of its model.   source, target: the configs of the models."""
    before, after = _vocabulary(folder), _vocabulary(Path(tokenizer_path))
    if before is None and source.vocab_size < target.vocab_size:
        raise UserError(
            f"{folder}: has {source.vocab_size:,} tokens and no tokenizer, the corpus {target.vocab_size:,}; copy its "
            f"tokenizer there and prepare the corpus with --tokenizer {folder}"
        )
    if before is None or before == after:
        return
    differing = sorted(before.items() ^ after.items(), key=lambda item: item[::-1])
    token, index = differing[0]
    if index < source.vocab_size or any(token in before for token, _ in differing):
        raise UserError(
            f"{folder}: its tokenizer gives {token!r} the id {before.get(token)}, "
            f"the corpus's {after.get(token)}; prepare the corpus with --tokenizer {folder}"
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id, None where the folder has no tokenizer."""
    if not any((folder / name).exists() for name in tokenizers.FILES):
        return None
    try:
        return tokenizers.load(folder).tokenizer.get_vocab()
    except UserError as error:
        raise UserError(f"{folder}: its tokenizer cannot be read ({error}); copy the folder again") from error


class _Tensors:
    """The tensors of a folder by name, read from disk one at a time; legacy names are brought up to date, and a trunk
    without heads, which transformers saves without its name, is given it. A tied one stands for the other."""

    def __init__(self, folder: Path, model: HuggingFace):
        self.folder = folder
        self.found = {}  # name -> (open file, name in the file)
        for file in _tensor_files(folder):
            try:
                handle = safe_open(file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{folder}: {file.name} cannot be read ({error}); copy it again") from error
            for stored in handle.keys():  # noqa: SIM118 (the handle is no dict)
                name = stored
                for old, new in LEGACY.items():
                    name = name.replace(old, new)
                self.found[name] = (handle, stored)
        if not any(name.startswith(model.trunk) for name in self.found):
            self.found = {model.trunk + name: place for name, place in self.found.items()}
        for target, source in model.tied.items():
            if target in self.found:
                self.found.setdefault(source, self.found[target])

    def read(self, name: str) -> np.ndarray:
        handle, stored = self.found[name]
        return handle.get_tensor(stored).astype(np.float32)


def _tensor_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index lists."""
    whole, index = folder / WHOLE, folder / INDEX
    if whole.exists():
        return [whole]
    if not index.exists():
        old = [name for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack") if (folder / name).exists()]
        cure = f"{old[0]} is not read: load and save it with transformers" if old else "give a folder with weights"
        raise UserError(f"{folder}: has no {WHOLE}; {cure}")
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{folder}: {index.name} cannot be read ({error!r}); copy it again") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UserError(f"{folder}: {index.name} lists {', '.join(missing)}, not there; copy the folder again")
    return [folder / name for name in names]


def _wanted(stored: _Tensors, params: Params, config, part: str, heads_anew: bool) -> dict[str, Tensor]:
    """What is to be read of a part's tensors. UserError for those that are missing, that this model has no place for,
    or tied ones that are not equal.   heads_anew: whether heads may be missing, and others be left out."""
    folder, model, spared = stored.folder, family_of(config).hf[part], absent(config, part, params)
    wanted = {
        name: one for name, one in tensors(params, config, part).items() if name in stored.found or name not in spared
    }
    known = {row.hf[part].name for row in family_of(config).every_parameter(config) if part in row.hf}
    _check_layers(stored, wanted, known, config, part)
    needed = architecture(config, part, params) or f"model with {', '.join(heads_in(config, params))}"
    missing = [name for name in wanted if name not in stored.found]
    named = {head.name for head in family_of(config).heads}
    origins = {name: wanted[name].pieces[0].origin[0] for name in missing}
    heads = [
        name for name, path in origins.items() if path.partition("/")[0] in named or not name.startswith(model.trunk)
    ]
    if lacking := [name for name in missing if not heads_anew or name not in heads]:
        for name in model.untied.keys() & {*lacking}:
            raise UserError(f"{folder}: has no {name}; {model.untied[name]}")
        there = " or ".join(architectures(folder)) or "model"
        said = "copy it again" if there == needed else f"it is a {there} and this recipe needs a {needed}"
        raise UserError(f"{folder}: has no {listed(lacking)}; {said}" + (f"; {ANEW}" if missing == heads else ""))
    for target, source in model.tied.items():
        both = target in stored.found and source in stored.found
        if both and not np.array_equal(stored.read(target), stored.read(source)):
            raise UserError(
                f"{folder}: {target} differs from {source}, but this model ties them; give a folder of a tied model"
            )
    others = [name for name in stored.found if name not in wanted and name not in model.tied]
    unexpected = [name for name in others if name not in known and not name.endswith(BUFFERS)]
    if heads_anew:
        unexpected = [name for name in unexpected if name.startswith(model.trunk)]
    if unexpected:
        raise UserError(
            f"{folder}: has {listed(unexpected)}, for which a {needed} has no place; give a folder of that class"
        )
    check_heads(folder, missing, others, anew=True)
    return {name: tensor for name, tensor in wanted.items() if name not in missing}


def _check_layers(stored: _Tensors, wanted: Collection[str], known: Collection[str], config, part: str) -> None:
    """UserError where a part's tensors are of another number of layers than its config.json says.

    wanted: the tensors of so many.   known: the names of all, with {layer}.
    """
    before = {name.partition("{layer}")[0] for name in known if "{layer}" in name}

    def layers(names: Collection[str]) -> set[str]:
        return {
            start + name.removeprefix(start).partition(".")[0]
            for name in names
            for start in before
            if name.startswith(start)
        }

    needed, there = layers(wanted), layers(stored.found)
    if not there or needed == there:
        return
    paths = {name: getattr(place, "path", place) for name, place in family_of(config).hf[part].fields.items()}
    depths = {name: attrgetter(path)(config) for name, path in paths.items() if path.endswith("depth")}
    said = ", ".join(f"{name}={depth}" for name, depth in depths.items())
    has = f"no {listed(needed - there)}" if needed - there else f"{listed(there - needed)}, too"
    cure = "correct that, or copy the folder again"
    raise UserError(f"{stored.folder}: config.json has {said}, but the weights have {has}; {cure}")


def counterparts(source, target) -> dict[str, str]:
    """Path of a parameter of a model of config `target` -> of that which it begins as in one of `source`; of those that
    have one. Scores of labels have one where the source knows these."""
    known = labels_of(source) == labels_of(target) or label_places(labels_of(source), labels_of(target)) is not None
    there = {row.path for row in family_of(source).every_parameter(source) if known or LABEL not in row.axes}
    names = renamed(source, target)
    begun = {p.path: names.get(p.path, p.path) for p in family_of(target).every_parameter(target)}
    return {path: name for path, name in begun.items() if name in there}


def labels_of(config) -> tuple[str, ...]:
    return getattr(config, "labels", ())


def label_places(before: Sequence[str], after: Sequence[str]) -> list[int] | None:
    """Where labels are among others, which may be of several tasks (TASK/LABEL); None where they are not there, or more
    than one task has them."""
    tasks = dict.fromkeys(["", *(f"{label.partition('/')[0]}/" for label in before)])
    having = [task for task in tasks if after and {task + label for label in after} <= {*before}]
    return [before.index(having[0] + label) for label in after] if len(having) == 1 else None


def to_target(setting: str, params: Mapping[str, np.ndarray], source, target) -> dict[str, np.ndarray]:
    """What parameters of a model of config `source` are in one of `target`, path -> array."""
    named = {path: params[name] for path, name in counterparts(source, target).items() if name in params}
    before, after = (getattr(config, "positions", None) for config in (source, target))
    if before and after and before != after:
        log.warning("%s: its %s positions are copied on to %s", setting, f"{before:,}", f"{after:,}")
    if more := target.vocab_size - source.vocab_size:
        log.warning("%s: %s tokens that it lacks begin as the mean of the others", setting, f"{more:,}")
    if changed := other_pattern(source, target):
        log.warning("%s: its weights go on with another sparse pattern: %s", setting, changed)
    return _resized(named, target, source, target)


def check_heads(setting: str | Path, lacking: Collection[str], others: Collection[str], anew: bool) -> None:
    """Say what a source lacks, which starts anew, and what it has beside. UserError for what may not start anew."""
    if lacking and not anew:
        raise UserError(f"{setting}: has no {listed(lacking)}; give the recipe the heads that it has, or {ANEW}")
    if lacking:
        log.warning("%s: these start anew: %s", setting, listed(lacking))
    if others:
        log.warning("%s: left out %s, which this model does not use", setting, listed(others))


def listed(names: Collection[str]) -> str:
    """The first of them."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def other_pattern(source, target) -> str:
    """The fields of a sparse pattern in which two configs differ, '' where they see the same keys."""
    before, after = (getattr(config, "pattern", Pattern()) for config in (source, target))
    names = fields_of(after.name) if before.name == after.name else ("name",)
    both = {name: (getattr(before, name), getattr(after, name)) for name in names}
    return ", ".join(f"model.pattern.{name} is {x} there and {y} here" for name, (x, y) in both.items() if x != y)


def _resized(params: Mapping[str, np.ndarray], target, before, after) -> dict[str, np.ndarray]:
    """Parameters by their paths in a model of config `target`, with the positions and tokens of config `before`, with
    those of `after`: without the last ones, or with the first positions again, and tokens that are the others' mean;
    and with its labels, those of `before` where that knows them, else any of so many."""
    axes = {parameter.path: parameter.axes for parameter in family_of(target).every_parameter(target)}
    positions, resized = getattr(after, "positions", None), {}
    places, any_places = label_places(labels_of(before), labels_of(after)), np.arange(len(labels_of(after)) or 2)
    for path, array in params.items():
        if path not in axes:  # a product beside a matrix
            resized[path] = array
            continue
        if POSITION in axes[path] and positions is not None:
            axis = axes[path].index(POSITION)
            array = np.take(array, np.arange(positions) % array.shape[axis], axis)
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
