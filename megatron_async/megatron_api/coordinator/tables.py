"""Names of ``InferenceClient``, and of the call that lets an engine answer it."""

from __future__ import annotations

from megatron_async.megatron_api.names import Table, accepted, refused, works

COORDINATOR: Table = {
    "inference_coordinator_port": works("a free one where it is None or in use"),
    "hostname": works("name or address to listen at; None is this host alone"),
    "loop": accepted("threads wait, and no event loop"),
    "launch_inference_coordinator": accepted(
        "each engine has a coordinator of its own; several engines behind one address are "
        "`megatron-async serve --replicas`",
        True,
    ),
    "coordinator_schedule_output_path": accepted(
        "one engine gets all requests; EngineConfig(record=) writes a run", None
    ),
}
"""Arguments of ``start_listening_to_data_parallel_coordinator``."""

CLIENT: Table = {
    "inference_coordinator_address": works("what the engine's call returned"),
    "deserialize": works(
        "True: a DynamicInferenceRequest; False: plain data. Without it as the installed release: "
        "plain data since 0.17"
    ),
    "start": works("connects; may be awaited, as in 0.16"),
    "add_request": works("a future, whose cancel() aborts the request"),
    "add_request_streaming": works("yields partial tokens, and the answer last"),
    "abort_request": works(""),
    "multi_modal_data": accepted("models take text alone", None),
    "set_generation_epoch": works("stamps policy_epoch and kv_cache_epoch of requests"),
    "pause_engines": works("tokens in flight are committed; an awaitable, as all signals"),
    "unpause_engines": works(""),
    "suspend_engines": works(
        "one that runs is paused too, and runs again after resume_engines(), as in 0.16"
    ),
    "resume_engines": works(
        "forgets cached prefixes, and with kv_cache_management_mode recompute what running "
        "requests have; the engine is paused then"
    ),
    "stop_engines": works("what has not ended fails"),
    "shutdown_coordinator": works("the engine goes on without clients"),
    "start_cuda_profiler": works(""),
    "stop_cuda_profiler": works(""),
    "stop": works("what has not been answered is aborted"),
    "next_request_id": works(""),
    **dict.fromkeys(
        (
            "add_request_with_kv_handoff",
            "add_request_with_kv_handoff_streaming",
            "release_handoff",
        ),
        works("raises RequestError: keys and values stay in the engine"),
    ),
    **dict.fromkeys(
        (
            "aborted_request_ids",
            "completion_futures",
            "context",
            "listener_task",
            "request_submission_times",
            "socket",
            "streams",
        ),
        refused("a thread of the client's own has the socket; use its futures"),
    ),
    **dict.fromkeys(
        ("paused", "running", "stopped"), refused("await what the client's signal returned")
    ),
}
"""Arguments and methods of ``InferenceClient``."""
