"""Weights with NaN or infinite elements are refused by name, unless somebody asks for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megatron_async.checkpoint import load_pretrained, save_distributed, save_native
from megatron_async.checkpoint.reading.finite import check_finite
from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt import GPTModel
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.weights.place import read_weights
from tests.support.engines import config_at, drive, greedy

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=48,
    vocab_size=64,
    max_sequence_length=64,
    tie_word_embeddings=True,
)
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
EMBEDDING = "embedding.word_embeddings.weight"
NOT_FINITE = (math.nan, math.inf, -math.inf)


def model(seed: int = 0) -> GPTModel:
    torch.manual_seed(seed)
    return build_model(CONFIG, device="cpu", dtype=torch.float32)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model(seed).named_parameters()}


def saved(root: Path, kind: str, value: float) -> tuple[Path, str, int]:
    """A directory with ``value`` in a parameter, the parameter's name, and how many times."""
    if kind == "huggingface":
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=32,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=48,
                num_hidden_layers=2,
                vocab_size=64,
            )
        )
        attention: Any = theirs.model.layers[0].self_attn
        with torch.no_grad():
            attention.k_proj.weight[3, 4] = value
            attention.v_proj.weight[:2, 5] = value
        theirs.save_pretrained(root)
        return root, QKV, 3
    ours = model()
    with torch.no_grad():
        dict(ours.named_parameters())[FC2][0, :2] = value
    (save_native if kind == "native" else save_distributed)(root, ours, CONFIG)
    return root, FC2, 2


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("kind", ("huggingface", "native", "distributed"))
def test_a_directory_is_refused_by_the_name_of_the_parameter(
    kind: str, value: float, tmp_path: Path
) -> None:
    path, name, count = saved(tmp_path / "model", kind, value)
    with pytest.raises(CheckpointError) as raised:
        load_pretrained(path)
    assert f"{path}: {name} has {count} of " in str(raised.value)
    assert "NaN or infinite as float32" in str(raised.value)
    with pytest.raises(CheckpointError, match=name):
        DynamicInferenceEngine.from_pretrained(path, config_at(1))
    loaded = load_pretrained(path, allow_non_finite_weights=True)
    parameter = dict(loaded.model.named_parameters())[name]
    assert int((~parameter.isfinite()).sum()) == count


def test_what_overflows_in_the_dtype_asked_for_is_refused(tmp_path: Path) -> None:
    path, name, _ = saved(tmp_path / "model", "native", 1e5)
    assert load_pretrained(path).name == "model"
    with pytest.raises(CheckpointError, match=f"{name} has 2 of .* infinite as float16"):
        load_pretrained(path, dtype=torch.float16)


def test_a_nan_in_a_tied_pair_of_stored_tensors_is_no_difference(tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path / "model", "huggingface", 0.0)
    theirs: Any = transformers.LlamaForCausalLM.from_pretrained(path)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    tensors["model.embed_tokens.weight"][0, 0] = math.nan
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    config = (path / "config.json").read_text()
    assert '"tie_word_embeddings": false' in config
    (path / "config.json").write_text(
        config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    with pytest.raises(CheckpointError, match=f"{EMBEDDING} has 1 of"):
        load_pretrained(path)
    assert load_pretrained(path, allow_non_finite_weights=True).name == "model"


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("kind", ("state dict", "directory", "file"))
def test_an_update_is_refused_before_anything_is_replaced(
    kind: str, value: float, tmp_path: Path
) -> None:
    new = state(2)
    new[FC2][0, 0] = value
    source: Any = new
    if kind == "file":
        source = tmp_path / "new.safetensors"
        save_file(new, source)
    elif kind == "directory":
        source = tmp_path / "new"
        other = model(2)
        other.load_state_dict(new, strict=False)
        save_native(source, other, CONFIG)
    served = model(1)
    before = {name: p.clone() for name, p in served.named_parameters()}
    wrapper = GPTNetwork(served)
    config = config_at(1, max_requests=2, block_size_tokens=4, debug=True)
    with DynamicInferenceEngine(
        ServedModel(network=wrapper),
        config,
    ) as engine:
        expected = engine.generate([[1, 2]], greedy(8))[0].generated_tokens
        future = engine.add_request(0, [1, 2], greedy(8))
        engine.step_modern()
        with pytest.raises(CheckpointError, match=f"the new weights: {FC2} has 1 of 1,536 "):
            engine.update_weights(source)
        assert engine.weight_version == 0
        drive(engine)
        assert future.result(timeout=0).generated_tokens == expected
    assert all(torch.equal(before[name], p) for name, p in served.named_parameters())
    read_weights(served, source, allow_non_finite_weights=True)()
    assert not dict(served.named_parameters())[FC2].isfinite().all()


@pytest.mark.parametrize("allowed", (False, True))
def test_the_flag_of_the_configuration_decides(allowed: bool, tmp_path: Path) -> None:
    path, name, _ = saved(tmp_path / "model", "native", math.inf)
    good = tmp_path / "good"
    save_native(good, model(), CONFIG)
    config = config_at(1, allow_non_finite_weights=allowed)
    with DynamicInferenceEngine.from_pretrained(good, config) as engine:
        if not allowed:
            with pytest.raises(CheckpointError, match=name):
                engine.update_weights(path)
            with pytest.raises(CheckpointError, match=name):
                DynamicInferenceEngine.from_pretrained(path, config)
            return
        assert engine.update_weights(path) == 1
    with DynamicInferenceEngine.from_pretrained(path, config) as engine:
        served = engine.model.network.model
        assert not dict(served.named_parameters())[name].isfinite().all()


@pytest.mark.parametrize("options", ((), ("--allow-non-finite-weights",)))
def test_the_option_of_the_command_line_decides(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, name, _ = saved(tmp_path / "model", "native", math.inf)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2]}\n')
    code = main(
        ["generate", "--model", str(path), "--prompt-file", str(prompts), "--device", "cpu",
         "--max-new-tokens", "2", *options]
    )  # fmt: skip
    said = capsys.readouterr().err
    assert code == (0 if options else 2)
    if not options:
        assert name in said and "--allow-non-finite-weights takes them" in said


def test_all_tensors_with_bad_elements_are_counted() -> None:
    new = state()
    new[FC2][0, 0] = math.nan
    new[QKV][:] = math.inf
    with pytest.raises(CheckpointError, match="and 1 more tensors have some; allow_non_finite"):
        read_weights(model(), new)


def test_the_largest_of_each_dtype_is_finite() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes:
        most = torch.finfo(dtype).max
        check_finite("here", [("w", torch.tensor([most, -most, 0.0], dtype=dtype), dtype)])
        for served in dtypes:
            fits = torch.finfo(served).max >= most
            tensor = torch.tensor([0.0, most], dtype=dtype)
            if fits:
                check_finite("here", [("w", tensor, served)])
            else:
                with pytest.raises(CheckpointError, match="here: w has 1 of 2 elements"):
                    check_finite("here", [("w", tensor, served)])


def test_integers_and_empty_tensors_have_nothing_to_check() -> None:
    check_finite("here", [("ids", torch.tensor([2**62]), torch.int64)])
    check_finite("here", [("none", torch.zeros(0, 3), torch.float32)])
    check_finite("here", [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_waited_for_once() -> None:
    names = [str(n) for n in range(50)]
    tensors = {name: torch.randn(300, 200, device="cuda").bfloat16() for name in names}
    listed = [(name, tensor.t(), torch.bfloat16) for name, tensor in tensors.items()]
    waits: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        waits.append(self.numel())
        torch.cuda.set_sync_debug_mode("default")
        return tolist(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", counted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            check_finite("here", listed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert waits == [50]
    tensors["7"][5, 6] = math.nan
    with pytest.raises(CheckpointError, match="here: 7 has 1 of 60,000"):
        check_finite("here", listed)
