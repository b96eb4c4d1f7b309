"""SGLang's routes for trainers, with the calls that slime and AReaL make."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.trainers.pickled_tensors import read_tensors
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import NoParent
from tests.support.served_over_http import free_port, serving
from tests.support.sglang_trainers import TrainerGroup, bucket, serialized
from tests.unit.checkpoint.test_fp8_published import BLOCKS, by_block, publish, write_plain
from tests.unit.serving.test_development_api import PROMPT, expected, llama

Tensors = dict[str, torch.Tensor]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root: Path = tmp_path_factory.mktemp("llama")
    for seed in (1, 2):
        llama(seed).save_pretrained(root / str(seed))
    return [root / "1", root / "2"]


@pytest.fixture(scope="module")
def url(directories: list[Path]) -> Iterator[str]:
    config = config_at(
        1, dtype="float32", max_requests=4, max_sequence_length=64, block_count=20,
        enable_sleep_mode=True, audit_graphs=True,
    )  # fmt: skip
    engine = DynamicInferenceEngine.from_pretrained(directories[0], config)
    with serving(engine, NoParent(), development=True) as address:
        yield address


@pytest.fixture
def http(url: str, directories: list[Path]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
        yield client
        posted(client, "continue_generation", status=None)
        posted(client, "update_weights_from_disk", model_path=str(directories[0]))


def posted(http: httpx.Client, path: str, status: int | None = 200, **body: Any) -> Any:
    answer = http.post(f"/{path}", json=body)
    assert status in (None, answer.status_code), answer.text
    return answer.json()


def generated(http: httpx.Client, **body: Any) -> Any:
    asked = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    while (answer := http.post("/generate", json=asked | body)).status_code == 429:
        """It came while requests were being aborted; clients try again."""
    assert answer.status_code == 200, answer.text
    return answer.json()


def tensors_of(seed: int) -> Tensors:
    return {name: p.detach() for name, p in llama(seed).named_parameters()}


def halves_of(tensors: Tensors) -> list[Tensors]:
    names = list(tensors)
    return [{name: tensors[name] for name in some} for some in (names[:3], names[3:])]


def test_slime_sends_buckets_of_one_update(http: httpx.Client) -> None:
    before, after = expected(llama(1)), expected(llama(2))
    posted(http, "pause_generation")
    assert http.get("/flush_cache").status_code == 200
    alive = []
    for some in halves_of(tensors_of(2)):
        made = bucket(some)
        alive.append(made)
        posted(
            http, "update_weights_from_tensor", serialized_named_tensors=[serialized(made)],
            load_format="flattened_bucket", flush_cache=False, weight_version="step 7",
        )  # fmt: skip
        assert http.get("/get_weight_version").json()["weight_version"] != "step 7"
    posted(http, "continue_generation")
    found = generated(http)
    assert found["output_ids"] == after != before
    assert found["meta_info"]["weight_version"] == "step 7"
    assert http.get("/model_info").json()["weight_version"] == "step 7"
    posted(http, "update_weight_version", new_version="seven")
    assert generated(http)["meta_info"]["weight_version"] == "seven"


def test_what_lacks_a_bucket_changes_nothing(http: httpx.Client) -> None:
    alive = [bucket(half) for half in halves_of(tensors_of(2))]
    some, others = map(serialized, alive)
    body: dict[str, Any] = {"load_format": "flattened_bucket", "flush_cache": False}
    posted(http, "pause_generation")
    posted(http, "update_weights_from_tensor", serialized_named_tensors=[some], **body)
    error = posted(http, "continue_generation", status=400)["error"]["message"]
    assert "lack" in error
    posted(http, "continue_generation")
    assert generated(http)["output_ids"] == expected(llama(1))
    # Nor does one that a new version has left behind.
    posted(http, "pause_generation")
    for version, part in (("x", some), ("y", others)):
        part_of = {"serialized_named_tensors": [part], "weight_version": version}
        posted(http, "update_weights_from_tensor", **part_of, **body)
    assert "lack" in posted(http, "continue_generation", status=400)["error"]["message"]
    posted(http, "continue_generation")
    assert generated(http)["meta_info"]["weight_version"] not in ("x", "y")


def test_without_a_pause_the_last_message_ends_an_update(http: httpx.Client) -> None:
    """By its ``flush_cache``, which is the default, or by ``/flush_cache``."""
    after = expected(llama(2))
    new = tensors_of(2)
    listed = [(name, tensor) for name, tensor in new.items()]
    posted(http, "update_weights_from_tensor", serialized_named_tensors=[serialized(listed)])
    assert generated(http)["output_ids"] == after
    made = bucket(tensors_of(1))
    posted(
        http, "update_weights_from_tensor", serialized_named_tensors=[serialized(made)],
        load_format="flattened_bucket", flush_cache=False,
    )  # fmt: skip
    assert generated(http)["output_ids"] == after
    assert http.post("/flush_cache").status_code == 200
    assert generated(http)["output_ids"] == expected(llama(1))


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_areal_broadcasts_in_a_named_group(http: httpx.Client, load_format: str | None) -> None:
    port, name = free_port(), f"update_weight_group_{load_format}"
    where = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            posted, http, "init_weights_update_group", **where, world_size=2, backend="gloo",
            group_name=name,
        )  # fmt: skip
        group = TrainerGroup(name, port, PATIENCE_SECONDS)
        joined.result()
        posted(http, "pause_generation")
        for some in halves_of(tensors_of(2)):
            taken = pool.submit(
                posted, http, "update_weights_from_distributed", names=list(some),
                dtypes=["torch.float32"] * len(some), group_name=name,
                shapes=[list(each.shape) for each in some.values()], abort_all_requests=True,
                load_format=load_format,
            )  # fmt: skip
            flat = [bucket(some)["flattened_tensor"]]
            group.broadcast(list(some.values()) if load_format is None else flat)
            taken.result()
    posted(http, "continue_generation")
    assert generated(http)["output_ids"] == expected(llama(2))
    posted(http, "destroy_weights_update_group", group_name=name)
    group.close()


def test_areal_updates_from_disk_and_goes_on(http: httpx.Client, directories: list[Path]) -> None:
    with ThreadPoolExecutor(1) as pool:
        posted(http, "pause_generation", mode="in_place")
        asked = pool.submit(generated, http)
        while not http.get("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"]:
            """It has not come yet."""
        posted(http, "update_weights_from_disk", model_path=str(directories[1]),
               abort_all_requests=True, weight_version="new")  # fmt: skip
        found = asked.result()
        assert found["meta_info"]["finish_reason"]["type"] == "abort"
        assert found["meta_info"]["output_token_logprobs"] == []
        posted(http, "continue_generation")
    found = generated(http)
    assert found["output_ids"] == expected(llama(2))
    assert found["meta_info"]["weight_version"] == "new"
    error = posted(http, "update_weights_from_disk", status=400, model_path="/nowhere",
                   weight_version="none")  # fmt: skip
    assert "/nowhere" in str(error)
    assert http.get("/weight_version").json()["weight_version"] == "new"


def test_requests_are_aborted_by_their_rid(http: httpx.Client) -> None:
    posted(http, "pause_generation", mode="retract")
    with ThreadPoolExecutor(2) as pool:
        asked = ({"rid": "a", "logprob_start_len": 0}, {"rid": "cmpl-a"})
        one, other = (pool.submit(generated, http, **each) for each in asked)
        while http.get("/v1/loads").json()["loads"][0]["num_total_reqs"] < 2:
            """They have not come yet."""
        assert posted(http, "abort_request", rid="a")["aborted"] == 1
        failed, goes_on = one.exception(), not other.done()
        assert posted(http, "abort_request", abort_all=True)["aborted"] == 1
    assert failed is None and goes_on
    meta, of_other = (each.result()["meta_info"] for each in (one, other))
    assert meta["finish_reason"]["type"] == of_other["finish_reason"]["type"] == "abort"
    assert meta["input_token_logprobs"] == [[None, PROMPT[0], None]], "the rest had not come"
    assert posted(http, "abort_request", status=400)["error"]["param"] == "rid"


@pytest.mark.parametrize("asked", ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}))
def test_a_completion_aborted_before_its_prompt_is_computed(
    http: httpx.Client, asked: dict[str, Any]
) -> None:
    posted(http, "pause_generation", mode="retract")
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(posted, http, "v1/completions", prompt=PROMPT, **asked)
        while not http.get("/v1/loads").json()["loads"][0]["num_total_reqs"]:
            """It has not come yet."""
        posted(http, "abort_request", abort_all=True)
    (choice,) = one.result()["choices"]
    of_prompt = choice.get("prompt_logprobs") or choice["logprobs"]["token_logprobs"]
    assert of_prompt == [None] * len(PROMPT)


def test_slime_takes_memory_back_in_parts(http: httpx.Client) -> None:
    """It updates the weights while there is no memory for the cache, and continues then."""
    tags = ["weights", "kv_cache", "cuda_graph"]
    assert http.get("/get_server_info").json()["enable_memory_saver"] is True
    error = posted(http, "release_memory_occupation", status=400, tags=["kv_cache"])["error"]
    assert error["param"] == "tags"
    posted(http, "release_memory_occupation", tags=tags)
    posted(http, "resume_memory_occupation", tags=["weights"])
    posted(http, "pause_generation")
    made = bucket(tensors_of(2))
    posted(
        http, "update_weights_from_tensor", serialized_named_tensors=[serialized(made)],
        load_format="flattened_bucket",
    )  # fmt: skip
    posted(http, "continue_generation")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generated, http)
        posted(http, "resume_memory_occupation", tags=["cuda_graph"])
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        posted(http, "resume_memory_occupation", tags=["kv_cache"])
        assert asked.result()["output_ids"] == expected(llama(2))
    posted(http, "release_memory_occupation")
    posted(http, "resume_memory_occupation", tags=None)
    assert generated(http)["output_ids"] == expected(llama(2))


def test_slime_finds_an_external_engine(http: httpx.Client) -> None:
    found = http.get("/server_info").json()
    assert found["vllm_config"] and found["tp_size"] == found["pp_size"] == 1
    assert found["disaggregation_mode"] == "null"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("update_weights_from_tensor", {"serialized_named_tensors": ["?"]}, "cannot be read"),
        ("update_weights_from_tensor", {"serialized_named_tensors": []}, "serialized_named"),
        ("update_weights_from_tensor", {"serialized_named_tensors": ["", ""]}, "serialized_named"),
        (
            "update_weights_from_tensor",
            {"serialized_named_tensors": [""], "load_format": "delta"},
            "load_format='delta' is not supported",
        ),
        ("update_weights_from_distributed", {"names": []}, "dtypes"),
        (
            "update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
            "no weight-transfer group",
        ),
        ("update_weights_from_disk", {}, "model_path"),
        ("init_weights_update_group", {"master_address": "a", "master_port": "x",
                                       "rank_offset": 1, "world_size": 2}, "master_port"),
        ("pause_generation", {"mode": "perhaps"}, "mode"),
        ("update_weight_version", {"new_version": "x" * 201}, "200"),
    ],
)  # fmt: skip
def test_wrong_messages_are_named(http: httpx.Client, path: str, body: Any, said: str) -> None:
    posted(http, "destroy_weights_update_group")
    assert said in str(posted(http, path, status=400, **body))
    assert generated(http)["output_ids"] == expected(llama(1))


class Ran:
    """Says so when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/sglang-pickle-ran",)


def test_a_pickle_is_read_and_never_run() -> None:
    tensor = torch.ones(4)
    good = bucket({"a": tensor})
    flattened = "flattened_bucket"
    assert torch.equal(read_tensors(serialized(good), flattened, 1 << 20)["a"], tensor)
    far = {**good, "metadata": [*good["metadata"]]}
    far["metadata"][0].end_idx = 1 << 40
    odd = bucket({"a": tensor})
    odd["metadata"][0].dtype = torch.float64
    hidden = base64.b64encode(pickle.dumps([("a", Ran())])).decode()
    for value, load_format, said in (
        (hidden, None, "not allowed"),
        (serialized([("a", 3)]), None, "in no memory"),
        (serialized([("a", tensor)])[:40], None, "cannot be read"),
        (serialized(3), None, "no list"),
        (serialized(good), None, "in no memory"),
        (serialized([("a", tensor)]), flattened, "no flattened bucket"),
        (serialized(far), flattened, "not in its bucket"),
        (serialized(odd), flattened, "another size"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_tensors(value, load_format, 1 << 20)
    assert not Path("/tmp/sglang-pickle-ran").exists()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_memory_of_what_is_serialized_is_bounded(load_format: str | None) -> None:
    """A view of four bytes may have any shape, and any number of names."""
    tensor = torch.ones(1, dtype=torch.uint8).share_memory_()
    wide = tensor.as_strided((1 << 33,), (0,))
    sent: Any = [("a", wide)]
    if load_format is not None:
        sent = {**bucket({"a": torch.ones(1)}), "flattened_tensor": wide}
    with pytest.raises(CheckpointError, match="more bytes than the model"):
        read_tensors(serialized(sent), load_format, 1 << 20)
    many = [(f"a{number}", torch.ones(1).share_memory_().expand(1 << 10)) for number in range(5)]
    assert len(read_tensors(serialized(many[:4]), None, 1 << 14)) == 4
    with pytest.raises(CheckpointError, match="more bytes than the model"):
        read_tensors(serialized(many), None, 1 << 14)


class OnGpu:
    """A tensor of CUDA's, whatever torch this is."""

    def __reduce__(self) -> Any:
        size, handle = torch.Size([1]), (0, b"h" * 64, 4, 0, False, b"r", 0, b"e", True)
        storage = torch.storage.TypedStorage
        whole = (torch.Tensor, size, (1,), 0, storage, torch.float32, *handle)
        return rebuild_cuda_tensor, whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has another answer")
def test_a_tensor_of_a_gpu_is_refused_where_there_is_none() -> None:
    sent = base64.b64encode(pickle.dumps([("a", OnGpu())])).decode()
    with pytest.raises(CheckpointError, match="the serialized tensors cannot be read"):
        read_tensors(sent, None, 1 << 20)


def test_weights_in_e4m3_and_their_scales_come_in_two_messages(tmp_path: Path) -> None:
    """As slime's, which quantizes them: the server has what an engine has that loads them, and what
    lacks scales changes nothing."""
    config = config_at(
        1, dtype="float32", max_requests=4, max_sequence_length=64, block_count=20,
        quantization="fp8", batch_invariant=True,
    )  # fmt: skip
    old, new = (
        publish(tmp_path / str(seed), write_plain(tmp_path / f"plain{seed}", seed=seed), BLOCKS,
                by_block, suffix="_scale_inv")
        for seed in (1, 2)
    )  # fmt: skip
    state = load_file(new / "model.safetensors")
    parts = [{n: x for n, x in state.items() if ("_scale" in n) == second} for second in (0, 1)]
    with DynamicInferenceEngine.from_pretrained(new, config) as engine:
        meant = ids_of_engine(engine)
    engine = DynamicInferenceEngine.from_pretrained(old, config)
    with (
        serving(engine, NoParent(), development=True) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as http,
    ):

        def ids() -> list[int]:
            asked = {"input_ids": [3, 5, 7], "sampling_params": GREEDY}
            found: list[int] = posted(http, "generate", **asked)["output_ids"]
            return found

        def send(tensors: Tensors) -> None:
            held = bucket(tensors)
            posted(
                http, "update_weights_from_tensor", load_format="flattened_bucket",
                serialized_named_tensors=[serialized(held)], flush_cache=False,
            )  # fmt: skip

        first = ids()
        assert first != meant
        posted(http, "pause_generation", mode="retract")
        send(parts[0])
        refused = posted(http, "continue_generation", status=400)
        assert "no scales: give " in refused["error"]["message"]
        posted(http, "continue_generation")
        assert ids() == first
        posted(http, "pause_generation", mode="retract")
        send(parts[0])
        send(parts[1])
        posted(http, "continue_generation")
        assert ids() == meant


def ids_of_engine(engine: DynamicInferenceEngine) -> list[int]:
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=8, ignore_eos=True)
    found: list[int] = engine.generate([[3, 5, 7]], params)[0].generated_tokens
    return found
