"""Endpoints of vLLM's development mode, with the bodies that TRL's client sends.

The trainer's collective is gloo's; NCCL's needs GPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.cli.serve import weight_transfer_backend
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.serving.messages import Kept
from megatron_async.weights.announced import receive_announced, send_announced
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.nccl_group import unique_id_of
from megatron_async.weights.tensor_info import infos_of
from tests.support.engines import config_at
from tests.support.huggingface_models import SIZES
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import NoParent
from tests.support.served_over_http import free_port, serving

PROMPT = [5, 6, 7]


def llama(seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def parent() -> NoParent:
    return NoParent()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    llama(1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(directory: Path, parent: NoParent) -> Iterator[str]:
    config = config_at(
        1, dtype="float32", max_requests=4, max_sequence_length=64, block_count=20,
        enable_sleep_mode=True,
    )  # fmt: skip
    engine = DynamicInferenceEngine.from_pretrained(directory, config)
    options: dict[str, Any] = {"development": True, "weight_transfer_backend": "gloo"}
    with serving(engine, parent, shows_aborts=True, **options) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
        yield client


def generated(http: httpx.Client) -> list[int]:
    """As TRL's client asks."""
    body = {
        "model": "small", "prompt": [PROMPT], "return_token_ids": True,
        "return_tokens_as_token_ids": True, "n": 1, "repetition_penalty": 1.0, "temperature": 0.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8, "logprobs": 0,
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    names = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    assert all(choice["logprobs"]["top_logprobs"]), "the token itself"
    assert names == choice["token_ids"] and len(choice["logprobs"]["token_logprobs"]) == 8
    tokens: list[int] = choice["token_ids"]
    return tokens


def expected(model: transformers.LlamaForCausalLM) -> list[int]:
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return list(made[0, len(PROMPT) :].tolist())


def sent(http: httpx.Client, path: str, body: Any = None, status: int = 200) -> dict[str, Any]:
    answer = http.post(path, json={} if body is None else body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def trainer_group(http: httpx.Client, *, packed: bool) -> WeightGroup:
    assert http.get("/get_world_size").json() == {"world_size": 1}
    port = free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            sent, http, "/init_weight_transfer_engine", {"init_info": {**info, "packed": packed}}
        )
        group = WeightGroup("127.0.0.1", port, rank=0, world_size=2, timeout=PATIENCE_SECONDS)
        joined.result()
    return group


def send(
    http: httpx.Client, group: WeightGroup, tensors: dict[str, torch.Tensor], *, packed: bool
) -> None:
    infos = infos_of(tensors)
    update = {
        "names": [info.name for info in infos],
        "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(sent, http, "/update_weights", {"update_info": update})
        send_announced(group, list(tensors.values()), packed=packed)
        taken.result()


def test_a_trainer_sends_its_weights_under_hugging_faces_names(
    http: httpx.Client, parent: NoParent
) -> None:
    old, new = llama(1), llama(2)
    info = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["weight_transfer_config"] == {"backend": "gloo"}
    assert info["model_config"]["dtype"] == "torch.float32"
    assert generated(http) == expected(old) != expected(new)
    parameters = {name: p.detach() for name, p in new.named_parameters()}
    group = trainer_group(http, packed=True)
    sent(http, "/start_weight_update", {"is_checkpoint_format": True})
    names = list(parameters)
    for some in (names[:2], names[2:]):
        send(http, group, {name: parameters[name] for name in some}, packed=True)
        assert generated(http) == expected(old), "nothing is new before the update is finished"
    assert sent(http, "/finish_weight_update")["weight_version"] == 1
    assert generated(http) == expected(new)
    assert parent.kept is not None and parent.kept.weight_version == 1
    assert "reset" not in sent(http, "/reset_prefix_cache")
    # One tensor alone is no whole update, unless that is said.
    group = trainer_group(http, packed=False)
    one = {"model.norm.weight": old.model.norm.weight + 1}
    sent(http, "/start_weight_update")
    send(http, group, one, packed=False)
    said = sent(http, "/finish_weight_update", status=400)["error"]["message"]
    assert "lack model.embed_tokens.weight" in said and "partial" in said
    assert generated(http) == expected(new)
    sent(http, "/start_weight_update", {"partial": True})
    send(http, group, one, packed=False)
    sent(http, "/finish_weight_update")
    with torch.no_grad():
        new.model.norm.weight.copy_(old.model.norm.weight + 1)
    assert generated(http) == expected(new)
    # Weights that do not fit leave the old ones.
    sent(http, "/start_weight_update")
    send(http, group, {"model.norm.weight": torch.ones(3)}, packed=False)
    said = sent(http, "/finish_weight_update", status=400)["error"]["message"]
    assert "model.norm.weight has shape (3,), the model's has (64,)" in said
    assert generated(http) == expected(new)


def test_updates_out_of_order_are_refused(http: httpx.Client) -> None:
    info = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}
    for path, body in (("/update_weights", info), ("/finish_weight_update", None)):
        assert "start_weight_update first" in str(sent(http, path, body, status=400))
    sent(http, "/start_weight_update")
    for names, shapes in ((["a", "b"], [[1]]), (["a"], [[-1]])):
        wrong = {**info["update_info"], "names": names, "shapes": shapes}
        sent(http, "/update_weights", {"update_info": wrong}, status=400)
    for body in ({}, {"init_info": {"master_address": "a", "master_port": 0, "world_size": 2}}):
        assert http.post("/init_weight_transfer_engine", json=body).status_code == 400


def test_a_trainer_that_goes_before_it_listens_holds_up_nobody(http: httpx.Client) -> None:
    """Its engine waited for it for five minutes, with all updates behind it."""
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/init_weight_transfer_engine", json={"init_info": info}, timeout=0.2)
    end = time.monotonic() + PATIENCE_SECONDS
    while http.post("/start_weight_update").status_code == 409:
        assert time.monotonic() < end
    trainer_group(http, packed=False).close()


def test_a_trainer_that_ends_in_the_middle_ends_the_update(http: httpx.Client) -> None:
    """What it had sent was installed by /finish_weight_update, and the error was internal."""
    before = generated(http)
    norm = {"model.norm.weight": torch.zeros(64)}
    group = trainer_group(http, packed=False)
    sent(http, "/start_weight_update")
    send(http, group, norm, packed=False)
    update = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[1], [1]]}
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(sent, http, "/update_weights", {"update_info": update}, 400)
        group.broadcast(torch.zeros(1))
        assert sent(http, "/start_weight_update", status=409)["error"]["code"] == "busy"
        group.close()
        del group
        said = taken.result()["error"]["message"]
    assert "the trainer has ended in the middle" in said and "Make a new group" in said
    assert "start_weight_update first" in str(sent(http, "/finish_weight_update", status=400))
    sent(http, "/start_weight_update")
    again = sent(http, "/update_weights", {"update_info": update}, 400)["error"]["message"]
    assert "this weight group is over: the trainer has ended" in again
    sent(http, "/start_weight_update")
    twice = {**update, "names": ["a", "a"]}
    said = sent(http, "/update_weights", {"update_info": twice}, 400)["error"]["message"]
    assert "a is announced twice" in said
    assert generated(http) == before


def test_the_engine_sleeps_and_wakes_up(http: httpx.Client) -> None:
    before = generated(http)
    assert sent(http, "/sleep?level=1") == {"is_sleeping": True}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert "level=3" in str(sent(http, "/sleep?level=3", status=400))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generated, http)
        assert sent(http, "/wake_up?tags=weights") == {"is_sleeping": True}
        assert sent(http, "/wake_up?tags=kv_cache") == {"is_sleeping": False}
        assert waiting.result() == before
    assert sent(http, "/pause?mode=keep") == {"suspended": True}
    sent(http, "/resume")
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_requests_end_or_are_waited_for_before_the_engine_stops(http: httpx.Client) -> None:
    """As in vLLM's /sleep?mode= and /abort_requests; the mode was passed over."""

    body = {"model": "small", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}

    def ask() -> dict[str, Any]:
        while (answer := http.post("/v1/completions", json=body)).status_code == 429:
            """It came while the engine waited for others."""
        found: dict[str, Any] = answer.json()["usage"]
        return found

    with ThreadPoolExecutor(1) as pool:
        try:
            for abort in ("/sleep?mode=abort", "/abort_requests"):
                sent(http, "/pause")
                asked = pool.submit(ask)
                # It waits in an engine that launches nothing.
                while (answer := http.post("/sleep?mode=wait")).status_code == 200:
                    sent(http, "/wake_up")
                assert "no request ends" in answer.text
                for wrong, said in (("mode=perhaps", "mode"), ("mode=abort&level=3", "level=3")):
                    assert said in str(sent(http, f"/sleep?{wrong}", status=400))
                assert not asked.done()
                expected = {"status": "aborted", "aborted": 1}
                if "sleep" in abort:
                    expected = {"is_sleeping": True}
                assert sent(http, abort) == expected
                assert asked.result()["completion_tokens"] == 0
                sent(http, "/wake_up")
                sent(http, "/resume")
        finally:
            sent(http, "/resume")
        asked = pool.submit(ask)
        sent(http, "/sleep?mode=wait")
        sent(http, "/wake_up")
        assert asked.result()["completion_tokens"] == 8
    sent(http, "/pause?wait_for_inflight_requests=true")
    sent(http, "/resume")


BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}


def aborted(http: httpx.Client, *ids: str) -> int:
    """How many requests had one of these ids."""
    found: int = sent(http, "/abort_requests", {"request_ids": ids})["aborted"]
    return found


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("way", ["request_id", "x-request-id", "answer"])
def test_a_request_is_aborted_by_its_clients_id(http: httpx.Client, way: str, sleeps: bool) -> None:
    body, headers = {**BODY, "n": 2}, {}
    if way == "request_id":
        body["request_id"] = "mine"
    else:
        headers["x-request-id"] = "mine"
    name = "cmpl-mine" if way == "answer" else "mine"
    sent(http, "/sleep" if sleeps else "/pause")
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(http.post, "/v1/completions", json=body, headers=headers)
            other = pool.submit(http.post, "/v1/completions", json=BODY)
            while not aborted(http, name, "nobody's"):
                """It has not come yet."""
            answer = asked.result().json()
            assert answer["id"] == "cmpl-mine"
            assert [each["finish_reason"] for each in answer["choices"]] == ["abort"] * 2
            assert aborted(http, name) == aborted(http) == 0
            sent(http, "/wake_up" if sleeps else "/resume")
            (choice,) = other.result().json()["choices"]
            assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
    finally:
        sent(http, "/wake_up")
        sent(http, "/resume")


@pytest.mark.parametrize("wrong", ["", "é", "a\n"])
def test_an_empty_id_aborts_nobody(http: httpx.Client, wrong: str) -> None:
    said = sent(http, "/abort_requests", {"request_ids": ["mine", wrong]}, status=400)
    assert said["error"]["param"] == "request_ids"


def test_ids_of_clients_go_before_ids_of_answers(http: httpx.Client) -> None:
    """Aborting "cmpl-a" ended the request "a" with the one of that name."""
    sent(http, "/pause")
    try:
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(http.post, "/v1/completions", json={**BODY, "request_id": name})
                for name in ("a", "cmpl-a", "b")
            ]
            while http.get("/v1/loads").json()["loads"][0]["num_total_reqs"] < 3:
                """They have not come yet."""
            assert aborted(http, "cmpl-a") == 1 and asked[1].result().status_code == 200
            assert aborted(http, "chatcmpl-b", "cmpl-", "resp_a") == 0
            assert aborted(http, "cmpl-a", "a") == 1 and asked[0].result().status_code == 200
            assert aborted(http, "cmpl-b", "b", "b") == 1 and asked[2].result().status_code == 200
    finally:
        sent(http, "/resume")


def test_an_update_that_is_open_is_not_begun_again(http: httpx.Client) -> None:
    """What had come was forgotten without a word. A new group ends what its trainer left."""
    before = generated(http)
    group = trainer_group(http, packed=False)
    sent(http, "/start_weight_update", {"partial": True})
    send(http, group, {"model.norm.weight": torch.zeros(64)}, packed=False)
    error = sent(http, "/start_weight_update", status=409)["error"]
    assert error["code"] == "busy" and "finish it" in error["message"]
    trainer_group(http, packed=False).close()
    sent(http, "/start_weight_update", {"partial": True})
    sent(http, "/finish_weight_update")
    assert generated(http) == before


def test_an_update_to_which_nothing_came_is_none(http: httpx.Client) -> None:
    sent(http, "/start_weight_update")
    said = sent(http, "/finish_weight_update", status=400)["error"]["message"]
    assert "no tensor has come" in said
    sent(http, "/start_weight_update", {"partial": True})
    sent(http, "/finish_weight_update")


def test_an_id_that_no_header_could_have_is_refused(http: httpx.Client) -> None:
    for wrong in ("", "a b", "é", "a" * 129):
        said = sent(http, "/v1/completions", {"prompt": "a", "request_id": wrong}, status=400)
        assert said["error"]["param"] == "request_id"


@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_that_aborts_is_no_pause_that_keeps(http: httpx.Client, stream: bool) -> None:
    """The mode stood in the query, and the body was ``{}``: it was passed over."""
    body = {**BODY, "stream": stream, "request_id": "long"}

    def ask() -> str:
        while (answer := http.post("/v1/completions", json=body)).status_code == 429:
            """It came while the engine waited for others."""
        return answer.text

    sent(http, "/pause")
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            while not asked.done():
                sent(http, "/pause?mode=abort", {})
            assert '"abort"' in asked.result()
    finally:
        sent(http, "/resume")


def test_weights_of_a_trainer_do_not_survive_their_process(directory: Path) -> None:
    from megatron_async.serving.engine_side.controls import Controls
    from megatron_async.serving.trainers.controls import SENT

    config = config_at(1, dtype="float32", max_requests=1, max_sequence_length=64, block_count=4)
    with DynamicInferenceEngine.from_pretrained(directory, config) as engine:
        requests: Any = SimpleNamespace(wake_waiters=lambda: None)
        controls = Controls(engine, requests)
        controls.restore(Kept(weights=(SENT,), weight_version=1))
        assert controls.lost is not None and "are lost" in controls.lost
        controls.close()


def test_they_are_there_by_option_alone(directory: Path) -> None:
    config = config_at(1, dtype="float32", max_requests=1, max_sequence_length=64, block_count=4)
    engine = DynamicInferenceEngine.from_pretrained(directory, config)
    with serving(engine, NoParent()) as url, httpx.Client(base_url=url) as http:
        assert http.post("/sleep").status_code == 404
        assert http.post("/pause").status_code == 403
    assert weight_transfer_backend('{"backend": "nccl"}') == "nccl"
    for wrong in ("nccl", '{"backend": "ib"}', "[]", '{"backend": "gloo", "x": 1}'):
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            weight_transfer_backend(wrong)


def test_hugging_faces_names_are_checked(directory: Path) -> None:
    from megatron_async.weights.place import read_weights

    served = load_pretrained(directory, dtype=torch.float32).model
    new = dict(llama(2).state_dict())
    read_weights(served, new, all_parameters=True)()
    head = "lm_head.weight"
    for changes, said in (
        ({head: torch.zeros_like(new[head])}, "differs from the tied"),
        ({"model.norm.bias": torch.ones(64)}, "holds? model.norm.bias"),
        ({"model.norm.weight": torch.ones(64).long()}, "give a float"),
        ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "has dtype torch.float8"),
        ({"model.norm.weight": torch.ones(64, device="meta")}, "is a meta tensor"),
        ({"model.norm.weight": [1.0] * 64}, "is a list; give a torch.Tensor"),
        ({7: torch.ones(64)}, "hold 7, which"),
        ({"model.norm.weight": torch.full((64,), torch.nan)}, "NaN"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_weights(served, {**new, **changes})
    del new["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"lack model\.norm\.weight"):
        read_weights(served, new, all_parameters=True)


class UniqueId(ctypes.Structure):
    """As vLLM's wrapper of NCCL has it."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def test_nccls_unique_id_is_taken_from_a_pickle_that_nobody_loads() -> None:
    known = bytes(range(128))
    assert unique_id_of(pickle.dumps(UniqueId.from_buffer_copy(known))) == known
    for wrong in (pickle.dumps([1]), b"no pickle"):
        with pytest.raises(ConfigError, match="unique id"):
            unique_id_of(wrong)


class Wire:
    """A group of two in one process: what is sent is received in order."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.receives = False

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.receives:
            return tensor.copy_(self.sent.pop(0))
        self.sent.append(tensor)
        return tensor

    def close(self) -> None:
        """Nothing is open."""


def test_packed_buffers_are_full_as_vllms_are() -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(2, 2),
        "c": torch.randn(5).bfloat16(), "d": torch.randn(0, 3), "e": torch.randn(4),
    }  # fmt: skip
    wire = Wire()
    send_announced(wire, list(tensors.values()), packed=True, buffer_bytes=18)
    assert [tensor.numel() for tensor in wire.sent] == [19, 26]
    wire.receives = True
    found = receive_announced(wire, infos_of(tensors), packed=True, buffer_bytes=18)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
