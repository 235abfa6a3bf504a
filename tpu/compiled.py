"""Atomic writes of JAX's persistent compilation cache."""

import tempfile
from pathlib import Path

from jax._src import lru_cache

from data_pipelines.durable import put


def keep_programs_whole() -> None:
    """Make JAX rename a compiled program's file into place once it is completely written.
    JAX itself writes in place and never overwrites: half a file, left by a kill, would cost a warning and minutes of
    compilation at every later start. Buckets never have incomplete files."""
    lru_cache.LRUCache.put = _put_whole


_put = lru_cache.LRUCache.put


def _put_whole(cache: lru_cache.LRUCache, key: str, program: bytes) -> None:
    folder = cache.path
    if cache.eviction_enabled or "://" in str(folder):
        _put(cache, key, program)
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as temporary:
        _put(lru_cache.LRUCache(temporary, max_size=-1), key, program)
        for file in Path(temporary).iterdir():
            put(file, Path(folder) / file.name)
