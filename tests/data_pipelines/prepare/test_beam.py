"""Apache Beam makes the bytes that `prepare` makes alone. Skipped where neither this Python nor .venv-beam has it."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data_pipelines.prepare.small import PROGRAM, arguments
from tests.data_pipelines.prepared import content

ROOT = Path(__file__).parents[3]
BESIDE = ROOT / ".venv-beam" / "bin" / "python"
PYTHON = sys.executable if importlib.util.find_spec("apache_beam") else str(BESIDE)
pytestmark = pytest.mark.skipif(not Path(PYTHON).exists(), reason="Apache Beam is not installed: make setup-beam")


def start(python, text, out, *more, kind="text"):
    source, of_text, *others = arguments(text, out)
    command = [python, "-c", PROGRAM, source, of_text.replace("text:", f"{kind}:", 1), *others, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def run(*given, **more):
    process = start(*given, **more)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return printed


THREADS = "--direct_num_workers=4", "--direct_running_mode=multi_threading"


@pytest.mark.parametrize(
    ("tokenizer", "options"),
    [("wordpiece", ()), ("wordpiece", THREADS), ("wordlevel", ()), ("sentencepiece-unigram", ())],
)
def test_a_pipeline_in_this_process_makes_the_same_bytes(text, tmp_path, tokenizer, options):
    alone, by_beam = tmp_path / "alone", tmp_path / "beam"
    choice = f"--tokenizer={tokenizer}", f"--vocab-size={46 if tokenizer == 'sentencepiece-unigram' else 200}"
    run(sys.executable, text, alone, *choice)
    run(PYTHON, text, by_beam, *choice, "--runner=direct", "--", *options)
    assert content(by_beam) == content(alone)


def test_a_pipeline_counts_the_values_before_documents(tmp_path):
    lines = [{"text": f"{number} alpha beta " * 20, "year": 1990 + number % 9} for number in range(99)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = "--values", "year", "--prefix=year"
    run(sys.executable, tmp_path / "a.jsonl", tmp_path / "alone", *more, kind="jsonl")
    run(PYTHON, tmp_path / "a.jsonl", tmp_path / "beam", *more, "--runner=direct", kind="jsonl")
    assert content(tmp_path / "beam") == content(tmp_path / "alone")
    assert b"[year:1998]" in content(tmp_path / "beam")["tokenizer/tokenizer.json"]


def test_a_pipeline_with_worker_processes_that_is_killed_goes_on(text, tmp_path):
    alone, by_beam = tmp_path / "alone", tmp_path / "beam"
    run(sys.executable, text, alone)
    options = "--runner=direct", "--", "--direct_num_workers=2", "--direct_running_mode=multi_processing"
    killed = start(PYTHON, text, by_beam, *options)
    while killed.poll() is None and len(list(by_beam.glob("parts/*/summary.json"))) < 2:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    made = {path: path.stat().st_mtime_ns for path in by_beam.glob("parts/*/summary.json")}
    run(PYTHON, text, by_beam, *options)
    assert content(by_beam) == content(alone)
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_what_a_worker_cannot_do_is_one_line(text, tmp_path):
    run(PYTHON, text, tmp_path / "out", "--part=0/6")
    (tmp_path / "out" / "parts" / "000001").write_text("in the way")
    process = start(PYTHON, text, tmp_path / "out", "--runner=direct")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "error: --runner direct: " in errors and "start the same command again to continue" in errors
