"""Seeded faults against what is found: ``python -m benchmarks.findings`` prints the confusion table.

Two kinds of data, both made here: log-probs of a softmax into which faults are put, and pairs that are really sampled
from known logits, so that each fault acts where it acts in an engine. ``benchmarks.real_engine`` has real ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "analysis"))
import seeded
import simulated
from simulated import Fault, Shape

from slime_instrument._analysis.compare import compare

SIMULATED: dict[str, tuple[Fault, str]] = {
    "nothing": (Fault(), "nothing"),
    **{f"engine at {t}": (Fault(engine_temperature=t), "temperature") for t in (0.7, 0.9, 1.1, 1.3)},
    **{f"trainer at {t}": (Fault(train_temperature=t), "temperature") for t in (0.8, 1.1)},
    **{f"top-p {p}": (Fault(top_p=p), "truncated-sampling") for p in (0.7, 0.9, 0.95)},
    **{f"top-k {k}": (Fault(top_k=k), "truncated-sampling") for k in (20, 50)},
    **{f"min-p {p}": (Fault(min_p=p), "truncated-sampling") for p in (0.05, 0.2)},
    **{f"repetition penalty {r}": (Fault(repetition=r), "sampling-penalty") for r in (1.1, 1.2)},
    "presence penalty 0.6": (Fault(presence=0.6), "sampling-penalty"),
    "frequency penalty 0.4": (Fault(frequency=0.4), "sampling-penalty"),
    "another context": (Fault(context=1.0), "context-differs"),
    "logits off by 0.25": (Fault(precision=0.25), "unexplained-mismatch"),
    "logits off by 1.5": (Fault(precision=1.5), "unexplained-mismatch"),
    "40 % from older weights": (Fault(stale=0.3, share=0.4), "stale-weights"),
    "a third at 0.8": (Fault(engine_temperature=0.8, share=0.33), "temperature"),
    "40 % at top-p 0.9": (Fault(top_p=0.9, share=0.4), "truncated-sampling"),
    "half at repetition 1.2": (Fault(repetition=1.2, share=0.5), "sampling-penalty"),
}
"""What differs, and the one name that is right."""

SHAPES = (Shape(), Shape(sure=0.75, sharpness=0.8, kernel=0.02), Shape(kernel=0.09))


def simulated_confusion(seeds: range) -> dict[str, Counter[str]]:
    """As :func:`confusion`, on pairs that were sampled: three kinds of model, 2,304 tokens each."""
    table: dict[str, Counter[str]] = {}
    for name, (fault, _) in SIMULATED.items():
        counts = table.setdefault(f"sampled: {name}", Counter())
        for shape in SHAPES:
            for seed in seeds:
                found = compare(*simulated.pair(fault, shape, 100 + seed).records()).diagnosis
                counts.update([one.code for one in found] or ["nothing"])
    return table


def confusion(seeds: range) -> dict[str, Counter[str]]:
    """Seeded fault, or kind of clean pair -> how often each code was found; ``nothing`` where none was."""
    table: dict[str, Counter[str]] = {}
    for size in seeded.SIZES:
        for seed in seeds:
            cases = {code: seeded.faulty(code, size, seed) for code in seeded.FAULTS}
            cases |= {f"rounded: {name}": make(size, seed) for name, make in seeded.ROUNDED.items()}
            cases |= {f"clean: {name}": make(size, seed) for name, make in seeded.CLEAN.items()}
            for name, case in cases.items():
                codes = [one.code for one in compare(*case.records()).diagnosis]
                table.setdefault(name, Counter()).update(codes or ["nothing"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds per size")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = confusion(range(options.seeds)) | simulated_confusion(range(options.seeds))
    cases = len(seeded.SIZES) * options.seeds
    if options.json:
        print(
            json.dumps({"cases_each": cases, "found": {name: dict(found) for name, found in table.items()}}, indent=2)
        )
        return
    print(f"| seeded ({cases} each) | found |\n|---|---|")
    for name, found in table.items():
        print(f"| {name} | {', '.join(f'{code} {n}' for code, n in found.most_common())} |")


if __name__ == "__main__":
    main()
