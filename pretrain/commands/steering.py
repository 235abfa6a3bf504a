"""The options of `generate` that steer texts, as the program that writes them."""

from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import numpy as np

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import Made
from models.blocks.embeddings import padded_vocab
from models.core.parameters import Params
from pretrain.generation.loop import program
from pretrain.steering.discriminator import load
from pretrain.steering.loop import steered_program
from pretrain.steering.perturbation import Aim
from pretrain.steering.settings import Steering
from pretrain.steering.words import bag


def program_of(
    words: Path | None,
    discriminator: Path | None,
    label: str | None,
    steering: Steering,
    made: Made,
    model: nn.Module,
    params: Params,
) -> Callable:
    """What `generate` takes for its program; words of several tokens are named in a line. UserError for options that
    do not go together."""
    aim = Aim()
    if (discriminator is None) != (label is None):
        raise UserError("--discriminator and --label: give both, a folder and one of its labels, or neither")
    if words is not None:
        tokens, left_out = bag(words, Encoder(made.tokenizer), padded_vocab(model.config.vocab_size))
        if left_out:
            print(f"left out of --words {words}, as they are several tokens: {', '.join(left_out)}")
        aim = aim._replace(words=tokens)
    if discriminator is not None:
        found = load(discriminator, params)
        if label not in found.labels:
            raise UserError(unknown(f"--label: {discriminator} has no label", label, found.labels))
        aim = aim._replace(discriminator=(found.kernel, found.bias, np.int32(found.labels.index(label))))
    if words is not None or discriminator is not None:
        return steered_program(aim, steering)
    if steering != Steering():
        raise UserError("--steering: has no effect without --words or --discriminator; give one of them")
    return program
