"""Join units of work to a part of a corpus: memmappable arrays for each split, described by a summary.

    {train,heldout}/tokens.npy, sentences.npy, documents.npy and an array for each other stored field
    train/token_counts.npy      int64 [vocab]
    summary.json                written last: splits, characters, counts, values, files, fingerprint

Memory: about 80 bytes per document of the part, and the arrays of one unit.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.durable import put
from data_pipelines.formats.problems import EMPTY, Problems
from data_pipelines.manifest import SPLITS, part_fingerprint
from data_pipelines.store.fields import TEXT, check_values, valued
from data_pipelines.store.files import SUMMARY, NpyFile, beside, describe_files, read_summary, write_json
from data_pipelines.store.job import Job
from data_pipelines.store.units import VALUE, read_unit

CHUNK = 1 << 22  # tokens to copy at a time
ENOUGH = 50_000  # held-out tokens of a corpus; if there are fewer, up to MOST of the documents are held out
MOST = 0.05
CUT = "documents cut at the end of a part"
TOO_LARGE = "documents of several segments that have most of a part, kept whole: too little is held out"


class Documents(NamedTuple):
    """The nonempty documents of a part. starts: the first sentence of each, then the number of sentences, int64
    [documents + 1]. tokens: int64 [documents]. rows: `UnitFiles.dtype` [documents]."""

    starts: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray


def write_part(folder: Path, units: list[Path], job: Job) -> dict:
    """Write the folder of a part from the folders of its units. Returns its summary. A part that exists is left alone.
    Raises UserError for a damaged unit, whose folder is removed."""
    if (folder / SUMMARY).exists():
        return read_summary(folder)
    documents, numbered, sums = _documents(units, job)
    held = choose_held(documents.rows["hash"], documents.tokens, job.heldout, job.parts)
    documents, held = _with_end_held(documents, held, units, job, sums["counts"])
    temporary = beside(folder)
    sizes = {
        name: _write_split(temporary / name, documents, chosen, units, job, numbered)
        for name, chosen in zip(SPLITS, (~held, held), strict=True)
    }
    tokens, counts = np.load(temporary / "train" / "tokens.npy", mmap_mode="r"), np.zeros(job.vocab_size, np.int64)
    for at in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[at : at + CHUNK], minlength=job.vocab_size)
    np.save(temporary / "train" / "token_counts.npy", counts)
    files = describe_files(temporary, "*/*.npy")
    summary = {"fingerprint": part_fingerprint(files, sums["values"]), "splits": sizes, **sums, "files": files}
    write_json(temporary / SUMMARY, summary)
    put(temporary, folder)
    return summary


def _documents(folders: list[Path], job: Job) -> tuple[Documents, dict[str, dict[str, int]], dict]:
    """Return all documents of the units; field -> text -> its number; and the sums of the units' summaries."""
    found, offsets, files, paths = [], [], [], {}
    texts_of = {name: field.values for name, field in job.fields.items() if field.values is not None}
    numbered = {name: {text: number for number, text in enumerate(texts)} for name, texts in texts_of.items()}
    problems, characters, sentences, tokens, words = Problems(), 0, 0, 0, Counter()
    for folder in folders:
        unit = read_unit(folder, hashed=True)
        problems.merge(unit.summary["problems"])
        words.update(unit.summary["words"])
        characters, documents = characters + unit.summary["characters"], unit.documents
        for name, texts in unit.summary["values"].items():
            numbers = [numbered[name].setdefault(text, len(numbered[name])) for text in texts]
            check_values(name, job.fields[name], len(numbered[name]))
            if VALUE + name in documents.dtype.names:
                documents[VALUE + name] = np.array(numbers, np.int64)[documents[VALUE + name]]
        numbers = [paths.setdefault(path, len(paths)) for path in unit.summary["paths"]]
        files.append(np.array(numbers)[documents["range"]])
        offsets.append(tokens + unit.sentences[documents["start"]])
        documents["start"] += sentences
        found.append(documents)
        sentences, tokens = sentences + len(unit.sentences) - 1, tokens + int(unit.sentences[-1])
    documents, offset, file = map(np.concatenate, (found, offsets, files))
    continues = documents["continues"]
    continues[1:] &= file[1:] == file[:-1]  # a rest without its beginning must not continue another file
    begins = np.flatnonzero(~continues | (np.arange(len(documents)) == 0))  # no document crosses parts
    size = np.diff(offset[begins], append=tokens)
    paths = list(paths)
    if len(documents) and continues[0] and size[0]:
        problems.note(CUT, paths[file[0]])
    for document in begins[(size == 0) & ~continues[begins]].tolist():
        problems.note(EMPTY, paths[file[document]])
    documents, size = documents[begins[size > 0]], size[size > 0]
    starts = np.append(documents["start"], sentences)
    starts[0] = 0  # sentences without tokens may come before
    values = {name: [] if job.fields[name].kept == TEXT else list(numbers) for name, numbers in numbered.items()}
    sums = {"characters": characters, "counts": problems, "values": values} | ({"words": words} if words else {})
    return Documents(starts, size, documents), numbered, sums


def _with_end_held(documents: Documents, held: np.ndarray, folders: list[Path], job: Job, problems: Problems):
    """If one document has most of the part, so that it cannot be held out and the others are too few, hold out its last
    sentences as a separate document. Of several segments a piece means nothing: then note a problem instead."""
    total, has = int(documents.tokens.sum()), int(documents.tokens[held].sum())
    wanted = missing_held(has, total, job.heldout, job.parts)
    longest = int(documents.tokens.argmax()) if total else 0
    if wanted <= 0 or 2 * documents.tokens[longest] <= total:
        return documents, held

    def of_longest(read):
        return np.concatenate([read(read_unit(folder)) for folder in folders])[slice(*documents.starts[longest:][:2])]

    if "segments" in job.fields and np.ptp(of_longest(lambda unit: unit.fields["segments"])):
        problems.note(TOO_LARGE, str(job.sources[documents.rows["source"][longest]]))
        return documents, held
    lengths = of_longest(lambda unit: np.diff(unit.sentences))
    held_then = np.cumsum(lengths[::-1])  # with 1, 2, .. sentences: enough, but at most half
    count = min(np.searchsorted(held_then, wanted) + 1, np.searchsorted(held_then, total // 2 - has, "right"))
    if not count:
        return documents, held
    after = longest + 1
    tokens = int(held_then[count - 1])
    sizes = np.insert(documents.tokens, after, tokens)
    sizes[longest] -= tokens
    return Documents(
        np.insert(documents.starts, after, documents.starts[after] - count),
        sizes,
        np.insert(documents.rows, after, documents.rows[longest]),
    ), np.insert(held, after, True)


def choose_held(hashes: np.ndarray, tokens: np.ndarray, fraction: float, parts: int) -> np.ndarray:
    """Choose the documents to hold out for evaluation: bool [documents], those of the smallest hashes: a share of
    `fraction`, or up to MOST if these have too few tokens; at most half of the tokens. Equal texts go the same way.

    hashes: uint64 [documents]. tokens: int64 [documents]. parts: of the corpus, which must reach ENOUGH together.
    """
    held = np.zeros(len(hashes), bool)
    if not fraction or len(hashes) < 2:
        return held
    order = np.argsort(hashes, kind="stable")
    first = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[0]]))  # of each text
    sizes, copies = np.add.reduceat(tokens[order], first), np.diff(first, append=len(order))
    limit, left = np.uint64(fraction * 2**64), int(tokens.sum()) // 2
    most, taken, enough = max(int(MOST * len(hashes)), 1), 0, -(-ENOUGH // parts)
    for at, begin in enumerate(first):  # short: the loop ends at the first that is not wanted
        if not (hashes[order[begin]] < limit or (enough > 0 and taken < most)):
            break
        size, number = int(sizes[at]), int(copies[at])
        if size <= left:
            held[order[begin : begin + number]] = True
            left, enough, taken = left - size, enough - size, taken + number
    return held


def missing_held(held: int, total: int, fraction: float, parts: int) -> int:
    """Return how many more of a part's `total` tokens should be held out, where `held` are."""
    return max(int(fraction * total), min(-(-ENOUGH // parts), int(MOST * total))) - held if fraction else 0


def _write_split(
    to: Path, documents: Documents, chosen: np.ndarray, folders: list[Path], job: Job, numbered: dict[str, dict]
) -> dict[str, int]:
    """Write the arrays of the chosen documents, bool [documents]; return their sizes. numbered: see `_documents`."""
    to.mkdir()
    sizes = np.diff(documents.starts)
    inside, first = np.repeat(chosen, sizes), 0  # bool [sentences]; the first of the unit
    fields = {per: job.stored(per) for per in ("token", "sentence")}
    files = {
        name: NpyFile(to / f"{name}.npy", of.dtype, of.shape) for per in fields for name, of in fields[per].items()
    }
    sentences, tokens = NpyFile(to / "sentences.npy", np.int64), 0
    for folder in folders if chosen.any() else ():
        unit = read_unit(folder)
        values = unit.summary["values"].items()
        numbers = {name: np.array([*map(numbered[name].get, texts)], np.int64) for name, texts in values}
        for at, stop in _chunks(unit.sentences):
            lengths, taken = np.diff(unit.sentences[at : stop + 1]), inside[first + at : first + stop]
            begin, end = unit.sentences[[at, stop]]
            of_text = {"token": (slice(begin, end), np.repeat(taken, lengths)), "sentence": (slice(at, stop), taken)}
            for per, (here, kept) in of_text.items():
                for name in fields[per]:
                    array = unit.fields[name][here][kept]
                    files[name].write(numbers[name][array] if name in numbers else array)
            ends = tokens + np.cumsum(lengths[taken])
            sentences.write(ends - lengths[taken])
            tokens += int(lengths[taken].sum())
        first += len(unit.sentences) - 1
    sentences.write(np.array([tokens]))
    for file in (sentences, *files.values()):
        file.close()
    np.save(to / "documents.npy", np.append(0, np.cumsum(sizes[chosen])))
    _write_columns(to, documents.rows[chosen], job, numbered)
    return {"documents": int(chosen.sum()), "sentences": sentences.length - 1, "tokens": tokens}


def _write_columns(to: Path, rows: np.ndarray, job: Job, numbered: dict[str, dict]) -> None:
    """Write the fields of documents. rows: `UnitFiles.dtype` [documents]."""
    languages = [job.fields["languages"].values.index(source.language) for source in job.sources]
    columns = {"sources": rows["source"], "languages": np.array(languages, np.uint16)[rows["source"]]}
    columns |= {name: rows[VALUE + name] for name in valued(job.fields)}
    for name, column in columns.items():
        if job.fields[name].kept == TEXT:
            texts = [text.encode() for text in np.array([*numbered[name]], object)[column]]
            np.save(to / f"{name}.starts.npy", np.cumsum([0, *map(len, texts)]))
            column = np.frombuffer(b"".join(texts), np.uint8)
        np.save(to / f"{name}.npy", column)


def _chunks(bounds: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, after the last) of sentences with about CHUNK tokens. bounds: int64 [sentences + 1]."""
    at = 0
    while at < len(bounds) - 1:
        stop = max(at + 1, int(np.searchsorted(bounds, bounds[at] + CHUNK, "right")) - 1)
        yield at, stop
        at = stop
