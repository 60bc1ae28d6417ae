"""The data folder."""

from pathlib import Path

import pytest

from server.files import DataFolder
from server.job import new_job_id
from tests.server.samples import UNKNOWN_ID


@pytest.fixture
def files(tmp_path: Path) -> DataFolder:
    """An empty data folder."""
    folder = DataFolder(tmp_path / "data")
    folder.create()
    return folder


def write(*paths: Path) -> None:
    """Put something at each path."""
    for path in paths:
        path.write_bytes(b"1")


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_attempts_have_files_of_their_own_and_share_a_checkpoint(files: DataFolder) -> None:
    first, second = files.prepare("video_a", 1), files.prepare("video_a", 2)
    assert first.video == files.root / "videos/video_a/1.mp4"
    assert first.video.parent.is_dir()
    assert first.checkpoint == second.checkpoint == files.root / "videos/video_a/checkpoint.safetensors"
    of_each = [(paths.video, paths.thumbnail, paths.spritesheet) for paths in (first, second)]
    assert len({*of_each[0], *of_each[1]}) == 6
    files.sync("video_a")


def test_a_preview_replaces_the_one_before(files: DataFolder) -> None:
    files.prepare("video_a", 1)
    files.write_preview("video_a", b"first")
    files.write_preview("video_a", b"second")
    assert files.preview("video_a").read_bytes() == b"second"
    assert names(files.videos / "video_a") == ["preview.jpg"]


def test_a_preview_of_a_deleted_job_is_not_written(files: DataFolder) -> None:
    with pytest.raises(FileNotFoundError):
        files.write_preview("video_a", b"jpeg")
    assert names(files.videos) == []


def test_removing_takes_everything_of_one_job(files: DataFolder) -> None:
    kept = files.prepare("video_b", 1).video
    write(files.prepare("video_a", 1).video, files.checkpoint("video_a"), kept)
    files.remove("video_a")
    files.remove("video_a")
    assert names(files.videos) == ["video_b"]
    assert kept.is_file()


def all_files_of(files: DataFolder, job_id: str, attempt: int) -> None:
    """Everything that an attempt can leave."""
    folder = files.prepare(job_id, attempt).video.parent
    write(files.video(job_id, attempt), files.thumbnail(job_id, attempt), files.spritesheet(job_id, attempt))
    write(files.preview(job_id), files.checkpoint(job_id))
    write(*(folder / f".{stem}.0a1b.tmp.mp4" for stem in (attempt, "checkpoint", "preview")))


def test_a_discarded_attempt_leaves_only_the_checkpoint(files: DataFolder) -> None:
    all_files_of(files, "video_a", 1)
    files.discard("video_a")
    assert names(files.videos / "video_a") == ["checkpoint.safetensors"]


def test_a_discarded_attempt_without_checkpoint_leaves_no_folder(files: DataFolder) -> None:
    write(files.prepare("video_a", 1).video)
    files.discard("video_a")
    files.discard("video_a")
    assert names(files.videos) == []


def test_a_finished_job_keeps_its_results(files: DataFolder) -> None:
    all_files_of(files, "video_a", 1)
    all_files_of(files, "video_a", 2)
    files.finish("video_a", 2)
    assert names(files.videos / "video_a") == ["2.mp4", "2.spritesheet.jpg", "2.thumbnail.jpg"]


def test_only_results_of_completed_and_checkpoints_of_other_jobs_stay(files: DataFolder) -> None:
    done, waiting, unknown, gone = (new_job_id() for _ in range(4))
    for job_id, attempt in ((done, 1), (done, 2), (waiting, 1), (unknown, 1)):
        all_files_of(files, job_id, attempt)
    (files.videos / gone).mkdir()
    before = {path for path in files.videos.rglob("*") if path.is_file()}
    removed = files.remove_unknown({done: 2, gone: 1}, {waiting})
    assert names(files.videos) == sorted([done, waiting])
    assert names(files.videos / done) == ["2.mp4", "2.spritesheet.jpg", "2.thumbnail.jpg"]
    assert names(files.videos / waiting) == ["checkpoint.safetensors"]
    assert {*removed} == before - {*files.videos.rglob("*")}


@pytest.mark.parametrize("name", ["holiday.mp4", "video_2019/1.mp4", "1/1.mp4", "a/b/c.txt", UNKNOWN_ID])
def test_what_reelwright_did_not_make_stays(files: DataFolder, name: str) -> None:
    foreign = files.videos / name
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(b"1")
    (files.videos / "empty").mkdir()
    assert files.remove_unknown({}) == []
    assert foreign.is_file()
    assert (files.videos / "empty").is_dir()


def test_a_cleared_data_folder_is_made_again(files: DataFolder) -> None:
    files.videos.rmdir()
    assert files.remove_unknown({}) == []
    write(files.prepare("video_a", 1).video)


def test_what_cannot_be_removed_stays_and_is_said(
    files: DataFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stubborn, other = new_job_id(), new_job_id()
    for job_id in (stubborn, other):
        write(files.prepare(job_id, 1).video)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:  # root, as in CI, may remove everything
        if path.parent.name == stubborn:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert files.remove_unknown({}) == [files.video(other, 1)]
    assert names(files.videos) == [stubborn]
    files.discard(stubborn)
    assert "file_not_removed" in capsys.readouterr().out
