"""The tokens of one sample as a compressed block that the page unpacks when somebody looks at the sample.

Layout, little-endian: header length (uint32), header (JSON, padded to 8 bytes), then the arrays that the header names,
each padded to 8 bytes; all of it deflated with a zlib header.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import torch

from slime_instrument._analysis.compare import Comparison
from slime_instrument._dump.zigzag import owned
from slime_instrument._format.dumps import Provenance
from slime_instrument._format.values import integers, whole_number

__all__ = ["LONGEST", "TokenBlocks"]

LONGEST = 1 << 16
"""Response tokens of one sample that the page can hold; a longer response is cut around its worst token."""

_TEXT = 20_000  # characters of prompt, response and metadata each
_HALF_MAX = 65504.0


class TokenBlocks:
    """Packs samples of one comparison.

    Args:
        compared: the comparison.
        exact: keep log-probs as float32. Otherwise log μ and δ are kept as float16, which a large page needs.
    """

    def __init__(self, compared: Comparison, *, exact: bool) -> None:
        self._compared, self._exact = compared, exact
        self._sizes = _context_parallel_sizes(compared)

    def pack(self, i: int) -> tuple[str, torch.Tensor]:
        """Block of the i-th pair as base64, and the token ids in it (int64, shape ``(n,)``; empty if not stored)."""
        table, pair = self._compared.table, self._compared.joined.pairs[i]
        span = table.tokens_of(i)
        total = int(table.lengths[i])
        first = self._first_shown(span, total)
        shown = slice(span.start + first, span.start + min(first + LONGEST, total))
        rollout, train = table.rollout[shown], table.train[shown]
        arrays: dict[str, torch.Tensor] = {"rollout": rollout, "train": train}
        if not self._exact:
            arrays = {"rollout": _half(rollout), "delta": _half(train - rollout)}
        arrays["kind"] = table.kind[shown] | (table.mask[shown].to(torch.uint8) << 7)
        tokens = integers(pair.train.get("tokens"))
        tokens = integers(pair.rollout.get("tokens")) if tokens is None else tokens
        ids = torch.empty(0, dtype=torch.int64)
        if tokens is not None and len(tokens) >= total:
            ids = tokens[len(tokens) - total :][first : first + LONGEST]
            arrays["ids"] = ids.to(torch.int32)
        constants: dict[str, float] = {}
        advantages = pair.train.get("advantages")
        if isinstance(advantages, torch.Tensor) and advantages.dim() == 1 and len(advantages) == total and total:
            values = advantages[first : first + LONGEST].float()
            if bool(values[0].isfinite()) and bool((values == values[0]).all()):
                constants["advantage"] = float(values[0])
            else:
                arrays["advantage"] = values if self._exact else _half(values)
        header = {
            "n": len(rollout),
            "first": first,
            "total": total,
            "prompt_length": _prompt_length(pair.train, total),
            "constants": constants,
            "chunks": self._chunks(pair.train, total),
            "turns": self._turn_starts(span),
            "texts": _texts(pair.rollout),
        }
        return _deflate(header, arrays), ids

    def _first_shown(self, span: slice, total: int) -> int:
        if total <= LONGEST:
            return 0
        table = self._compared.table
        size = torch.where(table.comparable[span], (table.train[span] - table.rollout[span]).abs(), -1.0)
        return max(0, min(int(size.argmax()) - LONGEST // 2, total - LONGEST))

    def _chunks(self, train: dict[str, Any], response: int) -> list[list[int]]:
        """Context-parallel chunks of the response: [first response index, CP rank], in order; [] without CP."""
        cp = self._sizes.get(whole_number(train.get("data_parallel_rank")), 1)
        length = whole_number(train.get("total_lengths"))
        if cp < 2 or length is None or length < response:
            return []
        padded = whole_number(train.get("max_seq_lens"))
        pieces = [
            (piece.start, rank) for rank in range(cp) for piece in owned(length, response, cp, rank, padded) if piece
        ]
        return [list(piece) for piece in sorted(pieces)]

    def _turn_starts(self, span: slice) -> list[int]:
        """First token of each contiguous run of mask 1."""
        mask = self._compared.table.mask[span]
        before = torch.zeros_like(mask)
        before[1:] = mask[:-1]
        starts: list[int] = (mask & ~before).nonzero().flatten().tolist()
        return starts


def _context_parallel_sizes(compared: Comparison) -> dict[int | None, int]:
    sizes: dict[int | None, int] = {}
    for shard in compared.train_dump.dp_shards:
        size = Provenance.of(shard).context_parallel
        if size is not None:
            sizes[whole_number(shard.get("data_parallel_rank"))] = size
    return sizes


def _prompt_length(train: dict[str, Any], response: int) -> int | None:
    total = whole_number(train.get("total_lengths"))
    return None if total is None else total - response


def _half(values: torch.Tensor) -> torch.Tensor:
    """float16; infinities stay, finite values stay finite."""
    clamped = torch.where(values.isfinite(), values.clamp(-_HALF_MAX, _HALF_MAX), values)
    return clamped.to(torch.float16)


def _texts(source: dict[str, Any]) -> dict[str, Any]:
    """Prompt, response, label and metadata of the rollout sample as text, shortened; absent ones are left out."""
    texts: dict[str, Any] = {}
    for name in ("prompt", "response", "label", "metadata"):
        value = source.get(name)
        if value in (None, "", {}, []):
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, indent=1)
        texts[name] = text if len(text) <= _TEXT else f"{text[:_TEXT]}… ({len(text):,} characters in all)"
    return texts


def _deflate(header: dict[str, Any], arrays: dict[str, torch.Tensor]) -> str:
    header["arrays"] = {}
    body = bytearray()
    for name, values in arrays.items():
        kind = str(values.dtype).removeprefix("torch.")
        header["arrays"][name] = [kind, len(body), len(values)]
        body += values.contiguous().numpy().tobytes()
        body += bytes(-len(body) % 8)
    head = json.dumps(header, allow_nan=False, ensure_ascii=True).encode()
    head += b" " * (-(len(head) + 4) % 8)
    return base64.b64encode(zlib.compress(struct.pack("<I", len(head)) + head + body, 6)).decode("ascii")
