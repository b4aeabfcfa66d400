"""The engine's port over any device: sequences, pages, plans, finishes. No torch.

Owns the sequences and the page table (invariant 5). A `Device` owns the KV bytes and the arithmetic: TorchDevice has
the model, HashDevice a hash in its place, so that both engines share every rule of this file. Not thread-safe.

    [0, loaded)             positions whose KV came as payloads
    [0, computed)           positions whose KV is in the pages
    [0, known)              tokens known: the prompt, delivered answer tokens, drawn ones
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shared.contracts.errors import InvalidRequest, OutOfPages
from shared.contracts.ids import RequestId
from shared.contracts.messages import FinishReason, Sampling, TokenLogprob
from shared.contracts.ports import EngineProfile, Produced, SequenceSpec
from shared.engine.page_table import PageTable
from shared.engine.planner import Pending, make_plan, pages_for


class Rows(NamedTuple):
    """Rows of one sequence in a step: positions [start, start + len(tokens)), KV to be written into `pages`.

    `sampling`: None unless the row after the last is to be drawn. The device does not change `pages`.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sampling: Sampling | None


class Drawn(NamedTuple):
    token: int
    logprob: TokenLogprob | None


class Device(Protocol):
    """KV pages and arithmetic behind `PagedEngine`."""

    def check_payload(self, payload: bytes | memoryview, tokens: int) -> None:
        """Raises BlockMiss(shape) when it is not the KV of `tokens` tokens."""
        ...

    def write(self, page: int, payload: bytes | memoryview, tokens: int) -> None: ...

    def read(self, page: int, tokens: int) -> bytes: ...

    def run(self, rows: Sequence[Rows]) -> list[Drawn | None]:
        """One forward pass; for each entry the drawn token, or None where `sampling` is None."""
        ...


class _Sequence:
    """Mutable state of one sequence; `limit` is the number of answer tokens at which it has reached its length."""

    def __init__(self, spec: SequenceSpec, limit: int, loaded: int) -> None:
        self.request = spec.request
        self.tokens = list(spec.tokens)
        self.prompt_tokens = spec.prompt_tokens
        self.limit = limit
        self.sampling = spec.sampling
        self.computed = loaded
        self.finish: FinishReason | None = self._finish_now()
        self.told = False
        """Whether `finish` was reported."""

    @property
    def answered(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.finish = self._finish_now()

    def _finish_now(self) -> FinishReason | None:
        if self.answered and self.tokens[-1] in self.sampling.stop_tokens:
            return "stop"
        return "length" if self.answered >= self.limit else None


class PagedEngine:
    """Implements `shared.contracts.ports.Engine`."""

    def __init__(self, profile: EngineProfile, device: Device, *, tile_pages: int) -> None:
        self.profile = profile
        self._device = device
        self._table = PageTable(profile.pages, tile_pages)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._turn = 0

    def add(self, spec: SequenceSpec) -> None:
        """As the port says."""
        limit, loaded = self._check(spec)
        if len(self._sequences) >= self.profile.sequences_max:
            raise OutOfPages(f"all {self.profile.sequences_max} sequences are taken")
        sequence = _Sequence(spec, limit, loaded)
        self._table.open(spec.request, self._first_pages(sequence))
        self._sequences[spec.request] = sequence
        pages = self._table.table(spec.request)
        for page, payload in zip(pages, spec.prefix, strict=False):
            self._device.write(page, payload, self.profile.block_tokens)
        if spec.tail is not None:
            self._device.write(pages[len(spec.prefix)], *spec.tail)

    def step(self, budget_rows: int) -> list[Produced]:
        """As the port says."""
        news = [self._tell(s, s.answered, ()) for s in self._sequences.values() if s.finish and not s.told]
        if budget_rows < 1:
            return news
        plan = make_plan(
            [self._pending(s) for s in self._sequences.values() if not s.finish],
            budget_rows=budget_rows,
            block_tokens=self.profile.block_tokens,
            pages_free=self._table.pages_free,
            turn=self._turn,
        )
        self._turn += 1
        if not plan.spans:
            return news + self._break_deadlock(plan.starved)
        rows = []
        for span in plan.spans:
            self._table.grow(span.request, span.pages)
            s = self._sequences[span.request]
            draws = s.sampling if span.stop == len(s.tokens) else None
            rows.append(Rows(s.tokens[span.start : span.stop], span.start, self._table.table(span.request), draws))
        for span, drawn in zip(plan.spans, self._device.run(rows), strict=True):
            news.append(self._advance(self._sequences[span.request], span.stop, drawn))
        return news

    def export(self, request: RequestId, block: int, tokens: int) -> bytes:
        """As the port says. Asking for positions that are not computed is a bug of the caller."""
        sequence = self._sequences[request]
        assert 0 < tokens <= self.profile.block_tokens
        assert block * self.profile.block_tokens + tokens <= sequence.computed
        return self._device.read(self._table.table(request)[block], tokens)

    def remove(self, request: RequestId) -> None:
        """As the port says."""
        if self._sequences.pop(request, None) is not None:
            self._table.close(request)
        if not self._sequences:
            self._table.check()

    def pages_free(self) -> int:
        return self._table.pages_free

    def _check(self, spec: SequenceSpec) -> tuple[int, int]:
        """(limit of answer tokens, loaded positions). Raises InvalidRequest, BlockMiss."""
        p = self.profile
        if spec.request in self._sequences:
            raise InvalidRequest(f"request {spec.request} is already in the engine")
        if not 0 < spec.prompt_tokens <= len(spec.tokens):
            raise InvalidRequest(f"{spec.prompt_tokens} prompt tokens of {len(spec.tokens)} known")
        if spec.prompt_tokens >= p.context_tokens or len(spec.tokens) > p.context_tokens:
            raise InvalidRequest(f"{len(spec.tokens)} tokens leave no room in a context of {p.context_tokens}")
        if spec.max_new_tokens < 1:
            raise InvalidRequest("max_new_tokens is at least 1")
        if min(spec.tokens) < 0 or max(spec.tokens) >= p.vocabulary:
            raise InvalidRequest(f"a token is outside the vocabulary of {p.vocabulary}")
        for payload in spec.prefix:
            self._device.check_payload(payload, p.block_tokens)
        loaded = len(spec.prefix) * p.block_tokens
        if spec.tail is not None:
            payload, tokens = spec.tail
            if not 0 < tokens < p.block_tokens:
                raise InvalidRequest(f"a tail of {tokens} tokens is not part of a block of {p.block_tokens}")
            self._device.check_payload(payload, tokens)
            loaded += tokens
        if loaded >= len(spec.tokens):
            raise InvalidRequest(f"{loaded} positions loaded of {len(spec.tokens)} known: at least one is computed")
        return min(spec.max_new_tokens, p.context_tokens - spec.prompt_tokens), loaded

    def _first_pages(self, s: _Sequence) -> int:
        """Pages for the tokens known and one more to grow into, but no more than the sequence can ever fill: the last
        token drawn is never computed."""
        block = self.profile.block_tokens
        return min(pages_for(len(s.tokens), block) + 1, pages_for(s.prompt_tokens + s.limit - 1, block))

    def _pending(self, s: _Sequence) -> Pending:
        return Pending(s.request, len(s.tokens), s.computed, len(self._table.table(s.request)))

    def _advance(self, s: _Sequence, stop: int, drawn: Drawn | None) -> Produced:
        s.computed = stop
        first = s.answered
        if drawn is None:
            return self._tell(s, first, ())
        s.append(drawn.token)
        return self._tell(s, first, (drawn.token,), None if drawn.logprob is None else (drawn.logprob,))

    def _tell(
        self, s: _Sequence, first: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None = None
    ) -> Produced:
        s.told = s.finish is not None
        return Produced(
            request=s.request, first=first, tokens=tokens, logprobs=logprobs, computed=s.computed, finish=s.finish
        )

    def _break_deadlock(self, starved: Sequence[RequestId]) -> list[Produced]:
        """Nothing can run for want of pages. If a finished sequence is about to give its pages back, wait for that;
        else the youngest ends, so that the others go on."""
        if not starved or any(s.finish for s in self._sequences.values()):
            return []
        youngest = next(s for s in reversed(self._sequences.values()) if s.request in starved)
        youngest.finish = "insufficient_system_resource"
        return [self._tell(youngest, youngest.answered, ())]
