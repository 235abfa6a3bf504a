"""Identify the code version: by git, or by a file that is packed with code that is sent without .git."""

import io
import subprocess
import tarfile
from pathlib import Path

from data_pipelines.errors import UserError

COMMIT_FILE = ".commit"


def commit(root: Path) -> str | None:
    """Return the commit checked out in a folder, with "-dirty" if tracked files differ from it; None if unknown."""
    if (root / COMMIT_FILE).exists():
        return (root / COMMIT_FILE).read_text().strip() or None
    if not (root / ".git").exists():  # otherwise git would describe a repository around the folder
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or a repository of another user, which git refuses
        return None
    return done.stdout.strip()


def pack(root: Path, archive: Path) -> Path:
    """Pack the working tree's tracked files, and a file with the commit, into a compressed tar; return its path.
    Raises UserError without git."""
    listing = ["git", "-C", str(root), "ls-files", "-z"]
    try:
        names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(f"{root}: launch copies the files that git tracks, and git says: {said.strip()}") from None
    if "tpu/vm.sh" not in names:
        raise UserError(f"{root}: launch copies the files that git tracks, and git tracks none of the code here")
    with tarfile.open(archive, "w:gz") as tar:
        for name in filter(None, names):
            if (root / name).exists():  # a deleted file may still be in the index
                tar.add(root / name, name, recursive=False)
        code = (commit(root) or "").encode()
        entry = tarfile.TarInfo(COMMIT_FILE)
        entry.size = len(code)
        tar.addfile(entry, io.BytesIO(code))
    return archive
