"""Asynchronous stopping in transformers' ``generate``: equal to stock, late as its answers may be.

The first tests have the names of the test list of the proposal to transformers.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    XLNetConfig,
    XLNetLMHeadModel,
)

from megatron_async.contrib.transformers import (
    AsyncGenerate,
    AsyncStoppingCriteriaList,
    alternating_streams,
    async_generate,
    async_stopping,
    reads_on_host,
)
from megatron_async.contrib.transformers.stopping import notices
from megatron_async.contrib.transformers.stopping.streams import AlternatingStreams
from tests.support.compared_generation import (
    Heard,
    assert_generates_as_stock,
    assert_same_cache,
    assert_same_result,
    generate_seeded,
)
from tests.support.late_streams import LateStreams
from tests.support.tiny_generators import generator_model, prompts

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODELS = ("gpt2", "llama", "qwen3", "mistral")


class EndsAfter(StoppingCriteria):
    """Ends row i when it has ``length + i`` tokens; on the device."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)
        return input_ids.shape[1] >= self.length + rows


@reads_on_host
class HostSum(StoppingCriteria):
    """Ends a row whose last token is divisible by ``divisor``, and row i of ``first + i`` tokens
    at the latest; a loop on the host."""

    def __init__(self, divisor: int, first: int = 99) -> None:
        self.divisor = divisor
        self.first = first
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert input_ids.device.type == "cpu"
        self.seen.append(input_ids.tolist())
        return torch.tensor(
            [
                row[-1] % self.divisor == 0 or len(row) >= self.first + i
                for i, row in enumerate(input_ids.tolist())
            ]
        )


class OnHost(StoppingCriteria):
    """Gives a host-marked criterion to stock ``generate`` on a GPU."""

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done: Tensor = self.criterion(input_ids.cpu(), scores).to(input_ids.device)
        return done


class Raises(StoppingCriteria):
    def __init__(self, error: BaseException, length: int) -> None:
        self.error = error
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        if input_ids.shape[1] >= self.length:
            raise self.error
        return False


def arguments(rows: int = 4, **more: Any) -> dict[str, Any]:
    return {**prompts(rows), "max_new_tokens": 10, "pad_token_id": 0, **more}


# --- the list of the proposal -----------------------------------------------------------------


def test_async_sync_equivalence_max_length() -> None:
    stock, _ = assert_generates_as_stock(
        generator_model("gpt2"), arguments(eos_token_id=None, streamer=True)
    )
    assert stock.shape == (4, 15)


def test_async_sync_equivalence_eos_token() -> None:
    stock, streams = assert_generates_as_stock(
        generator_model("llama"), arguments(eos_token_id=list(range(1, 24)))
    )
    assert stock.shape[1] == 6 and streams.submitted > 1, "ran ahead, and was cut"


def test_async_sync_equivalence_partial_eos() -> None:
    stock, _ = assert_generates_as_stock(
        generator_model("llama"), arguments(do_sample=True, eos_token_id=[3, 5, 7])
    )
    new = stock[:, 5:]
    assert (new == 0).any() and not (new == 0).all(dim=-1).any()


def test_async_custom_stopping_criteria() -> None:
    criteria = StoppingCriteriaList([EndsAfter(7)])
    stock, _ = assert_generates_as_stock(
        generator_model("qwen3"), arguments(stopping_criteria=criteria)
    )
    assert stock.shape[1] == 10


def test_async_multiple_eos_tokens() -> None:
    for eos in ([2, 4], [3, 6, 9, 12], [23]):
        assert_generates_as_stock(
            generator_model("gpt2"), arguments(do_sample=True, eos_token_id=eos)
        )


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_async_different_batch_sizes(rows: int) -> None:
    assert_generates_as_stock(
        generator_model("llama"),
        arguments(rows, do_sample=True, eos_token_id=[3, 5, 7, 9], streamer=rows == 1),
        seed=rows,
    )


def test_async_cpu_fallback(caplog: pytest.LogCaptureFixture) -> None:
    notices.say_once.cache_clear()
    model, given = generator_model("gpt2"), arguments(eos_token_id=[3, 5, 7], do_sample=True)
    stock, _ = generate_seeded(model, given)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ours, _ = generate_seeded(model, {**given, "custom_generate": async_generate})
            assert torch.equal(ours, stock)
        with async_stopping(model):
            ours, _ = generate_seeded(model, given)
            assert torch.equal(ours, stock)
    said = [r.message for r in caplog.records if "asynchronous stopping" in r.message]
    assert said == [
        "asynchronous stopping is not used: stop checks on cpu tensors cannot be deferred"
    ]


def test_async_wrapper_basic() -> None:
    length, eos = MaxLengthCriteria(9), EosTokenCriteria(3)
    criteria = AsyncStoppingCriteriaList([length, eos])
    assert isinstance(criteria, StoppingCriteriaList)
    assert len(criteria) == 2
    assert list(criteria) == [length, eos]
    assert criteria.max_length == 9
    assert AsyncStoppingCriteriaList([eos]).max_length is None


def test_async_legacy_call_interface() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    plain = [MaxLengthCriteria(9), EosTokenCriteria(3)]
    assert AsyncStoppingCriteriaList(plain)(ids, None).tolist() == [True, False]
    marked = AsyncStoppingCriteriaList([*plain, HostSum(6)])
    assert marked(ids, None).tolist() == [True, True]


def test_async_finalize() -> None:
    streams = LateStreams(most_polls=100)
    criteria = AsyncStoppingCriteriaList([EosTokenCriteria(3)], streams)
    ids = torch.tensor([[1, 2], [4, 5]])
    check = criteria.submit(ids, ids[:, -1], None, torch.ones(2, dtype=torch.long))
    gone = weakref.ref(check)
    assert criteria.outstanding == 1 and not criteria.oldest_ready()
    del check
    for _ in range(2):
        criteria.finalize()
        assert criteria.outstanding == 0 and not criteria.oldest_ready()
    gc.collect()
    assert gone() is None and streams.closed == 2


# --- equality with stock ----------------------------------------------------------------------

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_ids_and_all_that_is_recorded_are_those_of_stock(name: str, cache: str) -> None:
    model = generator_model(name)
    longest = 6 if (name, cache) == ("mistral", "static") else 10
    for sample in (False, True):
        given = arguments(do_sample=sample, eos_token_id=[3, 5, 7, 9, 11, 13], streamer=False)
        given.update(EVERYTHING, cache_implementation=cache, max_new_tokens=longest)
        if longest == 6:  # a static window that has been full cannot be cropped
            given.update(prompts(4, 1), max_new_tokens=5)
        assert_generates_as_stock(model, given, seed=int(sample))


def test_each_step_of_lateness_gives_the_same() -> None:
    model = generator_model("mistral")
    for ahead in (1, 2, 5, 20):
        for seed in range(3):
            given = arguments(do_sample=True, eos_token_id=[3, 5, 7, 9], **EVERYTHING)
            stock, streams = assert_generates_as_stock(model, given, seed=seed, ahead=ahead)
            assert streams.submitted <= len(stock.scores) + ahead - 1


def test_processors_and_least_lengths() -> None:
    given = arguments(
        do_sample=True,
        min_new_tokens=3,
        eos_token_id=[3, 5, 7, 9],
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        top_k=8,
        top_p=0.9,
        temperature=0.8,
    )
    assert_generates_as_stock(generator_model("llama"), given)


def test_stop_strings() -> None:
    model = generator_model("gpt2")
    free = model.generate(**arguments(1, eos_token_id=None))[0].tolist()
    text = "".join(chr(ord("a") + i) for i in free)
    given = arguments(1, stop_strings=[text[8:10]], tokenizer=letters(), eos_token_id=None)
    stock, _ = assert_generates_as_stock(model, given)
    assert stock.shape[1] < 15


def letters() -> Any:
    """A tokenizer of 24 letters, one token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({chr(ord("a") + i): i for i in range(24)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a")


def test_time_is_looked_at_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import stopping_criteria

    class Clock:
        now = 0.0

        def time(self) -> float:
            self.now += 1.0
            return self.now

    results = []
    for custom in (None, AsyncGenerate(3, LateStreams())):
        monkeypatch.setattr(stopping_criteria, "time", Clock())
        limit = StoppingCriteriaList([MaxTimeCriteria(4.5, initial_timestamp=0.0)])
        given = arguments(stopping_criteria=limit, eos_token_id=None)
        results.append(generator_model("llama").generate(**given, custom_generate=custom))
    assert torch.equal(*results) and results[0].shape[1] == 10


def test_a_limit_on_length_alone_needs_no_check() -> None:
    streams = LateStreams()
    custom = AsyncGenerate(2, streams)
    generator_model("gpt2").generate(**arguments(eos_token_id=None), custom_generate=custom)
    assert streams.submitted == streams.waits == 0


def test_the_host_waits_only_when_enough_checks_are_outstanding() -> None:
    given, model = arguments(eos_token_id=[23]), generator_model("gpt2")
    streams = LateStreams(most_polls=0)
    model.generate(**given, custom_generate=AsyncGenerate(2, streams))
    assert streams.submitted > 1 and streams.waits == 0
    late = LateStreams(most_polls=10**6)
    late._random.randint = lambda low, high: high  # type: ignore[method-assign]
    out = model.generate(**given, custom_generate=AsyncGenerate(4, late))
    assert late.submitted == out.shape[1] - 5 == late.waits


# --- criteria on the host ---------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_the_host_ends_are_padded_from_the_next_token_on(name: str, cache: str) -> None:
    model, repeated = generator_model(name), 0
    for seed, sample in enumerate((False, True, True)):
        small = (name, cache) == ("mistral", "static")
        marked = HostSum(24, first=2 if small else 7)
        given = arguments(
            do_sample=sample,
            eos_token_id=[3],
            stopping_criteria=StoppingCriteriaList([marked]),
            cache_implementation=cache,
            streamer=False,
            **EVERYTHING,
        )
        if small:
            given.update(prompts(4, 1), max_new_tokens=5)
        stock, streams = assert_generates_as_stock(model, given, seed=seed)
        repeated += streams.submitted - len(stock.scores)
        half = len(marked.seen) // 2
        assert marked.seen[:half] == marked.seen[half:], "called as stock calls it"
    assert repeated > 4, "more than what is cut at the end: tokens were taken back in between"


def test_a_row_ended_by_the_host_goes_on_without_padding_if_there_is_no_end_id() -> None:
    marked = HostSum(5)
    given = arguments(stopping_criteria=StoppingCriteriaList([marked]), eos_token_id=None)
    _, streams = assert_generates_as_stock(generator_model("llama"), given)
    assert streams.submitted <= 10, "nothing was decoded twice"


def test_criteria_may_be_marked_one_by_one() -> None:
    class Bare(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
            return bool(input_ids.shape[1] >= 8)

    given = arguments(stopping_criteria=StoppingCriteriaList([reads_on_host(Bare())]))
    stock, _ = assert_generates_as_stock(generator_model("gpt2"), given)
    assert stock.shape[1] == 8


# --- caches -----------------------------------------------------------------------------------


def test_the_users_own_cache_can_go_on() -> None:
    model = generator_model("mistral")
    eos, ids = [3, 5, 7, 9, 11, 13, 15], prompts(1)["input_ids"]
    caches = []
    for custom in (None, AsyncGenerate(4, LateStreams(1))):
        cache = DynamicCache(config=model.config)
        given = {"past_key_values": cache, "eos_token_id": eos, "pad_token_id": 0}
        first = model.generate(ids, **given, max_new_tokens=12, custom_generate=custom)
        caches.append((first, cache, int(cache.get_seq_length())))
    assert torch.equal(caches[0][0], caches[1][0]) and caches[0][2] == caches[1][2]
    assert_same_cache(caches[1][1], caches[0][1])
    longer = torch.cat([caches[0][0], torch.tensor([[4, 2]])], dim=-1)
    results = [
        model.generate(longer, past_key_values=c, max_new_tokens=4, eos_token_id=None)
        for _, c, _ in caches
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"synced_gpus": True}, "synced_gpus"),
        ({"cache_implementation": "static", "return_dict_in_generate": True}, "sliding-window"),
        (
            {
                "cache_implementation": "static",
                "stopping_criteria": StoppingCriteriaList([HostSum(7)]),
            },
            "sliding-window",
        ),
    ],
)
def test_what_cannot_be_deferred_is_stock_with_the_reason(
    more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    notices.say_once.cache_clear()
    model, streams = generator_model("mistral"), LateStreams()
    given = arguments(eos_token_id=[3, 5], **more)
    if "synced_gpus" in more:
        model = generator_model("gpt2")
        given.pop("synced_gpus")
        # Another test of this process may have made a process group: then stock generates.
        has_group = torch.distributed.is_initialized()
        fails = pytest.raises(ValueError, match="process group")
        with caplog.at_level(logging.WARNING), nullcontext() if has_group else fails:
            custom = AsyncGenerate(2, streams)
            model.generate(**given, synced_gpus=True, custom_generate=custom)
    else:
        stock = model.generate(**given)
        with caplog.at_level(logging.WARNING):
            ours = model.generate(**given, custom_generate=AsyncGenerate(2, streams))
        assert torch.equal(*(getattr(x, "sequences", x) for x in (ours, stock)))
    assert any(reason in record.message for record in caplog.records)
    assert streams.submitted == 0


def test_a_cache_that_nobody_gets_needs_no_crop() -> None:
    given = arguments(do_sample=True, eos_token_id=[3, 5, 7], cache_implementation="static")
    _, streams = assert_generates_as_stock(generator_model("mistral"), given)
    assert streams.submitted > 0


# --- errors, modes, the context ---------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("mine")])
@pytest.mark.parametrize("marked", [False, True])
def test_errors_and_interrupts_leave_nothing_behind(error: BaseException, marked: bool) -> None:
    model, streams = generator_model("llama"), LateStreams(2)
    raises = Raises(error, 8)
    criterion = reads_on_host(raises) if marked else raises
    given = arguments(stopping_criteria=StoppingCriteriaList([criterion]), eos_token_id=[23])
    heard = Heard()
    before = vars(type(model)).copy()
    with pytest.raises(type(error)), async_stopping(model, 3, streams):
        model.generate(**given, streamer=heard)
    assert streams.closed == 1 and not streams._queue
    assert vars(type(model)) == before
    assert heard.ended == 0
    assert_generates_as_stock(model, arguments(eos_token_id=[3, 5]))


def test_an_interrupt_in_the_middle_of_a_forward() -> None:
    model, streams = generator_model("llama"), LateStreams(2)
    calls = 0

    def interrupt(module: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            custom = AsyncGenerate(3, streams)
            model.generate(**arguments(eos_token_id=[23]), custom_generate=custom)
    finally:
        hook.remove()
    assert streams.closed == 1 and not streams._queue
    assert_generates_as_stock(model, arguments(eos_token_id=[3, 5]))


def test_probabilities_that_are_not_finite_are_the_error_of_stock() -> None:
    class Spoils(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores * float("nan") if input_ids.shape[1] == 8 else scores

    model = generator_model("llama")
    for custom in (None, AsyncGenerate(3, LateStreams())):
        given = arguments(do_sample=True, logits_processor=[Spoils()], custom_generate=custom)
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(**given)


def test_beams_go_to_stock() -> None:
    model, streams = generator_model("gpt2"), LateStreams()
    given = arguments(num_beams=2, eos_token_id=[3])
    stock = model.generate(**given)
    custom = AsyncGenerate(2, streams)
    assert torch.equal(model.generate(**given, custom_generate=custom), stock)
    with async_stopping(model, streams=streams):
        assert torch.equal(model.generate(**given), stock)
    assert streams.submitted == 0


def test_modes_with_an_assistant_are_stock_in_the_context_and_an_error_without() -> None:
    model, streams = generator_model("gpt2"), LateStreams()
    given = arguments(1, eos_token_id=[3], prompt_lookup_num_tokens=2)
    stock = model.generate(**given)
    with async_stopping(model, streams=streams):
        assert torch.equal(model.generate(**given), stock)
    with pytest.raises(ValueError, match="use async_stopping"):
        model.generate(**given, custom_generate=AsyncGenerate(2, streams))


def test_the_context_serves_its_model_alone_and_nests() -> None:
    model, streams, inner = generator_model("gpt2"), LateStreams(), LateStreams()
    other = copy.deepcopy(model)
    original = type(model)._sample
    given = arguments(eos_token_id=[3, 5])
    with async_stopping(model, streams=streams):
        other.generate(**given)
        assert streams.submitted == 0
        with async_stopping(model, streams=inner):
            model.generate(**given)
        assert inner.submitted > 0 and streams.submitted == 0
        model.generate(**given)
        assert streams.submitted > 0
    assert type(model)._sample is original and "_sample" not in vars(type(model))


def test_ahead_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        AsyncGenerate(0)


def test_random_state_of_a_model_in_training_mode() -> None:
    model = generator_model("gpt2").train()
    try:
        assert_generates_as_stock(model, arguments(1, eos_token_id=[3, 5, 7, 9, 11]), seed=1)
    finally:
        model.eval()


def test_nothing_is_launched_beyond_the_positions_of_the_model() -> None:
    model, ids = generator_model("gpt2"), prompts(1, 62, 8)["input_ids"]  # it has 64
    end = model.generate(ids, max_new_tokens=3, pad_token_id=0)[0, -1:].tolist()
    given = {"input_ids": ids, "max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": end}
    stock, _ = assert_generates_as_stock(model, given)
    assert stock.shape[1] == 65, "ends too early to show it"


def test_nothing_is_launched_beyond_the_users_static_cache() -> None:
    model, ids = generator_model("llama"), prompts(1)["input_ids"]
    end = model.generate(ids, max_new_tokens=4, pad_token_id=0)[0, -1:].tolist()

    def run(**more: Any) -> tuple[Tensor, StaticCache]:
        cache = StaticCache(config=model.config, max_cache_len=8)
        given = arguments(1, eos_token_id=end, past_key_values=cache, **more)
        return model.generate(**given), cache

    stock, kept = run()
    ours, cache = run(custom_generate=AsyncGenerate(3, LateStreams()))
    assert torch.equal(ours, stock)
    assert_same_cache(cache, kept)


def test_a_cache_that_the_model_made_of_tuples_is_that_of_stock() -> None:
    config = XLNetConfig(vocab_size=24, d_model=16, n_layer=1, n_head=2, d_inner=16, mem_len=9)
    model = XLNetLMHeadModel(config).eval()
    given = arguments(1, eos_token_id=list(range(5, 20)), return_dict_in_generate=True)
    given = {**given, "use_cache": False, "output_logits": True}
    stock, _ = generate_seeded(model, given)
    ours, _ = generate_seeded(model, {**given, "custom_generate": AsyncGenerate(3, LateStreams())})
    assert torch.equal(ours.sequences, stock.sequences)
    assert len(ours.logits) == len(stock.logits)


def test_processors_see_the_ids_of_stock() -> None:
    class Sees(LogitsProcessor):
        def __init__(self) -> None:
            self.ids: list[list[list[int]]] = []

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.ids.append(input_ids.tolist())
            return scores

    model, seen = generator_model("llama"), []
    for custom in (None, AsyncGenerate(3, LateStreams())):
        processor = Sees()
        given = arguments(do_sample=True, eos_token_id=[3, 5, 7, 9], logits_processor=[processor])
        generate_seeded(model, {**given, "custom_generate": custom})
        seen.append(processor.ids)
    assert seen[1][: len(seen[0])] == seen[0] and len(seen[1]) <= len(seen[0]) + 2


def test_no_forward_behind_the_prefill_reads_a_value() -> None:
    """transformers looks at the mask (up to 5.17) or for padding tokens (GPT-2) in each."""
    model = copy.deepcopy(generator_model("gpt2"))
    model.set_attn_implementation("sdpa")
    forward, reads = model.forward, []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            reads.extend(["read"] * (function is torch.ops.aten._local_scalar_dense.default))
            return function(*args, **(kwargs or {}))

    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        with Noted():
            return forward(*args, **kwargs)

    model.forward = noted

    def reads_of(custom: Any) -> int:
        reads.clear()
        given = {"eos_token_id": [999], "pad_token_id": 0, "custom_generate": custom}
        model.generate(prompts(1)["input_ids"], max_new_tokens=12, **given)
        return len(reads)

    assert reads_of(None) >= 12
    assert reads_of(AsyncGenerate(streams=lambda _: LateStreams())) <= 2
    assert "warn_if_padding_and_no_attention_mask" not in vars(model.transformer)


# --- streams that take turns ------------------------------------------------------------------


class FakeStream:
    """Knows what has been launched on it, and on others before what it has waited for."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.known: set[str] = set()

    def wait_event(self, event: FakeEvent) -> None:
        self.known |= event.known

    def wait_stream(self, stream: FakeStream) -> None:
        self.known |= stream.known


class FakeEvent:
    def __init__(self) -> None:
        self.known: frozenset[str] = frozenset()

    def record(self, stream: FakeStream) -> None:
        self.known = frozenset(stream.known)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Work of the CPU is over."""


class AlternatingOnCpu(AlternatingStreams):
    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def rng_state(self) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The current stream, of a fake of CUDA's."""
    held = [FakeStream()]
    fakes = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": lambda device=None: held[0],
        "set_stream": lambda stream: held.__setitem__(0, stream),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return held


@pytest.mark.parametrize("count", [6, 7])
def test_streams_take_turns_and_wait_for_the_token_alone(
    count: int, current: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, callers, used = generator_model("gpt2"), current[0], []
    forward, check = type(model).forward, AsyncStoppingCriteriaList._after
    # Each name is the number of tokens in the sequence.
    seen: dict[str, set[str]] = {}

    def launched(name: str) -> None:
        seen[name] = set(current[0].known)
        current[0].known.add(name)

    @functools.wraps(forward)  # its arguments decide what it is given
    def noted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched(f"forward {len(used)}")
        used.append(current[0])
        return forward(self, *args, **kwargs)

    def noted_check(self: Any, *args: Any) -> Any:
        launched(f"check {len(used) - 1}")
        return check(self, *args)

    # Of one row the host looks at the token, and there is no check to overlap.
    given = arguments(2, eos_token_id=[127], max_new_tokens=count)
    stock = model.generate(**given)
    monkeypatch.setattr(type(model), "forward", noted_forward)
    monkeypatch.setattr(AsyncStoppingCriteriaList, "_after", noted_check)
    out = model.generate(**given, custom_generate=AsyncGenerate(streams=AlternatingOnCpu))
    assert torch.equal(out, stock)
    assert used[1] is not callers
    assert used == [callers, used[1]] * 3 + [callers] * (count - 6)
    for step in range(1, count):
        assert f"forward {step - 1}" in seen[f"forward {step}"]
        assert f"check {step - 1}" not in seen[f"forward {step}"], "it would not overlap"
    for step in range(1, count):  # joined before the next token is selected
        assert f"check {step - 1}" in seen[f"check {step}"]
    assert current[0] is callers and callers.known >= seen.keys()


@pytest.mark.parametrize("sample", [False, True])
def test_streams_that_take_turns_give_what_stock_gives(
    current: list[FakeStream], sample: bool
) -> None:
    callers = current[0]
    given = arguments(do_sample=sample, eos_token_id=[3, 5, 7, 9, 11])
    given.update(EVERYTHING)
    model = generator_model("llama")
    stock, state = generate_seeded(model, given)
    given["custom_generate"] = AsyncGenerate(ahead=3, streams=AlternatingOnCpu)
    ours, own_state = generate_seeded(model, given)
    assert_same_result(ours, stock)
    assert torch.equal(own_state, state)
    assert current[0] is callers


def test_after_an_error_the_callers_stream_is_the_current_one(current: list[FakeStream]) -> None:
    callers = current[0]
    criteria = StoppingCriteriaList([Raises(ValueError("boom"), 8)])
    with pytest.raises(ValueError, match="boom"):
        generator_model("gpt2").generate(
            **arguments(1, eos_token_id=[127]),
            stopping_criteria=criteria,
            custom_generate=AsyncGenerate(streams=AlternatingOnCpu),
        )
    assert current[0] is callers


# --- a GPU ------------------------------------------------------------------------------------


SCHEMES = {
    "side stream": async_generate,
    "alternating": AsyncGenerate(streams=alternating_streams),
}


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("scheme", ["side stream", "alternating"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_equality_on_a_gpu(cache: str, scheme: str) -> None:
    import copy

    model = copy.deepcopy(generator_model("gpt2")).cuda()
    for rows, sample in ((1, False), (4, True), (16, True)):
        given = arguments(rows, do_sample=sample, eos_token_id=[3, 5, 7])
        given.update({k: v.cuda() for k, v in prompts(rows).items()})
        given.update(cache_implementation=cache, disable_compile=True)
        torch.manual_seed(1)
        stock, state = model.generate(**given), torch.cuda.get_rng_state()
        torch.manual_seed(1)
        stream = torch.cuda.current_stream()
        ours = model.generate(**given, custom_generate=SCHEMES[scheme])
        assert torch.equal(ours, stock)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert torch.cuda.current_stream() == stream


@pytest.mark.gpu
@NEEDS_GPU
def test_host_marked_criteria_and_streamers_on_a_gpu() -> None:
    model = copy.deepcopy(generator_model("llama")).cuda()
    results = []
    for custom in (None, async_generate):
        heard = HostSum(7), Heard()
        given = arguments(1, eos_token_id=[3, 5], streamer=heard[1], custom_generate=custom)
        given.update({k: v.cuda() for k, v in prompts(1).items()})
        if custom is not None:
            given["stopping_criteria"] = StoppingCriteriaList([heard[0]])
        else:
            given["stopping_criteria"] = StoppingCriteriaList([OnHost(heard[0])])
        results.append((model.generate(**given), heard[1].puts))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@pytest.mark.gpu
@NEEDS_GPU
def test_no_token_synchronises_the_host_with_a_gpu() -> None:
    """Sync debug mode turns each synchronising call of torch into a warning."""
    import warnings

    model = copy.deepcopy(generator_model("gpt2")).cuda()
    model.set_attn_implementation("sdpa")  # the masks of "eager" wait in transformers

    def synchronisations(tokens: int, custom: Any) -> int:
        ids = prompts(1)["input_ids"].cuda()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model.generate(
                    ids, max_new_tokens=tokens, eos_token_id=[999], pad_token_id=0,
                    custom_generate=custom,
                )  # fmt: skip
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(w.message) for w in seen)

    def each_token(custom: Any) -> float:
        synchronisations(4, custom)  # what is set up once
        return (synchronisations(24, custom) - synchronisations(4, custom)) / 20

    assert each_token(None) >= 1
    assert each_token(async_generate) == 0
