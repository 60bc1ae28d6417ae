"""What the documents promise is there: no placeholders, no dead links to files."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "docker/**/*.md", "pipelines/**/*.md")
    for path in REPOSITORY.glob(pattern)
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_nothing_is_left_to_fill_in(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert re.findall(r"@@\w+|\b\w+_TABLE\b|\bTODO\b", text) == []
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert [target for target in targets if not (document.parent / target).exists()] == []
