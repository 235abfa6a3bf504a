"""Prompts are continued as transformers' `generate` continues them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from data_pipelines.errors import UserError
from models.core.noise import row_keys
from models.core.parameters import leaves, nest
from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.generation import loop
from pretrain.generation.decoding import fill, fills, generate, left_padded
from pretrain.generation.loop import choose, likeliest, of_next, of_texts, ready
from pretrain.generation.settings import Decoding
from pretrain.objectives.protocols import CausalDecoder, EncoderDecoder
from pretrain.recipe import Phase
from pretrain.training.assembly import assemble, model_of
from pretrain.training.opened import Opened, Restored
from tests.contract import cases, torch_reference
from tests.pretrain import reference, tiny

MODULES = {name: model_of(case.model, case.objective.asks, Program(depth="scan")) for name, case in cases.CASES.items()}
DECODERS = [name for name, module in MODULES.items() if isinstance(module, CausalDecoder | EncoderDecoder)]
DECODERS.remove("bart-translation")  # transformers has no such class; it writes as BART does
NEW, STOP = 12, (21, 25, 33, 53, 54, 57, 61, 76, 85)
GREEDY = Decoding(max_tokens=NEW, stop=STOP)
DRAWN = dataclasses.replace(GREEDY, sample=True, stop=())


def prompts(number=50, longest=16):
    rng = np.random.default_rng(3)
    return [rng.integers(5, 100, length).tolist() for length in rng.integers(1, longest + 1, number)]


def eloquent(name):
    """A model whose texts do not repeat a token for ever, and whose logits differ."""
    params = dict(leaves(cases.params(cases.CASES[name])))
    return MODULES[name], nest(
        {path: leaf * (3 if path.endswith(("kernel", "tokens")) else 1) for path, leaf in params.items()}
    )


def of_torch(name):
    """transformers' model with the same parameters."""
    return torch_reference.with_parameters(cases.CASES[name], "model", eloquent(name)[1]).eval()


@pytest.fixture(scope="module")
def gpt2():
    return eloquent("gpt2")


@pytest.fixture(scope="module")
def torch_gpt2():
    return of_torch("gpt2")


def theirs(model, prompts, number=1, **settings):
    """What transformers makes of prompts of different length, in one batch."""
    longest = max(map(len, prompts))
    at_end = model.config.is_encoder_decoder  # where padding is, which an encoder's positions count
    row = lambda of, padding: of + padding if at_end else padding + of
    padded = torch.tensor([row(prompt, [0] * (longest - len(prompt))) for prompt in prompts])
    real = torch.tensor([row([1] * len(prompt), [0] * (longest - len(prompt))) for prompt in prompts])
    if model.config.is_encoder_decoder:
        begin = model.config.decoder_start_token_id
        settings |= {"decoder_start_token_id": begin, "forced_eos_token_id": None}
    settings = {"eos_token_id": list(STOP), "do_sample": False, "num_return_sequences": number} | settings
    with torch.no_grad():
        tokens = model.generate(padded, attention_mask=real, max_new_tokens=NEW, pad_token_id=0, **settings)
    begun = 1 if model.config.is_encoder_decoder else longest
    texts = [until_stop(row) for row in tokens[:, begun:].tolist()]
    return [texts[begin : begin + number] for begin in range(0, len(texts), number)]


def until_stop(text):
    ends = [index for index, token in enumerate(text) if token in STOP]
    return text[: ends[0] + 1] if ends else text


@pytest.mark.parametrize("name", DECODERS)
def test_the_likeliest_tokens_are_transformers_(name):
    found = generate(*eloquent(name), prompts(), GREEDY)
    assert found == theirs(of_torch(name), prompts())
    lengths = {len(text) for (text,) in found}
    assert NEW in lengths and len(lengths) > 2  # some end at once, some late, some never


SEARCHES = [
    ("gpt2", {"length_penalty": 0.6, "no_repeat_ngram_size": 3}),  # of two, theirs counts padding
    ("gpt2", {"early_stopping": True}),
    ("gpt2", {"early_stopping": "never"}),
    ("t5", {"length_penalty": 0.5, "no_repeat_ngram_size": 2}),
    ("bart", {"length_penalty": 0.5, "no_repeat_ngram_size": 3}),
    ("transformer", {"length_penalty": 0.6}),
]


@pytest.mark.parametrize(("name", "settings"), SEARCHES)
def test_the_best_of_four_beams_are_transformers_(name, settings):
    given, model = prompts(48), of_torch(name)  # in rows of 16
    found = generate(*eloquent(name), given, dataclasses.replace(GREEDY, beams=4, **settings), number=3)
    assert found == theirs(model, given, number=3, num_beams=4, **settings)
    assert len({len(text) for texts in found for text in texts}) > 3
    for setting in settings:  # each makes a difference
        others = {name: value for name, value in settings.items() if name != setting}
        assert found != theirs(model, given, number=3, num_beams=4, **others)


class WritingBert(transformers.GenerationMixin, transformers.BertForMaskedLM):
    """transformers' search in which a BERT reads the whole source and target and a [MASK] after them for each token.

    sources: number of leading tokens of a row, with padding, that are the source.
    """

    sources = 0

    def prepare_inputs_for_generation(self, input_ids, attention_mask, **rest):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask, **rest):
        rows, place = len(input_ids), torch.arange(input_ids.shape[1] + 1)
        real = torch.cat([attention_mask, torch.ones(rows, 1).long()], 1)
        of_source = place < self.sources
        seen = (of_source | (~of_source[:, None] & (place <= place[:, None]))) & (real[:, None] > 0)
        out = super().forward(
            torch.cat([input_ids, torch.full((rows, 1), reference.MASK)], 1),
            attention_mask=torch.where(seen[:, None], 0.0, torch.finfo(torch.float32).min),
            token_type_ids=torch.where(of_source, 4, 5).expand(rows, -1),
            position_ids=(real.cumsum(1) - 1).clamp(min=0),
        )
        out.logits = out.logits[:, -1:]
        return out


@pytest.mark.parametrize(("beams", "depth"), [(1, "unroll"), (4, "scan")])
def test_what_is_written_mask_by_mask_is_what_a_search_that_reads_all_anew_finds(beams, depth):
    (model, params), theirs_model = eloquent("unilm"), of_torch("unilm")
    theirs_model.__class__, theirs_model.generation_config = WritingBert, transformers.GenerationConfig()
    sources = [[2, *prompt, 3] for prompt in prompts(50, 12)]
    theirs_model.sources = max(map(len, sources))
    given = [[*source, reference.MASK] for source in sources]
    decoding = dataclasses.replace(GREEDY, beams=beams)
    found = generate(model.clone(program=Program(depth=depth)), params, given, decoding)
    assert found == theirs(theirs_model, sources, num_beams=beams, use_cache=False)
    assert len({len(text) for (text,) in found}) > 2 and len({tuple(text) for (text,) in found}) > 40


def test_the_place_of_a_mask_is_that_of_the_first_token():
    given = *eloquent("unilm"), [[*range(5, 25), reference.MASK]]  # 20 of 32 positions
    texts = lambda model, decoding, mesh: lambda *arrays: jax.numpy.zeros((1, 1, decoding.max_tokens), int)
    assert len(generate(*given, Decoding(max_tokens=12), program=texts)[0][0]) == 12
    with pytest.raises(UserError, match="20 tokens and --max-tokens 13 exceed the model's 32 positions"):
        generate(*given, Decoding(max_tokens=13))


@pytest.mark.parametrize("depth", ["scan", "unroll"])
def test_a_model_with_a_memory_writes_what_is_likeliest_where_all_is_read_at_once(depth):
    params = eloquent("transformer-xl")[1]
    model = MODULES["transformer-xl"].clone(program=Program(depth=depth))
    given = prompts(20)
    found = [text for (text,) in generate(model, params, given, dataclasses.replace(GREEDY, stop=()))]
    rows = np.zeros((len(given), 16 + NEW), np.int32)
    for row, prompt, text in zip(rows, given, found, strict=True):
        row[: len(prompt) + NEW] = prompt + text
    inputs, memory = {"tokens": rows, "segments": (rows > 0).astype(np.int32)}, model.empty_memory(len(rows), 0)

    @jax.jit
    def logits_of(inputs, memory):
        hidden, _ = model.apply({"params": params}, inputs, memory, method="read")
        return model.apply({"params": params}, hidden, method="token_logits").reshape(*rows.shape, -1)

    logits = logits_of(inputs, memory)
    for likeliest_next, prompt, text in zip(logits.argmax(-1), given, found, strict=True):
        assert likeliest_next[len(prompt) - 1 :][:NEW].tolist() == text
    assert len({tuple(text) for text in found}) > 10


@pytest.mark.parametrize("name", ["gpt2", "transformer-xl"])
def test_rows_of_a_state_that_are_taken_go_on_as_those_that_were_read(name):
    model, params = eloquent(name)
    apply = lambda method, *given: model.apply({"params": params}, *given, method=method)
    tokens, segments = left_padded([*prompts(2), [5]])
    more = of_next(np.array([[9], [7], [9]], np.int32), segments.sum(1))
    order = np.array([2, 0, 0])

    @jax.jit
    def followed(texts, more):
        state = apply("begin", texts, 4)[1]
        expected, _ = apply("advance", more, state)
        of_taken = {field: array[order] for field, array in more.items()}
        return expected, apply("advance", of_taken, model.take(state, order))[0]

    expected, taken = jax.device_get(followed(of_texts(tokens, segments), more))
    np.testing.assert_allclose(taken, expected[order], atol=1e-6)
    assert np.abs(expected[0] - expected[2]).max() > 1e-2


def test_a_penalty_for_repetition_and_none_of_ngrams_are_transformers_(gpt2, torch_gpt2):
    same = [prompt for prompt in prompts(200) if len(prompt) == 6]  # theirs penalises padding, too
    settings = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    found = generate(*gpt2, same, dataclasses.replace(GREEDY, **settings))
    assert found == theirs(torch_gpt2, same, **settings)
    assert all(found != theirs(torch_gpt2, same, **{name: value}) for name, value in settings.items())


def test_the_loop_is_compiled_by_the_options_for_few_rows(gpt2, monkeypatch):
    monkeypatch.setattr(loop, "small_product_options", lambda mesh: {"xla_of_few_rows": True})
    with pytest.raises(Exception, match="No such compile option: 'xla_of_few_rows'"):
        generate(*gpt2, [[5]], Decoding(max_tokens=1))


def test_weights_that_are_ready_write_the_same(gpt2):
    model, told = MODULES["gpt2"].clone(program=Program(depth="unroll")), []
    found = generate(model, ready(model, gpt2[1]), prompts(70), GREEDY, tell=told.append)
    assert found == generate(*gpt2, prompts(70), GREEDY) and told == [64, 6]


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_what_is_drawn_for_a_prompt_depends_on_seed_and_place_not_on_the_others(name):
    model = eloquent(name)
    drawn = lambda given, seed: generate(*model, given, DRAWN, seed, number=2)
    first, second, third, fourth = prompts(4)
    many = drawn([first, second, third, fourth], 1)
    assert drawn([first, second, fourth, third], 1)[:2] == many[:2]
    assert drawn([first, second, fourth, third], 1)[2:] != many[:1:-1]
    assert many[0][0] != many[0][1]
    assert drawn([first, second, third, fourth], 2)[:2] != many[:2]


def test_tokens_are_drawn_as_often_as_transformers_says():
    """Of a temperature, then the likeliest by number, then by probability."""
    drawing = dataclasses.replace(DRAWN, temperature=0.7, top_k=8, top_p=0.8)
    logits = np.random.default_rng(0).normal(scale=2, size=100).astype(np.float32)
    scores = torch.from_numpy(logits)[None]
    for warper in TemperatureLogitsWarper(0.7), TopKLogitsWarper(8), TopPLogitsWarper(0.8):
        scores = warper(None, scores)
    expected = scores.softmax(-1)[0].numpy().astype(np.float64)
    draws = 20_000
    keys = row_keys(0, 0, np.arange(draws))
    drawn = jax.jit(lambda logits, keys: choose(logits, keys, drawing))(np.tile(logits, (draws, 1)), keys)
    counts = np.bincount(np.asarray(drawn), minlength=100)
    likely = expected > 0
    assert 3 < likely.sum() < 8 and counts[~likely].sum() == 0
    assert chisquare(counts[likely], draws * expected[likely] / expected.sum()).pvalue > 1e-3


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.8), (5, 1.0), (20, 0.5), (100, 0.999), (1, 0.1)])
def test_the_likeliest_that_are_drawn_from_are_transformers_(top_k, top_p):
    logits = np.random.default_rng(1).normal(scale=3, size=(6, 100)).astype(np.float32)
    scores = torch.from_numpy(logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    np.testing.assert_array_equal(likeliest(logits, top_k, top_p), scores)


def test_a_prompt_has_tokens_and_a_model_that_reads_both_sides_continues_none(gpt2):
    with pytest.raises(UserError, match="prompt 2: has no tokens"):
        generate(*gpt2, [[5], []], GREEDY)
    classifying = FAMILIES["bert"].module(tiny.BERT, Program(), ("pooler", "classifier"))
    said = "a bert model with the heads pooler, classifier neither fills masks nor continues .*gpt2, .*transformer-xl"
    with pytest.raises(UserError, match=said):
        generate(classifying, {}, [[5]], GREEDY)
    cut = FAMILIES["transformer-xl"].module(dataclasses.replace(tiny.TRANSFORMER_XL, cutoffs=(100,)), Program())
    with pytest.raises(UserError, match=r"model.cutoffs=\(100,\): an adaptive softmax cannot continue"):
        generate(cut, {}, [[5]], GREEDY)


def test_masks_are_filled_with_the_global_tokens_that_rows_name():
    model, params = eloquent("longformer")
    row = np.array([[2, 9, 33, 4, 71, 14, 3, 5, 62, 50, 3]], np.int32)  # 2 begins, 3 separates, 4 masks
    inputs = {"tokens": row, "segments": np.ones_like(row), "types": np.zeros_like(row)}
    inputs = {name: np.pad(array, ((0, 0), (0, 1))) for name, array in inputs.items()}  # to the length

    @jax.jit
    def likeliest_filling(named):
        apply = lambda *given, method: model.apply({"params": params}, *given, method=method)
        hidden = apply(inputs | {"globals": named}, None, np.array([[3]]), method="encode")
        return jax.nn.softmax(apply(hidden, method="token_logits")).max()

    expected, without = (float(likeliest_filling(np.array([named]))) for named in ([0, 6, 10, -1], [-1] * 4))
    (found,) = fill(model, params, row[0].tolist(), 4, 12, 1, global_tokens=4)
    assert found[0][1] == pytest.approx(expected, rel=1e-5) != pytest.approx(without, rel=1e-3)


def test_a_model_that_reads_more_than_text_fills_no_masks():
    with pytest.raises(UserError, match="a model of bigbird-etc needs 'global_"):
        fill(MODULES["bigbird-etc"], {}, [5, 6], 6, 8, 1)


def test_models_that_fill_masks_are_those_whose_tokens_do_not_see_themselves():
    """Those of XLNet's content stream do."""
    assert fills(MODULES["unilm"]) and fills(MODULES["bert"]) and fills(MODULES["electra"])
    assert not fills(FAMILIES["unilm"].module(cases.CASES["unilm"].model, Program(), ("pooler", "classifier")))
    assert not fills(MODULES["xlnet"]) and not fills(MODULES["gpt2"]) and not fills(MODULES["t5"])


def test_positions_that_no_row_had_are_said(caplog, tmp_path):
    recipe = tiny.gpt2(phases=(Phase(0.5, 16, 8), Phase(0.5, 32, 8)))
    about = dict.fromkeys(("identity", "corpus", "fingerprint"), "") | {"init_heads_anew": False, "versions": {}}
    (tmp_path / "run.json").write_text(json.dumps(about | {"init_from": None}))
    for phase, length, said in (0, 16, ""), (0, 17, "positions 16 to 16"), (1, 32, ""), (1, 64, "positions 32 to 63"):
        caplog.clear()
        run = Restored(assemble(recipe), 5, phase, {}, {}, None, [])
        Opened(tmp_path, None, {}, None, None, None, run).warn_beyond_trained(length)
        assert said in caplog.text and bool(said) == bool(caplog.text)
