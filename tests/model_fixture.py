"""The real small model for tests: converted once into `.data/test-model`, loaded at most once in a session."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from shared.engine.convert import convert
from shared.engine.load import let_threads_sleep
from shared.engine.model_config import ModelCard, read_card

if TYPE_CHECKING:
    from torch import Tensor

    from shared.engine.model import Model

# A plugin is imported before any test module, so before torch.
let_threads_sleep()

TEST_MODEL = Path(__file__).resolve().parent.parent / ".data" / "test-model"
SOURCE = "smollm2"
THREADS = 2


class RealModel(NamedTuple):
    card: ModelCard
    weights: dict[str, Tensor]
    model: Model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of the converted model. Safe beside other test runs: one converts, the others wait."""
    TEST_MODEL.parent.mkdir(exist_ok=True)
    with TEST_MODEL.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        convert(SOURCE, TEST_MODEL, lambda line: print(line, file=sys.stderr))
    return TEST_MODEL


@pytest.fixture(scope="session")
def real_model(model_dir: Path) -> RealModel:
    """The model in bf16 with its mapped weights. torch is imported here and not before."""
    import torch

    from shared.engine.model import Model
    from shared.engine.weights import load_weights

    torch.set_num_threads(THREADS)
    card = read_card(model_dir)
    weights = load_weights(model_dir, card)
    return RealModel(card, weights, Model(card.config, weights))
