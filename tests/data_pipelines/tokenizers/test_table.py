"""Every kind that can be trained: Hugging Face loads what is saved, with the same ids; the same text, the same kind."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    CTRLTokenizer,
    GPT2Tokenizer,
    OpenAIGPTTokenizer,
    RobertaTokenizer,
)

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.table import KINDS, check_specials, train
from data_pipelines.tokenizers.training import Training

TEXTS = [
    "The Café's naïve owner, Dr. Müller, sang — loudly!  \t He won 3,141 prizes; didn't he?\n\nHe did.\nTwice  ",
    "ΑΣ Straße İstanbul 日本語 テスト 中文分词。“今天”天气 e\u0301te\u0301 \u200b zero\u00a0width \u2028line",
    *(f"The word{number} of the café is\nNumber{number}." for number in range(50)),
]
SIZES = {"sentencepiece-unigram": 120, "sentencepiece-bpe": 120, "wordlevel": 60, "bpe": 400}
CLASSES = {"roberta": RobertaTokenizer, "gpt2": GPT2Tokenizer, "gpt": OpenAIGPTTokenizer, "ctrl": CTRLTokenizer}
EVERY = [(kind, specials) for kind in KINDS for specials in KINDS[kind].specials or (None,)]


def make(kind, specials=None, **options):
    return train(kind, TEXTS, Training(SIZES.get(kind, 250), specials=specials, **options))


def ids(tokenizer, text: str) -> list[int]:
    return Encoder(tokenizer).encode([text], [np.zeros(0, np.int64)]).tokens.tolist()


@pytest.mark.parametrize(("kind", "specials"), EVERY)
def test_hugging_face_loads_what_is_saved_with_the_same_ids(tmp_path, kind, specials):
    made = make(kind, specials)
    stored.save(made, tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), stored.load(tmp_path)
    assert isinstance(theirs, CLASSES.get(specials, object))
    assert again.special == made.special
    assert theirs.get_vocab().keys() == made.tokenizer.get_vocab().keys() or specials == "ctrl"
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids(made.tokenizer, text) == ids(again.tokenizer, text) == expected
    for role in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"):
        if role in made.special:
            assert getattr(theirs, f"{role}_token_id") == made.special[role]


@pytest.mark.parametrize("specials", CLASSES)
def test_a_folder_of_a_vocabulary_and_merges_is_read_as_its_class_reads_it(tmp_path, specials):
    made = make("bpe" if specials in KINDS["bpe"].specials else "character-bpe", specials)
    stored.save(made, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": {"gpt": "openai-gpt"}.get(specials, specials)}))
    theirs, again = CLASSES[specials].from_pretrained(tmp_path), stored.load(tmp_path)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids(made.tokenizer, text) == ids(again.tokenizer, text) == expected
    if specials != "ctrl":  # nothing in its files says what it is
        (tmp_path / "config.json").unlink()
        assert ids(stored.load(tmp_path / "vocab.json").tokenizer, TEXTS[0]) == ids(made.tokenizer, TEXTS[0])


def test_special_tokens_are_where_their_models_have_them():
    assert make("bpe").special == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 4, "bos": 0, "eos": 2}
    assert make("bpe", "gpt2").special == {"bos": 399, "eos": 399, "eod": 399}
    for specials, unknown in (("gpt", 0), ("ctrl", 1)):
        made = make("character-bpe", specials)
        last = made.tokenizer.get_vocab_size() - 1
        assert made.special == {"unk": unknown, "bos": last, "eos": last, "eod": last}
    theirs, ours = ByT5Tokenizer(), make("bytes")
    assert {role: ours.special[role] for role in ("pad", "eos", "unk")} == {"pad": 0, "eos": 1, "unk": 2}
    assert ours.special["sentinel_124"] == theirs.convert_tokens_to_ids("<extra_id_124>") == 383
    for text in TEXTS:
        assert ours.tokenizer.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("kind", ["sentencepiece-unigram", "sentencepiece-bpe"])
def test_sentinels_come_last_and_are_numbered_backwards(tmp_path, kind):
    made = make(kind, sentinels=10)
    assert [made.special[f"sentinel_{number}"] for number in range(10)] == list(range(129, 119, -1))
    assert made.special["mask"] == make(kind).special["mask"]
    stored.save(made, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.convert_tokens_to_ids("<extra_id_0>") == 129
    assert stored.load(tmp_path).special == made.special
    assert ids(made.tokenizer, "a <extra_id_0> b") == ids(make(kind).tokenizer, "a <extra_id_0> b")


@pytest.mark.parametrize(("kind", "specials"), EVERY)
def test_the_same_text_gives_the_same_tokenizer_in_any_order_and_on_any_number_of_cores(kind, specials):
    program = (
        "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from tests.data_pipelines.tokenizers import test_table as test\n"
        f"test.TEXTS.reverse(); sys.stdout.buffer.write(test.make({kind!r}, {specials!r}).tokenizer.to_str().encode())"
    )
    where = os.environ | {"PYTHONPATH": ".", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=where)
    assert done.stdout.decode() == make(kind, specials).tokenizer.to_str()


def test_special_tokens_that_a_kind_does_not_have_are_an_error():
    check_specials("bpe", "gpt2")
    check_specials("some/folder", None)
    with pytest.raises(UserError, match="--specials albert: .*bpe has roberta and gpt2"):
        check_specials("bpe", "albert")
    with pytest.raises(UserError, match="--specials albert: .*leave it out"):
        check_specials("wordpiece", "albert")


@pytest.mark.parametrize("specials", KINDS["sentencepiece-unigram"].specials)
def test_scores_are_hugging_faces_to_the_last_bit_which_decides_ties(tmp_path, specials):
    stored.save(make("sentencepiece-unigram", specials), tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    ours = Encoder(stored.load(tmp_path).tokenizer).tokenizer
    scores = [[score for _, score in json.loads(each.to_str())["model"]["vocab"]] for each in (ours, theirs)]
    assert scores[0] == scores[1]
