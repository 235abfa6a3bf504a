"""Sphinx's settings, for `make docs`. Its sources are the repository itself, so that links lead to the same pages here
as on GitHub, and results stand in one place."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

project = "Pretraining language models in JAX and Flax"
copyright = "the authors, Apache-2.0"
html_title = "Pretraining in JAX"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "extension"]
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/results/*", "tpu/*.md"]
exclude_patterns = [".*", "build", "runs", "corpora", "hf"]
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_extra_path = ["_site"]  # the way from / to the root page
html_theme_options = {"navigation_with_keys": True}
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
nitpicky = True  # a link that leads nowhere is an error,
nitpick_ignore_regex = [("py:.*", ".*")]  # except from types to other projects' pages
