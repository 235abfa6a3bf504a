"""Programs in processes of their own, forked from one that has imported everything, which may kill themselves."""

import multiprocessing
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from data_pipelines.__main__ import main
from data_pipelines.formats import source, table
from data_pipelines.formats.problems import Problems
from data_pipelines.prepare import ending, partial, plan
from data_pipelines.prepare import parts as making
from data_pipelines.store import job, parts
from data_pipelines.tokenizers import stored as tokenizers

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([__name__])
MODULES = {"ending": ending, "job": job, "making": making, "parts": parts}
MODULES |= {"partial": partial, "tokenizers": tokenizers}


class Fork:
    """A call in a process of its own."""

    def __init__(self, function: Callable, *arguments):
        self.said, writers = zip(*(FORKED.Pipe(duplex=False) for _ in range(2)), strict=True)
        self.process = FORKED.Process(target=_printing, args=(writers, {**os.environ}, function, *arguments))
        self.process.start()
        for writer in writers:
            writer.close()

    def wait(self) -> tuple[int, str, str]:
        """Status, output and errors, once the process and all that it has started have ended."""
        texts = [open(pipe.fileno(), closefd=False).read() for pipe in self.said]  # noqa: SIM115
        self.process.join()
        return self.process.exitcode, *texts


def _printing(writers, environment: dict[str, str], function: Callable, *arguments) -> None:
    os.environ.update(environment)
    for number, writer in enumerate(writers, 1):
        os.dup2(writer.fileno(), number)
        writer.close()
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os._exit(function(*arguments) or 0)


def prepare(
    arguments: list[str], unit: int, mib: int = plan.MIB, dies: str = "", call: int = 0, most: int | None = None
) -> int:
    """`prepare` with units and parts of so many bytes. dies, call: the function at whose call-th call it kills itself.
    most: no file may grow beyond so many bytes; writing fails as on a full disk."""
    source.SHARD, plan.MIB = unit, mib
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if dies:
        module, name = dies.split(".")
        function, calls = getattr(MODULES[module], name), []

        def dying(*given, **named):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), 9)
            return function(*given, **named)

        setattr(MODULES[module], name, dying)
    return main(["prepare", *arguments])


def peak_of_prepare(arguments: list[str]) -> None:
    """Print how many bytes of memory `prepare` has had at most."""
    main(["prepare", "--processes=1", *arguments])
    print(status("VmHWM"))


def status(name: str) -> int:
    """Bytes of this process's memory, of Linux."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peak_of_reading(spec: str, documents: str) -> None:
    """Print how many bytes of text a source has, and how many more of memory are taken while it is read."""
    one = table.parse(spec, documents=documents)
    ranges = [part for unit in table.plan([one], Problems()) for part in unit]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    read = (document for part in ranges for document in table.read(one, part, Problems()))
    print(sum(len(document.segments[0].text.encode()) for document in read), status("VmHWM") - before)
