"""A KV cache of e4m3: what is read is what was kept, with all that happens to requests."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.checkpoint.quantized.cache_scales import read_cache_scales
from megatron_async.checkpoint.reading.files import stored_headers
from megatron_async.checkpoint.targets import Stage, TensorParallel
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.kernels.attention.e4m3_cache import E4M3, encode, scales_of
from megatron_async.runner.memory.attention_metadata import AttentionMetadata
from megatron_async.runner.memory.cache_attention import CacheAttention
from megatron_async.runner.model_runner import ModelRunner
from tests.support.fp8_models import write
from tests.support.huggingface_models import random_model
from tests.support.sweeps import some

BLOCKS, SIZE, HEADS, DIM = 9, 8, 2, 16


def test_numbers_are_kept_to_the_nearest_and_no_larger_than_448() -> None:
    x = torch.tensor([[[17.0, 19.0, -1e9, 500.0]], [[float("inf"), float("nan"), 2**-10, 0.3]]])
    kept = encode(x, torch.tensor([1.0])).float()
    assert kept[0, 0].tolist() == [16, 20, -448, 448]
    assert kept[1, 0, 0] == 448 and kept[1, 0, 1].isnan()
    assert kept[1, 0, 2:].tolist() == [0, 0.3125]
    halved = encode(x, torch.tensor([0.5]))[0, 0].float()
    assert halved.tolist() == [32, 40, -448, 448], "numbers are divided by the scale"


def test_scales_are_powers_of_two_with_room_above_the_largest() -> None:
    largest = torch.tensor([[0.0, 448.0, 224.0], [1.0, 1e-20, float("nan")]])
    assert scales_of(largest).tolist() == [[1, 2, 1], [2**-7, 2**-60, 1]]
    assert (scales_of(largest)[largest > 0] * 448 >= largest[largest > 0]).all()


def tokens(lengths: list[int]) -> AttentionMetadata:
    """A decode step: one row for each length."""
    rows = torch.arange(len(lengths))
    last = torch.tensor(lengths) - 1
    return AttentionMetadata(
        last, rows, (1 + rows * 4 + last // SIZE) * SIZE + last % SIZE, len(lengths),
        last + 1, decode_lengths_host=lengths, window=1,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("latent", (False, True))
@pytest.mark.parametrize("lengths", ([5, 17], [1, 32]))
def test_attention_is_that_to_the_numbers_times_their_scales(
    dtype: torch.dtype, latent: bool, lengths: list[int]
) -> None:
    """Bit for bit: scales are powers of two. Each head, and keys and values, have their own."""
    torch.manual_seed(0)
    tensors, heads = (1, 1) if latent else (2, HEADS)
    scales = 2.0 ** torch.randint(-6, 6, (1, tensors, heads))
    kv = torch.randn(1, tensors, BLOCKS, SIZE, heads, DIM) * 3
    kept = encode(kv, torch.ones(heads))
    wide = (kept.float() * scales[:, :, None, None, :, None]).to(dtype)
    table = torch.arange(1, 9).view(2, 4)
    query = torch.randn(2, 2 * heads, DIM).to(dtype)
    news = [(torch.randn(2, heads, DIM) * 8).to(dtype) for _ in range(tensors)]

    def attended(cache: torch.Tensor, scales: torch.Tensor | None, given: list[Any]) -> Any:
        attention = CacheAttention(cache, table, batch_invariant=False, scales=scales)
        if latent:
            return attention.attend_latent(tokens(lengths), 0, query, given[0], 0.3, 12)
        return attention.attend(tokens(lengths), 0, query, *given, 0.3, {})

    rounded = [
        (encode(new, scale).float() * scale[:, None]).to(dtype)
        for new, scale in zip(news, scales[0], strict=True)
    ]
    found, meant = attended(kept, scales, news), attended(wide, None, rounded)
    assert found.equal(meant) and found.isfinite().all()
    assert kept.float().mul(scales[:, :, None, None, :, None]).to(dtype).equal(wide), "appended"
    for other in (scales * 2, scales.flip(1) if not latent else scales / 2):
        assert not attended(kept, other, news).equal(meant), "a scale of others was not seen"


def engine_at(depth: int, path: Path | str = "tiny", **values: Any) -> DynamicInferenceEngine:
    sizes: dict[str, Any] = {
        "max_requests": 4, "block_size_tokens": 8, "block_count": 40, "max_sequence_length": 96,
        "prefill_chunk_tokens": 16, "debug": True, "batch_invariant": True, "device": "cpu",
    }  # fmt: skip
    config = EngineConfig(depth=depth, **{"kv_cache_dtype": "fp8", **sizes, **values})
    return DynamicInferenceEngine.from_pretrained(path, config)


def found_by(engine: DynamicInferenceEngine, *, disturbed: bool = True) -> list[Any]:
    prompts = [[40, 41, 42], [9] * 21, [9] * 16 + [50, 51], [70, 32, 99, 100] * 4]
    each = [
        SamplingParams(
            temperature=temperature, seed=n, num_tokens_to_generate=20, return_log_probs=True,
            termination_id=-1, skip_prompt_log_probs=True,
        )
        for n, temperature in enumerate((0.0, 1.0, 0.7, 0.0))
    ]  # fmt: skip
    first, second, *others = zip(prompts, each, strict=True)
    done = [engine.add_request(0, *first), engine.add_request(1, *second)]
    for step in range(60):
        engine.step_modern()
        if step == 5:  # the second has its prefix in the cache
            done += [engine.add_request(n + 2, *one) for n, one in enumerate(others)]
        if disturbed and step == 11:
            engine.evict_request(1)
            engine.pause_request(0)
        if disturbed and step == 16:
            engine.resume_request(0)
    while engine.has_unfinished_requests():
        engine.step_modern()
    results = [each.result() for each in done]
    assert results[2].num_cached_tokens or engine.cache.states is not None
    return [(each.generated_tokens, each.generated_log_probs) for each in results]


@pytest.mark.parametrize(
    ("model", "dtype"),
    some(list(product(("tiny", "tiny-moe", "tiny-hybrid"), ("float32", "bfloat16"))), 2),
)
def test_requests_have_the_same_tokens_at_all_depths(model: str, dtype: str) -> None:
    """With evictions, pauses and prefix hits: a block that is computed again has the same bits."""
    with engine_at(0, model, dtype=dtype) as engine:
        meant = found_by(engine, disturbed=False)
        assert engine.cache.kv.dtype == E4M3
    for depth in (1, 2, 4):
        with engine_at(depth, model, dtype=dtype) as engine:
            assert found_by(engine) == meant, depth
            assert engine.counters.evictions == 1


def test_drafts_change_no_token() -> None:
    with engine_at(2) as engine:
        meant = found_by(engine)
    for values in ({"speculative_method": "ngram"}, {"draft_model": "tiny"}):
        drafts: dict[str, Any] = {"num_speculative_tokens": 2, **values}
        with engine_at(2, **drafts) as engine:
            assert found_by(engine) == meant
            assert engine.counters.tokens_accepted > 0


def test_a_draft_models_cache_is_kept_too() -> None:
    """With scales of its own, which drafts need and tokens do not."""
    drafts: dict[str, Any] = {"num_speculative_tokens": 2, "draft_model": "tiny"}
    params = SamplingParams(num_tokens_to_generate=16, temperature=0.0, termination_id=-1)
    accepted, tokens = [0], []
    with engine_at(1, enable_prefix_caching=False, **drafts) as engine:
        program: Any = engine.runner._program
        batch = program._drafter._batch
        assert batch.kv_cache.dtype == E4M3 and batch.kv_cache is not program._batch.kv_cache
        assert batch.scales.equal(program._batch.scales), "both are the same model"
        for _ in range(2):
            done = engine.generate(["def read(path):\n", "class A:\n    def"], params)
            tokens.append([each.generated_tokens for each in done])
            accepted.append(engine.counters.tokens_accepted)
            batch.scales.fill_(2**-12)
    assert tokens[0] == tokens[1]
    assert accepted[1] > 16 > 8 > accepted[2] - accepted[1], accepted


def test_latents_are_kept_too(tmp_path: Path) -> None:
    """And a model whose keys are large has scales that fit: log-probabilities stay near those of a
    cache in the model's dtype, which they would not with scales of 1."""
    torch.manual_seed(0)
    model = random_model("deepseek_v2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "kv_a_layernorm" in name:
                parameter.mul_(1500.0)
            if "kv_b_proj" in name:
                parameter.div_(1500.0)
    model.save_pretrained(tmp_path)
    with engine_at(0, tmp_path, kv_cache_dtype=None) as engine:
        meant = found_by(engine, disturbed=False)
    differences = {}
    for name in ("chosen", "ones"):
        with engine_at(2, tmp_path) as engine:
            scales = engine.runner._program._batch.scales
            assert scales.shape == (3, 1, 1) and (scales > 1).all()
            if name == "ones":
                scales.fill_(1.0)
            found = found_by(engine)
        differences[name] = abs(found[1][1][0] - meant[1][1][0])
    assert differences["chosen"] < 0.3 < differences["ones"], differences


def test_scales_are_the_same_at_each_start_and_twice_the_tokens_fit() -> None:
    found = []
    for depth in (0, 2):
        with engine_at(depth, dtype="bfloat16", block_count=None, buffer_size_gb=0.01) as engine:
            found.append(engine.runner._program._batch.scales.clone())
            assert engine.cache.spec.token_bytes == 2 * 5 * 2 * 64, "keys, values: layers, heads"
            half = engine.cache.sizes.block_count
    assert found[0].equal(found[1]) and not found[0].equal(torch.ones_like(found[0]))
    wide = {"dtype": "bfloat16", "block_count": None, "buffer_size_gb": 0.01}
    with engine_at(0, kv_cache_dtype=None, **wide) as engine:
        assert 2 * engine.cache.sizes.block_count <= half <= 2 * engine.cache.sizes.block_count + 2
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' must be 'fp8' or None"):
        EngineConfig(kv_cache_dtype="int8")


@pytest.mark.parametrize("invariant", (False, True))
def test_it_is_near_a_cache_in_the_models_dtype(*, invariant: bool) -> None:
    prompts = ["def read(path):\n", "class A:\n    def", "for i in range(", "import os\n"]
    params = SamplingParams(num_tokens_to_generate=1, return_log_probs=True)
    both = []
    for dtype in (None, "fp8"):
        with engine_at(0, kv_cache_dtype=dtype, batch_invariant=invariant) as engine:
            done = engine.generate(prompts, params)
            assert engine.runner._program._pending_logits.dtype == torch.float32, "the model's"
            both.append([p for each in done for p in each.prompt_log_probs])
            both[-1] += [p for each in done for p in each.generated_log_probs]
    apart = torch.tensor(both[0]) - torch.tensor(both[1])
    assert 1e-5 < apart.abs().mean() < 0.05, apart.abs().mean()
    assert apart[-4:].abs().mean() < 0.05


def test_sleep_and_new_weights() -> None:
    with engine_at(2, enable_sleep_mode=True) as engine:
        meant = found_by(engine)
        weights = {k: v.clone() for k, v in engine.model.weights_owner.named_parameters()}
        engine.sleep(level=1)
        engine.wake_up()
        assert found_by(engine) == meant
        engine.update_weights(weights)
        assert found_by(engine) == meant


def with_larger_keys(engine: DynamicInferenceEngine, power: int) -> dict[str, torch.Tensor]:
    """The same model, whose keys are ``2 ** power`` times larger and its queries smaller."""
    state = {k: v.detach().clone() for k, v in engine.model.weights_owner.named_parameters()}
    config = engine.model.weights_owner.config
    heads, groups = config.num_attention_heads, config.num_query_groups
    for name, weight in state.items():
        if "linear_qkv.weight" in name or "linear_qkv.bias" in name:
            rows = weight.unflatten(0, (groups, heads // groups + 2, -1))
            rows[:, :-2] *= 2.0**-power
            rows[:, -2] *= 2.0**power
    return state


def updated_in_flight(depth: int, power: int, **options: Any) -> list[Any]:
    """Tokens of requests that get new weights after six steps, one of them paused, and the scales
    before and behind."""
    params = [
        SamplingParams(
            temperature=temperature, seed=n, num_tokens_to_generate=8, termination_id=-1,
            return_log_probs=True, skip_prompt_log_probs=True,
        )
        for n, temperature in enumerate((0.0, 1.0, 0.7))
    ]  # fmt: skip
    prompts = [9] * 5, [9] * 17, [9] * 17 + [50, 51]
    with engine_at(depth) as engine:
        scales = engine.runner._program._batch.scales
        before = scales.clone()
        done = [engine.add_request(n, prompts[n], params[n]) for n in range(2)]
        for step in range(6):
            engine.step_modern()
            if step == 3:
                engine.pause_request(0)
        engine.update_weights(with_larger_keys(engine, power), **options)
        done.append(engine.add_request(2, prompts[2], params[2]))
        engine.step_modern()
        engine.resume_request(0)
        while engine.has_unfinished_requests():
            engine.step_modern()
        found = [each.result() for each in done]
        assert len(found[0].weight_spans) == 2
        tokens = [(each.generated_tokens, each.generated_log_probs) for each in found]
        return [tokens, before, scales.clone()]


@pytest.mark.parametrize("depth", some([0, 1, 2, 4], 2))
def test_scales_follow_new_weights_at_all_depths(depth: int) -> None:
    """Keys are 64 times larger, and queries smaller: all that is rounded keeps its bits, unless a
    key is divided by the scale of the old ones."""
    meant, before, same = updated_in_flight(0, 0)
    assert same.equal(before)
    tokens, old, new = updated_in_flight(depth, 6)
    assert tokens == meant
    assert old.equal(before) and new[:, 0].equal(64 * old[:, 0])
    assert new[:, 1].equal(old[:, 1])


def test_scales_stay_while_requests_go_on_over_what_they_have() -> None:
    _, before, after = updated_in_flight(1, 6, recompute_kv_cache=False)
    assert after.equal(before)
    with engine_at(1) as engine:
        scales = engine.runner._program._batch.scales
        engine.update_weights(with_larger_keys(engine, 6), recompute_kv_cache=False)
        engine.generate([[9]], ONE)
        assert scales[:, 0].equal(64 * before[:, 0]), "nobody has anything in the cache"


ONE = SamplingParams(num_tokens_to_generate=1)
DEPTHS = some([0, 1, 2, 4], 2)


def counted(engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An item for each time that scales are chosen from now on."""
    found: list[bool] = []
    choose, loop = ModelRunner.choose_scales, engine.loop

    def noted(runner: ModelRunner, *, stored: bool) -> None:
        assert loop.in_flight_count == 0
        found.append(stored)
        choose(runner, stored=stored)

    monkeypatch.setattr(ModelRunner, "choose_scales", noted)
    return found


def changed(engine: DynamicInferenceEngine, power: int) -> dict[str, torch.Tensor]:
    """Other weights: all are a little different, keys ``2 ** power`` times larger."""
    state = with_larger_keys(engine, power)
    made = torch.Generator().manual_seed(3)
    noise = {k: torch.randn(v.shape, generator=made) for k, v in state.items()}
    return {k: v * (1 + 0.02 * noise[k]) for k, v in state.items()}


def buckets_of(state: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """The first has one tensor, keys of a layer; others have about as many each."""
    first = next(name for name in state if "linear_qkv.weight" in name)
    names = [name for name in state if name != first]
    others = [{name: state[name] for name in names[n :: count - 1]} for n in range(count - 1)]
    return [{first: state[first]}, *others]


class Running:
    """Requests at a depth, in whose midst weights change; they have cached prefixes."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.done: list[Any] = []

    def add(self, *prompt: int) -> None:
        number = len(self.done)
        params = SamplingParams(
            temperature=(0.0, 0.8)[number % 2], seed=number, num_tokens_to_generate=10,
            return_log_probs=True, termination_id=-1, skip_prompt_log_probs=True,
        )  # fmt: skip
        self.done.append(self.engine.add_request(number, list(prompt), params))

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step_modern()

    def end(self) -> list[Any]:
        while self.engine.has_unfinished_requests():
            self.engine.step_modern()
        results = [each.result() for each in self.done]
        return [(each.generated_tokens, each.generated_log_probs) for each in results]


def begun(engine: DynamicInferenceEngine) -> Running:
    running = Running(engine)
    running.add(*[9] * 17)
    running.add(*range(40, 53))
    running.step(5)
    return running


def joined(running: Running) -> list[Any]:
    """A request whose prefix the old weights have computed comes."""
    running.add(*[9] * 17, 50, 51)
    return running.end()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("small")
    random_model("llama").save_pretrained(path)
    return path


@pytest.mark.parametrize("depth", DEPTHS)
def test_scales_are_chosen_once_for_an_update_in_buckets(
    depth: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all buckets: scales and tokens are those of an update that brings all at once, while
    requests run and a prompt comes that the old weights have computed."""
    found = []
    for count in (1, 4):
        with engine_at(depth, small) as engine:
            scales, chosen = engine.runner._program._batch.scales, counted(engine, monkeypatch)
            before, state, running = scales.clone(), changed(engine, 5), begun(engine)
            versions = engine.weight_version
            for bucket in [state] if count == 1 else buckets_of(state, count):
                engine.update_weights(bucket, partial_update=True)
            assert engine.weight_version == versions + count and chosen == []
            tokens = joined(running)
            assert chosen == [False] and not scales.equal(before)
            assert running.done[2].result().num_cached_tokens == 0
            found.append((scales.clone(), tokens))
    assert found[0][0].equal(found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("depth", DEPTHS)
def test_scales_are_those_of_an_engine_that_begins_with_the_weights(
    depth: int, small: Path
) -> None:
    """With one tensor in a first update, others in later ones, and steps between: each step reads
    what scales of its own weights have divided, whatever the depth."""
    found = []
    for at in (0, depth):
        with engine_at(at, small) as engine:
            scales = engine.runner._program._batch.scales
            running, seen = begun(engine), []
            for number, bucket in enumerate(buckets_of(changed(engine, 5), 3)):
                engine.update_weights(bucket, partial_update=True)
                running.add(*[9] * 16, 60 + number)
                running.step(2)
                seen.append(scales.clone())
            tokens = joined(running)
            state = {k: v.clone() for k, v in engine.model.weights_owner.named_parameters()}
        with engine_at(at, small) as fresh:
            with torch.no_grad():
                fresh.update_weights(state)
            fresh.generate([[9]], ONE)
            assert fresh.runner._program._batch.scales.equal(seen[-1])
        assert not seen[0].equal(seen[-1])
        found.append((torch.stack(seen), tokens))
    assert found[0][0].equal(found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_update_that_fails_in_the_middle_keeps_scales_and_weights_together(
    depth: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bucket stays, the second is refused: scales are those of the first, once."""
    found = []
    for fails in (False, True):
        with engine_at(depth, small) as engine:
            scales, chosen = engine.runner._program._batch.scales, counted(engine, monkeypatch)
            first, second = buckets_of(changed(engine, 5), 2)
            running = begun(engine)
            engine.update_weights(first, partial_update=True)
            if fails:
                name = list(second)[-1]
                second[name] = torch.full_like(second[name], float("nan"))
                for bad in (second, {"no.such": torch.ones(1)}):
                    with pytest.raises(CheckpointError, match=r"NaN or infinite|does not have"):
                        engine.update_weights(bad, partial_update=True)
            found.append((joined(running), scales.clone()))
            assert chosen == [False]
    assert found[0][0] == found[1][0] and found[0][1].equal(found[1][1])


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_refused_update_alone_chooses_no_scales(
    depth: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs keeps its cache, and a later prompt finds the prefix of an earlier one there."""
    with engine_at(depth, small) as engine:
        scales, chosen = engine.runner._program._batch.scales, counted(engine, monkeypatch)
        before, running = scales.clone(), begun(engine)
        bad = {name: value / 0.0 for name, value in changed(engine, 5).items()}
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            engine.update_weights(bad)
        joined(running)
        assert chosen == [] and scales.equal(before)
        assert running.done[2].result().num_cached_tokens == 16


@pytest.mark.parametrize("depth", DEPTHS)
def test_scales_wait_for_sleep_and_for_pauses(
    depth: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights come while the cache has no memory; a paused engine chooses nothing."""
    with engine_at(depth, small, enable_sleep_mode=True) as engine:
        scales, chosen = engine.runner._program._batch.scales, counted(engine, monkeypatch)
        before, state, running = scales.clone(), with_larger_keys(engine, 5), begun(engine)
        engine.pause_request(1)
        engine.sleep(level=2)
        engine.wake_up(["weights"])
        engine.update_weights(state)
        engine.wake_up(["kv_cache"])
        engine.pause_request(0)
        engine.step_modern()
        assert chosen == [] and scales.equal(before)
        engine.resume_request(0)
        engine.resume_request(1)
        tokens = running.end()
        assert chosen == [False] and scales[:, 0].equal(32 * before[:, 0])
    with engine_at(depth, small) as engine:
        assert begun(engine).end() == tokens, "the model means the same"


FORMS = {
    "compressed": "model.layers.{}.self_attn.{}_scale",
    "modelopt": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "older": "model.layers.{}.self_attn.{}_proj.output_scale",
}


def with_cache_scales(path: Path, form: str, scales: dict[tuple[int, str], Any]) -> Path:
    """A model in FP8 that brings ``scales``."""
    torch.manual_seed(0)
    random_model("llama").save_pretrained(path / "plain")
    made = write(path / "model", path / "plain", "compressed-channel")
    tensors = load_file(made / "model.safetensors")
    tensors |= {FORMS[form].format(*at): torch.tensor([each]) for at, each in scales.items()}
    save_file(tensors, made / "model.safetensors")
    return made


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_a_checkpoint_are_taken(form: str, tmp_path: Path) -> None:
    scales = {(0, "k"): 0.03, (0, "v"): 0.5, (1, "k"): 0.26, (1, "v"): 3.0}
    with engine_at(0, with_cache_scales(tmp_path, form, scales)) as engine:
        found = engine.runner._program._batch.scales
        assert found[..., 0].tolist() == [[2**-5, 0.5], [0.5, 4.0]]
        assert found.equal(found[..., :1].expand_as(found))


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_heads_are_taken(form: str, tmp_path: Path) -> None:
    """As of compressed-tensors' "attn_head"; a layer may have one for all beside."""
    heads = {(0, "k"): [0.03, 4.0], (0, "v"): [1.0, 0.26], (1, "k"): [8.0], (1, "v"): [0.5, 16.0]}
    shaped = {at: torch.tensor(each).reshape(-1, 1, 1).tolist() for at, each in heads.items()}
    with engine_at(0, with_cache_scales(tmp_path, form, shaped)) as engine:
        found = engine.runner._program._batch.scales.tolist()
        assert found == [[[2**-5, 4.0], [1.0, 0.5]], [[8.0, 8.0], [0.5, 16.0]]]
        (request,) = engine.generate([[5, 6, 7]], ONE)
        assert request.generated_tokens


@pytest.mark.parametrize(("rank", "wanted"), [(0, [1.0, 3.0]), (1, [2.0, 3.0])])
def test_a_rank_has_the_scales_of_its_heads(rank: int, wanted: list[float], tmp_path: Path) -> None:
    scales = {(0, "k"): [9.0], (0, "v"): [9.0], (1, "k"): [1.0, 2.0], (1, "v"): [3.0]}
    path = with_cache_scales(tmp_path, "compressed", scales)
    place, stage = TensorParallel(rank, 2), Stage(1, 1, 2)
    found = read_cache_scales(stored_headers(path), range(2), 2, stage, place)
    assert found is not None and found.tolist() == [[[each] for each in wanted]]


def test_scales_of_a_hybrid_model_are_of_its_layers_that_attend(tmp_path: Path) -> None:
    torch.manual_seed(0)
    random_model("bamba").save_pretrained(tmp_path / "plain")
    made = write(tmp_path / "model", tmp_path / "plain", "compressed-channel")
    tensors = load_file(made / "model.safetensors")
    tensors |= {FORMS["modelopt"].format(1, kind): torch.tensor([8.0]) for kind in "kv"}
    save_file(tensors, made / "model.safetensors")
    with engine_at(0, made) as engine:
        assert engine.runner._program._batch.scales.tolist() == [[[8.0] * 2] * 2]


def test_scales_come_with_a_directory_and_go_with_other_weights(tmp_path: Path) -> None:
    scales = {(0, "k"): 0.03, (0, "v"): 0.5, (1, "k"): 0.26, (1, "v"): 3.0}
    path = with_cache_scales(tmp_path, "compressed", scales)
    other = with_cache_scales(tmp_path / "other", "compressed", dict.fromkeys(scales, 8.0))
    plain = tmp_path / "plain"
    with engine_at(0, path) as engine:
        found = engine.runner._program._batch.scales
        stored = found.clone()
        state = {k: v.clone() for k, v in engine.model.weights_owner.named_parameters()}

        def update(source: Any) -> None:
            engine.update_weights(source)
            engine.generate([[9]], ONE)

        update(other)
        assert found.eq(8).all()
        update(state)
        measured = found.clone()
        assert not measured.eq(8).all() and not measured.equal(stored)
        update(path)
        assert found.equal(stored)
        update(plain)
        assert not found.equal(stored) and found.log2().frac().eq(0).all()
        bad = with_cache_scales(tmp_path / "bad", "compressed", dict.fromkeys(scales, 0.0))
        kept = found.clone()
        with pytest.raises(CheckpointError, match="k_scale has 1 of 1 scales"):
            update(bad)
        assert found.equal(kept)
        engine.update_weights({"output_layer.weight": state["output_layer.weight"]},
                              partial_update=True)  # fmt: skip
        update(path)
        assert found.equal(stored), "those of the last update"


@pytest.mark.parametrize("fault", ("missing", "too many", "no layer", "twice", "other heads"))
def test_scales_that_are_not_one_each_are_named_and_left(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales: dict[tuple[int, str], Any] = {
        (0, "k"): 0.03, (0, "v"): 0.5, (1, "k"): 0.26, (1, "v"): 3.0
    }  # fmt: skip
    other = {"too many": 2, "no layer": 10**9 - 1}.get(fault)
    if other is not None:
        scales[other, "k"] = 1.0
    elif fault == "missing":
        scales.pop((1, "v"))
    elif fault == "other heads":
        scales[0, "k"] = [1.0] * 4
    path = with_cache_scales(tmp_path, "compressed", scales)
    if fault == "twice":
        tensors = load_file(path / "model.safetensors")
        tensors[FORMS["older"].format(1, "k")] = torch.tensor([4.0])
        save_file(tensors, path / "model.safetensors")
    with engine_at(0, path) as engine:
        chosen = engine.runner._program._batch.scales[..., 0].tolist()
        assert chosen != [[2**-5, 0.5], [0.5, 4.0]]
    assert "not one of each for each of its 2 layers" in caplog.text


def test_a_layer_of_too_many_digits_is_no_layer(tmp_path: Path) -> None:
    path = with_cache_scales(tmp_path, "modelopt", {(0, "k"): 1.0})
    tensors = load_file(path / "model.safetensors")
    tensors[FORMS["modelopt"].format("9" * 5000, "k")] = torch.tensor([1.0])
    save_file(tensors, path / "model.safetensors")
    with engine_at(0, path) as engine:
        assert not engine.runner._program._batch.scales.eq(1).all()


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = with_cache_scales(tmp_path, "modelopt", {(0, "k"): float("nan"), (0, "v"): 1.0})
    with pytest.raises(CheckpointError, match=r"k_proj.k_scale has 1 of 1 scales that are no"):
        engine_at(0, path)
