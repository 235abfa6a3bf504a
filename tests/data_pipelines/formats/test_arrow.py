"""`arrow:` a Hugging Face data set on disk is read without `datasets`."""

import json

import pyarrow
import pytest

from data_pipelines.errors import UserError
from data_pipelines.formats import source, table
from data_pipelines.formats.problems import EMPTY, UNREADABLE
from tests.data_pipelines.formats.reading import ranges, read, texts

TEXTS = [f"Text {number}. " + "word " * number for number in range(60)]


def save(folder, texts, files=2, rows=5, kind=None):
    """As save_to_disk does: state.json, dataset_info.json and streams of batches of rows."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{files:05}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        part = texts[len(texts) * number // files : len(texts) * (number + 1) // files]
        table = pyarrow.table({"id": list(range(len(part))), "text": pyarrow.array(part, kind or pyarrow.string())})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("shard", [1, 3000, 1 << 20])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_a_row_is_a_document(tmp_path, monkeypatch, kind, shard):
    monkeypatch.setattr(source, "SHARD", shard)
    save(tmp_path / "set", [*TEXTS, None], kind=kind)
    found, problems = texts(f"arrow:{tmp_path}/set")
    assert found == TEXTS
    assert list(problems) == [EMPTY]
    parts = ranges(table.parse(f"arrow:{tmp_path}/set/"))
    assert len(parts) == {1: 13, 1 << 20: 2}.get(shard, len(parts))
    assert all(part.version for part in parts)


def test_a_folder_of_splits_or_of_something_else_is_an_error(tmp_path):
    save(tmp_path / "sets" / "train", TEXTS)
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="holds the splits train, test; name one, as in arrow:.*sets/train"):
        read(f"arrow:{tmp_path}/sets")
    with pytest.raises(UserError, match="has no state.json; give a folder that a data set's save_to_disk wrote"):
        read(f"arrow:{tmp_path}")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_a_file_that_is_cut_short_is_counted_and_gives_what_is_whole(tmp_path, share):
    save(tmp_path / "set", TEXTS)
    file = sorted((tmp_path / "set").glob("*.arrow"))[0]
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    found, problems = texts(f"arrow:{tmp_path}/set")
    assert found[-30:] == TEXTS[30:]
    assert found[:-30] == TEXTS[: len(found) - 30]
    assert len(found) > 35 or share < 0.9
    assert problems[UNREADABLE]["count"] == 1
