"""What the page holds of each sample: a row of the table, and its tokens where they fit.

The tokens are a compressed block that the page unpacks when somebody looks at the sample. Layout, little-endian: header
length (uint32), header (JSON, padded to 8 bytes), then the arrays that the header names, each padded to 8 bytes; all of
it deflated with a zlib header.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_instrument._analysis.compare import Comparison
from slime_instrument._analysis.drift import staleness_of
from slime_instrument._analysis.metrics import SampleMetrics
from slime_instrument._dump.zigzag import owned
from slime_instrument._errors import InstrumentError, five_parts
from slime_instrument._format.dumps import Provenance
from slime_instrument._format.values import integers, number, whole_number

# --- the table ---


COLUMNS = (
    "position", "index", "group", "status", "reward", "reward_text", "response_length", "n_tokens", "masked",
    "advantage", "mean_abs", "max_abs", "mean", "staleness", "dp_rank", "findings", "left_out",
)  # fmt: skip
"""Cells of a row, in order. None is "not known", never 0. ``left_out`` is why the sample was not compared."""

_TRAIN_ONLY = "train only: "


def sample_rows(compared: Comparison) -> list[list[Any]]:
    """One row per sample, in rollout order; train samples that belong to no rollout sample come last."""
    found: dict[int, list[str]] = {}
    for finding in compared.findings:
        for position in finding.samples:
            found.setdefault(position, []).append(finding.code)
    advantages = _advantages(compared)
    staleness = staleness_of(compared.table, compared.train_dump.provenance.weight_version)
    rows = []
    for i, (pair, measured) in enumerate(zip(compared.joined.pairs, compared.samples, strict=True)):
        rows.append(
            {
                **_of_rollout(compared, pair.position),
                **{name: getattr(measured, name) for name in ("n_tokens", "masked", "mean_abs", "max_abs", "mean")},
                "response_length": measured.response_length,
                "index": pair.index,
                "advantage": advantages[i],
                "staleness": staleness[i],
                "dp_rank": whole_number(pair.train.get("data_parallel_rank")),
                "left_out": _why_empty(measured),
            }
        )
    for one in compared.joined.unmatched:
        known = _of_rollout(compared, one.position) if one.side == "rollout" and one.position is not None else {}
        reason = one.reason if one.side == "rollout" else f"{_TRAIN_ONLY}{one.reason}"
        rows.append({**known, "position": one.position, "index": one.index, "left_out": reason})
    for row in rows:
        row["findings"] = found.get(row["position"], [])
    rows.sort(
        key=lambda row: (row["position"] is None, row["position"] or 0, str(row["left_out"]).startswith(_TRAIN_ONLY))
    )
    return [[_plain(row.get(name)) for name in COLUMNS] for row in rows]


def _why_empty(measured: SampleMetrics) -> str | None:
    """Why a joined sample has no comparable token; None if it has one."""
    if measured.removed:
        return "removed"
    if measured.n_tokens:
        return None
    if not measured.response_length:
        return "no-response"
    return "masked" if measured.masked == measured.response_length else "no-log-probs"


def _of_rollout(compared: Comparison, position: int) -> dict[str, Any]:
    source = compared.rollout_dump.samples[position]
    reward = source.get("reward")
    status = source.get("status")
    value = None if isinstance(reward, dict) else number(reward)
    return {
        "position": position,
        "index": whole_number(source.get("index")),
        "group": whole_number(source.get("group_index")),
        "status": None if status is None else str(getattr(status, "value", status)),
        "response_length": whole_number(source.get("response_length")),
        "reward": value,
        "reward_text": _shortened(reward) if value is None and reward is not None else None,
    }


def _advantages(compared: Comparison) -> list[float | None]:
    """Mean advantage over the tokens that are trained, per pair; None without one."""
    table = compared.table
    means: list[float | None] = []
    for i, pair in enumerate(compared.joined.pairs):
        values = pair.train.get("advantages")
        mask = table.mask[table.tokens_of(i)]
        if not isinstance(values, torch.Tensor) or values.dim() != 1 or len(values) != len(mask):
            means.append(None)
            continue
        usable = values.float()[mask & values.isfinite()]
        means.append(float(usable.mean()) if len(usable) else None)
    return means


def _shortened(value: Any, limit: int = 80) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite has no number there, and six digits are enough for a table."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# --- the tokens of one sample ---


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


# --- which samples keep their tokens when not all of them fit ---


_ALWAYS = 10  # samples with the largest single difference, and as many with the largest mean, of the whole report


@dataclass(frozen=True)
class Block:
    """The packed tokens of one sample, and how bad the sample is.

    Attributes:
        rollout: number of the pair of files in the report.
        position: rollout position of the sample.
        text: base64 of the block.
        ids: the token ids in it, int64.
        rank: how many samples of the same rollout are worse, by mean or by maximum.
        mean_abs, max_abs: of \\|δ\\|; -1 where no token could be compared.
    """

    rollout: int
    position: int
    text: str
    ids: torch.Tensor
    rank: int
    mean_abs: float
    max_abs: float


class Keeper:
    """Holds blocks up to a limit: first the worst of the whole report, then the worst of each rollout, and so on.

    Args:
        limit: bytes that the blocks may take at most; what is certain to be beyond is let go at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: list[Block] = []
        self._size = 0
        self.offered = 0

    def offer(self, block: Block) -> None:
        self._blocks.append(block)
        self._size += len(block.text)
        self.offered += 1
        if self._size > 3 * self._limit:  # a long run must not hold every block until its end
            self._blocks = self.kept(self._limit)
            self._size = sum(len(one.text) for one in self._blocks)

    def kept(self, space: int) -> list[Block]:
        """What fits into so many bytes, by rollout and position. The worst sample of all is kept whatever its size."""
        by_max = sorted(self._blocks, key=lambda one: -one.max_abs)[:_ALWAYS]
        by_mean = sorted(self._blocks, key=lambda one: -one.mean_abs)[:_ALWAYS]
        worst = {(one.rollout, one.position) for one in by_max + by_mean}
        order = sorted(
            self._blocks,
            key=lambda one: (
                (one.rollout, one.position) not in worst,
                one.rank,
                -one.max_abs,
                one.rollout,
                one.position,
            ),
        )
        chosen: list[Block] = []
        size = 0
        for block in order:
            if size + len(block.text) <= space or not chosen:
                chosen.append(block)
                size += len(block.text)
        return sorted(chosen, key=lambda one: (one.rollout, one.position))


# --- token ids as text, with a tokenizer from a local folder; nothing is fetched, and no code of the folder runs ---


class TokenizerError(InstrumentError, ValueError):
    """The tokenizer cannot be used."""


def decoder(folder: Path) -> Callable[[int], str]:
    """What turns one token id into text: ``tokenizers`` for a tokenizer.json, else ``transformers``.

    Raises:
        TokenizerError: no tokenizer there, or neither library is installed.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.glob("*token*"))):
        found = "no tokenizer in it" if folder.exists() else "no such folder"
        raise _unusable(folder, found, "Give the folder that holds tokenizer.json.")
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(file))
            return lambda token: str(fast.decode([token], skip_special_tokens=False))
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return lambda token: str(slow.decode([token]))
    except ImportError as error:
        raise _unusable(folder, f"{error.name or 'tokenizers'} is not installed", "pip install tokenizers") from None
    # Both libraries raise bare Exceptions for files that they cannot read.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _unusable(folder, reason, "Give the folder that holds tokenizer.json.") from None


def texts(ids: Iterable[int], decode: Callable[[int], str]) -> dict[int, str]:
    """Text of each id; an id that the tokenizer does not know is left out."""
    found = {}
    for token in sorted(set(ids)):
        try:
            found[token] = decode(token)
        except Exception:
            continue
    return found


def _unusable(folder: Path, found: str, next_step: str) -> TokenizerError:
    message = five_parts(
        f"--tokenizer {folder}",
        expected="a local folder with a tokenizer",
        found=found,
        follows="No report was written.",
        next_step=next_step,
    )
    return TokenizerError(message)
