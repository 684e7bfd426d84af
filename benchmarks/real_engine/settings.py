"""What is sampled and computed, and what is true of it. Two halves that share no value, no prompt and no seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Half = Literal["calibration", "judged"]
HALVES: tuple[Half, ...] = ("calibration", "judged")
SEEDS: dict[Half, int] = {"calibration": 11, "judged": 2026}
ANSWERS = 4  # per prompt
MOST_TOKENS = 48  # per answer
UNEXPLAINED = "unexplained-mismatch"


@dataclass(frozen=True)
class Sampling:
    """What the engine is asked for. ``share``: part of the samples that it concerns; the others are plain."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: Literal["same", "no-first-token", "other-system", "no-system"] = "same"
    share: float = 1.0
    raw_log_probs: bool = False  # llama.cpp only: logged before temperature and truncation


@dataclass(frozen=True)
class Training:
    """How training computes its log-probs.

    ``weights``: those of the engine, rounded, or some updates further on: ``updated`` by so little that bf16 kernels
    differ as much, or ``moved`` clearly.
    """

    temperature: float = 1.0
    dtype: Literal["bfloat16", "float32"] = "float32"  # without bf16 instructions, float32 is several times faster
    weights: Literal["base", "fp8", "int4", "updated", "moved"] = "base"
    head: Literal["float32", "bfloat16"] = "float32"
    stored: Literal["float32", "bfloat16"] = "float32"
    entropy: bool = False  # whether the dump holds the entropy of each position


@dataclass(frozen=True)
class Setting:
    """One pair of dumps.

    Attributes:
        expected: codes that are right, in any order.
        allowed: codes that are right too, alone or beside the expected ones.
        truth: the number that the finding's estimate should cover; None where none is known.
        mixture: part of the samples that older weights sampled, with versions in the dump; the rest are current.
    """

    name: str
    half: Half
    expected: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    truth: float | None = None
    engine: Literal["vllm", "llama.cpp"] = "vllm"
    sampling: Sampling = field(default_factory=Sampling)
    training: Training = field(default_factory=Training)
    mixture: float = 0.0
    stored_by_engine: Literal["float32", "bfloat16"] = "float32"

    @property
    def folder(self) -> str:
        """Name of the folder of the pair."""
        return "".join(c if c.isalnum() or c in ".-" else "-" for c in f"{self.engine}-{self.name}")


# Per half: engine temperatures, (engine, trainer) temperatures, top-p, top-k, min-p, repetition, presence, frequency.
_VALUES: dict[Half, dict[str, tuple[float, ...]]] = {
    "calibration": {
        "engine": (0.6, 0.85, 1.15, 1.4),
        "trainer": (0.8, 1.25),
        "top_p": (0.8, 0.92),
        "top_k": (8, 35),
        "min_p": (0.03, 0.12),
        "repetition": (1.15, 1.3),
        "presence": (0.6,),
        "frequency": (0.4,),
    },
    "judged": {
        "engine": (0.7, 0.8, 0.9, 1.1, 1.2, 1.3),
        "trainer": (0.7, 0.9, 1.1),
        "top_p": (0.7, 0.9, 0.95),
        "top_k": (20, 50),
        "min_p": (0.05, 0.2),
        "repetition": (1.1, 1.2),
        "presence": (0.8,),
        "frequency": (0.6,),
    },
}


def settings(half: Half) -> list[Setting]:
    """The pairs of one half, those of one engine together, in the order in which they are made."""
    return [*_vllm(half), *_llama(half)]


def by_sampling(half: Half, engine: str) -> list[list[Setting]]:
    """The settings of an engine, those together that share their sampled tokens; mixtures last."""
    found: dict[tuple[str, Sampling], list[Setting]] = {}
    for one in settings(half):
        if one.engine == engine:
            found.setdefault((one.training.weights if one.mixture else "", one.sampling), []).append(one)
    return [own for _, own in sorted(found.items(), key=lambda item: item[0][0])]


def _vllm(half: Half) -> list[Setting]:
    values, judged = _VALUES[half], half == "judged"
    both = 0.8 if judged else 0.85
    found = [
        Setting("clean, fp32 trainer", half),
        Setting("clean, bf16 trainer", half, training=Training(dtype="bfloat16")),
        Setting("clean, bf16 LM head", half, training=Training(head="bfloat16")),
        Setting(f"clean, {both} on both sides", half, sampling=Sampling(both), training=Training(temperature=both)),
        Setting("fp8 trainer", half, allowed=(UNEXPLAINED,), training=Training(weights="fp8")),
        Setting("int4 trainer", half, (UNEXPLAINED,), training=Training(weights="int4")),
        Setting("trainer one update ahead", half, training=Training(weights="updated")),
    ]
    for t in values["engine"]:
        found.append(Setting(f"engine at {t}", half, ("temperature",), truth=t, sampling=Sampling(t)))
    for t in values["trainer"]:
        one = Setting(f"trainer at {t}", half, ("temperature",), truth=1 / t, training=Training(temperature=t))
        found.append(one)
    t = values["engine"][1]
    found.append(
        Setting(
            f"engine at {t}, entropies",
            half,
            ("temperature",),
            truth=t,
            sampling=Sampling(t),
            training=Training(entropy=True),
        )
    )
    cut = ("truncated-sampling",)
    found += [Setting(f"top-p {p}", half, cut, sampling=Sampling(top_p=p)) for p in values["top_p"]]
    found += [Setting(f"top-k {k:g}", half, cut, sampling=Sampling(top_k=int(k))) for k in values["top_k"]]
    found += [Setting(f"min-p {p}", half, cut, sampling=Sampling(min_p=p)) for p in values["min_p"]]
    for name in ("repetition", "presence", "frequency"):
        for x in values[name]:
            sampling = replace(Sampling(), **{name: x})
            found.append(Setting(f"{name} penalty {x}", half, ("sampling-penalty",), sampling=sampling))
    context = ("context-differs",)
    found += [
        Setting("first prompt token missing", half, context, sampling=Sampling(prompt="no-first-token")),
        Setting(
            "another system prompt" if judged else "no system prompt",
            half,
            context,
            (UNEXPLAINED,),
            sampling=Sampling(prompt="other-system" if judged else "no-system"),
        ),
    ]
    # Values that are sampled for all samples too: sampling is what takes long.
    mixed, part = Sampling(0.7 if judged else 0.6, share=1 / 3), Sampling(top_p=0.9 if judged else 0.92, share=0.4)
    some = Sampling(repetition=1.2 if judged else 1.15, share=0.5)
    found += [
        Setting(f"a third at {mixed.temperature}", half, ("temperature",), truth=mixed.temperature, sampling=mixed),
        Setting(f"40 % at top-p {part.top_p}", half, cut, sampling=part),
        Setting(f"half at repetition {some.repetition}", half, ("sampling-penalty",), sampling=some),
    ]
    stale = ("stale-weights",)
    share = 0.3 if judged else 0.5
    found += [
        Setting(
            f"{share:.0%} one small update behind", half, (), stale, training=Training(weights="updated"), mixture=share
        ),
        Setting(f"{share:.0%} far behind", half, stale, training=Training(weights="moved"), mixture=share),
    ]
    hot = Sampling(0.7 if judged else 0.8, top_p=0.95 if judged else 0.9)
    found.append(
        Setting(
            f"engine at {hot.temperature} and top-p {hot.top_p}",
            half,
            ("temperature", "truncated-sampling"),
            truth=hot.temperature,
            sampling=hot,
        )
    )
    rounding = ("dtype-rounding",)
    found.append(
        Setting("train log-probs in bf16", half, rounding, training=Training(stored="bfloat16"))
        if judged
        else Setting("rollout log-probs in bf16", half, rounding, stored_by_engine="bfloat16")
    )
    return found


def _llama(half: Half) -> list[Setting]:
    judged = half == "judged"
    t, p, r = (0.8, 0.9, 1.15) if judged else (0.7, 0.85, 1.25)
    raw = 0.7 if judged else 0.8
    plain = [
        Setting("quantised engine, dequantised trainer", half, allowed=(UNEXPLAINED,)),
        Setting(f"engine at {t}", half, ("temperature",), truth=t, sampling=Sampling(t)),
        Setting(f"top-p {p}", half, ("truncated-sampling",), sampling=Sampling(top_p=p)),
        Setting(f"repetition penalty {r}", half, ("sampling-penalty",), sampling=Sampling(repetition=r)),
        Setting(
            f"log-probs logged before temperature {raw}, trainer at {raw}",
            half,
            ("temperature",),
            truth=1 / raw,
            sampling=Sampling(raw, raw_log_probs=True),
            training=Training(temperature=raw),
        ),
    ]
    return [replace(one, engine="llama.cpp") for one in plain]
