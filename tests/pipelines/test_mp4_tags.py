"""ffmetadata text; that ffmpeg reads it the same way is tested with the MP4 files."""

import pytest

from pipelines.mp4_tags import comment_in, with_comment

COMMENTS = [
    "",
    "plain",
    "a=b;c#d\\e",
    "two\nlines\n",
    "\\",
    "\\\n=",
    "comment=x\ncomment=y",
    '{"a": "ü影🌀"}',
]


@pytest.mark.parametrize("comment", COMMENTS)
def test_a_comment_comes_back(comment: str) -> None:
    assert comment_in(with_comment(comment)) == comment


def test_special_characters_are_escaped() -> None:
    assert with_comment("a=b;c#d\\e\nf") == ";FFMETADATA1\ncomment=a\\=b\\;c\\#d\\\\e\\\nf\n"


def test_the_comment_is_found_among_other_tags() -> None:
    text = (
        ";FFMETADATA1\nmajor_brand=isom\ntitle=a\\\\\ncomment=b\nencoder=Lavf62\n[STREAM]\nhandler_name=c\n"
    )
    assert comment_in(text) == "b"


def test_a_tag_that_looks_like_a_comment_is_none() -> None:
    assert comment_in(";FFMETADATA1\ntitle=a\\\ncomment\\=b\nxcomment=c\n") is None
