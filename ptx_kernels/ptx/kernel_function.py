"""`@kernel`: decorator for functions that write PTX with a `Builder`; calls return the `Kernel`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .arguments import call_signature, checked, grouped
from .builder import Builder
from .errors import KernelError
from .module import Kernel
from .oldest import COMMON, LEAST, current_oldest
from .prefetch import Prefetch, ask_ahead


def kernel(function: Callable[..., None]) -> Callable[..., Kernel]:
    """Decorator: turns `f(k, *, ...)`, which emits a kernel, into `f(...)`, which returns it built.

    The result is a `Kernel`, cached. Arguments must have the types that the function declares (see
    `arguments.checked`); those of a `Group` are passed by field. Every kernel also takes
    `prefetch`: matrices that it prefetches at its end, passed as operands after its own; and
    `oldest`: the oldest architecture (75 for sm_75) that must run it. None means that of the
    `built_for` context.
    """

    signature = call_signature(function)

    @functools.cache
    def build(
        arguments: tuple[tuple[str, Any], ...], prefetch: tuple[Prefetch, ...], oldest: int
    ) -> Kernel:
        builder = Builder(function.__name__, function.__code__, oldest)
        if prefetch:
            builder.behind_loads = functools.partial(ask_ahead, builder, prefetch)
        function(builder, **grouped(function, dict(arguments)))
        builder.loads_end()
        named = dict(arguments) | ({"prefetch": prefetch} if prefetch else {})
        named |= {"oldest": oldest} if oldest != COMMON else {}
        return replace(builder.finish(), family=function.__name__, arguments=named)

    @functools.wraps(function)
    def wrapper(
        *, prefetch: tuple[Prefetch, ...] = (), oldest: int | None = None, **arguments: Any
    ) -> Kernel:
        oldest = current_oldest() if oldest is None else min(oldest, COMMON)
        if oldest < LEAST:
            raise KernelError(f"oldest={oldest} must be at least {LEAST}, for sm_{LEAST}")
        return build(tuple(checked(signature, arguments).items()), prefetch, oldest)

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper
