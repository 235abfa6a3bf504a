"""The documents of a source in tests, whole or in the pieces in which they come."""

from data_pipelines.document import Document
from data_pipelines.formats import table
from data_pipelines.formats.problems import Problems


def ranges(one):
    return [part for unit in table.plan([one], Problems()) for part in unit]


def read(spec: str, **options) -> tuple[list[Document], Problems]:
    """The documents as they come."""
    one = table.parse(spec, **options)
    problems = Problems()
    return [document for part in ranges(one) for document in table.read(one, part, problems)], problems


def texts(spec: str, **options) -> tuple[list[str], Problems]:
    """The texts of documents of one segment, whole."""
    documents, problems = read(spec, **options)
    found = []
    for document in documents:
        (segment,) = document.segments
        if document.continues:
            found[-1] += segment.text
        else:
            found.append(segment.text)
    return found, problems
