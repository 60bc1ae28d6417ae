"""Requests that mean no good, made from a seed: number i is always the same bytes.

Knows: HTTP as bytes, and which fields the API has. Does not know: how the server answers, or that it must.
"""

import gzip
import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1024 * 1024
JSON = b"application/json"
TEXTS = (
    *(
        "",
        " ",
        "\x00",
        "a\x00b",
        "\u202e",
        "\ufeff",
        "\U0001f4a3" * 50,
        "e\u0301",
        "\r\nX-Evil: 1",
        "%00",
        "%s%n{}",
    ),
    *(
        "'; DROP TABLE jobs; --",
        "<script>alert(1)</script>",
        "${jndi:ldap://x}",
        "../../etc/passwd",
        "-",
        "NaN",
    ),
    *("1" * 400, "\u0661\u0662", "0x10", "1e309", "-1", "true", "null", "[]", "{}", "a" * 70_000),
)
NUMBERS = (*(0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**400, -(10**30)), *(1e308, -0.0, 1e-320, 0.1))
SIZES = (
    "9" * 5000 + "x64",
    "0x0",
    "-64x64",
    "1x1",
    "64x",
    "x64",
    "99999999999x99999999999",
    "64x64x64",
    "\uff16\uff14x64",
    "6.4e1x64",
)
URLS = (
    *("file:///etc/passwd", "http://169.254.169.254/latest", "gopher://127.0.0.1:25/x", "http://[::1]:1/"),
    *(
        "https://user:pw@127.0.0.1/",
        "https://0x7f000001/",
        "//evil",
        "javascript:alert(1)",
        "https://\u0661.com",
    ),
)
FIELDS = (
    *("prompt", "negative_prompt", "model", "size", "seconds", "num_frames", "fps", "num_inference_steps"),
    *(
        "guidance_scale",
        "seed",
        "priority",
        "deadline_seconds",
        "checkpoint_every",
        "webhook_url",
        "metadata",
    ),
    *("attention", "manifest", "input_reference"),
)
PATHS = (
    *(
        "../../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/jobs.sqlite3",
        "..%5c..%5cwin.ini",
    ),
    *(
        "%00",
        "video_%00",
        ".",
        "..",
        "%252e%252e",
        "%c0%ae%c0%ae",
        "%ff%fe",
        "%",
        "%zz",
        "video_" + "a" * 3000,
    ),
    *("jobs.sqlite3", "video_0%2f..%2fjobs.sqlite3", "~root", "video_%0d%0aX-Evil:%201", "*", "%F0%9F%92%A3"),
)


@dataclass(frozen=True)
class Attack:
    """Bytes in pieces with pauses between. ``is_whole``: they are something that a server must answer."""

    kind: str
    pieces: tuple[bytes, ...]
    method: str = "GET"
    pause_seconds: float = 0.0
    is_whole: bool = True


def attack(seed: int, number: int, known_ids: Sequence[str]) -> Attack:
    """Attack ``number`` of this seed; ``known_ids`` are jobs that exist."""
    source = random.Random(f"{seed}:{number}")
    make = KINDS[number % len(KINDS)]
    return make(source, known_ids)


def _request(
    method: str, path: str | bytes, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes | None = None
) -> bytes:
    target = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    lines = [method.encode() + b" " + target + b" HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close"]
    lines += [name + b": " + value for name, value in headers]
    if body is not None:
        lines.append(b"Content-Length: " + str(len(body)).encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


def _post(kind: str, body: bytes, media_type: bytes = JSON, *headers: tuple[bytes, bytes]) -> Attack:
    sent = _request("POST", "/v1/videos", [(b"Content-Type", media_type), *headers], body)
    return Attack(kind, (sent,), "POST")


def _some_path(source: random.Random, known_ids: Sequence[str]) -> str:
    video = source.choice([*known_ids, *PATHS])
    tail = source.choice(["", "/content", "/events", "/manifest", "/cancel", "/", "/../x", "/content/x"])
    return source.choice([f"/v1/videos/{video}{tail}", f"/{video}", f"/v1/{video}", f"//{video}"])


def _path(source: random.Random, known_ids: Sequence[str]) -> Attack:
    method = source.choice(["GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS"])
    path = _some_path(source, known_ids[:1] if method in {"GET", "HEAD"} else ())
    return Attack("path", (_request(method, path, body=b"" if method == "POST" else None),), method)


def _query(source: random.Random, known_ids: Sequence[str]) -> Attack:
    names = ["limit", "after", "order", "status", "variant", "x", "limit%00", "expires", "signature"]
    values = [*PATHS, "NaN", "-1", "1e9", "%F0%9F", "video", "a" * 5000, "1&limit=2", "desc%00"]
    pairs = "&".join(f"{source.choice(names)}={source.choice(values)}" for _ in range(source.randint(1, 40)))
    path = source.choice(["/v1/videos", f"/v1/videos/{known_ids[0]}/content", "/v1/models", "/metrics"])
    return Attack("query", (_request("GET", f"{path}?{pairs}"),))


def _header(source: random.Random, known_ids: Sequence[str]) -> Attack:
    names = [
        *(b"Range", b"If-Range", b"If-None-Match", b"Last-Event-ID", b"Idempotency-Key", b"Authorization"),
        *(b"X-Request-Id", b"Content-Type", b"Accept", b"Cookie", b"Origin", b"X-Forwarded-For", b"Expect"),
        *(b"Upgrade", b"Content-Encoding", b"TE", b"Host"),
    ]
    values = [
        *(b"", b"\xff\xfe", b"a" * 9000, b"bytes=0-0,1-1,2-2", b"bytes=-0", b"bytes=9" + b"9" * 300 + b"-"),
        *(
            b"bytes=" + b"0-," * 2000,
            b'W/"',
            b"1" * 5000,
            b"Bearer " + b"x" * 5000,
            b"Basic \x80",
            b"100-continue",
        ),
        *(b"multipart/form-data; boundary=", b"text/html;q=" + b"9" * 400, b"null", b"chunked", b"*/*"),
        *(b"../../etc/passwd", b"{}", b"a\tb", b"\xe2\x80\xae", b"gzip, deflate"),
    ]
    headers = [(source.choice(names), source.choice(values)) for _ in range(source.randint(1, 6))]
    path = source.choice(
        [f"/v1/videos/{known_ids[0]}/content", f"/v1/videos/{known_ids[0]}/events", "/v1/videos"]
    )
    return Attack("header", (_request("GET", path, headers),))


def _many_headers(source: random.Random, known_ids: Sequence[str]) -> Attack:
    count, length = source.choice([(2000, 5), (20_000, 5), (3, 60_000), (1, 300_000), (500, 200)])
    headers = [(f"X-{number}".encode(), b"a" * length) for number in range(count)]
    return Attack("many headers", (_request("GET", "/v1/videos", headers),))


def _method(source: random.Random, known_ids: Sequence[str]) -> Attack:
    method = source.choice(
        ["TRACE", "CONNECT", "PATCH", "PROPFIND", "get", "G" * 3000, "OPTIONS", "PURGE", "\x00", "", "PRI"]
    )
    path = source.choice(["/", "*", "/v1/videos", "127.0.0.1:80", "http://169.254.169.254/", "http://[", "?"])
    return Attack("method", (_request(method, path),), method if method.isupper() else "GET")


def _length(source: random.Random, known_ids: Sequence[str]) -> Attack:
    body = b'{"prompt": "x"}'
    length = source.choice([b"-1", b"x", b"1e3", b"0x10", b"9" * 400, b" ", b"+5", b"5, 6", b"99999999999"])
    lines = b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    more = source.choice([b"", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"])
    sent = lines + b"Content-Length: " + length + b"\r\n" + more + b"\r\n" + body
    return Attack("content length", (sent,), "POST", is_whole=not length.isdigit() or bool(more))


def _chunks(source: random.Random, known_ids: Sequence[str]) -> Attack:
    head = _request("POST", "/v1/videos", [(b"Content-Type", JSON), (b"Transfer-Encoding", b"chunked")])
    whole = source.choice(
        [b"zz\r\n{}\r\n", b"-5\r\n{}", b"2;" + b"x" * 70_000 + b"\r\n{}\r\n0\r\n\r\n", b"\x00\r\n"]
    )
    endless = source.choice([b"2\r\n{}\r\n", b"ffffffff\r\n{}", b"5\r\n{}\r\n0\r\n", b"1\r\n{\r\n" * 5000])
    if source.random() < 0.5:
        return Attack(
            "chunks", (head, whole), "POST", is_whole=b"0\r\n\r\n" in whole or whole[:1] in b"z-\x00"
        )
    return Attack("chunks", (head, endless), "POST", is_whole=False)


def _value(source: random.Random, depth: int = 0) -> Any:
    pick = source.randrange(10 if depth < 3 else 8)
    if pick == 8:
        return [_value(source, depth + 1) for _ in range(source.randint(0, 4))]
    if pick == 9:
        return {
            source.choice([*FIELDS, *TEXTS[:8]]): _value(source, depth + 1)
            for _ in range(source.randint(0, 4))
        }
    options: tuple[Sequence[Any], ...] = (TEXTS, NUMBERS, SIZES, URLS, (True, False, None))
    return source.choice(options[pick % len(options)])


def _fields(source: random.Random, known_ids: Sequence[str]) -> Attack:
    body = {"prompt": "x"} | {source.choice(FIELDS): _value(source) for _ in range(source.randint(1, 4))}
    return _post("fields", json.dumps(body).encode("utf-8", "surrogatepass"))


def _json(source: random.Random, known_ids: Sequence[str]) -> Attack:
    depth = source.choice([100, 5000, 100_000])
    bodies = [
        *(
            b"[" * depth,
            b'{"a":' * depth,
            b'{"prompt":' * depth + b"1" + b"}" * depth,
            b"[" * depth + b"]" * depth,
        ),
        *(
            b'{"prompt": "x", "prompt": "y"}',
            b'{"prompt": "x", "seed": NaN}',
            b'{"prompt": "x", "fps": Infinity}',
        ),
        *(
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "\\udc00\\ud800"}',
            b'{"prompt": "x\\u0000"}',
            b'{"prompt": "\xff"}',
        ),
        *(
            b"\xef\xbb\xbf" + b'{"prompt": "x"}',
            '{"prompt": "x"}'.encode("utf-16"),
            b'{"prompt": "x"',
            b"",
            b"\x00",
        ),
        *(
            b'{"prompt": "x", "seed": ' + b"9" * 50_000 + b"}",
            b'{"prompt": "x", "seed": 1e' + b"9" * 5000 + b"}",
        ),
        *(
            b'{"prompt": "' + b"a" * (2 * MIB) + b'"}',
            b"[" + b"1," * 400_000 + b"1]",
            b'{"' + b"k" * 500_000 + b'": 1}',
        ),
        *(
            b'{"prompt": "x", "__proto__": {}}',
            b'{"prompt": "x", "\\ud800": 1}',
            b'{"prompt": "x"} {"prompt": "y"}',
        ),
        b'{"prompt": "x", "metadata": {' + b",".join(b'"k%d": "v"' % n for n in range(5000)) + b"}}",
        b'{"prompt": "x", "metadata": {"\\ud800": "\\udfff"}}',
        b'{"prompt": "x", "attention": ' + b'{"backend":' * 500 + b"1" + b"}" * 500 + b"}",
    ]
    media_type = source.choice(
        [JSON, JSON, b"application/json; charset=utf-16", b"text/json", b"APPLICATION/JSON"]
    )
    return _post("json", source.choice(bodies), media_type)


def _form(parts: Sequence[tuple[bytes, bytes]], boundary: bytes = b"b", end: bytes = b"--") -> bytes:
    body = b"".join(
        b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n" for head, content in parts
    )
    return body + b"--" + boundary + end + b"\r\n"


def _part(name: bytes, file: bytes | None = None) -> bytes:
    suffix = b"" if file is None else b'; filename="' + file + b'"\r\nContent-Type: image/png'
    return b'Content-Disposition: form-data; name="' + name + b'"' + suffix


def _multipart(source: random.Random, known_ids: Sequence[str]) -> Attack:
    prompt = (_part(b"prompt"), b"x")
    nested = [
        b"a[b][c][d][e]",
        b"attention[",
        b"attention[]]",
        b"[x]",
        b"metadata[\x00]",
        b"metadata[a][b]",
        b"a[]" * 99,
    ]
    forms = [
        _form([prompt] * 2),
        _form([(_part(b"f%d" % number), b"") for number in range(1500)]),
        _form([(_part(b"f%d" % number, b"x"), b"x") for number in range(1500)]),
        _form([prompt, (_part(source.choice(nested)), b"1")]),
        _form([(_part(b"prompt"), b"\xff\xfe\x00")]),
        _form([(_part(b"prompt", b"../../../etc/cron.d/x"), b"x")]),
        _form([(b"X: " + b"a" * 100_000, b"x")]),
        _form([(b"Content-Disposition: form-data", b"x"), (b"", b"")]),
        _form([(_part(b"prompt") + b"\r\nContent-Type: text/plain; charset=utf-7", b"+AAA-")]),
        _form([(_part(b"prompt") + b"\r\nContent-Type: text/plain; charset=unknown-8", b"x")]),
        _form([(_part(b"prompt") + b"\r\nContent-Transfer-Encoding: base64", b"!!!")]),
        _form([prompt], end=b""),
        _form([(_part(b"prompt"), b"a" * (2 * MIB))]),
        *(b"", b"--b", b"--b--", b"\r\n" * 50_000, b"--b\r\n" * 20_000, b"x" * 10_000),
    ]
    boundary = source.choice(
        [b"b", b"b", b"b", b"", b"x", b'"b', b"b" * 5000, b"b\xff", b"b; charset=utf-16"]
    )
    return _post("multipart", source.choice(forms), b"multipart/form-data; boundary=" + boundary)


def _png(width: int, height: int, packed: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def _zip_bomb() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../evil", b"\x00" * (4 * MIB))
    return target.getvalue()


ZEROS = zlib.compress(b"\x00" * (32 * MIB), 9)
GZIPPED = gzip.compress(b" " * (32 * MIB), 9)
ZIP = _zip_bomb()


def _upload(source: random.Random, known_ids: Sequence[str]) -> Attack:
    svg = b'<!DOCTYPE s [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><svg xmlns="http://www.w3.org/2000/svg">&b;</svg>'
    files = [
        *(
            b"",
            b"\x00" * 10_000,
            b"not a picture",
            svg,
            b"GIF89a" + b"\xff" * 100,
            b"\xff\xd8\xff\xe0" + b"\x00" * 500,
        ),
        *(
            _png(50_000, 50_000, ZEROS),
            _png(2**31 - 1, 2**31 - 1, ZEROS),
            _png(0, 0, b""),
            _png(64, 64, b"junk"),
        ),
        *(_png(64, 64, ZEROS)[: source.randrange(8, 200)], ZIP, ZEROS, GZIPPED, b"%PDF-1.7\n" + b"x" * 5000),
        *(
            b"RIFF" + struct.pack("<I", 2**32 - 1) + b"WEBPVP8L",
            b"BM" + b"\xff" * 60,
            b"II*\x00" + b"\xff" * 60,
        ),
        *(b"#!/bin/sh\nreboot\n", source.randbytes(50_000), b"\x89PNG\r\n\x1a\n" * 1000, b"a" * (3 * MIB)),
    ]
    names = [
        b"x.png",
        b"../../../../tmp/evil.png",
        b"/etc/passwd",
        b"..\\..\\x.png",
        b"x" * 5000,
        b"a\x00.png",
        b"",
    ]
    field = source.choice(
        [b"input_reference", b"input_reference", b"prompt", b"manifest", b"attention[x]", b"x"]
    )
    body = _form([(_part(b"prompt"), b"x"), (_part(field, source.choice(names)), source.choice(files))])
    return _post("upload", body, b"multipart/form-data; boundary=b")


def _data_url(source: random.Random, known_ids: Sequence[str]) -> Attack:
    import base64

    packed = source.choice([_png(50_000, 50_000, ZEROS), ZIP, b"", b"\xff" * 1000])
    text = source.choice(
        ["data:image/png;base64,", "data:,", "data:image/svg+xml;base64,", "data:" + "a" * 9999 + ","]
    )
    value = text + source.choice([base64.b64encode(packed).decode(), "!!!", "=" * 1000, "%00" * 1000])
    return _post("data url", json.dumps({"prompt": "x", "input_reference": value}).encode())


def _encoded(source: random.Random, known_ids: Sequence[str]) -> Attack:
    name = source.choice([b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip, gzip", b"x" * 3000])
    body = source.choice([GZIPPED, ZEROS, gzip.compress(b'{"prompt": "x"}'), b"\x1f\x8b\x08" + b"\xff" * 500])
    return _post("encoded body", body, JSON, (b"Content-Encoding", name))


def _slow(source: random.Random, known_ids: Sequence[str]) -> Attack:
    sent = _request(
        "POST", "/v1/videos", [(b"Content-Type", JSON)], b'{"prompt": 1, "a": "' + b"x" * 60 + b'"}'
    )
    size = source.choice([7, 11, 40])
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    is_whole = source.random() < 0.5
    if not is_whole:
        pieces = pieces[: source.randint(1, len(pieces) - 1)]
    return Attack("slow", tuple(pieces), "POST", source.choice([0.001, 0.01]), is_whole)


def _garbage(source: random.Random, known_ids: Sequence[str]) -> Attack:
    binary = source.randbytes(source.choice([1, 100, 5000, 100_000]))
    known = source.choice(
        [
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\r\n" * 1000,
            b"GET / HTTP/0.9\r\n\r\n",
        ]
    )
    return Attack("garbage", (source.choice([binary, known, known + binary]),), is_whole=False)


def _mutant(source: random.Random, known_ids: Sequence[str]) -> Attack:
    valid = _request(
        "POST", "/v1/videos", [(b"Content-Type", JSON)], b'{"prompt": "x", "num_inference_steps": 1}'
    )
    changed = bytearray(valid)
    for _ in range(source.randint(1, 8)):
        place = source.randrange(len(changed))
        change = source.randrange(3)
        if change == 0:
            changed[place] = source.randrange(256)
        elif change == 1:
            del changed[place]
        else:
            changed.insert(place, source.randrange(256))
    return Attack("mutant", (bytes(changed),), "POST", is_whole=False)


def _pipeline(source: random.Random, known_ids: Sequence[str]) -> Attack:
    one = b"GET /v1/videos/" + source.choice(PATHS[:8]).encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    return Attack("pipeline", (one * source.randint(2, 300),))


def _stream(source: random.Random, known_ids: Sequence[str]) -> Attack:
    last = source.choice([b"", b"-1", b"9" * 30, b"\xff", b"1e3", b"0"])
    sent = _request("GET", f"/v1/videos/{source.choice(known_ids)}/events", [(b"Last-Event-ID", last)])
    return Attack("stream", (sent,))


KINDS: tuple[Callable[[random.Random, Sequence[str]], Attack], ...] = (
    *(
        _path,
        _query,
        _header,
        _fields,
        _json,
        _multipart,
        _upload,
        _mutant,
        _fields,
        _path,
        _multipart,
        _json,
    ),
    *(_many_headers, _method, _length, _chunks, _data_url, _encoded, _slow, _garbage, _pipeline, _stream),
)
