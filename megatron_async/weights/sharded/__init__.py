"""Weights by shards: each rank of an engine takes its own share from trainer ranks of another
layout, and no rank holds a whole tensor.

``layout``: a trainer rank's place, and where its tensors lie in the whole model's. ``plan``: which
slices go from which trainer rank to where, made once. ``take``: slices are checked and copied.
``shared``: the trainer's memory; ``group``: a collective; ``source``: what ``update_weights``
takes. ``checksum``: by option.
"""
