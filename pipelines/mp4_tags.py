"""The text form of a file's metadata that ffmpeg reads and writes (its "ffmetadata" format).

Knows: escaping, and the comment among other tags. Does not know: what a comment says.
"""

import re

HEADER = ";FFMETADATA1\n"
_SPECIAL = re.compile(r"([=;#\\\n])")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# A line ends at the first line feed that no backslash stands before.
_COMMENT = re.compile(r"^comment=((?:\\.|[^\\\n])*)$", re.MULTILINE | re.DOTALL)


def with_comment(comment: str) -> str:
    """The whole metadata of a file that has a comment and nothing else."""
    return f"{HEADER}comment={_SPECIAL.sub(_escape, comment)}\n"


def comment_in(metadata: str) -> str | None:
    """The file's comment, or None."""
    found = _COMMENT.search(metadata)
    return _ESCAPED.sub(_unescape, found[1]) if found else None


def _escape(special: re.Match[str]) -> str:
    return f"\\{special[1]}"


def _unescape(escaped: re.Match[str]) -> str:
    return escaped[1]
