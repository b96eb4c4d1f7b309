"""A model's parameters in memory that can be given back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from megatron_async.device.releasable import Region, aligned


def move_parameters(model: Module) -> Region:
    """Move all parameters of ``model`` into one region of their device; before anything else knows
    their addresses. Parameters that share memory share it afterwards. Buffers stay.

    Raises:
        ConfigError: the device cannot give memory back.
        CacheTooLargeError: it has no room for the region beside the parameters.
    """
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
    end = 0
    parameters = list(model.parameters())
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage, end
            end += aligned(storage.nbytes())
    region = Region(max(end, 1), parameters[0].device)
    with torch.inference_mode(parameters[0].is_inference()):
        for storage, start in storages.values():
            old = torch.empty(0, dtype=torch.uint8, device=region.device).set_(storage)
            region.bytes[start : start + old.numel()].copy_(old)
    moved = region.bytes.untyped_storage()
    for parameter in parameters:
        _, start = storages[parameter.untyped_storage().data_ptr()]
        offset = start // parameter.element_size() + parameter.storage_offset()
        with torch.inference_mode(parameter.is_inference()):
            there: Tensor = torch.empty(0, dtype=parameter.dtype, device=region.device)
            parameter.data = there.set_(moved, offset, parameter.shape, parameter.stride())
    storages.clear()
    if region.device.type == "cuda":
        torch.cuda.empty_cache()
    return region
