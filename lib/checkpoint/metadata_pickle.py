"""Reads the pickle in a ``.metadata`` file by a small machine; Python's unpickler never sees it.

The unpickler calls what a file names, writes attributes into the classes that it mentions and
believes the sizes that it states. A crafted file runs code, and a damaged one of 2 kB may ask for
gigabytes. Here `pickletools` cuts the file into opcodes and calls nothing. The machine knows those
opcodes that a description of tensors needs, makes objects of the few classes below by itself, and
refuses all else.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
    filesystem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

_METADATA = "torch.distributed.checkpoint.metadata"
# Where a tensor lies in a data file; torch has no public name for it.
StorageInfo: type = vars(filesystem)["_StorageInfo"]
_CLASSES: dict[str, type] = {
    f"{_METADATA}.Metadata": Metadata,
    f"{_METADATA}.TensorStorageMetadata": TensorStorageMetadata,
    f"{_METADATA}.BytesStorageMetadata": BytesStorageMetadata,
    f"{_METADATA}.TensorProperties": TensorProperties,
    f"{_METADATA}.ChunkStorageMetadata": ChunkStorageMetadata,
    f"{_METADATA}.MetadataIndex": MetadataIndex,
    f"{_METADATA}.StorageMeta": StorageMeta,
    "torch.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
}
# The layout and the memory format of every tensor that this project saves.
_STRIDED = "torch.strided"
_CONTIGUOUS, _CONTIGUOUS_NAME = 0, "TORCH_CONTIGUOUS_FORMAT"


class Refused(Exception):
    """The file asks for more than a description of tensors needs; the message says for what."""


def read_description(data: bytes) -> object:
    """What a pickle describes, if it needs no more than the machine knows.

    Raises:
        Refused: it names, calls or does something else.
        Exception: almost any, where the data are damaged.
    """
    machine = _Machine()
    for opcode, argument, _position in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.pop()
        operation = _OPERATIONS.get(opcode.name)
        if operation is None:
            raise Refused(f"uses the pickle opcode {opcode.name}, which is not allowed")
        operation(machine, argument)
    raise ValueError("it has no end")


@dataclass(frozen=True)
class _Called:
    """A function or class that the file names to call it; what is made instead is ours."""

    make: Callable[[tuple[object, ...]], object]


class _Machine:
    """The stack and the memo of a pickle; the methods are its opcodes."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: list[object] = []

    def pop(self) -> object:
        """Takes the top of the stack."""
        return self.stack.pop()

    def pop_to_mark(self) -> list[object]:
        """Takes all that lies above the last mark."""
        mark = self.marks.pop()
        above = self.stack[mark:]
        del self.stack[mark:]
        return above

    def push(self, value: object) -> None:
        """Puts a value on top."""
        self.stack.append(value)

    def push_tuple(self, length: int) -> None:
        """Joins the topmost values."""
        values = self.stack[-length:]
        if len(values) != length:
            raise ValueError("its stack is empty")
        self.stack[-length:] = [tuple(values)]

    def append(self, values: list[object]) -> None:
        """Adds to the list on top."""
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("it appends to something that is no list")
        target += values

    def set_items(self, values: list[object]) -> None:
        """Adds keys and values, in turn, to the mapping on top."""
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError("it adds keys to something that is no mapping")
        target.update(zip(values[::2], values[1::2], strict=True))

    def stack_global(self) -> None:
        """Replaces a module's and a global's name by what stands for it here."""
        name, module = self.pop(), self.pop()
        self.push(_resolve(f"{module}.{name}"))

    def create(self) -> None:
        """Makes an empty object of a class."""
        arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, type) or arguments != ():
            raise ValueError("it makes something that is no description")
        self.push(object.__new__(kind))

    def call(self) -> None:
        """Makes what a call would give."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, _Called) or not isinstance(arguments, tuple):
            raise Refused("calls something that is not allowed")
        self.push(called.make(arguments))

    def build(self) -> None:
        """Fills the fields of the object below."""
        state = self.pop()
        self.stack[-1] = _filled(self.stack[-1], state)


def _resolve(name: str) -> object:
    """The class, function or dtype that a file may name."""
    if name in _CLASSES:
        return _CLASSES[name]
    if name in _CALLS:
        return _CALLS[name]
    module, _, attribute = name.rpartition(".")
    dtype = vars(torch).get(attribute)
    if module == "torch" and isinstance(dtype, torch.dtype):
        return dtype
    raise Refused(f"asks for {ascii(name)[1:-1]}, which is not allowed")


def _filled(target: object, state: object) -> object:
    """The object with its fields set; nothing but fields, and of no object but our own."""
    if type(target) not in _CLASSES.values() or not is_dataclass(target):
        raise Refused("writes into something that is no description")
    if isinstance(target, TensorProperties):
        return _properties(state)
    if not isinstance(state, Mapping) or not state.keys() <= {f.name for f in fields(target)}:
        raise ValueError(f"it sets fields that {type(target).__name__} does not have")
    target.__dict__.update(state)
    return target


def _properties(state: object) -> TensorProperties:
    """Properties of a tensor from what they are pickled as: five values in order."""
    if not isinstance(state, tuple):
        raise ValueError("properties of a tensor are not told by five values")
    dtype, layout, requires_grad, memory_format, pinned = state
    if layout is not torch.strided or memory_format is not torch.contiguous_format:
        raise ValueError("a tensor is not stored as plain rows")
    return TensorProperties(dtype=dtype, requires_grad=requires_grad, pin_memory=pinned)


def _size(arguments: tuple[object, ...]) -> torch.Size:
    (lengths,) = arguments
    if not isinstance(lengths, tuple):
        raise ValueError("a size is not a sequence of lengths")
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError("a size has a length that is none")
    return torch.Size(lengths)


def _layout(arguments: tuple[object, ...]) -> torch.layout:
    if arguments != (_STRIDED,):
        raise ValueError("a tensor is not stored as plain rows")
    return torch.strided


def _memory_format(arguments: tuple[object, ...]) -> torch.memory_format:
    if arguments != (_CONTIGUOUS,):
        raise ValueError("a tensor is not stored as plain rows")
    return torch.contiguous_format


def _member(arguments: tuple[object, ...]) -> torch.memory_format:
    """An enum's member by its name, as Python 3.11.0 to 3.11.3 pickle it; others by its value."""
    if arguments != (_MEMORY_FORMAT, _CONTIGUOUS_NAME):
        raise Refused("asks for builtins.getattr, which is not allowed")
    return torch.contiguous_format


def _path(arguments: tuple[object, ...]) -> Path:
    return Path(*map(str, arguments))


_MEMORY_FORMAT = _Called(_memory_format)
_CALLS = {
    "builtins.getattr": _Called(_member),
    "torch.Size": _Called(_size),
    "torch.serialization._get_layout": _Called(_layout),
    f"{_METADATA}._MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    "pathlib.PosixPath": _Called(_path),
    "pathlib._local.PosixPath": _Called(_path),
}

_Operation = Callable[[_Machine, object], None]
_NO_VALUE: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_OPERATIONS: dict[str, _Operation] = {
    "PROTO": lambda _machine, _version: None,
    "FRAME": lambda _machine, _length: None,
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    **{
        name: lambda machine, _, value=value: machine.push(value)
        for name, value in _NO_VALUE.items()
    },
    "BININT": _Machine.push,
    "BININT1": _Machine.push,
    "BININT2": _Machine.push,
    "LONG1": _Machine.push,
    "BINUNICODE": _Machine.push,
    "SHORT_BINUNICODE": _Machine.push,
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "MEMOIZE": lambda machine, _: machine.memo.append(machine.stack[-1]),
    "BINGET": lambda machine, number: machine.push(machine.memo[int(str(number))]),
    "LONG_BINGET": lambda machine, number: machine.push(machine.memo[int(str(number))]),
    "GLOBAL": lambda machine, name: machine.push(_resolve(str(name).replace(" ", "."))),
    "STACK_GLOBAL": lambda machine, _: machine.stack_global(),
    "NEWOBJ": lambda machine, _: machine.create(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
