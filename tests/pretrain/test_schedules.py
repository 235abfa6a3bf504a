"""Learning rates against their closed forms."""

import dataclasses
import math

import numpy as np
import pytest

from pretrain.recipe import boundaries, extended, phase_at, schedule_in
from pretrain.schedules import NAMES, Schedule, learning_rate, numbers
from tests.pretrain import toys

STEPS, PEAK = 1000, 2e-3


def rates(name, steps=STEPS, **fields):
    """The rate of each update, f32[steps]."""
    return of_schedule(Schedule(name, peak=PEAK, **{"warmup": 0.1} | fields), steps)


def of_schedule(schedule, steps, at=None):
    """The same, of all updates or those at some steps."""
    return np.asarray(learning_rate(schedule.name, numbers(schedule, steps), np.arange(steps) if at is None else at))


# name -> (fields, {number of the update, from 1: rate / peak})
KEY_POINTS = {
    "linear": ({"final": 0.2}, {100: 1.0, 550: 0.6, 1000: 0.2}),
    "cosine": ({"final": 0.2}, {100: 1.0, 325: 0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)), 550: 0.6, 1000: 0.2}),
    "polynomial": ({"final": 0.2, "power": 2.0}, {100: 1.0, 325: 0.2 + 0.8 * 0.75**2, 550: 0.4, 1000: 0.2}),
    "one-minus-sqrt": ({"final": 0.2}, {100: 1.0, 325: 0.6, 676: 0.36, 1000: 0.2}),
    "inverse-sqrt": ({}, {100: 1.0, 400: 0.5, 900: 1 / 3}),
    "flat-inverse-sqrt": ({}, {1: 1.0, 100: 1.0, 400: 0.5, 900: 1 / 3}),
    "warmup-stable-decay": ({"final": 0.2, "decay": 0.4}, {100: 1.0, 350: 1.0, 600: 1.0, 800: 0.6, 1000: 0.2}),
    "constant": ({}, {100: 1.0, 500: 1.0, 1000: 1.0}),
}


@pytest.mark.parametrize("name", NAMES)
def test_key_points(name):
    fields, points = KEY_POINTS[name]
    found = rates(name, **fields)
    for update, expected in points.items():
        assert found[update - 1] == pytest.approx(PEAK * expected, rel=1e-5), update


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_rises_linearly_to_the_peak_and_never_exceeds_it(name):
    found = rates(name)
    rises = np.arange(1, 101) if name != "flat-inverse-sqrt" else np.full(100, 100)
    np.testing.assert_allclose(found[:100], PEAK * rises / 100, rtol=1e-5)
    assert found.max() == pytest.approx(PEAK, rel=1e-6)
    assert (np.diff(found[100:]) <= 1e-9).all()


@pytest.mark.parametrize("name", NAMES)
def test_without_warmup_the_first_update_has_the_peak(name):
    assert rates(name, warmup=0.0)[0] == pytest.approx(PEAK, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_beyond_the_steps_that_it_is_planned_for_the_rate_stays_but_for_the_inverse_root(name):
    planned = Schedule(name, peak=PEAK, warmup=0.1, final=0.2, steps=STEPS)
    last, later = of_schedule(planned, 4 * STEPS, np.array([STEPS - 1, 4 * STEPS - 1]))
    assert later == pytest.approx(last / 2 if "inverse-sqrt" in name else last)


def test_a_run_of_one_step_trains():
    for name in NAMES:
        assert np.isfinite(rates(name, steps=1)).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup": -0.1},
        {"decay": 0.6, "warmup": 0.6, "name": "warmup-stable-decay"},
    ],
)
def test_a_field_out_of_range_is_refused_by_name(fields):
    with pytest.raises(ValueError, match=f"schedule.*{next(iter(fields))}"):
        Schedule(**fields)


def onward(kind, since, **fields):
    """A recipe that is made longer after `since` of its steps, to three times as many."""
    schedule = Schedule(**{"peak": PEAK, "warmup": 0.1} | fields)
    return extended(toys.recipe(steps=STEPS, schedule=schedule), since, 3 * STEPS, kind)


def all_rates(recipe):
    """Of each update as a share of the peak, phase by phase."""
    begins = [0, *boundaries(recipe)]
    found = [learning_rate(*schedule_in(recipe, i), np.arange(*begins[i : i + 2])) for i in range(len(recipe.phases))]
    return np.concatenate(found) / PEAK


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("since", [1, 700, STEPS])
def test_a_longer_run_may_go_on_at_the_rate_of_the_last_step_done(name, since):
    found, planned = all_rates(onward("constant", since, name=name, final=0.2)), rates(name, final=0.2) / PEAK
    np.testing.assert_array_equal(found[:since], planned[:since])  # what was done stays as it was
    np.testing.assert_allclose(found[since:], max(planned[since - 1], 0.1), rtol=1e-6)


def test_it_may_fall_linearly_from_that_rate_to_the_final_one_at_the_new_last_step():
    recipe = onward("decay", 700, final=0.2)
    found, left = all_rates(recipe), 3 * STEPS - 700
    falls = np.linspace(found[699], 0.2, left)
    np.testing.assert_allclose(found[700:], falls, rtol=1e-5)
    assert [phase_at(recipe, step) for step in (699, 700)] == [0, 1]


@pytest.mark.parametrize("kind, end", [("constant", 0.1), ("decay", 0.0)])
def test_it_goes_on_with_a_tenth_of_the_peak_where_the_rate_had_come_to_0(kind, end):
    found = all_rates(onward(kind, STEPS))
    assert found[STEPS - 1] == 0 and found[STEPS] == pytest.approx(0.1, rel=0.01) and found[-1] == pytest.approx(end)


def test_a_run_is_made_longer_twice():
    once = onward("decay", STEPS, final=0.5)
    twice = extended(once, 1200, 4 * STEPS, "constant")
    found = all_rates(twice)
    np.testing.assert_array_equal(found[:1200], all_rates(once)[:1200])
    np.testing.assert_allclose(found[1200:], found[1199], rtol=1e-6)
    assert boundaries(twice) == [STEPS, 1200, 4 * STEPS] and len(found) == 4 * STEPS


CHANGES = {"name": "cosine", "peak": 1.0, "warmup": 0.5, "final": 0.5, "decay": 0.7, "power": 2.0, "steps": 50}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Schedule)])
def test_every_field_changes_the_rate(field):
    start = Schedule("polynomial" if field == "power" else "warmup-stable-decay", peak=PEAK, warmup=0.1, decay=0.2)
    changed = dataclasses.replace(start, **{field: CHANGES[field]})
    assert not np.array_equal(of_schedule(start, 100), of_schedule(changed, 100))
