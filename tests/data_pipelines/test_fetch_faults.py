"""What a network or a disk does while a corpus is copied: tried again where it may pass, else one line that fits."""

import builtins
import errno
import os
import re
import types

import aiohttp
import pytest
import requests

from data_pipelines import cloud, fetch
from data_pipelines.errors import UserError
from tests.data_pipelines.buckets import SOURCE, Bucket, arrays_of_part, use

TOKENS = "parts/000000/train/tokens.npy"
GO_ON = "start the same command again to continue"


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code):
        super().__init__(f"status {code}")
        self.code = code


# What passes; a read that comes to less than was asked for, too
PASSING = {
    "time-out": TimeoutError("timed out"),
    "a lost connection": aiohttp.ServerDisconnectedError(),
    "one of another library": requests.exceptions.ConnectionError("aborted"),
    "input/output error": OSError(errno.EIO, "Input/output error"),
    "429": HttpError(429),
    "503": HttpError("503"),
    "503 in a library": aiohttp.ClientResponseError(
        types.SimpleNamespace(real_url="u"), (), status=503, message="slow down"
    ),
    "cut": lambda content: content[:-3],
    "nothing": lambda content: b"",
}
FOR_GOOD = {
    "403": (OSError("Forbidden: bucket/corpus\nrobot may not"), "no access .*robot may not"),
    "refused": (PermissionError("Access Denied"), "Access Denied"),
    "401": (HttpError(401), "no access .*status 401"),
    "404": (HttpError(404), "no such bucket or object"),
}


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    bucket = Bucket()
    bucket.write([arrays_of_part(0)])
    bucket.paused = use(bucket, monkeypatch, tmp_path)
    return bucket


def read(number=0, name="train/tokens.npy"):
    with fetch.open_copy(SOURCE).file(number, name) as path:
        return path.read_bytes()


def refusal():
    with pytest.raises(UserError) as caught:
        read()
    message = str(caught.value)
    assert message.startswith(f"--corpus {SOURCE}: ") and "\n" not in message
    return message


@pytest.mark.parametrize("name", [TOKENS, "manifest.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("fault", [name for name, fault in PASSING.items() if isinstance(fault, Exception)])
def test_what_passes_is_tried_again_and_said_once(bucket, capsys, fault, name):
    bucket.faults[name] = [PASSING[fault]] * 3
    assert read() == arrays_of_part(0)["train/tokens.npy"]
    assert bucket.paused == [1, 2, 4] and bucket.reads[name] == 4
    assert capsys.readouterr().err.count("cannot be read for now") == 1


@pytest.mark.parametrize("fault", PASSING)
def test_what_does_not_pass_ends_in_a_line_that_says_how_to_go_on(bucket, fault):
    bucket.faults[TOKENS] = [PASSING[fault]] * 100
    message = refusal()
    assert bucket.paused == list(cloud.PAUSES) and bucket.reads[TOKENS] == len(cloud.PAUSES) + 1
    assert GO_ON in message and "free space" not in message
    bucket.faults.clear()
    assert read() == arrays_of_part(0)["train/tokens.npy"]


def test_each_block_is_tried_again_by_itself(bucket, monkeypatch):
    monkeypatch.setattr(fetch, "BLOCK", 100)
    bucket.faults[TOKENS] = [TimeoutError(), TimeoutError()]
    assert read() == arrays_of_part(0)["train/tokens.npy"]
    assert bucket.reads[TOKENS] == 10 + 2


@pytest.mark.parametrize("fault", FOR_GOOD)
def test_what_is_refused_is_not_asked_for_again(bucket, fault):
    error, said = FOR_GOOD[fault]
    bucket.faults[TOKENS] = [error]
    with pytest.raises(UserError, match=said):
        read()
    assert bucket.paused == [] and bucket.reads[TOKENS] == 1


FLIPPED = lambda content: content[:-1] + bytes([content[-1] ^ 1])
MANIFEST, TOKENIZER = "manifest.json", "tokenizer/tokenizer.json"
WRONG = [  # what is wrong with which object, what the line says
    (TOKENS, FLIPPED, "train/tokens.npy is not what prepare wrote .*; copy it there again"),
    (TOKENIZER, FLIPPED, "tokenizer.json is not what prepare wrote"),
    (TOKENS, lambda content: content[:-2], r"tokens.npy has \d+ bytes, not 1000"),
    (TOKENS, lambda content: b"", r"tokens.npy has \d+ bytes, not 1000"),
    (TOKENS, None, "train/tokens.npy is missing; copy"),
    (MANIFEST, None, "no such bucket or object"),
    (MANIFEST, lambda content: content.replace(b'"version": 2', b'"version": 9'), "has format version 9"),
]


@pytest.mark.parametrize(("name", "change", "said"), WRONG)
def test_what_is_wrong_in_the_bucket_is_one_line_and_stays_so(bucket, name, change, said):
    content = bucket.objects.pop(name)
    if change:
        bucket.objects[name] = change(content)
    for _ in range(2):  # the second time too
        with pytest.raises(UserError, match=f"{SOURCE}.*{said}") as raised:
            read()
        assert "\n" not in str(raised.value)
    assert bucket.paused == []


def test_what_an_earlier_copy_left_is_completed(bucket):
    copy = fetch.open_copy(SOURCE)
    names = "train/tokens.npy", "train/sentences.npy", "heldout/tokens.npy"
    for name in names:
        read(name=name)
    tokens, sentences, _ = (copy.path(0, name) for name in names)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    sentences.unlink()
    sentences.with_name("sentences.npy.partial").write_bytes(b"half")
    assert [read(name=name) for name in names] == [arrays_of_part(0)[name] for name in names]
    assert [bucket.reads[f"parts/000000/{name}"] for name in names] == [2, 2, 1]
    assert not list(sentences.parent.glob("*.partial"))


def test_another_tokenizer_of_the_same_tokens_stands_beside_the_copy_s(bucket):
    before = fetch.open_copy(SOURCE)
    read()
    bucket.write([arrays_of_part(0)], tokenizer=b"[]")
    after = fetch.open_copy(SOURCE)
    assert (after.folder / TOKENIZER).read_bytes() == b"[]"
    assert (before.folder / TOKENIZER).read_bytes() == b"{}"  # a job that reads it goes on with what it opened
    assert read() == arrays_of_part(0)["train/tokens.npy"] and bucket.reads[TOKENS] == 1


def test_a_disk_that_is_too_small_and_a_cache_that_cannot_be_written_are_said(bucket, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(fetch.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=20))
        assert re.search("cannot be copied.*are needed.*are free.*free space.*XDG_CACHE_HOME", refusal())
        assert bucket.reads[TOKENS] == 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert re.search("cannot be copied to .*XDG_CACHE_HOME", refusal())


# What the disk answers -> what the line says
DISK = {
    errno.ENOSPC: "free space, or set XDG_CACHE_HOME",
    errno.EDQUOT: "free space, or set XDG_CACHE_HOME",
    errno.EIO: GO_ON,
    errno.ESTALE: GO_ON,
    errno.EROFS: "set XDG_CACHE_HOME to a folder that can be written",
}


@pytest.mark.parametrize("number", DISK)
@pytest.mark.parametrize("call", ["write", "sync"])
def test_what_the_disk_answers_is_told_from_what_the_network_does(bucket, monkeypatch, number, call):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    if call == "sync":
        monkeypatch.setattr(os, "fsync", refused)
    else:
        opened = builtins.open
        fails = lambda path, *mode: refused() if "tokens" in str(path) else opened(path, *mode)
        monkeypatch.setattr(fetch, "open", fails, raising=False)
    message = refusal()
    assert "cannot be copied to" in message and os.strerror(number) in message and DISK[number] in message
    assert ("free space" in message) == (number in fetch.FULL)
    assert bucket.paused == []
