"""`python -m data_pipelines verify` says with its status whether a corpus is as it was written."""

import shutil

import pytest

from data_pipelines.__main__ import main


@pytest.fixture
def corpus(corpus_path, tmp_path):
    return shutil.copytree(corpus_path, tmp_path / "corpus")


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_changed_bit_in_any_file_is_status_2_and_named(corpus, capsys):
    files = [*corpus.rglob("*.npy"), *(corpus / "tokenizer").iterdir()]
    assert len(files) > 8
    for file in files:
        flip(file)
        assert main(["verify", str(corpus)]) == 2
        err = capsys.readouterr().err
        assert file.name in err and err.count("\n") == 1
        flip(file)
    assert main(["verify", str(corpus)]) == 0


def test_a_corpus_in_a_bucket_is_verified(storage, corpus, capsys):
    storage.upload_folder(corpus, "bucket", "corpus")
    assert main(["verify", "gs://bucket/corpus"]) == 0
    name = next(name for name in storage.names("bucket") if name.endswith("heldout/tokens.npy"))
    storage.put("bucket", name, storage.objects["bucket", name][0][:-1] + b"?")
    shutil.rmtree(next((corpus.parent / "cache").rglob("heldout")))
    assert main(["verify", "gs://bucket/corpus"]) == 2
    assert "heldout/tokens.npy is not what prepare wrote" in capsys.readouterr().err
