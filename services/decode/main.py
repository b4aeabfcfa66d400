"""The decode worker's process."""

from __future__ import annotations

import sys
from typing import Final

from services.decode.worker import DecodeWorker
from shared.contracts.ports import Engine
from shared.engine.hash_engine import KV_BYTES_TOKEN
from shared.engine.load import load_engine
from shared.engine.model_config import CPU_DOMAIN, read_card
from shared.runtime.config import DecodeSettings
from shared.runtime.service import Service, run
from shared.worker.starting import pages_of, start_worker

BF16_BYTES: Final = 2


def kv_bytes_token(settings: DecodeSettings) -> int:
    """KV of one token over all layers. Raises SettingsError for a folder without a model."""
    if settings.engine == "hash":
        return KV_BYTES_TOKEN
    return BF16_BYTES * read_card(settings.model_dir).config.kv_elements_token()


async def start(service: Service, settings: DecodeSettings) -> None:
    def load() -> Engine:
        return load_engine(
            settings.model_dir,
            pages=pages_of(settings, kv_bytes_token(settings)),
            threads=settings.engine_threads,
            sequences_max=settings.sequences_max,
            kind=settings.engine,
            # The code's own part as well: an engine whose bits changed must not read blocks of the one before.
            numeric_domain=f"{settings.numeric_domain} {CPU_DOMAIN}",
        )

    await start_worker(service, settings, "decode", load, lambda floor: DecodeWorker(floor).handle)


if __name__ == "__main__":
    sys.exit(run(DecodeSettings, start))
