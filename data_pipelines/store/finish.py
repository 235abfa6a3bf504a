"""Parts become a corpus: a manifest that lists them. No array is moved or read."""

from pathlib import Path

import numpy as np

from data_pipelines.durable import sync
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.values import CODE
from data_pipelines.manifest import VERSION, fields_of, fingerprint
from data_pipelines.store.fields import Field, valued
from data_pipelines.store.files import describe_files
from data_pipelines.store.job import Job


def write_tables(out: Path, job: Job, word_starts: np.ndarray | None) -> None:
    """The fields that are looked up by token, into OUT/tables/. word_starts: bool [vocab], None where it is stored."""
    (out / "tables").mkdir(exist_ok=True)
    if word_starts is not None:
        missing = job.vocab_size - len(word_starts)  # ids that no text has
        np.save(out / "tables" / "word_starts.npy", np.pad(word_starts, (0, missing), constant_values=True))
    sync(out / "tables")


def finish(
    out: Path, summaries: list[dict], job: Job, special: dict[str, int], before: dict | None = None, **described
) -> dict:
    """The manifest of the corpus at `out`, where its tokenizer/ and tables/ are.

    summaries: of its parts. special: role -> token. before: the manifest of the corpus that these parts are added to,
    whose parts come first. described: what else the manifest says.
    """
    parts = [*(before["parts"] if before else []), *summaries]
    manifest = {
        "version": VERSION,
        "vocab_size": job.vocab_size,
        "special": special,
        "fields": {name: field.to_json() for name, field in _with_values(job.fields, parts, before).items()},
        "tokenizer": describe_files(out, "tokenizer/*"),
        "tables": describe_files(out, "tables/*"),
        "parts": parts,
    }
    state = before and {"fingerprint": before["fingerprint"], "parts": len(before["parts"])}
    history = [*before["history"], state] if before else []
    counts = Problems()
    for part in parts:
        counts.merge(part["counts"])
    said = {"fingerprint": fingerprint(manifest, [part["fingerprint"] for part in parts]), "history": history}
    return manifest | said | described | {"counts": counts}


def check_added(before: dict, fields: dict[str, Field]) -> None:
    """UserError where text with these fields cannot be added to a corpus, of which `before` is the manifest."""
    old, new = ({name: field._replace(values=None) for name, field in of.items()} for of in (fields_of(before), fields))
    if CODE in old.keys() - new.keys():
        known = fields_of(before)[CODE].values
        raise UserError(f"--append: the corpus has control codes; give --code too, as in --code {known[0]}")
    said = [f"{name} only in the corpus" for name in old if name not in new]
    said += [f"{name} only in these sources" for name in new if name not in old]
    said += [f"{name} differ" for name in old if name in new and old[name] != new[name]]
    if said:
        raise UserError(
            f"--append: these sources give other fields than the corpus has ({', '.join(said)}); prepare them into "
            "another --out, and train on a mixture"
        )


def _with_values(fields: dict[str, Field], parts: list[dict], before: dict | None) -> dict[str, Field]:
    """With the union of the parts' values, in their order; labels of documents sorted, after those that there were."""
    found, known, labels = {}, fields_of(before) if before else {}, valued(fields)
    for name, field in fields.items():
        if field.values is not None:
            values = [value for part in parts for value in part["values"][name]]
            if name in labels:
                values = [*(known[name].values if known else ()), *sorted(values)]
            field = field._replace(values=tuple(dict.fromkeys(values)))
        found[name] = field
    return found
