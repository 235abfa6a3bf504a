"""What is counted in parts is added up, on one core or several, and little waits at a time."""

from collections import Counter
from concurrent.futures import Future

import pytest

from data_pipelines.prepare.training import sum_of
from data_pipelines.processes import in_turn, over_parts


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sum_over_parts_is_that_of_a_loop(processes):
    texts = [chr(97 + number % 5) * number for number in range(20)]
    assert over_parts(Counter, sum_of, texts, processes) == Counter("".join(texts))
    assert over_parts(len, sum, texts, processes) == len("".join(texts))
    assert over_parts(Counter, sum_of, [], processes) == {}


def test_no_more_than_so_many_wait_and_all_come_in_their_order():
    begun, taken, most = [], [], 0

    class Later:
        def submit(self, function, part):
            begun.append(part)
            future = Future()
            future.set_result(function(part))
            return future

    for value in in_turn(Later(), str, range(10), 3):
        most = max(most, len(begun) - len(taken))
        taken.append(value)
    assert taken == [*map(str, range(10))] and most == 3
