"""One request against a world that delivers, repeats, drops and overtakes: what the client sees stays a gapless prefix
without repeats, one epoch counts at a time, and there is one end (invariants 3, 4 and 11)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.request_state import Request
from shared.contracts.block import unpack_tokens
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.lifecycle import RequestEvent
from shared.contracts.messages import Claim, TokenEntry

ID = RequestId("r")
ANSWER = tuple(range(100, 112))
"""The token sequence that every correct worker produces: sampling is a function of seed and position."""


class RequestMachine(RuleBasedStateMachine):
    """`owner`: the model's own idea of whose epoch counts. `last`: of each attempt, the deliveries made so far."""

    @initialize()
    def publish_first(self) -> None:
        self.request = Request(ID, max_output_tokens=len(ANSWER))
        self.attempt = self.request.publish()
        self.deliveries = {(1, Stage.PREFILL): 0, (1, Stage.DECODE): 0}
        self.claims: list[tuple[Epoch, WorkerId]] = []
        self.owner: tuple[Epoch, WorkerId] | None = None
        self.seen: list[int] = []
        self.ends = 0
        self.count: int | None = None

    @rule(stage=st.sampled_from(Stage))
    def claim(self, stage: Stage) -> None:
        """JetStream delivers (again)."""
        if stage is Stage.DECODE and not any(epoch.attempt == self.attempt for epoch, _ in self.claims):
            return  # nobody can have handed it off
        key = (self.attempt, stage)
        self.deliveries[key] = self.deliveries.get(key, 0) + 1
        epoch = Epoch(self.attempt, stage, self.deliveries[key])
        worker = WorkerId(f"{stage.name}-{epoch.attempt}-{epoch.delivery}")
        reply = self.request.claim(Claim(request=ID, epoch=epoch, worker=worker))
        assert unpack_tokens(reply.delivered) == list(ANSWER[: self.request.log.received])
        if self.ends:
            assert reply.verdict != "stale" or (self.owner is not None and epoch < self.owner[0])
            assert reply.final == self.count
        elif self.owner is None or epoch >= self.owner[0]:
            assert reply.verdict == "go"
            self.owner = (epoch, worker)
            self.claims.append(self.owner)
        else:
            assert reply.verdict == "stale"

    @precondition(lambda self: self.owner is not None)
    @rule(back=st.integers(-1, 3), size=st.integers(1, 8))
    def owner_speaks(self, back: int, size: int) -> None:
        """On from where the gateway is, or a little before it, or past a gap; the last token says that it is."""
        assert self.owner is not None
        first = min(max(self.request.log.received - back, 0), len(ANSWER))
        self._say(*self.owner, first, ANSWER[first : first + size])

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), first=st.integers(0, 12), size=st.integers(0, 6))
    def somebody_speaks(self, data: st.DataObject, first: int, size: int) -> None:
        """A worker that ever had a `go`: the truth if its epoch counts, a lie if not."""
        epoch, worker = data.draw(st.sampled_from(self.claims))
        true = ANSWER[first : first + size]
        self._say(epoch, worker, first, true if (epoch, worker) == self.owner else tuple(7 for _ in true))

    def _say(self, epoch: Epoch, worker: WorkerId, first: int, tokens: tuple[int, ...]) -> None:
        entry = TokenEntry(
            request=ID,
            epoch=epoch,
            first=first,
            tokens=tokens,
            hit_tokens=64 if first == 0 else None,
            finish="length" if first + len(tokens) == len(ANSWER) else None,
        )
        before = self.request.log.received
        self.request.accept(entry, worker)
        after = self.request.log.received
        if self.ends or (epoch, worker) != self.owner or first > before:
            assert after == before
        else:
            assert after == max(before, first + len(tokens))

    @precondition(lambda self: not self.ends)
    @rule()
    def show(self) -> None:
        """The flow takes what is new and ends when the worker's end is reached."""
        self.seen += [token for token, _ in self.request.log.take()]
        if self.request.finish is not None:
            assert len(self.seen) == len(ANSWER)
            self._end(RequestEvent.FINISH)

    @precondition(lambda self: not self.ends and self.attempt < 3)
    @rule()
    def publish_again(self) -> None:
        self.attempt = self.request.publish()

    @precondition(lambda self: not self.ends)
    @rule(patience=st.integers(0, 9))
    def cancel(self, patience: int) -> None:
        if patience == 7:
            self._end(RequestEvent.CANCEL)

    def _end(self, event: RequestEvent) -> None:
        self.count = self.request.log.received
        self.request.end(event, self.count, "length" if event is RequestEvent.FINISH else "cancelled")
        self.ends += 1

    @invariant()
    def what_is_seen_is_a_prefix(self) -> None:
        if hasattr(self, "seen"):
            assert self.seen == list(ANSWER[: len(self.seen)])
            assert self.request.error is None
            assert self.ends <= 1
            told = self.request.finalize()
            if told is not None and self.owner is not None:
                assert told[0] == self.owner[1]
                assert told[1].count == self.count


RequestMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRequestMachine = RequestMachine.TestCase
