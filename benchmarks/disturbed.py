"""`python -m pretrain` as `benchmarks.soak` starts it: it says where it is, and fails where it is told to.

    python -m benchmarks.disturbed PLAN run bert-tiny ...

The corpus comes from a stand-in for a bucket, so that it is copied. What is patched here is nowhere in the product.
"""

import errno
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

SECONDS_PER_FILE = 0.1  # of the corpus
BUCKET = "gs://soak/corpus"
FOREVER = 1 << 30


class Plan(NamedTuple):
    """As JSON on the command line.

    marks: file to which process I of the run appends stages as it enters them, a line each, as MARKS.I.
    bucket: folder with what is in BUCKET.
    fault: of FAULTS, None for none.   process: which one has it.   calm: calls that go well before it.
    times: calls that fail; for 'full disk' the bytes that a file may have.
    """

    marks: str
    bucket: str
    fault: str | None = None
    process: int = 0
    calm: int = 0
    times: int = FOREVER


class Bucket:
    """As much of an fsspec file system as `data_pipelines.fetch` asks for."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        time.sleep(SECONDS_PER_FILE)
        return (self._folder / path.removeprefix(f"{BUCKET}/")).read_bytes()[start:end]

    def find(self, path: str, detail: bool) -> dict[str, dict]:
        files = [file for file in self._folder.rglob("*") if file.is_file()]
        start = path.removeprefix("gs://")
        return {f"{start}/{file.relative_to(self._folder)}": {"size": file.stat().st_size} for file in files}


def main(plan: Plan, arguments: list[str]) -> int:
    """Run the program -> exit status."""
    me = os.environ.get("JAX_PROCESS_ID", "0")
    file = os.open(f"{plan.marks}.{me}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    mark = lambda stage: os.write(file, f"{stage}\n".encode())
    mark("imports")
    from data_pipelines import fetch
    from pretrain import __main__ as program
    from tpu import chatter

    _reach_bucket(plan)
    _announce(chatter, "sort_out", "joining", mark)
    _announce(fetch, "copy_file", "corpus copy", mark)
    whole = program.keep_compiled_with  # the last that it does before the imports that take long

    def then_patch(workdir) -> None:
        whole(workdir)
        _announce_stages(mark)
        if plan.fault and plan.process == int(me):
            FAULTS[plan.fault](plan, mark)

    program.keep_compiled_with = then_patch
    return program.main(arguments)


def _reach_bucket(plan: Plan) -> None:
    from data_pipelines import fetch

    fetch.filesystem = lambda path: Bucket(plan.bucket)


def _announce_stages(mark: Callable[[str], object]) -> None:
    from pretrain.storage import checkpoints, run_directory
    from pretrain.training import loop, run

    _announce(run_directory, "start", "work directory", mark)
    _announce(checkpoints.Checkpoints, "restore", "restore", mark)
    _announce(run, "train", "compilation", mark)
    _announce(loop.Meter, "add", "training", mark)
    _announce(checkpoints.Checkpoints, "save", "save", mark)
    _announce(loop, "_evaluate", "evaluation", mark)


def _announce(owner, name: str, stage: str, mark: Callable[[str], object]) -> None:
    """Have a function say when it is called."""
    whole = getattr(owner, name)

    def announced(*arguments, **named):
        mark(stage)
        return whole(*arguments, **named)

    setattr(owner, name, announced)


def _failing(owner, name: str, error: Callable[[], Exception], plan: Plan, mark, concerns=lambda *_: True) -> None:
    """Have a function fail after some calls that concern it, and so many times."""
    whole, calls = getattr(owner, name), 0

    def failing(*arguments, **named):
        nonlocal calls
        if concerns(*arguments):
            calls += 1
            if plan.calm < calls <= plan.calm + plan.times:
                mark("fault")
                raise error()
        return whole(*arguments, **named)

    setattr(owner, name, failing)


def _io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def _save(plan: Plan, mark) -> None:
    """In Orbax's thread, where a checkpoint that is whole gets its name."""
    unfinished = lambda source, *_: "orbax-checkpoint-tmp" in str(source)
    _failing(os, "rename", _io_error, plan, mark, unfinished)


def _restore(plan: Plan, mark) -> None:
    from pretrain.storage import checkpoints

    _failing(checkpoints, "_load", lambda: ConnectionError("Connection reset by peer"), plan, mark)


def _corpus(plan: Plan, mark) -> None:
    from data_pipelines import corpus

    _failing(corpus.np, "load", _io_error, plan, mark)


def _damaged_part(plan: Plan, mark) -> None:
    """Half of a part's tokens, in the copy that is about to be read, become others of the vocabulary."""
    from data_pipelines.corpus import Part

    whole, first = Part._load, True

    def load(part, split, name):
        nonlocal first
        if first and (split, name) == ("train", "tokens"):
            first = False
            mark("fault")
            with part.file("train/tokens.npy") as path:
                tokens = np.load(path)
                tokens[len(tokens) // 2 :] = tokens[0]
                np.save(path, tokens)
        return whole(part, split, name)

    Part._load = load


def _metrics(plan: Plan, mark) -> None:
    """After half a line."""
    from pretrain.storage.journal import Files

    def half(written, *_) -> bool:
        nonlocal calls
        calls += 1
        if plan.calm < calls <= plan.calm + plan.times:
            written.metrics.write('{"kind": "train", "st')
            written.metrics.flush()
        return True

    calls = 0
    _failing(Files, "figures", lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), plan, mark, half)


def _full_disk(plan: Plan, mark) -> None:
    """For files above a size, which writers in C++ see, too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (plan.times, plan.times))


FAULTS = {
    "save": _save, "restore": _restore, "corpus": _corpus, "damaged part": _damaged_part, "metrics": _metrics,
    "full disk": _full_disk,
}  # fmt: skip

if __name__ == "__mp_main__":  # in a data worker
    _reach_bucket(Plan(**json.loads(sys.argv[1])))
if __name__ == "__main__":
    sys.exit(main(Plan(**json.loads(sys.argv[1])), sys.argv[2:]))
