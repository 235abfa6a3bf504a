"""Score generated texts against targets. With several targets the best match counts, except that BLEU uses all."""

import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

Targets = Sequence[Sequence[str]]  # for each text, its targets
SINGLE = "\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han and kana: without spaces
WORD = re.compile(rf"[{SINGLE}]|[^\s{SINGLE}]+")
ARTICLE = re.compile(r"\b(a|an|the)\b")


def figures(written: Sequence[str], targets: Targets, tokenizer: str = "13a") -> tuple[dict[str, float], str]:
    """Compute all metrics -> (name -> percent, sacrebleu's signature of BLEU).   written: one text or more.
    tokenizer: sacrebleu's name of a tokenizer for BLEU."""
    score, signature = bleu(written, targets, tokenizer)
    whole = {"BLEU": score, "chrF": chrf(written, targets)} | rouge(written, targets)
    return whole | {"exact_match": exact_match(written, targets), "F1": f1(written, targets)}, signature


def bleu(written: Sequence[str], targets: Targets, tokenizer: str = "13a") -> tuple[float, str]:
    """Compute corpus BLEU by sacrebleu (Post 2018) -> (percent, signature)."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize=tokenizer)
    return metric.corpus_score(written, _streams(targets)).score, str(metric.get_signature())


def chrf(written: Sequence[str], targets: Targets) -> float:
    """Compute corpus chrF2 by sacrebleu (Popović 2015), in percent."""
    from sacrebleu.metrics import CHRF

    return CHRF().corpus_score(written, _streams(targets)).score


def _streams(targets: Targets) -> list[tuple[str | None, ...]]:
    """Transpose targets as sacrebleu takes them: the first targets of all texts, the second ones, ..."""
    return [*itertools.zip_longest(*targets)]


def rouge(written: Sequence[str], targets: Targets) -> dict[str, float]:
    """Compute mean F measures of ROUGE-1, -2 and -L (Lin 2004) by rouge-score, in percent. Texts are split by `words`,
    because rouge-score's own tokenizer drops everything but ASCII."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scorer = RougeScorer([*kinds], tokenizer=SimpleNamespace(tokenize=words))
    scores = [scorer.score_multi(references, text) for text, references in zip(written, targets, strict=True)]
    return {name: _percent([score[kind].fmeasure for score in scores]) for kind, name in kinds.items()}


def exact_match(written: Sequence[str], targets: Targets) -> float:
    """Compute the percentage of texts that equal a target after `normalised`."""
    return _percent(_best(written, targets, lambda text, target: float(text == target)))


def f1(written: Sequence[str], targets: Targets) -> float:
    """Compute the mean F1 of tokens shared with a target, in percent (Rajpurkar et al. 2016, section 6.1)."""
    return _percent(_best(written, targets, _overlap))


def words(text: str) -> list[str]:
    """Split a text into lower-cased runs of letters, marks and digits; each Han or kana character is a word."""
    return WORD.findall("".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in text.lower()))


def normalised(text: str) -> list[str]:
    """Split an answer into tokens: lower-cased, without punctuation and English articles, split at white space as in
    SQuAD's script (Rajpurkar et al. 2016) and around Han and kana characters as in MLQA's (Lewis et al. 2020)."""
    kept = (c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    return WORD.findall(ARTICLE.sub(" ", "".join(kept)))


def _overlap(text: list[str], target: list[str]) -> float:
    if not text or not target:
        return float(text == target)
    return 2 * (Counter(text) & Counter(target)).total() / (len(text) + len(target))


def _best(written: Sequence[str], targets: Targets, similarity: Callable[[list[str], list[str]], float]) -> list[float]:
    pairs = zip(map(normalised, written), targets, strict=True)
    return [max(similarity(text, normalised(target)) for target in references) for text, references in pairs]


def _percent(values: Sequence[float]) -> float:
    return 100 * sum(values) / len(values)
