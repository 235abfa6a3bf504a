"""SentencePiece: the stored ids are those of Hugging Face's classes and of `sentencepiece`, whatever the text."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pydoc_data.topics import topics

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AlbertTokenizer, AutoTokenizer, PreTrainedTokenizerFast, XLNetTokenizer

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import pieces, spiece
from data_pipelines.tokenizers import stored as tokenizers
from data_pipelines.tokenizers.made import Made
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from tests.data_pipelines.prepared import content, run, stored

TEXTS = [
    "The Café's naïve owner, Dr. Müller, sang — loudly!  \t He won 3,141 prizes; didn't he?",
    "ΑΣ Straße İstanbul 日本語 テスト 中文分词 e\u0301te\u0301 ``quoted'' １２３ ﬁne 한국어",
    *("The café's Number 7,000 is not Ñ, ø or å -- isn't it? " + "=" * number for number in range(60)),
    *(topics[name][:2000] for name in sorted(topics)[:20]),
]
VOCAB_SIZE = 400
PROBES = [*TEXTS[:2], "☃☃ ☃ a☃b 🤗 \ufffd\u200b", "▁under ▁ score▁", "zero\u00a0width\x1cfile\x0bsep", " ", "\x00a\x07"]
AWKWARD = st.sampled_from(
    ["the", "Café", "İ", "中", "ﬁ", "１", "한", "☃", "🤗", "▁", "``", "''", "3,141", "====", "\u200b", "\u0301", "ß"]
    + [*" '`\t\x0b\x1c\x00\u00a0\u2028\u3000\ufeff"]
)
XLNET = pieces.FLAVOURS["xlnet"]
SPECIALS = {token for flavour in pieces.FLAVOURS.values() for token in flavour.specials}  # found in text by the others
TEXT = st.lists(AWKWARD | st.text(max_size=5), max_size=12).map("".join)
SENTENCES = st.lists(TEXT.filter(lambda text: not any(token in text for token in SPECIALS)), max_size=6)
KINDS = [  # kind, flavour, cased, keep_accents; the class that Hugging Face loads
    ("unigram", "xlnet", False, False, XLNetTokenizer),
    ("unigram", "xlnet", True, False, XLNetTokenizer),
    ("unigram", "xlnet", True, True, PreTrainedTokenizerFast),
    ("unigram", "albert", False, False, AlbertTokenizer),
    ("unigram", "albert", False, True, AlbertTokenizer),
    ("unigram", "albert", True, False, AlbertTokenizer),
    ("bpe", "xlnet", True, False, PreTrainedTokenizerFast),
    ("bpe", "albert", False, True, PreTrainedTokenizerFast),
]


def make(kind, flavour, cased=False, keep_accents=False, vocab_size=VOCAB_SIZE) -> Made:
    return train(f"sentencepiece-{kind}", TEXTS, Training(vocab_size, cased, keep_accents, flavour))


def ids(encoder: Encoder, *texts: str) -> np.ndarray:
    return encoder.encode(list(texts), [np.zeros(0, np.int64)] * len(texts)).tokens


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind[:4])))
def trained(request, tmp_path_factory):
    """(what is loaded back from the folder, Hugging Face's, the parameters)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizers.save(make(*request.param[:4]), folder)
    return tokenizers.load(folder), AutoTokenizer.from_pretrained(folder), request.param


def test_hugging_face_loads_the_right_class_with_its_special_tokens_in_their_places(trained):
    made, theirs, (_, flavour, cased, _, tokenizer_class) = trained
    assert isinstance(theirs, tokenizer_class)
    assert len(theirs) == made.tokenizer.get_vocab_size() == VOCAB_SIZE
    one, two = (theirs(text, add_special_tokens=False)["input_ids"] for text in ("the", "café"))
    pair = theirs("the", "café")
    if flavour == "xlnet":
        names = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
        assert made.special == {"pad": 5, "unk": 0, "cls": 3, "sep": 4, "mask": 6, "bos": 1, "eos": 2, "eod": 7}
        assert pair["input_ids"] == [*one, 4, *two, 4, 3]
        assert pair["token_type_ids"] == [0] * (len(one) + 1) + [1] * (len(two) + 1) + [2]
        assert theirs(["the", "the the the the"], padding=True)["input_ids"][0][0] == 5
    else:
        names = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
        assert made.special == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "bos": 2, "eos": 3}
        assert pair["input_ids"] == [2, *one, 3, *two, 3]
        assert pair["token_type_ids"] == [0] * (len(one) + 2) + [1] * (len(two) + 1)
        assert theirs(["the", "the the the the"], padding=True)["input_ids"][0][-1] == 0
    assert theirs.convert_ids_to_tokens(range(len(names))) == names
    roles = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
    assert {role: getattr(theirs, f"{role}_token_id") for role in roles}.items() <= made.special.items()
    assert ("▁The" in theirs.get_vocab()) == cased


def test_accents_are_kept_where_that_was_asked_for(trained):
    _, theirs, (_, flavour, cased, keep, _) = trained
    kept = keep or (cased and flavour == "albert")
    assert theirs.decode(theirs("café", add_special_tokens=False)["input_ids"]) == ("café" if kept else "cafe")


@settings(max_examples=100, deadline=None)
@given(SENTENCES)
def test_the_encoder_gives_hugging_faces_ids(trained, sentences):
    made, theirs, _ = trained
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in [*sentences, *PROBES]]
    encoder = Encoder(made.tokenizer)
    assert encoder.runs is not None
    for _ in range(2):  # the second time every run is known
        tokens = ids(encoder, *sentences, *PROBES)
        assert tokens.tolist() == [index for some in expected for index in some]
        begins = [token.startswith("▁") for token in theirs.convert_ids_to_tokens(tokens)]
        assert encoder.word_starts[tokens].tolist() == begins


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def learnt(request):
    """(our tokenizer, sentencepiece's own with the same model)."""
    normalizer = make(request.param, "xlnet").tokenizer.normalizer
    words = Counter(word for text in TEXTS for word in normalizer.normalize_str(text).split())
    _, model = pieces.learn_pieces(words, request.param, VOCAB_SIZE, XLNET)
    return make(request.param, "xlnet").tokenizer, sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_model_is_read_as_protobuf_reads_it(kind):
    from sentencepiece import sentencepiece_model_pb2

    words = Counter(word for text in TEXTS for word in text.split())
    _, content = pieces.learn_pieces(words, kind, VOCAB_SIZE, XLNET)
    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    proto.normalizer_spec.precompiled_charsmap = b"\x00\xff table" * 50
    proto.pieces[9].type, proto.pieces[9].score = spiece.USER_DEFINED, -0.1
    found = spiece.parse(proto.SerializeToString())
    assert found.pieces == [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    assert found.model_type == proto.trainer_spec.model_type
    assert found.precompiled_charsmap == proto.normalizer_spec.precompiled_charsmap


@given(st.binary(max_size=40))
def test_what_is_no_model_is_a_value_error(content):
    with contextlib.suppress(ValueError):
        spiece.parse(content)


@settings(max_examples=200, deadline=None)
@given(SENTENCES)
def test_the_encoder_gives_sentencepieces_ids_but_for_ties(learnt, sentences):
    """Two orders of the pieces of a run such as '=====' have the same score; which is taken hangs on rounding."""
    ours, theirs = learnt
    encoder = Encoder(ours)
    for text in [*sentences, *PROBES]:
        text = text.replace("▁", "")  # sentencepiece removes those at the end
        words = [word for word, _ in ours.pre_tokenizer.pre_tokenize_str(ours.normalizer.normalize_str(text))]
        expected = theirs.encode("".join(words)[1:]) if words else []
        found = ids(encoder, text).tolist()
        if found != expected:
            assert sum(map(theirs.get_score, found)) == pytest.approx(sum(map(theirs.get_score, expected)), abs=1e-4)
            assert Counter(found) == Counter(expected)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_same_text_gives_the_same_vocabulary_on_any_number_of_cores(kind):
    program = (
        "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from tests.data_pipelines.tokenizers.test_pieces import make\n"
        f"sys.stdout.buffer.write(make({kind!r}, 'xlnet').tokenizer.to_str().encode())"
    )
    where = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=where)
    assert done.stdout.decode() == make(kind, "xlnet").tokenizer.to_str()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_no_piece_joins_a_digit_and_a_comma_that_follows(kind):
    """XLNet's original code cuts such pieces after encoding; Hugging Face's class does not, and must not need to."""
    texts = [f"in 1,{number:03} or 2{number % 10}, then" for number in range(1000)]
    tokenizer = train(f"sentencepiece-{kind}", TEXTS + texts, Training(VOCAB_SIZE)).tokenizer
    assert not [piece for piece in tokenizer.get_vocab() if re.search(r"\d,", piece)]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_special_tokens_written_in_the_text_are_text(kind):
    for name, flavour in pieces.FLAVOURS.items():
        text = " ".join(flavour.specials) + "a" + "".join(flavour.specials)
        asked = Training(VOCAB_SIZE, cased=True, specials=name)
        tokenizer = train(f"sentencepiece-{kind}", TEXTS + ["KEY"] * 100, asked).tokenizer
        tokens = ids(Encoder(tokenizer), text)
        assert tokens.min() >= len(flavour.specials)
        assert tokenizer.decode(tokens.tolist()) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sizes_that_the_text_does_not_allow_are_errors_that_name_one_that_works(kind):
    with pytest.raises(UserError, match=r"^--vocab-size 20 is too small for .* text; use at least \d+$") as small:
        make(kind, "xlnet", vocab_size=20)
    least = int(str(small.value).split()[-1])
    assert make(kind, "xlnet", vocab_size=least).tokenizer.get_vocab_size() == least
    with pytest.raises(UserError, match="too small"):
        make(kind, "xlnet", vocab_size=least - 1)
    with pytest.raises(UserError, match=r"^--vocab-size 9000 is too large for this text; use at most \d+$") as large:
        make(kind, "xlnet", vocab_size=9000)
    most = int(str(large.value).split()[-1])
    assert make(kind, "xlnet", vocab_size=most).tokenizer.get_vocab_size() == most
    with pytest.raises(UserError, match=f"use at most {most}$"):
        make(kind, "xlnet", vocab_size=most + 1)


HOSTILE = st.sampled_from(["\x00", "▅", "▁▁", "\t", "\x1f", "<unk>", "<sep>", "1,", "\ufdd0", "\ufffe", "ab" * 3000])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(HOSTILE | AWKWARD | st.text(max_size=5), max_size=8).map("".join), max_size=4),
    st.sampled_from(["unigram", "bpe"]),
    st.sampled_from(sorted(pieces.FLAVOURS)),
    st.integers(-1, 60),
)
def test_any_text_and_any_size_give_a_tokenizer_or_one_line(texts, kind, flavour, vocab_size):
    try:
        tokenizer = train(f"sentencepiece-{kind}", texts, Training(vocab_size, specials=flavour)).tokenizer
    except UserError as error:
        assert "\n" not in str(error)
        assert "SentencePiece cannot" not in str(error)
        return
    assert tokenizer.get_vocab_size() == vocab_size
    tokens = ids(Encoder(tokenizer), *texts)
    assert {*tokens.tolist()} <= {*range(vocab_size)}


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match="not installed; pip install -r requirements.txt"):
        make("unigram", "xlnet")


def test_no_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\t")
    with pytest.raises(UserError, match="--source has no text to train a tokenizer on"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer="sentencepiece-unigram", vocab_size=100)


# Taken tokenizers


@pytest.fixture(scope="module", params=["xlnet", "albert"])
def published(request, tmp_path_factory):
    """A folder as the authors published theirs: spiece.model with its own table of characters, and punctuation that is
    user-defined."""
    folder = tmp_path_factory.mktemp(request.param)
    ids = ("unk_id", "bos_id", "eos_id", "pad_id")
    first, others, defined = {
        "xlnet": ((0, 1, 2, -1), "<cls>,<sep>,<pad>,<mask>,<eod>", "<eop>,.,(,),-,£"),
        "albert": ((1, -1, -1, 0), "[CLS],[SEP],[MASK]", "(,),-,."),
    }[request.param]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(folder / "spiece"),
        vocab_size=250,
        control_symbols=others.split(","),
        user_defined_symbols=defined.split(","),
        minloglevel=2,
        **dict(zip(ids, first, strict=True)),
    )
    (folder / "config.json").write_text(json.dumps({"model_type": request.param}))
    return folder


def check_equal(made: Made, theirs, texts=PROBES):
    encoder = Encoder(made.tokenizer)
    for text in texts:
        assert ids(encoder, text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert made.tokenizer.encode(text).ids == theirs(text)["input_ids"]


@settings(max_examples=60, deadline=None)
@given(texts=SENTENCES)
def test_a_published_model_gives_hugging_faces_ids(published, texts):
    check_equal(tokenizers.load(published), AutoTokenizer.from_pretrained(published), [*texts, *PROBES])


def test_a_taken_tokenizer_is_written_as_the_class_it_was(tmp_path, published):
    theirs = AutoTokenizer.from_pretrained(published)
    theirs.save_pretrained(tmp_path / "theirs")  # their tokenizer.json, without a spiece.model
    for taken in (published, tmp_path / "theirs"):
        made = tokenizers.load(taken)
        tokenizers.save(made, tmp_path / "ours")
        again = AutoTokenizer.from_pretrained(tmp_path / "ours")
        assert type(again) is type(theirs)
        assert again.padding_side == theirs.padding_side
        assert again.get_vocab() == theirs.get_vocab()
        check_equal(made, again)
        check_equal(tokenizers.load(tmp_path / "ours"), theirs)


@pytest.mark.parametrize("cased", [False, True])
def test_a_bare_model_is_normalised_as_told(published, cased):
    made = tokenizers.load(published / "spiece.model", cased)
    theirs = AutoTokenizer.from_pretrained(published, do_lower_case=not cased, keep_accents=cased)
    check_equal(made, theirs)
    (word,) = made.tokenizer.normalizer.normalize_str("Café").split()
    assert word.startswith("C") == cased


def test_other_models_are_errors(tmp_path, published):
    plain = tmp_path / "spiece.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(plain.with_suffix("")), vocab_size=200, minloglevel=2
    )
    with pytest.raises(UserError, match="cannot be read .it is not XLNet's or ALBERT's"):
        tokenizers.load(plain)
    plain.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(UserError, match="spiece.model cannot be read"):
        tokenizers.load(plain)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("keep_accents", [False, True])
def test_the_folder_of_an_exported_xlnet_loads_the_same(tmp_path, kind, keep_accents):
    made = make(kind, "xlnet", True, keep_accents)
    tokenizers.save(made, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "xlnet"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(theirs, XLNetTokenizer) == (kind == "unigram" and not keep_accents)
    check_equal(made, theirs)
    check_equal(tokenizers.load(tmp_path), theirs)


# prepare


@pytest.mark.parametrize("tokenizer", ["sentencepiece-unigram", "sentencepiece-bpe"])
def test_prepare_stores_hugging_faces_ids_with_any_number_of_processes(tmp_path, tokenizer):
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number:03}.txt").write_text(text, "utf-8")
    options = {"tokenizer": tokenizer, "vocab_size": VOCAB_SIZE, "specials": "albert", "cased": False, "heldout": 0.1}
    manifest, _ = run(tmp_path / "one", f"text:{tmp_path}/text", **options)
    run(tmp_path / "two", f"text:{tmp_path}/text", **options, processes=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "one" / "tokenizer")
    assert manifest["special"]["cls"] == theirs.cls_token_id == 2
    corpus = Corpus(tmp_path / "one")
    found = np.concatenate([stored(corpus.path, split=split) for split in ("train", "heldout")])
    whole = [index for text in TEXTS for index in theirs(text, add_special_tokens=False)["input_ids"]]
    assert sorted(found) == sorted(whole)
    assert Tokenizer.from_file(str(corpus.tokenizer_path / "tokenizer.json")).get_vocab() == theirs.get_vocab()


def test_xlnets_special_tokens_are_the_default_and_the_option_is_for_sentencepiece_alone(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS), "utf-8")
    options = {"tokenizer": "sentencepiece-unigram", "vocab_size": VOCAB_SIZE}
    assert run(tmp_path / "out", f"text:{tmp_path}/a.txt", **options)[0]["special"]["eod"] == 7
    assert Corpus(tmp_path / "out").special["eod"] == 7
    with pytest.raises(UserError, match="--specials albert: --tokenizer wordpiece does not choose"):
        run(tmp_path / "other", f"text:{tmp_path}/a.txt", tokenizer="wordpiece", specials="albert")


def test_a_corpus_made_before_there_were_these_options_is_finished(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS), "utf-8")
    options = {"tokenizer": "wordpiece", "vocab_size": 300}
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", **options)
    file = tmp_path / "out" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["settings"]["keep_accents"], manifest["settings"]["specials"]
    file.write_text(json.dumps(manifest))
    assert "already finished" in run(tmp_path / "out", f"text:{tmp_path}/a.txt", **options)[1]
    with pytest.raises(UserError, match="keep_accents was False and is True"):
        run(tmp_path / "out", f"text:{tmp_path}/a.txt", **options, keep_accents=True)
