"""The console's files: paths, headers, and that they hide no route."""

import posixpath
import re
from importlib.resources import files

import pytest

from evenkeel_moe.api import console
from evenkeel_moe.api.console import CONTENT_SECURITY_POLICY, console_files
from evenkeel_moe.errors import InvalidInput

PAGE = (files("evenkeel_moe") / "console" / "index.html").read_text(encoding="utf-8")


async def test_the_page_needs_no_token_and_may_load_only_from_this_server(anonymous):
    answer = await anonymous.get("/")
    assert answer.status_code == 200 and answer.text == PAGE
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "default-src 'self'" in CONTENT_SECURITY_POLICY
    assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_has_no_inline_script_style_or_handler():
    assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>", PAGE) == []
    assert re.findall(r"<style|\bstyle=|\son\w+=|javascript:", PAGE) == []


@pytest.mark.parametrize("path", sorted(console_files()))
async def test_every_file_is_served_with_its_type_and_a_tag(anonymous, path):
    answer = await anonymous.get(path)
    assert answer.status_code == 200
    kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    page = path == "/" or path.startswith("/runbooks/")
    expected = kind.get(path.rpartition(".")[2], "text/html" if page else "text/plain")
    assert answer.headers["content-type"].split(";")[0] == expected
    assert answer.headers["cache-control"] == "no-cache"
    again = await anonymous.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert again.headers["etag"] == answer.headers["etag"]


async def test_a_client_without_gzip_gets_the_same_file_under_another_tag(anonymous):
    packed = await anonymous.get("/console/app.js")
    plain = await anonymous.get("/console/app.js", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and packed.content == plain.content
    assert "content-encoding" not in plain.headers
    assert packed.headers["etag"] != plain.headers["etag"]


async def test_head_sends_the_headers_alone(anonymous):
    answer = await anonymous.head("/")
    assert answer.status_code == 200 and answer.content == b""
    assert int(answer.headers["content-length"]) > 0


async def test_other_methods_and_other_paths_go_on_to_the_token_check(anonymous):
    for method, path in (("POST", "/"), ("DELETE", "/console/app.js"), ("GET", "/console/none.js")):
        assert (await anonymous.request(method, path)).status_code == 401


async def test_every_module_imports_only_files_that_are_served():
    served = console_files()
    for path, file in served.items():
        if not path.endswith(".js") or "/vendor/" in path:
            continue
        for name in re.findall(r'from "([^"]+)"', file.body.decode()):
            found = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
            assert found in served, (path, name)


def test_a_package_without_rendered_runbooks_says_how_to_render_them(monkeypatch, tmp_path):
    console_files.cache_clear()
    monkeypatch.setattr(console, "_FOLDER", tmp_path)
    with pytest.raises(InvalidInput, match="no rendered runbooks"):
        console_files()


def test_every_link_of_a_runbook_leads_to_a_file_or_a_heading_that_is_served():
    served = console_files()
    pages = {path: file.body.decode() for path, file in served.items() if "/runbooks/" in path}
    assert len(pages) > 25
    for path, text in pages.items():
        assert re.findall(r"<script|<style|\bstyle=|\son\w+=", text) == []
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            target, _, anchor = link.partition("#")
            found = posixpath.normpath(posixpath.join("/runbooks", target)) if target else path
            assert found in served, (path, link)
            assert not anchor or f'id="{anchor}"' in served[found].body.decode(), (path, link)
