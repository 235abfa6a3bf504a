"""What the system refuses is told apart, and each fault has its cure."""

import errno
import os
import re
from pathlib import Path

import pytest

from data_pipelines.errors import UserError
from data_pipelines.prepare.faults import explain, faults

OUT = Path("/data/corpus")


@pytest.mark.parametrize(
    "code, path, said",
    [
        (errno.ENOSPC, None, "--out /data/corpus: cannot write there .*free space"),
        (errno.EDQUOT, "/data/corpus/x", "--out /data/corpus: cannot write there .*free space"),
        (errno.EACCES, "/texts/a.txt", "--source: cannot read /texts/a.txt .*make it readable or leave it out"),
        (errno.EACCES, "/data/corpus/x", "--out /data/corpus: cannot write there .*choose another directory"),
        (errno.EACCES, "/data", "--out /data/corpus: cannot write there .*choose another directory"),
        (errno.ENOENT, "/texts/a.txt", "--source: cannot read /texts/a.txt .*leave it out"),
        (errno.ENOENT, "/data/corpus/x", "/data/corpus/x: .*if another process makes the same, wait for it; the same"),
        (errno.ENOTEMPTY, "part.27", "part.27: .*if another process makes the same, wait for it; the same"),
        (errno.EIO, "/texts/a.txt", "/texts/a.txt: reading or writing failed .*may pass; the same command goes on"),
        (errno.ETIMEDOUT, None, "/data/corpus: reading or writing failed .*may pass; the same command goes on"),
        (errno.ESTALE, "/data/corpus/x", "/data/corpus/x: reading or writing failed .*the same command goes on"),
    ],
)
def test_a_fault_has_its_own_cure(code, path, said):
    error = OSError(code, os.strerror(code), path)
    with pytest.raises(UserError, match=f"^{said}") as raised, faults(OUT, 2):
        raise error
    assert (raised.value.status == 134) == bool(re.search("may pass|wait for it", str(raised.value)))
    assert ("free space" in str(raised.value)) == (code in (errno.ENOSPC, errno.EDQUOT))


def test_memory_that_runs_out_is_said():
    with pytest.raises(UserError, match="--processes 2: memory ran out; use fewer"), faults(OUT, 2):
        raise MemoryError


def test_a_time_out_without_a_number_may_pass():
    assert "may pass" in str(explain(TimeoutError("timed out"), OUT))
