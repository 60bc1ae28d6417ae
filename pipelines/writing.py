"""The part of a job that needs no device: frames to files.

Knows: which files a job has, and in which order they are written. Does not know: their formats, or how frames
are made. Another job may run on the pipeline meanwhile.
"""

from configs.job import JobPaths, JobResult
from pipelines.cancel import CancelFlag
from pipelines.loading import LoadedPipeline
from pipelines.making import Made
from pipelines.mp4 import Mp4Writer
from pipelines.stages import StageRecorder
from pipelines.stills import write_spritesheet, write_thumbnail


def write_files(
    made: Made,
    video: Mp4Writer,
    loaded: LoadedPipeline,
    paths: JobPaths,
    stages: StageRecorder,
    flag: CancelFlag,
) -> JobResult:
    """Write what ``paths`` asks for. ``video`` has all frames and comes last; without it no picture is left.

    Raises:
        JobFailedError: ``internal``, as on a full disk.
    """
    try:
        with stages.stage_beside("encode_mp4"):
            thumbnail = write_thumbnail(made.frames, paths.thumbnail) if paths.thumbnail else None
            flag.check()
            spritesheet = write_spritesheet(made.frames, paths.spritesheet) if paths.spritesheet else None
            file = video.finish(while_waiting=flag.check)
    except BaseException:
        for path in (paths.thumbnail, paths.spritesheet):
            if path is not None:
                path.unlink(missing_ok=True)
        raise
    return JobResult(
        file=file,
        thumbnail=thumbnail,
        spritesheet=spritesheet,
        decode=made.decode,
        memory=made.memory,
        compute=made.compute,
        resumed_from_step=made.resumed_from_step,
        environment=made.manifest.environment,
        metrics=stages.metrics(made.steps),
        attention=made.manifest.attention,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        warnings=made.warnings,
    )
