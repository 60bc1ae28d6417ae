"""docs/http.md names every route, field, error code and metric that there is."""

import re
from pathlib import Path
from typing import get_args

import httpx
import pytest
from pydantic import BaseModel

from configs.attention import AttentionOverrides
from configs.job import ErrorCode
from server import observations
from server.schemas import RerunRequest, Video, VideoEstimate, VideoPreview, VideoRequest

DOCUMENT = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
SOURCES = list((Path(__file__).parents[2] / "server").rglob("*.py"))


@pytest.mark.parametrize(
    "model", [VideoRequest, RerunRequest, AttentionOverrides, Video, VideoEstimate, VideoPreview]
)
def test_every_field(model: type[BaseModel]) -> None:
    assert [name for name in model.model_fields if f"`{name}`" not in DOCUMENT] == []


def test_every_route(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    shown = DOCUMENT.replace("{id}", "{video_id}").replace("/v1/models/{video_id}", "/v1/models/{model_id}")
    assert [path for path in paths if path not in shown] == []


def test_every_job_error_code() -> None:
    assert [code for code in get_args(ErrorCode) if f"`{code}`" not in DOCUMENT] == []


def test_every_http_error_code() -> None:
    pattern = re.compile(r'(?:ApiError|Problem)\(\s*(?:\d+,\s*)?"(\w+)"')
    codes = {code for path in SOURCES for code in pattern.findall(path.read_text(encoding="utf-8"))}
    assert len(codes) > 10
    assert [code for code in sorted(codes) if f"`{code}`" not in DOCUMENT] == []


def test_every_metric() -> None:
    counters = [f"{metric.name}_total" for metric in observations.COUNTERS]
    names = counters + [metric.name for metric in (*observations.GAUGES, *observations.HISTOGRAMS)]
    assert [name for name in names if f"`{name}`" not in DOCUMENT] == []
