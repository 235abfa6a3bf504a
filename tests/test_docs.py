"""README and the site: README is short, links lead somewhere, pictures of masks show what is said of them."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from models.attention.mask import visible

ROOT = Path(__file__).parent.parent
FOLDERS = "docs/**/*.md", "benchmarks/results/*.md", "tpu/*.md"
PAGES = {page: page.read_text() for page in (ROOT / "README.md", *(p for f in FOLDERS for p in ROOT.glob(f)))}
LINKS = {(page, link) for page in PAGES for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page])}


def test_readme_is_short():
    readme = PAGES[ROOT / "README.md"]
    assert len(readme.splitlines()) <= 120 and len(readme.split()) <= 1200


def test_a_link_leads_to_a_file_and_to_its_heading():
    for page, link in sorted(LINKS):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        headings = re.findall(r"(?m)^#+ (.*)", target.read_text() if heading else "")
        assert target.exists(), (page, link)
        known = {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
        assert not heading or heading in known, (page, link)


@pytest.fixture(scope="module")
def panels():
    spec = importlib.util.spec_from_file_location("masks", ROOT / "docs" / "masks.py")
    masks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(masks)
    return masks.panels()


def test_the_pictures_of_masks_show_what_their_pages_say(panels):
    seen = {(name, panel.title): np.array(visible(panel.mask))[0, 0] for name in panels for panel in panels[name]}
    lower = np.tri(11, dtype=bool)
    assert (seen["encoder", "padding is hidden"][:10] == [True] * 10 + [False] * 2).all()
    assert (seen["decoder", "default: the whole row"] == lower).all()
    assert not seen["decoder", "--objective.separate"][5:, :5].any()
    memory = seen["transformer-xl", "a row and its memory"]
    assert memory[:, :5].all() and (memory[:, 5:] == np.tri(6, dtype=bool)).all()
    assert seen["xlnet", "content stream"].diagonal().all() and not seen["xlnet", "query stream"].diagonal().any()
    assert seen["t5", "encoder"].all() and seen["t5", "decoder: the input"].all()
    assert (seen["t5", "decoder: the target"] == np.tri(5, dtype=bool)).all()
    assert seen["unilm", "bidirectional"].all() and (seen["unilm", "left to right"] == np.tri(10, dtype=bool)).all()
    assert (seen["unilm", "right to left"] == np.tri(10, dtype=bool).T).all()
    target = seen["unilm", "sequence to sequence"]
    assert target[:, :5].all() and (target[5:, 5:] == np.tri(5, dtype=bool)).all() and not target[:5, 5:].any()
    assert seen["longformer", "all heads"][0].all() and not seen["longformer", "all heads"][10, 30:].any()
    assert all(ROOT.joinpath("docs", "families", "masks", f"{name}.png").exists() for name in panels)
