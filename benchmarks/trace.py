"""What a trace of `jax.profiler` says took the longest."""

import collections
import gzip
import json
import re
from pathlib import Path


def longest(folder: Path, steps: int, number: int = 10) -> list[tuple[str, float]]:
    """(operation, ms of a step) of the longest operations in the newest trace below a folder, the longest first.

    On a GPU kernels as its streams ran them, elsewhere XLA's operations; what differs only in its number is one.
    """
    newest = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    events = json.loads(gzip.decompress(newest.read_bytes()))["traceEvents"]
    named = {"process_name": {}, "thread_name": {}}
    for event in events:
        if event.get("name") in named:
            place = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            named[event["name"]][place] = event["args"]["name"]
    on_gpu = {
        place
        for place, name in named["thread_name"].items()
        if "gpu" in named["process_name"].get(place[0], "").lower() and name.startswith("Stream")
    }
    spent = collections.Counter()
    for event in events:
        if event.get("ph") != "X":
            continue
        operation = event.get("args", {}).get("hlo_op")
        if (event["pid"], event["tid"]) in on_gpu if on_gpu else operation:
            spent[_without_number(operation or event["name"])] += event["dur"]
    return [(name, microseconds / 1e3 / steps) for name, microseconds in spent.most_common(number)]


def _without_number(name: str) -> str:
    return re.sub(r"[.\d]+$", "", name)
