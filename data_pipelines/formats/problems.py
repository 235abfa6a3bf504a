"""Count input that was left out or repaired. The problems have the names that the manifest and the screen show."""

REPLACED = "documents with undecodable bytes replaced"
SKIPPED = "documents with undecodable bytes skipped"
UNREADABLE = "files unreadable or cut short"
MALFORMED = "malformed records"
NO_FIELD = "records without the field"
NOT_TEXT = "records whose field is not text"
EMPTY = "empty documents"
PLAIN_SPACES = "places whose sentences were found with plain spaces alone"
HALF = "pairs with an empty side"
TOO_LONG = "records longer than 256 MiB"
HIDDEN = "hidden files and folders left out"
OTHER = "files with other suffixes left out"
CORPUS = "corpora left out"
OWN = "files of the output left out"
LINKED = "links to what is read already"


def printable(path: str) -> str:
    """Return a path as text: bytes that are not UTF-8, and characters that do not print, are escaped."""
    return "".join(c if c.isprintable() else _escaped(c) for c in path)


def _escaped(character: str) -> str:
    byte = ord(character) - 0xDC00  # Python's surrogate for a byte that is not UTF-8
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else character.encode("unicode_escape").decode()


class Problems(dict):
    """problem -> {'count': n, 'first': where it was first met}."""

    def note(self, problem: str, where: str, count: int = 1) -> None:
        if problem not in self:
            self[problem] = {"count": 0, "first": printable(where)}
        self[problem]["count"] += count

    def merge(self, other: dict) -> None:
        for problem, seen in other.items():
            self.note(problem, seen["first"], seen["count"])
