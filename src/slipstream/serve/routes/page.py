"""The web page: a chat in the browser that shows which tokens came from the draft. Its files are in the package."""

from importlib.resources import files

from fastapi import APIRouter, Request, Response

router = APIRouter(include_in_schema=False)

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


@router.get("/")
@router.get("/page.js")
@router.get("/page.css")
def page(request: Request) -> Response:
    name, kind = FILES[request.url.path]
    content = files("slipstream.serve").joinpath("page", name).read_bytes()
    return Response(content, media_type=kind, headers=SECURITY)
