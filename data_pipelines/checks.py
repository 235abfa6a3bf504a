"""Whether what is read of a corpus is what `prepare` wrote: its files are hashed beside the reading, each once."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

Key = tuple[int, str]  # a part's number, and the name of a file in it
AFTER_AN_ERROR = 5  # seconds for what is not checked yet: others wait to hear of the error


class Checks:
    """Hashes the files that are read, one after the other, in a thread of its own. Safe from several threads.

    check: of a file; raises UserError where it is damaged, FileNotFoundError where it has been dropped since, which is
        checked when it is read again. None, as when pickled: files are only noted, for another process to check.
    """

    def __init__(self, check: Callable[[int, str], None] | None):
        self._check, self._changed = check, threading.Condition()
        self._seen: set[Key] = set()
        self._waiting: dict[Key, None] = {}  # in the order in which they were first read
        self._thread, self._fault = None, None

    def __reduce__(self):
        return Checks, (None,)

    def add(self, *files: Key) -> None:
        """These files are read."""
        if self._seen.issuperset(files):
            return
        with self._changed:
            self._waiting |= dict.fromkeys(file for file in files if file not in self._seen)
            self._seen.update(files)
            if self._check and self._thread is None and self._fault is None:
                self._thread = threading.Thread(target=self._work, name="checks", daemon=True)
                self._thread.start()

    def take(self) -> list[Key]:
        """The files that were noted and not yet taken; none where this process checks them."""
        if self._check:
            return []
        with self._changed:
            taken, self._waiting = list(self._waiting), {}
        return taken

    def raise_fault(self) -> None:
        """Raises what was found so far."""
        if self._fault:
            raise self._fault

    def wait(self, split: str = "", seconds: float | None = None) -> None:
        """Wait until all files (of a split) that were read are checked, for `seconds` at most; raises what is found."""
        with self._changed:

            def left():
                return self._check and any(name.startswith(split) for _, name in self._waiting)

            self._changed.wait_for(lambda: self._fault or not left(), seconds)
        self.raise_fault()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.notify_all()
                if not self._waiting or self._fault:
                    self._thread = None
                    return
                # An evaluation waits for its few files before it says anything
                file = next((one for one in self._waiting if one[1].startswith("heldout")), next(iter(self._waiting)))
            dropped = False
            try:
                self._check(*file)
            except FileNotFoundError:
                dropped = True
            except Exception as error:
                self._fault = error
            with self._changed:
                del self._waiting[file]
                self._seen -= {file} if dropped else set()


@contextlib.contextmanager
def sound(corpora: Iterable, split: str = "") -> Iterator[None]:
    """As the context ends, UserError if a file (of a split) that was read in it is damaged, also in place of an error
    that the damage has led to."""
    wait = lambda seconds: [corpus.checks.wait(split, seconds) for corpus in corpora]
    try:
        yield
    except Exception:
        wait(AFTER_AN_ERROR)
        raise
    wait(None)
