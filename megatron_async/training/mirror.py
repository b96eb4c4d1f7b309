"""The modules of a model once more, over the same parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch


def mirror(model: torch.nn.Module) -> Any:
    """A second tree of modules, with tables of parameters and buffers that are the first one's: a
    parameter that is written to, or put in the place of another, is so in both. Classes, modes,
    configs and hooks of the two are apart, so that one may be adapted and the other stays as it is.
    """
    clones: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        clone: Any = object.__new__(type(module))
        clone.__dict__.update(module.__dict__)
        clones[id(module)] = clone
    configs: dict[int, Any] = {}
    for clone in clones.values():
        own = clone.__dict__
        own.pop("forward", None)  # a wrapper around the first tree's
        own["_modules"] = {
            name: None if child is None else clones[id(child)]
            for name, child in own["_modules"].items()
        }
        for name, value in own.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                own[name] = OrderedDict()
            elif isinstance(value, torch.nn.Module):  # it knows one that is no child of it
                own[name] = clones.get(id(value), value)
        config = own.get("config")
        if config is not None:
            own["config"] = configs.setdefault(id(config), copy.copy(config))
    return clones[id(model)]
