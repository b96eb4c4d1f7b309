"""``VERL_USE_EXTERNAL_MODULES=megatron_async.contrib.trainers.verl_module`` has each process of
verl know ``rollout.name=megatron_async``."""

from __future__ import annotations

from megatron_async.contrib.trainers.verl import register

register()
