"""Soft targets that are stored once: a student of them learns what one with its teacher in the step does."""

import dataclasses
import fcntl
import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.durable import locked
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from data_pipelines.soft_targets import IDS, LOGS, SoftTargets
from models.core.noise import row_keys
from pretrain.__main__ import main
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.matching import Match
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Bound, Moment
from pretrain.recipe import Phase, every_task, resolve, to_json
from pretrain.schedules import Schedule
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import annotating
from pretrain.training.annotating import annotate
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.data import training_batches
from pretrain.training.opened import restore
from pretrain.training.run import run
from pretrain.training.teaching import of_stored
from tests.data_pipelines.corpora import random_documents, write_corpus
from tests.pretrain import tiny

MASKED = MaskedLanguageModel("packed-sentences", next_sentence=False, masking=Masking(copies=2))
BERT = dataclasses.replace(tiny.BERT, dropout=0.0, attention_dropout=0.0, init_std=0.2)
GPT2 = dataclasses.replace(tiny.GPT2, dropout=0.0, attention_dropout=0.0)


def bert(**changes):
    return tiny.bert(**{"model": BERT, "objective": MASKED} | changes)


def gpt2(**changes):
    return tiny.gpt2(**{"model": GPT2, "objective": NextTokenPrediction(z_loss=1e-3)} | changes)


@pytest.fixture(scope="module")
def sources(corpus_path, bytes_path, tmp_path_factory):
    """What a case reads: its recipe, corpus, and the run of a teacher."""
    made = {}
    for name, recipe, corpus in (("masked", bert, corpus_path), ("causal", gpt2, bytes_path)):
        workdir = tmp_path_factory.mktemp(name) / "teacher"
        wide = dataclasses.replace(recipe().model, width=48)
        tiny.begun(recipe(model=wide, seed=1), tiny.options(corpus, workdir))
        made[name] = recipe, corpus, str(workdir)
    return made


@pytest.fixture(scope="module")
def masked(sources, tmp_path_factory):
    """(arguments of runs, the folder of soft targets) of the masked student."""
    recipe, corpus, teacher = sources["masked"]
    out = tmp_path_factory.mktemp("soft") / "targets"
    annotate(recipe(), teacher, Corpus(corpus), out, k=8)
    return recipe, corpus, out


def learning(recipe, out):
    targets = SoftTargets(out)
    return of_stored(recipe, targets.manifest["k"], targets.digest)


def batch_of(recipe, corpus, out, step, rows):
    """Rows of a step, and of those after it, with what is stored of them."""
    opened = Corpus(corpus)
    opened.soft_targets = SoftTargets(out)
    ((_, phase, task),) = every_task(recipe)
    examples = pickle.loads(pickle.dumps(training_batches(recipe, {"": opened}, phase, task)))  # as for a worker
    return examples.batch(step, np.array(rows))


@pytest.mark.parametrize("name", ["masked", "causal"])
def test_the_whole_vocabulary_teaches_what_the_teacher_in_the_step_does(name, sources, tmp_path, monkeypatch):
    """With rows of any order, of several steps and copies, and with padding."""
    recipe, corpus, teacher = sources[name]
    vocab, losses = Corpus(corpus).vocab_size, (Match(temperature=2.0, weight=3.0),)
    monkeypatch.setattr(annotating, "PART_BYTES", 200_000)  # several parts
    assert annotate(recipe(), teacher, Corpus(corpus), tmp_path / "soft", k=vocab)[-1] == pytest.approx(1, abs=1e-4)
    assert len(SoftTargets(tmp_path / "soft").parts) > 2
    stored = learning(recipe(), tmp_path / "soft")
    objective = dataclasses.replace(stored.objective, losses=losses)
    stored = resolve(dataclasses.replace(stored, objective=objective), Corpus(corpus))
    batch = batch_of(stored, corpus, tmp_path / "soft", 3, [5, 700, 0, 2, 461, 7])
    weights = next(name for name in ("prediction_weights", "weights") if name in batch)
    batch[weights][3] = 0.0
    objective = dataclasses.replace(stored.objective, stored=0)
    theirs = restore(RunDirectory(teacher))
    params, keys = initial_params(assemble(stored)), row_keys(0, 0, jnp.arange(6))
    model, bound = assemble(stored).model, Bound("teacher", theirs.assembly.model, theirs.whole)

    def mean(objective, params, batch, teachers):
        def total(params):
            terms, _, _ = objective.loss(model, params, batch, {}, Moment(keys, True, 0, teachers))
            weights = objective.weights(batch)
            parts = {name: terms[name].sum / weights[name] for name in terms}
            return sum(objective.coefficients(0)[name] * part for name, part in parts.items()), parts

        return jax.jit(jax.value_and_grad(total, has_aux=True))(params)

    (_, found), gradients = mean(stored.objective, params, batch, {})
    alone = {name: array for name, array in batch.items() if name not in (IDS, LOGS)}
    (_, wanted), of_teacher = mean(objective, params, alone, {"teacher": bound})
    assert found.keys() == wanted.keys() and wanted["logits_kl"] > 0.05
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3 if name == "logits_kl" else 1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_teacher), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3 * np.abs(other).max() + 1e-7)


def files(folder):
    return {path: (path.read_bytes(), path.stat().st_ino) for path in folder.rglob("*") if path.is_file()}


def test_a_killed_annotation_goes_on_with_the_same_bytes(sources, tmp_path, monkeypatch):
    recipe, corpus, teacher = sources["masked"]
    monkeypatch.setattr(annotating, "PART_BYTES", 10_000)
    write = lambda name: annotate(recipe(), teacher, Corpus(corpus), tmp_path / name, k=8)
    parts, made, share = write("whole")
    assert parts == made > 3
    ((_, phase, task),) = every_task(recipe())
    examples = training_batches(recipe(), {"": Corpus(corpus)}, phase, task)
    number = np.arange(examples.number)
    likeliest = SoftTargets(tmp_path / "whole").read(0, number)[0][LOGS][..., :-1].astype(np.float32)
    real = examples.build(0, number)["prediction_weights"] > 0
    assert share == pytest.approx(np.exp(likeliest).sum(-1)[real].mean(), abs=1e-3) and not real.all()
    written, put = [], annotating.put_folder

    def killed(made, place):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(place)
        put(made, place)

    with monkeypatch.context() as patch:
        patch.setattr(annotating, "put_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            write("killed")
    with pytest.raises(UserError, match=r"^--soft-targets .*killed: lacks 000002/summary.json; write it with `python"):
        SoftTargets(tmp_path / "killed")
    (tmp_path / "killed/photos.x").mkdir()
    (tmp_path / "killed/000000.x").touch()
    before = files(written[0]) | files(written[1])

    def full(*_):  # a disk, as NumPy says it
        raise OSError("8 requested and 3 written")

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"cannot write there \(8 requested and 3 wri"):
        patch.setattr(np, "save", full)
        write("killed")
    assert write("killed") == (parts, parts - 2, share)
    after = {path: found for path, found in files(tmp_path / "killed").items() if path in before}
    assert before == after
    assert (tmp_path / "killed/photos.x").is_dir()
    (tmp_path / "killed/000000.x").unlink()
    inside = lambda name: {path.relative_to(tmp_path / name): x for path, (x, _) in files(tmp_path / name).items()}
    assert inside("killed") == inside("whole")


def test_a_student_goes_on_bit_for_bit_and_keeps_its_targets(masked, sources, tmp_path):
    recipe, corpus, out = masked
    options = lambda name, out=out: tiny.options(corpus, tmp_path / name, soft_targets=out, eval_every=6)
    student = lambda steps, out=out: learning(recipe(steps=steps, schedule=Schedule("constant", warmup=0.0)), out)
    run(student(6), options("once"))
    for steps in (3, 6):
        run(student(steps), options("twice"))
    once, twice = (tiny.final_state(tmp_path / name, 6).params for name in ("once", "twice"))
    assert tiny.equal(once, twice)
    assert RunDirectory(tmp_path / "once").read_recipe().teachers == ()
    figures = {kind: read_metrics(RunDirectory(tmp_path / "once"), kind)[-1] for kind in ("train", "eval")}
    both = figures["train"]["mlm_loss"] + figures["train"]["logits_kl_loss"]
    assert figures["train"]["loss"] == pytest.approx(both, rel=1e-5)
    assert figures["eval"]["loss"] == figures["eval"]["mlm_loss"]  # held-out rows have no soft targets
    shutil.copytree(out, tmp_path / "moved")
    assert run(student(6, tmp_path / "moved"), options("twice", tmp_path / "moved")) == 0
    summary = tmp_path / "moved/000000/summary.json"
    summary.write_text(summary.read_text().replace('"sha256": "', '"sha256": "0'))
    with pytest.raises(
        UserError, match=r"with another recipe \(objective.soft_targets: \w+ -> \w+\); give the old val"
    ):
        run(student(6, tmp_path / "moved"), options("twice", tmp_path / "moved"))


def test_a_damaged_part_is_found_and_made_again(masked, sources, tmp_path):
    recipe, corpus, out = masked
    teacher = sources["masked"][2]
    shutil.copytree(out, tmp_path / "damaged")
    file = tmp_path / "damaged/000000/values.npy"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    options = tiny.options(corpus, tmp_path / "run", soft_targets=tmp_path / "damaged")
    with pytest.raises(UserError, match=r"/000000: values.npy is not what was written; delete .*/000000 and annotate"):
        run(learning(recipe(steps=2), tmp_path / "damaged"), options)
    checked = Corpus(corpus)
    checked.soft_targets = SoftTargets(tmp_path / "damaged")
    (file.parent / "summary.json").unlink()
    checked.checks.add((-1, str(file.parent)))
    with pytest.raises(UserError, match="damaged: lacks 000000/summary.json; write it with"):
        checked.checks.wait()
    file.write_bytes(b"")
    assert annotate(recipe(), teacher, Corpus(corpus), tmp_path / "damaged", k=8)[1] == 1
    assert SoftTargets(tmp_path / "damaged").digest == SoftTargets(out).digest


def test_the_folder_is_beside_the_corpus_and_on_this_disk(corpus_path, monkeypatch, capsys):
    command = lambda corpus, *more: main(["annotate", "bert-tiny", "--teacher", "x", "--corpus", corpus, *more])
    outs = []
    monkeypatch.setattr(annotating, "annotate", lambda recipe, source, corpus, out, k: outs.append(out) or (1, 1, 0.5))
    monkeypatch.chdir(corpus_path / "tokenizer")
    assert command("..") == 0
    monkeypatch.chdir(corpus_path)
    assert command(".") == 0 and outs == [corpus_path.with_name("corpus-soft-targets")] * 2
    assert command("gs://b/x") == command(".", "--out", "gs://b/x") == 2
    run = ["run", "gpt2-tiny", "--corpus", ".", "--workdir", "x", "--soft-targets", "gs://b/x"]
    assert main(run) == 2
    printed = capsys.readouterr()
    assert "1 parts, 1 of them made now; the 195 tokens of a place have 50.0% of the teacher's" in printed.out
    assert printed.err.splitlines() == [
        "error: --corpus gs://b/x: is not on this disk, so soft targets need a folder; give --out",
        "error: --out gs://b/x: give a local path",
        "error: --soft-targets gs://b/x: give a local path",
    ]


def test_what_is_wrong_is_said_in_one_line(masked, sources, corpus_path, bytes_path, tmp_path):
    recipe, corpus, out = masked
    teacher = sources["masked"][2]

    def refused(recipe, corpus=corpus, source=teacher, out=tmp_path / "new", k=8):
        with pytest.raises(UserError) as error:
            annotate(recipe, source, Corpus(corpus), out, k)
        return str(error.value)

    assert "objective.masking.copies=0: soft targets are of fixed masks" in refused(tiny.bert())
    assert refused(tiny.electra()).startswith("objective ReplacedTokenDetection: learns from no teacher")
    assert refused(bert(), k=0) == "--k 0: must be 1 or more"
    assert "its tokenizer gives '!' the id None, but the corpus's 0; prepare the corpus" in refused(bert(), bytes_path)
    assert refused(bert(), out=out, k=9) == f"--out {out}: has other contents (k=8); give another folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(annotating, "to_json", lambda taught: to_json(taught).replace('"gelu"', '"relu"'))
        assert "has other contents (other config, dtype, platform); give" in refused(bert(), out=out)
    with locked(out / "lock", fcntl.LOCK_SH):  # which would let in another that only reads
        assert refused(bert(), out=out) == f"--out {out}: another annotate writes here; wait, or give another folder"
    photo = tmp_path / "000000.photos" / "photo.png"
    photo.parent.mkdir()
    photo.touch()
    assert "holds other files than soft targets; give an empty folder" in refused(bert(), out=tmp_path)
    assert photo.exists()
    empty = write_corpus(tmp_path / "empty", [], vocab_size=195, heldout=random_documents(0, 20))
    shutil.copytree(corpus / "tokenizer", empty / "tokenizer", dirs_exist_ok=True)
    assert refused(bert(), empty).endswith("empty is empty; prepare more text")
    two = (Phase(0.5, 16, 8), Phase(0.5, 32, 8))
    assert refused(bert(phases=two)).startswith("phases: soft targets are of rows of one length")
    assert not (tmp_path / "new").exists()

    def unread(recipe, corpus=corpus, **changes):
        with pytest.raises(UserError) as error:
            run(recipe, tiny.options(corpus, tmp_path / "run", **{"soft_targets": out} | changes))
        assert not (tmp_path / "run").exists()
        return str(error.value)

    masking = dataclasses.replace(MASKED, masking=Masking(copies=3))
    other = bert(seed=1, objective=masking, phases=(Phase(1.0, 16, 8),))
    changed = "seed: 0 -> 1; length: 32 -> 16; copies: 2 -> 3"
    assert f"is of other rows ({changed}); give the old values, or annotate again" in unread(learning(other, out))
    assert "is of other rows (layout: PackedSentences -> SegmentPairs;" in unread(
        learning(bert(objective=dataclasses.replace(MASKED, layout="segment-pairs")), out)
    )
    foreign = shutil.copytree(out, tmp_path / "foreign")
    manifest = (foreign / "manifest.json").read_text()
    (foreign / "manifest.json").write_text(manifest.replace('"corpus": "', '"corpus": "0'))
    assert "is of another corpus; annotate this one" in unread(learning(bert(), foreign), soft_targets=foreign)
    rows = json.loads(manifest)["rows"]
    (foreign / "manifest.json").write_text(manifest.replace(f'"rows": {rows}', '"rows": 1'))
    assert "manifest.json is none of `annotate`, or damaged" in unread(learning(bert(), out), soft_targets=foreign)
    assert unread(learning(bert(), out), soft_targets=None).startswith(
        "--soft-targets: the recipe learns from them; give"
    )
    assert "is of one corpus; give only that" in unread(learning(bert(), out), f"a={corpus},b={corpus}")
    for losses in ((Match("hidden", "mse"),), (Match(), Match("hidden", "mse")), (Match("logits", "mse"),)):
        taught = dataclasses.replace(learning(bert(), out).objective, stored=0, losses=losses)
        with pytest.raises(UserError, match="^objective.losses: soft targets have one, of logits by kl; change them"):
            learning(bert(objective=taught), out)
