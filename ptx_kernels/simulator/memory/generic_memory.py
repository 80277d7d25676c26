"""Generic addresses: dispatches each access to the memory of its address window."""

from __future__ import annotations

import numpy as np

from ..access import Access
from ..address_space import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BIT
from ..races.strong import Strong
from .global_memory import GlobalMemory
from .items import ITEMS
from .local_memory import LocalMemory
from .shared_memory import SharedMemory

_INSIDE = np.uint64((1 << WINDOW_BIT) - 1)


class GenericMemory:
    """Dispatches generic addresses: windows of shared and local memory, all others global."""

    def __init__(self, everywhere: GlobalMemory, shared: SharedMemory, local: LocalMemory) -> None:
        self._global, self._shared, self._local = everywhere, shared, local
        self._windows: dict[int, SharedMemory | LocalMemory] = {
            SHARED_WINDOW >> WINDOW_BIT: shared,
            LOCAL_WINDOW >> WINDOW_BIT: local,
        }

    def load(self, access: Access) -> np.ndarray:
        """Returns one item per address, shape (addresses,)."""
        windows = access.addresses >> np.uint64(WINDOW_BIT)
        numbers = np.unique(windows)
        if numbers.size == 1:
            memory, inside = self._inside(int(numbers[0]), access)
            return memory.load(inside)
        result: np.ndarray = np.empty(access.addresses.size, ITEMS[access.width])
        for number in numbers:
            positions = np.flatnonzero(windows == number)
            result[positions] = self.load(access.subset(positions))
        return result

    def store(self, access: Access, values: np.ndarray) -> None:
        """Stores items, shape (addresses,) or (1,)."""
        windows = access.addresses >> np.uint64(WINDOW_BIT)
        numbers = np.unique(windows)
        if numbers.size == 1:
            memory, inside = self._inside(int(numbers[0]), access)
            memory.store(inside, values)
            return
        for number in numbers:
            positions = np.flatnonzero(windows == number)
            part = values if values.size == 1 else values[positions]
            self.store(access.subset(positions), part)

    def update(self, access: Access, strong: Strong) -> np.ndarray:
        """Performs atomics or strong accesses in global or shared memory.

        All lanes must address the same of the two, as in compiled code.
        """
        windows = access.addresses >> np.uint64(WINDOW_BIT)
        if (windows == np.uint64(SHARED_WINDOW >> WINDOW_BIT)).all():
            inside = access._replace(addresses=access.addresses & _INSIDE)
            return self._shared.update(inside, strong)
        return self._global.update(access, strong)

    def _inside(
        self, window: int, access: Access
    ) -> tuple[GlobalMemory | SharedMemory | LocalMemory, Access]:
        """Returns the memory of an address window, and the access with that memory's addresses."""
        memory = self._windows.get(window)
        if memory is None:
            return self._global, access
        return memory, access._replace(addresses=access.addresses & _INSIDE)
