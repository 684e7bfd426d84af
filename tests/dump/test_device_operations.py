"""What packing does on a device: counted on torch's meta device, where each operation is seen and none is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime_instrument._dump.exchange import message_bytes
from slime_instrument._dump.packing import Packer
from slime_instrument._hooks.capture import CaptureSession

META = torch.device("meta")
# Views and bookkeeping: no kernel is started for them.
VIEWS = {
    "detach",
    "view",
    "split",
    "slice",
    "alias",
    "_reshape_alias",
    "unsafe_split",
    "split_with_sizes",
    "empty",
    "narrow",
}


class Operations(TorchDispatchMode):
    """Device operations that start a kernel, and the largest tensor that one of them made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.kernels.append(name)
        if name in ("cat", "empty", "clone") and isinstance(result, torch.Tensor):
            self.made.append(result.numel() * result.itemsize)
        return result


def packed(samples: int, fields: int, tokens: int) -> Packer:
    packer = Packer()
    for field in range(fields):
        packer.add_all(f"field{field}", [torch.empty(tokens, device=META) for _ in range(samples)])
    return packer


@pytest.mark.parametrize("samples", [4, 64])
def test_operations_grow_with_buckets_and_not_with_samples(samples: int) -> None:
    packer = packed(samples, fields=3, tokens=64 * 64 // samples)
    with Operations() as seen:
        buckets = list(packer.buckets(4096, META))
    assert len(buckets) == packer.nbytes // 4096 == 12
    assert len(seen.kernels) <= 3 * len(buckets)


def test_device_memory_stays_within_the_bucket() -> None:
    packer, bucket = packed(50, fields=4, tokens=333), 10_000
    message = message_bytes(packer.nbytes, bucket, META)
    with Operations() as seen:
        sent = sum(piece.numel() for piece in packer.buckets(message, META))
    assert sent == packer.nbytes
    # One for the message, one for the tensors that are being joined for it.
    assert 2 * max(seen.made) <= bucket


def test_a_tensor_larger_than_the_bucket_is_cut_and_not_copied_whole() -> None:
    packer, bucket = Packer(), 4096
    packer.add("big", torch.empty(1 << 20, device=META))
    with Operations() as seen:
        assert sum(piece.numel() for piece in packer.buckets(bucket, META)) == 4 << 20
    assert max(seen.made) <= bucket


def test_capture_is_one_operation_per_micro_batch_whatever_its_samples() -> None:
    for samples in (1, 16, 256):
        session = CaptureSession(0, {"partition": list(range(samples)), "response_lengths": [8] * samples})
        log_probs = [torch.empty(8, device=META) for _ in range(samples)]
        with Operations() as seen:
            session.capture(list(range(samples)), log_probs)
        assert seen.kernels == ["cat"]
