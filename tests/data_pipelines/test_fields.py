"""What documents say beside their text is stored by token, by sentence and by document, and read back."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_pipelines.corpus import Corpus
from data_pipelines.document import Annotation, Document, Segment, plain
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Source
from data_pipelines.formats.table import parse, plan
from data_pipelines.manifest import part_name
from data_pipelines.store import units
from data_pipelines.store.fields import BY_TOKEN, BY_TOKEN_BEFORE, Field
from data_pipelines.store.job import Job, manifest_of, planned, word_starts_of, write_tables
from data_pipelines.store.parts import write_part
from data_pipelines.text.encoding import Encoder
from data_pipelines.text.sentences import starts
from data_pipelines.text.steps import STEPS, Step, of_document
from data_pipelines.tokenizers.training import Training
from tests.data_pipelines.prepared import documents, run
from tests.data_pipelines.tokenizers.trained import make, train

SOURCES = (Source("text", "tests", None),)
WORDS = ["Alpha", "beta", "gamma", "unaffable", "naïve", "Zürich", "3,141", "x"]
ADDED = {
    "segments": Field("uint8", per="sentence", values=("source", "target")),
    "entities": Field("uint16", values=()),
    "boxes": Field("uint16", (4,)),
    "moods": Field("uint16", per="sentence", values=()),
}


def trained(*kind):
    """A tokenizer whose offsets have the white space too."""
    return Tokenizer.from_str(json.dumps(json.loads(make(*kind).tokenizer.to_str()) | {"post_processor": None}))


MAKE = {
    "wordpiece": lambda: trained("wordpiece"),
    "byte-level": lambda: trained("bpe"),
    "character-bpe": lambda: train("character-bpe", [" ".join(WORDS).lower()] * 20, Training(80)).tokenizer,
}
KEPT = dict.fromkeys(MAKE, BY_TOKEN) | {"character-bpe": BY_TOKEN_BEFORE}


def random_document(random):
    """A text and its translation, with entities and boxes of spans, and moods of sentences."""
    text = lambda: " ".join(
        random.choice(WORDS) + random.choice(["", "", ".", ".\n"]) for _ in range(random.integers(1, 40))
    )
    segments, notes = (Segment("source", text()), Segment("target", text())), []
    for number, segment in enumerate(segments):
        cuts = np.sort(random.choice(len(segment.text) + 1, min(8, len(segment.text) + 1), replace=False)).tolist()
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            notes.append(Annotation("entities", number, start, end, str(random.choice(["PER", "LOC", "ORG"]))))
            notes.append(Annotation("boxes", number, start, end, tuple(random.integers(1, 99, 4).tolist())))
        notes.append(Annotation("moods", number, cuts[0], cuts[0], str(random.choice(["glad", "sad"]))))
    return Document(segments, tuple(notes))


def expected(document, tokenizer):
    """(ids, sentence lengths, role of each sentence, entity of each token, box of each token, mood of each sentence),
    token by token."""
    ids, lengths, roles, entities, boxes, moods = [], [], [], [], [], []
    for number, segment in enumerate(document.segments):
        encoding, begins = tokenizer.encode(segment.text, add_special_tokens=False), starts(segment.text)
        notes = [note for note in document.annotations if note.segment == number]
        counts, said = np.zeros(len(begins), int), [""] * len(begins)
        for id_, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            counts[max(np.count_nonzero(begins < last) - 1, 0)] += 1
            over = [note for note in notes if note.start < last and first < note.end]
            ids.append(id_)
            entities.append(([""] + [note.value for note in over if note.field == "entities"])[-1])
            boxes.append(([(0, 0, 0, 0)] + [note.value for note in over if note.field == "boxes"])[-1])
        for note in notes:
            if note.field == "moods":
                said[max(np.count_nonzero(begins <= note.start) - 1, 0)] = note.value
        kept = np.flatnonzero(counts)
        lengths += counts[kept].tolist()
        roles += [segment.name] * len(kept)
        moods += [said[at] for at in kept]
    return ids, lengths, roles, entities, boxes, moods


def word_starts(documents_of_units, encoder):
    """Of all tokens, as the encoder tells them text by text."""
    texts = [
        segment.text for documents in documents_of_units for document in documents for segment in document.segments
    ]
    encoded = [encoder.encode([text], [starts(text)]) for text in texts]
    told = [encoder.word_starts[one.tokens] if one.word_starts is None else one.word_starts for one in encoded]
    return np.concatenate(told).tolist()


def write(path, documents_of_parts, tokenizer, fields=ADDED):
    """A corpus of parts, each of units, each of documents."""
    encoder, size = Encoder(tokenizer), tokenizer.get_vocab_size()
    kept, table = word_starts_of(encoder)
    job = Job(SOURCES, size, planned(SOURCES, size, kept) | fields, 0.0)
    summaries = []
    for number, documents_of_units in enumerate(documents_of_parts):
        folders = [path / f"{number}-{unit}" for unit in range(len(documents_of_units))]
        for folder, written_here in zip(folders, documents_of_units, strict=True):
            files = units.UnitFiles(folder, job)
            written = units.Batches(files, encoder, job)
            for document in written_here:
                written.add(document, [starts(segment.text) for segment in document.segments], 0, 0)
            written.flush()
            files.finish(problems={}, paths=["here"], **written.described())
        summaries.append(write_part(path / part_name(number), folders, job))
    write_tables(path, {} if table is None else {"word_starts": table})
    (path / "manifest.json").write_text(json.dumps(manifest_of(path, summaries, job, {})))
    return Corpus(path)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("seed", range(6))
def test_segments_and_annotations_are_where_a_plain_loop_puts_them(tmp_path, kind, seed, monkeypatch):
    random, tokenizer = np.random.default_rng(seed), MAKE[kind]()
    monkeypatch.setattr(units, "BATCH", 300)  # several batches a unit
    made = [[[random_document(random) for _ in range(random.integers(1, 6))] for _ in range(2)] for _ in range(3)]
    corpus = write(tmp_path / "c", made, tokenizer)
    corpus.verify()
    assert corpus.fields["word_starts"].kept == KEPT[kind]
    text_of = lambda field, numbers: [corpus.fields[field].values[number] for number in numbers.tolist()]
    for part, unit in zip(corpus.parts, made, strict=True):
        found = [expected(document, tokenizer) for documents in unit for document in documents]
        ids, lengths, roles, entities, boxes, moods = ([one for of in found for one in of[at]] for at in range(6))
        whole = lambda field: part.read("train", field, np.array([0]), len(ids))[0]  # noqa: B023
        assert whole("tokens").tolist() == ids
        assert np.diff(part.sentences("train")).tolist() == lengths
        assert text_of("segments", part.column("train", "segments")) == roles
        assert text_of("entities", whole("entities")) == entities
        assert [tuple(box) for box in whole("boxes").tolist()] == boxes
        assert text_of("moods", part.column("train", "moods")) == moods
        assert whole("word_starts").tolist() == word_starts(unit, Encoder(tokenizer))
    assert set(corpus.fields["entities"].values) == {"", "PER", "LOC", "ORG"}


def test_a_stretch_of_a_field_with_a_shape_is_read_at_both_ends(tmp_path):
    notes = tuple(Annotation("boxes", 0, at, at + 1, (at, at, at, 7)) for at in range(5))
    (part,) = write(tmp_path / "c", [[[Document((Segment("source", "qqqqq"),), notes)]]], trained("bpe")).parts
    rows = part.read("train", "boxes", np.array([-2, 1, 3]), 4)
    assert rows[0, 2:].tolist() == [[0, 0, 0, 7], [1, 1, 1, 7]]
    assert rows[1, :, 0].tolist() == [1, 2, 3, 4]
    assert rows[2, :2].tolist() == [[3, 3, 3, 7], [4, 4, 4, 7]]
    assert part.read("train", "boxes", np.array([0]), 9)[0, :5, 0].tolist() == [0, 1, 2, 3, 4]


def test_the_first_token_begins_a_word_though_none_is_before_it(tmp_path):
    (part,) = (corpus := write(tmp_path / "c", [[[plain("uax beta")]]], MAKE["character-bpe"](), fields={})).parts
    tokens = part.read("train", "tokens", np.array([0]), 3)[0]
    assert not corpus.table("word_starts")[tokens[:2]].any()
    for start, found in ((0, [True, False]), (-1, [True]), (1, [False, False])):
        got = part.read("train", "word_starts", np.array([start]), 2)[0]
        assert got[max(-start, 0) :].tolist() == found


def labelled(labels):
    return Document((Segment("source", "x " * len(labels)),), tuple(
        Annotation("entities", 0, 2 * at, 2 * at + 1, label) for at, label in enumerate(labels)
    ))  # fmt: skip


@pytest.mark.parametrize(("units_of_part", "labels"), [(1, 300), (2, 200)])
def test_more_labels_than_a_part_can_have_are_an_error(tmp_path, units_of_part, labels):
    few = ADDED | {"entities": Field("uint8", values=())}
    made = [[labelled([f"{unit} {at}" for at in range(labels)])] for unit in range(units_of_part)]
    with pytest.raises(UserError, match="field 'entities' has more than 256 different values in a part"):
        write(tmp_path / "c", [made], trained("bpe"), fields=few)


def test_a_text_of_white_space_is_no_document_and_loses_no_other(tmp_path):
    corpus = write(tmp_path / "c", [[[plain(" \n "), plain("x"), plain("\n")]]], trained("bpe"), fields={})
    assert corpus.size("train") == {"documents": 1, "sentences": 1, "tokens": 1}
    assert corpus.manifest["counts"]["empty documents"]["count"] == 2


def test_formats_bring_their_fields_through_prepare(tmp_path):
    lines = "John B-PER\nlives O\nin O\nNew B-LOC\nYork I-LOC\n\nHe O\nsmiles O\n"
    (tmp_path / "a.conll").write_text(lines)
    (tmp_path / "b.tsv").write_text("Hello there.\tGuten Tag.\nGood night. Sleep.\tGute Nacht.\n")
    (tmp_path / "c.txt").write_text("Plain text.")
    sources = [f"conll:{tmp_path}/a.conll", f"parallel:{tmp_path}/b.tsv", f"text:{tmp_path}/c.txt"]
    run(tmp_path / "out", *sources)
    corpus = Corpus(tmp_path / "out")
    (part,) = corpus.parts
    text = lambda field, numbers: [corpus.fields[field].values[number] for number in numbers.tolist()]
    roles = text("segments", part.column("train", "segments"))
    sentences = [sentence for document in documents(tmp_path / "out") for sentence in document]
    assert [(role, sentence) for role, sentence in zip(roles, sentences, strict=True) if role != "text"] == [
        ("source", "Hello there ."),
        ("target", "Guten Tag ."),
        ("source", "Good night ."),
        ("source", "Sleep ."),
        ("target", "Gute Nacht ."),
    ]
    size = part.sizes["train"]["tokens"]
    labels = text("labels", part.read("train", "labels", np.array([0]), size)[0])
    per_word = [
        label
        for label, start in zip(labels, part.read("train", "word_starts", np.array([0]), size)[0], strict=True)
        if start
    ]
    assert per_word[:7] == ["B-PER", "O", "O", "B-LOC", "I-LOC", "O", "O"] and set(per_word[7:]) == {""}
    assert text("sources", part.column("train", "sources")) == [sources[0], sources[1], sources[1], sources[2]]


@pytest.mark.parametrize(("paths", "documents"), [(["one", "one"], 1), (["one", "two"], 2)])
def test_in_a_unit_only_the_rest_of_the_same_file_goes_on(tmp_path, paths, documents):
    tokenizer = trained("bpe")
    job = Job(SOURCES, tokenizer.get_vocab_size(), planned(SOURCES, tokenizer.get_vocab_size(), BY_TOKEN), 0.0)
    files = units.UnitFiles(tmp_path / "unit", job)
    written = units.Batches(files, Encoder(tokenizer), job)
    for number, document in enumerate((plain("q"), plain("qq", continues=True), plain("q", continues=True))):
        written.add(document, [np.zeros(1, np.int64)], 0, int(number > 0))
    written.flush()
    files.finish(problems={}, paths=paths, **written.described())
    summary = write_part(tmp_path / "part", [tmp_path / "unit"], job)
    assert summary["splits"]["train"] == {"documents": documents, "sentences": 3, "tokens": 4}


def test_steps_change_texts_and_bring_fields_before_they_are_encoded(tmp_path, monkeypatch):
    mark = lambda document: document._replace(
        annotations=tuple(
            Annotation("marks", 0, place, place + 1, 3) for place in range(0, len(document.segments[0].text), 2)
        )
    )
    monkeypatch.setitem(STEPS, "marks", Step(1, of_document(mark), {"marks": Field("uint8")}))
    (tmp_path / "a.txt").write_text("q<b>q</b>qq")
    source, tokenizer = parse(f"text:{tmp_path}/a.txt"), trained("bpe")
    encoder, steps = Encoder(tokenizer), ("tags", "marks")
    fields = planned([source], tokenizer.get_vocab_size(), BY_TOKEN, steps)
    job = Job((source,), tokenizer.get_vocab_size(), fields, 0.0, steps=steps)
    ((ranges,),) = [plan([source], Problems())]
    units.write_unit(tmp_path / "unit", ranges, job, encoder)
    write_part(tmp_path / "part", [tmp_path / "unit"], job)
    stored = {name: np.load(tmp_path / "part" / "train" / f"{name}.npy").tolist() for name in ("tokens", "marks")}
    assert stored == {"tokens": tokenizer.encode("qqqq").ids, "marks": [3, 0, 3, 0]}
