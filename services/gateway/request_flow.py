"""One request from received to finished (design, section 2; invariant 11): tag, prompt, place, hold, work, answer.

Whatever ends it (an answer, a stop string, a client that leaves, an error, the deadline), its end goes one way: the
final count is named once, the worker that holds it is told, or the hold is given back if no worker ever did.
"""

from __future__ import annotations

from services.gateway import errors
from services.gateway.edge import Call, Edge
from services.gateway.outbox import Outbox
from services.gateway.prepare import Prepared, traffic_class
from services.gateway.queues import Waiting
from services.gateway.request_work import RequestWork
from services.gateway.stopwatch import Stopwatch
from shared.contracts.errors import AuthenticationFailed, ClaimRefused, DeepServeError, InsufficientBalance, Overloaded
from shared.contracts.ids import AccountId
from shared.contracts.messages import Hold
from shared.contracts.tag import TrafficClass


class RequestFlow:
    """`run` once. Everything the client gets goes through the outbox."""

    def __init__(self, edge: Edge, call: Call, outbox: Outbox) -> None:
        self._edge = edge
        self._call = call
        self._outbox = outbox
        self._stopwatch = Stopwatch(call.received_s)
        self._deadline_s = call.received_s + edge.request_deadline_s

    async def run(self) -> None:
        """Errors of the tree are the client's answer and end here."""
        try:
            await self._admit()
        except DeepServeError as error:
            errors.note("request.refused", error, self._call.request)
            self._outbox.fail(error)
        else:
            self._outbox.end()

    async def _admit(self) -> None:
        edge, call = self._edge, self._call
        if edge.draining():
            raise Overloaded("This server is shutting down. Please retry.")
        tag = await edge.tags.tag(call.key)
        self._lap("tag")
        if not tag.claims.funded:
            raise InsufficientBalance("Insufficient Balance")
        account = tag.claims.account
        edge.accounts.enter(account, tag.claims.concurrency)
        try:
            prepared = await edge.models.prepare(call.body)
            self._lap("prepare")
            self._outbox.stream = prepared.converted.request.stream
            kind = traffic_class(call.traffic_class, tag.claims.traffic_class, has_tools=prepared.converted.has_tools)
            await self._take_turn(prepared, tag.claims.account, kind)
        finally:
            edge.accounts.leave(account)

    async def _take_turn(self, prepared: Prepared, account: AccountId, kind: TrafficClass) -> None:
        waiting = Waiting(
            request=self._call.request,
            account=account,
            cost=len(prepared.tokens) + prepared.max_output_tokens,
            deadline_s=self._deadline_s,
        )
        async with self._edge.gates[prepared.model.name].slot(waiting) as slot:
            self._lap("queue")
            work = RequestWork(self._edge, self._call.request, prepared, slot, self._outbox, self._stopwatch)
            grant = await self._hold(prepared, kind)
            self._lap("hold")
            await work.run(grant, self._deadline_s)

    async def _hold(self, prepared: Prepared, kind: TrafficClass) -> str:
        """The grant. The tag is asked for again: it may have run out while the request waited."""
        edge, call = self._edge, self._call
        tag = await edge.tags.tag(call.key)
        message = Hold(
            tag=tag.text,
            request=call.request,
            model=prepared.model.name,
            user_id=prepared.converted.user_id,
            traffic_class=kind,
            prompt_tokens=len(prepared.tokens),
            max_output_tokens=prepared.max_output_tokens,
            deadline_s=edge.clock.now_s() + self._deadline_s - edge.clock.monotonic_s(),
        )
        try:
            reply = await edge.holds.hold(message)
        except ClaimRefused as error:
            raise AuthenticationFailed(f"Authentication Fails, Your api key: ****{call.key.hint} is invalid") from error
        return reply.grant

    def _lap(self, part: str) -> None:
        self._stopwatch.lap(part, self._edge.clock.monotonic_s())
