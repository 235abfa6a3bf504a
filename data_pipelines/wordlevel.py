"""A vocabulary of whole words, the most frequent first: what an adaptive softmax cuts into clusters."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from data_pipelines.errors import UserError

SPECIALS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<eod>")
MOST_WORDS = 8_000_000  # counted at a time (~1 GB); beyond, the rare ones are forgotten


def train(texts: Iterable[str], vocab_size: int, cased: bool = False, keep_accents: bool = False) -> Tokenizer:
    """A token for each of the most frequent words, what white space separates, as in WikiText-103 (Merity et al. 2016).

    At most `vocab_size` tokens: the special ones, then words by falling frequency, then by spelling. UserError for a
    size without room for words.
    """
    if vocab_size <= len(SPECIALS):
        raise UserError(f"--vocab-size {vocab_size}: use at least {len(SPECIALS) + 1}")
    strip = not (cased or keep_accents)
    normalizer = normalizers.BertNormalizer(handle_chinese_chars=False, lowercase=not cased, strip_accents=strip)
    seen = Counter()
    for text in texts:
        seen.update(text.split())
        if len(seen) > MOST_WORDS:
            floor = sorted(seen.values())[len(seen) // 2]
            seen = Counter({word: count for word, count in seen.items() if count > floor})
    counts = Counter()
    for word, count in seen.items():
        for part in normalizer.normalize_str(word).split():
            counts[part] += count
    for special in SPECIALS:
        del counts[special]
    words = sorted(counts, key=lambda word: (-counts[word], word))
    kept = [*SPECIALS, *words[: vocab_size - len(SPECIALS)]]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(kept)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[("<cls>", kept.index("<cls>")), ("<sep>", kept.index("<sep>"))],
    )
    return tokenizer
