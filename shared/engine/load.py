"""Builds an engine for a worker; torch is imported only when the real model is asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, Literal

import structlog

from shared.contracts.limits import BLOCK_TOKENS_DEFAULT
from shared.contracts.ports import Engine
from shared.engine.hash_engine import HashEngine
from shared.engine.model_config import CARD_FILE, CPU_DOMAIN, read_card

EngineKind = Literal["torch", "hash"]
WAIT_POLICY: Final = ("OMP_WAIT_POLICY", "passive")
"""Threads that spin while they wait for each other cost nothing alone and stall everything when other processes want
the cores too: a step took ten times as long beside busy neighbours (prefill and decode are such neighbours)."""


def let_threads_sleep() -> None:
    """Takes hold only before torch is first imported, when its OpenMP reads the environment; a set value stays."""
    os.environ.setdefault(*WAIT_POLICY)


def load_engine(
    model_dir: Path,
    *,
    pages: int,
    threads: int,
    sequences_max: int,
    kind: EngineKind = "torch",
    block_tokens: int = BLOCK_TOKENS_DEFAULT,
    numeric_domain: str = CPU_DOMAIN,
    rows_per_s: float | None = None,
) -> Engine:
    """A ready engine. `threads`: of torch, for this whole process. `rows_per_s`: cost model of the hash engine.

    Takes seconds: run it in a thread. The self-test runs here; an engine that fails it says so in the log and gets a
    numeric domain of its own, so that its blocks never meet those of engines that passed. Raises SettingsError.
    """
    if kind == "hash":
        return _hash_engine(model_dir, pages, sequences_max, block_tokens, rows_per_s)
    return _torch_engine(model_dir, pages, threads, sequences_max, block_tokens, numeric_domain)


def _hash_engine(
    model_dir: Path, pages: int, sequences_max: int, block_tokens: int, rows_per_s: float | None
) -> HashEngine:
    """With the name, vocabulary and context of the model in `model_dir`, if there is one."""
    if not (model_dir / CARD_FILE).exists():
        return HashEngine(
            pages=pages,
            sequences_max=sequences_max,
            block_tokens=block_tokens,
            rows_per_s=rows_per_s,
            sleep=time.sleep,
        )
    card = read_card(model_dir)
    return HashEngine(
        model=card.name,
        weights=f"hash/1 {card.weights_digest}",
        pages=pages,
        sequences_max=sequences_max,
        block_tokens=block_tokens,
        vocabulary=card.config.vocabulary,
        context_tokens=card.config.context_tokens,
        rows_per_s=rows_per_s,
        sleep=time.sleep,
    )


def _torch_engine(
    model_dir: Path, pages: int, threads: int, sequences_max: int, block_tokens: int, numeric_domain: str
) -> Engine:
    let_threads_sleep()
    import torch

    from shared.engine.model import Model
    from shared.engine.selftest import check_row_invariance
    from shared.engine.torch_engine import TorchEngine
    from shared.engine.weights import load_weights

    log = structlog.get_logger("engine")
    started = time.monotonic()
    torch.set_num_threads(threads)
    card = read_card(model_dir)
    model = Model(card.config, load_weights(model_dir, card))
    loaded = time.monotonic()
    verdict = check_row_invariance(model, block_tokens=block_tokens)
    report = log.info if verdict.exact else log.error
    report(
        "engine.self_tested",
        exact=verdict.exact,
        differs=verdict.differs,
        bits=verdict.bits,
        load_s=round(loaded - started, 2),
        self_test_s=round(time.monotonic() - loaded, 2),
        threads=threads,
    )
    return TorchEngine(
        card,
        model,
        pages=pages,
        sequences_max=sequences_max,
        block_tokens=block_tokens,
        numeric_domain=numeric_domain if verdict.exact else f"{numeric_domain}-inexact",
    )
