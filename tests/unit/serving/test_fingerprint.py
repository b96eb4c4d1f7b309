"""``system_fingerprint`` is another one where the same seed may give another text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from megatron_async.serving.engine_side.fingerprint import fingerprint_of
from megatron_async.serving.messages import Endpoint, Kept, Launch
from megatron_async.version import __version__

CONFIG: dict[str, Any] = {"dtype": "float32", "testing": {"debug": None}, "record": None}
LAUNCH = Launch("tiny", CONFIG, Endpoint("/nowhere", b""))
KEPT = Kept()
OWN = fingerprint_of(LAUNCH, KEPT)


def test_a_fingerprint_has_the_version_and_a_hash() -> None:
    name, _, digest = OWN.rpartition("-")
    assert name == f"megatron-async-{__version__}"
    assert len(bytes.fromhex(digest)) == 4


@pytest.mark.parametrize(
    "changes",
    [{"model": "other"}, {"config": {**CONFIG, "dtype": "bfloat16"}}, {"model": "\udc80"}],
)
def test_another_model_or_configuration_has_another_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint_of(msgspec.structs.replace(LAUNCH, **changes), KEPT) != OWN


def test_new_weights_have_another_fingerprint() -> None:
    assert fingerprint_of(LAUNCH, Kept(weights=("new",), weight_version=1)) != OWN


def test_what_no_answer_depends_on_changes_no_fingerprint() -> None:
    config = {**CONFIG, "record": "file", "kv_events_config": {"endpoint": "tcp://*:5557"}}
    elsewhere = Launch("tiny", config, Endpoint("/there", b"a"), max_queue=3)
    assert fingerprint_of(elsewhere, Kept(suspended=True, asleep=("weights",))) == OWN
