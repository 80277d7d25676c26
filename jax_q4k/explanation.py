"""Explains which kernels a program runs, with which Configs and why, without running it."""

from __future__ import annotations

import functools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.extend

from ptx_kernels.devices import DEVICES, Device, Target, find_device

from . import native
from .arrays import QuantizedArray
from .custom_call import simulate_p
from .ops.backends import BACKENDS, decide
from .ops.gpu import device as device_here
from .ops.op import OPS, Op
from .ops.prefetch import without_prefetch
from .sharding.gathers import Gather, of_call, recorded
from .sharding.layout import axes_of

if TYPE_CHECKING:
    from ptx_kernels.machine_code.report import Figures
    from ptx_kernels.ptx import Kernel
    from ptx_kernels.tuning import Choice

_LAYOUT_ONLY = (
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "slice",
    "jit",
    "optimization_barrier",
)


@dataclass(frozen=True)
class Call:
    """One distinct call of an operation in the program: its types, implementation and kernels.

    Attributes:
      name: name of the primitive.
      count: executions in the program. A scan counts each iteration, a `while` loop one.
      operands, results: types such as `f32[1,4096]`, or `Q4_K[4096,4096]` for packed arrays.
      params: parameters of the primitive.
      implementation: name of the implementation that runs; `why` says who selected it.
      runnable: whether the platform supports it; if not, lowering raises UnavailableError.
      kernels: launches of `ptx` and `sim`, in order; empty for other implementations.
      handlers: FFI calls of `native`, in order; empty for other implementations.
      figures: machine-code figures and predicted time of each kernel; empty unless requested.
      chosen: Configs of these kernels, and why they were chosen.
      xla: counts of the XLA operations around the kernels (for implementation `xla`, of all).
      otherwise: the other implementations and their requirements.
    """

    name: str
    count: int
    operands: tuple[str, ...]
    results: tuple[str, ...]
    params: dict[str, Any]
    implementation: str
    why: str
    runnable: bool
    kernels: tuple[Kernel, ...]
    handlers: tuple[str, ...]
    figures: tuple[Figures, ...]
    chosen: tuple[Choice, ...]
    xla: dict[str, int]
    otherwise: tuple[str, ...]

    def __str__(self) -> str:
        params = ", ".join(f"{name}={value}" for name, value in self.params.items())
        lines = [
            f"{self.name} x{self.count}: {', '.join(self.operands)} -> {', '.join(self.results)}",
            f"  {params}" if params else "",
            f"  {self.implementation}: {self.why}",
            *map(_launch, self.kernels, self.figures or (None,) * len(self.kernels)),
            *(f"  call {name}: kernels for {native.kernels()}" for name in self.handlers),
            *(f"  chosen {choice}" for choice in self.chosen),
            "  XLA: " + (", ".join(f"{n} x{c}" for n, c in self.xla.items())) if self.xla else "",
            *(f"  otherwise {text}" for text in self.otherwise),
        ]
        return "\n".join(
            textwrap.fill(line, 118, subsequent_indent=" " * 6) for line in lines if line
        )


@dataclass(frozen=True)
class Explanation:
    """All distinct calls of packed operations in a program, in order; `str` is a report.

    Attributes:
      target: device whose tuning applies.
      gathers: operands that are gathered from several devices, with counts.
    """

    platform: str
    target: Target
    calls: tuple[Call, ...]
    gathers: tuple[tuple[Gather, int], ...] = ()

    @property
    def device(self) -> str:
        """Name of the device, as the CUDA driver reports it."""
        return self.target.name

    @property
    def launches(self) -> int:
        """Number of launches of PTX kernels in the program; a `while` loop counts one iteration.

        XLA merges equal launches.
        """
        return sum(call.count * len(call.kernels) for call in self.calls)

    def __str__(self) -> str:
        if self.platform == "cuda":
            where = f"cuda ({self.device}: {self.target})"
        else:
            says = f", set by ${native.VARIABLE}" if native.named() else ""
            where = f"cpu ({native.problem() or f'kernels for {native.kernels()}{says}'})"
        total = sum(call.count for call in self.calls)
        head = (
            f"on {where}: {len(self.calls)} kinds of calls, {total} calls, "
            f"{self.launches} launches of PTX kernels"
        )
        gathers = "\n".join(f"  {each}, x{count}" for each, count in self.gathers)
        tail = [f"gathered from several devices:\n{gathers}"] if gathers else []
        return "\n\n".join([head, *map(str, self.calls), *tail])


def explain(
    function: Callable[..., Any],
    *args: Any,
    platform: str | None = None,
    device: str | None = None,
    predict: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Explains which kernels `function(*args, **kwargs)` runs on a platform, and why.

    Traces the function and finds the operations of jax_q4k in it, also inside `jit`, `scan`,
    `while` and `cond`. Nothing runs, and no GPU is needed. If an argument is split over automatic
    axes of a mesh, also compiles the function for that mesh, because XLA's partitioner decides what
    is gathered.

        print(jq.explain(jq.matmul, x, w, platform="cuda"))

    Args:
      args, kwargs: arguments of the function; a `jax.ShapeDtypeStruct` can replace an array.
        Keyword arguments that are not arrays are passed on unchanged.
      platform: `cuda` or `cpu`; None means the default platform here.
      device: device whose tuning applies, by the driver's name (`NVIDIA H200`); None means the
        local GPU, or an H200 if there is none. For an unknown name the report says which device's
        number of multiprocessors was assumed.
      predict: whether the cost model (`ptx_kernels.machine_code.model`) predicts each launch's
        time, from ptxas's machine code.

    Raises:
      ValueError: an unknown platform, or a device that the cost model does not know. TypeError: a
        device that is not a string. ToolNotFoundError: `predict` without ptxas and nvdisasm.
        TuningTableError: the user's tuning table is malformed.
    """
    from ptx_kernels import tuning

    if platform not in (None, "cuda", "cpu"):
        raise ValueError(f"platform={platform!r} must be cuda, cpu or None")
    gpu = jax.default_backend() == "gpu" if platform is None else platform == "cuda"
    target = device_here() if device is None else tuning.target(device)
    model = find_device(target.name) if predict else None
    if predict and model is None:
        raise ValueError(
            f"device={target.name!r} must be one of {', '.join(DEVICES)}, for predict=True"
        )
    arrays = {name: value for name, value in kwargs.items() if _is_arrays(value)}
    options = {name: value for name, value in kwargs.items() if name not in arrays}
    traced = jax.make_jaxpr(functools.partial(function, **options))(*args, **arrays)
    counts: Counter[str] = Counter()
    gathers: Counter[Gather] = Counter()
    first: dict[str, Any] = {}
    for equation, times in _equations(traced.jaxpr):
        for each in of_call(equation):
            gathers[each] += times
        if equation.primitive in OPS:
            key = f"{equation.primitive} {equation.params} {[v.aval for v in equation.invars]}"
            counts[key] += times
            first.setdefault(key, equation)
    with tuning.on_device(target):
        calls = tuple(_call(equation, counts[key], gpu, model) for key, equation in first.items())
    if any(map(_automatic, jax.tree.leaves((args, arrays)))):
        with recorded() as found:
            jax.jit(functools.partial(function, **options)).lower(*args, **arrays).compile()
        gathers.update(found)
    return Explanation("cuda" if gpu else "cpu", target, calls, tuple(gathers.items()))


def _automatic(leaf: Any) -> bool:
    """Returns True for an array that is split over automatic axes of a mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return False
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    split = (axis for entry in sharding.spec for axis in axes_of(entry))
    return any(kinds[axis] == jax.sharding.AxisType.Auto for axis in split)


def _is_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves
    )


def _call(equation: Any, count: int, gpu: bool, model: Device | None) -> Call:
    from ptx_kernels import tuning

    op: Op = OPS[equation.primitive]
    params = dict(equation.params)
    tree, asked = params.pop("tree"), params.pop("implementation")
    platform = "cuda" if gpu else "cpu"
    device = device_here(asked=asked)
    decision = decide(op, asked.implementation, platform, device)
    avals = [v.aval for v in equation.invars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with tuning.on_device(device), tuning.recorded() as made:
        inner = jax.make_jaxpr(op.inspected(decision.implementation, tree, params))(*shapes)
    operands, params = without_prefetch(avals, tree, params)
    kernels, handlers, xla = [], [], Counter[str]()
    for part, times in _equations(inner.jaxpr):
        if part.primitive is simulate_p:
            kernels += [part.params["kernel"]] * times
        elif part.primitive.name == "ffi_call":
            handlers += [part.params["target_name"]] * times
        elif part.primitive.name not in _LAYOUT_ONLY:
            xla[part.primitive.name] += times
    return Call(
        name=op.name,
        count=count,
        operands=tuple(_operands(jax.tree.unflatten(tree, operands))),
        results=tuple(v.aval.str_short(short_dtypes=True) for v in equation.outvars),
        params=params,
        implementation=decision.implementation,
        why=decision.why + (f", but {decision.problem}" if decision.problem else ""),
        runnable=decision.error is None,
        kernels=tuple(kernels),
        handlers=tuple(handlers),
        figures=_figures(kernels, model) if model else (),
        chosen=tuple(dict.fromkeys(made)) if kernels else (),
        xla=dict(xla),
        otherwise=tuple(
            _otherwise(name, platform) for name in BACKENDS if name != decision.implementation
        ),
    )


def _figures(kernels: list[Kernel], model: Device) -> tuple[Figures, ...]:
    # imported here, because few callers need machine code
    from ptx_kernels.machine_code.report import figures

    return tuple(figures(kernel, model.arch, device=model) for kernel in kernels)


def _operands(operands: Any) -> Iterator[str]:
    """Yields the operands' types, such as `f32[1,4096]`, or `Q4_K[4096,4096]` for packed ones."""
    for operand in jax.tree.leaves(operands, is_leaf=_is_packed):
        if _is_packed(operand):
            yield f"{operand.format}[{','.join(map(str, operand.shape))}]"
        else:
            yield operand.str_short(short_dtypes=True)


def _is_packed(operand: Any) -> bool:
    return isinstance(operand, QuantizedArray)


def _otherwise(implementation: str, platform: str) -> str:
    where = BACKENDS[implementation].platforms
    needed = "" if platform in where else f" and a {where[0]} device"
    if implementation == "native" and not native.available():
        needed += f", and its library: {native.problem()}"
    return f"{implementation}: needs jax_q4k.implementation({implementation!r}){needed}"


def _launch(kernel: Kernel, figures: Figures | None) -> str:
    blocks, threads = (
        re.sub("(x1)+$", "", "x".join(map(str, sizes))) for sizes in (kernel.grid, kernel.block)
    )
    shared = (
        f", {kernel.dynamic_shared_bytes} bytes of dynamic shared memory"
        if kernel.dynamic_shared_bytes
        else ""
    )
    if figures:
        shared += f", {figures.shared_split >> 10} KB of shared memory per multiprocessor"
    predicted = ""
    if figures and figures.seconds is not None:
        from ptx_kernels.devices import DEVICES
        from ptx_kernels.machine_code.model import MEASURED

        low, high = (end * figures.seconds * 1e6 for end in MEASURED)
        low = max(low, figures.nbytes / DEVICES[figures.device].datasheet_bandwidth * 1e6)
        predicted = (
            f"; predicted {figures.seconds * 1e6:.1f} us ({low:.1f} to {high:.1f}), "
            f"{figures.bound} bound ({figures.device})"
        )
    l2 = f", prefetches {kernel.ahead_bytes / 1e6:.1f} MB" if kernel.ahead_bytes else ""
    return f"  launch {kernel.name}: {blocks} blocks of {threads} threads{shared}{l2}{predicted}"


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields each equation of a jaxpr and its nested jaxprs, and how often the equation runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        runs = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)  # the jaxpr of a closed one
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, times * runs)
