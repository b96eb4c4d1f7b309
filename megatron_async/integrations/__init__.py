"""Addresses of other libraries' interfaces, which are in :mod:`megatron_async.contrib`: those of
trainers as their configurations may name them, and a former one, which warns."""
