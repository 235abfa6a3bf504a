"""--corpus names one corpus or several."""

import pytest

from data_pipelines.corpora import named, written
from data_pipelines.errors import UserError


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("corpora/mine", {"": "corpora/mine"}),
        ("gs://bucket/a,b", {"": "gs://bucket/a,b"}),
        ("runs/lr=1/corpus", {"": "runs/lr=1/corpus"}),
        ("en=gs://A,zh=DIR", {"en": "gs://A", "zh": "DIR"}),
        ("en=a/lr=1", {"en": "a/lr=1"}),
    ],
)
def test_a_path_or_names_with_paths(text, paths):
    assert named(text) == paths
    assert list(named(text)) == list(paths)
    assert written(paths) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("en=a,en=b", "en is given twice"),
        ("en=a,b", "'b' is no NAME=PATH"),
        ("en=a,", "'' is no NAME=PATH"),
        ("en=", "'en=' is no NAME=PATH"),
        ("en=a,=b", "'=b' is no NAME=PATH"),
    ],
)
def test_another_form_is_an_error_that_shows_it(text, said):
    with pytest.raises(UserError, match=f"^--corpus {text}: {said}"):
        named(text)
