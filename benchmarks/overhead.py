"""``python -m benchmarks.overhead``: what a wrapped call costs while off, armed and capturing.

Off: whether every target is the original object. Armed, with no dump asked for: time per wrapped call, against the same
call unwrapped, in turns. Capturing: time and device operations per micro-batch, against the time that one policy loss
needs for its log-probs at the given size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import slime_instrument
from benchmarks import fake_slime
from benchmarks.timing import Figure, machine
from slime_instrument._hooks.capture import SESSIONS, CaptureSession

__all__ = ["measure"]

_LOSS = "slime.backends.megatron_utils.loss"
# Capturing takes off the modes of others, and with them the one that counts here.
_SEEN_BY_MODES = mock.patch("slime_instrument._dump.contribute.undisturbed", contextlib.nullcontext)


def measure(samples: int, tokens: int, vocabulary: int, repeats: int = 15) -> dict[str, Any]:
    """Keys: ``off``, ``armed`` (seconds per call), ``capture`` (seconds and operations per micro-batch), ``loss_s``."""
    torch.set_num_threads(1)
    slime_instrument.uninstrument()  # importing the package armed it
    modules = fake_slime.install()
    calls = _calls(modules)
    originals = {name: call.target() for name, call in calls.items()}
    off = all(call.target() is originals[name] for name, call in calls.items()) and not slime_instrument.status().armed
    plain = {name: call.bound() for name, call in calls.items()}
    slime_instrument.instrument("benchmark")
    wrapped = {name: call.bound() for name, call in calls.items()}
    not_wrapped = [name for name, call in calls.items() if call.target() is originals[name]]
    armed = {name: _per_call(plain[name], wrapped[name], repeats) for name in calls if name not in not_wrapped}
    capture = _capture(modules, plain, wrapped, samples, tokens, repeats)
    slime_instrument.uninstrument()
    restored = all(call.target() is originals[name] for name, call in calls.items())
    loss = _loss_seconds(samples, tokens, vocabulary, 3)
    return {
        "machine": machine(),
        "off": {"targets_are_the_originals": off, "again_after_uninstrument": restored},
        "not_wrapped": not_wrapped,
        "armed_s_per_call": {name: figure.as_dict() for name, figure in armed.items()},
        "armed_worst_s_per_call": max(figure.median for figure in armed.values()),
        "capture": {**capture, "share_of_loss": capture["seconds"]["median"] / loss.median},
        "loss_s": loss.as_dict(),
        "size": {"samples": samples, "tokens": tokens, "vocabulary": vocabulary},
    }


class _Target:
    """One wrapped place, and a call of it as slime makes it."""

    def __init__(self, owner: Any, name: str, *args: Any, instance: Any = None, **kwargs: Any) -> None:
        self._owner, self._name, self._args, self._kwargs, self._instance = owner, name, args, kwargs, instance

    def target(self) -> Any:
        return vars(self._owner)[self._name]

    def bound(self) -> Callable[[], Any]:
        function, args, kwargs = self.target(), self._args, self._kwargs
        if self._instance is not None:
            function = function.__get__(self._instance)
        return lambda: function(*args, **kwargs)


def _calls(modules: dict[str, Any]) -> dict[str, _Target]:
    loss, data = modules[_LOSS], modules["slime.backends.megatron_utils.data"]
    no_dump = SimpleNamespace(save_debug_train_data=None)
    batch: dict[str, list[int]] = {"partition": []}
    return {
        "policy_loss_function": _Target(loss, "policy_loss_function", no_dump, batch, None, None),
        "get_log_probs_and_entropy": _Target(
            loss, "get_log_probs_and_entropy", None, args=no_dump, unconcat_tokens=None, total_lengths=None,
            response_lengths=None,
        ),
        "DataIterator.get_next": _Target(data.DataIterator, "get_next", ["tokens"], instance=data.DataIterator()),
        "train_one_step": _Target(modules["slime.backends.megatron_utils.model"], "train_one_step", no_dump, 0, 0),
        "log_rollout_data": _Target(data, "log_rollout_data", 0, no_dump, {}),
        "save_debug_train_data": _Target(
            modules["slime.utils.train_dump_utils"], "save_debug_train_data", no_dump, rollout_id=0, rollout_data={}
        ),
    }  # fmt: skip


def _per_call(plain: Callable[[], Any], wrapped: Callable[[], Any], repeats: int, number: int = 5000) -> Figure:
    """Seconds that wrapping adds to one call."""
    return Figure.of([(_loop(wrapped, number) - _loop(plain, number)) / number for _ in range(repeats)])


def _loop(call: Callable[[], Any], number: int) -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    return time.perf_counter() - began


def _capture(
    modules: dict[str, Any], plain: Any, wrapped: Any, samples: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """One micro-batch's policy loss whose log-probs are known already: what is left is capturing them."""
    modules[_LOSS].result = None, {"log_probs": [torch.randn(tokens) for _ in range(samples)]}
    positions = list(range(samples))
    loss = modules[_LOSS].policy_loss_function
    args = SimpleNamespace(save_debug_train_data="x")
    seconds, operations = [], []
    for _ in range(repeats):
        session = CaptureSession(0, {"partition": positions, "response_lengths": [tokens] * samples})
        with SESSIONS.opened(session), _SEEN_BY_MODES, _CountingMode() as counted:  # type: ignore[no-untyped-call]
            loss(args, {"partition": positions}, None, None)
        captured = session.collected()
        if captured is None or len(captured[0]) != samples:
            raise RuntimeError("the capture is not whole")
        operations.append(counted.kernels)
        session = CaptureSession(0, {"partition": positions, "response_lengths": [tokens] * samples})
        with SESSIONS.opened(session):
            began = time.perf_counter()
            loss(args, {"partition": positions}, None, None)
            seconds.append(time.perf_counter() - began)
    modules[_LOSS].result = None
    return {"seconds": Figure.of(seconds).as_dict(), "operations": max(operations)}


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Operations that make or change memory; views are none."""

    kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in ("detach", "split_with_sizes", "split"):
            self.kernels += 1
        return func(*args, **(kwargs or {}))


def _loss_seconds(samples: int, tokens: int, vocabulary: int, repeats: int) -> Figure:
    """Log-probs of the chosen tokens of one micro-batch. Every sample reads the same logits: they would not fit into
    this machine otherwise, and the arithmetic is the same."""
    logits, chosen = torch.randn(tokens, vocabulary), torch.randint(0, vocabulary, (tokens,))

    def one() -> float:
        began = time.perf_counter()
        for _ in range(samples):
            (logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(1)).sum()
        return time.perf_counter() - began

    return Figure.of([one() for _ in range(repeats)])


def _table(found: dict[str, Any]) -> str:
    lines = [f"{machine()}; off: every target is the original object: {found['off']['targets_are_the_originals']}", ""]
    lines.append(f"{'armed, no dump asked for':34}{'added per call, µs':>22}")
    for name, figure in found["armed_s_per_call"].items():
        lines.append(f"{name:34}{1e6 * figure['median']:>10.2f} ({1e6 * figure['q1']:.2f}–{1e6 * figure['q3']:.2f})")
    capture, size = found["capture"], found["size"]
    lines += [
        "",
        f"capturing {size['samples']} x {size['tokens']} log-probs: {1e6 * capture['seconds']['median']:.0f} µs and "
        f"{capture['operations']} operation(s) per micro-batch",
        f"the loss over a vocabulary of {size['vocabulary']}: {found['loss_s']['median']:.2f} s; capture is "
        f"{100 * capture['share_of_loss']:.4f} % of it",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = measure(given.samples, given.tokens, given.vocabulary)
    print(json.dumps(found, indent=2) if given.json else _table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
