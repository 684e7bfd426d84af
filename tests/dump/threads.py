"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def together(works: Sequence[Callable[[], Any]], timeout_s: float = 20.0) -> list[Any]:
    """Run one function per rank at once; returns what each returned, or raised. None of them may hang."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    return results
