"""English text that comes with every CPython: the language reference (`pydoc_data.topics`) and docstrings.

Both are taken from source files with `ast`: nothing is imported or executed. The text depends on the version of Python.
"""

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.formats import cutting
from data_pipelines.formats.files import uncut
from data_pipelines.formats.listing import look
from data_pipelines.formats.source import Format, NoOptions

TOPICS = Path("pydoc_data", "topics.py")
# Tests have few sentences and many fixtures; the other folders are not part of the standard library.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def files() -> list[Path]:
    """Return the topics file, then the library's modules by path. Raises UserError if Python lacks the topics."""
    library = Path(sysconfig.get_paths()["stdlib"])
    if not (library / TOPICS).is_file():
        raise UserError(f"--source builtin: this Python lacks {library / TOPICS}; use a complete CPython, or text:DIR")
    modules = [path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts)]
    return [library / TOPICS, *sorted(path for path in modules if path != library / TOPICS)]


def documents(path: str | Path) -> Iterator[str]:
    """Yield each topic of the topics file as a document, or the docstrings of a module, if any, as one document."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):  # lib2to3 and others keep files that are Python 2 or broken on purpose
        return
    if Path(path).parts[-2:] == TOPICS.parts:
        (topics,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
        yield from (text.strip() for _, text in sorted(ast.literal_eval(topics).items()))
    elif text := "\n\n".join(docstrings(tree)):
        yield text


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, in order of appearance, with indentation removed."""
    for child in ([node] if isinstance(node, ast.Module) else []) + list(ast.iter_child_nodes(node)):
        if isinstance(child, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(child, clean=False)
            if text and text.strip():
                yield inspect.cleandoc(text)
        if child is not node:
            yield from docstrings(child)


def _read(source, part, problems) -> Iterator[Document]:
    for text in documents(part.path):
        yield from cutting.documents(source, [text])


_ranges = lambda source, problems, exclude: (uncut(look(str(path))) for path in files())
FORMAT = Format(NoOptions, _ranges, _read, location="")
