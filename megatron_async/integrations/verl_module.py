"""What ``VERL_USE_EXTERNAL_MODULES`` names, at the address of integrations."""

import megatron_async.contrib.trainers.verl_module  # noqa: F401
