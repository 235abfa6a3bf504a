"""A format is one file and one line of the table: what is registered there can be prepared."""

from dataclasses import dataclass

from data_pipelines.document import Annotation, AnnotationField, Document, Segment
from data_pipelines.formats import table
from data_pipelines.formats.source import Format, Range
from tests.data_pipelines.formats.reading import read, texts
from tests.data_pipelines.prepared import documents, run


@dataclass(frozen=True)
class Options:
    undecodable: str = "replace"


def _ranges(index, source, problems, exclude):
    return [Range(index, source.location, number, number + 1, 10) for number in range(3)]


def _read(source, part, problems):
    yield Document((Segment("word", f"{part.path} {part.start}."),), (Annotation("kind", 0, 0, 3, "toy"),))


TOY = Format(
    Options, _ranges, _read, "WORD", lambda options: ("word",), lambda options: {"kind": AnnotationField("label")}
)


def test_a_format_that_is_registered_is_read_and_prepared(tmp_path, monkeypatch):
    monkeypatch.setitem(table.FORMATS, "toy", TOY)
    assert texts("toy:one", fields=("not", "its"))[0] == ["one 0.", "one 1.", "one 2."]
    assert read("toy:one", undecodable="skip")[0][0].annotations == (("kind", 0, 0, 3, "toy"),)
    one = table.parse("toy:one", undecodable="skip")
    assert one.options == Options("skip")
    assert table.segments(one) == ("word",)
    assert table.annotations(one) == {"kind": AnnotationField("label")}
    run(tmp_path / "out", "toy:two")
    assert documents(tmp_path / "out") == [["two 0 ."], ["two 1 ."], ["two 2 ."]]
