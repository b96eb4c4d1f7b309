"""Weights of e4m3 with their scales, as trainers that quantize what they send have them: numbers
and scales go into the same memory, to the bit what an engine has that loads them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.quantized.fp8 import Fp8Target
from megatron_async.checkpoint.quantized.kept import KeptTarget, RequantizedTarget
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.linear import quantized
from megatron_async.models.quantized.values import E4M3
from megatron_async.serving.trainers.pickled_tensors import read_tensors
from megatron_async.weights import GatheredWeights, SharedWeights, WeightGroup, open_weights
from megatron_async.weights.place import place, read_weights
from tests.support.fp8_models import FORMATS, MODELS, kept_bytes, write
from tests.support.huggingface_models import random_model
from tests.support.mxfp4_models import write_packed
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_over_http import free_port
from tests.support.sglang_trainers import bucket, serialized
from tests.support.sweeps import some
from tests.unit.checkpoint.test_fp8_published import BLOCKS, by_block, publish, write_plain

State = dict[str, Tensor]
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
SCALES = f"{O_PROJ}_scale_inv"
OWN = "decoder.layers.0.self_attention.linear_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of models in float32, each with new weights beside it."""
    root = tmp_path_factory.mktemp("plain")
    for name in MODELS:
        random_model(name).save_pretrained(root / name)
        new = shutil.copytree(root / name, root / f"{name}-new") / "model.safetensors"
        save_file({k: x.roll(1, 0) * 1.3 for k, x in load_file(new).items()}, new)
    return root


def kept(path: Path) -> Any:
    return load_pretrained(path, quantization="fp8").model


def sent(path: Path) -> State:
    """What a trainer sends that quantizes by the scheme of a directory: no scales of others."""
    stored = load_file(path / "model.safetensors")
    return {name: x for name, x in stored.items() if not name.endswith(("input_scale", "k_scale"))}


def differing(model: Any, other: Any) -> list[str]:
    """Parameters and buffers of two models that are not the same to the bit."""
    found, meant = kept_bytes(model), kept_bytes(other)
    assert found.keys() == meant.keys()
    return [name for name in meant if not found[name].equal(meant[name])]


def places(model: Any) -> dict[str, int]:
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: each.data_ptr() for name, each in both}


@pytest.mark.parametrize(("name", "kind"), some(list(product(MODELS, FORMATS)), 6))
def test_numbers_and_scales_are_what_a_checkpoint_of_them_gives(
    name: str, kind: str, plain: Path, tmp_path: Path
) -> None:
    """Whatever type, and with scales by tensor, row and block."""
    old = write(tmp_path / "old", plain / name, kind)
    new = write(tmp_path / "new", plain / f"{name}-new", kind)
    served, meant = kept(old), kept(new)
    assert differing(served, meant)
    before = places(served)
    read_weights(served, sent(new), all_parameters=True)()
    assert not differing(served, meant) and places(served) == before


@pytest.mark.parametrize("kind", ("deepseek", "compressed-channel"))
def test_nothing_is_multiplied_out_where_the_scheme_is_the_models(
    kind: str, plain: Path, tmp_path: Path
) -> None:
    served = kept(write(tmp_path / "old", plain / "llama", kind))
    new = sent(write(tmp_path / "new", plain / "llama-new", kind))
    placed = place(served, new, whole=False, all_parameters=True)
    kinds = [type(share) for name, tensor, share in placed.copied() if tensor.dtype == E4M3]
    assert len(kinds) == 2 * 7 and set(kinds) == {KeptTarget}


@pytest.mark.parametrize("name", ("llama", "qwen3_moe"))
def test_a_models_own_names_are_taken(name: str, plain: Path, tmp_path: Path) -> None:
    """Its own state dict, experts stacked, and each expert by itself."""
    served = kept(write(tmp_path / "old", plain / name, "deepseek"))
    other = kept(write(tmp_path / "new", plain / f"{name}-new", "deepseek"))
    state = {key: x for key, x in other.state_dict().items() if isinstance(x, Tensor)}
    read_weights(served, state, all_parameters=True)()
    assert not differing(served, other)
    read_weights(served, served.state_dict(), all_parameters=True)()  # from its own memory
    assert not differing(served, other)
    stacked = [key for key in state if ".experts." in key]
    assert bool(stacked) == (name == "qwen3_moe")
    for key in stacked:
        prefix, _, kind = key.rpartition(".linear_")
        for number, expert in enumerate(state.pop(key)):
            state[f"{prefix}.local_experts.{number}.linear_{kind}"] = expert.clone()
    kept_again = kept(tmp_path / "old")
    read_weights(kept_again, state, all_parameters=True)()
    assert not differing(kept_again, other)


def test_stacked_experts_have_scales_of_blocks_or_one_each(plain: Path, tmp_path: Path) -> None:
    served = kept(write(tmp_path / "old", plain / "qwen3_moe", "deepseek"))
    weight = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    layer = quantized(served)[weight.removesuffix(".weight")]
    numbers = layer.weight.detach().clone()
    experts, rows, columns = numbers.shape
    r, c = FORMATS["deepseek"][0]["weight_block_size"]
    blocks = torch.rand(experts, -(-rows // r), -(-columns // c)) + 0.5
    for scale in (blocks, torch.rand(experts) + 0.5, torch.tensor([0.25])):
        read_weights(served, {f"{weight}_scale_inv": scale, weight: numbers})()
        wide = scale.reshape(-1, 1, 1)
        if scale.dim() == 3:
            wide = scale.repeat_interleave(r, 1)[:, :rows].repeat_interleave(c, 2)[..., :columns]
        found = layer.weight_scale.repeat_interleave(columns // layer.weight_scale.shape[-1], -1)
        assert found.equal(wide.expand(experts, rows, columns))
        assert layer.weight.view(torch.uint8).equal(numbers.view(torch.uint8))


def test_scales_mean_what_their_shape_says_under_either_name(plain: Path, tmp_path: Path) -> None:
    """Trainers for vLLM send blocks as ``weight_scale``, and some scales in bfloat16 or e8m0."""
    served = kept(write(tmp_path / "old", plain / "llama", "deepseek"))
    new = sent(write(tmp_path / "new", plain / "llama-new", "deepseek"))
    meant = kept(tmp_path / "new")
    read_weights(served, {key.replace("_scale_inv", "_scale"): x for key, x in new.items()})()
    assert not differing(served, meant)
    powers = {key: torch.exp2(x.log2().round()) if "_scale" in key else x for key, x in new.items()}
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        read_weights(
            served, {key: x.to(dtype) if "_scale" in key else x for key, x in powers.items()}
        )()
        found.append({key: x.clone() for key, x in kept_bytes(served).items()})
    assert all(each[key].equal(found[0][key]) for each in found for key in each)


def engine_over(path: Path, depth: int = 0, **values: Any) -> DynamicInferenceEngine:
    sizes: dict[str, Any] = {
        "device": "cpu", "max_requests": 3, "block_size_tokens": 8, "block_count": 30,
        "max_sequence_length": 64, "prefill_chunk_tokens": 16, "batch_invariant": True,
        "debug": True, "audit_graphs": True,
    }  # fmt: skip
    return DynamicInferenceEngine.from_pretrained(path, EngineConfig(depth=depth, **sizes | values))


PROMPTS = [3, 5, 7, 9, 11], [9] * 21, [11, 12]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=12, temperature=(0.0, 0.8)[number % 2], seed=number,
        termination_id=-1, return_log_probs=True,
    )  # fmt: skip


def generated(engine: DynamicInferenceEngine) -> list[Any]:
    done = [engine.add_request(n, [*each], params_of(n)) for n, each in enumerate(PROMPTS)]
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [(r.generated_tokens, r.generated_log_probs) for r in (each.result() for each in done)]


def in_the_midst(engine: DynamicInferenceEngine, new: Any) -> list[Any]:
    """What requests get that run while new weights come."""
    done = [engine.add_request(n, [*each], params_of(n)) for n, each in enumerate(PROMPTS)]
    for _ in range(5):
        engine.step_modern()
    engine.update_weights(new)
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [(r.generated_tokens, r.generated_log_probs) for r in (each.result() for each in done)]


@pytest.mark.parametrize("activations", (False, True))
@pytest.mark.parametrize("kind", ("blocks", "rows"))
def test_tokens_are_those_of_an_engine_that_loaded_them(
    kind: str, activations: bool, tmp_path: Path
) -> None:
    """And log-probabilities, at depths 0, 1 and 2; requests that run have the same from a directory
    in place of a state dict, and graphs see the same memory (they are audited)."""
    config, scales, suffix = (BLOCKS, by_block, "_scale_inv")
    if kind == "rows":
        config, scales, suffix = FORMATS["compressed-channel"][0], by_rows, "_scale"
    folders = []
    for seed in (1, 2):
        models = write_plain(tmp_path / f"plain{seed}", seed=seed)
        folders.append(publish(tmp_path / f"{seed}", models, config, scales, suffix=suffix))
    old, new = folders
    options = {"quantization": "fp8", "quantize_activations": activations}
    with engine_over(new, **options) as engine:
        meant = generated(engine)
    midst: list[Any] = []
    for depth in (0, 1, 2):
        for source in (sent(new), new):
            with engine_over(old, depth, **options) as engine:
                assert generated(engine) != meant
                midst.append(in_the_midst(engine, source))
                assert generated(engine) == meant, depth
    assert all(each == midst[0] for each in midst)


def by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return scale, scale


@pytest.mark.parametrize("kind", ("deepseek", "compressed-channel", "compressed-tensor"))
def test_other_schemes_are_taken_as_from_a_directory(
    kind: str, plain: Path, tmp_path: Path
) -> None:
    """A model with scales of rows quantizes blocks of 48 x 32 once more; one that multiplies
    weights out has their products."""
    new = write(tmp_path / "new", plain / "llama-new", kind)
    rows, of_directory = kept(plain / "llama"), kept(plain / "llama")
    for model in (rows, of_directory):
        vars(model)["stored_block"] = tuple(FORMATS["deepseek"][0]["weight_block_size"])
    shares = [share for _, _, share in place(rows, sent(new), whole=False).copied()]
    wanted = RequantizedTarget if kind == "deepseek" else KeptTarget
    assert {type(share) for share in shares if isinstance(share, Fp8Target)} == {wanted}
    read_weights(rows, sent(new), all_parameters=True)()
    read_weights(of_directory, new)()
    assert not differing(rows, of_directory)
    wide, meant = load_pretrained(plain / "llama").model, load_pretrained(new / "meant").model
    vars(wide)["stored_block"] = tuple(FORMATS["deepseek"][0]["weight_block_size"])
    read_weights(wide, sent(new), all_parameters=True)()
    assert not differing(wide, meant)


def test_a_file_and_bfloat16_beside_scales_are_taken(plain: Path, tmp_path: Path) -> None:
    served = kept(write(tmp_path / "old", plain / "llama", "deepseek"))
    new = sent(write(tmp_path / "new", plain / "llama-new", "deepseek"))
    save_file(new, tmp_path / "new.safetensors")
    read_weights(served, tmp_path / "new.safetensors")()
    assert not differing(served, kept(tmp_path / "new"))
    meant = load_file(tmp_path / "new" / "meant" / "model.safetensors")
    mixed = {name: x for name, x in new.items() if name not in (O_PROJ, SCALES)}
    mixed[O_PROJ] = meant[O_PROJ].bfloat16()
    read_weights(served, mixed, all_parameters=True)()
    assert differing(served, kept(tmp_path / "new")) == [OWN, f"{OWN}_scale"]


# --- buckets and ways -------------------------------------------------------------------------


def test_a_weight_and_its_scales_come_in_different_buckets(plain: Path, tmp_path: Path) -> None:
    old = write(tmp_path / "old", plain / "llama", "deepseek")
    new = write(tmp_path / "new", plain / "llama-new", "deepseek")
    options = {"quantization": "fp8", "max_sequence_length": 48}
    with engine_over(old, 1, **options) as engine, engine_over(new, **options) as other:
        model, meant = (each.model.weights_owner for each in (engine, other))
        before = {name: x.clone() for name, x in kept_bytes(model).items()}
        tokens, state = generated(engine), sent(new)
        for lacking, said in (
            (
                SCALES,
                f"the new {O_PROJ} has dtype .* and no scales: give {SCALES} or .* in the same",
            ),
            (O_PROJ, f"hold {SCALES}, and {O_PROJ} is missing: send both in one update"),
        ):
            gathered = GatheredWeights()
            for number in (2, 0, 1):
                gathered.add({n: state[n] for n in sorted(state)[number::3] if n != lacking})
            with pytest.raises(CheckpointError, match=said):
                engine.update_weights(gathered)
            assert all(x.equal(before[name]) for name, x in kept_bytes(model).items())
            assert generated(engine) == tokens
            gathered.add({lacking: state[lacking]})  # the last bucket
            engine.update_weights(gathered)
            assert not differing(model, meant) and generated(engine) == generated(other)
            engine.update_weights(old)
            assert generated(engine) == tokens


def over_gloo(state: State) -> State:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(
            WeightGroup, "127.0.0.1", port, rank=1, world_size=2, timeout=PATIENCE_SECONDS
        )
        trainer = WeightGroup("127.0.0.1", port, rank=0, world_size=2, timeout=PATIENCE_SECONDS)
        received = pool.submit(own.result().receive)
        trainer.send(state)
        return received.result()


def by_pickle(state: State) -> State:
    flat = bucket(state)
    return read_tensors(serialized(flat), "flattened_bucket", 1 << 30)


def listed(state: State) -> State:
    tensors = [(name, x.clone()) for name, x in state.items()]
    return read_tensors(serialized(tensors), None, 1 << 30)


@pytest.mark.parametrize("way", (over_gloo, by_pickle, listed))
def test_numbers_and_scales_come_by_the_ways_of_trainers(
    way: Callable[[State], State], plain: Path, tmp_path: Path
) -> None:
    served = kept(write(tmp_path / "old", plain / "qwen3_moe", "deepseek"))
    new = write(tmp_path / "new", plain / "qwen3_moe-new", "deepseek")
    read_weights(served, way(sent(new)), all_parameters=True)()
    assert not differing(served, kept(new))


@pytest.mark.parametrize("unchecked", (False, True))
def test_they_are_read_from_shared_memory(unchecked: bool, plain: Path, tmp_path: Path) -> None:
    """Where values are not looked at, the file is read, and scales before their weights."""
    served = kept(write(tmp_path / "old", plain / "llama", "deepseek"))
    new = write(tmp_path / "new", plain / "llama-new", "deepseek")
    state = {n: x.bfloat16() if "_scale" in n else x for n, x in sent(new).items()}
    with SharedWeights(dict(reversed(state.items()))) as shared:
        opened = open_weights(shared.export())
        read_weights(served, opened, allow_non_finite_weights=unchecked, all_parameters=True)()
    other = kept(tmp_path / "old")
    read_weights(other, state, all_parameters=True)()
    assert not differing(served, other)


# --- what is refused --------------------------------------------------------------------------


def with_scale(change: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, SCALES: change(state[SCALES].clone())}


def filled(value: float) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        scale[-1, -1] = value
        return scale

    return change


def not_a_number(state: State) -> State:
    numbers = state[O_PROJ].clone()
    numbers.view(torch.uint8)[3, 4] = 0x7F
    return {**state, O_PROJ: numbers}


NO_SCALE = r"the new .*o_proj.weight_scale_inv has 1 of .* scales that are no positive normal numb"
FAULTS: dict[str, tuple[Callable[[State], State], str]] = {
    "NaN": (with_scale(filled(float("nan"))), f"{NO_SCALE}ers, such as nan"),
    "infinite": (with_scale(filled(float("inf"))), f"{NO_SCALE}ers, such as inf"),
    "zero": (with_scale(filled(0.0)), f"{NO_SCALE}ers, such as 0.0"),
    "negative": (with_scale(filled(-0.5)), f"{NO_SCALE}ers, such as -0.5"),
    "too large": (with_scale(filled(3e37)), "3e.37 makes numbers of up to 448 NaN or inf"),
    "shape": (
        with_scale(lambda scale: scale[:-1]),
        r"o_proj.weight_scale_inv has shape \[1, 2\]; scales of \[64, 64\] have \[1\] for all, "
        r"\[64, 1\] for each row, \[2, 2\] for blocks of 48 x 32, \[1, 1\] for blocks of 128 x 128",
    ),
    "dtype": (with_scale(torch.Tensor.int), "weight_scale_inv has dtype torch.int32; supported"),
    "16 bits": (
        lambda state: {**state, O_PROJ: state[O_PROJ].bfloat16()},
        r"has dtype torch.bfloat16 and has scales, .*: send it as torch.float8_e4m3fn, or leave",
    ),
    "two names": (
        lambda state: {**state, f"{O_PROJ}_scale": torch.ones(1)},
        "scales of two names, .*: send one",
    ),
    "numbers": (not_a_number, "o_proj.weight has 1 of 4,096 elements that are NaN"),
    "weight's shape": (
        lambda state: {**state, O_PROJ: state[O_PROJ][:, :48], SCALES: torch.ones(1)},
        r"has shape \(64, 48\), the model's has \(64, 64\)",
    ),
    "a norm": (
        lambda state: state
        | {"model.norm.weight": torch.ones(64).to(E4M3), "model.norm.weight_scale": torch.ones(1)},
        r"norm.weight has dtype .* and 1 dimensions: only matrices.* send it in 16 or 32 bits",
    ),
    "inputs": (
        lambda state: {**state, O_PROJ.replace("weight", "input_scale"): torch.ones(1)},
        "input_scale: scales of what is computed stay as they are; leave it out",
    ),
    "no such weight": (
        lambda state: {**state, "model.layers.9.x.weight_scale": torch.ones(1)},
        "hold model.layers.9.x.weight_scale, which the model does not have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_say_what_to_change_and_nothing_is_written(
    fault: str, plain: Path, tmp_path: Path
) -> None:
    change, said = FAULTS[fault]
    served = kept(write(tmp_path / "old", plain / "llama", "deepseek"))
    state = sent(write(tmp_path / "new", plain / "llama-new", "deepseek"))
    before = {name: x.clone() for name, x in kept_bytes(served).items()}
    for partly in (False, True):
        with pytest.raises(CheckpointError, match=said):
            read_weights(served, change(dict(state)), all_parameters=not partly)
    assert all(x.equal(before[name]) for name, x in kept_bytes(served).items())


def test_values_of_scales_are_checked_even_where_those_of_weights_are_not(
    plain: Path, tmp_path: Path
) -> None:
    served = kept(write(tmp_path / "old", plain / "llama", "deepseek"))
    state = sent(write(tmp_path / "new", plain / "llama-new", "deepseek"))
    read_weights(served, not_a_number(state), allow_non_finite_weights=True)
    with pytest.raises(CheckpointError, match=NO_SCALE):
        read_weights(served, with_scale(filled(0.0))(state), allow_non_finite_weights=True)


def test_tied_output_layers_and_packed_experts_take_no_e4m3(plain: Path, tmp_path: Path) -> None:
    tied = kept(write_plain(tmp_path / "tied", tied=True))
    head = torch.ones(131, 160).to(E4M3)
    for name in ("lm_head.weight", "output_layer.weight"):
        embedding = "model.embed_tokens" if name.startswith("lm") else "embedding.word_embeddings"
        state = {name: head, f"{name}_scale": torch.ones(1), f"{embedding}.weight": head.float()}
        with pytest.raises(CheckpointError, match=f"{name} has dtype .* ties it to the embedding"):
            read_weights(tied, state)
    packed = load_pretrained(write_packed(tmp_path / "packed"), quantization="fp8").model
    name, parameter = next(
        (n, p) for n, p in packed.named_parameters() if p.dtype == torch.uint8 and "fc1" in n
    )
    *lead, half = parameter.shape
    numbers = torch.ones(*lead, 2 * half).to(E4M3)
    with pytest.raises(
        CheckpointError, match="which the model does not take for it: send it in 16"
    ):
        read_weights(packed, {name: numbers, f"{name}_scale": torch.ones(1)})


@pytest.mark.parametrize("names", (("lm_head", "model.embed_tokens"), (None, None)))
def test_scales_of_tied_output_layers_are_named(names: tuple[Any, Any], tmp_path: Path) -> None:
    """Whose names they are; and nobody compares an output layer with products."""
    tied = kept(write_plain(tmp_path / "tied", tied=True))
    head, embedding = (
        f"{name or own}.weight"
        for name, own in zip(names, ("output_layer", "embedding.word_embeddings"), strict=True)
    )
    before = {name: x.clone() for name, x in kept_bytes(tied).items()}
    wide = torch.rand(131, 160)
    numbers, scale = (wide * 400).to(E4M3), torch.full((131, 1), 1 / 400)
    wrong = (
        ({embedding: wide, f"{head}_scale_inv": scale}, f"{head}_scale_inv, and the model ties"),
        ({embedding: wide, head: wide, f"{head}_scale": scale}, f"{head}_scale, and the model ti"),
        (
            {embedding: numbers, f"{embedding}_scale": scale, head: numbers.float() * scale},
            f"new {head} has dtype torch.float32, and {embedding}, .* {E4M3}: leave {head} out",
        ),
    )
    for state, said in wrong:
        with pytest.raises(CheckpointError, match=said):
            read_weights(tied, state)
    assert all(x.equal(before[name]) for name, x in kept_bytes(tied).items())
    read_weights(tied, {embedding: numbers, f"{embedding}_scale": scale})()
    assert tied.embedding.word_embeddings.weight.equal(numbers.float() * scale)


def test_experts_that_are_stored_transposed_keep_one_scale_each(tmp_path: Path) -> None:
    """GPT-OSS's, whose gate and up projections come in turns: no number is rounded once more."""
    random_model("gpt_oss").save_pretrained(tmp_path / "model")
    served = kept(tmp_path / "model")
    for name, own in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        name = f"model.layers.1.mlp.experts.{name}"
        weight = load_file(tmp_path / "model" / "model.safetensors")[name].roll(3, 1)
        scale = weight.abs().amax((1, 2)) / torch.tensor([448.0, 300, 200, 448, 300, 200])
        numbers = (weight / scale[:, None, None]).to(E4M3)
        read_weights(served, {name: numbers, f"{name}_scale_inv": scale})()
        layer = quantized(served)[f"decoder.layers.1.mlp.experts.{own}"]
        assert layer.weight_scale.equal(scale[:, None, None].expand(layer.weight_scale.shape))
        products = numbers.float() * scale[:, None, None]
        if own == "linear_fc1":
            products = torch.cat([products[..., ::2], products[..., 1::2]], -1)
        assert (layer.weight.float() * layer.weight_scale).equal(products.transpose(1, 2))


@pytest.mark.parametrize("layer", ("self_attention.linear_qkv", "mlp.linear_fc2"))
def test_static_scales_of_inputs_stay_under_a_models_own_names(
    layer: str, plain: Path, tmp_path: Path
) -> None:
    """No update has them, whatever their values, and with all weights they are not missed."""
    path = write(tmp_path / "static", plain / "llama", "neural-magic")
    served = load_pretrained(path, quantization="fp8", quantize_activations=True).model
    name = f"decoder.layers.1.{layer}.input_scale"
    before = dict(served.named_buffers())[name].clone()
    for value in (0.0, -2.0, 4.0):
        with pytest.raises(CheckpointError, match=f"{name}: scales of what is computed stay"):
            read_weights(served, {name: torch.tensor(value)})
    own = {key: x for key, x in served.state_dict().items() if isinstance(x, Tensor)}
    read_weights(served, own, all_parameters=True)()
    assert dict(served.named_buffers())[name].equal(before)


@pytest.mark.parametrize("quantization", ("fp8", "mxfp4", None))
def test_packed_numbers_of_a_state_dict_are_refused(
    quantization: str | None, tmp_path: Path
) -> None:
    """With their scales, which no update has, and without: the old ones would be of others."""
    folder = write_packed(tmp_path / "packed")
    served = load_pretrained(folder, quantization=quantization).model
    before = {name: x.clone() for name, x in kept_bytes(served).items()}
    stored = load_file(folder / "model.safetensors")
    blocks, scales = (f"model.layers.1.mlp.experts.down_proj_{x}" for x in ("blocks", "scales"))
    for state in (
        {blocks: stored[blocks].flip(0)},
        {scales: stored[scales].flip(0)},
        {blocks: stored[blocks].flip(0), scales: stored[scales].flip(0)},
        {blocks: stored[blocks].float(), f"{blocks}_scale": torch.ones(1)},
    ):
        with pytest.raises(CheckpointError, match=r"down_proj_.*: a state dict has no packed num"):
            read_weights(served, state)
    with pytest.raises(CheckpointError, match="a state dict has no packed numbers; give weights"):
        read_weights(served, stored, all_parameters=True)
    own = {name: x for name, x in served.state_dict().items() if isinstance(x, Tensor)}
    if quantization is not None:
        with pytest.raises(CheckpointError, match=r"linear_fc1.weight: a state dict has no packed"):
            read_weights(served, {name: x for name, x in own.items() if "scale" not in name})
        with pytest.raises(CheckpointError, match=r"linear_fc1.weight: a state dict has no packed"):
            read_weights(served, own)
    assert all(x.equal(before[name]) for name, x in kept_bytes(served).items())
