"""GET /user/balance (reference, row 8): amounts are strings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from services.gateway.auth import api_key
from services.gateway.edge import Edge
from shared.contracts import subjects
from shared.contracts.messages import BalanceQuery, BalanceReply
from shared.runtime import rpc


def balance_routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.get("/user/balance")
    async def balance(request: Request) -> dict[str, Any]:
        tag = await edge.tags.tag(api_key(request.headers.get("authorization")))
        reply = await rpc.call(edge.bus, subjects.BILLING_BALANCE, BalanceQuery(tag=tag.text), BalanceReply)
        info = {
            "currency": reply.currency,
            "total_balance": reply.total_balance,
            "granted_balance": reply.granted_balance,
            "topped_up_balance": reply.topped_up_balance,
        }
        return {"is_available": reply.is_available, "balance_infos": [info]}

    return router
