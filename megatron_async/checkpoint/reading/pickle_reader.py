"""A reader of pickles that executes nothing.

It runs the opcodes of Python's pickle protocols 0 to 4 on inert values: a class is a
:class:`Global`, an object a :class:`Record` of its arguments and state. Work and memory are linear
in the bytes read. A memo of any index is one entry of a dictionary, lengths are checked against
what is there, and nothing that a pickle nests is ever hashed, compared or shown, since that would
recurse in C.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_OPCODES = 40_000_000
"""An opcode is a byte or more, and makes one object at most: some gigabytes in all."""


class PickleReadError(ValueError):
    """A pickle is cut short, corrupt, or holds what is not allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A class or function that a pickle names."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """An object that a pickle would have made by calling ``name`` with ``args``."""

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def field(self, name: str, *kinds: type) -> Any:
        """The attribute ``name``; ValueError if it is missing or of none of ``kinds``."""
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{self.name.rpartition('.')[2]}.{name} is not a {wanted}")
        return value


class _Machine:
    """What runs the opcodes: a stack, marks on it, and a memo."""

    def __init__(
        self,
        data: bytes,
        allows: Callable[[str], bool],
        functions: dict[str, Callable[..., Any]] | None = None,
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self._data = data
        self._at = 0
        self._allows = allows
        self._functions = functions or {}
        self._persistent = persistent
        self._globals: dict[str, Global] = {}
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        self.stack, self.marked, self.memo = [], [], {}
        data, end, count = self._data, len(self._data), 0
        try:
            while self._at < end:
                opcode = data[self._at]
                self._at += 1
                if opcode == _STOP:
                    return self.stack.pop()
                count += 1
                if count > MOST_OPCODES:
                    raise PickleReadError(f"more than {MOST_OPCODES:,} opcodes")
                act = _ACTS.get(opcode)
                if act is None:
                    raise PickleReadError(f"opcode {opcode:#04x} is not allowed")
                act(self)
        except (IndexError, KeyError) as error:
            raise PickleReadError("corrupt: it takes what it has not put") from error
        except (struct.error, UnicodeDecodeError) as error:
            raise PickleReadError(f"corrupt: {error}") from error
        raise PickleReadError("truncated")

    # Bytes

    def protocol(self) -> None:
        if self.unsigned(1) > pickle.HIGHEST_PROTOCOL:
            raise PickleReadError("corrupt: an unknown protocol")

    def take(self, length: int) -> bytes:
        start = self._at
        if not 0 <= length <= len(self._data) - start:
            raise PickleReadError("truncated")
        self._at = start + length
        return self._data[start : self._at]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def sized(self, size: int) -> bytes:
        return self.take(self.unsigned(size))

    def line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise PickleReadError("truncated")
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    # Stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.to_mark()

    def last(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return items

    # Containers

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise PickleReadError(f"items are put into a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise PickleReadError(f"entries are put into a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_checked_key(key)] = value

    def dict(self) -> None:
        items = self.to_mark()
        self.push({})
        self.set_items(items)

    # Names and objects

    def named(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleReadError("a name that is no text")
        # As protocols up to 2 spell it.
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in self._globals:
            if full not in self._functions and not self._allows(full):
                raise PickleReadError(f"{full} is not allowed")
            self._globals[full] = Global(full)
        self.push(self._globals[full])

    def call(self) -> None:
        function, args = self.last(2)
        if not isinstance(function, Global) or type(args) is not tuple:
            raise PickleReadError("what is called is no class or function")
        known = self._functions.get(function.name)
        if known is None:
            self.push(Record(function.name, args))
            return
        try:
            self.push(known(*args))
        except TypeError as error:
            raise PickleReadError(f"{function.name} with {len(args)} arguments") from error

    def call_with_names(self) -> None:
        names = self.stack.pop()
        if names != {}:
            raise PickleReadError("named arguments are not supported")
        self.call()

    def build(self) -> None:
        target, state = self.last(2)
        if isinstance(target, Record):
            target.state = state
        elif type(target) is not dict:  # the attributes of a dictionary are left out
            raise PickleReadError(f"attributes are given to a {type(target).__name__}")
        self.push(target)

    def persist(self, identity: Any) -> None:
        if self._persistent is None:
            raise PickleReadError("a persistent id is not allowed")
        self.push(self._persistent(identity))


def _checked_key(key: Any) -> Any:
    """Keys whose hashes cost little, and cannot be made equal. Objects are equal to themselves."""
    if type(key) is int and abs(key) >= 2**61 - 1:
        raise PickleReadError("an integer of more than 61 bits is used as a key")
    if type(key) not in _KEYS:
        raise PickleReadError(f"a {type(key).__name__} is used as a key")
    return key


_KEYS = frozenset((str, int, bool, bytes, type(None), Record, Global))
_STOP = pickle.STOP[0]


def _text_integer(reader: _Machine) -> None:
    line = reader.line()
    if line in (b"00", b"01"):  # protocol 0's booleans
        reader.push(line == b"01")
    else:
        reader.push(_integer(line))


def _integer(digits: bytes) -> int:
    try:
        return int(digits.rstrip(b"L"))
    except ValueError as error:
        raise PickleReadError("corrupt: an integer in digits") from error


def _float(digits: bytes) -> float:
    try:
        return float(digits)
    except ValueError as error:
        raise PickleReadError("corrupt: a number in digits") from error


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _utf8(data: bytes) -> str:
    # As pickle does; what names something is checked where it is used.
    return data.decode("utf-8", "surrogatepass")


_Act = Callable[[_Machine], None]


def _acts() -> dict[int, _Act]:
    """What each opcode does."""
    p = pickle
    named: dict[bytes, _Act] = {
        p.PROTO: lambda r: r.protocol(),
        p.FRAME: lambda r: _ignore(r.take(8)),
        p.MARK: _Machine.mark,
        p.POP: _Machine.pop,
        p.POP_MARK: lambda r: _ignore(r.to_mark()),
        p.DUP: lambda r: r.stack.append(r.stack[-1]),
        # constants
        p.NONE: lambda r: r.stack.append(None),
        p.NEWTRUE: lambda r: r.stack.append(True),
        p.NEWFALSE: lambda r: r.stack.append(False),
        # numbers
        p.INT: _text_integer,
        p.LONG: lambda r: r.stack.append(_integer(r.line())),
        p.BININT: lambda r: r.stack.append(_signed(r.take(4))),
        p.BININT1: lambda r: r.stack.append(r.unsigned(1)),
        p.BININT2: lambda r: r.stack.append(r.unsigned(2)),
        p.LONG1: lambda r: r.stack.append(_signed(r.sized(1))),
        p.LONG4: lambda r: r.stack.append(_signed(r.sized(4))),
        p.FLOAT: lambda r: r.stack.append(_float(r.line())),
        p.BINFLOAT: lambda r: r.stack.append(struct.unpack(">d", r.take(8))[0]),
        # texts and bytes
        p.UNICODE: lambda r: r.stack.append(r.line().decode("raw-unicode-escape")),
        p.SHORT_BINUNICODE: lambda r: r.stack.append(_utf8(r.sized(1))),
        p.BINUNICODE: lambda r: r.stack.append(_utf8(r.sized(4))),
        p.BINUNICODE8: lambda r: r.stack.append(_utf8(r.sized(8))),
        p.SHORT_BINBYTES: lambda r: r.stack.append(r.sized(1)),
        p.BINBYTES: lambda r: r.stack.append(r.sized(4)),
        p.BINBYTES8: lambda r: r.stack.append(r.sized(8)),
        # containers; sets are lists, so that nothing is hashed
        p.EMPTY_TUPLE: lambda r: r.stack.append(()),
        p.TUPLE1: lambda r: r.stack.append((r.stack.pop(),)),
        p.TUPLE2: lambda r: r.stack.append(r.last(2)),
        p.TUPLE3: lambda r: r.stack.append(r.last(3)),
        p.TUPLE: lambda r: r.push(tuple(r.to_mark())),
        p.EMPTY_LIST: lambda r: r.stack.append([]),
        p.LIST: lambda r: r.push(r.to_mark()),
        p.EMPTY_SET: lambda r: r.stack.append([]),
        p.FROZENSET: lambda r: r.push(r.to_mark()),
        p.APPEND: lambda r: r.extend([r.stack.pop()]),
        p.APPENDS: lambda r: r.extend(r.to_mark()),
        p.ADDITEMS: lambda r: r.extend(r.to_mark()),
        p.EMPTY_DICT: lambda r: r.stack.append({}),
        p.DICT: _Machine.dict,
        p.SETITEM: lambda r: r.set_items(list(r.last(2))),
        p.SETITEMS: lambda r: r.set_items(r.to_mark()),
        # memo
        p.MEMOIZE: lambda r: r.memo.__setitem__(len(r.memo), r.stack[-1]),
        p.PUT: lambda r: r.memo.__setitem__(_integer(r.line()), r.stack[-1]),
        p.BINPUT: lambda r: r.memo.__setitem__(r.unsigned(1), r.stack[-1]),
        p.LONG_BINPUT: lambda r: r.memo.__setitem__(r.unsigned(4), r.stack[-1]),
        p.GET: lambda r: r.stack.append(r.memo[_integer(r.line())]),
        p.BINGET: lambda r: r.stack.append(r.memo[r.unsigned(1)]),
        p.LONG_BINGET: lambda r: r.stack.append(r.memo[r.unsigned(4)]),
        # names and objects
        p.GLOBAL: lambda r: r.named(_utf8(r.line()), _utf8(r.line())),
        p.STACK_GLOBAL: lambda r: r.named(*r.last(2)),
        p.REDUCE: _Machine.call,
        p.NEWOBJ: _Machine.call,
        p.NEWOBJ_EX: _Machine.call_with_names,
        p.BUILD: _Machine.build,
        p.PERSID: lambda r: r.persist(_utf8(r.line())),
        p.BINPERSID: lambda r: r.persist(r.stack.pop()),
    }
    return {opcode[0]: act for opcode, act in named.items()}


def _ignore(value: Any) -> None:
    pass


_ACTS = _acts()


class PickleReader:
    """One pickle after the other of ``data``.

    Args:
        data: the pickles.
        allows: whether a pickle may name this class or function, ``module.name``.
        functions: what stands for these names where they are called with a tuple of arguments.
        persistent: what stands for a persistent id; None refuses them.
    """

    def __init__(
        self,
        data: bytes,
        allows: Callable[[str], bool],
        functions: dict[str, Callable[..., Any]] | None = None,
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self._machine = _Machine(data, allows, functions, persistent)

    def load(self) -> Any:
        """The next object.

        Raises:
            PickleReadError: see there.
        """
        return self._machine.load()
