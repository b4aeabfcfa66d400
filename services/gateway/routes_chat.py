"""POST /chat/completions."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.gateway.auth import api_key
from services.gateway.edge import Call, Edge
from services.gateway.stream import TIMING_HEADER, ChatResponse
from shared.contracts import limits
from shared.contracts.errors import InvalidRequest, RequestTooLarge
from shared.contracts.ids import RequestId

TRAFFIC_CLASS_HEADER = "x-deepserve-traffic-class"
CLIENT_CLOSED_REQUEST = 499


def chat_routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        received_s = edge.clock.monotonic_s()
        key = api_key(request.headers.get("authorization"))
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        call = Call(
            request=RequestId(request.state.request_id),
            key=key,
            body=body,
            traffic_class=request.headers.get(TRAFFIC_CLASS_HEADER),
            received_s=received_s,
        )
        return ChatResponse(edge, call, timing=request.headers.get(TIMING_HEADER) == "1")

    return router


async def read_body(request: Request) -> bytes:
    """The whole body, within limits.BODY_BYTES_MAX and limits.BODY_TIMEOUT_S.

    Raises RequestTooLarge, InvalidRequest (late), ClientDisconnect.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > limits.BODY_BYTES_MAX:
                    raise RequestTooLarge(f"The request body is larger than {limits.BODY_BYTES_MAX} bytes.")
                parts.append(part)
    except TimeoutError as error:
        raise InvalidRequest("The request body did not arrive in time.") from error
    return b"".join(parts)
