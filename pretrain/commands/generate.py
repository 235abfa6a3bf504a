"""`python -m pretrain generate`: what a run's model writes after prompts, or puts in the place of masks."""

import dataclasses
from collections.abc import Sequence

import jax

from data_pipelines.cloud import local_folder
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import prefixes, stored
from data_pipelines.tokenizers.made import Made
from pretrain.commands.options import Generate
from pretrain.commands.steering import program_of
from pretrain.generation.decoding import check_whole_rows, generate
from pretrain.generation.fillings import fill, fills
from pretrain.objectives.next_token_prediction import delimiter
from pretrain.prompting.prompts import unescaped
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.restore import Restored, restore, warn_beyond_trained
from pretrain.training.trained import merge
from tpu.mesh import divided_by, named_mesh, row_mesh

MASK = "[MASK]"  # in prompts, whatever the tokenizer calls it
OF_FILLINGS = "run", "prompt", "prompts", "number", "step"  # the options that a masked model has a use for


def write_texts(options: Generate, prompts: list[str]) -> None:
    """Print texts or fillings. UserError in one line for what cannot be made."""
    directory = RunDirectory(options.run)
    devices = jax.local_devices()
    mesh = row_mesh(devices, [1]) if options.mesh is None else named_mesh(options.mesh, devices)
    check_whole_rows(options.mesh, mesh)
    restored = restore(directory, options.step, mesh)
    with local_folder(directory.tokenizer) as folder:
        made = stored.load(folder)
    if fills(restored.assembly.model):
        if given := _of_texts_alone(options):
            raise UserError(f"{', '.join(given)}: no effect on a model that fills masks; leave out what writes texts")
        _print_fillings(options, restored, made, prompts)
    else:
        _print_texts(options, restored, made, prompts)


def _of_texts_alone(options: Generate) -> list[str]:
    """The options given, other than their defaults, that say how texts are written."""
    fields = [("--", field, options) for field in dataclasses.fields(options)]
    fields = [one for one in fields if one[1].name not in (*OF_FILLINGS, "steering")]
    fields += [("--steering.", field, options.steering) for field in dataclasses.fields(options.steering)]
    changed = [(prefix, field.name) for prefix, field, of in fields if getattr(of, field.name) != field.default]
    return [prefix + name.replace("_", "-") for prefix, name in changed]


def _print_texts(options: Generate, restored: Restored, made: Made, prompts: list[str]) -> None:
    encoded = encode(made, prompts)
    stops = [unescaped(written) for written in options.stop]
    ends = {tokens[0] for tokens in encode(made, stops) if len(tokens) == 1}
    ends |= {made.special[role] for role in ("eod", "sep") if role in made.special}
    model, params = restored.assembly.model, merge(restored.params, restored.frozen)
    decoding = options.decoding(tuple(sorted(ends)))
    number = 1 if options.number is None else options.number
    aim = options.words, options.discriminator, options.label
    program = program_of(*aim, options.steering, made, model, params)
    before = [] if options.code is None else [prefixes.token(made, options.code)]
    asked, behind = encoded, []
    if (token := delimiter(restored.assembly.recipe.objective, made.special)) is not None:
        print("the run's rows are input and target: each prompt is an input, after which its target is written")
        asked, behind = [[] for _ in encoded], [token]
    begun = [before + tokens + behind for tokens in encoded]
    warn_beyond_trained(restored, max(map(len, begun)) + options.max_tokens - 1)
    doing("compiling, then writing")
    with divided_by(restored.mesh):
        texts = generate(model, params, begun, decoding, options.seed, number, restored.mesh, program)
    for index, (tokens, found) in enumerate(zip(asked, texts, strict=True)):
        for which, more in enumerate(found):
            if len(prompts) * len(found) > 1:
                print(f"== prompt {index + 1}, text {which + 1}")
            print(_text(made, tokens, more[:-1] if more[-1] in ends else more, stops))


def _text(made: Made, prompt: list[int], more: list[int], stop: Sequence[str]) -> str:
    """A prompt and what was written after it, up to the first of some texts there."""
    begin, text = made.tokenizer.decode(prompt), made.tokenizer.decode(prompt + more)
    ends = [text.find(one, len(begin)) for one in stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def _print_fillings(options: Generate, restored: Restored, made: Made, prompts: list[str]) -> None:
    """Rows as the model read them: between the tokens that begin and end one."""
    model, params = restored.assembly.model, merge(restored.params, restored.frozen)
    recipe, mask = restored.assembly.recipe, made.special["mask"]
    length, global_tokens = recipe.phases[-1].length, getattr(recipe.objective, "globals", 0)
    name = made.tokenizer.id_to_token(mask)
    number = 5 if options.number is None else options.number
    doing("compiling, then filling masks")
    for prompt in prompts:
        pieces = prompt.replace(name, MASK).split(MASK)
        if len(pieces) == 1:
            raise UserError(f"--prompt {prompt!r}: this model fills masks; write {MASK} where a word is missing")
        # White space before a mask belongs to the word there.
        parts = encode(made, [piece.rstrip() for piece in pieces[:-1]] + pieces[-1:])
        row = [made.special["cls"], *parts[0]]
        for part in parts[1:]:
            row += [mask, *part]
        row.append(made.special["sep"])
        for place, found in enumerate(fill(model, params, row, mask, length, number, global_tokens)):
            print(prompt if len(pieces) == 2 else f"{prompt} (mask {place + 1})")
            for token, probability in found:
                print(f"  {probability:.4f}  {made.tokenizer.decode([token], skip_special_tokens=False)}")


def encode(made: Made, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts, as those of a corpus: special tokens that a text spells are plain text."""
    return [tokens.tolist() for tokens in Encoder(made.tokenizer).tokens([*texts])]
