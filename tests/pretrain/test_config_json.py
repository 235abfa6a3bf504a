"""config.json says what the model is in transformers' words."""

import pytest

from models.families.albert import AlbertConfig
from models.families.bert import BertConfig
from pretrain.huggingface.export import config_fields
from tests.pretrain import tiny


@pytest.mark.parametrize(
    ("config", "part"), [(BertConfig, "model"), (AlbertConfig, "model"), (type(tiny.ELECTRA), "generator")]
)
def test_each_rate_has_its_name(config, part):
    fields = config_fields(config(dropout=0.3, attention_dropout=0.2, init_std=0.01), part, {})
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
    assert [fields[name] for name in names] == [0.3, 0.2, 0.01]


def test_special_tokens_are_the_tokenizer_s_whatever_their_ids():
    ids = {"pad_token_id": 7, "bos_token_id": None, "eos_token_id": 9}
    assert ids.items() <= config_fields(tiny.BERT, "model", ids).items()
