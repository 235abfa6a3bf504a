"""Bytes as tokens, with ByT5's ids: <pad> 0, </s> 1, <unk> 2, byte + 3, then the sentinels."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data_pipelines.text.encoding import byte_characters
from data_pipelines.tokenizers.made import Made, special_ids, surround
from data_pipelines.tokenizers.training import Training

SPECIALS = ("<pad>", "</s>", "<unk>")
SENTINELS = 125  # numbered forwards, unlike T5's


def count(texts: Iterable[str], options: Training) -> Counter:
    """There is nothing to count."""
    return Counter()


def learn(words: Counter, options: Training) -> Made:
    """Always the same 384 tokens."""
    vocab = {token: index for index, token in enumerate([*SPECIALS, *byte_characters()])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIALS, *(f"<extra_id_{index}>" for index in range(SENTINELS))])
    surround(tokenizer, "$A </s>", "$A </s> $B </s>")
    return Made(tokenizer, special_ids(tokenizer, {}), {"eos_token": "</s>"})
