"""Compiled programs that JAX keeps between starts."""

import tempfile
from pathlib import Path

from jax._src import lru_cache

from data_pipelines.durable import put


def keep_programs_whole() -> None:
    """Have JAX give the file of a compiled program its name when all of it is on disk.

    It writes in place and never over what is there: half of a program, left by a kill, would be a warning and minutes
    of compilation at every later start. Buckets have no halves of files.
    """
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
