"""Tokens as coloured terminal text. Levels are also underlined, so that they show without colour."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from rich.style import Style
from rich.text import Text

from slime_instrument._analysis.table import TOKEN_KINDS, TokenTable
from slime_instrument._format.values import integers

__all__ = ["MODES", "PAGE", "Tokens", "printable"]

MODES = ("delta", "advantage", "mask", "rollout", "train")
PAGE = 1500
"""Tokens that are shown at a time."""

_DELTA = (0.01, 0.05, 0.2, 1.0)  # nats
_CHANCE = (0.1, 0.5, 0.9, 0.99)  # 1 - probability
_ABOVE = ("#d9e8f7", "#a9cbee", "#6ba3dd", "#2f6fb3")
_BELOW = ("#fbe3cf", "#f5c08f", "#e8924a", "#b85400")


def printable(text: str) -> str:
    """Text that cannot steer the terminal: control and format characters become visible signs."""
    signs = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    return "".join(signs.get(c, c if c.isprintable() else "·") for c in text)


@dataclass(frozen=True)
class Tokens:
    """The response tokens of one sample. ``decode`` turns an id into text; None shows ids."""

    table: TokenTable
    sample: dict[str, Any]
    decode: Callable[[int], str] | None = None

    @property
    def n(self) -> int:
        return len(self.table.mask)

    def ids(self) -> torch.Tensor | None:
        """Ids of the response tokens, or None where they are not stored."""
        tokens = integers(self.sample.get("tokens"))
        return None if tokens is None or len(tokens) < self.n else tokens[len(tokens) - self.n :]

    def delta(self) -> torch.Tensor:
        """train − rollout, float32, shape ``(n,)``; NaN where it does not count."""
        return torch.where(self.table.comparable, self.table.train - self.table.rollout, torch.nan)

    def worst(self) -> list[int]:
        """Tokens that differ, the worst first."""
        size = torch.nan_to_num(self.delta().abs(), nan=-1.0)
        order: list[int] = size.argsort(descending=True, stable=True)[: int((size > 0).sum())].tolist()
        return order

    def advantage(self) -> torch.Tensor | None:
        values = self.sample.get("advantages")
        return values.float() if isinstance(values, torch.Tensor) and len(values) == self.n else None

    def render(self, page: int, mode: str, chosen: int | None) -> Text:
        """One page of tokens."""
        shown = slice(page * PAGE, min((page + 1) * PAGE, self.n))
        ids, levels, trained = self.ids(), self._levels(mode, shown), self.table.mask[shown].tolist()
        words = [None] * len(levels) if ids is None else ids[shown].tolist()
        text = Text()
        for i, (token, level, counts) in enumerate(zip(words, levels, trained, strict=True), start=shown.start):
            word = "·" if token is None else str(token)
            if token is not None and self.decode is not None:
                word = printable(self.decode(token)) or "∅"
            text.append(word, _style(level, counts, i == chosen))
            text.append(" " if self.decode is None else "\u200b")
        return text if self.n else Text("This response has no tokens.")

    def describe(self, i: int) -> str:
        """Every value of one token, in one line."""
        ids, advantage = self.ids(), self.advantage()
        kind = TOKEN_KINDS[int(self.table.kind[i])]
        parts = [f"token {i}"]
        if ids is not None:
            parts.append(f"id {int(ids[i])}")
            if self.decode is not None:
                parts.append(repr(printable(self.decode(int(ids[i])))))
        rollout, train = float(self.table.rollout[i]), float(self.table.train[i])
        parts += [f"log μ {_shown(rollout)}", f"log π {_shown(train)}", f"δ {_shown(train - rollout)}"]
        parts.append(f"advantage {_shown(float(advantage[i])) if advantage is not None else '–'}")
        parts.append("mask 1" if bool(self.table.mask[i]) else "mask 0, not trained")
        return "   ".join(parts if kind == "comparable" else [*parts, f"not compared: {kind}"])

    def _levels(self, mode: str, shown: slice) -> list[int]:
        """Per token of the page from −4 to 4; the sign is the colour."""
        found: list[int]
        if mode == "delta":
            values = torch.nan_to_num(self.delta()[shown])
            found = (torch.bucketize(values.abs(), torch.tensor(_DELTA), right=True) * values.sign()).int().tolist()
        elif mode == "advantage":
            advantage = self.advantage()
            values = torch.zeros(self.n)[shown] if advantage is None else torch.nan_to_num(advantage[shown])
            found = (3 * values.sign()).int().tolist()
        elif mode == "mask":
            found = (2 * self.table.mask[shown]).int().tolist()
        else:
            chance = (self.table.rollout if mode == "rollout" else self.table.train)[shown].exp().nan_to_num(nan=1.0)
            found = torch.bucketize(1 - chance, torch.tensor(_CHANCE), right=True).int().tolist()
        return found


@lru_cache(maxsize=64)
def _style(level: int, trained: bool, chosen: bool) -> Style:
    colours = _ABOVE if level > 0 else _BELOW
    return Style(
        color="#101418" if level else None,
        bgcolor=colours[abs(level) - 1] if level else None,
        underline=abs(level) >= 2,
        bold=abs(level) >= 3 or chosen,
        reverse=chosen,
        dim=not trained,
        italic=not trained,
    )


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.5g}"
