"""config.json says what the model is in transformers' words."""

import dataclasses
import json

import pytest
import torch
import transformers

from data_pipelines.errors import UserError
from models.families.albert import AlbertConfig
from models.families.bert import BertConfig
from models.families.registry import FAMILIES
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import config_fields
from tests.pretrain import tiny


@pytest.mark.parametrize(
    ("config", "part"), [(BertConfig, "model"), (AlbertConfig, "model"), (type(tiny.ELECTRA), "generator")]
)
def test_each_rate_has_its_name(config, part):
    fields = config_fields(config(dropout=0.3, attention_dropout=0.2, init_std=0.01), part, {}, {})
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
    assert [fields[name] for name in names] == [0.3, 0.2, 0.01]


def test_special_tokens_are_the_tokenizer_s_whatever_their_ids():
    ids = {"pad_token_id": 7, "bos_token_id": None, "eos_token_id": 9}
    assert ids.items() <= config_fields(tiny.BERT, "model", {}, ids).items()


LACKING = object()


def _said(tmp_path, family, **changes):
    """A folder with the config.json of a family's tiny model, some of whose fields are others or lacking."""
    fields = config_fields(FAMILIES[family].sizes["tiny"], "model", {}, {}) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not LACKING}))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("ctrl", {"layer_norm_epsilon": 0.1}, "layer_norm_epsilon=0.1, but needs 1e-06"),
        ("xlnet", {"bi_data": True}, "bi_data=True, but needs False"),
        ("albert", {"inner_group_num": 2}, "config.json has inner_group_num=2, but needs 1"),
        ("albert", {"num_hidden_groups": LACKING}, "config.json lacks num_hidden_groups; add"),  # once, for two fields
        ("albert", {"position_embedding_type": "relative_key"}, "='relative_key', but needs 'absolute'"),
        ("bigbird", {"attention_type": "other"}, "model.pattern.name='other': use one of"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds=True, but needs False"),
        ("gpt", {"afn": "silu"}, "model.activation='silu': use one of .*; mend it"),
        ("gpt2", {"embd_pdrop": 0.3, "resid_pdrop": 0.0}, "resid_pdrop=0.0 and model.dropout=0.3"),
        ("longformer", {"attention_window": None}, "windows.0=None: must be a whole number"),
        ("longformer", {"attention_window": 7}, r"model.pattern.windows=\[7\]: must be even"),
        ("longformer", {"attention_window": [2, 2, 2]}, "one for all layers, or one for each of the 2; there are 3"),
        ("mobilebert", {"classifier_activation": True}, "config.json has classifier_activation=True, but needs False"),
        ("mobilebert", {"normalization_type": "rms"}, "model.norm=None: must be"),
        ("modernbert", {"layer_types": ["sliding_attention"] * 4}, "layer_types=.*sliding_attention'.; give another"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters=.*give another",
        ),
        ("modernbert", {"global_attn_every_n_layers": 2}, "global_attn_every_n_layers=2, but needs 3"),
        ("modernbert-decoder", {"mlp_bias": True}, "mlp_bias=True, but needs False"),
        ("roberta", {"pad_token_id": 0}, "config.json has pad_token_id=0, but needs 1"),
        ("bert", {"hidden_dropout_prob": None}, "dropout=None: must be a number"),
        ("transformer-xl", {"cutoffs": None}, "cutoffs=None"),
    ],
)
def test_what_cannot_be_computed_as_said_is_refused(tmp_path, family, changes, said):
    assert config_from(_said(tmp_path, family))
    with pytest.raises(UserError, match=said):
        config_from(_said(tmp_path, family, **changes))


@pytest.mark.parametrize("family", ["modernbert", "modernbert-decoder"])
def test_a_modernbert_is_read_in_the_form_of_its_hub_folders_and_in_that_of_transformers_5(tmp_path, family):
    """Windows, bases and kinds of layers have other names in the first."""
    config = FAMILIES[family].sizes["tiny"]
    window = 8 - 2 * config.causal
    config = dataclasses.replace(
        config, global_base=7e4, local_base=3e3, pattern=dataclasses.replace(config.pattern, windows=(window,))
    )
    written = config_fields(config, "model", {}, {})
    assert written["local_attention"] == 8
    newer = {"rope_parameters", "layer_types"}
    older = {name: value for name, value in written.items() if name not in newer} | {"global_attn_every_n_layers": 3}
    of_5 = {name: value for name, value in written.items() if not name.endswith("rope_theta")}
    for fields in (older, of_5):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert config_from(tmp_path) == config
        kind = getattr(transformers, next(iter(FAMILIES[family].hf["model"].architectures))).config_class
        theirs = kind.from_dict(fields)
        assert theirs.layer_types == written["layer_types"]
        bases = {name: of["rope_theta"] for name, of in theirs.rope_parameters.items()}
        assert bases == {"full_attention": 7e4, "sliding_attention": 3e3}
    dense = dataclasses.replace(config, pattern=dataclasses.replace(config.pattern, name="dense"))
    (tmp_path / "config.json").write_text(json.dumps(config_fields(dense, "model", {}, {})))
    assert config_from(tmp_path) == dense


IMPLIED = "tie_word_embeddings", "d_head", "true_hidden_size"


def _changed(value):
    """Another value of a config.json's field, None where nobody knows one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + (1 if isinstance(value, int) else 0.1)
    others = {"gelu": "relu", "gelu_new": "relu", "absolute": "relative_key", "bi": "uni"}
    return others.get(value) if isinstance(value, str) else None


@pytest.mark.parametrize(
    "family",
    [
        "albert",
        "bert",
        "bigbird",
        "ctrl",
        "distilbert",
        "gpt",
        "gpt2",
        "longformer",
        "mobilebert",
        "modernbert",
        "modernbert-decoder",
        "roberta",
        "xlnet",
    ],
)
def test_no_field_that_changes_what_transformers_computes_is_read_over(tmp_path, family):
    """Each field of the class's config, changed alone, leaves its output as it is, or is read or refused.

    But for three: whether embeddings are tied the weights say, and widths of heads and layers can be no others."""
    config, model = FAMILIES[family].sizes["tiny"], FAMILIES[family].hf["model"]
    without_norms = family == "mobilebert"
    narrow = {"embedding": 4} if without_norms else {}
    config = dataclasses.replace(config, vocab_size=64, width=8, feed_forward=32, **narrow)
    config = dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)
    kind = getattr(transformers, next(iter(model.architectures)))
    tokens = torch.arange(24).reshape(2, 12) % 50 + 5

    def output(fields):
        built = kind(kind.config_class.from_dict(fields)).eval()
        torch.manual_seed(0)
        for parameter in built.parameters():
            parameter.data.normal_(std=0.3 if without_norms else 1.0)
        with torch.no_grad():
            return built(tokens).to_tuple()[0]

    padding = {"pad_token_id": 0} if family.startswith("modernbert") else {}  # which is there beyond this vocabulary
    fields = kind.config_class.from_dict(config_fields(config, "model", {}, padding)).to_dict()
    usual, ours = output(fields), config_from(_said(tmp_path, family, **fields))
    unknown = {name: _changed(value) for name, value in fields.items() if name not in IMPLIED}
    for name, value in unknown.items():
        if value is None or name.startswith(("output_", "return_")):
            continue
        try:
            if config_from(_said(tmp_path, family, **fields | {name: value})) != ours:
                continue
        except UserError:
            continue
        other = output(fields | {name: value})
        assert torch.allclose(other, usual, rtol=1e-4, atol=1e-4), f"{name}={value} is read over"
