"""Every operation under every transform: correct or refused, as stated in docs/transforms.md."""

from __future__ import annotations

import inspect
import re

import jax
import pytest
from support.helpers import nmse
from support.implementations import NATIVE
from support.transforms.cells import LOWERED, RUNS, TOLERANCES, lowered, oracle, results, status
from support.transforms.operations import CASES, DTYPES, Refusal
from support.transforms.transforms import TRANSFORMS, loss

import jax_q4k as jq
from jax_q4k.ops.op import OPS
from tools import transforms

#: Public functions that take no arrays.
NO_OPERATIONS = {
    "current_selection",
    "default_implementation",
    "explain",
    "explaining_loads",
    "from_planes",
    "implementation",
    "is_quantized",
    "page_dtype",
    "selected",
}


#: Operations whose transforms quick tests reach by others: of the router and experts by `route` and
#: `expert_mlp`, of the delta rule by `gated_delta_rule` and its own tests.
LARGE = (
    "routed_mlp",
    "routed_mlp with a shared expert",
    "gated_delta_rule in chunks",
    "gated_delta_step",
)


def each(names):
    """Parametrizes over cases; the module scope makes pytest run a case's tests in sequence."""
    return pytest.mark.parametrize("name", names, scope="module")


@pytest.mark.slow(
    "compiles each operation for each implementation",
    quick=[f"{name}-*-first" for name in CASES if name not in LARGE],
)
@pytest.mark.parametrize(
    "implementation, dtype, part",
    [pytest.param(*run, marks=NATIVE.marks if run[0] == "native" else ()) for run in RUNS],
)
@each(CASES)
def test_supported_transforms_are_right(name, implementation, dtype, part, pytestconfig):
    if dtype != DTYPES[0] and not CASES[name].activations:
        pytest.skip("no operand has another dtype")
    asked = RUNS[implementation, dtype, part]
    if part == "some" and pytestconfig.getoption("--tier") == "full":
        # the simulator runs in callbacks, which JAX cannot serialize
        asked = [t for t in TRANSFORMS if (implementation, t) != ("sim", "export")]
    right = [t for t in asked if status(CASES[name], t) is True]
    if not right:
        pytest.skip("this tier asks for none of the transforms that it has")
    wrong, wants = [], oracle(name, dtype)
    found = results(CASES[name], right, implementation, dtype)
    assert found.keys() == set(right)
    for transform, got in found.items():
        for a, b in zip(got, wants[transform], strict=True):
            if not (error := nmse(a, b)) <= TOLERANCES[dtype]:
                wrong.append(f"{transform}: {error:.1e}")
    assert not wrong


@pytest.mark.slow("lowers each transform", quick=[name for name in CASES if name not in LARGE])
@each(CASES)
def test_kernels_for_cuda(name):
    """Lowers each transform's program, which must contain the operation's kernels, if any."""
    case = CASES[name]
    text = lowered(case, [t for t in LOWERED if status(case, t) is True])
    with jq.implementation("ptx"):
        equations = jax.make_jaxpr(case.call)(*case.operands).jaxpr.eqns
    ours = [OPS[e.primitive] for e in equations if e.primitive in OPS]
    # XLA handles floats and groups of experts
    plain = name.startswith("expert_matmul of floats") or name == "route"
    kernels = any(op.ptx for op in ours) and not plain
    assert ours and kernels == ("__gpu$xla.gpu.ptx" in text)


@each(CASES)
def test_unsupported_transforms_are_refused(name):
    case, accepted = CASES[name], []
    for title, transform in TRANSFORMS.items():
        refusal = status(case, title)
        if not isinstance(refusal, Refusal):
            continue
        try:
            jax.eval_shape(transform.of(case, case.call), *case.operands)
        except refusal.error as error:
            if refusal.message in str(error):
                continue
        accepted.append(title)
    assert not accepted


@each([name for name, case in CASES.items() if case.differentiable])
def test_oracles_derivatives_are_finite_differences(name):
    found, said = oracle(name, "float32")["finite difference"]
    assert said == pytest.approx(found, rel=1e-7, abs=1e-9)


def test_every_public_operation_is_here():
    public = {name for name in jq.__all__ if inspect.isfunction(getattr(jq, name))}
    assert {case.operation for case in CASES.values()} == public - NO_OPERATIONS


def test_the_document_is_up_to_date():
    assert transforms.PAGE.read_text() == transforms.page(), "run python -m tools.transforms"


def test_packed_weights_have_no_gradient():
    """Operations with packed weights raise JAX's error for integers."""
    message = re.escape("grad requires real- or complex-valued inputs (input dtype that is a sub-")
    for case in CASES.values():
        for at, operand in enumerate(case.operands):
            if not jq.is_quantized(operand):
                continue
            with pytest.raises(TypeError, match=message + ".*uint8"):
                jax.grad(lambda *a, case=case: loss(case.call(*a)), argnums=at)(*case.operands)
