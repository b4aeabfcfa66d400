"""GET /healthz: the process lives. GET /readyz: it can serve, or what it lacks."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response


def health_routes(ready: Callable[[], list[str]]) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/readyz")
    async def readyz() -> Response:
        missing = ready()
        status = {"status": "not ready", "missing": missing} if missing else {"status": "ready"}
        return JSONResponse(status, status_code=503 if missing else 200)

    return router
