"""Which tokens the context holds already: the prompt, or the response before them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime_instrument._analysis.diagnosis import View
from slime_instrument._format.values import integers

__all__ = ["History", "history_of"]

_MOST = 1 << 18  # tokens that are looked at, whole samples in order; a pattern that shows at all shows in these


@dataclass(frozen=True)
class History:
    """Open tokens of some samples; all of shape ``(k,)``.

    Attributes:
        sample: pair of each token, int64.
        rollout, delta: log μ and δ, float64.
        index: place in the response, int64.
        in_response: whether the response had this token before, bool.
        in_prompt: whether the prompt had it, bool.
    """

    sample: torch.Tensor
    rollout: torch.Tensor
    delta: torch.Tensor
    index: torch.Tensor
    in_response: torch.Tensor
    in_prompt: torch.Tensor


def history_of(view: View, pairs: torch.Tensor) -> History | None:
    """The tokens of the pairs that a ``(S,)`` bool tensor names; None where no sample stores its token ids."""
    rows: list[tuple[torch.Tensor, ...]] = []
    total, table = 0, view.table
    for i in pairs.nonzero().flatten().tolist():
        span = table.tokens_of(i)
        n = span.stop - span.start
        ids = integers(table.pairs[i].train.get("tokens"))
        if ids is None:
            ids = integers(table.pairs[i].rollout.get("tokens"))
        if ids is None or len(ids) < n or not n:
            continue
        prompt, response = ids[: len(ids) - n], ids[len(ids) - n :]
        usable = view.open[span]
        rollout = table.rollout[span].double()
        index = torch.arange(n)
        known, place = torch.unique(response, return_inverse=True)
        first = torch.full((len(known),), n).scatter_reduce(0, place, index, "amin")
        columns = (
            torch.full((n,), i), rollout, table.train[span].double() - rollout, index, first[place] < index,
            torch.isin(response, prompt),
        )  # fmt: skip
        rows.append(tuple(column[usable] for column in columns))
        total += n
        if total >= _MOST:
            break
    if not rows:
        return None
    return History(*(torch.cat(column) for column in zip(*rows, strict=True)))
