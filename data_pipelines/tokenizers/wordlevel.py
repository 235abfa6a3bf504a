"""A vocabulary of whole words, the most frequent first: what an adaptive softmax cuts into clusters."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_pipelines.tokenizers.made import Made, special_ids, surround
from data_pipelines.tokenizers.training import Training, check_size, count_words

SPECIALS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<eod>")


def count(texts: Iterable[str], options: Training) -> Counter:
    """What white space separates, as in WikiText-103 (Merity et al. 2016)."""
    normalizer = _normalizer(options)
    return count_words(texts, lambda run: normalizer.normalize_str(run).split())


def learn(words: Counter, options: Training) -> Made:
    """At most `vocab_size` tokens: the special ones, then words by falling frequency, then by spelling."""
    check_size(options, len(SPECIALS) + 1)
    ordered = sorted(words.keys() - {*SPECIALS}, key=lambda word: (-words[word], word))
    kept = [*SPECIALS, *ordered[: options.vocab_size - len(SPECIALS)]]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(kept)}, unk_token="<unk>"))
    tokenizer.normalizer = _normalizer(options)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    surround(tokenizer, "<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1")
    return Made(tokenizer, special_ids(tokenizer, {}), {})


def _normalizer(options: Training) -> normalizers.Normalizer:
    case, accents = not options.cased, not options.keeps_accents
    return normalizers.BertNormalizer(handle_chinese_chars=False, lowercase=case, strip_accents=accents)
