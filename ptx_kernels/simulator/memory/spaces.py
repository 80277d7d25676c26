"""Where loads and stores of a state space go; generic addresses go where their window says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..frame import Frame
from ..races.vector_clock import Strong
from ..text.program import LOCAL_WINDOW, SHARED_WINDOW, Instruction
from .global_memory import ITEMS

_WINDOW = 60  # bit at which the number of a generic address's window starts
_INSIDE = np.uint64((1 << _WINDOW) - 1)

#: (frame, instruction, addresses, offset, width) -> items, and the same with items to store
Load = Callable[[Frame, Instruction, np.ndarray, int, int], np.ndarray]
Store = Callable[[Frame, Instruction, np.ndarray, int, int, np.ndarray], None]
Update = Callable[[Frame, Instruction, np.ndarray, int, int, Strong], np.ndarray]


def load_global(
    frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
) -> np.ndarray:
    return frame.batch.memory.load(frame, instruction, addresses, offset, width, False)


def load_non_coherent(
    frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
) -> np.ndarray:
    return frame.batch.memory.load(frame, instruction, addresses, offset, width, True)


def load_shared(
    frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
) -> np.ndarray:
    return frame.batch.shared.load(frame, instruction, addresses, offset, width)


def load_local(
    frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
) -> np.ndarray:
    return frame.batch.local.load(frame, instruction, addresses, offset, width)


def store_global(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    width: int,
    items: np.ndarray,
) -> None:
    frame.batch.memory.store(frame, instruction, addresses, offset, width, items)


def store_shared(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    width: int,
    items: np.ndarray,
) -> None:
    frame.batch.shared.store(frame, instruction, addresses, offset, width, items)


def store_local(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    width: int,
    items: np.ndarray,
) -> None:
    frame.batch.local.store(frame, instruction, addresses, offset, width, items)


def update_global(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    width: int,
    strong: Strong,
) -> np.ndarray:
    return frame.batch.memory.update(frame, instruction, addresses, offset, width, strong)


def update_shared(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    width: int,
    strong: Strong,
) -> np.ndarray:
    return frame.batch.shared.update(frame, instruction, addresses, offset, width, strong)


def update_generic(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    width: int,
    strong: Strong,
) -> np.ndarray:
    """All lanes in one memory, as compiled code has it."""
    if (addresses >> np.uint64(_WINDOW) == np.uint64(SHARED_WINDOW >> _WINDOW)).all():
        return update_shared(frame, instruction, addresses & _INSIDE, offset, width, strong)
    return update_global(frame, instruction, addresses, offset, width, strong)


_LOAD_WINDOWS: dict[int, Load] = {
    SHARED_WINDOW >> _WINDOW: load_shared,
    LOCAL_WINDOW >> _WINDOW: load_local,
}
_STORE_WINDOWS: dict[int, Store] = {
    SHARED_WINDOW >> _WINDOW: store_shared,
    LOCAL_WINDOW >> _WINDOW: store_local,
}


def load_generic(
    frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
) -> np.ndarray:
    windows = addresses >> np.uint64(_WINDOW)
    numbers = np.unique(windows)
    if numbers.size == 1:
        inside = addresses & _INSIDE if int(numbers[0]) in _LOAD_WINDOWS else addresses
        return _LOAD_WINDOWS.get(int(numbers[0]), load_global)(
            frame, instruction, inside, offset, width
        )
    result: np.ndarray = np.empty(addresses.size, ITEMS[width])
    for number in numbers:
        positions = np.flatnonzero(windows == number)
        result[positions] = load_generic(
            frame.subset(positions), instruction, addresses[positions], offset, width
        )
    return result


def store_generic(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    width: int,
    items: np.ndarray,
) -> None:
    windows = addresses >> np.uint64(_WINDOW)
    numbers = np.unique(windows)
    if numbers.size == 1:
        inside = addresses & _INSIDE if int(numbers[0]) in _STORE_WINDOWS else addresses
        _STORE_WINDOWS.get(int(numbers[0]), store_global)(
            frame, instruction, inside, offset, width, items
        )
        return
    for number in numbers:
        positions = np.flatnonzero(windows == number)
        part = items if items.size == 1 else items[positions]
        store_generic(
            frame.subset(positions), instruction, addresses[positions], offset, width, part
        )


LOADS: dict[str, Load] = {
    "global": load_global,
    "const": load_global,
    "shared": load_shared,
    "local": load_local,
    "generic": load_generic,
}
UPDATES: dict[str, Update] = {
    "global": update_global,
    "shared": update_shared,
    "generic": update_generic,
}
STORES: dict[str, Store] = {
    "global": store_global,
    "shared": store_shared,
    "local": store_local,
    "generic": store_generic,
}
