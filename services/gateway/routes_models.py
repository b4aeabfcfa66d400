"""GET /models (reference, row 7)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from services.gateway.auth import api_key
from services.gateway.edge import Edge


def model_routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        await edge.tags.tag(api_key(request.headers.get("authorization")))
        data = [{"id": name, "object": "model", "owned_by": edge.owned_by} for name in edge.models.names]
        return {"object": "list", "data": data}

    return router
