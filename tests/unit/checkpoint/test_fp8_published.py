"""FP8 and MXFP4 as others write them: KV caches alone, further names of scales, odd shapes, shards,
and errors that say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.checkpoint import load_pretrained
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.activations import linears_in_e4m3
from tests.support.fp8_models import cache_scales, compressed, kept_bytes
from tests.support.mxfp4_models import write_packed
from tests.support.sweeps import some

E4M3 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
Change = Callable[[dict[str, Tensor]], object]


def write_plain(path: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """A model none of whose sizes is a multiple of 128; blocks of 128 share 32 columns with it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=160, intermediate_size=224, num_attention_heads=4, num_key_value_heads=2,
        head_dim=40, vocab_size=131, num_hidden_layers=2, max_position_embeddings=96,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("published") / "plain")


def by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of blocks of 128 x 128, and what each element is divided by."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight.abs()
    scale = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3)) / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return scale, wide[:rows, :columns]


def by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return scale, scale


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return scale, scale


def publish(
    path: Path,
    plain: Path,
    config: dict[str, Any] | None,
    scales: Callable[[Tensor], tuple[Tensor, Tensor]] = by_row,
    *,
    suffix: str = "_scale",
    left_out: str = "lm_head",
    shards: int = 1,
    change: Change = len,
) -> Path:
    """The model with e4m3 in layers that are not ``left_out``, and in ``meant`` what it stands for,
    both in files of their own. ``change`` is of the tensors that are stored."""
    stored = load_file(plain / "model.safetensors")
    meant = dict(stored)
    for name, weight in list(stored.items()):
        if name.endswith("_proj.weight") and left_out not in name:
            scale, wide = scales(weight)
            stored[name] = (weight / wide).to(E4M3)
            stored[f"{name}{suffix}"] = scale.clone()
            meant[name] = stored[name].float() * wide
    change(stored)
    values = json.loads((plain / "config.json").read_text())
    for at, tensors in ((path / "meant", meant), (path, stored)):
        at.mkdir(parents=True, exist_ok=True)
        (at / "config.json").write_text(json.dumps(values))
        save_shards(at, tensors, shards)
    if config is not None:
        (path / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return path


def save_shards(path: Path, tensors: dict[str, Tensor], count: int) -> None:
    """In ``count`` files, of which weights and their scales are in different ones."""
    if count == 1:
        save_file(tensors, path / "model.safetensors")
        return
    index: dict[str, str] = {}
    names = sorted(tensors)
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, path / file)
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def engine_over(path: Path, depth: int = 0, **values: Any) -> DynamicInferenceEngine:
    config = EngineConfig(
        depth=depth, device="cpu", batch_invariant=True, debug=True, max_requests=3,
        block_size_tokens=8, block_count=30, max_sequence_length=64, prefill_chunk_tokens=16,
        **values,
    )  # fmt: skip
    return DynamicInferenceEngine.from_pretrained(path, config)


PROMPTS = [3, 5, 7, 9, 11, 13, 2, 4, 6], [100, 1, 2, 3, 50, 60, 70], [3, 5, 7, 9, 11, 13, 2, 4, 8]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=10, temperature=(0.0, 0.8)[number % 2], seed=number,
        termination_id=-1, return_log_probs=True,
    )  # fmt: skip


def tokens_of(engine: DynamicInferenceEngine) -> list[Any]:
    done = engine.generate([[*each] for each in PROMPTS], params_of(0))
    return [(each.generated_tokens, each.prompt_log_probs) for each in done]


def tokens_over(path: Path, **values: Any) -> list[Any]:
    with engine_over(path, **values) as engine:
        return tokens_of(engine)


IGNORED = compressed("channel") | {
    "ignore": ["re:.*lm_head", "re:model\\.layers\\.[01]\\.mlp\\..*", "model.layers.1.qkv_proj"]
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "blocks": {"config": BLOCKS, "scales": by_block, "suffix": "_scale_inv"},
    "rows, with layers left out": {"config": IGNORED, "left_out": ".mlp."},
    "q left out": {"config": compressed("tensor"), "scales": by_tensor, "left_out": "q_proj"},
    "shards": {"config": BLOCKS, "scales": by_block, "suffix": "_scale_inv", "shards": 3},
}


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("kind", PUBLISHED)
def test_odd_sizes_are_what_they_stand_for(kind: str, tied: bool, tmp_path: Path) -> None:
    """To the bit, multiplied out or kept."""
    path = publish(tmp_path / "m", write_plain(tmp_path / "p", tied=tied), **PUBLISHED[kind])
    meant = tokens_over(path / "meant")
    assert tokens_over(path) == meant
    assert tokens_over(path, quantization="fp8") == meant


FORMS = {
    "model.layers.{}.self_attn.{}_scale": (2**-5, 0.5),
    "model.layers.{0}.self_attn.qkv_proj.{1}_scale": (2**-5, 0.5),
    "model.layers.{}.self_attn.kv_scale": (0.5, 0.5),
    "model.layers.{}.self_attn.attn.kv_scale": (0.5, 0.5),
}


def cached(form: str) -> Change:
    """Scales of keys and values; one for both is that of values."""

    def change(stored: dict[str, Tensor]) -> None:
        for layer in range(2):
            stored[form.format(layer, "k")] = torch.tensor(0.03)
            stored[form.format(layer, "v")] = torch.tensor([0.26])

    return change


@pytest.mark.parametrize("form", FORMS)
def test_further_names_of_scales_of_keys_and_values(form: str, plain: Path, tmp_path: Path) -> None:
    path = publish(tmp_path, plain, MODELOPT, by_tensor, change=cached(form))
    assert cache_scales(path)[..., 0].tolist() == [[*FORMS[form]]] * 2


def test_a_scale_for_both_and_another_are_left_unread(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = "model.layers.{}.self_attn.{}_scale"

    def change(stored: dict[str, Tensor]) -> None:
        cached(form)(stored)
        stored[form.format(1, "kv")] = torch.tensor(8.0)

    path = publish(tmp_path, plain, MODELOPT, by_tensor, change=change)
    assert 8 not in cache_scales(path)
    assert "not one of each for each of its 2 layers" in caplog.text


@pytest.mark.parametrize("value", (1e30, 1e-30))
def test_scales_that_no_keys_have_are_refused(value: float, plain: Path, tmp_path: Path) -> None:
    """They became the largest or the smallest power of two that is a scale, and keys 0 or 448."""

    def change(stored: dict[str, Tensor]) -> None:
        cached("model.layers.{}.self_attn.{}_scale")(stored)
        stored["model.layers.1.self_attn.k_scale"] = torch.tensor(value)

    path = publish(tmp_path, plain, MODELOPT, by_tensor, change=change)
    with pytest.raises(CheckpointError, match=r"1.self_attn.k_scale has scales from .* 2\^60: qua"):
        load_pretrained(path)


ATTENTION = {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": CACHE}
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
CACHES: dict[str, dict[str, Any] | None] = {
    "ModelOpt": {**MODELOPT, "quant_algo": None},
    "ModelOpt's own inside": {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
    },
    "ModelOpt's own file": None,
    "compressed-tensors": {
        **COMPRESSED, "config_groups": {}, "format": "dense", "kv_cache_scheme": CACHE
    },
    "attention": {**COMPRESSED, "config_groups": {"group_0": ATTENTION}, "format": "dense"},
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
def test_kv_caches_alone_may_be_quantized(kind: str, plain: Path, tmp_path: Path) -> None:
    """Weights are in 16 or 32 bits; scales of keys and values are read for an FP8 cache alone."""
    change = cached("model.layers.{}.self_attn.{}_scale")
    path = publish(tmp_path, plain, CACHES[kind], left_out="", change=change)
    if CACHES[kind] is None:
        said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
        (path / "hf_quant_config.json").write_text(json.dumps(said))
    assert tokens_over(path) == tokens_over(plain)
    assert cache_scales(path)[..., 0].tolist() == [[2**-5, 0.5]] * 2


def test_a_group_of_attention_stands_beside_one_of_weights(plain: Path, tmp_path: Path) -> None:
    config = compressed("channel")
    config["config_groups"]["group_1"] = ATTENTION
    path = publish(tmp_path, plain, config)
    assert tokens_over(path) == tokens_over(path / "meant")
    assert load_pretrained(path, quantization="fp8", quantize_activations=True)


@pytest.mark.parametrize("suffix", ("input_scale", "activation_scale"))
def test_static_scales_of_inputs_have_either_name(suffix: str, plain: Path, tmp_path: Path) -> None:
    """transformers' fine-grained FP8 without blocks calls it ``activation_scale``."""
    config = {**BLOCKS, "weight_block_size": None, "activation_scheme": "static"}

    def change(stored: dict[str, Tensor], both: bool = False) -> None:
        for number, name in enumerate([n for n in stored if n.endswith("_proj.weight")]):
            for each in ("input_scale", "activation_scale") if both else (suffix,):
                at = name.removesuffix("weight") + each
                stored[at] = torch.tensor(0.5 + number / 8, dtype=torch.bfloat16)

    path = publish(tmp_path, plain, config, by_tensor, suffix="_scale_inv", change=change)
    model = load_pretrained(path, quantization="fp8", quantize_activations=True).model
    stored = load_file(path / "model.safetensors")
    scale = stored[O_PROJ.replace("weight", suffix)].float()
    found = linears_in_e4m3(model)["decoder.layers.0.self_attention.linear_proj"].input_scale
    assert found.equal(scale.reshape(1))
    assert tokens_over(path, quantization="fp8") == tokens_over(path / "meant")
    change(stored, both=True)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"input_scale and .*activation_scale are there"):
        load_pretrained(path, quantization="fp8", quantize_activations=True)


def quantized_head(stored: dict[str, Tensor]) -> None:
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].to(E4M3)
    stored["lm_head.weight_scale"] = torch.ones(131, 1)


FAULTS: dict[str, tuple[dict[str, Any] | None, Change, str]] = {
    "no weight": (
        compressed("channel"), lambda stored: stored.pop(O_PROJ),
        r"has model.*o_proj.weight_scale, and .*o_proj.weight is missing",
    ),
    "no word of FP8": (
        None, lambda stored: [stored.pop(n) for n in list(stored) if n.endswith("_scale")],
        r"has dtype F8_E4M3; .*; FP8 is read where quantization_config says so, in config.json",
    ),
    "a tied output layer": (
        compressed("channel"), quantized_head,
        r"lm_head.weight has dtype F8_E4M3; .*, as model.embed_tokens.weight has it, to which "
        r"config.json ties it: leave it out, or set tie_word_embeddings to false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_say_what_is_to_be_changed(fault: str, tmp_path: Path) -> None:
    config, change, message = FAULTS[fault]
    tied = write_plain(tmp_path / "plain", tied=True)
    path = publish(tmp_path / "model", tied, config, change=change)
    served = load_pretrained(tied, quantization="fp8").model
    before = {name: each.clone() for name, each in kept_bytes(served).items()}
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(path)
    from megatron_async.weights.place import read_weights

    with pytest.raises(CheckpointError, match=message):
        read_weights(served, path)
    assert all(each.equal(before[name]) for name, each in kept_bytes(served).items())


@pytest.mark.parametrize("quantization", (None, "fp8"))
def test_parts_in_fp8_are_refused_while_requests_run(
    quantization: str | None, plain: Path, tmp_path: Path
) -> None:
    """Numbers without scales, scales without numbers. What runs goes on as if nobody had asked."""
    path = publish(tmp_path, plain, compressed("channel"))
    other = publish(tmp_path / "other", plain, compressed("channel"))
    part = {n: x for n, x in load_file(other / "model.safetensors").items() if "layers.0.s" in n}
    numbers = {name: each for name, each in part.items() if each.dtype == E4M3}
    save_file(numbers, tmp_path / "part.safetensors")
    scales = {name: each for name, each in part.items() if name not in numbers}
    of_numbers = r"weight has dtype torch.float8_e4m3fn and no scales: give .*weight_scale in the "
    of_scales = r"hold .*proj.weight_scale, and .*proj.weight is missing: send both in one update"
    cases: list[tuple[Any, str]] = [
        (numbers, of_numbers), (tmp_path / "part.safetensors", of_numbers), (scales, of_scales),
        ({name: x for name, x in part.items() if name != O_PROJ}, of_scales),
        ({name: x for name, x in part.items() if name != f"{O_PROJ}_scale"}, of_numbers),
        ({name: each.float().to(torch.float8_e5m2) for name, each in numbers.items()}, "e5m2, the"),
    ]  # fmt: skip
    found = []
    for asked in (False, True):
        with engine_over(path, 1, quantization=quantization) as engine:
            done = [engine.add_request(n, [*PROMPTS[n]], params_of(n)) for n in range(3)]
            for new, message in cases:
                engine.step_modern()
                if asked:
                    with pytest.raises(CheckpointError, match=message):
                        engine.update_weights(new, partial_update=True)
            while engine.has_unfinished_requests():
                engine.step_modern()
            assert engine.weight_version == 0
            found.append([each.result().generated_tokens for each in done])
    assert found[0] == found[1]


def updated(path: Path, depth: int, sources: list[Any], **values: Any) -> list[Any]:
    """Tokens of requests in whose midst weights come, and of a model that has all of them."""
    with engine_over(path, depth, **values) as engine:
        done = [engine.add_request(n, [*PROMPTS[n]], params_of(n)) for n in range(2)]
        for source in sources:
            for _ in range(3):
                engine.step_modern()
            engine.update_weights(source, partial_update=isinstance(source, dict))
        done.append(engine.add_request(2, [*PROMPTS[2]], params_of(2)))
        while engine.has_unfinished_requests():
            engine.step_modern()
        results = [each.result() for each in done]
        running = [(each.generated_tokens, each.generated_log_probs) for each in results]
        return [running, tokens_of(engine)]


@pytest.mark.parametrize("depth", some([1, 2, 4], 1))
@pytest.mark.parametrize("cache", (None, "fp8"))
@pytest.mark.parametrize("quantization", (None, "fp8"))
def test_weights_come_in_parts_and_in_fp8_while_requests_run(
    quantization: str | None, cache: str | None, depth: int, plain: Path, tmp_path: Path
) -> None:
    """First bfloat16 in three parts, then a directory with scales of blocks, and one with scales of
    rows: the same at all depths, and in the end what an engine has that loads it."""
    path = publish(tmp_path / "one", plain, BLOCKS, by_block, suffix="_scale_inv")
    other = write_plain(tmp_path / "plain", seed=5)
    of_blocks = publish(tmp_path / "two", other, BLOCKS, by_block, suffix="_scale_inv", shards=2)
    of_rows = publish(
        tmp_path / "three", write_plain(tmp_path / "p", seed=6), compressed("channel")
    )
    new = {n: each.bfloat16() for n, each in load_file(other / "model.safetensors").items()}
    parts = [{name: new[name] for name in sorted(new)[number::3]} for number in range(3)]
    values = {"quantization": quantization, "kv_cache_dtype": cache}
    sources = [*parts, of_blocks, of_rows]
    meant, end = updated(path, 0, sources, **values)
    assert updated(path, depth, sources, **values) == [meant, end]
    of_fresh = tokens_over(of_rows, **values)
    if quantization is None:
        assert end == of_fresh
    assert [each[0] for each in end] == [each[0] for each in of_fresh]
    whole = updated(path, depth, parts, **values)[1]
    assert whole == updated(path, 0, [new], **values)[1]


BLOCKS_OF = "model.layers.0.mlp.experts.gate_up_proj_blocks"
SCALES_OF = "model.layers.0.mlp.experts.gate_up_proj_scales"


@pytest.mark.parametrize("quantization", (None, "mxfp4", "fp8"))
@pytest.mark.parametrize("fault", ("no blocks", "too large"))
def test_packed_experts_that_stand_for_nothing_are_refused(
    fault: str, quantization: str | None, tmp_path: Path
) -> None:
    """Kept or multiplied out; an update leaves the old ones."""
    path = write_packed(tmp_path / "model")
    served = load_pretrained(path, quantization=quantization).model
    before = {name: each.clone() for name, each in kept_bytes(served).items()}
    tensors = load_file(path / "model.safetensors")
    if fault == "no blocks":
        del tensors[BLOCKS_OF]
        message = f"tensor {BLOCKS_OF} is missing"
    else:
        tensors[BLOCKS_OF][1, 0, 0] = 0x77  # 6
        tensors[SCALES_OF][1, 0, 0] = 253
        message = "infinite as float32"
    bad = write_packed(tmp_path / "bad")
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(bad, quantization=quantization)
    from megatron_async.weights.place import read_weights

    with pytest.raises(CheckpointError, match=message):
        read_weights(served, bad)
    assert all(each.equal(before[name]) for name, each in kept_bytes(served).items())


def test_the_largest_scales_that_are_kept_are_finite(tmp_path: Path) -> None:
    path = write_packed(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors[SCALES_OF][1, 0, 0] = 252
    save_file(tensors, path / "model.safetensors")
    assert load_pretrained(path, quantization="mxfp4")
