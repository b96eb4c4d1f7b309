"""Where other libraries' interfaces were; they are in :mod:`megatron_async.contrib`."""
