"""Hugging Face's torch models as the reference: models, batches in both forms, gradients by tensor name."""

import copy

import numpy as np
import torch
import transformers
from transformers.activations import ACT2FN
from transformers.models.bart.modeling_bart import BartEncoder
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from models.attention.patterns.pattern import blocks_of
from models.core.noise import fold
from models.core.program import Program
from models.families.registry import family_of
from pretrain.huggingface.export import config_fields
from pretrain.huggingface.load import load
from pretrain.huggingface.tensors import architecture
from pretrain.objectives.objective import inputs_of
from pretrain.objectives.replaced_token_detection import SAMPLING_NOISE, sample, write_predictions
from tests.models.shapes import parameter_shapes

MASK, FIRST_ORDINARY = 4, 5
FLOAT32 = Program(dtype="float32", depth="scan")

torch.set_num_threads(1)  # on matrices this small, threads wait for each other more than they work


class BartTranslation(transformers.BartForConditionalGeneration):
    """BART that reads the output of another encoder in place of embeddings."""

    def __init__(self, config):
        super().__init__(config)
        of_source = copy.deepcopy(config)
        of_source.encoder_layers = config.source_layers
        self.model.source = BartEncoder(of_source)

    def forward(self, input_ids, attention_mask, **others):
        read = self.model.source(input_ids, attention_mask=attention_mask).last_hidden_state
        return super().forward(inputs_embeds=read, attention_mask=attention_mask, **others)


class DebertaV2ForMaskedLM(transformers.DebertaV2ForMaskedLM):
    """With the enhanced mask decoder of DeBERTa's authors (`emd_context_layer`), which transformers leaves out."""

    def __init__(self, config):
        super().__init__(config)
        sizes = config.max_position_embeddings, config.hidden_size
        self.deberta.embeddings.position_embeddings = torch.nn.Embedding(*sizes)

    def forward(self, input_ids, attention_mask, labels, token_type_ids=None):
        encoder, embeddings = self.deberta.encoder, self.deberta.embeddings
        read = self.deberta(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        below = read.hidden_states[-2]
        queries = below + embeddings.position_embeddings.weight[: input_ids.shape[1]]
        others = {"relative_pos": encoder.get_rel_pos(below), "rel_embeddings": encoder.get_rel_embedding()}
        for _ in range(2):
            seen = encoder.get_attention_mask(attention_mask)
            queries, _ = encoder.layer[-1](below, seen, query_states=queries, **others)
        logits = self.lm_predictions(queries, embeddings.word_embeddings)
        loss = torch.nn.functional.cross_entropy(logits.mT, labels)
        return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)


class DebertaV2Discriminator(torch.nn.Module):
    """DebertaV2Model with the head that DeBERTa's authors put on it (`LMMaskPredictionHead`)."""

    def __init__(self, config):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.deberta, head = transformers.DebertaV2Model(config), torch.nn.Module()
        head.LayerNorm = torch.nn.LayerNorm(width, config.layer_norm_eps)
        head.dense, head.classifer = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        self.mask_predictions = head

    def forward(self, **inputs):
        hidden, head = self.deberta(**inputs).last_hidden_state, self.mask_predictions
        read = ACT2FN[self.config.hidden_act](head.dense(head.LayerNorm(hidden[:, :1] + hidden)))
        return head.classifer(read).squeeze(-1)


def torch_model(config, part, seed=0, heads=None):
    """A torch model of this config with biases and norms moved away from 0 and 1; attention without fused kernels."""
    torch.manual_seed(seed)
    params = parameter_shapes(config, heads)
    fields = config_fields(config, part, params, {"pad_token_id": padding(config)})
    name = architecture(config, part, params)
    cls = getattr(transformers, name, None) or {"BartTranslation": BartTranslation}[name]
    made_for = cls.config_class(**fields, attn_implementation="eager")
    if part == "discriminator" and cls is transformers.DebertaV2Model:
        cls = DebertaV2Discriminator
    if getattr(config, "enhanced_decoder", False) and cls is transformers.DebertaV2ForMaskedLM:
        cls = DebertaV2ForMaskedLM
    model = cls(made_for)
    if hasattr(model, "mobilebert"):  # whose tokens read padding, which its authors train
        model.get_input_embeddings().padding_idx = None
        for layer in model.mobilebert.encoder.layer if config.reads == "hidden" else ():  # as there, and not in IB-BERT
            layer.attention.self.query, layer.attention.self.key = (
                torch.nn.Linear(config.width, config.bottleneck) for _ in range(2)
            )
    if not getattr(config, "tied", True):  # transformers 5 ties them whatever the config says
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def padding(config):
    """The id of the padding token."""
    return next(iter(family_of(config).hf.values())).constants.get("pad_token_id", 0)


def to_ours(torch_models, config, folder):
    """Parameters of {part: torch model}, by way of folders that transformers writes."""
    for part, model in torch_models.items():
        model.save_pretrained(folder / part)
    source = ",".join(f"{part}={folder / part}" for part in torch_models)
    return load(source, config, parameter_shapes(config), folder)


def random_batch(config, seed, rows=8, length=32, slots=6):
    """A batch as `data_pipelines` makes it: ragged rows of two segment types, masked positions whose number varies."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 3, length + 1, rows)
    column = np.arange(length)
    real = column < lengths[:, None]
    # Frequencies fall as 1/rank, so that there is something to learn.
    ranks = np.exp(rng.random((rows, length)) * np.log(config.vocab_size - FIRST_ORDINARY)).astype(np.int32)
    originals = np.where(real, ranks + FIRST_ORDINARY - 1, padding(config)).astype(np.int32)
    positions, targets = np.zeros((2, rows, slots), np.int32)
    weights = np.zeros((rows, slots), np.float32)
    tokens = originals.copy()
    for row in range(rows):
        n = rng.integers(1, slots + 1)
        chosen = np.sort(rng.choice(lengths[row], n, replace=False))
        positions[row, :n], targets[row, :n], weights[row, :n] = chosen, originals[row, chosen], 1
        tokens[row, chosen] = np.where(rng.random(n) < 0.85, MASK, originals[row, chosen])
    batch = {
        "tokens": tokens,
        "types": np.where(real, column >= lengths[:, None] // 2, 0).astype(np.int32),
        "segments": real.astype(np.int32),
        "prediction_positions": positions,
        "prediction_targets": targets,
        "prediction_weights": weights,
        "next_sentence": rng.integers(0, 2, rows).astype(np.int32),
    }
    batch["next_sentence"][0] = -1  # a row without a pair
    return batch | {"sentence_order": batch["next_sentence"]}


def torch_inputs(batch, tokens=None, types=2):
    """The batch as keyword arguments of the torch models; tokens: i32[batch, length] to show instead.

    types: how many there are; with one, all tokens have it; with none, the model takes none.
    """
    tensor = lambda array: torch.from_numpy(np.array(array)).long()
    inputs = {
        "input_ids": tensor(batch["tokens"] if tokens is None else tokens),
        **({"token_type_ids": tensor(np.minimum(batch["types"], types - 1))} if types else {}),
        "attention_mask": tensor(batch["segments"] > 0),
    }
    if "globals" in batch:
        column = np.arange(batch["tokens"].shape[1])
        inputs["global_attention_mask"] = tensor((batch["globals"][:, :, None] == column).any(1))
    return inputs


def unilm_mask(types, segments):
    """f32[batch, 1, length, length]: 0 where a query of a UniLM sees a key, by the types of its row, else far below."""
    seen = np.zeros((*types.shape, types.shape[1]), bool)
    for row, (of_row, n) in enumerate(zip(types, segments.sum(1), strict=True)):
        for query, key in np.ndindex(n, n):
            of_source = of_row[key] == 4 or (of_row[query] == 5 and key <= query)
            allowed = {0: True, 2: key <= query, 3: key >= query, 4: of_source}
            seen[row, query, key] = allowed[int(of_row[0])]
    return torch.where(torch.from_numpy(seen)[:, None], 0.0, torch.finfo(torch.float32).min)


def token_labels(batch):
    """i64[batch, length]: the original token where it is predicted, else -100."""
    labels = np.full(batch["tokens"].shape, -100)
    for row, used in enumerate(batch["prediction_weights"] > 0):
        labels[row, batch["prediction_positions"][row, used]] = batch["prediction_targets"][row, used]
    return torch.from_numpy(labels)


def pair_labels(batch):
    """i64[batch]: 0 where B follows A, 1 where not, -100 without a pair."""
    return torch.from_numpy(np.where(batch["next_sentence"] < 0, -100, batch["next_sentence"]).astype(np.int64))


def torch_adamw(model, optimizer, rate):
    """torch's AdamW with an optimizer's numbers, by which exactly matrices decay."""
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, optimizer.decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(optimizer.b1, optimizer.b2), eps=optimizer.epsilon)


def torch_gradients(model):
    """Tensor name -> gradient, or zeros."""
    gradient = lambda p: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
    return {name: gradient(parameter) for name, parameter in model.named_parameters()}


def sampled(params, config, batch, keys):
    """Of an ELECTRA: the tokens that its discriminator sees and the original ones, both i32[batch, length]."""
    model = family_of(config).module(config, FLOAT32)
    inputs = (inputs_of(model, batch), batch["prediction_positions"])
    logits = model.apply({"params": params}, *inputs, method="generate")
    guesses = sample(logits, fold(keys, SAMPLING_NOISE), batch["prediction_positions"].shape)
    originals = write_predictions(batch["tokens"], batch, batch["prediction_targets"])
    return write_predictions(originals, batch, guesses), originals


def electra_loss(towers, batch, corrupted, originals):
    """ElectraForMaskedLM's loss and fifty times ElectraForPreTraining's, which sees the corrupted tokens."""
    replaced = torch.from_numpy((corrupted != originals).astype(np.float32))
    discriminator = towers["discriminator"](**torch_inputs(batch, corrupted), labels=replaced)
    generator = towers["generator"](**torch_inputs(batch), labels=token_labels(batch))
    return generator.loss + 50.0 * discriminator.loss


def deberta_v3_loss(towers, batch, corrupted, originals):
    """The generator's loss and fifty times the discriminator's, which sees the corrupted tokens."""
    inputs, real = torch_inputs(batch, corrupted), torch.from_numpy(np.array(batch["segments"] > 0))
    replaced = torch.from_numpy((corrupted != originals).astype(np.float32))
    scores = towers["discriminator"](**{name: inputs[name] for name in ("input_ids", "attention_mask")})
    discriminator = torch.nn.functional.binary_cross_entropy_with_logits(scores[real], replaced[real])
    generator = towers["generator"](**torch_inputs(batch), labels=token_labels(batch))
    return generator.loss + 50.0 * discriminator


def xlnet_outputs(model, batch, memory, causal=False):
    """The torch model's outputs; memory: or None.   causal: its other kind of attention, which reads no mask."""
    tensor = lambda array: torch.from_numpy(np.array(array))
    hidden = batch["ranks"][:, None, :] >= batch["thresholds"][:, :, None]
    chosen = batch["prediction_positions"][..., None] == np.arange(batch["tokens"].shape[1])
    masks = {"perm_mask": tensor(hidden).float(), "attention_mask": tensor(batch["segments"] > 0).float()}
    targets, used = batch["prediction_targets"], batch["prediction_weights"] > 0
    chosen &= used[..., None]  # several slots at one position would be added up
    return model(
        input_ids=tensor(batch["tokens"]).long(),
        token_type_ids=tensor(batch["types"]).long(),
        target_mapping=tensor(chosen).float(),
        mems=[tensor(layer.swapaxes(0, 1)) for layer in memory.hidden] if memory else None,
        labels=tensor(np.where(used, targets, -100)).long(),
        use_mems=True,
        **({} if causal else masks),
    )


def give_our_blocks(config, length, monkeypatch):
    """Make the layers of a torch BigBird read the blocks of our pattern."""
    blocks = blocks_of(config.pattern, config.depth, config.heads, length)
    layers = iter(list(blocks.drawn) * 2)
    draw = lambda self, **sizes: list(np.asarray(next(layers))[:, 1:-1])
    monkeypatch.setattr(BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", draw)
