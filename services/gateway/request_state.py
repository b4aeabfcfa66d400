"""One request as the gateway knows it: attempts, epochs, tokens, the one final count. Pure (invariants 3, 4 and 11).

The table in `contracts.lifecycle` is the only way to change state. An epoch counts when this gateway said `go` to its
claim and has not said so to a later one; whatever comes under another epoch changes nothing, except that the first
completed lookup of any granted prefill fixes the hit count.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from services.gateway.token_log import TokenLog
from shared.contracts import lifecycle
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import DeepServeError, InternalError, from_record
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.lifecycle import RequestEvent, RequestState
from shared.contracts.messages import (
    Acknowledge,
    Claim,
    ClaimReply,
    Finalize,
    FinishReason,
    PrefillTiming,
    Resend,
    TokenEntry,
)

OVER = frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED, RequestState.SETTLED})


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is left of a request that is over, for those who still ask. Thousands of these are kept for minutes: one
    object each, that no collection of garbage looks at (nothing in it can form a cycle)."""

    request: RequestId
    attempt: int
    epoch: Epoch | None
    worker: WorkerId | None
    claimed: bool
    hit_tokens: int | None
    delivered: bytes
    count: int | None
    reason: FinishReason | None
    reasoning: int

    def claim(self, claim: Claim) -> ClaimReply:
        """As `Request.claim`; nothing changes any more."""
        if claim.epoch.attempt != self.attempt or (self.epoch is not None and claim.epoch < self.epoch):
            return self._reply("stale")
        settles = claim.epoch.stage is Stage.PREFILL and self.hit_tokens is not None
        return self._reply("go" if settles else "cancelled")

    def finalize(self) -> tuple[WorkerId, Finalize] | None:
        """As `Request.finalize`."""
        if self.count is None or self.reason is None or self.worker is None:
            return None
        epoch = self.epoch or Epoch(self.attempt, Stage.PREFILL, 0)
        return self.worker, Finalize(
            request=self.request, epoch=epoch, count=self.count, reason=self.reason, reasoning=self.reasoning
        )

    def _reply(self, verdict: Literal["go", "stale", "cancelled"]) -> ClaimReply:
        return ClaimReply(verdict=verdict, delivered=self.delivered, hit_tokens=self.hit_tokens, final=self.count)


class Request:
    """From the hold to the end. `worker`: who holds the current epoch; None before any claim of this attempt."""

    def __init__(self, request: RequestId, *, max_output_tokens: int) -> None:
        self.request = request
        self.state = lifecycle.advance(lifecycle.REQUEST, RequestState.RECEIVED, RequestEvent.HOLD)
        self.attempt = 0
        self.epoch: Epoch | None = None
        self.worker: WorkerId | None = None
        self.prefill_worker: WorkerId | None = None
        self.log = TokenLog(max_output_tokens)
        self.hit_tokens: int | None = None
        self.timing: PrefillTiming | None = None
        self.final: Finalize | None = None
        self.error: DeepServeError | None = None
        self._granted: set[Epoch] = set()
        self._finish: tuple[int, FinishReason] | None = None

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def claimed(self) -> bool:
        """Whether any worker ever got a `go`: if so, the workers end the hold, else the gateway does."""
        return bool(self._granted)

    @property
    def waiting_for(self) -> Stage | None:
        """The stage whose work message is under way and unclaimed, as far as the gateway can tell."""
        if self.over:
            return None
        if self.epoch is None or self.epoch.attempt < self.attempt:
            return Stage.PREFILL
        return Stage.DECODE if self.state is RequestState.HANDED_OFF else None

    @property
    def stage(self) -> Stage:
        """Where the work is, or waits for a worker."""
        if self.waiting_for is not None:
            return self.waiting_for
        return self.epoch.stage if self.epoch is not None else Stage.PREFILL

    @property
    def finish(self) -> FinishReason | None:
        """Why the worker ended the sequence, once every token before that end is here."""
        if self._finish is not None and self._finish[0] == self.log.received:
            return self._finish[1]
        return None

    def publish(self) -> int:
        """The number of the next attempt: claims of earlier ones are stale from now on."""
        self.attempt += 1
        return self.attempt

    def claim(self, claim: Claim) -> ClaimReply:
        """The verdict; `go` makes the claim's epoch the current one. Asking again gets the same answer.

        A request that is over gives its final count along. A prefill that is to settle it, because an earlier try read
        the prompt and did not live to, gets `go` with that count; one whose prompt never ran has nothing to settle.
        """
        if self.over:
            return self.ended().claim(claim)
        if claim.epoch.attempt != self.attempt or (self.epoch is not None and claim.epoch < self.epoch):
            return self._reply("stale")
        if claim.epoch != self.epoch:
            event = RequestEvent.CLAIM_PREFILL if claim.epoch.stage is Stage.PREFILL else RequestEvent.CLAIM_DECODE
            if (self.state, event) not in lifecycle.REQUEST:
                return self._reply("stale")
            self._advance(event)
            self.epoch, self.worker = claim.epoch, claim.worker
            if claim.epoch.stage is Stage.PREFILL:
                self.prefill_worker = claim.worker
            self._granted.add(claim.epoch)
            self._finish = None
        elif claim.worker != self.worker:
            return self._reply("stale")
        return self._reply("go")

    def accept(self, entry: TokenEntry, worker: WorkerId) -> bool:
        """News from a worker; True when the request has something to do. Divergence of the answer becomes `error`."""
        if self.over or entry.epoch not in self._granted:
            return False
        ready = self._take_ready(entry)
        if entry.epoch != self.epoch or worker != self.worker:
            return ready
        if entry.error is not None:
            self.error = from_record(entry.error)
            return True
        try:
            new = self.log.add(entry.first, entry.tokens, entry.logprobs)
            self._note_finish(entry)
        except DeepServeError as error:
            self.error = error
            return True
        if entry.tokens and entry.finish is None and self.state is RequestState.PREFILLING:
            self._advance(RequestEvent.FIRST_TOKEN)
        return ready or new > 0 or self.finish is not None

    def acknowledge(self) -> tuple[WorkerId, Acknowledge] | None:
        """For the current worker: what it may forget."""
        if self.epoch is None or self.worker is None:
            return None
        return self.worker, Acknowledge(request=self.request, epoch=self.epoch, received=self.log.received)

    def resend(self) -> tuple[WorkerId, Resend] | None:
        """For the current worker: “from n”, from the start while the hit count is unknown."""
        if self.epoch is None or self.worker is None:
            return None
        first = self.log.received if self.hit_tokens is not None else 0
        return self.worker, Resend(request=self.request, epoch=self.epoch, first=first)

    def end(self, event: RequestEvent, count: int, reason: FinishReason, reasoning: int = 0) -> None:
        """The one final count. Raises IllegalTransition when the request is over already."""
        self._advance(event)
        epoch = self.epoch or Epoch(self.attempt, Stage.PREFILL, 0)
        self.final = Finalize(request=self.request, epoch=epoch, count=count, reason=reason, reasoning=reasoning)

    def finalize(self) -> tuple[WorkerId, Finalize] | None:
        """For the worker that holds the request; None while it is open, or when no worker ever did."""
        if self.final is None or self.worker is None:
            return None
        return self.worker, self.final

    def ended(self) -> Ended:
        """Of a request that is over."""
        return Ended(
            request=self.request,
            attempt=self.attempt,
            epoch=self.epoch,
            worker=self.worker,
            claimed=self.claimed,
            hit_tokens=self.hit_tokens,
            delivered=self.log.packed(),
            count=self.final.count if self.final else None,
            reason=self.final.reason if self.final else None,
            reasoning=self.final.reasoning if self.final else 0,
        )

    def _advance(self, event: RequestEvent) -> None:
        self.state = lifecycle.advance(lifecycle.REQUEST, self.state, event)

    def _take_ready(self, entry: TokenEntry) -> bool:
        if entry.hit_tokens is None or self.hit_tokens is not None:
            return False
        self.hit_tokens, self.timing = entry.hit_tokens, entry.timing
        return True

    def _note_finish(self, entry: TokenEntry) -> None:
        if entry.finish is None:
            return
        total = entry.first + len(entry.tokens)
        if total < self.log.received:
            raise InternalError(f"the answer ended at {total}, but has {self.log.received} tokens already")
        self._finish = (total, entry.finish)

    def _reply(self, verdict: Literal["go", "stale"]) -> ClaimReply:
        return ClaimReply(
            verdict=verdict,
            delivered=self.log.packed(),
            hit_tokens=self.hit_tokens,
            final=self.final.count if self.final else None,
        )
