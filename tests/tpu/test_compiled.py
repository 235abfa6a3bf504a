"""Compiled programs that are kept are kept whole."""

from pathlib import Path

import pytest
from jax._src import lru_cache

from tpu.compiled import keep_programs_whole


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(lru_cache.LRUCache, "put", lru_cache.LRUCache.put)  # as it was, afterwards
    keep_programs_whole()
    return lru_cache.LRUCache(str(tmp_path), max_size=-1)


def test_a_program_is_read_back_and_nothing_else_is_left(kept, tmp_path):
    kept.put("jit_step", b"program")
    kept.put("jit_step", b"program")
    assert kept.get("jit_step") == b"program"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_cut_off_while_it_is_written_is_not_there_and_is_written_by_the_next(kept, monkeypatch):
    write = Path.write_bytes

    def cut_off(file, program):
        write(file, program[:3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(kept.path), "write_bytes", cut_off)
        with pytest.raises(KeyboardInterrupt):
            kept.put("jit_step", b"program")
    assert kept.get("jit_step") is None
    kept.put("jit_step", b"program")
    assert kept.get("jit_step") == b"program"
