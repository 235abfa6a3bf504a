"""Sparse tables: the rows that a batch reads are trained as with a dense gradient, and no others are touched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from data_pipelines.errors import UserError
from models.core.parameters import leaves
from models.core.program import Program
from pretrain.objectives.objective import Task
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.placement import place_given, stages
from pretrain.training.run import run
from pretrain.training.sparse_rows import Rows
from pretrain.training.step import initial_state
from tests.pretrain import tiny, toys
from tpu.mesh import row_mesh

pytestmark = pytest.mark.usefixtures("registered")
BUCKETS = 1000
TABLES = ("words", "bigrams")
MILLION = {"buckets": 1 << 20, "width": 2}
PLAIN = {"decay": 0.0, "clip": 0.0}


def recipe(sparse=True, buckets=BUCKETS, width=8, **changes):
    model = toys.GramsConfig(buckets=buckets, width=width, sparse=sparse)
    return toys.recipe(**{"model": model, "objective": toys.NextOfGrams()} | changes)


def batch_of(seed):
    """8 rows; tokens below 100 alone, bigrams from the table's first and last 20, so that many come again."""
    rng = np.random.default_rng(seed)
    bigrams = rng.choice(np.r_[:20, BUCKETS - 20 : BUCKETS], (8, 15)).astype(np.int32)
    return {"tokens": rng.integers(5, 100, (8, 16)).astype(np.int32), "bigrams": bigrams}


@functools.cache
def started(recipe, microbatches=1):
    (stage,) = stages(assemble(recipe, Program()), row_mesh(jax.devices()[:1], [1]), microbatches)
    return stage, jax.device_get(initial_state(stage.assembly, initial_params(stage.assembly)))


def trained(recipe, batches, microbatches=1, state=None):
    """(state, metrics of each step) as NumPy arrays."""
    stage, (first, frozen) = started(recipe, microbatches)
    state, said = state or first, []
    for batch in batches:
        state, metrics = stage.train.run(state, frozen, batch, place_given(stage))
        said.append(jax.device_get(metrics))
    return jax.device_get(state), said


@pytest.mark.parametrize("microbatches", [1, 2])
def test_adagrad_by_rows_is_adagrad_by_tables(microbatches):
    batches = [batch_of(seed) for seed in range(5)]
    changes = {"optimizer": Optimizer("adagrad", **PLAIN)}
    sparse, said = trained(recipe(**changes), batches, microbatches)
    dense, expected = trained(recipe(sparse=False, **changes), batches, microbatches)
    assert tiny.equal(sparse.params, dense.params) and tiny.equal(sparse.opt_state, dense.opt_state)
    for one, other in zip(said, expected, strict=True):
        assert one.loss == other.loss
        np.testing.assert_allclose(one.gradient_norm, other.gradient_norm, rtol=1e-6)


def test_a_clipped_step_by_rows_is_one_by_tables():
    changes = {"optimizer": Optimizer("adagrad", decay=0.0, clip=0.01)}
    states = [trained(recipe(sparse, **changes), [batch_of(0)])[0].params for sparse in (True, False)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), *states)


def test_adam_by_rows_is_torchs_sparse_adam():
    optimizer = Optimizer("adamw", b1=0.8, b2=0.95, epsilon=1e-15, **PLAIN)
    batches = [batch_of(seed) for seed in range(6)]
    state, _ = trained(recipe(optimizer=optimizer), batches)
    start = dict(leaves(started(recipe(optimizer=optimizer))[1][0].params))
    tables = {
        name: torch.nn.Embedding.from_pretrained(torch.tensor(start[name]), False, sparse=True) for name in TABLES
    }
    out = torch.tensor(start["out"], requires_grad=True)
    how = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-15}
    by_rows = torch.optim.SparseAdam([table.weight for table in tables.values()], **how)
    whole = torch.optim.Adam([out], **how)
    for batch in batches:
        read = {name: torch.tensor(batch[array]).long() for name, array in zip(TABLES, batch, strict=True)}
        logits = sum(tables[name](read[name][:, :-1]).mean(1) for name in TABLES) @ out
        # Ours also has the rows of the last ones, by a gradient of zero.
        also = sum(0.0 * tables[name](read[name][:, -1]).sum() for name in TABLES)
        for optimizer in (by_rows, whole):
            optimizer.zero_grad()
        (torch.nn.functional.cross_entropy(logits, read["words"][:, -1]) + also).backward()
        for optimizer in (by_rows, whole):
            optimizer.step()
    for name in TABLES:
        expected = tables[name].weight.detach().numpy()
        np.testing.assert_allclose(state.params[name], expected, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(state.params["out"], out.detach().numpy(), rtol=1e-4, atol=2e-6)


def test_rows_that_a_batch_does_not_read_stay_with_their_moments_also_without_decay():
    state, _ = trained(recipe(optimizer=Optimizer("adamw", decay=0.5)), [batch_of(0), batch_of(1)])
    after, _ = trained(recipe(optimizer=Optimizer("adamw", decay=0.5)), [batch_of(2)], state=state)
    adam, before = after.opt_state[0], state.opt_state[0]
    for name, array in zip(TABLES, batch_of(2), strict=True):
        read = np.isin(np.arange(len(state.params[name])), batch_of(2)[array])
        for new, old in ((tree[name], other[name]) for tree, other in ((after.params, state.params),)):
            assert ((new != old).any(axis=1) == read).all()
        for new, old in ((adam.mu[name], before.mu[name]), (adam.nu[name], before.nu[name])):
            assert tiny.equal(new[~read], old[~read]) and (new[read] != old[read]).any()


def test_weight_decay_is_of_the_rows_that_are_read():
    how = {"schedule": toys.recipe().schedule, "optimizer": Optimizer("adagrad", decay=0.5, clip=0.0)}
    decayed, _ = trained(recipe(**how), [batch_of(0)])
    plain, _ = trained(recipe(**how | {"optimizer": Optimizer("adagrad", **PLAIN)}), [batch_of(0)])
    first = started(recipe(**how))[1][0].params["bigrams"]
    read = np.isin(np.arange(BUCKETS), batch_of(0)["bigrams"])[:, None]
    expected = plain.params["bigrams"] - read * 1e-2 * 0.5 * first
    np.testing.assert_allclose(decayed.params["bigrams"], expected, rtol=1e-5, atol=1e-7)


def test_an_update_that_is_not_finite_leaves_the_rows():
    state, _ = trained(recipe(), [batch_of(0)])
    broken = state._replace(params=state.params | {"out": np.full_like(state.params["out"], np.nan)})
    after, (metrics,) = trained(recipe(), [batch_of(1)], state=broken)
    assert not np.isfinite(metrics.loss) and after.skipped[0] == 1
    assert tiny.equal((after.params, after.opt_state), (broken.params, broken.opt_state))


def test_rows_are_read_as_a_table_is_and_others_are_not_a_number():
    table = jnp.asarray(np.arange(20.0, dtype=np.float32).reshape(10, 2))
    ids = jnp.asarray(np.array([1, 4, 9, 10, 11]))
    rows = Rows(ids, table.at[ids].get(mode="fill", fill_value=0), 10)
    for asked in ([4, 1, 4], [-1, 9], [[12, 1], [-6, 4]]):
        np.testing.assert_array_equal(rows[np.array(asked)], table[jnp.array(asked)])
    assert rows.shape == table.shape and np.isnan(rows[np.array([0, 5, 4])]).tolist() == [[True] * 2] * 2 + [
        [False] * 2
    ]


def test_several_arrays_may_read_a_table():
    batch = batch_of(0) | {"trigrams": batch_of(1)["bigrams"] // 2}
    changes = {"optimizer": Optimizer("adagrad", **PLAIN)}
    states = [trained(recipe(sparse, **changes), [batch])[0] for sparse in (True, False)]
    assert tiny.equal(*states)


def test_an_array_may_name_rows_from_the_end():
    batch = batch_of(0)
    batch["bigrams"][:, ::3] -= BUCKETS  # the same rows
    changes = {"optimizer": Optimizer("adagrad", **PLAIN)}
    states = [trained(recipe(sparse, **changes), [batch])[0] for sparse in (True, False)]
    assert tiny.equal(*states)


def test_a_batch_may_read_more_rows_than_a_table_has():
    few, changes = {"buckets": 7}, {"optimizer": Optimizer("adagrad", **PLAIN)}
    batch = batch_of(0) | {"bigrams": batch_of(0)["bigrams"] % 7}
    states = [trained(recipe(sparse, **few, **changes), [batch])[0] for sparse in (True, False)]
    assert tiny.equal(*states)


def test_a_frozen_table_stays_and_is_read_whole():
    _, (state, frozen) = started(recipe(frozen=("bigrams",)))
    after, said = trained(recipe(frozen=("bigrams",)), [batch_of(0)])
    assert frozen.keys() == {"bigrams"} and after.params.keys() == {"words", "out"}
    held = recipe(phases=(Phase(1.0, 16, 8, frozen=("bigrams",)),))
    other, again = trained(held, [batch_of(0)])
    assert said[0].loss == again[0].loss == trained(recipe(), [batch_of(0)])[1][0].loss
    assert tiny.equal(other.params, after.params | frozen) and not tiny.equal(state.params, after.params)


def test_what_cannot_be_trained_by_rows_is_said():
    def refused(**changes):
        with pytest.raises(UserError) as caught:
            assemble(recipe(**changes), Program())
        return str(caught.value)

    lamb = refused(optimizer=Optimizer("lamb"))
    assert "optimizer.name=lamb: needs the norm of all of words, but a step reads only some rows; use" in lamb
    said = refused(objective=toys.NextOfGrams(bigrams=False))
    assert "phases.0: its batches lack bigrams or trigrams, the rows of bigrams (they have tokens); fr" in said
    assert "optimizer.name=stable-adamw: needs the norm of all of words" in refused(optimizer=Optimizer("stable-adamw"))
    assemble(recipe(optimizer=Optimizer("lamb"), phases=(Phase(1.0, 16, 8, frozen=TABLES),)), Program())


def test_a_table_of_a_million_rows_is_trained_in_place(corpus_path, tmp_path):
    million = recipe(**MILLION, steps=12)
    (stage,) = stages(assemble(million), row_mesh(jax.devices()[:1], [1]))
    counted = stage.train.run.lower(*stage.train.arguments).compile().memory_analysis()
    table = 4 * 2 << 20  # bytes
    assert counted.alias_size_in_bytes > 3 * table and counted.temp_size_in_bytes < table / 20
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = functools.partial(tiny.options, corpus_path, checkpoint_every=100)
    assert run(million, options(whole)) == 0
    assert run(recipe(**MILLION, steps=7), options(cut)) == 0  # and then goes on
    assert run(million, options(cut)) == 0
    assert RunDirectory(cut).checkpoint_steps() == [7, 12]
    state = tiny.final_state(whole)
    assert tiny.equal(state, tiny.final_state(cut))
    moved = (state.opt_state[0].nu["bigrams"] > 0).any(axis=1).sum()
    assert 100 < moved < 12 * 8 * 15


def test_a_task_that_does_not_read_a_table_leaves_it(corpus_path, tmp_path):
    tasks = (Task("both", toys.NextOfGrams()), Task("words", toys.NextOfGrams(bigrams=False)))
    both = recipe(**MILLION, steps=2, phases=(Phase(1.0, 16, 8, tasks=tasks),))
    assert run(both, tiny.options(corpus_path, tmp_path / "run", checkpoint_every=1)) == 0
    before, after = (tiny.final_state(tmp_path / "run", step) for step in (1, 2))
    assert tiny.equal(before.params["bigrams"], after.params["bigrams"])
    assert not tiny.equal(before.params["words"], after.params["words"])
