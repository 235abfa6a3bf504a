"""Which code this is: known from git, or from a file that goes along where the code is sent without .git."""

import io
import subprocess
import tarfile
from pathlib import Path

from data_pipelines.errors import UserError

COMMIT_FILE = ".commit"


def commit(root: Path) -> str | None:
    """The commit checked out in a folder, with "-dirty" where tracked files differ from it; None when nothing says."""
    if (root / COMMIT_FILE).exists():
        return (root / COMMIT_FILE).read_text().strip() or None
    if not (root / ".git").exists():  # else git would speak of a repository around it
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git; a repository of another user, which it refuses
        return None
    return done.stdout.strip()


def pack(root: Path, archive: Path) -> Path:
    """The files that git tracks, as they are in the working tree, and which commit that is -> a tar, compressed.

    UserError without git.
    """
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
            if (root / name).exists():  # a file may be deleted and not yet removed from the index
                tar.add(root / name, name, recursive=False)
        code = (commit(root) or "").encode()
        entry = tarfile.TarInfo(COMMIT_FILE)
        entry.size = len(code)
        tar.addfile(entry, io.BytesIO(code))
    return archive
