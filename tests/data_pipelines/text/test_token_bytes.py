"""The bytes of a text are those of its tokens, where these are of bytes."""

import pytest

from data_pipelines.text.token_bytes import token_bytes
from data_pipelines.tokenizers import stored, table
from data_pipelines.tokenizers.training import Training

TEXT = "Two cafés, 東京 and\n\tsome  white space. "


@pytest.mark.parametrize(("kind", "specials"), [("bpe", "gpt2"), ("bpe", "roberta"), ("bytes", None)])
def test_tokens_of_bytes_add_up_to_the_text(tmp_path, kind, specials):
    asked = Training(300, specials=specials)
    made = table.learn(kind, table.KINDS[kind].count([TEXT] * 9, asked), asked)
    stored.save(made, tmp_path / "t")
    widths = token_bytes(tmp_path / "t")
    ids = made.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert widths[ids].sum() == len(TEXT.encode())
    assert not widths[list(made.special.values())].any()


def test_of_other_tokens_it_is_not_known(tmp_path):
    made = table.learn("wordpiece", table.KINDS["wordpiece"].count([TEXT], Training(100)), Training(100))
    stored.save(made, tmp_path / "t")
    assert token_bytes(tmp_path / "t") is None
