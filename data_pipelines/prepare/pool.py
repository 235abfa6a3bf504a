"""Units of work to shards, on all cores."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import tokenizers
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_pipelines.errors import UserError
from data_pipelines.prepare.options import Prepare
from data_pipelines.store.batches import write_unit
from data_pipelines.store.units import is_whole
from data_pipelines.text.encoding import Encoder


def read_tokenizer(partial: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(partial / "tokenizer" / "tokenizer.json"))


_worker = ()  # in a worker process: what its tasks share


def _start_worker(job, partial) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (job, Encoder(read_tokenizer(partial)))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # a killed run leaves no workers behind
    os._exit(1)


def _work(folder: Path, unit) -> None:
    write_unit(folder, unit, *_worker)


def make_shards(options: Prepare, units, folders, shared, console: Console) -> None:
    """Write the shards that are missing, showing progress by bytes of source."""
    missing = [(folder, unit) for folder, unit in zip(folders, units, strict=True) if not is_whole(folder)]
    if len(missing) < len(units):
        console.print(f"continuing: {len(units) - len(missing)} of {len(units)} shards are there")
    weight = {folder: sum(part.size for part in unit) for folder, unit in missing}
    columns = TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = min(options.processes or cores, len(missing))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(weight.values()))
        for folder in _run(missing, shared, processes):
            progress.advance(task, weight[folder])


def _run(missing, shared, processes: int) -> Iterator[Path]:
    """Do the work, yielding each folder when it is there."""
    if processes <= 1:
        job, partial = shared
        encoder = Encoder(read_tokenizer(partial))
        for folder, unit in missing:
            write_unit(folder, unit, job, encoder)
            yield folder
        return
    spawn = multiprocessing.get_context("spawn")  # threads of the tokenizers do not survive a fork
    with ProcessPoolExecutor(processes, spawn, _start_worker, shared) as pool:
        try:
            submitted = {pool.submit(_work, folder, unit): folder for folder, unit in missing}
            for future in as_completed(submitted):
                future.result()
                yield submitted[future]
        except BrokenProcessPool as error:
            raise UserError("--processes: a worker was killed, perhaps for memory; use fewer and run again") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
