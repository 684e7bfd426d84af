"""The frameworks' own functions, taken out of their checkouts, called on a batch of ours.

Checkouts are looked for in ``$SLIME_FRAMEWORKS`` or ~/.cache/slime-instrument/frameworks, those of slime where the lab
finds them. A function is compiled from its own source with stand-ins for what it imports. ``python -m
tests.analysis.frameworks`` writes what they answer to tests/data/corrections.json, for machines without checkouts.
"""

from __future__ import annotations
import __future__

import ast
import enum
import functools
import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from slime_instrument._analysis.corrections import PRESETS, Batch, Policy
from slime_instrument.lab import find_sources

VECTORS = Path(__file__).parents[1] / "data" / "corrections.json"
ROOT = Path(os.environ.get("SLIME_FRAMEWORKS", "~/.cache/slime-instrument/frameworks")).expanduser()


@dataclass
class Answer:
    """What a framework's function says: each token's weight with what it takes out at 0, and what it would log."""

    effective: torch.Tensor
    reported: dict[str, float] = field(default_factory=dict)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path, *names: str, **names_it_uses: Any) -> SimpleNamespace:
    """Functions of a module, compiled without the module's imports. ``Class.method`` names a method."""
    tree = _parsed(path)
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}": one for one in node.body if isinstance(one, ast.FunctionDef)}
    namespace: dict[str, Any] = {"torch": torch, "math": math, **names_it_uses}
    for name in names:
        definition = found[name]
        definition.decorator_list = []
        module = ast.Module([definition], [])
        flags = __future__.annotations.compiler_flag
        exec(compile(module, str(path), "exec", flags=flags, dont_inherit=True), namespace)
    return SimpleNamespace(**{name.rpartition(".")[2]: namespace[name.rpartition(".")[2]] for name in names})


def padded(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """``(N,)`` as ``(S, T)`` with zeros behind the sequences."""
    width = max(1, int(batch.lengths.max()))
    rows = torch.zeros(len(batch.lengths), width, dtype=values.dtype)
    for row, part in zip(rows, values.split(batch.lengths.tolist()), strict=True):
        row[: len(part)] = part
    return rows


def flat(batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[:n] for row, n in zip(rows, batch.lengths.tolist(), strict=True)])


def checkout(framework: str) -> Path | None:
    """Where the sources of a preset's framework are; None where they are not."""
    if framework == "slime":
        return next((one for one in find_sources() if one.name == "v0.3.1"), None)
    folder = ROOT / {"NeMo-RL": "nemo-rl", "ROLL": "roll", "TRL": "trl", "slime, miles": "miles"}.get(
        framework, framework
    )
    return folder if folder.is_dir() else None


# --- one caller for each framework ---


def slime(policy: Policy, batch: Batch, root: Path) -> Answer:
    args = Namespace(**policy.parameters)
    lengths = batch.lengths.tolist()
    lists = {
        "train_log_probs": list(batch.train.split(lengths)),
        "rollout_log_probs": list(batch.rollout.split(lengths)),
        "loss_masks": list(batch.mask.to(batch.train.dtype).split(lengths)),
    }
    if policy.name == "slime-opsm":
        assert batch.advantages is not None
        opsm = functions(root / "slime/utils/ppo_utils.py", "compute_opsm_mask").compute_opsm_mask
        kept, _ = opsm(
            args,
            lists["train_log_probs"],
            lists["rollout_log_probs"],
            list(batch.advantages.split(lengths)),
            lists["loss_masks"],
        )
        return Answer(kept)
    name = {"slime-tis": "vanilla_tis_function", "slime-icepop": "icepop_function"}[policy.name]
    rule = getattr(functions(root / "slime/backends/megatron_utils/loss.py", name), name)
    weight, _, metrics = rule(args, pg_loss=torch.ones_like(batch.train), **lists)
    counted = int(batch.mask.sum())
    return Answer(weight, {key: float(value[batch.mask].sum() / counted) for key, value in metrics.items()})


def mis(policy: Policy, batch: Batch, root: Path) -> Answer:
    file = root / "examples/infra_features/train_infer_mismatch_helper/mis.py"
    names = ("masked_sum", "masked_mean", "masked_min", "masked_max", "metrics_append", "calculate_veto_mask")
    module = functions(file, *names, "truncate", "clip", "mask", "add_ppl_metrics", "compute_mis_weights")
    lengths = batch.lengths.tolist()
    weights, masks, _ = module.compute_mis_weights(
        Namespace(use_tis=True, **policy.parameters),
        train_log_probs=list(batch.train.split(lengths)),
        rollout_log_probs=list(batch.rollout.split(lengths)),
        loss_masks=list(batch.mask.to(batch.train.dtype).split(lengths)),
    )
    rejected = torch.cat(masks) == 0
    return Answer(torch.cat(weights).masked_fill(rejected, 0.0))


def verl(policy: Policy, batch: Batch, root: Path) -> Answer:
    masked = functions(root / "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    names = (
        "_parse_rollout_rs_thresholds",
        "compute_rs_metrics",
        "compute_rollout_rejection_mask",
        "compute_is_metrics",
        "compute_rollout_correction_weights",
    )
    options = ["token_k1", "token_k2", "token_k3"]
    every = [
        *options,
        *(f"seq_{how}_{k}" for how in ("sum", "mean") for k in ("k1", "k2", "k3")),
        "seq_max_k2",
        "seq_max_k3",
    ]
    module = functions(
        root / "verl/trainer/ppo/rollout_corr_helper.py",
        *names,
        verl_F=masked,
        SAFETY_BOUND=20.0,
        SUPPORTED_ROLLOUT_RS_OPTIONS=set(every),
        TOKEN_LEVEL_ROLLOUT_RS_OPTIONS=set(options),
    )
    given = dict(policy.parameters)
    log_ratio = padded(batch, batch.train) - padded(batch, batch.rollout)
    mask = padded(batch, batch.mask.to(batch.train.dtype))
    weight, reported = torch.ones_like(mask), {}
    if given["rollout_is"] is not None:
        weight, metrics = module.compute_rollout_correction_weights(
            log_ratio,
            mask,
            given["rollout_is"],
            given["rollout_is_threshold"],
            given["rollout_is_batch_normalize"],
        )
        wanted = ("mean", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")
        reported = {f"rollout_is_{name}": metrics[f"rollout_is_{name}"] for name in wanted}
    if given["rollout_rs"] is not None:
        kept, metrics = module.compute_rollout_rejection_mask(
            log_ratio, mask, given["rollout_rs"], given["rollout_rs_threshold"]
        )
        weight = weight.masked_fill(kept == 0, 0.0)
        wanted = ("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction")
        reported |= {name: metrics[name] for name in wanted}
    return Answer(flat(batch, weight), reported)


def nemo_rl(policy: Policy, batch: Batch, root: Path) -> Answer:
    """The weight is what the gradient of the loss is multiplied by where the advantage and PPO's ratio are 1."""
    mean = functions(root / "nemo_rl/algorithms/utils.py", "masked_mean").masked_mean
    kinds = enum.Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")
    loss = functions(
        root / "nemo_rl/algorithms/loss/loss_functions.py",
        "ClippedPGLossFn.__call__",
        masked_mean=mean,
        LossType=kinds,
        calculate_kl=lambda logprobs, **_: torch.zeros_like(logprobs),
    )
    given = {**policy.parameters, "use_importance_sampling_correction": True}
    # The gradient of a sequence's ratio is shared by its tokens: it would not show one token's weight.
    assert not given["sequence_level_importance_ratios"]
    self = SimpleNamespace(
        force_on_policy_ratio=False,
        disable_ppo_ratio=False,
        use_cispo=False,
        ratio_clip_min=0.2,
        ratio_clip_max=0.2,
        ratio_clip_c=None,
        reference_policy_kl_penalty=0,
        reference_policy_kl_type="k3",
        positive_example_nll_weight=0.0,
        loss_type=kinds.TOKEN_LEVEL,
        **given,
    )

    def shifted(values: torch.Tensor) -> torch.Tensor:  # the loss drops the first column
        rows = padded(batch, values)
        return torch.cat([rows[:, :1], rows], dim=1)

    mask = shifted(batch.mask.to(batch.train.dtype))
    tokens = float(batch.mask.sum())
    current = padded(batch, batch.train).requires_grad_()
    data = {
        "token_mask": mask,
        "sample_mask": torch.ones(len(batch.lengths), dtype=batch.train.dtype),
        "advantages": torch.ones_like(mask),
        "prev_logprobs": shifted(batch.train),
        "generation_logprobs": shifted(batch.rollout),
    }
    total, metrics = loss.__call__(
        self,
        next_token_logprobs=current,
        data=data,
        global_valid_seqs=torch.tensor(float(len(batch.lengths))),
        global_valid_toks=torch.tensor(tokens),
    )
    (gradient,) = torch.autograd.grad(total, current)
    reported = {name: metrics[name] for name in ("is_oob_ratio", "sampling_importance_ratio")}
    return Answer(flat(batch, -gradient * (tokens + 1e-8)), reported)


def prime_rl(policy: Policy, batch: Batch, root: Path) -> Answer:
    """The weight is the gradient of the loss, whose other term is switched off, over the advantage."""
    assert batch.advantages is not None
    name = {"prime-rl-dppo": "default_loss_fn", "prime-rl-ipo": "ipo_loss_fn"}[policy.name]
    helpers = ("_safe_mean", "compute_importance_ratio_and_mismatch_kl")
    module = functions(
        root / "src/prime_rl/trainer/rl/loss.py", *helpers, name, LossOutputs=lambda **all: SimpleNamespace(**all)
    )
    train = batch.train.clone().requires_grad_()
    inputs = SimpleNamespace(
        trainer_logprobs=train,
        inference_logprobs=batch.rollout,
        advantages=batch.advantages,
        loss_mask=batch.mask,
        loss_weights=None,
    )
    outputs = getattr(module, name)(inputs, SimpleNamespace(adv_tau=1.0, kl_tau=0.0, **policy.parameters))
    (gradient,) = torch.autograd.grad(outputs.loss, train)
    weight = torch.where(batch.advantages != 0, -gradient / batch.advantages, torch.nan)  # nothing shows at 0
    wanted = [key for key in ("is_masked", "is_masked_high", "is_masked_low") if key in outputs.metrics]
    return Answer(weight, {key: float(outputs.metrics[key]) for key in wanted})


def roll(policy: Policy, batch: Batch, root: Path) -> Answer:
    segments = functions(root / "roll/pipeline/agentic/utils.py", "compute_segment_masked_mean")
    masked = functions(root / "roll/utils/functionals.py", "masked_mean", "masked_sum", "agg_loss")
    names = (
        "_compute_all_granularity",
        "_infer_global_valid_samples_from_mask",
        "_infer_global_valid_tokens_from_mask",
    )
    module = functions(
        root / "roll/utils/train_infer_corrections.py",
        *names,
        "compute_train_infer_correction",
        **vars(segments),
        **vars(masked),
    )
    given: dict[str, Any] = dict(policy.parameters)
    ratio, diff = given["ratio_low"] is not None, given["diff_low"] is not None
    entry = SimpleNamespace(enabled=True, ratio_enabled=ratio, diff_enabled=diff, **given)
    config = SimpleNamespace(
        is_weight=SimpleNamespace(enabled=given["weight_type"] is not None, detach=True, **given),
        filters=[entry] if given["agg_type"] is not None else [],
    )
    weight, kept, metrics = module.compute_train_infer_correction(
        config, padded(batch, batch.mask), padded(batch, batch.train), padded(batch, batch.rollout)
    )
    wanted = [one for one in ("actor/train_infer_final_mask_mean",) if one in metrics]
    if given["weight_type"] in ("token", "segment"):
        wanted.append("actor/is_weight_clipfrac@sum")
    return Answer(flat(batch, weight.masked_fill(kept == 0, 0.0)), {key: metrics[key] for key in wanted})


@functools.cache
def _trl_branch(file: Path) -> ast.If:
    wanted = "self.use_vllm and self.vllm_importance_sampling_correction"
    (branch,) = (
        node
        for node in ast.walk(_parsed(file))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == wanted
        and "vllm_importance_sampling_clip_max" in ast.unparse(node)
    )
    return branch


def trl(policy: Policy, batch: Batch, root: Path) -> Answer:
    """The branch of a long method that computes the ratio, run as it stands."""
    file = root / "trl/trainer/grpo_trainer.py"
    branch = _trl_branch(file)
    scope: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "self": SimpleNamespace(**policy.parameters),
        "completion_mask": padded(batch, batch.mask.long()),
        "tool_mask": None,
        "old_per_token_logps": padded(batch, batch.train),
        "sampling_per_token_logps": padded(batch, batch.rollout),
    }
    exec(compile(ast.Module(branch.body, []), str(file), "exec"), scope)
    ratio = scope["vllm_importance_sampling_ratio"]
    by_sequence = ratio.shape[1] == 1 and str(policy.parameters["vllm_importance_sampling_mode"]).startswith("sequence")
    counted = ratio.flatten() if by_sequence else ratio[scope["completion_mask"].bool()]
    prefix = "sampling/importance_sampling_ratio"
    reported = {f"{prefix}/{how}": float(getattr(counted, how)()) for how in ("min", "mean", "max")}
    return Answer(flat(batch, ratio.expand_as(scope["completion_mask"])), reported)


CALLERS: Mapping[str, Callable[[Policy, Batch, Path], Answer]] = {
    "slime": slime,
    "slime, miles": mis,
    "verl": verl,
    "NeMo-RL": nemo_rl,
    "prime-rl": prime_rl,
    "ROLL": roll,
    "TRL": trl,
}


# --- what they are asked ---


def policies() -> dict[str, Policy]:
    """Presets whose framework can be called, and the same with parameters that reach what the presets do not."""
    presets = [one for one in PRESETS.values() if one.framework in CALLERS and one.name != "verl-icepop"]
    tis, seq, rs = PRESETS["verl-token-tis"], PRESETS["verl-seq-tis"], PRESETS["verl-geo-rs"]
    others = {
        "verl, batch normalised": tis.changed(rollout_is_batch_normalize=True),
        "verl, sequences batch normalised": seq.changed(rollout_is_batch_normalize=True),
        "verl, chained": rs.changed(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.2_4.0,3.0"),
        **{
            f"verl, {option}": rs.changed(rollout_rs=option, rollout_rs_threshold=limit)
            for option, limit in (
                ("token_k1", 1.5),
                ("token_k2", 0.05),
                ("token_k3", 0.05),
                ("seq_sum_k2", 1.0),
                ("seq_sum_k3", 1.0),
                ("seq_mean_k2", 0.05),
                ("seq_max_k3", 0.5),
            )
        },
        "TRL, token_truncate": PRESETS["trl"].changed(
            vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_min=0.5
        ),
        "TRL, token_mask": PRESETS["trl"].changed(vllm_importance_sampling_mode="token_mask"),
        "TRL, sequence_truncate": PRESETS["trl"].changed(vllm_importance_sampling_mode="sequence_truncate"),
        "slime-tis, both bounds": PRESETS["slime-tis"].changed(tis_clip_low=0.5, tis_clip=1.5),
        "slime-icepop, both bounds": PRESETS["slime-icepop"].changed(tis_clip_low=0.5, tis_clip=1.5),
        "NeMo-RL, both bounds": PRESETS["nemo-rl-tis"].changed(truncated_importance_sampling_ratio_min=0.5),
        **{
            f"ROLL, weight by {level}": PRESETS["roll-weight"].changed(weight_type=level)
            for level in ("segment", "geometric", "sequence")
        },
        **{
            f"ROLL, filter by {level}": PRESETS["roll-filter"].changed(agg_type=level)
            for level in ("segment", "geometric", "sequence")
        },
        "ROLL, difference": PRESETS["roll-filter"].changed(
            ratio_low=None, ratio_high=None, diff_low=-0.2, diff_high=0.2
        ),
        **{
            f"mis, {level} {mode}": PRESETS["mis"].changed(
                tis_level=level, rs_level=level, tis_mode=mode, tis_batch_normalize=level == "sequence"
            )
            for level in ("token", "sequence", "geometric")
            for mode in ("truncate", "clip", "mask")
        },
        "mis, no lower bound": PRESETS["mis"].changed(
            tis_lower_bound=None, rs_veto_threshold=None, rs_level="geometric"
        ),
    }
    return {**{one.name: one for one in presets}, **others}


def batches(dtype: torch.dtype = torch.float64) -> dict[str, Batch]:
    """By what is in them. Differences are as large as bounds are, so that each bound is crossed."""
    found = {"ordinary": _batch(7, [9, 30, 4, 17, 1, 12], 0.05), "wide": _batch(8, [9, 30, 4, 17, 1, 12], 0.8)}
    empty = _batch(9, [6, 0, 11, 5], 0.4)
    empty.mask[6:17] = False  # the third sequence, whole
    found["empty and masked"] = empty
    large = _batch(10, [8, 8, 8], 0.3)
    large.train[3], large.train[9] = large.rollout[3] - 90.0, large.rollout[9] - 800.0
    large.rollout[17] = large.train[17] - 90.0
    large.mask[3] = large.mask[9] = large.mask[17] = True
    found["overflow"] = large
    for name in ("NaN in the rollout", "NaN in training"):
        found[name] = broken = _batch(11, [8, 8, 8], 0.3)
        (broken.train if name == "NaN in training" else broken.rollout)[2] = torch.nan
        broken.mask[2] = True
    for one in found.values():
        assert one.advantages is not None
    return {
        name: Batch(one.train.to(dtype), one.rollout.to(dtype), one.mask, one.lengths, one.advantages.to(dtype))  # type: ignore[union-attr]
        for name, one in found.items()
    }


def _batch(seed: int, lengths: list[int], noise: float) -> Batch:
    random = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    rollout = -torch.rand(n, generator=random, dtype=torch.float64).mul(3).square() - 1e-3
    train = rollout + torch.randn(n, generator=random, dtype=torch.float64) * noise * (0.2 - rollout).sqrt()
    mask = torch.rand(n, generator=random) < 0.85
    sizes = torch.tensor(lengths)
    advantages = torch.randn(len(lengths), generator=random, dtype=torch.float64).repeat_interleave(sizes)
    return Batch(train.clamp(max=-1e-4), rollout, mask, sizes, advantages)


def comparable(policy: Policy, batch_name: str) -> bool:
    """Whether the framework's weight can be seen: NeMo-RL's loss is NaN, whatever the weight, where training's is."""
    return not (batch_name == "NaN in training" and policy.rule.__name__ == "nemo_rl")


def _write() -> None:
    answers: dict[str, dict[str, Any]] = {}
    for name, policy in policies().items():
        root = checkout(policy.framework)
        if root is None:
            raise SystemExit(f"no checkout of {policy.framework}")
        for batch_name, batch in batches().items():
            if comparable(policy, batch_name):
                answer = CALLERS[policy.framework](policy, batch, root)
                values = answer.effective.detach()[batch.mask].tolist()
                answers.setdefault(name, {})[batch_name] = {
                    "effective": [f"{value:.9g}" for value in values],
                    "reported": {key: f"{value:.9g}" for key, value in answer.reported.items()},
                }
    VECTORS.parent.mkdir(exist_ok=True)
    lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    VECTORS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _write()
