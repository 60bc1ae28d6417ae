"""The data folder."""

from pathlib import Path

import pytest

from server.files import DataFolder
from server.job import new_job_id


@pytest.fixture
def files(tmp_path: Path) -> DataFolder:
    """An empty data folder."""
    folder = DataFolder(tmp_path / "data")
    folder.create()
    return folder


def test_attempts_have_files_of_their_own(files: DataFolder) -> None:
    assert files.prepare("video_a", 1) == files.root / "videos/video_a/1.mp4"
    assert files.prepare("video_a", 2) != files.prepare("video_a", 1)
    assert files.video("video_a", 1).parent.is_dir()
    files.sync("video_a")


def test_removing_takes_everything_of_one_job(files: DataFolder) -> None:
    files.prepare("video_a", 1).write_bytes(b"1")
    kept = files.prepare("video_b", 1)
    kept.write_bytes(b"1")
    files.remove("video_a")
    files.remove("video_a")
    assert [path.name for path in files.videos.iterdir()] == ["video_b"]
    assert kept.is_file()


def test_discarding_takes_one_attempt_and_its_temporary_files(files: DataFolder) -> None:
    first, second = files.prepare("video_a", 1), files.prepare("video_a", 12)
    for path in (first, first.with_name(".1.0a1b.tmp.mp4"), second, second.with_name(".12.0a1b.tmp.mp4")):
        path.write_bytes(b"1")
    files.discard("video_a", 1)
    assert sorted(path.name for path in first.parent.iterdir()) == [".12.0a1b.tmp.mp4", "12.mp4"]
    files.discard("video_a", 12)
    assert not first.parent.exists()
    files.discard("video_a", 12)


def test_only_videos_of_completed_jobs_stay(files: DataFolder) -> None:
    done, unknown, gone = new_job_id(), new_job_id(), new_job_id()
    kept = files.prepare(done, 2)
    for path in (kept, files.video(done, 1), kept.with_name(".2.0a1b.tmp.mp4"), files.prepare(unknown, 1)):
        path.write_bytes(b"1")
    removed = files.remove_unknown({done: 2, gone: 1})
    assert len(removed) == 3
    assert list(files.videos.rglob("*")) == [kept.parent, kept]


@pytest.mark.parametrize(
    "name", ["holiday.mp4", "video_2019/1.mp4", "1/1.mp4", "a/b/c.txt", f"{new_job_id()}"]
)
def test_what_reelwright_did_not_make_stays(files: DataFolder, name: str) -> None:
    foreign = files.videos / name
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(b"1")
    (files.videos / "empty").mkdir()
    assert files.remove_unknown({}) == []
    assert foreign.is_file()
    assert (files.videos / "empty").is_dir()
