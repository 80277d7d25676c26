"""Thread-safe LRU cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LRUCache:
    """Thread-safe LRU cache of up to `maximum` values; each value is computed by one thread."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._values: OrderedDict[Any, Any] = OrderedDict()
        # key -> (set when done, id of the thread that computes the value)
        self._making: dict[Any, tuple[threading.Event, int]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Returns the value of `key`, calling `make()` if it is missing.

        If several threads ask for one key, one of them calls `make` and the others wait. If `make`
        raises, the next thread tries.
        """
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                if key not in self._making:
                    made = threading.Event()
                    self._making[key] = made, threading.get_ident()
                    break
                other, maker = self._making[key]
            if maker == threading.get_ident():  # `make` asks for its own key; waiting would hang
                return make()
            other.wait()
        try:
            value = make()
            with self._lock:
                self._values[key] = value
                while len(self._values) > self._maximum:
                    self._values.popitem(last=False)
            return value
        finally:
            with self._lock:
                del self._making[key]
            made.set()

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
