"""Vocabularies of words: WordPiece as in BERT, which cuts at white space and punctuation and then takes the longest
known piece from the left; and whole words, the most frequent first, which an adaptive softmax divides into clusters."""

import unicodedata
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_pipelines.tokenizers import training
from data_pipelines.tokenizers.made import ROLES, Made, special_ids, surround
from data_pipelines.tokenizers.training import Training

SPECIALS = [ROLES[role][0] for role in ("pad", "unk", "cls", "sep", "mask")]
WHOLE_SPECIALS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<eod>")
CONTINUES = "##"
LONGEST = 100  # characters in a word; longer words are [UNK]


def count(texts: Iterable[str], options: Training) -> Counter:
    """Count words as the tokenizer sees them."""
    pipeline = assemble({}, options.cased, options.keeps_accents)
    return training.count_words(texts, training.pre_tokenized(pipeline.normalizer, pipeline.pre_tokenizer))


def learn(words: Counter, options: Training) -> Made:
    """Learn at most `vocab_size` tokens, the special ones at ids 0..4. The same words give the same vocabulary. If the
    words do not fill the vocabulary, as in Chinese, whose words are characters, rarer characters do."""
    training.check_size(options, training.SMALLEST_VOCABULARY)
    kept = training.bounded(words)
    characters = training.characters_of(kept)
    inside = {character for word, _ in kept for character in word[1:] if not _is_punctuation(character)}
    ordered, alphabet = training.by_frequency(characters), training.covering(characters, options.vocab_size)
    vocab = _merge(kept, alphabet, inside, options)
    if len(alphabet) < len(ordered) and len(vocab) < options.vocab_size:
        merges = len(vocab) - _size(alphabet, inside)
        while len(alphabet) < len(ordered):
            if _size([*alphabet, ordered[len(alphabet)]], inside) + merges > options.vocab_size:
                break
            alphabet.append(ordered[len(alphabet)])
        vocab = _merge(kept, alphabet, inside, options)
    tokenizer = assemble(vocab, options.cased, options.keeps_accents)
    return Made(tokenizer, special_ids(tokenizer, {}), {})


def _size(alphabet: list[str], inside: set[str]) -> int:
    return len(SPECIALS) + len(alphabet) + len(inside.intersection(alphabet))


def _merge(words: list[tuple[str, int]], alphabet: list[str], inside: set[str], options: Training) -> dict[str, int]:
    """Learn the vocabulary. The library's trainer numbers continuing characters ('##a') in the order of a randomly
    seeded hash map, and breaks ties by number. Passing them all as special tokens, sorted, removes the randomness."""
    continuing = [CONTINUES + character for character in sorted(inside.intersection(alphabet))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=options.vocab_size,
        special_tokens=SPECIALS + continuing,
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    return training.merge(words, models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"), trainer)["vocab"]


def _is_punctuation(character: str) -> bool:
    """Return whether BERT splits a character off as punctuation; then it never continues a word."""
    ascii_symbol = character.isascii() and character.isprintable() and not character.isalnum()
    return ascii_symbol or unicodedata.category(character).startswith("P")


def assemble(vocab: dict[str, int], cased: bool, keep_accents: bool) -> Tokenizer:
    """Build BERT's tokenizer for a vocabulary: normaliser, cuts at space and punctuation, [CLS] a [SEP] b [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=LONGEST))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased, strip_accents=not keep_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    tokenizer.add_special_tokens([token for token in SPECIALS if token in vocab])
    if "[CLS]" in vocab and "[SEP]" in vocab:
        surround(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    return tokenizer


def count_whole(texts: Iterable[str], options: Training) -> Counter:
    """Count words between white space, as in WikiText-103 (Merity et al. 2016)."""
    normalizer = _normalizer(options)
    return training.count_words(texts, lambda run: normalizer.normalize_str(run).split())


def learn_whole(words: Counter, options: Training) -> Made:
    """Learn at most `vocab_size` tokens: the special ones, then words by falling frequency, then by spelling."""
    training.check_size(options, len(WHOLE_SPECIALS) + 1)
    ordered = sorted(words.keys() - {*WHOLE_SPECIALS}, key=lambda word: (-words[word], word))
    kept = [*WHOLE_SPECIALS, *ordered[: options.vocab_size - len(WHOLE_SPECIALS)]]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(kept)}, unk_token="<unk>"))
    tokenizer.normalizer = _normalizer(options)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(WHOLE_SPECIALS))
    surround(tokenizer, "<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1")
    return Made(tokenizer, special_ids(tokenizer, {}), {})


def _normalizer(options: Training) -> normalizers.Normalizer:
    case, accents = not options.cased, not options.keeps_accents
    return normalizers.BertNormalizer(handle_chinese_chars=False, lowercase=case, strip_accents=accents)
