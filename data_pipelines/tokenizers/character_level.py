"""Byte-pair encoding of characters whose words end in </w>, as GPT (Radford et al. 2018) and CTRL have it.

Theirs have no token that ends a document; those that are trained here have GPT-2's, after all others.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_pipelines.text.encoding import CTRL_WORD
from data_pipelines.tokenizers import training
from data_pipelines.tokenizers.made import END_OF_TEXT, Made, names_in, special_ids
from data_pipelines.tokenizers.training import Training

END = "</w>"
CONTINUES = "@@"  # in CTRL's files, where the end of a word has no mark
UNKNOWN = "<unk>"
WHOLE = UNKNOWN, END_OF_TEXT  # no words, so without a mark
NEWLINE = "\ue00a"  # while merges are learnt: CTRL's words may end in a newline
CLASSES = {"gpt": "OpenAIGPTTokenizer", "ctrl": "CTRLTokenizer"}
SPECIALS = tuple(CLASSES)


def count(texts: Iterable[str], options: Training) -> Counter:
    """Words as the tokenizer sees them."""
    if options.specials == "ctrl":
        return training.count_words(texts, lambda run: [run.replace("\n", NEWLINE)], CTRL_WORD)
    pipeline = _empty("gpt")
    return training.count_words(texts, training.pre_tokenized(pipeline.normalizer, pipeline.pre_tokenizer))


def learn(words: Counter, options: Training) -> Made:
    """At most `vocab_size` tokens: <unk>, characters at the end of words, others, what is merged, and what ends a
    document. GPT's are of lower case and without accents, CTRL's of the text as it is."""
    training.check_size(options, training.SMALLEST_VOCABULARY)
    kept, flavour = training.bounded(words), options.specials or SPECIALS[0]
    alphabet = training.covering(training.characters_of(kept), options.vocab_size)
    ends = sorted({word[-1] for word, _ in kept}.intersection(alphabet))
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size - 1,
        special_tokens=[UNKNOWN, *(character + END for character in ends)],  # else numbered by chance
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
    ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return assemble(vocab, merges, {"tokenizer_class": CLASSES[flavour], **ends})


def assemble(vocab: dict[str, int], merges: list[tuple[str, str]], config: dict) -> Made:
    """The tokenizer that Hugging Face's GPT or CTRL class builds of these, with </w> at ends of words.

    config: its tokenizer_config.json."""
    flavour = next(each for each in SPECIALS if CLASSES[each] == config["tokenizer_class"])
    tokenizer = _empty(flavour, vocab, merges)
    tokenizer.add_special_tokens([token for token in (UNKNOWN, END_OF_TEXT) if token in vocab])
    return Made(tokenizer, special_ids(tokenizer, names_in(config)), config)


def _empty(flavour: str, vocab: dict | None = None, merges: list | None = None) -> Tokenizer:
    model = models.BPE(
        vocab or {}, merges or [], unk_token=UNKNOWN, continuing_subword_prefix="", end_of_word_suffix=END
    )
    tokenizer = Tokenizer(model)
    if flavour == "gpt":
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(CTRL_WORD.pattern), "removed", invert=True)
    tokenizer.decoder = decoders.BPEDecoder(suffix=END)
    return tokenizer


def read_ctrl(vocab: dict[str, int]) -> dict[str, int]:
    """CTRL's vocab.json with </w> at ends of words, as its merges have it."""
    return {token if token in WHOLE else _exchanged(token, CONTINUES, END): index for token, index in vocab.items()}


def write_ctrl(vocab: dict[str, int], added: Collection[str]) -> dict[str, int]:
    """The reverse.   added: tokens that no merge makes, as control codes, which get no mark."""
    whole = {*WHOLE, *added}
    return {token if token in whole else _exchanged(token, END, CONTINUES): index for token, index in vocab.items()}


def _exchanged(token: str, mark: str, other: str) -> str:
    """Without the mark, or where there is none with the other one."""
    return token.removesuffix(mark) if token.endswith(mark) else token + other
