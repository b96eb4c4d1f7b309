"""What becomes of weights that a trainer sends, without a server."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from megatron_async.errors import CheckpointError, RequestError
from megatron_async.serving.messages import Kept, named
from megatron_async.serving.trainers import pickled_tensors
from megatron_async.serving.trainers.controls import MOST_NAMES, TrainerControls


class Weights:
    """As ``Controls``, over an engine that notes what it is given."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.weight_version = 0
        self.call: Any = None
        self.taken: list[dict[str, Any]] = []
        self.names_at_update: dict[int, str] = {}

    def only_update(self) -> Any:
        return contextlib.nullcontext()

    def note_weights(self, path: str, *, is_whole: bool) -> None:
        pass

    def change(self, **changes: Any) -> None:
        self.kept = msgspec.structs.replace(self.kept, **changes)

    def update_weights(self, tensors: dict[str, Any], **how: Any) -> None:
        self.names_at_update = dict(self.kept.weight_names)
        if "wrong" in tensors:
            raise CheckpointError("wrong")
        self.taken.append({"names": set(tensors), **how})
        self.weight_version += 1


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def controls(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> TrainerControls:
    def read(names: str, *_: Any) -> dict[str, torch.Tensor]:
        return {name: torch.ones(1) for name in names.split()}

    monkeypatch.setattr(pickled_tensors, "read_tensors", read)
    engine: Any = SimpleNamespace(
        cache=SimpleNamespace(device=torch.device("cpu")),
        update_weights=weights.update_weights,
        model=SimpleNamespace(weights_owner=torch.nn.Linear(1, 1), group=None),
    )
    return TrainerControls(engine, weights)


def add(controls: TrainerControls, names: str, called: str | None = None, **how: Any) -> Any:
    return controls.add_weights(
        serialized=names, called=called, **{"ends": False, "partial": False, **how}
    )


def test_what_is_held_is_one_update(controls: TrainerControls, weights: Weights) -> None:
    """A pause in place keeps what running requests have in the cache."""
    for recompute in (False, True):
        controls.hold_weights(recompute=recompute)
        add(controls, "a", ends=True)
        add(controls, "b a", ends=True)
        assert controls.end_update() == {} and len(weights.taken) == int(recompute)
        controls.take_weights()
        how = {"partial_update": False, "recompute_kv_cache": recompute}
        assert weights.taken[-1] == {"names": {"a", "b"}, **how}
    assert controls.take_weights() == {}, "nothing has come"
    add(controls, "c")
    controls.end_update()
    assert weights.taken[-1]["names"] == {"c"} and weights.taken[-1]["recompute_kv_cache"]


def test_a_pause_begins_anew(controls: TrainerControls, weights: Weights) -> None:
    add(controls, "left over")
    controls.hold_weights()
    add(controls, "a")
    controls.take_weights()
    assert [each["names"] for each in weights.taken] == [{"a"}]


def test_a_bucket_that_is_refused_begins_no_update(
    controls: TrainerControls, weights: Weights
) -> None:
    """So generation goes on behind it; one that has begun with others is kept."""
    announced = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "packed": False}
    asked: dict[str, Any] = {"ends": False, "partial": False, "announced": announced}
    for ends in (False, True):
        controls.hold_weights()
        with pytest.raises(RequestError, match="no weight-transfer group"):
            controls.add_weights(**{**asked, "ends": ends})
        assert controls.take_weights() == {} and not weights.taken
    controls.hold_weights()
    add(controls, "a")
    with pytest.raises(RequestError, match="no weight-transfer group"):
        controls.add_weights(**asked)
    add(controls, "b")
    controls.take_weights()
    assert weights.taken[0]["names"] == {"a", "b"}


def test_another_name_begins_anew(controls: TrainerControls, weights: Weights) -> None:
    add(controls, "a", "1")
    add(controls, "b", "2", ends=True)
    assert [each["names"] for each in weights.taken] == [{"b"}]
    assert dict(weights.kept.weight_names) == {1: "2"}
    assert weights.names_at_update == {1: "2"}, "before the first answer of them"


def test_weights_that_do_not_fit_get_no_name(controls: TrainerControls, weights: Weights) -> None:
    controls.name_weights("old")
    with pytest.raises(CheckpointError):
        add(controls, "wrong", "new", ends=True)
    assert dict(weights.kept.weight_names) == {0: "old"}
    with pytest.raises(RequestError, match="200"):
        add(controls, "a", "x" * 201, ends=True)
    for number in range(MOST_NAMES + 3):
        add(controls, "a", f"v{number}", ends=True)
    assert len(weights.kept.weight_names) == MOST_NAMES


@pytest.mark.parametrize(("ranks", "most"), ((1, 32), (8, 256)))
def test_an_update_may_bring_what_all_ranks_have(
    ranks: int, most: int, controls: TrainerControls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.serving.trainers.controls.FLOOR_BYTES", 0)
    if ranks > 1:
        layout = SimpleNamespace(world_size=ranks)
        monkeypatch.setattr(controls._engine.model, "group", SimpleNamespace(layout=layout))
    rooms: list[int] = []

    def read(names: str, _: Any, room: int) -> dict[str, torch.Tensor]:
        rooms.append(room)
        return {name: torch.ones(1) for name in names.split()}

    monkeypatch.setattr(pickled_tensors, "read_tensors", read)
    add(controls, "a")
    add(controls, "b c")
    add(controls, "d")
    assert rooms == [most, most - 4, most - 12]


def test_an_update_of_nothing_names_what_is_served(
    controls: TrainerControls, weights: Weights
) -> None:
    add(controls, "", "same", partial=True, ends=True)
    assert dict(weights.kept.weight_names) == {0: "same"}
    add(controls, "a", ends=True)
    assert dict(weights.kept.weight_names) == {0: "same"}, "the next one has no name"


def test_an_update_of_vllms_way_is_ended_by_no_flush(
    controls: TrainerControls, weights: Weights
) -> None:
    controls.start_weight_update(partial=True)
    assert controls.end_update() == {} and not weights.taken
    controls.finish_weight_update()


def test_ids_mean_clients_requests_before_answers() -> None:
    names = {1: ("a", "cmpl-a"), 2: ("cmpl-a", "cmpl-cmpl-a"), 3: ("b", "cmpl-b"), 4: ("b", "x")}
    for ids, found in (
        (["a"], {1}), (["cmpl-a"], {2}), (["cmpl-b"], {3}), (["b"], {3, 4}), (["cmpl-"], set()),
        (["x", "a"], {4, 1}), ([], set()),
    ):  # fmt: skip
        assert named(ids, names) == found


def test_an_update_takes_bytes_as_its_model_does(
    controls: TrainerControls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of messages brings it."""
    rooms = []

    def read(name: str, load_format: Any, room: int) -> dict[str, torch.Tensor]:
        rooms.append(room)
        return {name: torch.ones(8)}

    monkeypatch.setattr(pickled_tensors, "read_tensors", read)
    controls.hold_weights()
    for name in ("a", "b", "b"):
        add(controls, name)
    controls.hold_weights()
    add(controls, "a")
    assert [rooms[0] - room for room in rooms] == [0, 32, 64, 0]


@pytest.mark.parametrize("is_bucket", [True, False])
def test_what_is_announced_is_not_larger_than_the_model(
    is_bucket: bool, controls: TrainerControls
) -> None:
    controls._transfer._group = SimpleNamespace(device="cpu", close=lambda: None)  # type: ignore[assignment]
    announced = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1 << 39]], "packed": False}
    with pytest.raises(CheckpointError, match="the model's at most"):
        if is_bucket:
            controls.add_weights(ends=False, partial=False, announced=announced)
        else:
            controls.start_weight_update()
            controls.receive_weights(**announced)
