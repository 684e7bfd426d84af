"""From dump files to the page: one pair of dumps in memory at a time."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_instrument._analysis.compare import Comparison, compare
from slime_instrument._analysis.corrections import Sweep
from slime_instrument._analysis.gradient import loss_gradient, spikes, step_norms
from slime_instrument._analysis.pair import read_pair
from slime_instrument._analysis.what_if import rollout_of, what_if
from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.pairs import FilePair, Pairing, Skipped, find_pairs, no_pairs
from slime_instrument._format.values import plain_value
from slime_instrument._report.answers import Answers, Judged, answer_all, judged
from slime_instrument._report.page import Page, curve, density, histogram, json_in_html
from slime_instrument._report.samples import COLUMNS, Block, Keeper, TokenBlocks, decoder, sample_rows, texts

__all__ = ["Report", "write_report"]

LIMIT_MB = 20.0
_EXACT_UP_TO = 8_000_000  # bytes of train dumps; above, the page keeps log-probs as float16
_ROWS_SHARE = 0.25  # of the space for data, at most
_NAMED = 20  # samples of a finding, and warnings, that are named one by one
_MARGIN = 1_000_000  # bytes for tags and for the words of tokens


@dataclass(frozen=True)
class Report:
    """A written report. ``left_out``: what the page lacks for its size, in words."""

    path: Path
    pairs: list[FilePair]
    skipped: list[Skipped]
    verdict: Answers
    size: int
    left_out: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "report": str(self.path),
            "pairs": [pair.as_dict() for pair in self.pairs],
            "skipped": [one.as_dict() for one in self.skipped],
            "verdict": self.verdict.as_dict(),
            "bytes": self.size,
            "left_out": self.left_out,
        }


def write_report(
    given: Sequence[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    allow_pickle: bool = False,
    limit_mb: float = LIMIT_MB,
    sweep: Sweep | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compare every pair among ``given`` and write the page.

    Args:
        given: folders as ``--dump-details`` writes them, dump files, or both.
        out: the HTML file; its folder is created.
        tokenizer: a local folder whose tokenizer turns ids into text.
        allow_pickle: read rollout dumps with arbitrary objects; this can run code from them.
        sweep: a correction of the mismatch at several thresholds, to be drawn as a curve; reads the dumps once more.
        limit_mb: how large the file may become, in MB of 10^6 bytes.
        progress: told what is being done.

    Raises:
        DumpFormatError: among ``given`` there is no pair that can be compared.
        TokenizerError: the tokenizer cannot be used.
        OSError: a file that was given is missing, or ``out`` cannot be written.
    """
    say = progress or (lambda _text: None)
    decode = decoder(tokenizer) if tokenizer is not None else None
    say("looking for pairs of dumps")
    _refuse_overwriting(out, given)
    pairing = find_pairs(given, allow_pickle=allow_pickle)
    skipped = list(pairing.skipped)
    page = Page()
    exact = sum(path.stat().st_size for pair in pairing.pairs for path in pair.train) <= _EXACT_UP_TO
    space = int(limit_mb * 1e6) - page.base_size
    keeper = Keeper(space)
    rollouts: list[dict[str, Any]] = []
    tables: list[str] = []
    every: list[Judged] = []
    used: list[FilePair] = []
    norms: list[Mapping[int, float]] = []
    for pair in pairing.pairs:
        say(f"comparing {pair.rollout.name}, {len(used) + 1} of {len(pairing.pairs)}")
        try:
            compared = compare(pair.rollout, _one_or_many(pair.train), allow_pickle=allow_pickle)
        except DumpFormatError as error:
            skipped += [Skipped(file, " ".join(str(error).split())) for file in (pair.rollout, *pair.train)]
            continue
        told = judged(compared, pair.name)
        rows = sample_rows(compared)
        _offer_blocks(keeper, compared, len(used), exact=exact)
        rollouts.append(_shown(compared, told, len(rows)))
        tables.append(deflated(rows))
        every.append(told)
        used.append(pair)
        norms.append(step_norms(compared.train_dump.provenance))
    if not used:
        raise no_pairs(given, Pairing((), tuple(skipped)), "No report was written.")
    # Beside the blocks: each has a tag, and the words of the tokens come last.
    space -= len(json_in_html(rollouts)) + _MARGIN
    blocks = keeper.kept(space - min(sum(map(len, tables)), int(space * _ROWS_SHARE)))
    left_out = _fit_tables(tables, rollouts, blocks, int(space * _ROWS_SHARE))
    if len(blocks) < keeper.offered:
        left_out.append(
            f"Tokens of {keeper.offered - len(blocks)} of {keeper.offered} samples: the {len(blocks)} that differ most "
            "have theirs."
        )
    if not exact:
        left_out.append("Digits: single tokens are shown with about three; tables and figures use all of them.")
    words = (
        texts((token for block in blocks for token in set(block.ids.tolist())), decode) if decode is not None else {}
    )
    drawn = None
    if sweep is not None:
        say(f"trying {sweep.parameter}")
        again = (rollout_of(read_pair(pair, allow_pickle=allow_pickle)) for pair in used)
        drawn = curve(sweep, what_if(again, sweep.policies))
    say("writing")
    overall = answer_all(
        every,
        spikes(
            norms,
            [one.name for one in every],
            lambda i: loss_gradient(read_pair(used[i], allow_pickle=allow_pickle)),
        ),
    )
    size = page.write(
        out,
        overall=overall,
        rollouts=rollouts,
        tables=tables,
        blocks=blocks,
        words=deflated({str(token): text for token, text in words.items()}) if words else None,
        columns=COLUMNS,
        skipped=[one.as_dict() for one in skipped],
        left_out=left_out,
        sweep=drawn,
    )
    return Report(out, used, skipped, overall, size, left_out)


def deflated(value: Any) -> str:
    """JSON, compressed, as base64."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode("ascii")


def _refuse_overwriting(out: Path, given: Sequence[Path]) -> None:
    if any(out.resolve() == path.resolve() for path in given) or out.suffix in (".pt", ".pkl"):
        raise DumpFormatError(
            five_parts(
                f"-o {out}",
                expected="the name of an HTML file",
                found="the name of a dump",
                follows="Nothing was written.",
                next_step="For example -o report.html.",
            )
        )


def _one_or_many(paths: tuple[Path, ...]) -> Path | list[Path]:
    return paths[0] if len(paths) == 1 else list(paths)


def _offer_blocks(keeper: Keeper, compared: Comparison, rollout: int, *, exact: bool) -> None:
    """Pack every joined sample of a rollout."""
    samples = compared.samples
    by_max = _ranks([one.max_abs for one in samples])
    by_mean = _ranks([one.mean_abs for one in samples])
    packer = TokenBlocks(compared, exact=exact)
    for i, one in enumerate(samples):
        text, ids = packer.pack(i)
        mean, largest = (-1.0 if value is None else value for value in (one.mean_abs, one.max_abs))
        rank = min(by_max[i], by_mean[i])
        keeper.offer(Block(rollout, one.position, text, ids, rank, mean, largest))


def _ranks(values: Sequence[float | None]) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: -(values[i] if values[i] is not None else -1.0))  # type: ignore[operator]
    ranks = [0] * len(values)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks


def _shown(compared: Comparison, told: Judged, n_rows: int) -> dict[str, Any]:
    """What the page knows of one rollout without unpacking anything."""
    names = (
        "rollout", "train", "rollout_id", "n_train", "n_rollout", "n_joined", "n_tokens", "log_probs", "abs_diff",
        "train_rollout_logprob_abs_diff", "prob_diff", "k1", "k2", "k3", "token_mult_prob_error", "chi2_token", "ess",
        "ppl_ratio", "tis", "icepop", "excluded", "drift", "worst",
    )  # fmt: skip
    left_out: dict[str, int] = {}
    for one in compared["unmatched"]:
        if one["side"] == "rollout" or one["position"] is None:
            left_out[one["reason"]] = left_out.get(one["reason"], 0) + 1
    findings = [
        {"code": one.code, "message": one.message, "samples": list(one.samples[:_NAMED]), "n_samples": len(one.samples)}
        for one in compared.findings
    ]
    warnings = [*compared["warnings"][:_NAMED]]
    if len(compared["warnings"]) > _NAMED:
        warnings.append(
            f"and {len(compared['warnings']) - _NAMED} more; slime-instrument compare --json has all of them"
        )
    return {
        **{key: compared[key] for key in names},
        "findings": findings,
        "warnings": warnings,
        "name": told.name,
        "verdict": {**told.told.as_dict(), "text": told.told.text},
        "unmatched": left_out,
        "histogram": histogram(compared.table),
        "density": density(compared.table),
        "provenance": plain_value(compared.train_dump.provenance.record) or None,
        "n_rows": n_rows,
    }


def _fit_tables(tables: list[str], rollouts: list[dict[str, Any]], blocks: Sequence[Block], space: int) -> list[str]:
    """Cut the sample tables that do not fit down to the samples whose tokens are kept. The rollouts with the largest
    mean difference keep theirs whole. Returns what was left out, in words."""
    order = sorted(range(len(tables)), key=lambda i: -(rollouts[i]["abs_diff"]["mean"] or 0.0))
    cut = 0
    for i in order:
        space -= len(tables[i])
        if space < 0 and i != order[0]:
            kept = {block.position for block in blocks if block.rollout == i}
            rows = json.loads(zlib.decompress(base64.b64decode(tables[i])))
            tables[i] = deflated([row for row in rows if row[0] in kept])
            cut += 1
    if not cut:
        return []
    return [f"Sample tables of {cut} of {len(tables)} rollouts have only the samples that differ most."]
