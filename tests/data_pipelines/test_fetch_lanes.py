"""Hosts that share a corpus in a bucket fetch the parts of their own lanes alone, and build the same batches."""

import time

import numpy as np
import pytest

from data_pipelines import fetch
from data_pipelines.batches import KEPT, make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.order import Order, deal
from tests.data_pipelines.buckets import SOURCE, Bucket, use
from tests.data_pipelines.corpora import equal, random_documents, write_corpus

HOSTS, PARTS, BATCH, SEED, HOST = 4, 20, 8, 3, 1
LAYOUT, ORDER = PackedSentences(32), Order(lanes=HOSTS, window=2)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lanes")
    return Corpus(write_corpus(folder / "corpus", random_documents(0, 160, sentences=6), parts=PARTS))


@pytest.fixture
def bucket(local, monkeypatch, tmp_path):
    bucket = Bucket()
    files = [file for file in local.path.rglob("*") if file.is_file()]
    bucket.objects = {file.relative_to(local.path).as_posix(): file.read_bytes() for file in files}
    use(bucket, monkeypatch, tmp_path)
    return bucket


def read_an_epoch(local):
    """Build a host's rows of all steps of an epoch, each as from the local corpus, and of the next epoch's first; the
    corpus, and the parts of each window that they were of."""
    whole = make_examples(LAYOUT, local, "train", BATCH, SEED, ORDER)
    here = make_examples(LAYOUT, Corpus(SOURCE), "train", BATCH, SEED, ORDER, whole.sizes)
    rows = np.arange(BATCH // HOSTS) + HOST * (BATCH // HOSTS)
    for step in range(-(-whole.number // BATCH) + KEPT + 2):
        assert equal(here.batch(step, rows), whole.batch(step, rows))
        wait_for(here.corpus)
    first, second = (deal(SEED, epoch, np.array(whole.sizes), ORDER, HOST) for epoch in (0, 1))
    return here.corpus, [window.parts.tolist() for window in (*first, *second[:2])]  # one is fetched ahead


def wait_for(corpus):
    while corpus.copy._thread is not None:
        time.sleep(0.001)


def train_parts(bucket):
    """How often each part's tokens were read."""
    return {int(name.split("/")[1]): count for name, count in bucket.reads.items() if name.endswith("train/tokens.npy")}


def test_a_host_fetches_the_parts_of_its_lane_once(bucket, local):
    corpus, windows = read_an_epoch(local)
    assert corpus.copy.keeps
    assert train_parts(bucket) == dict.fromkeys(sum(windows, []), 1)
    first_epoch = sum(windows[:-2], [])
    assert len(first_epoch) <= PARTS / HOSTS + 2


def test_a_host_whose_disk_is_small_holds_three_windows_at_most(bucket, local, monkeypatch):
    monkeypatch.setattr(fetch, "ROOM", 0)
    corpus, windows = read_an_epoch(local)
    assert not corpus.copy.keeps
    there = {number for number in range(PARTS) if corpus.copy.path(number, "train/tokens.npy").exists()}
    assert there == set(sum(windows[-2:], []))
    read = train_parts(bucket)
    assert read.keys() == set(sum(windows, []))
    assert all(count <= sum(part in window for window in windows) for part, count in read.items())
