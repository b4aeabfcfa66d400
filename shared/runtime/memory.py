"""Heaps of a process: what was loaded at its start, and in a process that handles blocks the C library's own.

By default glibc gives every freed megabyte back to the system and faults the next one in again, page by page: reading
and opening the 47 blocks of a 3,000-token prefix took 70 ms of processor time that way and takes 25 ms this way.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

_ARENA_MAX: Final = -8
_MMAP_THRESHOLD: Final = -3
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD_BYTES: Final = 64 * 2**20
"""Above the largest object (limits.OBJECT_BYTES_MAX); tensors of weights stay outside the heap."""


def keep_freed_memory(kept_bytes: int) -> bool:
    """Up to `kept_bytes` of freed memory stay with the process; one heap for all threads, so that they share it.

    To be called before threads are started. Returns whether the C library knows how (glibc does).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    wanted = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES), (_TRIM_THRESHOLD, kept_bytes))
    return all([mallopt(parameter, value) == 1 for parameter, value in wanted])


def settle_heap() -> None:
    """What the start made lives as long as the process: no later collection of garbage looks at it again.

    Modules, tokenizer and settings are some hundred thousand objects, and looking at all of them held the event loop of
    a gateway for 60 ms. Takes as long itself: for the end of a start.
    """
    gc.collect()
    gc.freeze()
