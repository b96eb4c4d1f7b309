"""One update in many messages; what is missing is refused unless it was meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError
from megatron_async.sampling_params import SamplingParams
from megatron_async.weights import GatheredWeights
from tests.support.cut_models import write_layers
from tests.support.engines import config_at

GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=8, termination_id=-1)
State = dict[str, Tensor]


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamicInferenceEngine]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_layers("tiny", folder, 1)
    with DynamicInferenceEngine.from_pretrained(folder, config_at(1, dtype="float32")) as made:
        yield made


def state_of(engine: DynamicInferenceEngine) -> State:
    state = engine.model.weights_owner.state_dict()
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def tokens_of(engine: DynamicInferenceEngine) -> list[int]:
    return engine.generate(["import "], GREEDY)[0].generated_tokens


def other(state: State) -> State:
    return {name: value.flip(0) for name, value in state.items()}


def test_buckets_are_one_update(engine: DynamicInferenceEngine) -> None:
    old, new = tokens_of(engine), other(state_of(engine))
    gathered, buffer = GatheredWeights(new), torch.empty(max(v.numel() for v in new.values()))
    for name, value in new.items():  # the trainer has one buffer
        sent = buffer[: value.numel()].view(value.shape).copy_(value)
        gathered.add({name: sent})
    assert engine.update_weights(gathered) == 1 and tokens_of(engine) != old
    again = engine.update_weights(new)
    assert again == 2 and all((state_of(engine)[name] == new[name]).all() for name in new)


def test_what_has_not_come_leaves_the_old_weights(engine: DynamicInferenceEngine) -> None:
    before, new = state_of(engine), other(state_of(engine))
    last, *_ = reversed(new)
    for manifest, said in ((new, "have not come, such as"), (None, f"lack {last}")):
        gathered = GatheredWeights(manifest)
        gathered.add({name: value for name, value in new.items() if name != last})
        with pytest.raises(CheckpointError, match=said):
            engine.update_weights(gathered)
        with pytest.raises(CheckpointError, match="has come before"):
            gathered.add({last: new[last], next(iter(new)): new[next(iter(new))]})
        gathered.add({last: new[last]})  # nothing of the other bucket was taken
    with pytest.raises(CheckpointError, match="is not in the manifest"):
        GatheredWeights(["a"]).add(new)
    assert engine.weight_version == 0
    assert all((state_of(engine)[name] == value).all() for name, value in before.items())


def test_what_are_no_tensors_by_their_names_is_not_gathered(
    engine: DynamicInferenceEngine,
) -> None:
    """Nothing of such a bucket is taken."""
    manifests: list[Any] = ["decoder", [["a", "float32", [2]]], [3], {"a", 4}]
    for manifest in manifests:
        with pytest.raises(CheckpointError, match="must be a list of their names"):
            GatheredWeights(manifest)
    new = other(state_of(engine))
    name = next(iter(new))
    gathered = GatheredWeights(new)
    buckets: list[Any] = [None, [name], {name: None}, {name: new[name].tolist()}]
    for bucket in (*buckets, new | {name: new[name].numpy()}):
        with pytest.raises(CheckpointError, match=r"give tensors by their names|give a torch.Ten"):
            gathered.add(bucket)
    gathered.add(new)
    assert engine.update_weights(gathered) == 1


def test_a_state_dict_of_some_is_an_update_of_some_where_it_is_asked_for(
    engine: DynamicInferenceEngine,
) -> None:
    before = state_of(engine)
    name = "decoder.final_layernorm.weight"
    with pytest.raises(CheckpointError, match=r"lack .*partial_update=True"):
        engine.update_weights({name: before[name] * 2})
    engine.update_weights({name: before[name] * 2}, partial_update=True)
    after = state_of(engine)
    assert (after.pop(name) == before[name] * 2).all()
    assert all((value == before[key]).all() for key, value in after.items())
