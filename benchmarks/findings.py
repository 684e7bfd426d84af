"""Seeded faults against what is found: ``python -m benchmarks.findings`` prints the confusion table."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "analysis"))
import seeded

from slime_instrument._analysis.compare import compare


def confusion(seeds: range) -> dict[str, Counter[str]]:
    """Seeded fault, or kind of clean pair -> how often each code was found; ``nothing`` where none was."""
    table: dict[str, Counter[str]] = {}
    for size in seeded.SIZES:
        for seed in seeds:
            cases = {code: seeded.faulty(code, size, seed) for code in seeded.FAULTS}
            cases |= {f"clean: {name}": make(size, seed) for name, make in seeded.CLEAN.items()}
            for name, case in cases.items():
                codes = [finding["code"] for finding in compare(*case.records())["findings"]]
                table.setdefault(name, Counter()).update(codes or ["nothing"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds per size")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = confusion(range(options.seeds))
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
