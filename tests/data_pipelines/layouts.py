"""Every way to make rows of 32 tokens, and a small corpus for all of them that is the same on every machine."""

from pathlib import Path

from data_pipelines.corpus import Corpus
from data_pipelines.examples.global_tokens import GlobalTokens
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.packed_documents import PackedDocuments
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from data_pipelines.examples.segment_pairs import SENTENCE_ORDER, SegmentPairs
from data_pipelines.examples.sentence_globals import SentenceGlobals
from data_pipelines.examples.sentence_pairs import SentencePairs
from data_pipelines.examples.streams import ContiguousStreams
from tests.data_pipelines.corpora import SPECIAL, numbered, write_corpus

LAYOUTS = {
    "pairs, next sentence": SegmentPairs(32),
    "pairs, sentence order": SegmentPairs(32, label=SENTENCE_ORDER),
    "pairs, no label": SegmentPairs(32, label=None),
    "pairs, whole words": SegmentPairs(32, masks=Masking(whole_word=True)),
    "pairs, masked as ELECTRA's": SegmentPairs(32, masks=Masking(0.25, 0.85, 0.0), label=None),
    "pairs, n-grams as ALBERT's": SegmentPairs(32, masks=Masking(whole_word=True, ngrams=(1, 1 / 2, 1 / 3))),
    "pairs of sentences": SentencePairs(32),
    "packed": PackedSentences(32),
    "packed, whole words": PackedSentences(32, masks=Masking(whole_word=True)),
    "packed, n-grams": PackedSentences(32, masks=Masking(whole_word=True, ngrams=(0.4, 0.3, 0.2, 0.1))),
    "packed across documents": PackedSentences(32, cross_document_attention=True),
    "packed, of one document": PackedSentences(32, one_document=True),
    "packed, two fixed copies": PackedSentences(32, masks=Masking(copies=2)),
    "packed, with global tokens": SentenceGlobals(32, globals=3),
    "pairs, which name global tokens": GlobalTokens(32, SegmentPairs(32), 2),
    "documents": PackedDocuments(32),
    "documents, apart": PackedDocuments(32, separate=True, restart=True),
    "stream": ContiguousStreams(32),
    "stream, reset": ContiguousStreams(32, reset=True),
    "permuted spans": PermutedSpans(32, permuting=Permuting(reuse_len=14, perm_size=8)),
    "permuted tokens, one way": PermutedSpans(
        32, permuting=Permuting(reuse_len=0, perm_size=32, k=4, spans=False, bidirectional=False)
    ),
}


def written(path: Path) -> Corpus:
    """Documents of 1 to 6 sentences of 1 to 40 tokens, some longer than a row; every token is another one."""
    lengths = lambda document: [1 + (7 * document + 11 * sentence) % 40 for sentence in range(1 + document % 6)]
    train, heldout = numbered(map(lengths, range(25))), numbered(map(lengths, range(25, 37)))
    return Corpus(write_corpus(path, train, 2500, heldout, special=SPECIAL | {"eod": 2499}))
