"""Byte-pair encoding (Sennrich et al. 2016): of bytes, as in GPT-2 and RoBERTa; of characters with </w> at the end of
words, as in GPT (Radford et al. 2018) and CTRL; and bytes alone, without merges.

Byte-level tokenizers know every text and keep white space. GPT and CTRL have no token that ends a document; those that
are trained here have GPT-2's, after all other tokens.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipelines.text.encoding import CTRL_WORD, byte_characters
from data_pipelines.tokenizers import training
from data_pipelines.tokenizers.made import END_OF_TEXT, Made, names_in, special_ids, surround
from data_pipelines.tokenizers.training import Training

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
END = "</w>"
CONTINUES = "@@"  # marks a token inside a word in CTRL's files, which do not mark the end of a word
UNKNOWN = "<unk>"
WHOLE = UNKNOWN, END_OF_TEXT  # not words, so without a mark
NEWLINE = "\ue00a"  # stands for a newline, in which CTRL's words may end, while merges are learnt
OF_GPT = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
OF_BYT5, SENTINELS = ("<pad>", "</s>", "<unk>"), 125  # with ascending ids, unlike T5's


class Flavour(NamedTuple):
    tokenizer_class: str  # Hugging Face's
    first: tuple[str, ...]  # special tokens at ids 0, 1, ...
    last: tuple[str, ...] = (END_OF_TEXT,)  # special tokens after all others
    bos: str = END_OF_TEXT
    eos: str = END_OF_TEXT

    @property
    def config(self) -> dict:
        """Entries of tokenizer_config.json."""
        return {"tokenizer_class": self.tokenizer_class, "bos_token": self.bos, "eos_token": self.eos}


ROBERTA = Flavour("RobertaTokenizer", ("<s>", "<pad>", "</s>", "<unk>", "<mask>"), (), "<s>", "</s>")
OF_BYTES = {"roberta": ROBERTA, "gpt2": Flavour("GPT2Tokenizer", ())}
OF_CHARACTERS = {"gpt": Flavour("OpenAIGPTTokenizer", (UNKNOWN,)), "ctrl": Flavour("CTRLTokenizer", (UNKNOWN,))}
FLAVOURS = OF_BYTES | OF_CHARACTERS


def count_bytes(texts: Iterable[str], options: Training) -> Counter:
    """Count words with the space before them, their bytes written as characters."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return training.count_words(texts, training.pre_tokenized(None, pre_tokenizer))


def learn_bytes(words: Counter, options: Training) -> Made:
    """Learn at most `vocab_size` tokens: all bytes and the special tokens, then merges."""
    flavour = OF_BYTES[options.specials or "roberta"]
    training.check_size(options, len(ALPHABET) + len(flavour.first) + len(flavour.last))
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size - len(flavour.last),
        special_tokens=list(flavour.first),
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    model = training.merge(training.bounded(words), models.BPE(), trainer)
    vocab = model["vocab"] | {token: len(model["vocab"]) + index for index, token in enumerate(flavour.last)}
    return assemble(vocab, list(map(tuple, model["merges"])), flavour.config)


def learn_alone(words: Counter, options: Training) -> Made:
    """Return bytes as tokens, always the same 384, with ByT5's ids: <pad> 0, </s> 1, <unk> 2, byte + 3, sentinels."""
    vocab = {token: index for index, token in enumerate([*OF_BYT5, *byte_characters()])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*OF_BYT5, *(f"<extra_id_{index}>" for index in range(SENTINELS))])
    surround(tokenizer, "$A </s>", "$A </s> $B </s>")
    return Made(tokenizer, special_ids(tokenizer, {}), {"eos_token": "</s>"})


def count_characters(texts: Iterable[str], options: Training) -> Counter:
    """Count words as the tokenizer sees them."""
    if options.specials == "ctrl":
        return training.count_words(texts, lambda run: [run.replace("\n", NEWLINE)], CTRL_WORD)
    return training.count_words(texts, training.pre_tokenized(*OF_GPT))


def learn_characters(words: Counter, options: Training) -> Made:
    """Learn at most `vocab_size` tokens: <unk>, characters at the end of words, other characters, merges, and the token
    that ends a document. GPT's text is lower-cased and without accents, CTRL's is left as it is."""
    training.check_size(options, training.SMALLEST_VOCABULARY)
    kept, flavour = training.bounded(words), options.specials or "gpt"
    alphabet = training.covering(training.characters_of(kept), options.vocab_size)
    ends = sorted({word[-1] for word, _ in kept}.intersection(alphabet))
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size - 1,
        special_tokens=[UNKNOWN, *(character + END for character in ends)],  # otherwise their ids are random
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        end_of_word_suffix=END,
        show_progress=False,
    )
    model = training.merge(kept, models.BPE(end_of_word_suffix=END), trainer)
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    if flavour == "ctrl":  # a merges.txt has no way to write a newline
        tokens = [NEWLINE + END, *(token for token in tokens if NEWLINE not in token)]
    vocab = {token.replace(NEWLINE, "\n"): index for index, token in enumerate([*tokens, END_OF_TEXT])}
    merges = [(left, right) for left, right in model["merges"] if left + right in vocab]
    return assemble(vocab, merges, FLAVOURS[flavour].config)


def assemble(vocab: dict[str, int], merges: list[tuple[str, str]], config: dict) -> Made:
    """Build the tokenizer that Hugging Face's RoBERTa, GPT-2, GPT or CTRL class builds; merges of the last two have
    </w> at the end of words. config: its tokenizer_config.json."""
    flavour = next(each for each in FLAVOURS.values() if each.tokenizer_class == config["tokenizer_class"])
    of_bytes, prefix = flavour in OF_BYTES.values(), config.get("add_prefix_space", False)
    marks = {"continuing_subword_prefix": "", "end_of_word_suffix": "" if of_bytes else END}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=None if of_bytes else UNKNOWN, **marks))
    if of_bytes:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    elif flavour is FLAVOURS["gpt"]:
        tokenizer.normalizer, tokenizer.pre_tokenizer = OF_GPT
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(CTRL_WORD.pattern), "removed", invert=True)
    tokenizer.decoder = decoders.ByteLevel() if of_bytes else decoders.BPEDecoder(suffix=END)
    specials = [AddedToken(token, special=True, lstrip=token == "<mask>") for token in flavour.first + flavour.last]
    tokenizer.add_special_tokens([token for token in specials if token.content in vocab])
    if flavour is ROBERTA and "<s>" in vocab and "</s>" in vocab:
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]), trim_offsets=True, add_prefix_space=prefix
        )
    return Made(tokenizer, special_ids(tokenizer, names_in(config)), config)


def read_ctrl(vocab: dict[str, int]) -> dict[str, int]:
    """Return CTRL's vocab.json with </w> at the end of words, as in its merges."""
    return {token if token in WHOLE else _exchanged(token, CONTINUES, END): index for token, index in vocab.items()}


def write_ctrl(vocab: dict[str, int], added: Collection[str]) -> dict[str, int]:
    """Reverse `read_ctrl`.   added: tokens that no merge makes, such as control codes, which get no mark."""
    whole = {*WHOLE, *added}
    return {token if token in whole else _exchanged(token, END, CONTINUES): index for token, index in vocab.items()}


def _exchanged(token: str, mark: str, other: str) -> str:
    """Remove the mark from a token, or add the other mark if it has none."""
    return token.removesuffix(mark) if token.endswith(mark) else token + other
