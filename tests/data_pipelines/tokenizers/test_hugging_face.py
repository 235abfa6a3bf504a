"""Every kind that can be trained: Hugging Face loads what is saved as its own class, with the same ids for any text."""

import functools
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AlbertTokenizer,
    AutoTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
    CTRLTokenizer,
    GPT2Tokenizer,
    OpenAIGPTTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    T5Tokenizer,
    XLNetTokenizer,
)

from data_pipelines.corpus import Corpus
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.table import KINDS
from tests.data_pipelines import prepared
from tests.data_pipelines.tokenizers.trained import PROBES, SIZES, TEXT, TEXTS, ids, make

CASES = {  # kind, specials, cased, keep_accents -> the class that Hugging Face loads
    ("wordpiece", None, False, False): BertTokenizer,
    ("wordpiece", None, False, True): BertTokenizer,
    ("wordpiece", None, True, False): BertTokenizer,
    ("sentencepiece-unigram", "xlnet", False, False): XLNetTokenizer,
    ("sentencepiece-unigram", "xlnet", True, False): XLNetTokenizer,
    ("sentencepiece-unigram", "xlnet", True, True): PreTrainedTokenizerFast,
    ("sentencepiece-unigram", "albert", False, False): AlbertTokenizer,
    ("sentencepiece-unigram", "albert", False, True): AlbertTokenizer,
    ("sentencepiece-unigram", "albert", True, False): AlbertTokenizer,
    ("sentencepiece-unigram", "t5", False, False): T5Tokenizer,
    ("sentencepiece-unigram", "deberta", False, False): PreTrainedTokenizerFast,
    ("sentencepiece-bpe", "deberta", False, False): PreTrainedTokenizerFast,
    ("sentencepiece-bpe", "xlnet", True, False): PreTrainedTokenizerFast,
    ("sentencepiece-bpe", "albert", False, True): PreTrainedTokenizerFast,
    ("sentencepiece-bpe", "t5", False, False): PreTrainedTokenizerFast,
    ("wordlevel", None, False, False): PreTrainedTokenizerFast,
    ("wordlevel", None, True, False): PreTrainedTokenizerFast,
    ("bpe", "roberta", False, False): RobertaTokenizer,
    ("bpe", "gpt2", False, False): GPT2Tokenizer,
    ("character-bpe", "gpt", False, False): OpenAIGPTTokenizer,
    ("character-bpe", "ctrl", False, False): CTRLTokenizer,
    ("bytes", None, False, False): PreTrainedTokenizerFast,
}
NAME = lambda case: "-".join(map(str, case))
MERGED = ["roberta", "gpt2", "gpt", "ctrl"]  # kinds of a vocab.json and a merges.txt
ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")


def test_every_kind_is_here():
    assert {(kind, one) for kind in KINDS for one in KINDS[kind].specials or (None,)} == {case[:2] for case in CASES}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """case -> (what was trained, what is loaded back from its folder, Hugging Face's of the folder)."""

    @functools.cache
    def load(case):
        folder = tmp_path_factory.mktemp("tokenizer")
        stored.save(make(*case), folder)
        return make(*case), stored.load(folder), AutoTokenizer.from_pretrained(folder)

    return load


@functools.cache
def encoder_of(case) -> Encoder:
    return Encoder(make(*case).tokenizer)


def theirs_of(theirs, texts) -> list[int]:
    return [index for each in theirs(texts, add_special_tokens=False)["input_ids"] for index in each]


@pytest.mark.parametrize("case", CASES, ids=NAME)
def test_hugging_face_loads_its_class_with_the_same_tokens_and_ids(loaded, case):
    made, again, theirs = loaded(case)
    kind, specials, cased, keep = case
    assert isinstance(theirs, CASES[case])
    assert again.special == made.special
    assert specials == "ctrl" or len(theirs) == made.tokenizer.get_vocab_size() == SIZES.get(kind, 300)
    assert theirs.get_vocab().keys() == made.tokenizer.get_vocab().keys() or specials == "ctrl"
    assert all(getattr(theirs, f"{role}_token_id") == made.special[role] for role in ROLES if role in made.special)
    texts = TEXTS if specials == "ctrl" else [*TEXTS, *PROBES]  # its class takes some control characters for spaces
    expected = theirs_of(theirs, texts)
    for tokenizer in (made.tokenizer, again.tokenizer):
        assert ids(Encoder(tokenizer), *texts) == expected
    if kind.startswith(("wordpiece", "sentencepiece")):
        kept = keep or (cased and specials != "xlnet") or specials in ("t5", "deberta")
        spelled = theirs.decode(theirs("café", add_special_tokens=False)["input_ids"])
        assert spelled == ("café" if kept else "cafe")
        assert bool({"The", "▁The"} & theirs.get_vocab().keys()) == (cased or specials in ("t5", "deberta"))


@settings(max_examples=25)
@given(st.lists(TEXT, max_size=6))
def test_the_encoder_gives_hugging_faces_ids_of_any_text(loaded, texts):
    for case in CASES:
        if case[0].startswith(("wordpiece", "sentencepiece", "wordlevel")):
            _, _, theirs = loaded(case)
            expected = theirs_of(theirs, texts or [""])
            for _ in range(2):  # the second time every run is known
                assert ids(encoder_of(case), *texts) == expected, case


@pytest.mark.parametrize("specials", ["xlnet", "albert", "deberta", None])
def test_pairs_and_padding_are_those_of_their_model(loaded, specials):
    kind = "sentencepiece-unigram" if specials else "wordpiece"
    made, _, theirs = loaded((kind, specials, False, False))
    (one, two), pair = theirs(["the", "café"], add_special_tokens=False)["input_ids"], theirs("the", "café")
    if specials == "xlnet":
        names = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
        special = {"pad": 5, "unk": 0, "cls": 3, "sep": 4, "mask": 6, "bos": 1, "eos": 2, "eod": 7}
        expected, types = [*one, 4, *two, 4, 3], [0] * (len(one) + 1) + [1] * (len(two) + 1) + [2]
    elif specials == "deberta":
        names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
        special = {"pad": 0, "unk": 3, "cls": 1, "sep": 2, "mask": SIZES[kind] - 1, "bos": 1, "eos": 2}
        expected, types = [1, *one, 2, *two, 2], [0] * (len(one) + 2) + [1] * (len(two) + 1)
    else:
        unknown = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
        names, special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], unknown
        if specials == "albert":
            names, special = ["<pad>", "<unk>", *names[2:]], unknown | {"bos": 2, "eos": 3}
        expected, types = [2, *one, 3, *two, 3], [0] * (len(one) + 2) + [1] * (len(two) + 1)
    assert made.special == special
    assert theirs.convert_ids_to_tokens(range(len(names))) == names
    assert (pair["input_ids"], pair["token_type_ids"]) == (expected, types)
    padded = theirs(["the", "the the the the"], padding=True)["input_ids"][0]
    assert padded[0 if specials == "xlnet" else -1] == special["pad"]


@pytest.mark.parametrize("specials", MERGED)
def test_a_folder_of_a_vocabulary_and_merges_is_read_as_its_class_reads_it(tmp_path, specials):
    (case,) = (case for case in CASES if case[1] == specials)
    made = make(*case)
    stored.save(made, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": {"gpt": "openai-gpt"}.get(specials, specials)}))
    theirs, again = CASES[case].from_pretrained(tmp_path), stored.load(tmp_path)
    expected = theirs_of(theirs, TEXTS)
    assert ids(Encoder(made.tokenizer), *TEXTS) == ids(Encoder(again.tokenizer), *TEXTS) == expected
    if specials != "ctrl":  # nothing in its files says what it is
        (tmp_path / "config.json").unlink()
        assert ids(Encoder(stored.load(tmp_path / "vocab.json").tokenizer), *TEXTS) == expected


def test_special_tokens_are_where_their_models_have_them():
    assert make("bpe", "roberta").special == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 4, "bos": 0, "eos": 2}
    assert make("bpe", "gpt2").special == {"bos": 399, "eos": 399, "eod": 399}
    for specials, unknown in (("gpt", 0), ("ctrl", 1)):
        made = make("character-bpe", specials)
        last = made.tokenizer.get_vocab_size() - 1
        assert made.special == {"unk": unknown, "bos": last, "eos": last, "eod": last}
    theirs, ours = ByT5Tokenizer(), make("bytes")
    assert {role: ours.special[role] for role in ("pad", "eos", "unk")} == {"pad": 0, "eos": 1, "unk": 2}
    assert ours.special["sentinel_124"] == theirs.convert_tokens_to_ids("<extra_id_124>") == 383
    assert [ours.tokenizer.encode(text).ids for text in TEXTS[:9]] == theirs(TEXTS[:9])["input_ids"]


@pytest.mark.parametrize("case", CASES, ids=NAME)
def test_special_tokens_written_in_the_text_are_text(case):
    made = make(*case)
    names = [token.content for token in made.tokenizer.get_added_tokens_decoder().values()][:9]
    tokens = ids(Encoder(made.tokenizer), " ".join(names) + "a" + "".join(names))
    assert not set(tokens) & ({*made.special.values()} - {made.special.get("unk")})


@pytest.mark.parametrize("kind", ["sentencepiece-unigram", "sentencepiece-bpe"])
def test_sentinels_come_last_and_are_numbered_backwards(tmp_path, kind):
    made, plain = make(kind, sentinels=10), make(kind)
    assert [made.special[f"sentinel_{number}"] for number in range(10)] == list(range(409, 399, -1))
    assert made.special["mask"] == plain.special["mask"]
    stored.save(made, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<extra_id_0>") == 409
    assert stored.load(tmp_path).special == made.special


def test_the_same_text_gives_the_same_tokenizers_in_any_order_and_on_any_number_of_cores():
    program = (
        "import json, os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from tests.data_pipelines.tokenizers import trained; trained.TEXTS.reverse()\n"
        "print(json.dumps([trained.make(*case).tokenizer.to_str() for case in json.load(sys.stdin)]))"
    )
    where = os.environ | {"PYTHONPATH": ".", "RAYON_NUM_THREADS": "1"}
    given_ = {"input": json.dumps([*CASES]), "capture_output": True, "text": True, "check": True, "env": where}
    done = subprocess.run([sys.executable, "-c", program], **given_)
    for case, other in zip(CASES, json.loads(done.stdout), strict=True):
        assert make(*case).tokenizer.to_str() == other, case


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece-bpe", "wordlevel"])
def test_prepare_stores_hugging_faces_ids_with_any_number_of_processes(tmp_path, kind):
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number:03}.txt").write_text(text, "utf-8")
    options = {"tokenizer": kind, "vocab_size": 400, "cased": False, "heldout": 0.1}
    prepared.run(tmp_path / "one", f"text:{tmp_path}/text", **options)
    if kind == "wordlevel":
        prepared.run(tmp_path / "two", f"text:{tmp_path}/text", **options, processes=2)
        assert prepared.content(tmp_path / "one") == prepared.content(tmp_path / "two")
    corpus = Corpus(tmp_path / "one")
    theirs = AutoTokenizer.from_pretrained(corpus.tokenizer_path)
    assert [theirs.cls_token_id, theirs.unk_token_id] == [corpus.special["cls"], corpus.special["unk"]]
    found = [index for split in ("train", "heldout") for index in prepared.stored(corpus.path, split=split).tolist()]
    assert sorted(found) == sorted(theirs_of(theirs, TEXTS))
