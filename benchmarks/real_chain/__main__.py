"""A real mismatch from end to end: vLLM samples, unedited slime trains at DP2·CP2, and the dumps are compared.

SmolLM2-135M-Instruct, 48 answers of at most 48 tokens per rollout; the engine in bf16, slime's Megatron model in
float32, both on the CPU. The environment of the engine is that of ``benchmarks.real_engine``, which is set up on first
use (about 2 GB). Needs a slime checkout and the extras ``lab`` and ``report``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_engine import environment as environments
from slime_instrument.lab import LabOptions, LabResult, default_source, find_sources, train

HERE = Path(__file__).parent
DP2_CP2 = {"dp": 2, "cp": 2}
AGREES = 1e-3  # nats, between two float32 forwards of one model
#: One GRPO step of it moves this small model about as far as a step moves a policy in RL.
LEARNING_RATE = 1e-5
TIMEOUT_S = 3600  # of one training; other work on the machine may slow it down
BASE, UPDATED = "1", "2"  # what slime's engines would call the weights: the first that they are sent are 1

#: Scenario -> what is different in it.
SCENARIOS = {
    "clean": "nothing",
    "temperature": "the engine samples at 0.7, training computes at 1",
    "behind": "all samples are from weights one update old",
    "half-behind": "every other sample is from weights one update old, the others from the current ones",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for dumps, weights and reports")
    parser.add_argument("--slime", type=Path, default=None, help="a slime checkout")
    parser.add_argument("--folder", type=Path, default=environments.default_folder(), help="the engine's environment")
    options = parser.parse_args()
    slime = options.slime or default_source() or next(reversed(find_sources()), None)
    if slime is None:
        parser.error("no slime: git clone https://github.com/THUDM/slime, then --slime slime")
    chain = Chain(options.out.absolute(), slime, options.folder)
    chain.sample()
    agreed = chain.train_clean()
    chain.train_the_others()
    chain.compare()
    print(f"\n{chain.seconds():.0f} s in all")
    return 0 if agreed else 1


class Chain:
    """The steps, each on what the one before left in ``out``: one folder per scenario, as ``--dump-details`` has it."""

    def __init__(self, out: Path, slime: Path, folder: Path) -> None:
        self.out, self.slime, self.folder = out, slime, folder
        self.began = time.perf_counter()
        self.environment = environments.ready(folder, engines=("vllm",))
        self.base = folder / "checkpoint"
        self.updated = out / "updated-weights"
        self.reference = out / "transformers.pt"
        print(f"environment: {environments.versions(self.environment)}; slime: {slime}", flush=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def sampled(self, scenario: str) -> Path:
        """The rollout dump as the engine left it. The lab writes it again below the scenario's own folder."""
        return self.out / "sampled" / scenario / ("1.pt" if "behind" in scenario else "0.pt")

    def sample(self) -> None:
        """Rollouts by the base weights; those by the updated ones can only follow the update."""
        with self.step("vLLM samples three rollouts in bf16"):
            wanted = {"clean": (1.0, 1), "temperature": (0.7, 2), "behind": (1.0, 3)}
            self.engine(self.base, BASE, {self.sampled(name): how for name, how in wanted.items()})

    def train_clean(self) -> bool:
        """Train the clean rollout and hold its log-probs against transformers and between the layouts."""
        options: dict[str, Any] = {"checkpoint": self.base, "rollout": self.sampled("clean")}
        with self.step("slime trains the clean rollout in a single process"):
            single = self.train("single", **options)
        with self.step("slime trains the clean rollout at DP2·CP2, and its weights after the step are exported"):
            parallel = self.train(
                "clean", **options, **DP2_CP2, export_checkpoint=self.updated, overrides={"lr": LEARNING_RATE}
            )
        with self.step("transformers computes the same log-probs, and those of the next rollout"):
            rollouts = [str(self.sampled(name)) for name in ("clean", "behind")]
            self.environment.run(
                HERE / "reference.py", [str(self.base), str(self.reference), *rollouts], self.out / "reference.log"
            )
        clean, _ = torch.load(self.reference, weights_only=True)
        agree = True
        for name, one, other in (
            ("slime in a single process against transformers", log_probs_of(single), clean),
            ("slime at DP2·CP2 against the single process", log_probs_of(parallel), log_probs_of(single)),
        ):
            apart = torch.cat(one) - torch.cat(other)
            print(f"{name}: {apart.abs().max():.2g} nats apart at most, over {apart.numel()} tokens")
            agree &= bool(apart.abs().max() < AGREES)
        return agree

    def train_the_others(self) -> None:
        """Those that differ from the clean one in a single thing."""
        with self.step("vLLM, given the exported weights, samples another rollout"):
            newer = self.out / "sampled" / "newer" / "1.pt"
            self.engine(self.updated, UPDATED, {newer: (1.0, 4)})
        older = torch.load(self.sampled("behind"), weights_only=True)
        samples = zip(older["samples"], torch.load(newer, weights_only=True)["samples"], strict=True)
        mixed = [pair[number % 2] for number, pair in enumerate(samples)]
        self.sampled("half-behind").parent.mkdir(parents=True, exist_ok=True)
        torch.save({**older, "samples": mixed}, self.sampled("half-behind"))
        for name, checkpoint in (
            ("temperature", self.base),
            ("behind", self.updated),
            ("half-behind", self.updated),
        ):
            with self.step(f"slime trains at DP2·CP2: {SCENARIOS[name]}"):
                result = self.train(name, checkpoint=checkpoint, rollout=self.sampled(name), **DP2_CP2)
            if name == "behind":
                _, before = torch.load(self.reference, weights_only=True)
                moved = torch.cat(log_probs_of(result)) - torch.cat(before)
                # Sampled from the old weights: the mean of k3 is the KL divergence of the new from them.
                kl = (moved.exp() - 1 - moved).mean()
                print(f"the update moved log-probs by {moved.abs().mean():.3f} nats on average, KL {kl:.2g}")

    def compare(self) -> None:
        """What a user runs on a folder of dumps."""
        for name, different in SCENARIOS.items():
            folder = self.out / name
            print(f"\n## {name}: {different}\n", flush=True)
            self.command("compare", str(folder))
            tokenizer = ("--tokenizer", str(self.base))
            self.command("report", str(folder), *tokenizer, "-o", str(folder / "report.html"))

    def train(self, name: str, **options: Any) -> LabResult:
        overrides = {"distributed_timeout_minutes": TIMEOUT_S // 60, **options.pop("overrides", {})}
        if self.counts_updates:
            overrides["update_weight_start_version"] = int(UPDATED if options["checkpoint"] == self.updated else BASE)
        return train(
            LabOptions(out=self.out / name, slime=self.slime, timeout=float(TIMEOUT_S), overrides=overrides, **options)
        )

    @property
    def counts_updates(self) -> bool:
        """Whether this slime's trainer can be told how often its weights were sent to the engines. If so, the train
        dumps say how old the weights were that sampled; if not, this shows only where samples differ in it."""
        actor = self.slime / "slime" / "backends" / "megatron_utils" / "actor.py"
        return "update_weight_start_version" in actor.read_text(encoding="utf-8")

    def engine(self, checkpoint: Path, version: str, dumps: Mapping[Path, tuple[float, int]]) -> None:
        """Sample with the weights of ``checkpoint``: per dump the temperature and a seed. Those that are there stay."""
        missing = [f"{path}:{t}:{seed}" for path, (t, seed) in dumps.items() if not path.exists()]
        if not missing:
            return
        arguments = [str(self.environment.gguf), str(checkpoint), version, *missing]
        self.out.mkdir(parents=True, exist_ok=True)
        self.environment.run(HERE / "sample.py", arguments, self.out / f"engine-{version}.log")

    @staticmethod
    def command(*arguments: str) -> None:
        """One of the commands that a user has; its exit status says what it found, and is no failure of ours."""
        print(f"$ slime-instrument {' '.join(arguments)}", flush=True)
        program = "import sys; from slime_instrument._cli.app import main; sys.exit(main())"
        subprocess.run([sys.executable, "-c", program, *arguments], check=False)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)


def log_probs_of(result: LabResult) -> list[torch.Tensor]:
    """Per sample, in the order of the rollout, the log-prob of each response token."""
    (path,) = result.train_dumps
    return [sample["log_probs"] for sample in torch.load(path, weights_only=True)["samples"]]


if __name__ == "__main__":
    sys.exit(main())
