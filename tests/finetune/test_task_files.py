"""Folders of tasks: what is wrong in them is said before anything is trained."""

import json

import pytest

from data_pipelines.errors import UserError
from finetune.task_files import of_task_file, task_files

FILES = {"train": "train.tsv", "dev": "dev.tsv"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json: cannot be read"),
        ("a.json", json.dumps({"task": "classify"}), "a.json: is not a task; give an object with task, train, dev"),
        (
            "a.json",
            json.dumps({"task": "tag", **FILES, "dev": "x.tsv"}),
            "a.json: dev is .*x.tsv, which does not exist",
        ),
        (
            "a.json",
            json.dumps({"task": "tag", **FILES, "seed": 1}),
            "a.json: sets seed, which the command sets for all",
        ),
        ("a:b.json", json.dumps({"task": "tag", **FILES}), "a:b.json: a task's name must not contain a colon"),
        ("a.txt", "{}", "has no .json file; give a folder with one for each task"),
    ],
)
def test_a_file_that_is_no_task_is_named(name, content, message, tmp_path):
    for file in FILES.values():
        (tmp_path / file).touch()
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        task_files(tmp_path)


def test_options_of_a_task_file_are_those_of_a_run(tmp_path):
    fields = {"task": "classify", **FILES, "text": ["a", "b"], "regression": True, "epochs": 5, "peak": 1e-4}
    task, options = of_task_file(fields, **{"from": tmp_path, "workdir": tmp_path, "from_scratch": False})
    assert (task.text, task.regression, options.epochs, options.peak) == (("a", "b"), True, 5.0, 1e-4)
    with pytest.raises(UserError, match="unknown option --epoch; did you mean --epochs"):
        of_task_file(fields | {"epoch": 1}, **{"from": tmp_path, "workdir": tmp_path})
