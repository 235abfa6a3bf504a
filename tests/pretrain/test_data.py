"""A run on several corpora, in lanes, whose examples are counted once and whose corpora may grow."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from data_pipelines.corpus import Corpus, open_corpora
from data_pipelines.errors import UserError
from data_pipelines.examples.next_tokens import InputTarget
from data_pipelines.examples.text_to_text import Pairs
from data_pipelines.order import Order
from pretrain.__main__ import main
from pretrain.objectives.objective import Task
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets, SequenceToSequence
from pretrain.recipe import Phase, check, every_task
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import data
from pretrain.training.data import check_data, mixture_rates, phase_batches, training_batches
from pretrain.training.run import run
from tests.data_pipelines.corpora import equal, random_documents, write_corpus
from tests.pretrain import tiny, toys

ROWS = np.arange(8)


def written(path, corpus_path, seed, parts):
    """A corpus of random tokens, with the tokenizer of one of texts."""
    train, heldout = (random_documents(seed + at, size, vocab_size=195) for at, size in ((0, 40), (1, 12)))
    write_corpus(path, train, 195, heldout, parts=parts, special=Corpus(corpus_path).special)
    shutil.copytree(Corpus(corpus_path).tokenizer_path, path / "tokenizer", dirs_exist_ok=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus_path):
    """Two corpora of several parts with one vocabulary."""
    folder = tmp_path_factory.mktemp("corpora")
    written(folder / "a", corpus_path, 0, parts=4)
    written(folder / "b", corpus_path, 2, parts=3)
    return folder


def text(folder):
    return f"a={folder / 'a'},b={folder / 'b'}"


def in_lanes(recipe, **order):
    return recipe(order=Order(**order), phases=(Phase(0.5, 32, 8), Phase(0.5, 16, 16)))


def test_order_and_mixture_decide_the_batches(folder):
    corpora = open_corpora(text(folder), {})

    def batch(**changes):
        recipe = tiny.bert(**changes)
        return training_batches(recipe, corpora, *every_task(recipe)[0][1:]).batch(0, ROWS)

    plain = batch()
    for changes in ({"order": Order(2)}, {"order": Order(1, 1)}, {"mixture": "given:1,9"}, {"seed": 1}):
        assert not equal(plain, batch(**changes)), changes
    assert equal(plain, batch(mixture="proportional:1000000000"))


def test_a_run_says_its_rates_and_what_each_process_reads(folder, monkeypatch):
    corpora = open_corpora(text(folder), {})
    assert data.data_lines(tiny.bert(mixture="given:0.7,0.4"), corpora, None) == [
        "mixture=given:0.7,0.4: the rows are 63.64% a, 36.36% b"
    ]
    monkeypatch.setattr(data, "size", lambda: 4)
    monkeypatch.setattr(data, "host_rows", lambda mesh, rows: np.arange(rows // 4))
    for lanes, said in ((1, "reads 100%"), (2, "reads 50%"), (8, "reads 25%")):
        *_, line = data.data_lines(tiny.bert(order=Order(lanes)), corpora, None)
        assert line.startswith(f"order.lanes={lanes}: each of 4 processes {said}")
        assert ("--order.lanes 4, in another --workdir, would" in line) == (lanes < 4)


SPANS, PREFIX = SequenceToSequence(), SequenceToSequence("prefix")
OF_BOTH = (Task("spans", SPANS, corpus="a"), Task("prefix", PREFIX, corpus="b"), Task("all", PREFIX))


def in_tasks(rates, tasks=OF_BOTH):
    phase = PhaseWithTargets(1.0, 32, 8, target_length=tiny.TARGET, tasks=tasks, rates=rates)
    return tiny.t5(phases=(phase,))


def test_rates_of_tasks_follow_from_their_examples(folder):
    corpora, least = open_corpora(text(folder), {}), min(tiny.TARGET, 32) - 1
    sizes = {name: corpus.size("train") for name, corpus in corpora.items()}
    ended = {name: size["tokens"] + size["documents"] for name, size in sizes.items()}
    rows = {"spans": -(-ended["a"] // SPANS.rows(in_tasks("").phases[0]).size), "prefix": -(-ended["b"] // least)}
    rows["all"] = rows["prefix"] + -(-ended["a"] // least)
    expected = {name: count / sum(rows.values()) for name, count in rows.items()}
    assert data.task_rates(in_tasks("proportional"), corpora, 0) == pytest.approx(expected)
    equal = data.task_rates(in_tasks("proportional:1"), corpora, 0)
    assert equal == pytest.approx(dict.fromkeys(rows, 1 / 3)) == data.task_rates(in_tasks("equal"), corpora, 0)
    assert data.task_rates(in_tasks(""), corpora, 0) == dict.fromkeys(rows, 1.0)
    said = data.data_lines(in_tasks("proportional:1"), corpora, None)[-1]
    assert f"phases.0.rates=proportional:1: the steps are 33.33% spans ({rows['spans']:,} examples), 33.33%" in said
    of_pairs = Pairs(32, 9), InputTarget(32, True, False)
    assert [of.examples_of({"documents": 7, "tokens": 99}) for of in of_pairs] == [7, 7]


def test_what_is_wrong_with_a_task_is_said_with_its_name(folder):
    phase = dataclasses.replace(in_tasks("").phases[0], target_length=5)
    with pytest.raises(UserError, match="^task spans: phases.0.target_length=5: at length=32"):
        check(tiny.t5(phases=(phase,)))
    with pytest.raises(UserError, match="^task spans: objective SequenceToSequence: needs EncoderDecoder"):
        check(dataclasses.replace(in_tasks(""), model=tiny.BERT))
    with pytest.raises(UserError, match="^task spans: corpus .*/a has 0 sentinels"):
        check_data(in_tasks(""), open_corpora(text(folder), {}))


def test_rates_of_tasks_stay_when_a_corpus_has_grown(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "c")
    file = tmp_path / "c" / "a" / "manifest.json"
    grown = json.loads(file.read_text()) | {"history": [{"fingerprint": "2" * 64, "parts": 2}]}
    file.write_text(json.dumps(grown | {"fingerprint": "2" * 64, "parts": grown["parts"][:2], "history": []}))
    rates = lambda states: data.task_rates(in_tasks("temperature:2"), open_corpora(text(tmp_path / "c"), states), 0)
    before, states = rates({}), {name: of.fingerprint for name, of in open_corpora(text(tmp_path / "c"), {}).items()}
    file.write_text(json.dumps(grown))
    assert rates(states) == before != rates({})


@pytest.mark.parametrize(
    ("rates", "tasks", "said"),
    [
        ("equal", (), "phases.0.rates=equal: needs tasks"),
        ("equal", (dataclasses.replace(OF_BOTH[0], rate=2.0),), "phases.0.rates=equal: replaces the rate of each task"),
        ("given:1,2", OF_BOTH, "phases.0.rates=given:1,2: 2 rates for spans, prefix, all"),
        ("temperature", OF_BOTH, "phases.0.rates=temperature: too few numbers for temperature; use proportional"),
    ],
)
def test_rates_that_cannot_be_are_refused_without_a_corpus(rates, tasks, said):
    with pytest.raises(UserError, match=said):
        check(in_tasks(rates, tasks))


def test_batch_sizes_that_lanes_do_not_divide_are_an_error_that_names_both():
    with pytest.raises(UserError, match=r"phases.1.batch_size=16 is not a multiple of order.lanes=3"):
        check(tiny.bert(order=Order(3), phases=(Phase(0.5, 32, 9), Phase(0.5, 32, 16))))
    with pytest.raises(UserError, match="1 rows in a lane are not a multiple of 2"):
        check(tiny.xlnet(order=Order(8)))


def test_what_does_not_fit_shows_without_text(folder):
    corpora = open_corpora(text(folder), {})
    with pytest.raises(UserError, match="mixture=given:1: 1 rates for a, b"):
        check_data(tiny.bert(mixture="given:1"), corpora)
    with pytest.raises(UserError, match="b has a rate of 0.01"):
        check_data(tiny.transformer_xl(mixture="given:99,1"), corpora)


class Hosts:
    """Several hosts that count one after the other, in one process."""

    def __init__(self, monkeypatch, hosts):
        self.hosts, self.at, self.asked = hosts, 0, []
        monkeypatch.setattr(data, "size", lambda: hosts)
        monkeypatch.setattr(data, "number", lambda: self.at)
        monkeypatch.setattr(data, "gather", lambda what, decide: self.asked.append(decide()) or [self.whole()])

    def whole(self):
        return {key: count for part in self.asked for key, count in part.items()}


def test_each_host_counts_its_share_and_the_file_keeps_all(folder, tmp_path, monkeypatch):
    corpora, recipe = open_corpora(text(folder), {}), in_lanes(tiny.bert, lanes=2, window=2)
    alone = phase_batches(recipe, corpora, 0, tmp_path / "alone.json", print)
    assert alone.keys() == {0, 1} and len(json.loads((tmp_path / "alone.json").read_text())) == 2 * (4 + 3)
    uncounted = training_batches(recipe, corpora, *every_task(recipe)[0][1:])
    assert equal(alone[0].batch(3, ROWS), uncounted.batch(3, ROWS))
    said, hosts = [], Hosts(monkeypatch, 3)
    for hosts.at in range(2):
        with pytest.raises(KeyError):  # the others' shares are not there yet
            phase_batches(recipe, corpora, 0, tmp_path / "none.json", said.append)
        (tmp_path / "none.json").unlink(missing_ok=True)
    hosts.at = 2
    phase_batches(recipe, corpora, 0, tmp_path / "hosts.json", said.append)
    assert [len(part) for part in hosts.asked] == [5, 5, 4] and said == ["counting the examples of 14 parts"] * 3
    assert json.loads((tmp_path / "hosts.json").read_text()) == json.loads((tmp_path / "alone.json").read_text())
    phase_batches(recipe, corpora, 0, tmp_path / "hosts.json", pytest.fail)  # counted before
    assert phase_batches(recipe, corpora, 10, tmp_path / "hosts.json", pytest.fail).keys() == {1}
    assert phase_batches(recipe, corpora, 20, tmp_path / "hosts.json", pytest.fail) == {}


def test_counts_of_other_parts_are_noticed(folder, tmp_path):
    corpora, recipe, file = open_corpora(text(folder), {}), in_lanes(tiny.bert, lanes=1), tmp_path / "examples.json"
    phase_batches(recipe, corpora, 0, file, print)
    file.write_text(json.dumps({key: count + 1 for key, count in json.loads(file.read_text()).items()}))
    with pytest.raises(UserError, match="but examples.json says .*; remove examples.json"):
        phase_batches(recipe, corpora, 0, file, print)[0].batch(0, ROWS)


@pytest.mark.parametrize("content", ['{"half', "[]"])
def test_where_counts_are_damaged_they_are_made_anew(folder, tmp_path, content):
    corpora, recipe, said = open_corpora(text(folder), {}), in_lanes(tiny.bert, lanes=1), []
    phase_batches(recipe, corpora, 0, tmp_path / "whole.json", said.append)
    (tmp_path / "damaged.json").write_text(content)
    phase_batches(recipe, corpora, 0, tmp_path / "damaged.json", said.append)
    assert said == ["counting the examples of 14 parts"] * 2
    assert (tmp_path / "damaged.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_a_run_on_a_mixture_goes_on_as_if_never_interrupted_with_figures_of_each_corpus(
    folder, tmp_path, monkeypatch, capsys
):
    toys.register(monkeypatch)
    recipe = toys.recipe(steps=10, order=Order(2, 2), mixture="smoothed:0.7")
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert run(toys.recipe(steps=5, order=recipe.order, mixture=recipe.mixture), tiny.options(text(folder), cut)) == 0
    assert run(recipe, tiny.options(text(folder), cut)) == run(recipe, tiny.options(text(folder), whole)) == 0
    assert tiny.equal(tiny.final_state(cut), tiny.final_state(whole))
    (evaluation,) = read_metrics(RunDirectory(whole), "eval")
    assert {"a/loss", "a/next_loss", "b/loss", "b/next_accuracy"} < evaluation.keys()
    rates = mixture_rates(recipe, open_corpora(text(folder), {}))
    assert evaluation["loss"] == pytest.approx(sum(rates[name] * evaluation[f"{name}/loss"] for name in "ab"))
    *_, last = read_metrics(RunDirectory(whole), "train")
    assert last["a/rows"] + last["b/rows"] == 10 * 8 and last["a/epochs"] > 0 and "loss" in last
    about = RunDirectory(whole).read_run()
    assert about["corpus"] == text(folder) and about["fingerprint"].startswith(f"a={Corpus(folder / 'a').fingerprint}")
    with pytest.raises(UserError, match=r"started with other corpora \(a, b\); use these names"):
        run(recipe, tiny.options(folder / "a", whole))
    with pytest.raises(UserError, match="mixture: smoothed:0.7 -> proportional"):
        run(toys.recipe(steps=10, order=recipe.order), tiny.options(text(folder), whole))
    assert main(["eval", str(whole), "--corpus", f"b={folder / 'b'},a={folder / 'a'}"]) == 0
    assert "b/next_accuracy" in capsys.readouterr().out


def test_a_run_goes_on_with_the_parts_that_its_corpus_began_with(corpus_path, tmp_path, monkeypatch, capsys):
    toys.register(monkeypatch)
    path = written(tmp_path / "c", corpus_path, 4, parts=3)
    grown = json.loads((path / "manifest.json").read_text())
    grown["history"] = [{"fingerprint": "2" * 64, "parts": 2}]
    before = grown | {"fingerprint": "2" * 64, "parts": grown["parts"][:2], "history": []}
    (path / "manifest.json").write_text(json.dumps(before))
    options = tiny.options(path, tmp_path / "run")
    assert run(toys.recipe(steps=5), options) == 0 and "has grown" not in capsys.readouterr().out
    (path / "manifest.json").write_text(json.dumps(grown))
    assert run(toys.recipe(steps=10), options) == 0
    assert "has grown; the run continues with the 2 parts that it started with" in capsys.readouterr().out
    assert RunDirectory(tmp_path / "run").read_run()["fingerprint"] == "2" * 64
    assert len(RunDirectory(tmp_path / "run").open_corpora()[""].parts) == 2
    assert run(toys.recipe(steps=5), tiny.options(path, tmp_path / "other")) == 0
    assert RunDirectory(tmp_path / "other").read_run()["fingerprint"] == grown["fingerprint"]
