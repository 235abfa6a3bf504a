"""The FLOPs of a step that the model needs are three times those that torch counts in transformers' models."""

import dataclasses

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from data_pipelines.examples.masking import Masking
from models.attention.patterns.pattern import Pattern
from models.families.registry import family_of
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.matching import Match
from pretrain.objectives.objective import Teacher
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets
from pretrain.recipe import Phase
from pretrain.training.step import model_flops
from tests.pretrain import reference, tiny

ROWS, LENGTH, VOCAB = 3, 32, 256
ALL = Masking(rate=0.99)  # every position is predicted
ONE_TYPE = {"vocab_size": VOCAB, "types": 1}  # tables as torch has them: ours have no padding and no sum over types
BERT = dataclasses.replace(tiny.BERT, depth=2, **ONE_TYPE)
ALBERT, ELECTRA = (dataclasses.replace(model, **ONE_TYPE) for model in (tiny.ALBERT, tiny.ELECTRA))
GPT2 = dataclasses.replace(tiny.GPT2, vocab_size=VOCAB, depth=2)
RECIPES = {BERT: tiny.bert(), ALBERT: tiny.albert(), ELECTRA: tiny.electra(), GPT2: tiny.gpt2()}
# FLOPs of one position of a BERT layer, but for its key and value
QUERY = 2 * (2 * BERT.width**2 + 2 * BERT.width * BERT.feed_forward) + 2 * 2 * LENGTH * BERT.width


def forward(model, **changes):
    """FLOPs of the forward pass of a model; changes: of the objective."""
    recipe = next(recipe for of, recipe in RECIPES.items() if type(of) is type(model))
    objective = dataclasses.replace(recipe.objective, **changes)
    return model_flops(dataclasses.replace(recipe, model=model, objective=objective), Phase(1.0, LENGTH, ROWS)) / 3


def torch_flops(model, **given):
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens, **given)
    return counter.get_total_flops()


@pytest.mark.parametrize("model", [BERT, ALBERT, ELECTRA])  # ELECTRA: the generator's and the discriminator's
def test_flops_are_those_that_torch_counts(model):
    expected = sum(torch_flops(reference.torch_model(model, part)) for part in family_of(model).hf)
    more = 0 if model is ELECTRA else ROWS * QUERY  # the first position is computed once for each head
    assert forward(model, masking=ALL) == expected + more


def test_fewer_predictions_save_logits_and_queries_of_the_last_layer():
    few = Masking(rate=5 / LENGTH)
    head = 2 * BERT.width * (BERT.width + VOCAB)
    assert forward(BERT, masking=ALL) - forward(BERT, masking=few) == ROWS * 27 * (head + QUERY)
    tower, width = ELECTRA.generator, ELECTRA.embedding
    query = 2 * (2 * tower.width**2 + 2 * tower.width * tower.feed_forward) + 2 * 2 * LENGTH * tower.width
    saved = forward(ELECTRA, masking=ALL) - forward(ELECTRA, masking=few)
    assert saved == ROWS * 27 * (2 * width * (tower.width + VOCAB) + query)


def test_of_a_causal_mask_the_visible_pairs_count():
    hidden = 4 * ROWS * GPT2.depth * GPT2.width * LENGTH * (LENGTH - 1) / 2
    counted = torch_flops(reference.torch_model(GPT2, "model")) - hidden
    assert counted <= forward(GPT2) < 1.001 * counted  # sums of losses are products with weights


def test_of_a_sparse_pattern_the_visible_pairs_count():
    """Blocks of 4: of the 8, rows 0 and 7 see 8, of the others 2 see 5 and 4 see 6."""
    hidden = LENGTH**2 - 16 * (2 * 8 + 2 * 5 + 4 * 6)
    for model, width, label in (
        (BERT, 2 * 32, {"next_sentence": False}),
        (ALBERT, 2 * 32, {"sentence_order": False}),
        (ELECTRA, 32 + 16, {}),  # of all layers together
    ):
        sparse = dataclasses.replace(model, pattern=Pattern("bigbird", block=4, random=1))
        saved = forward(model, masking=ALL, **label) - forward(sparse, masking=ALL, **label)
        assert saved == pytest.approx(4 * ROWS * width * hidden)


HIDDEN = Match("hidden", "cosine", "top")  # all positions of the last layers


@pytest.mark.parametrize(("losses", "own", "heads"), [((Match(), HIDDEN), 1.0, 1), ((HIDDEN,), 0.0, 0)])
def test_a_teacher_counts_its_forward_pass_and_what_no_loss_reads_nothing(losses, own, heads):
    """heads: whether a loss reads those of the masked tokens."""
    teacher, objective = dataclasses.replace(BERT, depth=3), Distillation(masking=ALL, losses=losses, own=own)
    recipe = dataclasses.replace(
        tiny.bert(model=BERT, objective=objective), teachers=(Teacher("teacher", "", teacher),)
    )
    student, of_teacher = (
        torch_flops(reference.torch_model(model, "model", heads=("predictions",))) for model in (BERT, teacher)
    )
    unread = (1 - heads) * ROWS * LENGTH * 2 * BERT.width * (BERT.width + VOCAB)
    assert model_flops(recipe, Phase(1.0, LENGTH, ROWS)) == 3 * (student - unread) + of_teacher - unread


def test_an_encoder_decoder_needs_what_a_count_by_hand_says():
    """The decoder makes keys and values of each token of the input; of its own pairs it sees half."""
    target, config = 8, dataclasses.replace(tiny.T5, depth=3, decoder_depth=2, head_dim=24, vocab_size=VOCAB)
    width, heads, inner = config.width, config.heads * config.head_dim, config.feed_forward
    layer, second = 2 * (4 * width * heads + 2 * width * inner), 2 * 2 * width * heads
    pairs = lambda number: 2 * 2 * heads * number
    encoder = 3 * (LENGTH * layer + pairs(LENGTH**2))
    own, other = target * layer + pairs(target * (target + 1) / 2), (target + LENGTH) * second + pairs(target * LENGTH)
    expected = ROWS * (encoder + 2 * (own + other) + target * 2 * width * VOCAB)
    counted = model_flops(tiny.t5(model=config), PhaseWithTargets(1.0, LENGTH, ROWS, target_length=target)) / 3
    assert expected < counted < 1.005 * expected  # biases by distance are products, as sums of losses are


@pytest.mark.parametrize("cutoffs, rows", [((), VOCAB), ((100,), 128 + 256)])  # clusters of 101 and of 156, padded
def test_transformer_xl_is_a_causal_xlnet_and_its_softmax(cutoffs, rows):
    """Of a cluster but the first one block of targets counts, here all."""
    config = dataclasses.replace(tiny.TRANSFORMER_XL, vocab_size=VOCAB, cutoffs=cutoffs, depth=2)
    sizes = {"d_model": config.width, "n_layer": config.depth, "n_head": config.heads, "d_inner": config.feed_forward}
    model = transformers.XLNetModel(transformers.XLNetConfig(vocab_size=8, attn_type="uni", **sizes))
    expected = torch_flops(model, mems=[torch.zeros(config.memory, ROWS, config.width)] * config.depth)
    counted = model_flops(tiny.transformer_xl(model=config), Phase(1.0, LENGTH, ROWS)) / 3
    assert counted == expected + 2 * ROWS * LENGTH * config.width * rows
