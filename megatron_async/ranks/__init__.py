"""Several processes that run one model: its ranks.

``layout`` says which rank has what; ``process_group`` joins torch.distributed and megatron-core's
parallel state; ``group`` is rank 0's hold on the others, over a ``channel``; ``messages`` are what
they are told; ``leader`` is rank 0's runner, which tells them what it launches; ``follower`` does
what it is told.
"""
