"""How like their targets texts are. Each text has one target or several, of which the likest counts, with BLEU all."""

import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

Targets = Sequence[Sequence[str]]  # those of each text
SINGLE = "\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han and kana: without spaces
WORD = re.compile(rf"[{SINGLE}]|[^\s{SINGLE}]+")
ARTICLE = re.compile(r"\b(a|an|the)\b")


def figures(written: Sequence[str], targets: Targets, tokenizer: str = "13a") -> tuple[dict[str, float], str]:
    """All figures of one text or more, by name, in percent; and how BLEU was computed, as sacrebleu names it.

    tokenizer: of BLEU, a name that sacrebleu has.
    """
    score, signature = bleu(written, targets, tokenizer)
    whole = {"BLEU": score, "chrF": chrf(written, targets)} | rouge(written, targets)
    return whole | {"exact_match": exact_match(written, targets), "F1": f1(written, targets)}, signature


def bleu(written: Sequence[str], targets: Targets, tokenizer: str = "13a") -> tuple[float, str]:
    """sacrebleu's of all texts together, in percent (Post 2018), and its signature."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize=tokenizer)
    return metric.corpus_score(written, _streams(targets)).score, str(metric.get_signature())


def chrf(written: Sequence[str], targets: Targets) -> float:
    """sacrebleu's chrF2 of all texts together, in percent (Popović 2015)."""
    from sacrebleu.metrics import CHRF

    return CHRF().corpus_score(written, _streams(targets)).score


def _streams(targets: Targets) -> list[tuple[str | None, ...]]:
    """The first targets of all texts, the second ones, ..., as sacrebleu takes them."""
    return [*itertools.zip_longest(*targets)]


def rouge(written: Sequence[str], targets: Targets) -> dict[str, float]:
    """rouge-score's F measures of ROUGE-1, -2 and -L (Lin 2004), means over the texts in percent, of `words`, where its
    own tokenizer drops what is not ASCII."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scorer = RougeScorer([*kinds], tokenizer=SimpleNamespace(tokenize=words))
    scores = [scorer.score_multi(of, text) for text, of in zip(written, targets, strict=True)]
    return {name: _percent([score[kind].fmeasure for score in scores]) for kind, name in kinds.items()}


def exact_match(written: Sequence[str], targets: Targets) -> float:
    """How many of the texts are their target, in percent, as `normalised`."""
    return _percent(_best(written, targets, lambda text, target: float(text == target)))


def f1(written: Sequence[str], targets: Targets) -> float:
    """The mean F1, in percent, of the tokens that texts share with their targets, as `normalised` (Rajpurkar et al.
    2016, section 6.1)."""
    return _percent(_best(written, targets, _overlap))


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, marks and digits; each Han or kana character is a word."""
    return WORD.findall("".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in text.lower()))


def normalised(text: str) -> list[str]:
    """The tokens of an answer: lower-cased, without punctuation and English articles, cut at white space as SQuAD's
    program does (Rajpurkar et al. 2016), and around each Han or kana character, as MLQA's (Lewis et al. 2020)."""
    kept = (c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    return WORD.findall(ARTICLE.sub(" ", "".join(kept)))


def _overlap(text: list[str], target: list[str]) -> float:
    if not text or not target:
        return float(text == target)
    return 2 * (Counter(text) & Counter(target)).total() / (len(text) + len(target))


def _best(written: Sequence[str], targets: Targets, like: Callable[[list[str], list[str]], float]) -> list[float]:
    pairs = zip(map(normalised, written), targets, strict=True)
    return [max(like(text, normalised(target)) for target in of) for text, of in pairs]


def _percent(values: Sequence[float]) -> float:
    return 100 * sum(values) / len(values)
