"""Every kernel for Turing (sm_75): results of all subjects, and ptxas."""

from __future__ import annotations

import fnmatch

import pytest
from support.assembled import assemble_each
from support.subjects import SUBJECTS, Subject, subject

from ptx_kernels.ptx import KernelError

#: Subjects whose arguments ask for what sm_75 lacks: pattern -> the error.
ABSENT = {
    "gemm-split": "needs sm_90",  # a cluster
    "attention-cluster*": "needs sm_90",
    "causal_attention": "needs sm_80",  # bf16 on tensor cores
    "causal_attention-window": "needs sm_80",
    "causal_attention-pages": "needs sm_80",
    "attention-tensor_cores-bf16": "needs sm_80",
    "gated_gemm": "111872 bytes of shared memory, of 65536",
    "gemm-Q6_K": "72064 bytes of shared memory, of 65536",
}
PRESENT = [
    label for label in SUBJECTS if not any(fnmatch.fnmatchcase(label, name) for name in ABSENT)
]


def built(label: str) -> Subject:
    return subject(label, 75)


@pytest.mark.slow(
    "simulates each subject",
    quick=["gemm-Q4_K-m8", "rms_norm-q8_1", "route-softmax", "append-bf16", "*-tensor_cores-f16"],
)
@pytest.mark.parametrize("label", PRESENT)
def test_results_hold(label: str) -> None:
    assert built(label).passes()


@pytest.mark.parametrize("label", [label for label in SUBJECTS if label not in PRESENT])
def test_what_it_lacks_is_refused(label: str) -> None:
    (message,) = {error for name, error in ABSENT.items() if fnmatch.fnmatchcase(label, name)}
    with pytest.raises(KernelError, match=message):
        built(label)


@pytest.mark.slow("assembles all subjects")
def test_every_subject_assembles_without_spills() -> None:
    texts = {built(label).kernel.text: label for label in PRESENT}
    made = assemble_each(texts, ["sm_75"])
    assert len(made) == len(texts) > 100
    wrong = {
        texts[text]: found
        for (text, _), found in made.items()
        if found.spill_store_bytes or found.spill_load_bytes or found.stack_bytes
    }
    assert wrong == {}
