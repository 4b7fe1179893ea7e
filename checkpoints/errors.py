"""The one error that reading, resolving and loading checkpoints raise on purpose.

No imports of ours: every file of the package may use it.
"""


class CheckpointError(Exception):
    """A file or folder is not what it should be.

    The message is one line: "FILE: what was expected, what was found[, what to do]".
    """


MAX_LINE = 300  # characters: a message may quote what a file has


def first_line(error: BaseException) -> str:
    """The first line of another library's message, or its type's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip()[:MAX_LINE] if lines else type(error).__name__
