"""Hidden states behind chosen layers of a forward, counted as Hugging Face counts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel

Take = Callable[[int, Tensor], None]
"""Gets the number of a layer and hidden states ``[T, hidden]``, which it may not keep."""


@contextmanager
def handing_out(model: GPTModel, layers: Collection[int], take: Take) -> Iterator[None]:
    """Forwards of this thread, with a batch of 1, give ``take`` the residual stream behind
    ``layers`` as soon as it is there.

    Args:
        layers: 0 is what the first layer reads, i what layer i of the decoder, counted from 1, adds
            to. That of the last one is not asked for: behind the final norm it has another form.
    """
    thread = threading.get_ident()  # others may run the same layers

    def read(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            take(0, hidden.squeeze(1))

    def written(layer: int) -> Callable[[Any, Any, Any], None]:
        def write(module: Any, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                hidden: Tensor = output[0] if isinstance(output, tuple) else output
                take(layer, hidden.squeeze(1))

        return write

    hooks = []
    try:
        for layer in layers:
            if layer == 0:
                hooks.append(model.decoder.register_forward_pre_hook(read, with_kwargs=True))
            else:
                module = model.decoder.layers[layer - 1]
                hooks.append(module.register_forward_hook(written(layer)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
