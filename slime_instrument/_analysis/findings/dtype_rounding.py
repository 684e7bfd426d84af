"""One side is the other one, rounded to a shorter type."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View

CODE = "dtype-rounding"
ORDER = 75
_ENOUGH = 16  # tokens
_PROBE = 4096  # tokens that decide whether to look at all of them
_EQUAL = 0.98
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def find(view: View) -> Finding | None:
    if view.n_open < _ENOUGH:
        return None
    rollout, train = view.rollout_values(), view.train_values()
    for side, rounded, exact in (("train", train, rollout), ("rollout", rollout, train)):
        for name, dtype in _TYPES.items():
            if not _is_rounded(rounded[:_PROBE], exact[:_PROBE], dtype) or not _is_rounded(rounded, exact, dtype):
                continue
            message = (
                f"The {side} side holds the other side's log-probs rounded to {name}: all {len(rounded)} values are "
                f"{name} numbers and equal after rounding; mean |δ| {float(view.size.mean()):.3g}. The logits "
                "or the log-probs passed through that type on one side; keep the LM head and the softmax in float32."
            )
            samples = view.positions_with(view.open)
            return Finding(CODE, message, samples, {"side": side, "dtype": name}, view.open)
    return None


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
