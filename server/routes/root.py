"""``/``: where to go from here."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Reelwright</title>
<style>body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto }</style>
<h1>Reelwright</h1>
<p>Prompts in, MP4 files out: <code>POST /v1/videos</code>.</p>
<ul>
<li><a href="/docs">API documentation</a> (<a href="/openapi.json">OpenAPI</a>)</li>
<li><a href="/v1/videos">Videos</a></li>
<li><a href="/v1/models">Models</a></li>
<li><a href="/v1/stats">Statistics</a>, <a href="/metrics">metrics</a>, <a href="/health">health</a></li>
</ul>
</html>
"""


@router.get("/")
async def get_root() -> HTMLResponse:
    """A page of links."""
    return HTMLResponse(PAGE)
