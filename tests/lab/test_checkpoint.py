"""A Llama checkpoint and a rollout dump in the lab: numbers are the model's, what cannot be trained is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_instrument.lab import LabError, LabOptions, LabResult, train
from slime_instrument.lab._preconditions import check

from . import llama

pytestmark = pytest.mark.lab

#: So that the weights that are written are those that were read.
STILL: dict[str, Any] = {"overrides": {"lr": 0.0}}
MODELS = {
    "tied": {},
    "untied, sizes of its own": {
        "tie_word_embeddings": False, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("rollout") / "12.pt"
    return path, llama.write_rollout(path)


def trained(result: LabResult) -> list[dict[str, Any]]:
    (path,) = result.train_dumps
    samples: list[dict[str, Any]] = torch.load(path, weights_only=True)["samples"]
    return samples


def exported(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def largest_difference(config: dict[str, Any], weights: llama.Tensors, result: LabResult, samples: Any) -> float:
    """Between the log-probs of a train dump and those of the model, over all response tokens."""
    found = 0.0
    for ours, sample in zip(trained(result), samples, strict=True):
        assert ours["tokens"].tolist() == sample["tokens"]
        expected = llama.log_probs(config, weights, sample["tokens"], sample["response_length"])
        found = max(found, (ours["log_probs"] - expected).abs().max().item())
    return found


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("layout", [{}, {"cp": 2, "dp": 2}], ids=["single", "dp2cp2"])
@pytest.mark.parametrize(
    "release",
    [
        None,
        pytest.param("main", marks=pytest.mark.real_slime),
        pytest.param("v0.2.4", marks=[pytest.mark.real_slime, pytest.mark.full]),
    ],
)
def test_log_probs_are_those_of_the_model_and_weights_come_back_bit_for_bit(
    release: str | None,
    layout: dict[str, int],
    model: str,
    checkout: Callable[[str], Path],
    rollout: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    path, samples = rollout
    weights = llama.write_checkpoint(tmp_path / "model", **MODELS[model])
    result = train(
        LabOptions(
            out=tmp_path / "out",
            slime=checkout(release) if release else None,
            checkpoint=tmp_path / "model",
            rollout=path,
            export_checkpoint=tmp_path / "exported",
            **layout,
            **STILL,
        )
    )
    assert result.target == ("slime" if release else "miniature")
    assert largest_difference({**llama.CONFIG, **MODELS[model]}, weights, result, samples) < 1e-4
    back = exported(tmp_path / "exported")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_parts_of_tensor_and_pipeline_parallel_ranks_are_joined(
    rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    path, samples = rollout
    weights = llama.write_checkpoint(tmp_path / "model")
    options = LabOptions(out=tmp_path / "out", tp=2, pp=2, checkpoint=tmp_path / "model", rollout=path, **STILL)
    first = train(LabOptions(**{**vars(options), "export_checkpoint": tmp_path / "exported"}))
    assert largest_difference(llama.CONFIG, weights, first, samples) < 1e-4
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert len(set(index["weight_map"].values())) == 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    back = exported(tmp_path / "exported")
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    # What was written in several files can be read again.
    again = train(LabOptions(out=tmp_path / "again", checkpoint=tmp_path / "exported", rollout=path, **STILL))
    assert largest_difference(llama.CONFIG, weights, again, samples) < 1e-4


@pytest.mark.real_slime
def test_slimes_own_converter_would_send_the_same_weights_to_an_engine(
    checkout: Callable[[str], Path], rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """After a step that moved them, and for every weight that slime's converter for Llama knows by this layer spec."""
    llama.write_checkpoint(tmp_path / "model")
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import torch\n"
        "from slime_instrument.lab import _weights\n"
        "def keep(rank, actor_module, args):\n"
        "    export = _weights.export\n"
        "    def also(checkpoint, actor_module, args, actor, folder):\n"
        "        from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf\n"
        "        found = {}\n"
        "        for name, tensor in _weights.named(actor_module, args, actor):\n"
        "            if not name.endswith('.input_layernorm.weight'):\n"
        "                found.update(convert_to_hf(args, args.model_name, name, tensor.detach().clone()))\n"
        f"        torch.save(found, {str(tmp_path / 'theirs.pt')!r})\n"
        "        export(checkpoint, actor_module, args, actor, folder)\n"
        "    _weights.export = also\n"
    )
    train(
        LabOptions(
            out=tmp_path / "out",
            slime=checkout("main"),
            checkpoint=tmp_path / "model",
            rollout=rollout[0],
            export_checkpoint=tmp_path / "exported",
            rank_hook=f"{hook}:keep",
            overrides={"lr": 1e-3},
        )
    )
    theirs, ours = torch.load(tmp_path / "theirs.pt", weights_only=True), exported(tmp_path / "exported")
    assert ours.keys() - theirs.keys() == {f"model.layers.{number}.input_layernorm.weight" for number in (0, 1)}
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert all(not torch.equal(ours[name], before[name]) for name in before)


def test_training_goes_on_from_exported_weights(rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    path, samples = rollout
    weights = llama.write_checkpoint(tmp_path / "model")
    first = LabOptions(
        out=tmp_path / "1", checkpoint=tmp_path / "model", rollout=path, export_checkpoint=tmp_path / "next",
        overrides={"lr": 1e-2}, with_ref=True,
    )  # fmt: skip
    result = train(first)
    for sample in trained(result):
        # The reference is the checkpoint too, so before the first step it is the policy.
        torch.testing.assert_close(sample["ref_log_probs"], sample["log_probs"], rtol=0, atol=1e-5)
    moved = exported(tmp_path / "next")
    assert (tmp_path / "next" / "tokenizer.json").exists()
    second = train(LabOptions(out=tmp_path / "2", checkpoint=tmp_path / "next", rollout=path))
    assert largest_difference(llama.CONFIG, weights, second, samples) > 0.01
    assert largest_difference(llama.CONFIG, moved, second, samples) < 1e-4


def test_a_checkpoint_in_bf16_is_exported_in_the_type_that_was_trained_in(
    rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    weights = llama.write_checkpoint(tmp_path / "model", dtype=torch.bfloat16, torch_dtype="bfloat16")
    for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        folder = tmp_path / f"exported-{bf16}"
        train(
            LabOptions(
                out=tmp_path / f"out-{bf16}", checkpoint=tmp_path / "model", rollout=rollout[0],
                export_checkpoint=folder, overrides={"lr": 0.0, "bf16": bf16},
            )
        )  # fmt: skip
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        assert "torch_dtype" not in config
        back = exported(folder)
        assert all(torch.equal(back[name], weights[name].to(dtype)) for name in weights)


def test_a_rollout_is_trained_as_it_is_under_its_own_number(
    rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    path, samples = rollout
    llama.write_checkpoint(tmp_path / "model")
    result = train(LabOptions(out=tmp_path / "out", dp=2, checkpoint=tmp_path / "model", rollout=path, **STILL))
    assert [file.name for file in (*result.train_dumps, *result.rollout_dumps)] == ["12.pt", "12.pt"]
    for position, (ours, sample) in enumerate(zip(trained(result), samples, strict=True)):
        assert ours["rollout_position"] == position
        assert ours["sample_index"] == sample["index"]
        assert ours["loss_masks"].tolist() == sample["loss_mask"]
        torch.testing.assert_close(ours["rollout_log_probs"], torch.tensor(sample["rollout_log_probs"]))
    # Rewards are normalised in the groups of the dump: of two samples, one is above and one below, or both are equal.
    rewards = [sample["rewards"] for sample in trained(result)]
    for one, other in zip(rewards[::2], rewards[1::2], strict=True):
        assert one == pytest.approx(-other, abs=1e-5)
    (written,) = (torch.load(file, weights_only=True)["samples"] for file in result.rollout_dumps)
    assert [sample["weight_versions"] for sample in written] == [["3"]] * len(samples)
    assert [sample["tokens"] for sample in written] == [sample["tokens"] for sample in samples]


def test_each_rollout_has_a_file_of_its_own(tmp_path: Path) -> None:
    """And the tiny model trains a dump too, where its tokens are in the vocabulary."""
    for number in range(2):
        changes = {"tokens": [number, *range(6)], "response_length": 4, "rollout_log_probs": [-1.0] * 4}
        samples = llama.write_rollout(tmp_path / f"{number}.pt", loss_mask=None, **changes)
        torch.save({"rollout_id": number, "samples": samples}, tmp_path / f"{number}.pt")
    result = train(LabOptions(out=tmp_path / "out", rollouts=2, rollout=tmp_path / "{rollout_id}.pt"))
    assert [path.name for path in result.train_dumps] == ["0.pt", "1.pt"]
    for number, path in enumerate(result.train_dumps):
        for sample in torch.load(path, weights_only=True)["samples"]:
            assert sample["tokens"].tolist() == [number, *range(6)]


# What is refused, before anything is started.


def refusal(**options: Any) -> str:
    with pytest.raises(LabError) as caught:
        check(LabOptions(out=Path("nowhere"), **options))
    text = str(caught.value)
    assert "\n" not in text
    assert "Nothing was trained." in text
    return text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "qwen2"}, "expected model_type llama, found 'qwen2'"),
        ({"attention_bias": True}, "attention_bias False, found True"),
        ({"mlp_bias": True}, "mlp_bias False, found True"),
        ({"hidden_act": "gelu"}, "hidden_act silu, found 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling None"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type default, found 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 1.0, found 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config None"),
        ({"rms_norm_eps": None}, "the sizes of a Llama model"),
        ({"hidden_size": "many"}, "the sizes of a Llama model"),
    ],
)
def test_a_model_of_another_shape_is_refused(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**llama.CONFIG, **changes}))
    assert expected in refusal(checkpoint=tmp_path)


def test_rope_theta_is_read_where_newer_transformers_write_it(
    rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}, "rope_scaling": {"rope_type": "default"}}
    weights = llama.write_checkpoint(tmp_path / "model", **rope)
    result = train(LabOptions(out=tmp_path / "out", checkpoint=tmp_path / "model", rollout=rollout[0]))
    assert largest_difference({**llama.CONFIG, "rope_theta": 777.0}, weights, result, rollout[1]) < 1e-4


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    weights = llama.write_checkpoint(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"

    def with_tensors(tensors: llama.Tensors) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        return refusal(checkpoint=tmp_path)

    without = {key: tensor for key, tensor in weights.items() if key != name}
    assert f"expected the tensor {name}" in with_tensors(without)
    assert f"{name} of shape (80, 48)" in with_tensors({**weights, name: torch.zeros(81, 48)})
    assert f"{name} in one of F32, BF16, F16, found I8" in with_tensors(
        {**weights, name: torch.zeros(80, 48, dtype=torch.int8)}
    )
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert f"does not have, found {bias}" in with_tensors({**weights, bias: torch.zeros(48)})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "in the format of safetensors" in refusal(checkpoint=tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "No such file" in refusal(checkpoint=tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "a weight_map" in refusal(checkpoint=tmp_path)
    (tmp_path / "config.json").write_text("[")
    assert "a Hugging Face checkpoint with config.json" in refusal(checkpoint=tmp_path)


def test_a_stored_copy_of_a_tied_head_and_rotary_tables_do_no_harm(
    rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    weights = llama.write_checkpoint(tmp_path)
    further = {
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    save_file({**weights, **further}, tmp_path / "model.safetensors")
    check(LabOptions(out=Path("nowhere"), checkpoint=tmp_path, rollout=rollout[0]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tp": 4}, "tp=4: expected a divisor of the model's 2 query groups"),
        ({"pp": 4}, "pp=4: expected a divisor of the model's 2 layers"),
        ({"overrides": {"num_layers": 4}}, "lab override num_layers: expected 2"),
        ({"overrides": {"rotary_base": 10000}}, "lab override rotary_base: expected 500.0"),
        ({"overrides": {"allgather_cp": True}, "cp": 2}, "zigzag context parallelism"),
        ({"dp": 3}, "dp=3: expected data-parallel ranks"),
        ({"steps": 3}, "steps=3: expected a divisor of the 8 rollouts"),
        ({"samples": "edge"}, "lab option samples"),
        ({"extras": ("teacher",)}, "lab option extras"),
        ({"fault": "sample-swap:1"}, "lab option fault"),
        ({"overrides": {"global_batch_size": 4}}, "lab override global_batch_size"),
        ({"rollouts": 2}, "{rollout_id} in the path"),
    ],
)
def test_what_checkpoint_and_rollout_leave_no_choice_about_is_refused(
    options: dict[str, Any], expected: str, rollout: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    llama.write_checkpoint(tmp_path)
    assert expected in refusal(checkpoint=tmp_path, rollout=rollout[0], **options)


def test_three_query_groups_cannot_be_cut_in_two(tmp_path: Path) -> None:
    llama.write_checkpoint(tmp_path, num_attention_heads=9, num_key_value_heads=3, head_dim=8)
    assert "tp=2: expected a divisor of the model's 3 query groups, found 2" in refusal(checkpoint=tmp_path, tp=2)
    llama.write_checkpoint(tmp_path, vocab_size=97)
    assert "tp=2: expected a divisor of the model's 97 tokens of vocabulary" in refusal(checkpoint=tmp_path, tp=2)


def test_exporting_needs_a_checkpoint_and_never_writes_over_it(tmp_path: Path) -> None:
    llama.write_checkpoint(tmp_path)
    assert "a folder other than the checkpoint's" in refusal(checkpoint=tmp_path, export_checkpoint=tmp_path)
    assert "a checkpoint to be trained, found none" in refusal(export_checkpoint=tmp_path / "exported")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": [1, 2, 3, 96, 4], "response_length": 2}, "tokens below 96, the model's vocabulary, found 96 in"),
        ({"tokens": [1, -1, 3, 4, 5], "response_length": 2}, "found -1 in sample 0"),
        ({"tokens": []}, "tokens in sample 0"),
        ({"tokens": [1, 2], "response_length": 3}, "a response_length from 0 to 2 in sample 0, found 3"),
        ({"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1]}, "loss_mask of 2 values"),
        ({"tokens": [1, 2, 3], "response_length": 1, "loss_mask": [1]}, "rollout_log_probs of 1 values"),
    ],
)
def test_samples_that_cannot_be_trained_are_refused(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    llama.write_checkpoint(tmp_path / "model")
    few = {} if "rollout_log_probs" in expected else {"rollout_log_probs": None}
    kept = {} if "loss_mask" in changes else {"loss_mask": None}
    llama.write_rollout(tmp_path / "0.pt", **few, **kept, **changes)
    assert expected in refusal(checkpoint=tmp_path / "model", rollout=tmp_path / "0.pt")


def test_what_is_no_rollout_dump_is_refused(tmp_path: Path) -> None:
    assert "a rollout dump as slime writes it" in refusal(rollout=tmp_path / "none.pt")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    assert "a rollout dump as slime writes it" in refusal(rollout=tmp_path / "other.pt")
    torch.save({"rollout_id": 0, "samples": []}, tmp_path / "empty.pt")
    assert refusal(rollout=tmp_path / "empty.pt")
    llama.write_rollout(tmp_path / "0.pt", tokens=[1, 2, 3], response_length=2, loss_mask=None, rollout_log_probs=None)
    llama.write_rollout(
        tmp_path / "1.pt", groups=(0, 1), tokens=[1, 2, 3], response_length=2, loss_mask=None, rollout_log_probs=None
    )
    text = refusal(rollout=tmp_path / "{rollout_id}.pt", rollouts=2)
    assert "1.pt: expected 8 samples in groups of the same size, as in 0.pt, found 2" in text


def test_groups_that_do_not_stand_together_are_normalised_as_one_batch(tmp_path: Path) -> None:
    from slime_instrument.lab._rollout import Rollout

    for groups, expected in (
        ((0, 0, 1, 1), 2),
        ((0, 1, 0, 1), None),
        ((0, 0, 0, 1), None),
        ((3, 3, 3, 3), 4),
    ):
        llama.write_rollout(tmp_path / "0.pt", groups=groups)
        assert Rollout.read(tmp_path / "0.pt").group_size == expected
    llama.write_rollout(tmp_path / "0.pt", groups=(0, 0, 1, 1), group_index=None)
    assert Rollout.read(tmp_path / "0.pt").group_size is None
