"""Weights by shards: a rank of an engine takes its share of a trainer's ranks, by memory that both
see and by a collective, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.ranks import new_weights
from megatron_async.ranks.messages import AwaitTensors, ReadShards, ReplaceWeights
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.parallel_layouts import shard_of
from megatron_async.weights.place import read_weights
from megatron_async.weights.sharded import plan as plans
from megatron_async.weights.sharded.buckets import Bucket, buckets_of, parts_of
from megatron_async.weights.sharded.checksum import checksum
from megatron_async.weights.sharded.group import ShardGroup
from megatron_async.weights.sharded.layout import Served, TrainerLayout
from megatron_async.weights.sharded.plan import Slice
from megatron_async.weights.sharded.shared import ShardedWeights
from megatron_async.weights.sharded.source import ShardedSource, open_sharded
from megatron_async.weights.tensor_info import TensorInfo, infos_of
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_over_http import free_port

CONFIG = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_kv_heads=2, head_dim=4, vocab_size=32,
    ffn_hidden_size=16, max_sequence_length=32, tie_word_embeddings=True,
)  # fmt: skip
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

State = dict[str, Tensor]
Ranks = list[tuple[State, TrainerLayout]]


def model(seed: int) -> Any:
    return build_random_model(CONFIG, device=torch.device("cpu"), dtype=torch.float32, seed=seed)


def state_of(made: Any) -> State:
    return {name: value.detach().clone() for name, value in made.named_parameters()}


def by_tensor(state: State) -> Ranks:
    """Two tensor-parallel ranks."""
    return [
        (
            {n: shard_of(n, t, rank, 2, gated=True).clone() for n, t in state.items()},
            TrainerLayout(tensor_rank=rank, tensor_size=2),
        )
        for rank in range(2)
    ]


def by_stage(state: State) -> Ranks:
    """Two pipeline stages, of which the last has a copy of the embedding."""
    second = {n for n in state if n.startswith("decoder.layers.1.") or n == NORM}
    last = {n.replace("layers.1.", "layers.0."): state[n].clone() for n in second}
    first = {n: t.clone() for n, t in state.items() if n not in second}
    last[OUTPUT] = state[EMBEDDING].clone()
    return [(first, TrainerLayout()), (last, TrainerLayout(first_layer=1))]


TRAINERS: dict[str, Callable[[State], Ranks]] = {"tensor": by_tensor, "stages": by_stage}


def same(made: Any, state: State) -> bool:
    return all(torch.equal(value, state[name]) for name, value in made.named_parameters())


@contextmanager
def shared(ranks: Ranks, **options: Any) -> Iterator[list[Any]]:
    """What both ranks export, through JSON."""
    sides = [ShardedWeights(state, layout, **options) for state, layout in ranks]
    try:
        yield json.loads(json.dumps([side.export() for side in sides]))
    finally:
        for side in sides:
            side.close()


@pytest.mark.parametrize("checksums", (False, True))
@pytest.mark.parametrize("trainer", TRAINERS)
def test_shared_memory_is_copied_into_the_parameters(trainer: str, checksums: bool) -> None:
    served, new = model(1), state_of(model(2))
    served.stored_cache_scales = torch.ones(2, 2)
    old = state_of(served)
    with shared(TRAINERS[trainer](new), checksums=checksums) as handles:
        replace = read_weights(served, open_sharded(handles), all_parameters=True)
        assert same(served, old) and served.stored_cache_scales is not None
        replace()
    assert same(served, new)
    assert served.stored_cache_scales is None, "a directory's, of the weights that it had"


def test_a_model_that_keeps_fp8_weights_takes_whole_tensors() -> None:
    """Slices were cast to e4m3 without a scale."""
    device = torch.device("cpu")
    served = build_random_model(CONFIG, device=device, dtype=torch.float32, quantize=True)
    old = state_of(served)
    refused = pytest.raises(
        CheckpointError, match=r"keeps FP8 or MXFP4 weights.*give whole tensors"
    )
    with shared(by_tensor(state_of(model(2)))) as handles, refused:
        read_weights(served, open_sharded(handles), all_parameters=True)
    as_bytes = (each.detach().view(torch.uint8) for _, each in served.named_parameters())
    assert all(a.equal(b.view(torch.uint8)) for a, b in zip(as_bytes, old.values(), strict=True))


def test_what_is_told_to_other_ranks_is_the_same_source() -> None:
    source = open_sharded([{"layout": {}, "weights": [{}], "checksums": None}])
    assert ShardedSource.of_told(source.told()) == source
    for wrong in (b"", b"\0", open_sharded({"a": 1}).told()[:-1]):
        with pytest.raises(CheckpointError, match="no handles of sharded weights"):
            ShardedSource.of_told(wrong)


def test_some_tensors_are_replaced_alone() -> None:
    served, new = model(1), state_of(model(2))
    wanted = {**state_of(served), FC1: new[FC1]}
    some = [({FC1: state[FC1]}, layout) for state, layout in by_tensor(new)]
    with shared(some) as handles:
        with pytest.raises(CheckpointError, match="the new weights lack"):
            read_weights(served, open_sharded(handles), all_parameters=True)
        read_weights(served, open_sharded(handles))()
    assert same(served, wanted)


def test_a_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plan_for = plans.plan_for
    monkeypatch.setattr(plans, "plan_for", lambda *a, **k: made.append(1) or plan_for(*a, **k))
    served = model(1)
    for seed in (2, 3):
        new = state_of(model(seed))
        with shared(by_tensor(new)) as handles:
            read_weights(served, open_sharded(handles), all_parameters=True)()
        assert same(served, new)
    assert len(made) == 1
    with shared(by_stage(new)) as handles:
        read_weights(served, open_sharded(handles), all_parameters=True)()
    assert len(made) == 2


def test_engine_ranks_take_replicas_from_different_trainer_ranks() -> None:
    served, trainer = model(1), by_tensor(state_of(model(2)))
    ranks = [plans.TrainerRank(place, tuple(infos_of(state))) for state, place in trainer]
    taken = []
    for reader in range(2):
        plan = plans.plan_for(served, ranks, reader=reader, all_parameters=True)
        taken += [n for n, some in plan.slices.items() if NORM in {each.name for each in some}]
    assert sorted(taken) == [0, 1]


# --- what is refused --------------------------------------------------------------------------


def without(ranks: Ranks) -> None:
    del ranks[1][0][FC1]


def of_another_shape(ranks: Ranks) -> None:
    ranks[1][0][FC1] = ranks[1][0][FC1][:-2].clone()


def all_of_another_shape(ranks: Ranks) -> None:
    for state, _ in ranks:
        state[FC1] = state[FC1][:, :-2].clone()


def of_another_dtype(ranks: Ranks) -> None:
    for state, _ in ranks:
        state[FC1] = state[FC1].int()


def unknown(ranks: Ranks) -> None:
    ranks[0][0]["decoder.layers.7.mlp.linear_fc1.weight"] = torch.ones(2)


def of_one_part(ranks: Ranks) -> None:
    ranks[0][0]["scale"] = torch.ones(2, 2)


def with_a_nan(ranks: Ranks) -> None:
    ranks[1][0][FC1][3, 4] = float("nan")


def of_other_sizes(ranks: Ranks) -> None:
    ranks[1] = ranks[1][0], TrainerLayout()


def in_two_ways(ranks: Ranks) -> None:
    ranks[1][0][FC1] = torch.cat([ranks[1][0][FC1]] * 2)


def odd_rows(ranks: Ranks) -> None:
    for state, _ in ranks:
        state[FC1] = state[FC1][:-1].clone()


def too_few_rows(ranks: Ranks) -> None:
    ranks[:] = [(s, dataclasses.replace(place, vocab_size=64)) for s, place in ranks]


REFUSED: dict[Callable[[Ranks], None], str] = {
    without: f"the new {FC1} lacks 256 of the 512 elements of this rank's share",
    of_another_shape: rf"{FC1} is torch.float32 \(32, 16\) by trainer rank 0, and torch.float32",
    all_of_another_shape: rf"{FC1} has shape \(32, 14\), the model's has \(32, 16\)",
    of_another_dtype: f"{FC1} has dtype torch.int32",
    unknown: "hold decoder.layers.7.mlp.linear_fc1.weight, which the model does not have",
    of_one_part: "scale, which the model does not have",
    with_a_nan: f"{FC1} has 1 of 128 elements that are NaN",
    of_other_sizes: "trainer ranks 0 and 1 are of other layouts",
    in_two_ways: f"trainer ranks have {FC1} in several ways",
    odd_rows: "no 2 equal blocks in dimension 0",
    too_few_rows: "fewer than vocab_size=64",
}


IN_A_GROUP = {
    change: said.replace("1 of 128", "1 of 512")
    for change, said in REFUSED.items()
    if change not in (of_other_sizes, too_few_rows)
}
"""Layouts are given when a group is made; elements are counted when they have come."""


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_does_not_fit_leaves_the_old_weights(change: Callable[[Ranks], None]) -> None:
    served, ranks = model(1), by_tensor(state_of(model(2)))
    old = state_of(served)
    change(ranks)
    with shared(ranks) as handles, pytest.raises(CheckpointError, match=REFUSED[change]):
        read_weights(served, open_sharded(handles))
    assert same(served, old)


def test_wrong_checksums_are_refused_by_name() -> None:
    served, new = model(1), state_of(model(2))
    old = state_of(served)
    with shared(by_tensor(new), checksums=True) as handles:
        handles[1]["checksums"][FC1] = "0" * 32
        with pytest.raises(CheckpointError, match=f"{FC1} of trainer rank 1 has another checksum"):
            read_weights(served, open_sharded(handles))
        del handles[1]["checksums"][FC1]
        with pytest.raises(CheckpointError, match=f"{FC1} of trainer rank 1 has another checksum"):
            read_weights(served, open_sharded(handles))
    assert same(served, old)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_replicas_that_differ_are_seen_by_their_checksums(trainer: str) -> None:
    """Nobody reads both of them."""
    served, ranks = model(1), TRAINERS[trainer](state_of(model(2)))
    name = NORM if trainer == "tensor" else OUTPUT
    ranks[1][0][name][-1].add_(1)
    said = pytest.raises(CheckpointError, match="should be the same, and have other checksums")
    with shared(ranks, checksums=True) as handles, said:
        read_weights(served, open_sharded(handles))


def test_what_are_no_handles_is_refused() -> None:
    served = model(1)
    for wrong in ([], {}, None, "path", 7):
        with pytest.raises(CheckpointError, match="handles of sharded weights are a"):
            open_sharded(wrong)  # type: ignore[arg-type]
    layout = TrainerLayout().to_json()
    export: dict[str, Any] = {"kind": "cpu", "tensors": [], "path": "/none"}
    for one, said in (
        (7, "no handles of sharded weights"),
        ({"layout": layout, "checksums": None}, "KeyError: 'weights'"),
        ({"layout": layout, "weights": [], "checksums": None}, "no weights"),
        ({"layout": {"tensor_rank": 3}, "weights": [export], "checksums": None}, "tensor_rank=3"),
        ({"layout": layout, "weights": [{"kind": "cuda"}], "checksums": None}, "no list of tens"),
        ({"layout": layout, "weights": [{"kind": "cpu"}], "checksums": 3}, "got `int`"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_weights(served, open_sharded([one]))  # type: ignore[list-item]
    with pytest.raises(CheckpointError, match="no handles of a ShardGroup"):
        read_weights(served, open_sharded({"address": "127.0.0.1"}))


def test_layouts_have_ranks_below_their_sizes() -> None:
    for wrong in (
        {"tensor_rank": 2, "tensor_size": 2},
        {"expert_rank": -1},
        {"expert_tensor_rank": 1, "expert_tensor_size": 1},
        {"first_layer": -1},
        {"vocab_size": 0},
        {"vocab_size": -3},
        {"tensor_rank": "0"},
        {"tensor_size": 1.0},
        {"first_layer": None},
        {"expert_size": True},
        {"expert_tensor_rank": "1"},
    ):
        with pytest.raises(ConfigError, match="|".join(wrong)):
            TrainerLayout(**wrong)  # type: ignore[arg-type]
    of_numpy = TrainerLayout(tensor_rank=np.int64(1), tensor_size=2)  # type: ignore[arg-type]
    assert json.loads(json.dumps(of_numpy.to_json()))["tensor_rank"] == 1
    layout = TrainerLayout(tensor_rank=1, tensor_size=4, expert_tensor_rank=0, vocab_size=7)
    assert TrainerLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    with pytest.raises(ConfigError, match="readers=0"):
        ShardedWeights({NORM: torch.ones(2)}, layout, readers=0)


def test_a_tensor_of_the_whole_shape_is_not_divided() -> None:
    """Transformer Engine's down projections of multi-latent attention."""
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    served, layout = Served(True, 0, False), TrainerLayout(tensor_rank=1, tensor_size=2)
    info = TensorInfo(name, torch.float32, (8, 4))
    whole = served.held(1, info, layout, {name: (8, 4)})
    divided = served.held(1, info, layout, {name: (16, 4)})
    assert whole.whole.shape == (8, 4) and whole.pieces[0].whole == (0, 0)
    assert divided.whole.shape == (16, 4) and divided.pieces[0].whole == (8, 0)


# --- a collective -----------------------------------------------------------------------------


@contextmanager
def groups(**options: Any) -> Iterator[tuple[list[ShardGroup], ThreadPoolExecutor]]:
    """Those of a trainer's two ranks, and threads for them."""
    port = free_port()
    made = [
        ShardGroup(
            "127.0.0.1", port, layout, rank=rank, trainers=2, timeout=PATIENCE_SECONDS, **options
        )
        for rank, (_, layout) in enumerate(by_tensor({}))
    ]
    with ThreadPoolExecutor(2) as pool:
        yield made, pool
        for group in made:
            group.close()


def sent(made: list[ShardGroup], pool: ThreadPoolExecutor, ranks: Ranks) -> list[Future[None]]:
    pairs = zip(made, ranks, strict=True)
    return [pool.submit(group.send, state) for group, (state, _) in pairs]


@pytest.mark.parametrize("checksums", (False, True))
def test_a_group_brings_new_weights_again_and_again(checksums: bool) -> None:
    """In buckets that are smaller than most tensors; of some tensors alone too."""
    served = model(1)
    with groups(bucket_bytes=300, checksums=checksums) as (made, pool):
        for seed in (2, 3):
            new, old = state_of(model(seed)), state_of(served)
            sending = sent(made, pool, by_tensor(new))
            source = open_sharded(json.loads(json.dumps(made[0].handles)))
            replace = read_weights(served, source, all_parameters=True)
            for each in sending:
                each.result(PATIENCE_SECONDS)
            assert same(served, old)
            replace()
            assert same(served, new)
        other = state_of(model(4))
        sending = sent(made, pool, by_tensor({FC1: other[FC1]}))
        read_weights(served, open_sharded(made[0].handles))()
        for each in sending:
            each.result(PATIENCE_SECONDS)
        assert same(served, {**new, FC1: other[FC1]})
        with pytest.raises(ConfigError, match="those of trainer rank 0"):
            _ = made[1].handles


@pytest.mark.parametrize("change", IN_A_GROUP, ids=lambda change: change.__name__)
def test_what_does_not_fit_is_said_on_both_sides(change: Callable[[Ranks], None]) -> None:
    """And the group goes on."""
    served, new = model(1), state_of(model(2))
    old, ranks = state_of(served), by_tensor(new)
    change(ranks)
    with groups() as (made, pool):
        sending = sent(made, pool, ranks)
        with pytest.raises(CheckpointError, match=IN_A_GROUP[change]):
            read_weights(served, open_sharded(made[0].handles))
        said = f"of the engine refuses them: .*{IN_A_GROUP[change]}"
        for each in sending:
            with pytest.raises(CheckpointError, match=said):
                each.result(PATIENCE_SECONDS)
        assert same(served, old)
        sending = sent(made, pool, by_tensor(new))
        read_weights(served, open_sharded(made[0].handles))()
        for each in sending:
            each.result(PATIENCE_SECONDS)
    assert same(served, new)


def test_a_slice_that_has_changed_on_the_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    served, pack = model(1), Bucket.pack
    old = state_of(served)

    def packed(bucket: Bucket, tensors: State, room: Tensor) -> Tensor:
        found = pack(bucket, tensors, room)
        for each in bucket.packed:
            if each.slice.name == FC1:
                each.view(found)[0, 0] += 1
        return found

    monkeypatch.setattr(Bucket, "pack", packed)
    with groups(checksums=True) as (made, pool):
        sending = sent(made, pool, by_tensor(state_of(model(2))))
        with pytest.raises(CheckpointError, match=f"{FC1} of trainer rank . has another checksum"):
            read_weights(served, open_sharded(made[0].handles))
        for each in sending:
            with pytest.raises(CheckpointError, match="rank 0 of the engine refuses them: the new"):
                each.result(PATIENCE_SECONDS)
    assert same(served, old)


def test_a_trainer_that_ends_in_the_middle_leaves_the_old_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one is told too, and another group brings the weights."""
    served, new = model(1), state_of(model(2))
    old, send_to = state_of(served), WeightGroup.send_to
    buckets = []

    def ends(group: WeightGroup, rank: int, tensor: Tensor) -> None:
        if group.rank == 1:
            buckets.append(1)
            if len(buckets) == 3:
                group.close()
        send_to(group, rank, tensor)

    with monkeypatch.context() as patch, groups(bucket_bytes=300) as (made, pool):
        patch.setattr(WeightGroup, "send_to", ends)
        sending = sent(made, pool, by_tensor(new))
        with pytest.raises(CheckpointError, match="has ended in the middle of a weight transfer"):
            read_weights(served, open_sharded(made[0].handles))
        for each in sending:
            with pytest.raises(CheckpointError, match="weight"):
                each.result(PATIENCE_SECONDS)
        assert len(buckets) == 3 and same(served, old)
        with pytest.raises(
            CheckpointError, match="is over: another rank has ended; make a new one"
        ):
            read_weights(served, open_sharded(made[0].handles))
    with groups() as (made, pool):
        sending = sent(made, pool, by_tensor(new))
        read_weights(served, open_sharded(made[0].handles))()
        for each in sending:
            each.result(PATIENCE_SECONDS)
    assert same(served, new)


def test_a_group_of_another_engine_is_refused() -> None:
    said = pytest.raises(CheckpointError, match="engine_ranks=2, and the engine has 1")
    with groups(engine_ranks=2) as (made, _), said:
        read_weights(model(1), open_sharded(made[0].handles))
    for wrong in ({"rank": 2}, {"engine_ranks": 0}, {"bucket_bytes": 1}):
        with pytest.raises(ConfigError, match="must be below"):
            ShardGroup("127.0.0.1", 1, TrainerLayout(), **{"rank": 0, "trainers": 2, **wrong})


def test_an_engine_leaves_a_group_for_another_one() -> None:
    served = model(1)
    for seed in (2, 3):
        new = state_of(model(seed))
        with groups() as (made, pool):
            sending = sent(made, pool, by_tensor(new))
            read_weights(served, open_sharded(made[0].handles))()
            for each in sending:
                each.result(PATIENCE_SECONDS)
        assert same(served, new)
    with groups() as (made, _):
        handles = {**made[0].handles, "timeout": 0.2}
        with pytest.raises(CheckpointError, match="no weight group at"):
            read_weights(served, open_sharded(handles))


# --- what other ranks are told ----------------------------------------------------------------


class OtherRank(NamedTuple):
    """A group whose other rank does what it is told."""

    told: list[Any]

    def tell(self, message: Any) -> None:
        self.told.append(message)

    def await_answers(self) -> None:
        self.told.append("awaited")

    def explain(self, error: RuntimeError) -> RuntimeError:
        return error


def test_all_ranks_check_before_one_copies() -> None:
    group, source = OtherRank([]), open_sharded([{}])
    replace = new_weights.read_weights(
        group, None, source, lambda: lambda: group.told.append("copied"),
        allow_non_finite_weights=True, all_parameters=False,
    )  # fmt: skip
    assert group.told == [ReadShards(source.told(), True, False), "awaited"]
    replace()
    assert group.told[2:] == [ReplaceWeights(), "copied", "awaited"]


def test_what_rank_0_refuses_others_forget() -> None:
    group, source = OtherRank([]), open_sharded([{}])

    def refuse() -> Any:
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match="no"):
        new_weights.read_weights(
            group, None, source, refuse, allow_non_finite_weights=False, all_parameters=True
        )
    assert group.told[2:] == [AwaitTensors([], False), "awaited"]
    many = open_sharded([{"handle": secrets.token_hex(new_weights.MOST_HANDLES_BYTES)}])
    with pytest.raises(CheckpointError, match="send them by a ShardGroup"):
        new_weights.read_weights(
            group, None, many, refuse, allow_non_finite_weights=False, all_parameters=True
        )
    assert group.told[4:] == [AwaitTensors([], False), "awaited"]


# --- its parts --------------------------------------------------------------------------------


def test_checksums_tell_what_has_changed() -> None:
    values = torch.arange(600_000, dtype=torch.float32)
    found = checksum(values)
    assert found == checksum(values.clone()) and len(found) == 32
    swapped = values.clone()
    swapped[[2, 4]] = swapped[[4, 2]]
    late = values.clone()
    late[-1] = 1
    assert len({found, checksum(swapped), checksum(late), checksum(values[:-1])}) == 4
    assert checksum(values[1:]) == checksum(values[1:].clone()), "wherever it lies"
    assert checksum(values.view(600, 1000).t()) == checksum(values.view(600, 1000).t().contiguous())
    assert checksum(torch.ones(3, dtype=torch.bfloat16)) == "3f803f803f80".rjust(16, "0") * 2
    assert checksum(torch.empty(0, 2)) == "0" * 32 and checksum(torch.tensor(2.0)) != "0" * 32


def test_buckets_are_of_bounded_size_and_bring_all() -> None:
    boxes = [
        Slice("a", (0, 0), "a", (0, 0), (7, 33)),
        Slice("b", (4,), "b", (0,), (3,)),
        Slice("c", (), "c", (), ()),
    ]
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32}
    parts = list(parts_of(boxes, dtypes, 128))
    counts = torch.zeros(7, 33)
    for part in parts:
        assert math.prod(part.sizes) * dtypes[part.name].itemsize <= 128
        if part.name == "a":
            part.into(counts).add_(1)
            assert part.start == part.target_start
    assert bool((counts == 1).all())
    assert parts[-2:] == boxes[-2:]
    for checksums in (False, True):
        buckets = buckets_of(parts, dtypes, 128, checksums=checksums)
        assert [each.slice for bucket in buckets for each in bucket.packed] == parts
        assert all(bucket.packed[-1].offset < 128 and bucket.sums <= 144 for bucket in buckets)


def test_the_example_runs_as_it_stands_there() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rl.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (example,) = (block for block in blocks if "open_sharded" in block)
    names: dict[str, Any] = {}
    exec(compile(example, "rl.md", "exec"), names)
    assert names["version"] == 1 and len(names["handles"]) == 2
    for rank in names["trainer"]:
        rank.close()
