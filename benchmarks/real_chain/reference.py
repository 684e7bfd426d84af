"""What transformers says in float32 about the responses of a rollout dump. Runs inside the environment.

``python reference.py CHECKPOINT OUT.pt ROLLOUT.pt…`` writes one list of tensors per dump, one tensor per sample, with
the log-prob of each response token.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_engine"))

import generate
import settings
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    checkpoint, out, *dumps = map(Path, sys.argv[1:])
    net = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    plain = settings.Setting("plain", "judged")
    found = []
    for path in dumps:
        answers = []
        for sample in torch.load(path)["samples"]:
            start = len(sample["tokens"]) - sample["response_length"]
            answers.append(generate.Answer(sample["tokens"][:start], sample["tokens"][start:], []))
        found.append([log_probs for log_probs, _ in generate.train_side(net, answers, [plain])["plain"]])
    torch.save(found, out)


if __name__ == "__main__":
    main()
