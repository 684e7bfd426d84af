"""Findings on pairs from real engines: ``python -m benchmarks.real_engine`` prints the table of the judged half.

Sets up its own environment (once), samples with vLLM and llama.cpp on the CPU, computes training's log-probs with
transformers, and compares. The set-up takes about twenty minutes, half of it for compiling llama.cpp, and each half
about an hour on two cores without bf16 instructions.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # its modules run in the environment too, where there is no package around them

import environment as environments  # noqa: E402
import judge as judging  # noqa: E402
import settings as declared  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=(*declared.HALVES, "both"), default="judged")
    parser.add_argument("--folder", type=Path, default=environments.default_folder(), help="environment, model, pairs")
    parser.add_argument("--again", action="store_true", help="sample again, though the pairs are there")
    parser.add_argument("--only-compare", action="store_true", help="compare the pairs that are there; needs no engine")
    options = parser.parse_args()
    began = time.perf_counter()
    halves = declared.HALVES if options.half == "both" else (options.half,)
    if not options.only_compare:
        environment = environments.ready(options.folder)
        print(
            f"environment: {environments.versions(environment)}, engines: {', '.join(environment.engines)}", flush=True
        )
        for half in halves:
            for engine in environment.engines:
                missing = [
                    one for one in declared.settings(half)
                    if one.engine == engine and not (options.folder / half / one.folder).exists()
                ]  # fmt: skip
                if missing or options.again:
                    arguments = [str(environment.gguf), str(options.folder), half, "--engine", engine]
                    environment.run(HERE / "generate.py", arguments, options.folder / f"{half}-{engine}.log")
    wrong = 0
    for half in halves:
        judged = judging.judge(options.folder / half, half)
        wrong += sum(not one.right for one in judged)
        absent = len(declared.settings(half)) - len(judged)
        print(f"\n## {half} half\n\n{judging.table(judged)}" + (f" {absent} pairs are missing." if absent else ""))
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
