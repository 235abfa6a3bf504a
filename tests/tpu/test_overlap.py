"""What a schedule hides of its exchanges, on schedules short enough to follow by hand."""

import pytest

from tpu import hlo
from tpu.network import Exchange
from tpu.overlap import Clocks, timeline

A = "f32[8]{0}"
GROUPS = "replica_groups={{0,1}}, dimensions={0}"


def start(name, axis="0"):
    return f'{name} = ({A}, {A}) all-gather-start(%a), {GROUPS}, metadata={{op_name="{axis}"}}'


def done(name):
    return f"{name}.done = {A} all-gather-done({name})"


def work(name, ms):
    return f"{name} = {A} negate(%a), ms={ms}"


def carrier(name, channel, ms):
    return f"{name} = {A} fusion(%a), kind=kOutput, calls=%carried.{channel}, ms={ms}"


CARRIED = """%carried.NUMBER (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=NUMBER, replica_groups={{0,1}}, dimensions={0}, metadata={op_name="0"}
}

"""


def program(*lines, body=(), turns=1):
    """A program of these lines; `%loop` runs those of the body."""
    text = "HloModule step, num_partitions=2\n\n" + CARRIED.replace("NUMBER", "1") + CARRIED.replace("NUMBER", "2")
    inside = "\n  ".join(body)
    text += f"%body (a: f32[8]) -> f32[8] {{\n  %a = {A} parameter(0)\n  {inside}\n}}\n\n"
    text += f"%condition (a: f32[8]) -> f32[8] {{\n  %a = {A} parameter(0)\n}}\n\n"
    loop = f'%loop = {A} while(%a), condition=%condition, body=%body, "known_trip_count":{{"n":"{turns}"}}'
    listed = "\n  ".join(loop if line == "loop" else line for line in lines)
    return hlo.parse(text + f"ENTRY %main (a: f32[8]) -> f32[8] {{\n  %a = {A} parameter(0)\n  {listed}\n}}\n")


def waits(*lines, delay=0.0, **loop):
    """(ms of work, ms that the cores wait); each exchange takes 10 ms on the axis that its op_name tells."""

    def seconds(run):
        return float(run.instruction.rest.partition("ms=")[2] or 0)

    found = timeline(program(*lines, **loop), Clocks(seconds, lambda c: Exchange(10.0, frozenset(c.source), delay)))
    assert found.waits == pytest.approx(sum(one.exposed for one in found.collectives))
    assert found.busy == pytest.approx(sum(one.seconds for one in found.collectives))
    return found.work, found.waits


def test_an_exchange_that_is_awaited_at_once_counts_in_full():
    assert waits(start("%s"), done("%s"), work("%w", 30)) == (30, 10)


def test_the_work_between_start_and_done_hides_as_much_as_it_takes():
    assert waits(start("%s"), work("%w", 4), done("%s")) == (4, 6)
    assert waits(start("%s"), work("%w", 30), done("%s")) == (30, 0)


def test_an_asynchronous_operation_s_exchange_is_awaited_by_its_own_end():
    begun = f"%s = (({A}), {A}, s32[]) async-start(%a), calls=%carried.1"
    ended = f"%s.done = {A} async-done(%s)"
    assert waits(begun, ended, work("%w", 30)) == (30, 10)
    assert waits(begun, work("%w", 30), ended) == (30, 0)


def test_an_exchange_without_a_start_counts_in_full():
    plain = f'%s = {A} all-gather(%a), {GROUPS}, metadata={{op_name="0"}}'
    assert waits(work("%w", 30), plain, work("%v", 30)) == (60, 10)


def test_two_on_the_same_links_take_turns_and_two_on_others_do_not():
    both = start("%s"), start("%t"), work("%w", 12), done("%s"), done("%t")
    assert waits(*both) == (12, 8)
    apart = start("%s"), start("%t", "1"), work("%w", 12), done("%s"), done("%t")
    assert waits(*apart) == (12, 0)


def test_a_loop_counts_as_often_as_it_runs():
    body = start("%s"), work("%w", 4), done("%s")
    assert waits("loop", body=body, turns=3) == (12, 18)


def test_what_runs_beside_a_loop_has_the_links_while_the_loop_leaves_them():
    assert waits(start("%s"), "loop", done("%s"), body=[work("%w", 2)], turns=4) == (8, 2)
    busy = start("%t"), work("%w", 12), done("%t")  # leaves the links alone for 2 of 12
    assert waits(start("%s"), "loop", done("%s"), body=busy, turns=3) == (36, 4)


def test_one_that_fusions_carry_gets_on_only_in_them():
    lines = carrier("%f", 1, 0), carrier("%g", 1, 4), work("%w", 30), carrier("%h", 1, 0)
    assert waits(*lines) == (34, 6)
    others = carrier("%f", 1, 0), carrier("%g", 2, 4), carrier("%h", 1, 0)
    assert waits(*others) == (4, 16)


def test_a_delay_passes_beside_others_and_beside_work():
    both = start("%s"), start("%t"), work("%w", 2), done("%s"), done("%t")
    assert waits(*both, delay=15.0) == (2, 18)  # 15 in all for the first, 20 on the links for both
    assert waits(start("%s"), done("%s"), delay=15.0) == (0, 15)
    assert waits(start("%s"), work("%w", 20), done("%s"), delay=15.0) == (20, 0)
