"""A corpus in a bucket is copied part by part, a window ahead, by each host its own; what is done makes room."""

import errno
import fcntl
import pickle
import threading
import time
import types

import numpy as np
import pytest

from data_pipelines import fetch
from data_pipelines.batches import KEPT, make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.order import Order, deal
from tests.data_pipelines.buckets import SOURCE, Bucket, arrays_of_part, use
from tests.data_pipelines.corpora import equal, random_documents, write_corpus

PARTS = 6


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    bucket = Bucket()
    bucket.write([arrays_of_part(number) for number in range(PARTS)])
    use(bucket, monkeypatch, tmp_path)
    return bucket


def small_disk(monkeypatch, free=2000):
    """The disk has room for some files of 1,000 bytes; what is there already counts."""
    used = lambda: sum(file.stat().st_size for file in fetch.cache().glob("*/*/*.npy"))
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free - used()))


def read(copy, number, name="train/tokens.npy"):
    with copy.file(number, name) as path:
        return path.read_bytes()


def parts_read(bucket):
    return {name.split("/", 2)[1] for name in bucket.reads if name.startswith("parts/")}


def there(copy, number, name="train/tokens.npy"):
    return copy.path(number, name).exists()


def eventually(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


def all_there(copy, numbers, names=("train/tokens.npy", "train/sentences.npy")):
    return all(there(copy, number, name) for number in numbers for name in names)


def test_a_file_is_copied_when_it_is_read_and_no_other(bucket):
    copy = fetch.open_copy(SOURCE)
    assert parts_read(bucket) == set()
    assert (copy.folder / "tokenizer" / "tokenizer.json").read_bytes() == b"{}"
    for _ in range(2):
        assert read(copy, 3) == arrays_of_part(3)["train/tokens.npy"]
    assert {name: count for name, count in bucket.reads.items() if name.startswith("parts/")} == {
        "parts/000003/train/tokens.npy": 1
    }


def test_a_corpus_that_grew_copies_its_new_parts_alone(bucket):
    before = fetch.open_copy(SOURCE)
    for number in range(PARTS):
        read(before, number)
    manifest = (before.folder / "manifest.json").read_bytes()
    bucket.reads.clear()
    bucket.write([arrays_of_part(number) for number in range(PARTS + 2)])
    after = fetch.open_copy(SOURCE)
    for number in range(PARTS + 2):
        assert read(after, number) == arrays_of_part(number)["train/tokens.npy"]
    assert parts_read(bucket) == {"000006", "000007"}
    assert (before.folder / "manifest.json").read_bytes() == manifest  # a job that reads it goes on
    assert read(before, 0) == arrays_of_part(0)["train/tokens.npy"]


def test_what_is_wanted_is_copied_in_the_background_without_its_counts(bucket):
    copy = fetch.open_copy(SOURCE)
    copy.want("train", [2, 4])
    copy.want("train", [2, 4])
    assert eventually(lambda: all_there(copy, [2, 4]))
    assert parts_read(bucket) == {"000002", "000004"}
    assert set(bucket.reads.values()) == {1}
    assert not there(copy, 2, "train/token_counts.npy") and not there(copy, 2, "heldout/tokens.npy")
    copy.want("train", [5])  # the thread of before may have ended
    assert eventually(lambda: all_there(copy, [5]))


def test_an_error_in_the_background_is_raised_where_the_part_is_read(bucket):
    copy = fetch.open_copy(SOURCE)
    lost = bucket.objects.pop("parts/000001/train/tokens.npy")
    copy.want("train", [1, 2])
    assert eventually(lambda: all_there(copy, [2]))
    with pytest.raises(UserError, match="train/tokens.npy is missing"):
        read(copy, 1)
    bucket.objects["parts/000001/train/tokens.npy"] = lost
    assert read(copy, 1) == lost


def test_what_is_done_is_dropped_where_it_has_not_and_copied_again_when_read(bucket, monkeypatch):
    small_disk(monkeypatch, free=4 * 1000 * PARTS)
    copy = fetch.open_copy(SOURCE)
    assert not copy.keeps
    read(copy, 0), read(copy, 0, "train/token_counts.npy"), read(copy, 0, "heldout/tokens.npy")
    copy.release("train", [0, 5])
    copy.release("train", [0])
    assert not there(copy, 0)
    assert there(copy, 0, "train/token_counts.npy") and there(copy, 0, "heldout/tokens.npy")
    assert read(copy, 0) == arrays_of_part(0)["train/tokens.npy"]
    assert bucket.reads["parts/000000/train/tokens.npy"] == 2
    assert copy._drop((0, "counts"))  # which nobody holds once it was read


def test_what_a_killed_run_left_makes_room(bucket, monkeypatch):
    left = fetch.open_copy(SOURCE)
    for number in range(3):
        read(left, number)
    for file in left._held.values():
        file.close()  # as the kernel does
    small_disk(monkeypatch, free=3500)
    copy = fetch.open_copy(SOURCE)
    assert read(copy, 1) and read(copy, 4) == arrays_of_part(4)["train/tokens.npy"]
    assert there(copy, 1) and not there(copy, 0)


def test_what_another_process_reads_is_not_dropped(bucket, monkeypatch):
    small_disk(monkeypatch, free=10_000)
    copy, another = fetch.open_copy(SOURCE), fetch.open_copy(SOURCE)  # locks belong to open files, not to processes
    read(copy, 0), read(another, 0)
    copy.release("train", [0])
    assert there(copy, 0)
    another.release("train", [0])
    assert not there(copy, 0)


def test_what_is_released_while_it_is_read_is_dropped_after(bucket, monkeypatch):
    small_disk(monkeypatch, free=10_000)
    copy = fetch.open_copy(SOURCE)
    with copy.file(0, "train/tokens.npy") as path:
        copy.release("train", [0])
        assert path.read_bytes() == arrays_of_part(0)["train/tokens.npy"]
    assert not there(copy, 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_copied_to_and_never_deleted_from(bucket, monkeypatch, number):
    def refused(*_):
        raise OSError(number, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    small_disk(monkeypatch, free=10_000)
    copy = fetch.open_copy(SOURCE)
    assert not copy.keeps
    readers = [threading.Thread(target=read, args=(copy, 1)) for _ in range(4)]
    [reader.start() for reader in readers], [reader.join() for reader in readers]
    assert read(copy, 1) == arrays_of_part(1)["train/tokens.npy"]
    copy.release("train", [1])
    assert there(copy, 1) and not list(fetch.cache().rglob("*.partial"))


def test_a_copy_goes_to_worker_processes(bucket, monkeypatch):
    small_disk(monkeypatch, free=10_000)
    copy = fetch.open_copy(SOURCE)
    read(copy, 0)
    bucket.objects.pop("manifest.json")
    again = pickle.loads(pickle.dumps(copy))
    assert (again.source, again.folder, again.keeps) == (copy.source, copy.folder, copy.keeps)
    assert read(again, 0) == arrays_of_part(0)["train/tokens.npy"]


HOSTS, MANY, BATCH, SEED, HOST = 4, 20, 8, 3, 1
LAYOUT, ORDER = PackedSentences(32), Order(lanes=HOSTS, window=2)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lanes")
    return Corpus(write_corpus(folder / "corpus", random_documents(0, 160, sentences=6), parts=MANY))


@pytest.fixture
def bucket_of_lanes(local, monkeypatch, tmp_path):
    bucket_of_lanes = Bucket()
    files = [file for file in local.path.rglob("*") if file.is_file()]
    bucket_of_lanes.objects = {file.relative_to(local.path).as_posix(): file.read_bytes() for file in files}
    use(bucket_of_lanes, monkeypatch, tmp_path)
    return bucket_of_lanes


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


def test_a_host_fetches_the_parts_of_its_lane_once(bucket_of_lanes, local):
    corpus, windows = read_an_epoch(local)
    assert corpus.copy.keeps
    assert train_parts(bucket_of_lanes) == dict.fromkeys(sum(windows, []), 1)
    first_epoch = sum(windows[:-2], [])
    assert len(first_epoch) <= MANY / HOSTS + 2


def test_a_host_whose_disk_is_small_holds_three_windows_at_most(bucket_of_lanes, local, monkeypatch):
    monkeypatch.setattr(fetch, "ROOM", 0)
    corpus, windows = read_an_epoch(local)
    assert not corpus.copy.keeps
    there = {number for number in range(MANY) if corpus.copy.path(number, "train/tokens.npy").exists()}
    assert there == set(sum(windows[-2:], []))
    read = train_parts(bucket_of_lanes)
    assert read.keys() == set(sum(windows, []))
    assert all(count <= sum(part in window for window in windows) for part, count in read.items())
