"""Decode steps in fused kernels, chosen block by block.

``decoder`` strings the blocks of a model together: the embedding, each layer's attention and MLP,
the head. A block that ``coverage`` knows runs in kernels (``embedding``, ``attention_block``,
``mlp_block``, ``head``), any other one runs its megatron modules (``modules``). ``residual`` is
what they hand on to each other, ``gemms`` the skinny GEMMs they share, ``report`` what people are
told; ``tuning`` searches for the GEMMs' tile configs.
"""
