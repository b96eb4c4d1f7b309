"""The tables of megatron-core's names: they are complete, the code keeps to them, and the page of
the documentation is made from them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_async
from megatron_async.errors import ConfigError, RequestError
from megatron_async.megatron_api import (
    HOMES,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    GPTInferenceWrapper,
    InferenceClient,
    InferenceConfig,
    MegatronLLM,
    SamplingParams,
    TextGenerationController,
    main_tables,
    tables,
)
from megatron_async.megatron_api.coordinator.tables import CLIENT, COORDINATOR
from megatron_async.megatron_api.names import (
    ANY,
    Table,
    accepted,
    check_keywords,
    names_of,
    releases,
    works,
)
from megatron_async.megatron_compat import installed
from tests.support.stock_model import (
    Tokenizer,
    no_gpu,  # noqa: F401
    stock_model,
)

from megatron.core.inference.contexts import dynamic_context as theirs_context  # isort: skip
from megatron.core.inference.engines import dynamic_engine as theirs_engine  # isort: skip
from megatron.core.inference import inference_client as theirs_client  # isort: skip
from megatron.core.inference import inference_request as theirs_request  # isort: skip
from megatron.core.inference.model_inference_wrappers.gpt import (  # isort: skip
    gpt_inference_wrapper as theirs_wrapper,
)
from megatron.core.inference.sampling_params import SamplingParams as TheirParams  # isort: skip
from megatron.core.inference.text_generation_controllers import (  # isort: skip
    text_generation_controller as theirs_controller,
)

LISTEN = theirs_engine.DynamicInferenceEngine.start_listening_to_data_parallel_coordinator
ROOT = Path(__file__).parents[3]


def arguments(cls: type) -> set[str]:
    """Of the constructor."""
    return set(inspect.signature(cls).parameters)


def attributes(cls: type) -> set[str]:
    """Public ones that megatron-core's class has, or sets in itself."""
    found = {name for name in dir(cls) if not name.startswith("_")}
    if dataclasses.is_dataclass(cls):
        found |= {field.name for field in dataclasses.fields(cls)}
    for base in cls.__mro__:
        if not base.__module__.startswith("megatron."):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and ast.unparse(node.value) == "self" and not node.attr.startswith("_"):
                found.add(node.attr)
    return found


def of_their_llms() -> set[str]:
    """Arguments and public names of ``MegatronLLM`` and ``MegatronAsyncLLM``, since 0.18."""
    try:
        from megatron.core.inference.apis import MegatronAsyncLLM as TheirAsyncLLM
        from megatron.core.inference.apis import MegatronLLM as TheirLLM
    except ImportError:
        return set()
    found: set[str] = set()
    for cls in (TheirLLM, TheirAsyncLLM):
        found |= attributes(cls) | arguments(cls)
    return found - {"kwargs"}


def of_their_config() -> set[str]:
    """Of ``InferenceConfig``, since 0.17."""
    try:
        from megatron.core.inference.config import InferenceConfig as Theirs
    except ImportError:
        return set()
    return {field.name for field in dataclasses.fields(Theirs)} | arguments(Theirs)


RELEASE = ".".join(map(str, installed().numbers[:2]))
THEIRS: dict[str, tuple[Table, set[str]]] = {
    "CONTEXT": (tables.CONTEXT, arguments(theirs_context.DynamicInferenceContext)),
    "CONTEXT_ATTRIBUTES": (
        tables.CONTEXT_ATTRIBUTES | main_tables.MAIN_CONTEXT_ATTRIBUTES,
        attributes(theirs_context.DynamicInferenceContext),
    ),
    "WRAPPER": (tables.WRAPPER, arguments(theirs_wrapper.GPTInferenceWrapper)),
    "WRAPPER_ATTRIBUTES": (
        tables.WRAPPER_ATTRIBUTES,
        attributes(theirs_wrapper.GPTInferenceWrapper),
    ),
    "CONTROLLER": (tables.CONTROLLER, arguments(theirs_controller.TextGenerationController)),
    "CONTROLLER_ATTRIBUTES": (
        tables.CONTROLLER_ATTRIBUTES,
        attributes(theirs_controller.TextGenerationController),
    ),
    "ENGINE": (tables.ENGINE, arguments(theirs_engine.DynamicInferenceEngine)),
    "ENGINE_ATTRIBUTES": (
        tables.ENGINE_ATTRIBUTES | main_tables.MAIN_ENGINE_ATTRIBUTES,
        attributes(theirs_engine.DynamicInferenceEngine),
    ),
    "SAMPLING_PARAMS": (
        tables.SAMPLING_PARAMS,
        {field.name for field in dataclasses.fields(TheirParams)},
    ),
    "REQUEST": (
        tables.REQUEST,
        attributes(theirs_request.DynamicInferenceRequest)
        | attributes(theirs_request.DynamicInferenceRequestRecord),
    ),
    "CLIENT": (
        CLIENT,
        attributes(theirs_client.InferenceClient) | arguments(theirs_client.InferenceClient),
    ),
    "COORDINATOR": (
        COORDINATOR,
        set(inspect.signature(LISTEN).parameters) - {"self"},
    ),
    "INFERENCE_CONFIG": (main_tables.INFERENCE_CONFIG, of_their_config()),
    "LLM": (main_tables.LLM, of_their_llms()),
}


def test_names_are_those_of_the_installed_release() -> None:
    for name, (_, theirs) in THEIRS.items():
        assert names_of(name, RELEASE) == theirs, name
    # What a context says in numbers.
    source = textwrap.dedent(
        inspect.getsource(theirs_context.DynamicInferenceContext.get_kvcache_utilization_stats)
    )
    (said,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict))
    keys = {key.value for key in said.keys if isinstance(key, ast.Constant)}
    context = DynamicInferenceContext(**KEYWORDS)
    assert keys - context.get_kvcache_utilization_stats().keys() == set()


@pytest.mark.parametrize("name", THEIRS)
def test_each_name_of_each_release_is_in_its_table(name: str) -> None:
    table, _ = THEIRS[name]
    known = releases(name)
    assert known.keys() - table.keys() == set()
    first = {span[0] for span in known.values()}
    assert first <= {"0.16", "0.17", "0.18", "0.19"}


def test_sampling_params_take_the_names_of_each_release() -> None:
    values = {name: value for name, value in NEUTRAL.items() if name in releases("SAMPLING_PARAMS")}
    values |= {name: NEUTRAL[name] for name in ("streaming", "streaming_interval", "do_kv_handoff")}
    assert releases("SAMPLING_PARAMS").keys() <= values.keys()
    assert SamplingParams(**values).num_tokens_to_generate == 5
    assert SamplingParams(detokenize_stop_sequence=True).include_stop_str_in_output
    assert not SamplingParams(**values).include_stop_str_in_output
    params = SamplingParams()
    params.add_attributes({"detokenize_stop_sequence": True, "streaming": True})
    assert params.include_stop_str_in_output
    for refused in (
        lambda: SamplingParams(do_kv_handoff=True),
        lambda: params.add_attributes({"do_kv_handoff": True}),
    ):
        with pytest.raises(RequestError, match="do_kv_handoff=True is not supported"):
            refused()


@pytest.mark.parametrize("interval", [0, -3, 1.5, "2"])
def test_a_streaming_interval_is_a_number_of_tokens(interval: Any) -> None:
    for give in (
        lambda: SamplingParams(streaming_interval=interval),
        lambda: SamplingParams().add_attributes({"streaming_interval": interval}),
    ):
        with pytest.raises(RequestError, match="streaming_interval="):
            give()
    assert SamplingParams(streaming_interval=8).streaming_interval == 1  # each token is streamed


NEUTRAL: dict[str, Any] = dict(
    temperature=1.0, top_k=0, top_p=0.0, return_log_probs=False, skip_prompt_log_probs=False,
    return_segments=False, num_tokens_to_generate=5, num_tokens_total=None, termination_id=None,
    top_n_logprobs=0, return_prompt_top_n_logprobs=False, add_BOS=False, stop_words=None,
    detokenize_stop_sequence=False, return_prompt_tokens=True, streaming=True, streaming_interval=2,
    do_kv_handoff=False,
)  # fmt: skip


def test_each_field_of_the_main_branch_is_in_its_table() -> None:
    assert {f.name for f in dataclasses.fields(InferenceConfig)} == (
        main_tables.INFERENCE_CONFIG.keys() - {"verbose"}
    )
    own = {"self", "config"}
    assert arguments(MegatronLLM) - own <= main_tables.LLM.keys()


def test_the_page_is_made_from_the_tables() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "megatron_names.py"))["page"]()
    assert (ROOT / "docs" / "megatron.md").read_text() == page


# --- the code keeps to them --------------------------------------------------------------------

OWNERS = ("client", "context", "wrapper", "controller", "engine", "request", "llm")


@pytest.fixture(scope="module")
def built() -> Any:
    model = stock_model()
    config = InferenceConfig(
        buffer_size_gb=0.001, block_size_tokens=16, max_sequence_length=64, max_requests=2
    )
    with MegatronLLM(model=model, tokenizer=Tokenizer(), inference_config=config) as llm:
        (request,) = llm.generate("abc")
        yield {
            "client": InferenceClient("tcp://127.0.0.1:9"),
            "llm": llm,
            "engine": llm.engine,
            "context": llm.context,
            "controller": llm.controller,
            "wrapper": llm.controller.inference_wrapped_model,
            "request": request,
        }


OF_OWNERS = {
    "context": {**tables.CONTEXT_ATTRIBUTES, **main_tables.MAIN_CONTEXT_ATTRIBUTES},
    "wrapper": tables.WRAPPER_ATTRIBUTES,
    "controller": tables.CONTROLLER_ATTRIBUTES,
    "engine": {**tables.ENGINE_ATTRIBUTES, **main_tables.MAIN_ENGINE_ATTRIBUTES},
    "request": tables.REQUEST,
    "client": {
        name: entry
        for name, entry in CLIENT.items()
        if name not in ("inference_coordinator_address", "multi_modal_data")
    },
    "llm": {
        name: entry
        for name, entry in main_tables.LLM.items()
        if name not in arguments(MegatronLLM) | {"multi_modal_data"}
    },
}


@pytest.mark.parametrize("owner", OWNERS)
def test_attributes_are_there_or_refused_with_the_reason(built: Any, owner: str) -> None:
    for name, entry in OF_OWNERS[owner].items():
        if entry.outcome != "refused":
            assert hasattr(built[owner], name), name
            continue
        with pytest.raises(AttributeError) as refused:
            getattr(built[owner], name)
        assert name in str(refused.value)
        assert owner == "request" or entry.note in str(refused.value)


KEYWORDS = dict(
    params_dtype=torch.float32,
    num_layers=2,
    kv_channels=16,
    num_attention_heads=2,
    max_sequence_length=64,
    buffer_size_gb=0.001,
)


@pytest.mark.parametrize("name", [n for n, e in tables.CONTEXT.items() if e.outcome == "accepted"])
def test_neutral_values_are_accepted_and_others_refused_with_the_reason(name: str) -> None:
    entry = tables.CONTEXT[name]
    for value in entry.values if ANY not in entry.values else (None, 7, object()):
        assert DynamicInferenceContext(**KEYWORDS, **{name: value}).max_requests == 31
    if ANY not in entry.values:
        with pytest.raises(ConfigError) as refused:
            DynamicInferenceContext(**KEYWORDS, **{name: 2})
        assert str(refused.value).startswith(f"{name}=2 is not supported: {entry.note}")


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no argument 'max_request'"):
        DynamicInferenceContext(**KEYWORDS, max_request=3)
    with pytest.raises(ConfigError, match="params_dtype"):
        DynamicInferenceContext(num_layers=2)
    with pytest.raises(ConfigError, match="image_preprocessing_config=3 is not supported"):
        DynamicInferenceContext(stock_model().config, InferenceConfig(image_preprocessing_config=3))
    with pytest.raises(ConfigError, match="async_sched_mode='maybe' must be legacy or async"):
        InferenceConfig(async_sched_mode="maybe")
        DynamicInferenceContext(stock_model().config, InferenceConfig(async_sched_mode="maybe"))


def test_a_check_tells_true_from_one() -> None:
    table = {"a": accepted("why", None, 1), "b": works("")}
    check_keywords("x", table, {"a": 1, "b": object()})
    with pytest.raises(ConfigError, match="a=True is not supported: why; use None or 1"):
        check_keywords("x", table, {"a": True})


def test_classes_that_are_not_here_say_why() -> None:
    from megatron_async import megatron_api

    for name, entry in main_tables.NOT_HERE.items():
        with pytest.raises(ImportError) as refused:
            getattr(megatron_api, name)
        assert entry.note in str(refused.value)
    assert not hasattr(megatron_api, "Nothing")
    for name in set(HOMES) - {"DynamicInferenceEngine"}:  # the package's own is another class
        assert getattr(megatron_async, name) is getattr(megatron_api, name)


def test_the_names_of_the_package_are_those_that_it_exports() -> None:
    from megatron_async import megatron_api

    assert sorted(HOMES) == megatron_api.__all__
    assert megatron_api.DynamicInferenceRequestRecord is DynamicInferenceRequest
    for cls in (DynamicInferenceEngine, GPTInferenceWrapper, TextGenerationController):
        assert cls.__module__.startswith("megatron_async.megatron_api")
