"""What the stories of launches share: their commands, and what hosts print and leave."""

from collections.abc import Callable
from typing import NamedTuple

from tests.tpu.cloud import Life

NAME = ["--name", "n", "--bucket", "gs://b"]
LAUNCH = ["launch", "bert-tiny", *NAME, "--zone", "z", "--project", "p"]
ONE = [*LAUNCH, "--type", "v5e-8"]
TWO = [*LAUNCH, "--type", "v4-16"]
SPOT = [*ONE, "--spot"]
NOTHING = ({}, {})  # no VM, no request: nothing costs


def steps(*numbers):
    return [f"step {number}" for number in numbers]


def life(*numbers, end=0):
    return Life("\n".join(steps(*numbers)), end)


def lives(*first, second=()):
    """Of the first host, and of the second if there is one."""
    return {"n-w-0": list(first), **({"n-w-1": second} if second else {})}


VAIN = [Life(end=134)] * 5  # starts without a word


def gone(cloud):
    return (cloud.vms, cloud.requests) == NOTHING


def interrupt(cloud, seconds):
    """Who launches presses Ctrl-C then."""

    def press():
        raise KeyboardInterrupt

    cloud.at.append([seconds, press])


def happening(happens, cloud):
    """Without arguments, and no lambda, which is forgotten with a slice."""

    def happen():
        happens(cloud)

    return happen


class Story(NamedTuple):
    """One launch from its beginning to its end.

    command: of the launcher.   cloud: what is to happen, by the names of `Cloud`.   files: in the cloud's folder.
    at: seconds -> what happens then to the cloud.   status: of the launcher.   lines: of the run, as they are shown;
    None for any.   created: how many slices.   said: what the launcher says.   left: whether a slice is there at last.
    """

    command: list[str] = SPOT
    cloud: dict = {}
    files: dict[str, str] = {}
    at: dict[float, Callable] = {}
    status: int = 0
    lines: list[str] | None = steps(1, 2)
    created: int = 1
    said: tuple[str, ...] = ()
    left: bool = False

    def check(self, cloud, end):
        for name, value in self.cloud.items():
            setattr(cloud, name, value)
        for name, text in self.files.items():
            (cloud.folder / name).write_text(text)
        for seconds, happens in self.at.items():
            cloud.at.append([seconds, happening(happens, cloud)])
        status, said, lines = end(*self.command)
        assert status == self.status, said
        assert lines == self.lines or self.lines is None
        assert (cloud.created, gone(cloud)) == (self.created, not self.left), said
        assert [words for words in self.said if words not in said] == [], said
        return said
