"""Modules that stand for those a suite imports: names can be imported, and fail where they are
called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class AbsentError(Exception):
    """A test calls code of its own project, which is not there."""


class _AbsentType(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        raise AbsentError(cls.__qualname__)

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


def absent(name: str) -> type:
    """A class that can be named, subscripted and inherited from.

    Calling it raises :class:`AbsentError`.
    """
    return _AbsentType(name, (), {})


class _AbsentModule(ModuleType):
    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> type | ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        called = f"{self.__name__}.{name}"
        return sys.modules.get(called) or absent(called)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_for(*packages: str) -> None:
    """Have these packages imported as stand-ins, whether they are installed or not."""
    sys.meta_path.insert(0, _Finder(frozenset(packages)))


def stand_for_missing(*packages: str) -> None:
    """Have those of these packages that are not installed imported as stand-ins."""
    stand_for(*(each for each in packages if importlib.util.find_spec(each) is None))


def give(module: str, **names: Any) -> None:
    """Put a module with these names alone, or more of them, in the place of one of the suite's."""
    given = sys.modules.setdefault(module, _AbsentModule(module))
    vars(given).update(names)


def load(module: str, path: Path) -> ModuleType:
    """Import a suite's own file, which needs nothing else of its package, by its name there."""
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded
