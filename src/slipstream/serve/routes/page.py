"""The web page: a chat in the browser that shows which tokens came from the draft. Its files are in the package."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

router = APIRouter(include_in_schema=False)

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _file(name: str, kind: str) -> Response:
    content = files("slipstream.serve").joinpath("page", name).read_bytes()
    return Response(content, media_type=kind, headers=SECURITY)


@router.get("/")
def page() -> Response:
    return _file("page.html", "text/html")


@router.get("/page.js")
def script() -> Response:
    return _file("page.js", "text/javascript")


@router.get("/page.css")
def style() -> Response:
    return _file("page.css", "text/css")
