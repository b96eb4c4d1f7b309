"""Which test files begin first, and which ones ``./scripts/test --quick`` runs. Files go by their
names alone: no two have the same."""

from __future__ import annotations

LONG = (
    "test_state_machine.py",
    "test_interpreted_kernels.py",
    "test_serving_faults.py",
    "test_front_ends.py",
    "test_server.py",
    "test_serving_docs.py",
    "test_openapi.py",
    "test_checkpoint_distributed.py",
    "test_checkpoint_tensor_parallel.py",
    "test_long_run.py",
    "test_megatron_releases.py",
    "test_rank_weights.py",
    "test_ranks.py",
)
"""Files that start servers or ranks, compile kernels, or have single tests that take long. They
begin first, so that processes end together, and all their tests are marked ``slow``."""

QUICK = (
    "test_architecture.py",
    "test_bench_baseline.py",
    "test_chat_template.py",
    "test_checkpoint_huggingface.py",
    "test_checkpoint_native.py",
    "test_cli_arguments.py",
    "test_config.py",
    "test_deploy.py",
    "test_detokenize.py",
    "test_development_api.py",
    "test_docs.py",
    "test_end_check.py",
    "test_engine_api.py",
    "test_engine_parity.py",
    "test_former_addresses.py",
    "test_generation_config.py",
    "test_grammar.py",
    "test_kv_events.py",
    "test_megatron_api.py",
    "test_megatron_compat.py",
    "test_megatron_names.py",
    "test_models.py",
    "test_ngram.py",
    "test_output.py",
    "test_output_processor.py",
    "test_paged_forward.py",
    "test_rank_messages.py",
    "test_replay.py",
    "test_replicas.py",
    "test_rights.py",
    "test_rings.py",
    "test_sampling.py",
    "test_sampling_params.py",
    "test_scheduler.py",
    "test_slot_fields.py",
    "test_steps.py",
    "test_test_script.py",
    "test_tokenizer.py",
    "test_trace.py",
    "test_weight_transfer.py",
)
"""At least one file for each package, each of them fast but for tests that are marked ``slow``."""
