"""What every primitive shares: binding, vmap, one lowering per platform and implementation, linear
derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ptx_kernels import choices
from ptx_kernels.devices import REFERENCE

from .. import native
from ..custom_call import KernelCall, launch_ptx, launch_simulated
from ..errors import UnavailableError
from ..implementation import check_selection, current_selection

Arrays = Sequence[jax.Array]
Params = dict[str, Any]

#: Every operation, by its primitive.
OPS: dict[jax.extend.core.Primitive, Op] = {}


class Op:
    """A JAX primitive with a plain JAX reference and a composition of PTX kernels.

    Args:
      name: the primitive's name in jaxprs.
      abstract_eval: `(*avals, **params)` -> list of ShapedArray. Raises for shapes and dtypes that
        don't fit.
      reference: `(*arrays, **params)` -> list of arrays, in plain JAX: the meaning of the
        operation.
      kernels: `(launch, *arrays, **params)` -> list of arrays: the same by PTX kernels.
        `launch(kernel, *operands)` runs one; plain JAX may stand between launches.
      native: `(*arrays, **params)` -> list of arrays, by handlers of `jax_q4k.native`; None: XLA
        compiles the reference well enough for a CPU.
    """

    def __init__(
        self,
        name: str,
        *,
        abstract_eval: Callable[..., list[jax.core.ShapedArray]],
        reference: Callable[..., Arrays],
        kernels: Callable[..., Arrays],
        native: Callable[..., Arrays] | None = None,
    ) -> None:
        self.name = name
        self.primitive = jax.extend.core.Primitive(name)
        self.primitive.multiple_results = True
        self.reference = reference
        self._kernels = kernels
        self.native = native or reference
        self.has_native = native is not None

        @self.primitive.def_abstract_eval
        def _(*avals: Any, implementation: str | None, **params: Any) -> list[jax.core.ShapedArray]:
            return abstract_eval(*avals, **params)

        @self.primitive.def_impl
        def _(*arrays: jax.Array, **params: Any) -> Arrays:
            return _compiled(self.primitive, tuple(sorted(params.items())))(*arrays)

        OPS[self.primitive] = self
        ad.primitive_jvps[self.primitive] = self._no_derivative  # until one is defined
        self._mapped: Callable[..., Any] = self._map
        batching.primitive_batchers[self.primitive] = self._mapped
        for platform in ("cpu", "cuda", None):  # None: any other
            mlir.register_lowering(
                self.primitive, self._lowering(platform or "other"), platform=platform
            )

    def bind(
        self, *arrays: jax.Array, implementation: str | None, **params: Any
    ) -> list[jax.Array]:
        """Binds the primitive; `implementation` None takes what `jax_q4k.implementation`
        selected.
        """
        chosen = (
            check_selection(implementation).implementation or current_selection().implementation
        )
        return self.primitive.bind(*arrays, implementation=chosen, **params)

    def _no_derivative(
        self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} has no derivative: keep gradients out of its operands by jax.lax.stop_gradient, "
            "or compute it in plain JAX"
        )

    def define_derivative(
        self, *, tangent: Callable[[Params], Params], transpose: Callable[[Params], Params]
    ) -> None:
        """Makes an operation of one result differentiable in its first operand, in which it is
        linear.

        Both derivatives are the operation itself with other parameters, so that they have
        derivatives in turn. The
        other operands are constants of it: uint8 planes, say, whose tangents are always zero.

        Args:
          tangent: parameters -> those of the result's tangent as a function of the first operand's.
          transpose: parameters that `tangent` gave -> those of the transposed map.
        """

        def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
            # JAX asks for a tangent only if some operand has one, and only the first can.
            out = self.primitive.bind(*primals, **params)
            return out, self.primitive.bind(tangents[0], *primals[1:], **tangent(params))

        def transposed(cotangents: Sequence[Any], _: Any, *others: Any, **params: Any) -> list[Any]:
            cotangent = ad.instantiate_zeros(cotangents[0])
            (out,) = self.primitive.bind(cotangent, *others, **transpose(tangent(params)))
            return [out, *(None for _ in others)]

        ad.primitive_jvps[self.primitive] = jvp
        ad.primitive_transposes[self.primitive] = transposed

    def define_derivative_of(self, composition: Callable[..., Arrays]) -> None:
        """Makes the operation's derivative that of `composition(*arrays, implementation=...,
        **params)`.

        A composition of differentiable operations with the same meaning; its value is not used, so
        that what is computed does not depend on whether somebody asks for a derivative.
        """

        def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
            moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

            def function(*arrays: Any) -> Arrays:
                varied = dict(zip(moving, arrays, strict=True))
                return composition(
                    *(varied.get(i, primal) for i, primal in enumerate(primals)), **params
                )

            along = [primals[i] for i in moving], [tangents[i] for i in moving]
            return self.primitive.bind(*primals, **params), jax.jvp(function, *along)[1]

        ad.primitive_jvps[self.primitive] = jvp

    def define_vmap_of(self, composition: Callable[..., Arrays]) -> None:
        """Makes `vmap` that of `composition(*arrays, **params)`, which is plain JAX with the same
        meaning.
        """

        def mapped(
            arrays: Sequence[Any],
            axes: Sequence[int | None],
            *,
            implementation: str | None,
            **params: Any,
        ) -> tuple[list[Any], list[int]]:
            function = functools.partial(composition, **params)
            out = list(jax.vmap(function, in_axes=tuple(axes))(*arrays))
            return out, [0] * len(out)

        self._mapped = batching.primitive_batchers[self.primitive] = mapped

    def define_vmap_of_rows(self, row_operands: Callable[[Params], int] = lambda _: 1) -> None:
        """Makes `vmap` over rows alone a single call on the rows of all examples, (batch * rows,
        k).

        Any other stays what it was before. row_operands: parameters -> how many operands, the first
        ones, have rows.
        """

        def rows(
            arrays: Sequence[Any], axes: Sequence[int | None], **params: Any
        ) -> tuple[list[Any], list[int]]:
            count = row_operands(params)
            (batch,) = {
                a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None
            }
            if not batch or any(
                axis is not None for axis in axes[count:]
            ):  # no kernel has zero rows
                return self._mapped(arrays, axes, **params)
            with_rows = [
                jnp.broadcast_to(a, (batch, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
                for a, axis in zip(arrays[:count], axes[:count], strict=True)
            ]
            m = with_rows[0].shape[1]
            out = self.primitive.bind(
                *(a.reshape(batch * m, a.shape[-1]) for a in with_rows), *arrays[count:], **params
            )
            return [y.reshape(batch, m, *y.shape[1:]) for y in out], [0] * len(out)

        batching.primitive_batchers[self.primitive] = rows

    def _map(
        self, arrays: Sequence[Any], axes: Sequence[int | None], **params: Any
    ) -> tuple[list[Any], list[int]]:
        """`vmap`: one example after the other. `axes`: the mapped axis of each array, None where it
        has none.
        """
        mapped = [
            jnp.moveaxis(a, axis, 0)
            for a, axis in zip(arrays, axes, strict=True)
            if axis is not None
        ]

        def example(parts: list[Any]) -> Any:
            left = iter(parts)
            return self.primitive.bind(
                *(a if axis is None else next(left) for a, axis in zip(arrays, axes, strict=True)),
                **params,
            )

        out = jax.lax.map(example, mapped)
        return out, [0] * len(out)

    def _lowering(self, platform: str) -> Callable[..., Any]:
        def rule(
            ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
        ) -> Any:
            chosen = implementation or default_implementation(platform)
            if implementation is None and platform == "cpu" and self.has_native and chosen == "xla":
                native.warn_if_unavailable()
            function = self._function(chosen, platform, params)
            with choices.on_device(device()):
                return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

        return rule

    def composition(self, *arrays: Any, **params: Any) -> Arrays:
        """The operation by its kernels, each launched in the simulator: what `ptx` and `sim` run,
        to look at.
        """
        return self._kernels(launch_simulated, *arrays, **params)

    def _function(
        self, implementation: str, platform: str, params: dict[str, Any]
    ) -> Callable[..., Arrays]:
        if implementation == "xla":
            return functools.partial(self.reference, **params)
        if implementation == "native":
            if platform != "cpu":
                raise UnavailableError(
                    f"{self.name}: implementation 'native' runs on the CPU only; use 'ptx' or 'xla'"
                )
            if not native.available():
                raise UnavailableError(f"{self.name}: implementation 'native': {native.problem()}")
            return functools.partial(self.native, **params)
        if implementation == "ptx" and platform != "cuda":
            raise UnavailableError(
                f"{self.name}: implementation 'ptx' needs a CUDA device; "
                "'sim' runs the same kernels on the CPU, 'native' kernels of its own, 'xla' plain JAX"
            )
        if implementation == "sim" and platform != "cpu":
            raise UnavailableError(
                f"{self.name}: implementation 'sim' runs on the CPU only; on a CUDA device use 'ptx' or 'xla'"
            )
        launch: KernelCall = launch_ptx if implementation == "ptx" else launch_simulated
        return functools.partial(self._kernels, launch, **params)


def default_implementation(platform: str) -> str:
    """What runs where nobody asked for an implementation: on `cuda`, on `cpu`, on any other
    platform.
    """
    if platform == "cuda":
        return "ptx"
    return "native" if platform == "cpu" and (native.available() or native.named()) else "xla"


def device() -> choices.Target:
    """The GPU that programs run on, with the multiprocessors that it reports; without one, what
    kernels are tuned for.

    Of several, the first: a program is lowered once for all of them.
    """
    if jax.default_backend() != "gpu":
        return choices.target(REFERENCE.name)
    gpu = jax.devices()[0]
    return choices.target(gpu.device_kind, getattr(gpu, "core_count", None))


@functools.lru_cache(maxsize=4096)
def _compiled(
    primitive: jax.extend.core.Primitive, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Arrays]:
    """What an eager call runs: the primitive alone, compiled."""
    return jax.jit(functools.partial(primitive.bind, **dict(params)))
