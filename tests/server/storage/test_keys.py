"""Names of objects."""

import pytest

from server.storage.keys import ENDINGS, ObjectKey
from tests.server.samples import UNKNOWN_ID


@pytest.mark.parametrize("kind", sorted(ENDINGS))
def test_a_name_is_taken_apart_as_it_was_put_together(kind: str) -> None:
    key = ObjectKey(UNKNOWN_ID, 12, kind)  # type: ignore[arg-type]
    assert ObjectKey.parse(str(key)) == key
    assert str(key).startswith(f"videos/{UNKNOWN_ID}/12.")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "videos",
        f"videos/{UNKNOWN_ID}",
        f"videos/{UNKNOWN_ID}/1.txt",
        f"videos/{UNKNOWN_ID}/x.mp4",
        f"videos/{UNKNOWN_ID}/1.mp4.bak",
        f"other/{UNKNOWN_ID}/1.mp4",
        "videos/holiday/1.mp4",
        f"videos/{UNKNOWN_ID}/.1.mp4",
        f"videos/{UNKNOWN_ID}\n/1.mp4",
    ],
)
def test_what_is_no_jobs_has_no_key(name: str) -> None:
    assert ObjectKey.parse(name) is None
