"""One rank. What is common to all engines is in coupler.testing.conformance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    CONFIGS,
    SHAPE,
    WANT,
    arrays,
    closeness,
    info,
    loss,
    make_batch,
    make_engine,
    reference,
    worst,
    write_model,
)
from safetensors import safe_open
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    Dots1Config,
    Gemma2Config,
    Gemma3TextConfig,
    JetMoeConfig,
    Llama4TextConfig,
    Qwen2MoeConfig,
)

from coupler.batch import Batch
from coupler.engine_kit.precision import Precision
from coupler.errors import CouplerError
from coupler.interfaces import EVERYTHING, Model, Output, Part, Rank
from coupler.testing.models import read_tensors, rewrite
from coupler_engine_fsdp.rollout_model import build, load_named

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares on the CPU: set CUDA_VISIBLE_DEVICES="
)
Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_tokens", [32, 4096])
def test_outputs_and_gradient_equal_plain_transformers(
    folder_of: Folder, name: str, max_tokens: int
) -> None:
    """Tied and untied heads, grouped heads, sliding windows, biases; packed into one
    row or into many.
    """
    batch = make_batch()
    outputs, grads = reference(folder_of(name))
    engine = make_engine(folder_of(name), max_tokens_per_gpu=max_tokens)
    done = engine.forward(batch, WANT)
    for output in WANT:
        np.testing.assert_allclose(done[output.name], outputs[output.name], atol=2e-5, rtol=1e-4)
        assert not done[output.name][~batch["loss_mask"]].any()
    metrics = engine.forward_backward(batch, WANT, loss, info(batch))
    assert metrics["tokens"].value == batch["loss_mask"].sum()
    assert worst(arrays(engine.gradients()), grads) < 1e-5


def test_logprobs_of_ids_need_their_column(folder_of: Folder) -> None:
    batch, engine = make_batch(), make_engine(folder_of("qwen3"))
    want = (Output("top_logprobs"),)
    with pytest.raises(CouplerError, match="top_logprobs is of the ids in top_ids: the batch"):
        engine.forward(batch, want)
    ids = np.tile(np.arange(3, dtype=np.int32), (batch.num_tokens, 1))
    found = engine.forward(batch.with_tokens(top_ids=ids), want)["top_logprobs"]
    assert (found[batch["loss_mask"]] < 0).all() and not found[~batch["loss_mask"]].any()


def test_checkpointing_changes_no_gradient(folder_of: Folder) -> None:
    batch = make_batch()
    grads = []
    for on in (False, True):
        engine = make_engine(folder_of("qwen3"), gradient_checkpointing=on)
        engine.forward_backward(batch, WANT, loss, info(batch))
        grads.append(arrays(engine.gradients()))
    assert worst(grads[1], grads[0]) < 1e-6


def test_bf16_is_near_fp32_with_fp32_master_weights(folder_of: Folder) -> None:
    """One rank computes with bf16 copies: gradients, checkpoints and steps know the
    fp32 masters only.
    """
    batch = make_batch()
    outputs, grads = reference(folder_of("qwen2"))
    engine = make_engine(folder_of("qwen2"), dtype="bf16", max_tokens_per_gpu=64)
    done = engine.forward(batch, WANT)
    assert np.abs(done["logprobs"] - outputs["logprobs"]).mean() < 0.05
    engine.forward_backward(batch, WANT, loss, info(batch))
    got = arrays(engine.gradients())
    whole, true = (np.concatenate([g[n].ravel() for n in grads]) for g in (got, grads))
    assert whole @ true / (np.linalg.norm(whole) * np.linalg.norm(true)) > 0.99
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.bfloat16}
    assert {p.dtype for p in engine.policy.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in engine.named.values()} == {torch.float32}
    engine.step()
    assert all(
        torch.equal(pair.copy, pair.master.bfloat16()) for pair in engine.masters.pairs.values()
    )


def test_bf16_gradients_add_up_in_fp32(folder_of: Folder) -> None:
    """Over micro-batches of one sequence each, a sum in bf16 would lose the small
    ones.
    """
    batch = make_batch()
    engine = make_engine(folder_of("qwen3"), dtype="bf16", max_tokens_per_gpu=30)
    engine.forward_backward(batch, WANT, loss, info(batch))
    got = arrays(engine.gradients())
    total: dict[str, np.ndarray] = {}
    for row in range(len(batch)):
        one = batch.take([row])
        engine.forward_backward(one, WANT, loss, info(one))
        total = {
            name: total.get(name, 0) + grad for name, grad in arrays(engine.gradients()).items()
        }
    assert len(engine._micro_batches(batch)) > 3
    assert closeness(got, total) > 0.999


def test_sync_dtype_is_apart_from_the_dtype(folder_of: Folder) -> None:
    weights = dict(make_engine(folder_of("qwen3"), sync_dtype="bf16").weights())
    plain = AutoModelForCausalLM.from_pretrained(
        folder_of("qwen3"), dtype=torch.bfloat16
    ).state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("family", "experts"), [("dots1", Dots1Config), ("afmoe", AfmoeConfig)])
def test_the_bias_of_a_router_is_never_rounded(
    tmp_path: Path, family: str, experts: type, frozen: bool
) -> None:
    """It tells between experts that are close: a rollout and an export would choose
    others. Some families have it in a buffer, others in a parameter.
    """
    sizes = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
    counts = {
        "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
        "afmoe": {"num_experts": 4, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2},
    }
    config = experts(**SHAPE, head_dim=12, **sizes, **counts[family])
    tensors = read_tensors(write_model(tmp_path / "m", config))
    biases = {name: tensor for name, tensor in tensors.items() if "e_score" in name}
    biases |= {name: tensor for name, tensor in tensors.items() if "expert_bias" in name}
    assert len(biases) == SHAPE["num_hidden_layers"]
    biases = {name: 7 + np.linspace(0, 0.01, 4, dtype=np.float32) for name in biases}
    folder = rewrite(tmp_path / "m", tmp_path / "biased", {**tensors, **biases})

    engine = make_engine(folder, dtype="bf16", frozen=frozen)
    held = engine.policy.causal.state_dict()
    assert {held[name].dtype for name in biases} == {torch.float32}
    weights = dict(engine.weights())
    for name, bias in biases.items():
        np.testing.assert_array_equal(weights.pop(name).numpy(), bias)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}

    rollout = build(Model(str(folder)), Precision.BF16, Rank())
    load_named(rollout, engine.weights(), 0)
    state = rollout.state_dict()
    for name, bias in biases.items():
        np.testing.assert_array_equal(state[name].numpy(), bias)


def test_weights_are_the_tensors_of_the_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIGS["qwen2"], max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    weights = arrays(make_engine(folder).weights())
    assert weights.keys() == index.keys()
    for name, file in index.items():
        with safe_open(folder / file, "np") as tensors:
            np.testing.assert_array_equal(weights[name], tensors.get_tensor(name))


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_steps_equal_plain_torch(folder_of: Folder, name: str) -> None:
    """Two steps: clipping, weight decay without biases and norms, and the schedule's
    rates.
    """
    engine = make_engine(
        folder_of(name),
        lr=1e-2,
        weight_decay=0.1,
        schedule="linear",
        warmup_steps=2,
        total_steps=6,
        max_grad_norm=0.5,
    )
    model = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
    params = dict(model.named_parameters())
    decayed = [p for p in params.values() if p.ndim > 1]
    plain = [p for p in params.values() if p.ndim < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0}], lr=1e-2
    )
    for index, lr in enumerate((5e-3, 1e-2)):
        batch = make_batch(seed=index)
        engine.forward_backward(batch, WANT, loss, info(batch, index))
        for key, grad in engine.gradients():
            params[key].grad = grad.clone()
        result = engine.step()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        assert norm > 0.5
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        assert (result.applied, result.lr) == (True, pytest.approx(lr))
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for key, tensor in engine.weights():
        torch.testing.assert_close(tensor, params[key].data, atol=1e-6, rtol=1e-5)


def test_a_reference_engine_beside_the_policy_holds_no_optimizer(folder_of: Folder) -> None:
    policy, other = (make_engine(folder_of("qwen2"), lr=1e-2) for _ in range(2))
    batch = make_batch()
    before = other.forward(batch, WANT)["logprobs"]
    policy.forward_backward(batch, WANT, loss, info(batch))
    policy.step()
    np.testing.assert_array_equal(other.forward(batch, WANT)["logprobs"], before)
    assert np.abs(policy.forward(batch, WANT)["logprobs"] - before).max() > 1e-3
    assert other._optimizer is None


def test_a_resumed_run_continues_with_schedule_and_moments(
    folder_of: Folder, tmp_path: Path
) -> None:
    settings = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 3, "total_steps": 10}
    batch = make_batch()

    def run(engine, steps: int) -> list[tuple[float, float]]:
        results = []
        for index in range(steps):
            engine.forward_backward(batch, WANT, loss, info(batch, index))
            result = engine.step()
            results.append((result.lr, result.grad_norm))
        return results

    straight = make_engine(folder_of("llama"), **settings)
    want = run(straight, 4)
    half = make_engine(folder_of("llama"), **settings)
    run(half, 2)
    half.save(tmp_path, EVERYTHING).wait(60)
    resumed = make_engine(folder_of("llama"), **settings)
    resumed.load(tmp_path, EVERYTHING)
    assert run(resumed, 2) == want[2:]
    for (name, one), (_, other) in zip(resumed.weights(), straight.weights(), strict=True):
        assert torch.equal(one, other), name


def test_parameters_alone_can_be_saved_and_a_missing_optimizer_is_named(
    folder_of: Folder, tmp_path: Path
) -> None:
    engine = make_engine(folder_of("qwen3"))
    engine.save(tmp_path, frozenset({Part.PARAMS})).wait(60)
    engine.load(tmp_path, frozenset({Part.PARAMS}))
    with pytest.raises(CouplerError, match="optimizer"):
        engine.load(tmp_path, EVERYTHING)


def test_a_unit_is_never_split(folder_of: Folder) -> None:
    engine = make_engine(folder_of("qwen3"), max_tokens_per_gpu=40)
    batch = make_batch(8).with_seqs(unit=np.array([3, 1, 3, 1, 2, 2, 0, 0]))
    seen = []

    def spy(out, columns):
        seen.append(sorted(columns["unit"].tolist()))
        return loss(out, columns)

    sizes = np.bincount(batch["unit"], weights=batch.lengths)
    engine = make_engine(folder_of("qwen3"), max_tokens_per_gpu=int(sizes.max()))
    engine.forward_backward(batch, WANT, spy, info(batch))
    assert len(seen) > 1
    assert sorted(unit for units in seen for unit in units) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(units.count(unit) == 2 for units in seen for unit in units)


def test_the_loss_sees_every_column(folder_of: Folder) -> None:
    batch = make_batch(5).with_seqs(name=np.array(["a", "b", "c", "d", "e"]))
    seen = {}

    def spy(out, columns):
        seen.update(columns)
        return loss(out, columns)

    make_engine(folder_of("qwen3")).forward_backward(batch, WANT, spy, info(batch))
    assert seen.keys() == {
        *batch.tokens,
        "temperature",
        "seq",
        "cu_seqlens",
        "num_seqs",
    }  # text is no tensor
    assert seen["num_seqs"] == 5 and seen["loss_mask"].dtype == torch.bool
    lengths = seen["cu_seqlens"].diff()
    assert torch.equal(seen["seq"], torch.repeat_interleave(torch.arange(5), lengths))
    rows = {int(n): float(t) for n, t in zip(batch.lengths, batch["temperature"], strict=True)}
    assert [rows[n] for n in lengths.tolist()] == seen[
        "temperature"
    ].tolist()  # in an order of the engine's own


# --- what is refused


def test_a_loss_that_is_a_scalar_is_refused(folder_of: Folder) -> None:
    engine, batch = make_engine(folder_of("qwen3")), make_batch()
    for bad in (
        lambda out, _: (out["logprobs"].mean(), {}),
        lambda out, _: (out["logprobs"].detach(), {}),
    ):
        with pytest.raises(CouplerError, match="one differentiable loss per token"):
            engine.forward_backward(batch, WANT, bad, info(batch))


def test_a_sequence_that_is_too_long_names_the_key(folder_of: Folder) -> None:
    engine, batch = make_engine(folder_of("qwen3"), max_tokens_per_gpu=8), make_batch()
    with pytest.raises(CouplerError, match=r"engine\.max_tokens_per_gpu"):
        engine.forward(batch, WANT)


def test_inputs_without_a_meaning_are_refused(folder_of: Folder) -> None:
    engine, batch = make_engine(folder_of("qwen3")), make_batch()
    with pytest.raises(CouplerError, match="temperature"):
        engine.forward(batch.with_seqs(temperature=np.zeros(len(batch), np.float32)), WANT)
    with pytest.raises(CouplerError, match="first token"):
        engine.forward(batch.with_tokens(loss_mask=np.ones(batch.num_tokens, bool)), WANT)


def test_a_folder_without_a_model_is_named(tmp_path: Path, folder_of: Folder) -> None:
    with pytest.raises(CouplerError, match=r"model\.path=.*nowhere"):
        make_engine(tmp_path / "nowhere")
    with pytest.raises(CouplerError, match=r"model\.path.* holds neither"):
        make_engine(tmp_path)
    shutil.copy(folder_of("qwen3") / "model.safetensors", tmp_path)
    with pytest.raises(CouplerError, match=r"model\.path.* cannot be built"):
        make_engine(tmp_path)


def test_a_checkpoint_of_another_model_lists_the_names(tmp_path: Path, folder_of: Folder) -> None:
    shutil.copytree(folder_of("qwen2"), tmp_path / "m")
    shutil.copy(folder_of("qwen3") / "model.safetensors", tmp_path / "m")
    with pytest.raises(CouplerError, match=r"(?s)missing: .*lm_head\.weight.*unexpected: .*q_norm"):
        make_engine(tmp_path / "m")


def test_a_model_of_another_size_is_refused(tmp_path: Path, folder_of: Folder) -> None:
    shutil.copytree(folder_of("qwen3"), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(CouplerError, match="has shape"):
        make_engine(tmp_path / "m")


def test_models_whose_logprobs_would_be_wrong_are_refused(tmp_path: Path) -> None:
    soft = write_model(
        tmp_path / "soft", Gemma2Config(**SHAPE, head_dim=12, final_logit_softcapping=3.0)
    )
    with pytest.raises(CouplerError, match="final_logit_softcapping"):
        make_engine(soft)
    soft = write_model(
        tmp_path / "cap", Gemma2Config(**SHAPE, head_dim=12, final_logit_softcapping=None)
    )
    with pytest.raises(CouplerError, match="softcap"):
        make_engine(soft)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    folder = write_model(tmp_path / "rope", type(CONFIGS["llama"])(**SHAPE, rope_parameters=rope))
    with pytest.raises(CouplerError, match="rotary"):
        make_engine(folder)
    each = {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = Gemma3TextConfig(**SHAPE, head_dim=12, rope_parameters=each)
    with pytest.raises(CouplerError, match="rotary"):
        make_engine(write_model(tmp_path / "kinds", kinds))


def test_a_window_that_attention_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    """It is in the mask of transformers alone, and in no check of a few tokens."""
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 16}
    folder = write_model(tmp_path, Qwen2MoeConfig(**SHAPE, **experts, **windows))
    with pytest.raises(CouplerError, match="Qwen2MoeAttention is local by its configuration"):
        make_engine(folder)


def test_a_model_that_does_not_run_on_packed_sequences_is_one_sentence(tmp_path: Path) -> None:
    """Its layers take a mask apart, or it has no backbone of its own."""
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 80, "head_dim": 12}
    kinds = ["full_attention"] * SHAPE["num_hidden_layers"]
    config = Llama4TextConfig(**SHAPE, **experts, layer_types=kinds)
    folder = write_model(tmp_path / "llama4", config)
    with pytest.raises(CouplerError, match=r"type 'llama4_text': it does not run .*Attribute"):
        make_engine(folder)
    few = {"num_local_experts": 2, "num_hidden_layers": 1, "hidden_size": 48, "vocab_size": 99}
    folder = write_model(
        tmp_path / "jet", JetMoeConfig(**few, kv_channels=12, intermediate_size=16)
    )
    with pytest.raises(CouplerError, match="gradient_checkpointing=false"):
        make_engine(folder, gradient_checkpointing=True)
    make_engine(folder)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            "experts.4.up_proj",
            "experts.5.up_proj",
            "missing: .*experts.gate_up_proj.*unexpected: .*experts.5.up_proj",
        ),
        (
            "experts.4.down_proj",
            "experts.4.w2",
            "missing: .*experts.down_proj.*unexpected: .*experts.4.w2",
        ),
    ],
)
def test_experts_that_are_not_the_models_are_refused(
    old: str, new: str, what: str, folder_of: Folder, tmp_path: Path
) -> None:
    folder = folder_of("experts")
    tensors = {
        name.replace(f"layers.1.mlp.{old}", f"layers.1.mlp.{new}"): t
        for name, t in read_tensors(folder).items()
    }
    with pytest.raises(CouplerError, match=f"(?s){what}"):
        make_engine(rewrite(folder, tmp_path / "m", tensors))


def test_layers_that_mix_packed_sequences_are_found(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model with linear attention would; its layers ignore where sequences
    begin.
    """
    from coupler_engine_fsdp import attention

    def mixed(query, key, value, packing, scaling, window):
        one = attention.Packing.of([attention.Piece(0, query.shape[2], 0, 0)], query.device)
        return isolated(query, key, value, one, scaling, window)

    isolated = attention._by_block
    monkeypatch.setattr(attention, "_by_block", mixed)
    with pytest.raises(CouplerError, match="packed sequences differ"):
        make_engine(folder_of("qwen2"))


def test_weights_that_are_not_finite_are_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIGS["qwen3"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(CouplerError, match="differ"):
        make_engine(folder)


def test_an_empty_batch_is_a_gradient_of_zero(folder_of: Folder) -> None:
    engine = make_engine(folder_of("qwen3"))
    empty = make_batch().take([])
    assert engine.forward(empty, WANT)["logprobs"].shape == (0,)
    assert engine.forward_backward(empty, WANT, loss, info(Batch(empty.lengths))) == {}
    assert not any(grad.any() for _, grad in engine.gradients())


def test_a_truncated_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIGS["qwen3"])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CouplerError, match="is no whole safetensors file"):
        make_engine(folder)


def test_a_deterministic_rank_refuses_kernels_that_are_not(
    folder_of: Folder, deterministic: Rank
) -> None:
    batch = make_batch()
    engine = make_engine(folder_of("qwen3"), deterministic)
    engine.forward_backward(batch, WANT, loss, info(batch))
    first = arrays(engine.gradients())
    engine.forward_backward(batch, WANT, loss, info(batch))
    assert worst(arrays(engine.gradients()), first) == 0
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
