"""Runs on WikiText-2 and beside it, one core each, as many at once as there are cores."""

import json
import os
import queue
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


class Training(NamedTuple):
    """One run.   name: in the table.   recipe: a name, or a file.   options: of `pretrain run`, beside corpus and work
    directory.   corpus: as of `--corpus`."""

    name: str
    recipe: str
    seed: int
    options: tuple[str, ...]
    workdir: Path
    corpus: str

    def arguments(self) -> list[str]:
        """Of `pretrain run`."""
        places = ("--corpus", self.corpus, "--workdir", str(self.workdir))
        named = ("--recipe", self.recipe) if self.recipe.endswith(".json") else (self.recipe,)
        return [*named, *places, "--seed", str(self.seed), *self.options]


def corpus(wikitext2: Path, folder: Path, tokenizer: str, vocab_size: int) -> Path:
    """A corpus of the articles in train.txt and valid.txt (word level); a finished one is taken as it is.

    tokenizer: its kind, and options behind it."""
    command = ("data_pipelines", "prepare", "--source", f"jsonl:{articles(wikitext2, folder)}", "--heldout", "0.03")
    command += ("--tokenizer", *tokenizer.split(), "--vocab-size", str(vocab_size), "--out", str(folder / "corpus"))
    subprocess.run([sys.executable, "-m", *command], check=True)
    return folder / "corpus"


def articles(wikitext2: Path, folder: Path) -> Path:
    """WikiText-2 as JSON lines, one article each."""
    text = "".join((wikitext2 / f"{split}.txt").read_text() for split in ("train", "valid"))
    articles = re.split(r"\n \n (?== [^=\n]+ = \n)", text)
    path = folder / "articles.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": article}) + "\n" for article in articles if article.strip()))
    return path


def train(runs: Sequence[Training]) -> list[float]:
    """Train all -> CPU minutes of each; finished runs are not trained again."""
    cores: queue.Queue[int] = queue.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    with ThreadPoolExecutor(cores.qsize()) as pool:
        return list(pool.map(lambda run: _train(run, cores), runs))


def _train(run: Training, cores: queue.Queue) -> float:
    """Train on a free core -> CPU minutes of all threads, kept beside the run."""
    spent = run.workdir / "cpu_minutes.txt"
    if spent.is_file():
        return float(spent.read_text())
    core = cores.get()
    command = [sys.executable, "-m", "pretrain", "run", *run.arguments()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    _, status, usage = os.wait4(process.pid, 0)
    cores.put(core)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    minutes = (usage.ru_utime + usage.ru_stime) / 60
    print(f"{run.workdir}: {minutes:.1f} CPU minutes")
    spent.write_text(f"{minutes}\n")
    return minutes


def cadence(steps: int) -> tuple[str, ...]:
    """How often a run of so many steps says, evaluates and saves something."""
    often, seldom = str(max(1, steps // 9)), str(max(1, steps // 3))
    return ("--steps", str(steps), "--eval-every", often, "--log-every", "50", "--checkpoint-every", seldom)
