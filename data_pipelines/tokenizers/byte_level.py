"""Byte-pair encoding of bytes, as GPT-2 and RoBERTa have it: no text is unknown, and white space is kept."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data_pipelines.tokenizers.made import END_OF_TEXT, Made, names_in, special_ids
from data_pipelines.tokenizers.training import Training, bounded, check_size, count_words, merge, pre_tokenized

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


class Flavour(NamedTuple):
    first: tuple[str, ...]  # special tokens at ids 0, 1, ...
    last: tuple[str, ...]  # special tokens after all others
    config: dict  # of tokenizer_config.json


FLAVOURS = {
    "roberta": Flavour(
        ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
        (),
        {"tokenizer_class": "RobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gpt2": Flavour(
        (),
        (END_OF_TEXT,),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT},
    ),
}
SPECIALS = tuple(FLAVOURS)


def count(texts: Iterable[str], options: Training) -> Counter:
    """Words with the space before them, their bytes written as characters."""
    return count_words(texts, pre_tokenized(None, pre_tokenizers.ByteLevel(add_prefix_space=False)))


def learn(words: Counter, options: Training) -> Made:
    """At most `vocab_size` tokens: all bytes and the special tokens, then what is merged (Sennrich et al. 2016)."""
    flavour = FLAVOURS[options.specials or SPECIALS[0]]
    check_size(options, len(ALPHABET) + len(flavour.first) + len(flavour.last))
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size - len(flavour.last),
        special_tokens=list(flavour.first),
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    model = merge(bounded(words), models.BPE(), trainer)
    vocab = model["vocab"] | {token: len(model["vocab"]) + index for index, token in enumerate(flavour.last)}
    return assemble(vocab, list(map(tuple, model["merges"])), flavour.config)


def assemble(vocab: dict[str, int], merges: list[tuple[str, str]], config: dict) -> Made:
    """The tokenizer that Hugging Face's RoBERTa or GPT-2 class builds of these. config: its tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    prefix = config.get("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    flavour = next(each for each in FLAVOURS.values() if each.config["tokenizer_class"] == config["tokenizer_class"])
    specials = [AddedToken(token, special=True, lstrip=token == "<mask>") for token in flavour.first + flavour.last]
    tokenizer.add_special_tokens([token for token in specials if token.content in vocab])
    if "<s>" in vocab and "</s>" in vocab and flavour.first:
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]), trim_offsets=True, add_prefix_space=prefix
        )
    return Made(tokenizer, special_ids(tokenizer, names_in(config)), config)
