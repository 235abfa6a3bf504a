"""Make parts with Apache Beam (`make setup-beam`), on any runner.

Workers reach the corpus and its sources by path, and read everything else from the stored state (`partial.py`).
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipelines import cloud
from data_pipelines.errors import AGAIN, UserError
from data_pipelines.prepare import partial
from data_pipelines.prepare.options import sources_of
from data_pipelines.prepare.parts import Work, make_part, open_work, present

try:
    import apache_beam
    from apache_beam.options.pipeline_options import PipelineOptions
except ImportError as error:
    raise UserError("--runner needs Apache Beam: make setup-beam, then use the Python in .venv-beam") from error

RUNNERS = {
    "direct": "apache_beam.runners.portability.fn_api_runner.FnApiRunner",  # in this process, without a download
    "dataflow": "DataflowRunner",
    "flink": "FlinkRunner",
    "spark": "SparkRunner",
}


def make_parts(out: Path, numbers: Sequence[int], runner: str, runner_options: Sequence[str]) -> None:
    """Make parts of the unfinished corpus at `out`. Raises UserError if the pipeline fails."""
    make = functools.partial(_make, str(out))
    _run(runner, runner_options, lambda begin: begin | _each(numbers) | apache_beam.Map(make))


def merged(place: Path, runner: str, runner_options: Sequence[str]) -> Callable[..., Counter]:
    """Return a `runner` for `over_parts`. It writes the sum, name -> number, to `place`, or reads it from there."""

    def run(count: Callable, merge: Callable, stretches: Sequence) -> Counter:
        if not cloud.is_file(place):
            add_up, write = apache_beam.CombineGlobally(merge), apache_beam.Map(functools.partial(_write, str(place)))
            chain = lambda begin: begin | _each(stretches) | apache_beam.Map(count) | add_up | write
            _run(runner, runner_options, chain)
        return Counter(json.loads(place.read_bytes()))

    return run


def _each(elements: Sequence):
    """Distribute the elements over the workers."""
    return "elements" >> (apache_beam.Create(list(elements)) | apache_beam.Reshuffle())


def _run(runner: str, runner_options: Sequence[str], build) -> None:
    options = PipelineOptions([f"--runner={RUNNERS[runner]}", *runner_options])
    try:
        with apache_beam.Pipeline(options=options) as pipeline:
            build(pipeline)
    except Exception as error:  # every runner wraps its workers' errors differently
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(f"--runner {runner}: {lines[-1] if lines else type(error).__name__}; {AGAIN}") from error


def _make(out: str, number: int) -> int:
    """In a worker: make a part, unless it exists."""
    work = _open(out)
    if not present(work.out, [number]):
        with partial.workroom(work.out) as scratch:
            make_part(work._replace(scratch=Path(scratch)), number)
    return number


@functools.lru_cache(maxsize=1)
def _open(out: str) -> Work:
    place = cloud.place(out)
    state = partial.read_state(place)
    here = partial.versions(state.settings["steps"], state.settings["units"])
    if differing := partial.differences(state.versions, here):
        raise UserError(f"on a worker {'; '.join(differing)}: install the versions of constraints-beam.txt on workers")
    return open_work(place, state, sources_of(state.settings))


def _write(place: str, sums: dict[str, int]) -> None:
    partial.write_new(cloud.place(place), json.dumps(sums, sort_keys=True).encode())
