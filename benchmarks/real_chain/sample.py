"""Sample rollout dumps with vLLM, as slime's rollout manager would have written them. Runs inside the environment.

``python sample.py MODEL.gguf CHECKPOINT VERSION FILE:TEMPERATURE:SEED…``: one engine with the weights of CHECKPOINT,
one dump per FILE.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_engine"))

import generate
import prompts
import settings
import torch


def reward_of(tokens: list[int]) -> float:
    """A rule in the place of a reward model: the share of the tokens that are no repetition."""
    return len(set(tokens)) / len(tokens)


def sample(engine: Any, model: Any, version: str, temperature: float, seed: int) -> list[dict[str, Any]]:
    """Several answers to each prompt, as slime's ``Sample.to_dict`` gives them."""
    questions = [question for question in prompts.JUDGED for _ in range(settings.ANSWERS)]
    ids = [model.prompt(question, prompts.SYSTEM) for question in questions]
    sampling = settings.Sampling(temperature)
    requests = [generate.Request(one, one, sampling, 1000 * seed + number) for number, one in enumerate(ids)]
    found = []
    for number, answer in enumerate(engine.sample(requests)):
        ended = answer.tokens[-1] == model.tokenizer.eos_token_id
        found.append(
            {
                "group_index": number // settings.ANSWERS,
                "index": number,
                "prompt": model.tokenizer.decode(answer.prompt),
                "tokens": answer.prompt + answer.tokens,
                "response": model.tokenizer.decode(answer.tokens),
                "response_length": len(answer.tokens),
                "label": None,
                "reward": reward_of(answer.tokens),
                "loss_mask": None,
                "weight_versions": [version],
                "rollout_log_probs": answer.log_probs,
                "remove_sample": False,
                "status": "completed" if ended else "truncated",
                "metadata": {},
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("version")
    parser.add_argument("dumps", nargs="+")
    options = parser.parse_args()
    model = generate.Model(options.gguf, options.checkpoint)
    engine = generate.Vllm(options.checkpoint)
    for dump in options.dumps:
        began = time.perf_counter()
        name, temperature, seed = dump.rsplit(":", 2)
        samples = sample(engine, model, options.version, float(temperature), int(seed))
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"rollout_id": int(path.stem), "samples": samples}, path)
        tokens = sum(one["response_length"] for one in samples)
        said = f"{len(samples)} answers at {temperature}, {tokens} tokens: {path}"
        print(f"[{time.perf_counter() - began:6.0f} s] {said}", flush=True)


if __name__ == "__main__":
    main()
