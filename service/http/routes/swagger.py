"""/docs: Swagger UI from the files of an installed package, so that the page works offline."""

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
# The page has an inline script, and Swagger UI has icons in data: URLs; everything else is blocked.
_POLICY = (
    "default-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def swagger_router(title: str) -> APIRouter:
    """GET /docs and its files, with relative URLs so that a proxy may add a prefix."""
    router = APIRouter(include_in_schema=False)
    assets = Path(str(files("fastapi_offline") / "static"))

    @router.get("/docs")
    async def page() -> Response:
        response = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},
        )
        response.headers["Content-Security-Policy"] = _POLICY
        return response

    @router.get("/docs/{name}")
    async def asset(name: str) -> Response:
        if name not in _FILES:
            raise HTTPException(404)
        return FileResponse(assets / name, media_type=_FILES[name])

    return router
