"""Launches of interpreted Triton kernels, kept in a file, and compiled from it for a GPU.

Triton's interpreter runs a kernel as Python, so it takes what no compiler does: a function that
returns values of two types, say. So what ran there is compiled too, in a process where Triton
compiles.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.compiled_kernels import HOPPER, compiling_for


class Values(NamedTuple):
    """A tensor without its contents."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        return cls(tuple(argument.shape), argument.stride(), argument.dtype)

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class Described(NamedTuple):
    """A tensor that TMA copies blocks of, as Triton describes it."""

    base: Values
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]

    def made(self) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        lists = [*self.shape], [*self.strides], [*self.block_shape]
        return TensorDescriptor(self.base.made(), *lists)


def _described(argument: Any) -> Any:
    """What a launch is given, as it is written down."""
    if not hasattr(argument, "block_shape"):
        return Values.of(argument)
    base, shape, strides = argument.base, argument.shape, argument.strides
    return Described(Values.of(base), tuple(shape), tuple(strides), tuple(argument.block_shape))


class Launch(NamedTuple):
    """A kernel with its arguments, by place and by name."""

    module: str
    name: str
    places: tuple[Any, ...]
    names: dict[str, Any]

    def kind(self) -> tuple[Any, ...]:
        """What decides which of its lines are compiled: dtypes, and what is not a number."""
        arguments = (*enumerate(self.places), *sorted(self.names.items()))
        return (self.module, self.name, *((where, _kind(value)) for where, value in arguments))

    def compile(self) -> None:
        kernel = getattr(importlib.import_module(self.module), self.name)
        places = [_made(value) for value in self.places]
        kernel[(1,)](*places, **{name: _made(value) for name, value in self.names.items()})


def _kind(value: Any) -> Any:
    if isinstance(value, Values):
        return value.dtype
    if isinstance(value, Described):
        return value.base.dtype, value.block_shape
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value), value == 0
    return value


def _made(value: Any) -> Any:
    return value.made() if isinstance(value, Values | Described) else value


def record_into(path: Path) -> None:
    """Append one launch of each kind to ``path``, from now on in this process."""
    from triton.runtime.interpreter import InterpretedFunction

    run, kinds = InterpretedFunction.run, set()

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {name: _described(value) for name, value in kwargs.items()}
        for name in ("grid", "warmup"):
            given.pop(name)
        places = tuple(_described(argument) for argument in args)
        launch = Launch(self.fn.__module__, self.fn.__name__, places, given)
        if launch.kind() not in kinds:
            kinds.add(launch.kind())
            with path.open("ab") as file:
                pickle.dump(launch, file)
        return run(self, *args, **kwargs)

    InterpretedFunction.run = recorded


def compile_recorded(path: Path, *, whole: bool, capability: int = HOPPER) -> set[str]:
    """Compile every launch of ``path``; the names of the kernels.

    Args:
        whole: to machine code. Else to Triton's first representation, by which types are known and
            mistakes are found in a tenth of the time.
    """
    from triton.runtime.jit import JITFunction

    found = set()
    with path.open("rb") as file, compiling_for(capability), pytest.MonkeyPatch.context() as patch:
        if not whole:
            patch.setattr(JITFunction, "_do_compile", _front_end)
        while file.peek(1):
            launch: Launch = pickle.load(file)
            try:
                launch.compile()
            except Exception as error:
                raise AssertionError(f"{launch.name} is not compiled: {launch}") from error
            found.add(launch.name)
    return found


def _front_end(
    self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attrs: Any,
    warmup: bool,
) -> Any:  # fmt: skip
    """Stands for ``JITFunction._do_compile``."""
    from triton._C.libtriton import ir

    _, _, target, backend, _ = self.device_caches[device]
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source = self.ASTSource(self, signature, constants, attrs)
    source.make_ir(target, options, functions, backend.get_module_map(), context)
    return SimpleNamespace(metadata=SimpleNamespace(shared=0), asm={"ptx": "", "ttir": ""})
