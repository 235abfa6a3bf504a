"""Which task a step has, and which of that task's batches."""

from types import SimpleNamespace

import numpy as np
import pytest

from data_pipelines.loader import Loader
from data_pipelines.mixture import Tasks


def batches(name):
    """Rows that say which batch of which task they are of."""

    def batch(step, rows):
        return {name: step * 10 + rows}

    return SimpleNamespace(batch=batch, batch_size=4, together=64, corpora=())


def tasks(**rates):
    return Tasks({name: batches(name) for name in rates}, rates)


@pytest.mark.parametrize("rates", [{"a": 3.0, "b": 1.0}, {"a": 0.2, "b": 0.5, "c": 0.31}])
def test_tasks_take_turns_at_their_rates_and_each_has_its_batches_in_order(rates):
    of, total = tasks(**rates), sum(rates.values())
    had = dict.fromkeys(rates, 0)
    for step in range(1000):
        assert of.before(step) == had
        name, number = of.at(step)
        assert number == had[name]
        had[name] += 1
        assert all(abs(had[one] - (step + 1) * rates[one] / total) < 1.5 for one in rates)


def test_a_batch_is_its_task_s_and_a_loader_yields_them_from_any_step():
    of, rows = tasks(a=1.0, b=2.0), np.arange(4)
    expected = [(step, of.batches[of.at(step)[0]].batch(of.at(step)[1], rows)) for step in range(9)]
    for first in (0, 5):
        with Loader(of, first, 9, rows, threads=0) as loader:
            for (step, found), (at, wanted) in zip(loader, expected[first:], strict=True):
                assert step == at and found.keys() == wanted.keys()
                assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_single_task_has_the_batches_that_it_is_given_and_steps_are_built_together():
    of = tasks(a=1.0)
    assert of.together == 64 and of.at(7) == ("a", 7)
    np.testing.assert_array_equal(of.batch(7, np.arange(6))["a"], 70 + np.arange(6))
