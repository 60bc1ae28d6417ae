"""The newest picture of a running job, as it lies in the store.

Knows: that it comes and goes while it is looked at. Does not know: how it is made (pipelines/previews.py).
"""

import base64

from server.job import Job
from server.storage.store import VideoStore

CONTENT_TYPE = "image/jpeg"


async def read_preview(store: VideoStore, job: Job) -> bytes | None:
    """The JPEG, or None: there is none yet, or the job has just ended."""
    if job.is_final or job.preview_step == 0:
        return None
    return await store.preview(job.id, job.attempt)


def data_url(jpeg: bytes) -> str:
    """The picture as the source of an HTML image."""
    return f"data:{CONTENT_TYPE};base64,{base64.b64encode(jpeg).decode('ascii')}"
