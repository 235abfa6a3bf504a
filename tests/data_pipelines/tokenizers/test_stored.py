"""A tokenizer that is taken gives the ids that it gave, whatever the form of its files."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import token_bytes
from data_pipelines.tokenizers import stored as tokenizers
from data_pipelines.tokenizers.made import ROLES
from tests.data_pipelines.prepared import run, stored, write_character_vocabulary
from tests.data_pipelines.tokenizers.trained import TEXTS, make

TEXTS = TEXTS[:10]
IDS = dict(zip(("pad", "unk", "cls", "sep", "mask"), range(5), strict=True))


@pytest.mark.parametrize("kind", ["vocab.txt", "tokenizer.json", "folder", "folder with vocab.txt"])
@pytest.mark.parametrize(("cased", "keep"), [(False, False), (False, True), (True, True)])
def test_a_taken_tokenizer_gives_the_ids_it_gave(tmp_path, kind, cased, keep):
    given = make("wordpiece", None, cased, keep)
    tokenizers.save(given, tmp_path / "given")
    if kind == "folder with vocab.txt":
        (tmp_path / "given" / "tokenizer.json").unlink()
    path = tmp_path / "given" / ("" if kind.startswith("folder") else kind)
    told = (cased, keep) if kind == "vocab.txt" else (not cased, not keep)  # the others say it themselves
    made = tokenizers.load(path, *told)
    assert made.special == IDS
    tokenizers.save(made, tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert made.tokenizer.encode(text).ids == theirs(text)["input_ids"] == given.tokenizer.encode(text).ids
        pair = made.tokenizer.encode(text, "And more.")
        assert theirs(text, "And more.")["token_type_ids"] == pair.type_ids


@pytest.mark.parametrize(("kind", "specials"), [("wordpiece", None), ("bpe", "gpt2"), ("character-bpe", "ctrl")])
def test_a_tokenizer_has_the_same_files_every_time(kind, specials, tmp_path):
    for folder in (tmp_path / "once", tmp_path / "again"):
        tokenizers.save(make(kind, specials), folder)
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_byte_level_tokenizer_is_taken_as_it_is(tmp_path):
    given = Tokenizer.from_str(make("bpe").tokenizer.to_str())
    given.enable_truncation(4)  # these belong to a model, not to a corpus
    given.enable_padding(length=64)
    given.save(str(tmp_path / "tokenizer.json"))
    text = "\n".join(TEXTS).replace("<unk>", "")
    (tmp_path / "a.txt").write_text(text, "utf-8")
    manifest, _ = run(tmp_path / "out", f"text:{tmp_path}/a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert manifest["special"] == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4, "bos": 0, "eos": 2}
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert theirs.mask_token_id == 4
    found = stored(tmp_path / "out")
    assert found.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert theirs.decode(found, clean_up_tokenization_spaces=False) == text
    assert np.diff(stored(tmp_path / "out", "sentences")).max() > 4 and 1 not in found
    word_starts = np.load(tmp_path / "out" / "tables" / "word_starts.npy")[found]
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


@pytest.mark.parametrize("kind", [("bpe", "gpt2"), ("bpe", "roberta"), ("bytes", None)])
def test_the_bytes_of_a_text_are_those_of_its_tokens(tmp_path, kind):
    made, text = make(*kind), "Two cafés, 東京 and\n\tsome  white space. "
    tokenizers.save(made, tmp_path / "t")
    widths = token_bytes(tmp_path / "t")
    assert widths[made.tokenizer.encode(text, add_special_tokens=False).ids].sum() == len(text.encode())
    assert not widths[list(made.special.values())].any()


def test_the_bytes_of_other_tokens_are_not_known(tmp_path):
    tokenizers.save(make("wordpiece"), tmp_path / "t")
    assert token_bytes(tmp_path / "t") is None
