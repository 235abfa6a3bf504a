"""Each head for tasks of each family beside transformers' class that has it: logits, loss, gradients, folders."""

import dataclasses
import functools
import itertools
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.longformer import modeling_longformer

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.training import Training
from finetune.task import apply_head, hidden_states
from finetune.tasks.answer import NOTHING, Answer, Question
from finetune.tasks.classify import Classify, Labelled
from finetune.training import check_heads, source_model
from models.attention.patterns.pattern import Pattern
from models.blocks import heads
from models.blocks.heads import CHOICE, CLASSIFIER, SPANS, TAGGER
from models.blocks.positions import gather_positions
from models.core.parameters import leaves, nest
from models.families import bart, bigbird
from models.families.registry import FAMILIES
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import export
from pretrain.huggingface.load import load, to_target
from pretrain.huggingface.tensors import architecture, tensors
from pretrain.objectives.objective import Moment, Phase
from tests.contract.cases import noise
from tests.data_pipelines.tokenizers.trained import train
from tests.models.shapes import parameter_shapes, random_params
from tests.pretrain import reference, tiny
from tests.pretrain.hugging_face_folders import TEXTS, without_padding

ROWS, LENGTH, CHOICES = 4, 16, 2
SIZES = {"width": 16, "depth": 1, "heads": 2, "feed_forward": 64, "attention_dropout": 0.0, "dropout": 0.0}
SIZES |= {"vocab_size": 150, "init_std": 0.3}
LABELS = "no", "perhaps", "yes"
SHORT = SIZES | {"positions": 32}
NARROW = SHORT | {"embedding": 8}
NEAR = Pattern("longformer", block=2, windows=(8,))
WINDOW = Pattern("longformer", block=2, windows=(6,))
ALL = CLASSIFIER, TAGGER, SPANS, CHOICE
TASKS = {  # family -> (fields of its config, its heads)
    "albert": (NARROW, ALL),
    "bart": (SHORT | {"decoder_depth": 1}, (CLASSIFIER, SPANS)),
    "bert": (SHORT, ALL),
    "bigbird": (SHORT | {"pattern": Pattern()}, ALL),
    "ctrl": (SHORT, (CLASSIFIER,)),
    "deberta-v2": (SHORT | {"buckets": 8, "furthest": 20, "enhanced_decoder": False}, ALL),
    "distilbert": (SHORT, ALL),
    "electra-encoder": (NARROW, ALL),
    "ernie": (SHORT, ALL),
    "gpt": (SHORT, (CLASSIFIER,)),
    "gpt2": (SHORT, (CLASSIFIER, TAGGER, SPANS)),
    "longformer": (SHORT | {"pattern": NEAR}, ALL),
    "mobilebert": (NARROW | {"bottleneck": 12}, ALL),
    "modernbert": (SHORT | {"depth": 4, "pattern": WINDOW}, ALL),
    "modernbert-decoder": (SHORT | {"depth": 4, "pattern": WINDOW}, (CLASSIFIER,)),
    "roberta": (SHORT, ALL),
    "unilm": (SHORT, ALL),
    "xlnet": (SIZES, ALL),
}
CASES = [(family, head) for family, (_, heads) in TASKS.items() for head in heads]
AT_THE_END = "bart", "ctrl", "gpt", "gpt2", "modernbert-decoder", "xlnet"  # families that read a row at its last token


@functools.cache
def config_of(family, labels=LABELS):
    return dataclasses.replace(FAMILIES[family].sizes["tiny"], labels=labels, **TASKS[family][0])


@functools.cache
def batch_of(family):
    """Rows of two texts and padding, and what is right of them for each head."""
    rng, column, config = np.random.default_rng(0), np.arange(LENGTH), config_of(family)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, ROWS)
    real, second = column < lengths[:, None], column >= lengths[:, None] // 2
    types = second & real & (getattr(config, "types", 2) > 1)
    tokens = np.where(real, rng.integers(5, config.vocab_size, real.shape), reference.padding(config))
    if family == "bart":  # whose classes are read at </s>
        tokens[np.arange(ROWS), lengths - 1] = bart.START
    return {
        "tokens": tokens.astype(np.int32), "types": types.astype(np.int32), "segments": real.astype(np.int32),
        "place": (lengths - 1 if family in AT_THE_END else 0 * lengths).astype(np.int32),
        CLASSIFIER: np.array([2, 0, 1, 1]), TAGGER: np.where(real, rng.integers(0, 3, real.shape), -100),
        SPANS: np.stack([lengths // 3, lengths // 2], 1), CHOICE: np.array([1, 0]),
    }  # fmt: skip


def batch_for(family, head):
    """The same, with the tokens that see all and that all see: of classes the first, of questions and choices some."""
    if family != "longformer":
        return batch_of(family)
    some = {CLASSIFIER: 1, SPANS: 5, CHOICE: 3}.get(head, 0)
    chosen = np.where(np.arange(5) < some, np.arange(5), -1).astype(np.int32)
    return batch_of(family) | {"globals": np.broadcast_to(chosen, (ROWS, 5))}


def model_for(family, head):
    """(config, heads) of the class that has a head."""
    labels = LABELS if head in (CLASSIFIER, TAGGER) else ()
    return config_of(family, labels), FAMILIES[family].heads_with((head,))


def loss_of(head, logits, right, real):
    """logits: as each head gives them."""
    log = lambda scores: jax.nn.log_softmax(scores, axis=-1)
    of_right = lambda log, right: jnp.take_along_axis(log, jnp.maximum(right, 0)[..., None], -1)[..., 0]
    if head == TAGGER:
        return -jnp.sum(of_right(log(logits), right) * real) / real.sum()
    if head == SPANS:
        logits = jnp.where(real[..., None] > 0, logits, -jnp.inf).swapaxes(1, 2)  # [rows, 2, length]
    if head == CHOICE:
        logits = logits.reshape(-1, CHOICES)
    return -of_right(log(logits), right).mean()


@functools.cache
def program_of(family):
    """(parameters, batch, how much each head's loss counts) -> ((loss, logits of each head), gradients); one program
    for all of them."""
    config, read_by = config_of(family), TASKS[family][1]
    program = dataclasses.replace(reference.FLOAT32, attention="dense" if family == "longformer" else "xla")
    model = FAMILIES[family].module(config, program, made_of(family))

    def run(params, batch, counted):
        hidden = hidden_states(model, params, batch)
        row = gather_positions(hidden, batch["place"][:, None])[:, 0]
        read = {head: row if head in (CLASSIFIER, CHOICE) else hidden for head in read_by}
        logits = {head: apply_head(model, params, head, of) for head, of in read.items()}
        losses = [loss_of(head, logits[head], batch[head], batch["segments"]) for head in read_by]
        return sum(part * loss for part, loss in zip(counted, losses, strict=True)), logits

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def made_of(family):
    """All heads of a family's classes for tasks."""
    return tuple({name: None for head in TASKS[family][1] for name in FAMILIES[family].heads_with((head,))})


def torch_loss(family, head, model, batch):
    """(loss, logits of the rows, or of their tokens, in our order)."""
    ends = LENGTH - batch["segments"].sum(1) if family == "xlnet" else 0 * batch["place"]  # there padding is before
    moved = lambda array, by: np.stack([np.roll(row, number, 0) for row, number in zip(array, by, strict=True)])
    batch = batch | {name: moved(batch[name], ends) for name in ("tokens", "types", "segments", TAGGER)}
    inputs = reference.torch_inputs(
        batch, types=getattr(config_of(family), "types", 2 * (not family.startswith("modernbert")))
    )
    if family in ("bart", "ctrl", "gpt", "gpt2"):  # whose types of tokens are tokens
        del inputs["token_type_ids"]
    if family != "longformer":
        inputs.pop("global_attention_mask", None)
    if head == CHOICE:
        inputs = {name: array.reshape(-1, CHOICES, LENGTH) for name, array in inputs.items()}
    if head == SPANS:
        if family == "bigbird":  # of tokens it would mask the first text's scores
            inputs["inputs_embeds"] = model.bert.embeddings.word_embeddings(inputs.pop("input_ids"))
        out = model(**inputs)
        logits = torch.stack([out.start_logits, out.end_logits], -1)
        logits = torch.stack([row.roll(-int(number), 0) for row, number in zip(logits, ends, strict=True)])
        real = torch.from_numpy(np.arange(LENGTH) < batch["segments"].sum(1)[:, None])
        masked = logits.masked_fill(~real[..., None], -torch.inf)
        return torch.nn.functional.cross_entropy(masked, torch.from_numpy(batch[SPANS])), logits.detach().numpy()
    out = model(**inputs, labels=torch.from_numpy(batch[head]))
    logits = out.logits.detach().numpy()
    return out.loss, moved(logits, -ends) if head == TAGGER else logits.reshape(ROWS, -1)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The id of padding -> a tokenizer's folder."""
    folder = tmp_path_factory.mktemp("tokenizers")
    stored.save(train("wordpiece", TEXTS, Training(SIZES["vocab_size"])), folder / "0")
    stored.save(train("bpe", TEXTS, Training(300)), folder / "1")
    return {number: folder / str(number) for number in (0, 1)}


@pytest.mark.parametrize(("family", "head"), CASES)
def test_a_head_is_that_of_transformers_class(family, head, tmp_path, tokenizers):
    config, made = model_for(family, head)
    model = reference.torch_model(config, "model", heads=made)
    model.save_pretrained(tmp_path / "theirs")
    params = load(tmp_path / "theirs", config, parameter_shapes(config, made), tmp_path / "theirs")

    batch = batch_for(family, head)
    shapes = parameter_shapes(config_of(family), made_of(family))
    every = {path: np.zeros(of.shape, np.float32) for path, of in leaves(shapes)}
    counted = np.float32([one == head for one in TASKS[family][1]])
    (loss, logits), gradients = program_of(family)(nest(every | dict(leaves(params))), batch, counted)
    expected, scores = torch_loss(family, head, model, batch)
    expected.backward()
    real = batch["segments"] > 0 if head in (TAGGER, SPANS) else ...
    np.testing.assert_allclose(logits[head][real], scores[real], rtol=1e-5, atol=1e-6 * np.abs(scores[real]).max())
    assert abs(float(loss) - expected.item()) <= 1e-5 * abs(expected.item())
    flat = dict(leaves(jax.device_get(gradients)))
    own = nest({path: flat.pop(path) for path, _ in leaves(params)})
    ours = {name: one.array() for name, one in tensors(own, config, "model").items()}
    theirs = reference.torch_gradients(model)
    # A shift of all scores changes no softmax: the gradients of such biases are rounding.
    whole = np.sqrt(sum(np.square(array).sum() for array in theirs.values()))
    assert theirs.keys() <= ours.keys() and whole > 0
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) <= 2e-5 * np.linalg.norm(gradient) + 1e-7 * whole, name
    others = [*flat.values(), *(ours[name] for name in ours.keys() - theirs.keys())]
    assert not any(gradient.any() for gradient in others)

    export(params, config, tokenizers[reference.padding(config)], tmp_path / "ours")
    loader = getattr(transformers, architecture(config, "model", params))
    loaded, info = loader.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()) and type(loaded) is type(model)
    named = dict(model.named_parameters())
    assert all(torch.equal(parameter, named[name]) for name, parameter in loaded.named_parameters())
    assert [*loaded.config.id2label.values()] == [*(config.labels or ("LABEL_0", "LABEL_1"))]


@pytest.mark.parametrize(
    "family", ["albert", "bart", "bigbird", "deberta-v2", "electra-encoder", "gpt2", "roberta", "xlnet"]
)
def test_a_head_has_dropout_where_transformers_class_has_it(family, monkeypatch):
    trunk = FAMILIES[family].hf["model"].prefix
    for head in TASKS[family][1]:
        theirs, ours, (same, made) = [], [], model_for(family, head)
        config = dataclasses.replace(same, dropout=0.3)
        torch_model = reference.torch_model(config, "model", heads=made).train()
        for name, module in torch_model.named_modules():
            if isinstance(module, torch.nn.Dropout) and not name.startswith(trunk):
                kept = lambda one, given, out, to=theirs: to.extend([(one.p, out.shape[-1])] * (one.p > 0))
                module.register_forward_hook(kept)
        torch_loss(family, head, torch_model, batch_for(family, head))

        def record(x, rate, keys, to=ours):
            to.extend([(rate, x.shape[-1])] * (rate > 0 and keys is not None))
            return x

        for module in (heads, bigbird):
            monkeypatch.setattr(module, "dropout", record)
        model, hidden = FAMILIES[family].module(config, reference.FLOAT32, made), np.zeros((ROWS, config.width), "f")
        jax.eval_shape(
            lambda params, model=model, hidden=hidden, head=head: apply_head(model, params, head, hidden, noise(ROWS)),
            parameter_shapes(same, made),
        )
        assert ours == theirs, head


def test_the_auxiliary_loss_is_the_language_models_that_has_the_same_trunk(tmp_path):
    config, batch = config_of("gpt"), batch_of("gpt")
    model = reference.torch_model(config, "model", heads=(CLASSIFIER,))
    model.save_pretrained(tmp_path)
    params = load(tmp_path, config, parameter_shapes(config, (CLASSIFIER,)), tmp_path)
    writer = transformers.OpenAIGPTLMHeadModel(model.config)
    writer.transformer, writer.lm_head.weight = model.transformer, model.transformer.tokens_embed.weight
    tokens, real = torch.from_numpy(batch["tokens"]).long(), torch.from_numpy(batch["segments"])
    of_rows = model(tokens, attention_mask=real, labels=torch.from_numpy(batch[CLASSIFIER])).loss
    expected = of_rows + 0.5 * writer(tokens, attention_mask=real, labels=tokens.where(real > 0, -100)).loss
    expected.backward()

    task = Classify(auxiliary=0.5).suited(config)
    rows = {name: batch[name] for name in ("tokens", "segments", "place")}
    rows["labels"] = batch[CLASSIFIER].astype(np.int32)
    network = FAMILIES["gpt"].module(config, reference.FLOAT32, (CLASSIFIER,))

    def loss(params):
        terms, weights = task.loss(network, params, rows, {}, Moment(noise(ROWS), True))[0], task.weights(rows)
        return sum(factor * terms[name].sum / weights[name] for name, factor in task.coefficients(0).items())

    found, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(float(found) - expected.item()) <= 1e-5 * expected.item()
    ours, theirs = tensors(jax.device_get(gradients), config, "model"), reference.torch_gradients(model)
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name].array() - gradient) <= 2e-5 * np.linalg.norm(gradient), name
    with pytest.raises(UserError, match="--auxiliary 0.5: is for models that read from left to right"):
        Classify(auxiliary=0.5).suited(config_of("bert"))


def test_of_an_xlnet_chosen_tokens_are_as_among_all():
    config, batch = config_of("xlnet"), batch_of("xlnet")
    model, slots = FAMILIES["xlnet"].module(config, reference.FLOAT32), batch["place"][:, None] // (1, 2)
    both = jax.jit(lambda params: [hidden_states(model, params, batch, None, at) for at in (slots, None)])
    few, every = both(random_params(config))
    np.testing.assert_allclose(few, gather_positions(every, slots), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["longformer", "roberta"])
def test_the_token_at_which_a_longformer_reads_a_row_is_global(family, tokenizers):
    task = Classify(text=("a", "b")).suited(config_of(family))
    rows = task.encode([Labelled("", ("the fox", "a dog"), "no")] * 2, stored.load(tokenizers[1]), LABELS, LENGTH)
    assert ("globals" in rows.columns) == ("globals" in task.spec(Phase(1.0, LENGTH, 2))) == (family == "longformer")
    assert family == "roberta" or rows.columns["globals"].tolist() == [[0], [0]]


@pytest.mark.parametrize(("family", "place"), [("bart", -1), ("roberta", 0)])
def test_classes_are_read_where_the_model_has_read_the_whole_row(family, place, tokenizers):
    made = stored.load(tokenizers[1])
    rows = Classify().suited(config_of(family)).encode([Labelled("", ("the fox",), "no")], made, LABELS, LENGTH)
    assert rows.columns["place"].tolist() == [range(len(rows.tokens))[place]]
    assert rows.tokens[[0, -1]].tolist() == [made.special["cls"], made.special["sep"]]


@pytest.mark.parametrize("question", ["the fox", "the quick brown fox jumps over it"])
def test_of_a_question_those_tokens_are_global_that_transformers_takes(question, tokenizers):
    task, made = Answer(max_question_tokens=8).suited(config_of("longformer")), stored.load(tokenizers[1])
    asked = Question("", "", question, "a corpus of small texts, for tests only", None, NOTHING)
    rows = task.encode([asked], made, (), 20)
    assert len(rows) > 1 and rows.columns["globals"].shape[1:] == task.spec(Phase(1.0, 20, 2))["globals"].shape == (9,)
    for row, (begin, end) in enumerate(itertools.pairwise(rows.starts)):
        tokens = torch.from_numpy(rows.tokens[None, begin:end])
        (expected,) = modeling_longformer._compute_global_attention_mask(tokens, made.special["sep"])
        chosen = rows.columns["globals"][row]
        assert chosen[chosen >= 0].tolist() == np.flatnonzero(expected).tolist()


@pytest.mark.parametrize("both", [tiny.ELECTRA, tiny.DEBERTA_V3], ids=["electra", "deberta-v3"])
def test_a_task_begins_with_a_discriminators_encoder(both, tokenizers, tmp_path):
    both = dataclasses.replace(both, vocab_size=SIZES["vocab_size"])
    params, folder, bare = random_params(both), tmp_path / "hf", tmp_path / "bare"
    export(params, both, tokenizers[0], folder)
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("generator"))
    config, _ = source_model(folder)
    assert config == source_model(bare)[0] == both.encoder("discriminator")
    assert config_from(folder) == both  # of what is not finetuned
    shapes = parameter_shapes(config, (CLASSIFIER,))
    start = lambda: jax.tree.map(lambda of: np.ones(of.shape, np.float32), shapes)
    of_run = nest(to_target("a run", dict(leaves(params)), both, config))
    encoder = of_run.get("encoder", of_run)
    kernel = lambda tree: tree["layers"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(kernel(encoder), kernel(params["discriminator"]["encoder"]))
    if "generator" in params and "embeddings" in params["generator"]:  # of which the discriminator has the differences
        tables = (params[part]["embeddings"]["tokens"] for part in ("generator", "discriminator"))
        np.testing.assert_array_equal(of_run["embeddings"]["tokens"], sum(tables))
    for source in (folder, bare):
        found = without_padding(load(source, config, shapes, tokenizers[0], start), config)
        of_head = {path: found.pop(path) for path in [*found] if path.startswith(CLASSIFIER)}
        assert tiny.equal(found, without_padding(of_run, config)) and all((one == 1).all() for one in of_head.values())


@pytest.mark.parametrize(
    ("labels", "places"),
    [(("yes", "no"), [1, 0]), (("perhaps", "no"), None), (("score",), [2]), (("near", "far"), None), ((), None)],
)
def test_scores_go_on_by_the_names_of_labels_that_the_source_knows(labels, places, tokenizers, tmp_path):
    known = ("no", "yes", "stars/score", "one/near", "one/far", "two/near", "two/far")
    before, after = (dataclasses.replace(config_of("bert"), labels=of) for of in (known, labels))
    draw = lambda leaf: np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32)
    params = jax.tree.map(draw, parameter_shapes(before, (TAGGER,)))
    found = to_target("a run", dict(leaves(params)), before, after)
    export(params, before, tokenizers[0], tmp_path)
    shapes = parameter_shapes(after, (TAGGER,))
    start = lambda: jax.tree.map(lambda of: np.ones(of.shape, np.float32), shapes)
    of_folder = load(tmp_path, after, shapes, tokenizers[0], start)[TAGGER]["scores"]
    for name, array in params[TAGGER]["scores"].items():
        if places is None:
            assert f"{TAGGER}/scores/{name}" not in found and (of_folder[name] == 1).all()
        else:
            np.testing.assert_array_equal(found[f"{TAGGER}/scores/{name}"], array[..., places])
            np.testing.assert_array_equal(of_folder[name], array[..., places])


@pytest.mark.parametrize(("family", "said"), [("gpt", "for tasks are classifier"), ("t5", "it has no heads for tasks")])
def test_a_head_that_a_model_has_not_is_said_with_those_that_it_has(family, said):
    with pytest.raises(UserError, match=f"--from here: {family} has no head 'spans'.*{said}; take another model"):
        check_heads("here", FAMILIES[family].sizes["tiny"], [SimpleNamespace(asks=(SPANS,))])
