"""Ranks as threads: a store that they share, and messages through queues instead of a process group."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime_instrument._dump.transport import Receiving, Transport


class Mail:
    """The messages between all ranks, each copied when it is sent."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def box(self, source: int, to: int) -> queue.Queue[torch.Tensor]:
        with self._lock:
            return self._boxes.setdefault((source, to), queue.Queue())

    def left(self) -> int:
        return sum(box.qsize() for box in self._boxes.values())


class QueueTransport(Transport):
    """A transport of one rank. ``fail_after``: the message from which on sending raises."""

    def __init__(self, mail: Mail, rank: int, timeout_s: float = 5.0, fail_after: int | None = None) -> None:
        super().__init__(group=None, device=torch.device("cpu"), timeout_s=timeout_s)
        self._mail, self._rank, self._fail_after = mail, rank, fail_after

    def send(self, data: torch.Tensor, to: int) -> None:
        if self._fail_after is not None and self.messages >= self._fail_after:
            raise ConnectionError("the link is down")
        self.messages += 1
        self.bytes_sent += data.numel()
        self._mail.box(self._rank, to).put(data.clone())

    def start_receiving(self, buffer: torch.Tensor, source: int) -> Receiving:
        return Receiving(self, buffer, buffer, (buffer, source))

    def _wait(self, work: Any) -> None:
        buffer, source = work
        try:
            message = self._mail.box(source, self._rank).get(timeout=self.timeout_s)
        except queue.Empty:
            raise TimeoutError(f"nothing came from rank {source}") from None
        assert message.numel() == buffer.numel(), "a message of another size than announced"
        buffer.copy_(message)


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
