"""Finish a corpus whose parts all exist: write the manifest, last of all, and print a report."""

import io
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
from rich.console import Console

from data_pipelines import cloud, similar_words
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems
from data_pipelines.manifest import part_name, total
from data_pipelines.prepare import partial
from data_pipelines.prepare.parts import Work, present, read_encoder
from data_pipelines.prepare.plan import kept_at
from data_pipelines.prepare.training import MOST_UNKNOWN
from data_pipelines.processes import over_parts
from data_pipelines.show import show_problems
from data_pipelines.store.fields import STORED
from data_pipelines.store.files import SUMMARY, write_json
from data_pipelines.store.job import manifest_of, word_starts_of, write_tables
from data_pipelines.text.steps import check_steps

PARTS = 16  # in which unknown tokens are counted
SAMPLE, FEW = 1 << 20, 0.01  # tokens whose words are looked up; a share of them that should be mended


def finish(work: Work, state: partial.State, before: dict | None, console: Console) -> dict:
    """Write the manifest of a corpus and return it. Raises UserError if parts are missing or have no text."""
    out = work.out
    there = present(out, work.plan.numbers)
    missing = [number for number in work.plan.numbers if number not in there]
    if missing:
        runs = np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1)
        named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        raise UserError(
            f"--finish: {len(missing)} of {len(work.plan.parts)} parts are missing ({named}); make them with "
            "--part I/N, then --finish again"
        )
    summaries = [json.loads((out / part_name(number) / SUMMARY).read_text()) for number in work.plan.numbers]
    _check_text(work, state, before, summaries)
    with partial.workroom(out) as folder:
        made = Path(folder)
        shutil.copytree(work.tokenizer.parent, made / "tokenizer")
        if before is None:
            write_tables(made, _tables(work, state))
        manifest = manifest_of(made, summaries, work.job, state.special, before, **_described(work, state, before))
        for stage in manifest["stages"]:
            manifest["counts"].merge(stage["left_out"])
        plan = json.dumps(work.plan._asdict()).encode()
        partial.write_new(kept_at(out, work.plan.hash), plan)
        if before is None:
            for name in ("tokenizer", "tables"):
                partial.put_folder(made / name, out / name)
        if cloud.in_cloud(out):
            write_json(made / "manifest.json", manifest)
            cloud.upload_file(made / "manifest.json", out / "manifest.json")
        else:
            write_json(out / "manifest.json", manifest)
    partial.remove(out)
    shutil.rmtree(work.scratch, ignore_errors=True)
    _report(out, manifest, before, state.enough, console)
    return manifest


def _tables(work: Work, state: partial.State) -> dict[str, np.ndarray]:
    """Return what is looked up by token or word: name -> array."""
    encoder, tables = read_encoder(work.tokenizer), {}
    word_starts = word_starts_of(encoder)[1]
    if word_starts is not None and work.job.fields["word_starts"].kept != STORED:
        missing = work.job.vocab_size - len(word_starts)  # ids that occur in no text
        tables["word_starts"] = np.pad(word_starts, (0, missing), constant_values=True)
    if path := state.settings["similar_words"]:
        tables |= similar_words.made(path, encoder, state.special.get("unk"))
    return tables


def _check_text(work: Work, state: partial.State, before: dict | None, summaries: list[dict]) -> None:
    if any(sizes["documents"] for summary in summaries for sizes in summary["splits"].values()):
        return _check_words(work, [*summaries, *(before["parts"] if before else [])])
    problems = Problems()
    for summary in summaries:
        problems.merge(summary["counts"])
    reasons = "; ".join(f"{seen['count']} {problem}, first {seen['first']}" for problem, seen in problems.items())
    partial.remove(work.out)
    for folder in [work.out / "parts"] if before is None else partial.parts_from(work.out, work.plan.first):
        cloud.remove_folder(folder)
    raise UserError(f"--source {' '.join(state.settings['source'])}: no documents with text ({reasons or 'no text'})")


def _check_words(work: Work, summaries: list[dict]) -> None:
    """Raise UserError for a segmenter that has found no word of several characters in the whole corpus."""
    for field, spec, _ in work.job.units:
        if not any(summary["words"][field] for summary in summaries):
            raise UserError(
                f"--units {field.removesuffix('_starts')}={spec}: no word of two or more Chinese characters is in "
                "the text; give another list, simplified or traditional as the text is, and another --out"
            )


def _described(work: Work, state: partial.State, before: dict | None) -> dict:
    """Return the manifest's entries on the origin of its text; stages: one for each time that parts were added."""
    files = [Counter() for _ in work.job.sources]
    for piece in work.plan.ranges():
        files[piece.source][piece.path] += piece.size
    each = zip(state.settings["source"], files, strict=True)
    sources = [{"source": spec, "files": len(sizes), "bytes": sizes.total()} for spec, sizes in each]
    stage = {"parts": len(work.plan.parts), "plan": work.plan.hash, "left_out": work.plan.problems}
    stage |= {"settings": state.settings, "versions": state.versions}
    return {
        "sources": before["sources"] + sources if before else sources,
        "settings": before["settings"] if before else state.settings,
        "steps": check_steps(state.settings["steps"]),
        "stages": [*before["stages"], stage] if before else [stage],
    }


def _report(out: Path, manifest: dict, before: dict | None, enough: int | None, console: Console) -> None:
    """Print sizes, what could not be read, and what should be mended. before: the manifest of the corpus that parts
    were added to. enough: the size of a vocabulary that would cover the text."""

    def say(line, **style):
        console.print(line, markup=False, soft_wrap=True, **style)

    splits = total(part["splits"] for part in manifest["parts"])
    for split, sizes in splits.items():
        say(f"{out}/{split}: " + ", ".join(f"{count:,} {name}" for name, count in sizes.items()))
    show_problems(manifest["counts"], console)
    if before:
        added = len(manifest["parts"]) - len(before["parts"])
        parts = "1 part was" if added == 1 else f"{added} parts were"
        say(f"{parts} added: the fingerprint was {before['fingerprint']} and is {manifest['fingerprint']}")
    unknown = _unknown(out, manifest)
    if unknown is not None:
        line, much = f"{unknown:.3%} of the tokens are unknown to the tokenizer", unknown > MOST_UNKNOWN
        if much and enough and enough > manifest["vocab_size"]:
            line += f"; --vocab-size {enough} would cover nearly all"
        elif much:
            line += "; check that it is one for this language, and check --steps and --cased"
        say(line, style="yellow" if much else None)
    if f"tables/{similar_words.WORDS}.npy" in manifest["tables"] and not cloud.in_cloud(out):
        share = _with_similar_words(Corpus(out))
        few = "; check that they are words of this text, as it is cut into words" if share < FEW else ""
        say(f"{share:.1%} of the words of the text have similar ones{few}", style="yellow" if few else None)
    if not splits["heldout"]["documents"] and manifest["settings"]["heldout"]:
        say("nothing is held out for evaluation: the corpus has one document; see --documents", style="yellow")


def _with_similar_words(corpus: Corpus) -> float:
    """Return the share of words that have similar ones, of the first tokens of the largest part."""
    part = max(corpus.parts, key=lambda part: part.sizes["train"]["tokens"])
    number = min(part.sizes["train"]["tokens"], SAMPLE)
    read = lambda field: part.read("train", field, np.zeros(1, np.int64), number)[0]
    starts = read("word_starts").astype(bool)
    starts[:1] = True
    words = similar_words.SimilarWords(*map(corpus.table, similar_words.TABLES))
    begin = np.flatnonzero(starts)
    known = words.of(read("tokens").astype(np.int32), begin, np.zeros(len(begin), np.uint32))[1]
    return float(known[begin].mean())


def _unknown(out: Path, manifest: dict) -> float | None:
    """Return the share of training tokens that are unknown, from evenly spaced parts; None without an unknown token."""
    number, unknown = len(manifest["parts"]), manifest["special"].get("unk")
    if unknown is None:
        return None
    places = (out / part_name(part) / "train" for part in sorted({at * number // PARTS for at in range(PARTS)}))
    counts = over_parts(lambda place: np.load(io.BytesIO((place / "token_counts.npy").read_bytes())), sum, places)
    return float(counts[unknown] / max(counts.sum(), 1))
