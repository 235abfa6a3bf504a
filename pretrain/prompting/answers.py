"""What a causal decoder answers, token by token the likeliest."""

from collections.abc import Sequence

import flax.linen as nn
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.core.parameters import Params
from pretrain.generation.decoding import generate
from pretrain.generation.loop import ready
from pretrain.generation.settings import Decoding
from pretrain.prompting.prompts import Prompt, Prompter


def answers(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Prompt],
    prompter: Prompter,
    stop: str,
    max_tokens: int,
    mesh: Mesh,
) -> list[str]:
    """The text after each prompt without its target, up to `stop`, the end of a document, or `max_tokens` tokens.

    UserError for a `stop` that the tokenizer never writes.
    """
    if not prompter.keeps(stop):
        raise UserError(f"--stop {stop!r}: the run's tokenizer loses it, no text ends; give another, like --stop .")
    tokenizer = prompter.tokenizer
    alone = tokenizer.decode_batch([[token] for token in range(tokenizer.get_vocab_size())])
    last = {token for token, text in enumerate(alone) if stop in text} | ({prompter.end} - {None})
    asked = [prompt.texts[0].tokens.tolist() for prompt in prompts]
    decoding = Decoding(max_tokens=max_tokens, stop=tuple(sorted(last)))
    written = generate(model, ready(model, params), asked, decoding, mesh=mesh)
    whole = [before + after for before, (after,) in zip(asked, written, strict=True)]
    # Cut from the whole: some tokenizers write a first word without its blank.
    pairs = zip(tokenizer.decode_batch(asked), tokenizer.decode_batch(whole), strict=True)
    return [text[len(before) :].split(stop)[0] for before, text in pairs]
