"""tpu/colab.ipynb, executed from the set-up to a filled mask with an interrupt in between, and tpu/notebook.py."""

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.display import Image
from nbclient import NotebookClient

from pretrain.storage.run_directory import RunDirectory
from tests.texts import write_texts
from tpu import notebook

ROOT = Path(__file__).parent.parent.parent
CELLS = nbformat.read(ROOT / "tpu" / "colab.ipynb", as_version=4).cells
CODE = {cell.id: cell for cell in CELLS if cell.cell_type == "code"}
TINY = (
    "--model.width 32 --model.heads 2 --model.feed-forward 64 --model.positions 32 --phases.0.length 32 "
    "--phases.0.batch-size 8 --log-every 1 --eval-examples 16"
)


def test_the_notebook_is_valid_and_stores_no_outputs():
    nbformat.validate(nbformat.read(ROOT / "tpu" / "colab.ipynb", as_version=nbformat.NO_CONVERT))
    assert all(not cell.outputs and cell.execution_count is None for cell in CODE.values())


def test_every_parameter_is_explained():
    (described,) = (cell.source for cell in CELLS if cell.id == "parameters-help")
    parameters = re.findall(r"^(\w+) = ", CODE["parameters"].source, re.MULTILINE)
    assert parameters == re.findall(r"^\| `(\w+)`", described, re.MULTILINE)
    elsewhere = "\n".join(cell.source for name, cell in CODE.items() if name != "parameters")
    assert all(re.search(rf"\b{name}\b", elsewhere) for name in parameters)


def given(folder, steps):
    """Values of the first cell."""
    texts = str(write_texts(folder / "texts", documents=200, seed=0))
    name = str(folder / "first")
    return {"TEXT": texts, "SENTENCE": "Ba [MASK] deki.", "NAME": name, "STEPS": steps, "OPTIONS": TINY}


def check_guesses(said):
    guesses = said.splitlines()
    assert len(guesses) == 5
    assert all(re.fullmatch(r"0\.\d{3}  ba.* deki\.", guess) for guess in guesses), guesses


def test_its_cells_train_a_model_that_fills_the_mask(tmp_path, monkeypatch, capsys):
    """Their commands are called here, where the notebook starts a process for each."""

    def command(python, option, package, *arguments, metrics=None):
        assert (python, option) == (sys.executable, "-m")
        assert importlib.import_module(f"{package}.__main__").main([*map(str, arguments)]) == 0
        assert metrics is None or metrics.exists()

    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {}
    for name, values in (
        ("parameters", given(tmp_path, 4)),
        ("set-up", {"run": command, "train": command, "DEVICE": "cpu"}),
        ("corpus", {}),
        ("train", {}),
        ("export", {}),
    ):
        exec(TransformerManager().transform_cell(CODE[name].source), names)
        names |= values
    export = tmp_path / "first" / "export"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in export.iterdir()}
    assert export.with_suffix(".zip").is_file()
    capsys.readouterr()
    exec(CODE["fill"].source, names)
    check_guesses(capsys.readouterr().out)


def text(outputs: list) -> str:
    return "".join(output.get("text", "") for output in outputs if output.get("name") != "stderr")


def pictures(outputs: list) -> list:
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.slow
def test_in_jupyter_an_interrupted_training_goes_on_when_its_cell_is_run_again(tmp_path, monkeypatch):
    workdir, steps = tmp_path / "first" / "bert-tiny", 300
    metrics = workdir / "metrics.jsonl"
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=300, resources={"metadata": {"path": str(ROOT)}})
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def execute(source):
        cell = nbformat.v4.new_code_cell(source)
        client.nb.cells.append(cell)
        client.execute_cell(cell, len(client.nb.cells) - 1)
        return cell.outputs

    def interrupt():
        """As Jupyter does: SIGINT to the kernel's process group."""
        while len(notebook.read(metrics)) <= 3:
            time.sleep(0.01)
        os.killpg(client.km.provisioner.pgid, signal.SIGINT)

    with client.setup_kernel():
        execute(CODE["parameters"].source)
        execute("\n".join(f"{name} = {value!r}" for name, value in given(tmp_path, steps).items()))
        for name in ("set-up", "corpus"):
            execute(CODE[name].source)
        threading.Thread(target=interrupt, daemon=True).start()
        interrupted = execute(CODE["train"].source)
        (step,) = RunDirectory(workdir).checkpoint_steps()
        assert 3 < step < steps
        assert f"SIGINT: saved step {step}" in text(interrupted) and "Stopped with a checkpoint" in text(interrupted)
        whole = execute(CODE["train"].source)
        assert f"resuming from step {step}" in text(whole) and f"done: {steps} steps" in text(whole)
        logged = [entry["step"] for entry in notebook.read(metrics)]
        assert logged[:-1] == list(range(1, steps + 1))  # the last is the evaluation
        assert "loss" not in text(whole)  # the curves show it
        assert "\x1b" not in text(whole)  # what terminals understand
        (before,), (after,) = pictures(interrupted), pictures(whole)
        assert before != after
        execute(CODE["export"].source)
        check_guesses(text(execute(CODE["fill"].source)))


# Colab: commands that record how they were called, in place of those that need a network.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0")" in
git) for last; do :; done; mkdir "$last"; ln -s "$ROOT"/* "$last" ;;
virtualenv) mkdir -p .venv/bin; for it in python pip; do ln -s "$(command -v $it)" .venv/bin/$it; done ;;
esac
"""
COLAB = """
import glob, sys, types
sys.modules["google.colab"] = types.ModuleType("google.colab")
glob.glob = lambda pattern: [{device!r}] if {device!r} and pattern.startswith({device!r}[:9]) else []
"""


@pytest.mark.parametrize(
    "device, found, jax",
    [
        ("/dev/accel0", "tpu", " -r requirements-gcs.txt jax[tpu]"),
        ("/dev/nvidia0", "cuda", " jax[cuda12]"),
        ("", "cpu", ""),
    ],
)
def test_the_set_up_installs_what_the_device_needs_in_an_environment_of_its_own(tmp_path, device, found, jax):
    (tmp_path / "bin").mkdir()
    for name in ("git", "pip", "virtualenv"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    parameters = CODE["parameters"].source.replace('REPOSITORY = ""', 'REPOSITORY = "https://example.org/it"')
    cells = [COLAB.format(device=device), parameters, CODE["set-up"].source]
    cells += ["print(DEVICE, PYTHON, os.getcwd(), 'jax' in sys.modules)"]  # it leaves the accelerator to the run
    (tmp_path / "colab.ipy").write_text("\n".join(cells))
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test` itself
    environment = outside | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"), "ROOT": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython"),
        "JAX_PLATFORMS": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "colab.ipy"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [f"{found} .venv/bin/python {tmp_path / 'pretraining'} False"], done
    assert (tmp_path / "calls").read_text().splitlines() == [
        "git clone --quiet --depth 1 https://example.org/it pretraining",
        "pip install --quiet virtualenv",
        "virtualenv --quiet .venv",
        "pip install --quiet --upgrade pip",
        f"pip install --quiet -c constraints.txt -r requirements.txt{jax}",
    ]


# The helpers, with commands that stand in for a run.
def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def test_a_command_that_fails_says_what_it_said_and_is_an_error(capsys):
    with pytest.raises(RuntimeError, match="ended with status 2"):
        notebook.run(*python("print('error: no such text'); raise SystemExit(2)"))
    assert capsys.readouterr().out == "error: no such text\n"


def test_the_curves_are_drawn_again_while_the_run_goes_on(tmp_path, monkeypatch, capsys):
    metrics, shown = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(notebook.DisplayHandle, "display", lambda self, first: None)
    monkeypatch.setattr(notebook.DisplayHandle, "update", lambda self, now: shown.append((now, metrics.read_text())))
    entry = {"kind": "train", "mlm_loss": 2.0, "mlm_accuracy": 0.1, "tokens_per_s": 9.0, "seconds_left": 2}
    writing = f"""
import json, time
for step in (1, 2, 3):
    with open({str(metrics)!r}, "a") as file:
        file.write(json.dumps({entry} | dict(step=step)) + "\\n")
    print("train       1  loss 2", flush=True)
    time.sleep(1)
print("phase 2")
"""
    notebook.train(*python(writing), metrics=metrics, seconds=0.2)
    assert all(isinstance(now, Image) for now, _ in shown)
    drawn = [written.count("\n") for _, written in shown]  # a busy machine may draw two steps at once
    assert drawn == sorted(drawn) and len(drawn) > 1 and drawn[-1] == 3
    assert len({now.data for now, _ in shown}) == len(drawn)
    assert capsys.readouterr().out == "phase 2\n"


def test_an_interrupt_stops_a_run_with_a_checkpoint_and_is_no_error(tmp_path):
    stops = "import os, signal, time; signal.signal(2, lambda *_: os._exit(75)); print(os.getpid()); time.sleep(60)"
    files = f"from pathlib import Path; metrics = Path({str(tmp_path)!r}) / 'metrics.jsonl'"
    cell = f"{files}; notebook.train(sys.executable, '-c', {stops!r}, metrics=metrics)"
    # What a shell starts in the background ignores SIGINT, and so do its children unless they say otherwise.
    listening = "import signal, sys; signal.signal(2, signal.default_int_handler); from tpu import notebook"
    kernel = subprocess.Popen(python(f"{listening}; {cell}"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    command = next(int(line) for line in kernel.stdout if line.strip().isdigit())
    kernel.send_signal(signal.SIGINT)
    said, _ = kernel.communicate(timeout=60)
    assert "Stopped with a checkpoint. Run this cell again to continue" in said
    assert not Path(f"/proc/{command}").exists()
