"""What the documents promise is there: no placeholders, no dead links to files."""

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = [
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_nothing_is_left_to_fill_in(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert re.findall(r"@@\w+|\b\w+_TABLE\b|\bTODO\b", text) == []
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert [target for target in targets if not (document.parent / target).exists()] == []
