"""A trained or taken tokenizer gives the same ids here and in Hugging Face, and the encoder gives what it gives."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizer

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored as tokenizers
from data_pipelines.tokenizers.made import ROLES, Made, vocabulary
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from tests.data_pipelines.prepared import documents, run, stored, write_character_vocabulary

TEXTS = [
    "The Café's naïve owner, Dr. Müller, sang — loudly!  \t He won 3,141 prizes; didn't he?",
    "ΑΣ Straße İstanbul 日本語 テスト 中文分词 e\u0301te\u0301 \u200b zero\u00a0width\x1cfile\x0bsep \u2028line",
    "unaffable " * 3 + "x" * 120 + " ##ing # ## [UNK ] <unk> 🤗🤗 \ufffd",
    *(f"The word{number} of the café is Number{number}." for number in range(50)),
]
IDS = dict(zip(("pad", "unk", "cls", "sep", "mask"), range(5), strict=True))


@pytest.fixture(scope="module")
def trained():
    return {cased: train("wordpiece", TEXTS, Training(250, cased)).tokenizer for cased in (False, True)}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.mark.parametrize("cased", [False, True])
def test_hugging_face_loads_the_trained_tokenizer_and_gives_the_same_ids(tmp_path, trained, cased):
    tokenizers.save(Made(trained[cased], IDS, {}), tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(theirs, BertTokenizer)
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id) == (0, 1, 2)
    assert (theirs.sep_token_id, theirs.mask_token_id) == (3, 4)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == trained[cased].encode(text).ids
        pair = trained[cased].encode(text, "And more.")
        assert theirs(text, "And more.")["token_type_ids"] == pair.type_ids
    (ids,) = (theirs("Café", add_special_tokens=False)["input_ids"],)
    assert theirs.decode(ids) == ("Café" if cased else "cafe")


@pytest.mark.parametrize("cased", [False, True])
def test_the_stored_tokens_are_hugging_faces_ids(tmp_path, cased):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS), "utf-8")
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer="wordpiece", vocab_size=300, cased=cased)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    found = stored(tmp_path / "out")
    whole = theirs("\n".join(TEXTS), add_special_tokens=False)["input_ids"]
    assert found.tolist() == whole
    assert cased == ("The" in theirs.get_vocab())


def test_accents_are_kept_without_case_where_that_is_asked_for(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS), "utf-8")
    options = {"vocab_size": 300, "cased": False, "keep_accents": True}
    run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer="wordpiece", **options)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert theirs.decode(theirs("Café", add_special_tokens=False)["input_ids"]) == "café"
    bare = tokenizers.load(tmp_path / "out" / "tokenizer" / "vocab.txt", cased=False, keep_accents=True)
    (tmp_path / "out" / "tokenizer" / "tokenizer.json").unlink()
    folder = tokenizers.load(tmp_path / "out" / "tokenizer")
    for text in TEXTS:
        assert bare.tokenizer.encode(text).ids == folder.tokenizer.encode(text).ids == theirs(text)["input_ids"]


def test_training_again_in_another_process_gives_the_same_vocabulary(trained):
    program = (
        "import json, sys; from data_pipelines.tokenizers.table import Training, train;"
        "print(json.dumps(train('wordpiece', json.load(sys.stdin), Training(250)).tokenizer.get_vocab()))"
    )
    arguments = [sys.executable, "-c", program]
    done = subprocess.run(arguments, input=json.dumps(TEXTS), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == trained[False].get_vocab()


def test_the_vocabulary_has_the_size_asked_for_and_specials_first(trained):
    tokens = vocabulary(trained[False])
    assert len(tokens) == 250
    assert tokens[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(set(tokens)) == 250
    with pytest.raises(UserError, match="--vocab-size 20: use at least 64"):
        train("wordpiece", TEXTS, Training(20))


def test_rare_characters_leave_room_for_words():
    words = " ".join(f"common{number:04}" for number in range(3000))
    texts = [words] * 10 + ["".join(map(chr, range(0x4E00, 0x4E00 + 5000)))]
    tokens = vocabulary(train("wordpiece", texts, Training(2000)).tokenizer)
    assert "common" in tokens
    assert sum(0x4E00 <= ord(token[-1]) < 0x7000 for token in tokens) <= 500


@pytest.mark.parametrize("kind", ["vocab.txt", "tokenizer.json", "folder", "folder with vocab.txt"])
@pytest.mark.parametrize("cased", [False, True])
def test_a_taken_tokenizer_gives_the_ids_it_gave(tmp_path, trained, kind, cased):
    tokenizers.save(Made(trained[cased], IDS, {}), tmp_path / "given")
    if kind == "folder with vocab.txt":
        (tmp_path / "given" / "tokenizer.json").unlink()
    path = tmp_path / "given" / ("" if kind.startswith("folder") else kind)
    made = tokenizers.load(path, cased if kind == "vocab.txt" else not cased)
    assert made.special == IDS
    tokenizers.save(made, tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert made.tokenizer.encode(text).ids == theirs(text)["input_ids"] == trained[cased].encode(text).ids


def test_a_byte_level_tokenizer_is_taken_as_it_is(tmp_path):
    given = byte_level()
    given.enable_truncation(4)  # these belong to a model, not to a corpus
    given.enable_padding(length=64)
    given.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("\n".join(TEXTS).replace("<unk>", ""), "utf-8")
    manifest, _ = run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert manifest["special"] == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4, "bos": 0, "eos": 2}
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert theirs.mask_token_id == 4
    found = stored(tmp_path / "out")
    bounds = stored(tmp_path / "out", "sentences")
    word_starts = np.load(tmp_path / "out" / "tables" / "word_starts.npy")[stored(tmp_path / "out")]
    text = (tmp_path / "a.txt").read_text("utf-8")
    assert found.tolist() == theirs(text)["input_ids"]
    assert theirs.decode(found, clean_up_tokenization_spaces=False) == text
    assert np.diff(bounds).max() > 4
    assert 1 not in found
    pieces = theirs.convert_ids_to_tokens(found)
    assert all(start for piece, start in zip(pieces, word_starts, strict=True) if piece.startswith("Ġ"))
    assert 0.2 < word_starts.mean() < 0.8


def test_a_folder_names_its_own_special_tokens(tmp_path):
    tokens = ["<P>", "<U>", "<C>", "<S>", "<M>", "word"]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="<U>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = dict(zip([f"{role}_token" for role in IDS], tokens, strict=False))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | {"mask_token": {"content": "<M>"}}))
    assert tokenizers.load(tmp_path)[1] == IDS


@pytest.mark.parametrize("role", IDS)
def test_a_tokenizer_may_lack_a_special_token(tmp_path, role):
    path = write_character_vocabulary(tmp_path / "vocab.txt")
    token = ROLES[role][0]
    path.write_text(path.read_text().replace(token, "[OTHER]"))
    assert tokenizers.load(path).special == {other: index for other, index in IDS.items() if other != role}


def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(UserError, match="nothing.json does not exist"):
        tokenizers.load(tmp_path / "nothing.json")
    with pytest.raises(UserError, match="no tokenizer.json, vocab.txt, spiece.model or vocab.json"):
        tokenizers.load(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="vocab.txt cannot be read"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match="tokenizer.json cannot be read"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json is not JSON"):
        tokenizers.load(tmp_path)


def test_a_special_token_written_in_the_text_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("A [MASK] b.")
    run(tmp_path / "out", f"text:{tmp_path}/a.txt")
    assert documents(tmp_path / "out") == [["A [ MASK ] b ."]]
    assert stored(tmp_path / "out").min() > 4
