"""Uploads to a running public page by untrusted visitors."""

import httpx
import pytest

from specdemo.core.safe_io import PUBLIC_FILE_BYTES
from specdemo.ui.security import UPLOADS
from tests.processes import served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder for Gradio's uploads."""
    return tmp_path_factory.mktemp("uploads")


@pytest.fixture(scope="module")
def public_page(folder):
    hosts = "demo.example.org other.example.org"
    environment = {"SPECDEMO_PUBLIC": "1", "GRADIO_TEMP_DIR": str(folder), "SPECDEMO_ALLOW_HOST": hosts}
    with served(**environment) as (_, address), httpx.Client(base_url=address, timeout=60) as client:
        yield client


def upload(page, content=b"{}", name="files", **headers):
    return page.post("/gradio_api/upload", files={name: ("t.json", content, "application/json")}, headers=headers)


def on_disk(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_file_comes_in(public_page, folder):
    own = str(public_page.base_url).rstrip("/")
    for headers in ({}, {"Origin": own}, {"Origin": own, "Sec-Fetch-Site": "same-origin"}):
        assert upload(public_page, b" " * PUBLIC_FILE_BYTES, **headers).status_code == 200
    forwarded = {"Origin": "https://me-demo.hf.space", "X-Forwarded-Host": "me-demo.hf.space"}
    assert upload(public_page, b" " * PUBLIC_FILE_BYTES, **forwarded).status_code == 200
    assert [path.name for path in on_disk(folder)] == ["t.json"]


@pytest.mark.parametrize("headers", [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://evil.example", "X-Forwarded-Host": "evil.example", "Sec-Fetch-Site": "cross-site"},
])  # fmt: skip
def test_another_sites_page_can_send_nothing(public_page, folder, headers):
    before = on_disk(folder)
    assert upload(public_page, b"foreign", **headers).status_code == 403
    assert public_page.post("/gradio_api/queue/join", json={}, headers=headers).status_code == 403
    assert on_disk(folder) == before


@pytest.mark.parametrize("method, path", [("GET", "/"), ("OPTIONS", "/config"), ("POST", "/gradio_api/queue/join")])
def test_a_foreign_host_gets_one_line(public_page, method, path):
    headers = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    answer = public_page.request(method, path, headers=headers)
    assert answer.status_code == 403 and answer.headers["x-content-type-options"] == "nosniff"
    assert "'evil.example'" in answer.text and "--allow-host" in answer.text and "\n" not in answer.text


@pytest.mark.parametrize(
    "host", ["localhost:1", "127.0.0.1", "[::1]:7860", "demo.example.org", "OTHER.example.org:443"]
)
def test_own_and_allowed_hosts_are_answered(public_page, host):
    assert public_page.get("/config", headers={"Host": host}).status_code == 200


HEAD = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n'
PART = HEAD + b"\r\nx\r\n"


@pytest.mark.parametrize("status, body", [
    (400, PART * 2 + b"--b--\r\n"),
    (400, PART),
    (400, PART.replace(b'"files"', b'"other"') + b"--b--\r\n"),
    (400, PART.replace(b'"a"', b'"a"; name="other"') + b"--b--\r\n"),
    (400, HEAD + b'Content-Disposition: form-data; name="other"; filename="b"\r\n\r\nx\r\n--b--\r\n'),
    (400, b""),
    (413, HEAD + b"\r\n" + b"x" * (PUBLIC_FILE_BYTES + 5000) + b"\r\n--b--\r\n"),
], ids=["two", "unfinished", "unnamed", "renamed", "redisposed", "empty", "large"])  # fmt: skip
def test_rejected_uploads_leave_nothing_on_disk(public_page, folder, status, body):
    before = on_disk(folder)
    sent = public_page.post(
        "/gradio_api/upload", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert sent.status_code == status and "\n" not in sent.text
    assert on_disk(folder) == before


@pytest.mark.parametrize("body, line", [
    (b'"' + b"x" * 2_000_000 + b'"', "requests are limited to 1 MB"),
])  # fmt: skip
def test_request_limits_apply_before_parsing(public_page, body, line):
    sent = public_page.post("/gradio_api/queue/join", content=body, headers={"Content-Type": "application/json"})
    assert sent.status_code == 413 and line in sent.text


def test_a_visitor_opens_so_many_files_and_no_more(public_page):
    statuses = [upload(public_page).status_code for _ in range(UPLOADS + 1)]
    assert statuses[-1] == 429 and "wait 10 minutes" in upload(public_page).text
    forged = upload(public_page, **{"X-Forwarded-For": "8.8.8.8"})
    assert forged.status_code == 429  # no proxy was declared
    assert public_page.get("/").status_code == 200
