"""Which code this is: known from git, or from the file that `launch` sends along where it sends no .git."""

import subprocess
from pathlib import Path

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
