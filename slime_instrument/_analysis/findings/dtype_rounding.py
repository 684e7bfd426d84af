"""One side is the other one, rounded to a shorter type."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Estimate, Finding
from slime_instrument._analysis.evidence import View

CODE = "dtype-rounding"
ORDER = 75
_ENOUGH = 16  # tokens
_PROBE = 4096  # tokens that decide whether to look at all of them
_EQUAL = 0.98
_DISTINCT = 32  # different values that must all be short numbers
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def find(view: View) -> Finding | None:
    return _nothing_else(view) or _under_noise(view)


def _nothing_else(view: View) -> Finding | None:
    """The rounding is the whole difference."""
    if view.n_open < _ENOUGH:
        return None
    rollout, train = view.rollout_values(), view.train_values()
    for side, rounded, exact in (("train", train, rollout), ("rollout", rollout, train)):
        for name, dtype in _TYPES.items():
            if not _is_rounded(rounded[:_PROBE], exact[:_PROBE], dtype) or not _is_rounded(rounded, exact, dtype):
                continue
            size = float(view.size.mean())
            message = (
                f"The {side} side holds the other side's log-probs rounded to {name}: all {len(rounded)} values are "
                f"{name} numbers and equal after rounding; mean |δ| {size:.3g}. The logits "
                "or the log-probs passed through that type on one side; keep the LM head and the softmax in float32."
            )
            estimate = Estimate("rounding", size, size, size, len(rounded), _ENOUGH)
            samples = view.positions_with(view.open)
            return Finding(CODE, message, samples, {"side": side, "dtype": name}, view.open, estimate)
    return None


def _under_noise(view: View) -> Finding | None:
    """Every value of a side is one of a shorter type than the one that it is stored in, whatever else differs.

    A value that was never rounded falls on such a number with a chance of 1 in 65,536 (bfloat16) or 8,192 (float16).
    Values that are stored in the short type itself are no finding: the file says so.
    """
    comparable = view.table.comparable
    for side, values in (("rollout", view.table.rollout), ("train", view.table.train)):
        if side == "train" and not view.table.train_dtypes.isdisjoint(_TYPES.values()):
            continue
        for name, dtype in _TYPES.items():  # most bfloat16 numbers are float16 numbers too, but not the reverse
            probe = values[comparable & (values != 0)][:_PROBE]
            if len(torch.unique(probe)) < _DISTINCT or not _on_grid(probe, dtype):
                continue
            own = values[comparable]
            if not _on_grid(own, dtype):
                continue
            # Half a unit in the last place at most, a quarter on average.
            error = float((_next_to_zero(probe, dtype) - probe).abs().mean()) / 4
            message = (
                f"All {len(own)} log-probs of the {side} side are {name} numbers, stored in a longer type: they were "
                f"rounded, which alone differs by about {error:.2g} nats per token; mean |δ| is "
                f"{float(view.table.size.mean()):.3g}. Keep log-probs in float32 from the softmax to the dump."
            )
            samples = view.positions_with(comparable)
            looks = ("a coarse grid of another origin, such as values printed with few digits",)
            estimate = Estimate("rounding", error, error, error, len(own), _DISTINCT, looks)
            return Finding(CODE, message, samples, {"side": side, "dtype": name, "under_noise": True}, None, estimate)
    return None


def _on_grid(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((values.to(dtype).float() == values).all())


def _is_rounded(rounded: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``rounded`` is ``exact`` in ``dtype``, to the nearest or towards zero, and that changes it."""
    nearest = exact.to(dtype).float()
    if bool((nearest == exact).float().mean() > 0.5) or not bool((rounded.to(dtype).float() == rounded).all()):
        return False
    toward_zero = rounded == torch.where(nearest.abs() > exact.abs(), _next_to_zero(nearest, dtype), nearest)
    return any(float(equal.float().mean()) >= _EQUAL for equal in (rounded == nearest, toward_zero))


def _next_to_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The neighbour of each value in ``dtype`` on the side of zero: the bit pattern one lower."""
    bits = values.to(dtype).view(torch.int16)
    return torch.where(values == 0, values, (bits - 1).view(dtype).float())
