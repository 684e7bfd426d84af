"""What size of mismatch is ordinary, in nats of logit: Σ\\|δ\\| / Σ(1 - μ), the level of a group of samples.

The numbers come from a small model in bf16 (SmolLM2-135M, vLLM against transformers). Larger models differ less.
"""

from __future__ import annotations

__all__ = ["EIGHT_BITS", "FOUR_BITS", "MORE_THAN_KERNELS", "as_much_as"]

MORE_THAN_KERNELS = 0.14
"""Between bf16 kernels (0.05 to 0.09) and weights rounded to eight bits."""

EIGHT_BITS = 0.23
FOUR_BITS = 1.5


def as_much_as(level: float) -> str:
    """What a level is comparable with, in words."""
    if level < MORE_THAN_KERNELS:
        return "as much as two bf16 kernels do"
    if level < (EIGHT_BITS * FOUR_BITS) ** 0.5:
        return "about as much as weights rounded to 8 bits"
    if level < 2 * FOUR_BITS:
        return "about as much as weights rounded to 4 bits"
    return "more than weights rounded to 4 bits"
