"""Sphinx directives that insert parts of the code when the site is built: options of commands, recipes, plans and
docstrings.

On GitHub a page shows the body of a directive instead: the command that prints the same.
"""

import contextlib
import importlib
import io
import os
import re
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pretrain.commands.recipes import rows

ROOT = Path(__file__).parents[1]
PLANS = ROOT / "benchmarks" / "results" / "plans.md"
RECIPE_COLUMNS = {  # of `recipes` -> heading
    "recipe": "recipe",
    "body": "parameters",
    "published": "with the paper's vocabulary",
    "phases": "batch x length",
    "steps": "steps",
    "source": "source",
}
PLAN_COLUMNS = "recipe", "slice", "mesh", "batch", "HBM GiB", "step ms", "MFU"


class FromCode(SphinxDirective):
    """Base of the directives. Their body is what GitHub shows."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def table(self, columns: list[str], lines: list[list[str]]) -> list[nodes.Node]:
        """Return a table. ValueError if it has no lines."""
        if not lines:
            raise ValueError(f"{self.name} {self.arguments[0]}: has no rows")
        text = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *lines)]
        parent = nodes.Element()
        self.state.nested_parse(StringList(text, self.get_source_info()[0]), self.content_offset, parent)
        return parent.children


class CommandHelp(FromCode):
    """Insert the help of `PACKAGE COMMAND ...`."""

    def run(self) -> list[nodes.Node]:
        text = help_of(self.arguments[0].split())
        return [nodes.literal_block(text, text, language="text")]


class RecipeTable(FromCode):
    """Insert the recipes of models, given by name, or recipes, given by the beginnings of their names."""

    def run(self) -> list[nodes.Node]:
        names = self.arguments[0].split()
        chosen = [row for row in rows() if row["model"] in names or row["recipe"].startswith(tuple(names))]
        lines = [[f"`{row[key]}`" if key == "recipe" else row[key] for key in RECIPE_COLUMNS] for row in chosen]
        return self.table(list(RECIPE_COLUMNS.values()), lines)


class PlanTable(FromCode):
    """Insert the plans on v5e and v5p of recipes, given by the beginnings of their names."""

    def run(self) -> list[nodes.Node]:
        begins = tuple(self.arguments[0].split())
        chosen = [plan for plan in plans(PLANS.read_text()) if plan["recipe"].strip("`").startswith(begins)]
        lines = [[plan[key] for key in PLAN_COLUMNS] for plan in chosen if plan["slice"].startswith(("v5e", "v5p"))]
        return self.table(list(PLAN_COLUMNS), lines)


def help_of(words: list[str]) -> str:
    """Return what `python -m PACKAGE ... --help` prints, 88 columns wide."""
    package, *rest = words
    printed = io.StringIO()
    os.environ["COLUMNS"] = "88"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(f"{package}.__main__").main([*rest, "--help"])
    return re.sub(r"\x1b\[[\d;]*m", "", printed.getvalue()).strip()


def plans(page: str) -> list[dict[str, str]]:
    """Return the rows of a page's tables whose first column is `recipe`, as heading -> text."""
    found, columns = [], []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[:1] == ["recipe"]:
            columns = cells
        elif not cells:
            columns = []
        elif columns and not cells[0].startswith("---"):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


def as_rst(app: Sphinx, what: str, name: str, obj, options, lines: list[str]) -> None:
    """Turn a plain-text docstring into reStructuredText: `name: meaning` becomes a list item, and columns and indented
    text a literal block."""
    shown = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        if re.search(r"\S {3,}\S", paragraph) or paragraph.startswith("    "):
            shown += ["::", "", *(f"    {line}" for line in paragraph.split("\n")), ""]
            continue
        pieces = paragraph.split("`")  # every second one is code
        pieces[::2] = [re.sub(r"([\\*|_])", r"\\\1", piece) for piece in pieces[::2]]
        text = "``".join(pieces)
        parts = re.split(r"\n(?=[\w\\, ]+: )", text)
        named = len(parts) > 1 or re.match(r"[\w\\, ]+: \w+\[", text)
        shown += [("* " if named else "") + " ".join(part.split()) for part in parts]
        shown += [""]
    lines[:] = shown


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    app.add_directive("recipe-table", RecipeTable)
    app.add_directive("plan-table", PlanTable)
    app.connect("autodoc-process-docstring", as_rst)
    return {"parallel_read_safe": False}
