"""What was left out or put right, counted: the problems have the names that the manifest and the screen give them."""

REPLACED = "documents with undecodable bytes replaced"
SKIPPED = "documents with undecodable bytes skipped"
UNREADABLE = "files unreadable or cut short"
MALFORMED = "malformed records"
NO_FIELD = "records without the field"
NOT_TEXT = "records whose field is not text"
EMPTY = "empty documents"
PLAIN_SPACES = "places whose sentences were found with plain spaces alone"
TOO_LONG = "records longer than 256 MiB"


class Problems(dict):
    """problem -> {'count': n, 'first': where it was first met}."""

    def note(self, problem: str, where: str, count: int = 1) -> None:
        self.setdefault(problem, {"count": 0, "first": where})["count"] += count

    def merge(self, other: dict) -> None:
        for problem, seen in other.items():
            self.note(problem, seen["first"], seen["count"])
