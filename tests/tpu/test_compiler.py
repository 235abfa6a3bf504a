"""The compiler's answers: what is kept of them, and what is said where there is no compiler. None is needed here."""

import importlib.util
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from data_pipelines.errors import UserError
from tpu import compiler
from tpu.compiler import Report, compile_for_tpu
from tpu.topologies import parse_topology
from tpu.xla import SUMS_BESIDE_PRODUCTS

V5E, V6E = parse_topology("v5e:4x4"), parse_topology("v6e:4x4")
OPTIONS = {"xla_a": True, "xla_b": "1"}
REPORT = Report(1.5, 1000, 900, 800, 500, 10, "HloModule step")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def compiled(monkeypatch):
    """Programs that were compiled, by a stand-in for libtpu."""
    asked = []
    monkeypatch.setattr(compiler, "_compile", lambda lowered: asked.append(lowered) or REPORT)
    monkeypatch.setattr(compiler, "version", lambda package: f"{package} 1")
    return asked


def lowered(rows=4, times=2.0):
    return jax.jit(lambda x: times * x).lower(jnp.zeros(rows))


def test_a_program_is_compiled_once(compiled, tmp_path):
    first = compile_for_tpu(lowered(), OPTIONS, V5E, tmp_path / "cache")
    again = compile_for_tpu(lowered(), dict(reversed(OPTIONS.items())), V5E, tmp_path / "cache")
    assert first == REPORT and again == REPORT._replace(cached=True) and len(compiled) == 1


def test_another_program_slice_option_or_compiler_is_compiled_anew(compiled, tmp_path, monkeypatch):
    ask = lambda program, topology, options=OPTIONS: compile_for_tpu(program, options, topology, tmp_path).cached
    asked = [ask(lowered(), V5E), ask(lowered(rows=8), V5E), ask(lowered(times=3.0), V5E), ask(lowered(), V6E)]
    monkeypatch.setattr(compiler, "version", lambda package: f"{package} 2")
    asked.append(ask(lowered(), V5E))
    asked += [ask(lowered(), V5E, OPTIONS | SUMS_BESIDE_PRODUCTS), ask(lowered(), V5E, OPTIONS | {"xla_a": False})]
    assert asked == [False] * 7 and len(compiled) == 7


def test_a_folder_that_cannot_be_written(compiled, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--cache .*cannot write there"):
        compile_for_tpu(lowered(), OPTIONS, V5E, tmp_path / "file")


def test_memory_of_a_program():
    assert REPORT.total == 1000 + 500 + 900 - 800 + 10
    assert REPORT._replace(needed=2e9).total == 2e9


def test_what_a_program_needs_that_does_not_fit():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm."
    assert compiler._needed(message) == pytest.approx(20.5 * 2**30)
    message = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (256.00G) exceeds available HBM"
    assert compiler._needed(message) == 256 * 2**30 and compiler._needed("no number here") == float("inf")


def test_without_libtpu_or_for_slices_that_stand_alone_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = dict(os.environ)
    with pytest.raises(UserError, match="libtpu, which is not installed: make setup-plan .*requirements-plan.txt"):
        compiler.prepare()
    with pytest.raises(UserError, match="--mesh slice=2: slices of v2 do not work together; use one"):
        compiler.devices(parse_topology("v2:4x4"), slices=2)
    assert dict(os.environ) == before
    named = (ROOT / "requirements-plan.txt").read_text()
    assert "libtpu==" in named and "setup-plan:" in (ROOT / "Makefile").read_text()
