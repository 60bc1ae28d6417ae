"""The page of links, and the API document behind it."""

import re

import httpx
import pytest

from configs.attention import AttentionOverrides
from server.schemas import VideoRequest


def test_every_link_of_the_page_leads_somewhere(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'href="([^"]+)"', page.text)
    assert len(links) >= 6
    assert {link: client.get(link).status_code for link in links} == dict.fromkeys(links, 200)


def test_the_api_document_describes_the_request(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert schemas["VideoRequest"]["properties"].keys() == VideoRequest.model_fields.keys()
    assert schemas["AttentionOverrides"]["properties"].keys() == AttentionOverrides.model_fields.keys()
    body = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    assert body.keys() == {"application/json", "multipart/form-data"}


def test_every_reference_of_the_api_document_resolves(client: httpx.Client) -> None:
    text = client.get("/openapi.json").text
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names <= schemas.keys()
    assert set(re.findall(r'"\$ref":\s*"([^"]+)"', text)) == {f"#/components/schemas/{n}" for n in names}


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/{video_id}", "/v1/models"])
def test_errors_are_documented_as_the_envelope(client: httpx.Client, path: str) -> None:
    responses = client.get("/openapi.json").json()["paths"][path]["get"]["responses"]
    assert "422" not in responses
    assert responses["4XX"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
