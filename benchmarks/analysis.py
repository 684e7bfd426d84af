"""What analysis costs: ``python -m benchmarks.analysis [--json]``. About five minutes and 3 GB of disk.

Everything is measured in a process of its own, so that one peak of memory does not hide another.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESPONSE, PROMPT = 4000, 200


def write_pair(folder: Path, tokens: int, *, plain_lists: bool = True) -> None:
    """A rollout dump and a v2 train dump with that many response tokens, as slime writes them."""
    random = torch.Generator().manual_seed(0)
    samples, sources = [], []
    for i in range(tokens // RESPONSE):
        ids = torch.randint(0, 150_000, (PROMPT + RESPONSE,), generator=random)
        rollout = torch.rand(RESPONSE, generator=random).clamp(min=1e-6).log()
        noise = torch.randn(RESPONSE, generator=random) * (0.003 + 0.005 * rollout.abs())
        train = (rollout + noise).clamp(max=0)
        sample: dict[str, Any] = {
            "data_parallel_rank": 0,
            "sample_index": i,
            "rollout_position": i,
            "tokens": ids,
            "total_lengths": PROMPT + RESPONSE,
            "response_lengths": RESPONSE,
            "loss_masks": torch.ones(RESPONSE, dtype=torch.int32),
            "rollout_log_probs": rollout,
            "log_probs": train,
        }
        sample |= {name: torch.full((RESPONSE,), 0.5) for name in ("advantages", "returns", "kl")}
        samples.append(sample)
        source: dict[str, Any] = {"index": i, "response_length": RESPONSE, "reward": 1.0, "remove_sample": False}
        source |= {"tokens": ids, "rollout_log_probs": rollout, "loss_mask": None}
        if plain_lists:
            source |= {name: source[name].tolist() for name in ("tokens", "rollout_log_probs")}
        sources.append(source)
    shard = {"rank": 0, "data_parallel_rank": 0, "partition": list(range(len(samples)))}
    payload = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": [shard]}
    torch.save(payload, folder / "train.pt")
    torch.save({"rollout_id": 0, "samples": sources}, folder / "rollout.pt")


def write_rank_files(folder: Path, size: int) -> list[Path]:
    """Old files of context-parallel size 2, of about ``size`` bytes together."""
    from slime_instrument._dump.zigzag import shard_lengths

    n = size // (2 * (8 * (PROMPT + RESPONSE) + 4 * RESPONSE) + 6 * 4 * RESPONSE)
    paths = []
    for rank in range(2):
        (held,) = shard_lengths([PROMPT + RESPONSE], [RESPONSE], 2, rank)
        data: dict[str, Any] = {
            "tokens": [torch.arange(i, i + PROMPT + RESPONSE) for i in range(n)],
            "total_lengths": [PROMPT + RESPONSE] * n,
            "response_lengths": [RESPONSE] * n,
            "loss_masks": [torch.ones(RESPONSE, dtype=torch.int32) for _ in range(n)],
            "sample_indices": list(range(n)),
            "raw_reward": [0.0] * n,
        }
        names = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns", "kl")
        data |= {name: [torch.rand(held) for _ in range(n)] for name in names}
        paths.append(folder / f"0_{rank}.pt")
        torch.save({"rollout_id": 0, "rank": rank, "rollout_data": data}, paths[-1])
    return paths


def loop(rollout: list[Any], train: list[Any], masks: list[Any], limit: int) -> tuple[int, float]:
    """The same per-token metrics in a plain loop over samples and tokens with torch; how many, and seconds."""
    began, n = time.perf_counter(), 0
    sums = dict.fromkeys(("abs", "k1", "k2", "k3", "ratio", "ratio2", "prob"), 0.0)
    for theirs, ours, mask in zip(rollout, train, masks, strict=True):
        for k in range(len(theirs)):
            if not mask[k] or not torch.isfinite(ours[k]) or not math.isfinite(theirs[k]):
                continue
            delta = ours[k] - theirs[k]
            ratio = torch.exp(delta)
            sums["abs"] += float(delta.abs())
            sums["k1"] -= float(delta)
            sums["k2"] += float(delta * delta / 2)
            sums["k3"] += float(ratio - delta - 1)
            sums["ratio"] += float(ratio)
            sums["ratio2"] += float(ratio * ratio)
            sums["prob"] += float(abs(torch.exp(ours[k]) - math.exp(theirs[k])))
            n += 1
            if n == limit:
                return n, time.perf_counter() - began
    return n, time.perf_counter() - began


def peak_mb() -> float:
    """Highest resident memory of this process. getrusage would also count what the parent had before the exec."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure_compare(folder: Path) -> dict[str, Any]:
    from slime_instrument._analysis.compare import compare
    from slime_instrument._format.dumps import read_rollout_dump, read_train_dump

    base = peak_mb()
    began = time.perf_counter()
    found = compare(folder / "rollout.pt", folder / "train.pt")
    whole = time.perf_counter() - began
    peak = peak_mb() - base
    larger = max((folder / name).stat().st_size for name in ("rollout.pt", "train.pt")) / 2**20
    # Again, to tell reading from comparing.
    began = time.perf_counter()
    rollout, train = read_rollout_dump(folder / "rollout.pt", compact=True), read_train_dump(folder / "train.pt")
    loaded = time.perf_counter()
    compare(rollout, train)
    return {
        "tokens": found["n_tokens"],
        "findings": len(found["findings"]),
        "whole_s": whole,
        "load_s": loaded - began,
        "compare_s": time.perf_counter() - loaded,
        "larger_file_mb": larger,
        "peak_mb": peak,
        "peak_of_larger_file": peak / larger,
    }


def measure_loop(folder: Path) -> dict[str, Any]:
    from slime_instrument._format.dumps import read_rollout_dump, read_train_dump

    rollout = read_rollout_dump(folder / "rollout.pt").samples
    train = read_train_dump(folder / "train.pt").samples
    columns = [[one["rollout_log_probs"] for one in rollout], [one["log_probs"] for one in train]]
    n, seconds = loop(*columns, [one["loss_masks"].tolist() for one in train], 50_000)
    return {"tokens": n, "seconds": seconds, "us_per_token": seconds / n * 1e6}


def measure_inspect(folder: Path) -> dict[str, Any]:
    from slime_instrument._format.summary import inspect_dump

    base, began = peak_mb(), time.perf_counter()
    record = inspect_dump(folder / "large.pt")
    return {"bytes": record["bytes"], "seconds": time.perf_counter() - began, "peak_mb": peak_mb(), "base_mb": base}


def measure_convert(folder: Path) -> dict[str, Any]:
    from slime_instrument._convert import convert_files

    paths = sorted(folder.glob("0_*.pt"))
    began = time.perf_counter()
    loaded = [torch.load(path, weights_only=True) for path in paths]
    with open(folder / "copy.pt", "wb") as file:
        torch.save(loaded, file)
        file.flush()
        os.fsync(file.fileno())
    plain = time.perf_counter() - began
    del loaded
    began = time.perf_counter()
    convert_files(paths, folder / "converted.pt")
    seconds = time.perf_counter() - began
    size = sum(path.stat().st_size for path in paths)
    return {"bytes": size, "read_write_s": plain, "convert_s": seconds, "ratio": seconds / plain, "peak_mb": peak_mb()}


MEASURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "compare": measure_compare,
    "loop": measure_loop,
    "inspect": measure_inspect,
    "convert": measure_convert,
}


def measured(name: str, folder: Path) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.analysis", "--only", name, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def run(tokens: int, large: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder, tokens)
        results = {"compare": measured("compare", folder), "loop": measured("loop", folder)}
        write_pair(folder, tokens, plain_lists=False)
        results["compare_tensors"] = measured("compare", folder)
        torch.save(
            {
                "format_version": 2,
                "rollout_id": 0,
                "rank": 0,
                "samples": [{"rollout_position": i, "log_probs": torch.zeros(large // 2048 // 4)} for i in range(2048)],
                "dp_shards": [],
            },
            folder / "large.pt",
        )
        results["inspect"] = measured("inspect", folder)
        (folder / "large.pt").unlink()
        write_rank_files(folder, large // 4)
        results["convert"] = measured("convert", folder)
    for name, seconds in (("faster_than_loop", "compare_s"), ("faster_than_loop_with_reading", "whole_s")):
        per_token = results["compare"][seconds] / results["compare"]["tokens"] * 1e6
        results[name] = results["loop"]["us_per_token"] / per_token
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument(
        "--large", type=int, default=2 * 2**30, help="bytes of the file to inspect; a quarter to convert"
    )
    parser.add_argument("--only", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(MEASURES[options.only](options.folder)))
        return
    results = run(options.tokens, options.large)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    compare, inspect, convert = results["compare"], results["inspect"], results["convert"]
    print(
        f"compare: {compare['tokens']} tokens in {compare['compare_s']:.1f} s "
        f"after {compare['load_s']:.1f} s of loading, "
        f"peak {compare['peak_of_larger_file']:.2f} x the larger file; "
        f"{results['compare_tensors']['peak_of_larger_file']:.2f} x where the rollout dump holds tensors\n"
        f"a plain loop (measured on {results['loop']['tokens']} tokens): {results['faster_than_loop']:.0f} x slower, "
        f"{results['faster_than_loop_with_reading']:.0f} x where only we read the files as well\n"
        f"inspect: {inspect['bytes'] / 2**30:.1f} GB in {inspect['seconds']:.2f} s, peak {inspect['peak_mb']:.0f} MB\n"
        f"convert: {convert['bytes'] / 2**20:.0f} MB in {convert['convert_s']:.1f} s, {convert['ratio']:.2f} x reading "
        "and writing the same bytes"
    )


if __name__ == "__main__":
    main()
