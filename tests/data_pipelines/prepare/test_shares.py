"""Parts made by several processes or threads, added or interrupted, are those that one process makes at once."""

import fcntl
import json
import random
import shutil
import signal
import time

import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.formats import source, table
from data_pipelines.prepare import ending, parts, plan
from data_pipelines.text.steps import STEPS
from tests.data_pipelines.prepare import forks
from tests.data_pipelines.prepare.forks import Fork
from tests.data_pipelines.prepare.small import MIB, UNIT, append, arguments
from tests.data_pipelines.prepared import content, documents, run

pytestmark = pytest.mark.usefixtures("small")
OPTIONS = {"tokenizer": "wordpiece", "vocab_size": 200, "part_size": 1, "heldout": 0.1}


@pytest.fixture(scope="module")
def made(text, tmp_path_factory):
    """The corpus, made by one process at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "SHARD", UNIT)
        patch.setattr(plan, "MIB", MIB)
        out = tmp_path_factory.mktemp("made") / "whole"
        run(out, f"text:{text}", **OPTIONS)
    assert len(Corpus(out).parts) == 6
    return out


@pytest.fixture
def whole(made, tmp_path):
    """Its bytes; a copy of it is in tmp_path."""
    return content(shutil.copytree(made, tmp_path / "whole"))


def write(folder, sentence):
    """Five files, 20 kB: 2 parts."""
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(sentence * (4_000 // len(sentence)))


def test_every_process_makes_its_share_and_finish_writes_the_manifest(text, whole, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="--finish: .* has no parts yet"):
        run(out, f"text:{text}", finish=True, **OPTIONS)
    for share in ("1/3", "0/3"):
        manifest, printed = run(out, f"text:{text}", part=share, **OPTIONS)
        assert manifest is None and not (out / "manifest.json").exists()
    with pytest.raises(UserError, match=r"--finish: 2 of 6 parts are missing \(2, 5\)"):
        run(out, f"text:{text}", finish=True, **OPTIONS)
    made = {path: path.stat().st_mtime_ns for path in out.glob("parts/*/summary.json")}
    run(out, f"text:{text}", part="2/3", **OPTIONS)
    run(out, f"text:{text}", part="0/3", **OPTIONS)
    run(out, f"text:{text}", finish=True, **OPTIONS)
    assert content(out) == whole
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_four_processes_killed_at_any_moment_make_the_bytes_that_one_makes(text, whole, tmp_path):
    out, chance = tmp_path / "out", random.Random(1)
    waiting = [f"--part={number}/4" for number in range(4)]
    start = lambda *more: Fork(forks.prepare, [*arguments(text, out), *more], UNIT, MIB)
    rounds = 0
    while waiting:
        running = {share: start(share) for share in waiting}
        if rounds < 2:
            time.sleep(chance.uniform(0.1, 0.4))
            for one in running.values():
                if chance.random() < 0.8:
                    one.process.kill()
        ended = {share: one.wait()[0] for share, one in running.items()}
        assert set(ended.values()) <= {0, -signal.SIGKILL}
        waiting = [share for share, status in ended.items() if status]
        rounds += 1
    status, _, errors = start("--finish").wait()
    assert status == 0, errors
    assert content(out) == whole


def test_sources_are_listed_by_the_first_process_and_its_plan_holds_for_the_others(text, whole, tmp_path, monkeypatch):
    listed, plan_all = [], table.plan
    monkeypatch.setattr(table, "plan", lambda *given: listed.append(given) or plan_all(*given))
    for number in range(6):
        run(tmp_path / "out", f"text:{text}", part=f"{number}/6", **OPTIONS)
    assert len(listed) == 1
    run(tmp_path / "out", f"text:{text}", finish=True, **OPTIONS)
    assert content(tmp_path / "out") == whole


def test_units_are_removed_as_soon_as_their_part_is_there(text, tmp_path, monkeypatch):
    seen = []
    submit = parts._submit
    out = tmp_path / "out"

    def counted(*given):
        seen.append(sum(1 for folder in out.glob(".partial/arrays/*/unit-*") if folder.name[-1].isdigit()))
        return submit(*given)

    monkeypatch.setattr(parts, "_submit", counted)
    run(out, f"text:{text}", **OPTIONS)
    units = len(seen) - 6
    assert units > 12
    assert 0 < max(seen) <= units // 6 + 3
    assert not list(out.glob(".partial"))


def test_parts_are_added_with_the_corpus_s_own_tokenizer_and_settings(text, whole, tmp_path):
    out, more = tmp_path / "whole", tmp_path / "more"
    write(more, "Something else, Ünïcode. ")
    before = json.loads(whole["manifest.json"])
    manifest, printed = append(out, more)
    assert len(manifest["parts"]) == 8
    assert manifest["parts"][:6] == before["parts"]
    assert manifest["history"] == [{"fingerprint": before["fingerprint"], "parts": 6}]
    assert manifest["fingerprint"] != before["fingerprint"]
    prints = [one["fingerprint"] for one in (before, manifest)]
    assert f"2 parts were added: the fingerprint was {prints[0]} and is {prints[1]}" in printed
    after = content(out)
    assert {name: after[name] for name in whole if name != "manifest.json"} == {
        name: data for name, data in whole.items() if name != "manifest.json"
    }
    assert documents(out)[-1][-1] == documents(tmp_path / "whole")[-1][-1]
    Corpus(out).verify()
    _, printed = append(out, more)
    assert "already finished" in printed
    _, printed = run(out, f"text:{text}", **OPTIONS)
    assert "already finished" in printed
    assert content(out) == after


def test_what_an_append_cannot_change_is_refused(text, whole, tmp_path):
    with pytest.raises(UserError, match="--vocab-size 300: the corpus has 200, which --append cannot change"):
        append(tmp_path / "whole", text, vocab_size=300)
    with pytest.raises(UserError, match="--append: .* is not a finished corpus"):
        append(tmp_path / "new", text)
    assert content(tmp_path / "whole") == whole


@pytest.mark.parametrize("function, call", [("write_unit", 2), ("write_part", 2), ("finish", 1), ("remove", 1)])
def test_an_append_that_is_killed_leaves_the_corpus_readable_and_goes_on(
    text, whole, tmp_path, monkeypatch, function, call
):
    out, more = tmp_path / "whole", tmp_path / "more"
    write(more, "Something else. ")
    once = shutil.copytree(out, tmp_path / "once")
    append(once, more)
    module = {"finish": ending, "remove": ending.partial}.get(function, parts)
    name = {"finish": "manifest_of"}.get(function, function)
    calls, real = [], getattr(module, name)

    def dying(*given, **named):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, dying)
        with pytest.raises(KeyboardInterrupt):
            append(out, more)
    assert len(Corpus(out).parts) == (8 if function == "remove" else 6)
    _, printed = run(out, f"text:{text}", **OPTIONS)
    assert "already finished" in printed  # its own command, which leaves the append alone
    append(out, more)
    assert content(out) == content(once)


def test_parts_of_an_append_that_was_given_up_are_not_taken_for_another_s(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "whole"
    once = shutil.copytree(out, tmp_path / "once")
    for name, sentence in (("a", "alpha beta. "), ("b", "zeta delta epsilon. ")):
        write(tmp_path / name, sentence)
    append(once, tmp_path / "b")
    with monkeypatch.context() as patched:
        patched.setattr(ending, "manifest_of", None)
        with pytest.raises(TypeError):
            append(out, tmp_path / "a")
    with pytest.raises(UserError, match=r"other settings: source was .*, or delete .*\.partial to start over"):
        append(out, tmp_path / "b")
    shutil.rmtree(out / ".partial")
    append(out, tmp_path / "b")
    assert content(out) == content(once)


def test_only_the_new_files_of_a_folder_that_has_grown_are_added(text, whole, tmp_path):
    out, folder = tmp_path / "out", tmp_path / "more"
    write(folder, "Something else. ")
    run(out, f"text:{folder}", **OPTIONS)
    (folder / "new.txt").write_text("alpha beta.")
    manifest, printed = append(out, folder)
    assert sum(sizes["documents"] for sizes in manifest["parts"][-1]["splits"].values()) == 1
    assert "5 files left out that the corpus has already; the first: " in printed
    for same in (folder, folder / ".." / "more"):
        _, printed = append(out, same)
        assert "already finished" in printed
    (folder / "new.txt").write_text("alpha gamma.")
    with pytest.raises(UserError, match="new.txt has changed since it was added"):
        append(out, folder)


def test_nothing_is_added_by_another_version_of_a_step(tmp_path, monkeypatch):
    write(tmp_path / "a", "Some text. ")
    run(tmp_path / "out", f"text:{tmp_path}/a", steps=("tags",), **OPTIONS)
    before = content(tmp_path / "out")
    monkeypatch.setitem(STEPS, "tags", STEPS["tags"]._replace(version=2))
    write(tmp_path / "b", "Other text. ")
    with pytest.raises(UserError, match="--append: step tags was 1 and is 2: use the package or the commit that made"):
        append(tmp_path / "out", tmp_path / "b")
    assert content(tmp_path / "out") == before


def test_a_corpus_and_a_share_are_made_by_one_process_at_a_time(text, tmp_path):
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    with open(tmp_path / "out" / ".partial" / "lock-1-of-3", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is making --part 1/3; wait"):
            run(tmp_path / "out", f"text:{text}", part="1/3", **OPTIONS)
        run(tmp_path / "out", f"text:{text}", part="2/3", **OPTIONS)
    with open(tmp_path / "out" / ".partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another prepare is writing there"):
            run(tmp_path / "out", f"text:{text}")
