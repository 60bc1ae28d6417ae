"""Log lines on a full disk."""

from pathlib import Path

import pytest

from server.log_stream import LossyStream


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_what_cannot_be_written_is_lost() -> None:
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115  # closing it fails
    stream = LossyStream(full)
    assert stream.write("a line\n") == 7
    stream.flush()
    with pytest.raises(OSError, match="No space left"):
        full.close()  # it tries once more, without the stream around it


def test_what_can_be_written_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        stream = LossyStream(file)
        stream.write("a line\n")
        stream.flush()
        assert path.read_text() == "a line\n"


def test_a_closed_stream_loses_lines(tmp_path: Path) -> None:
    file = (tmp_path / "log").open("w")
    file.close()
    stream = LossyStream(file)
    assert stream.write("a line\n") == 7
    stream.flush()
