"""Table rows of sm_90 instructions: mbarriers, bulk copies, proxy fences.

PTX ISA 9.7.13.15, 9.7.9.25.4 and 9.7.13.5 define them. The first mbarrier rows are for sm_80.
"""

from __future__ import annotations

from .machine_row import At, From, Number, Operands, To, Words, define_machine
from .row import SM80, Version

_SM90: Version = ((8, 0), 90)
_TRY: Version = ((7, 8), 90)
_SHARED = At("shared")

# --- mbarriers ---

_OBJECT = "{.order}{.scope}{.space}.b64"
_WORDS = {
    "order": "acquire|release|relaxed",
    "scope": "cta|cluster",
    "space": "shared|shared::cta",
}
_STATE = To("u64", sink=True, needs=((7, 1), 80))
_PARITY, _PHASE = From("u32"), From("u64")
_HINT = From("u32", optional=True)

define_machine("mbarrier.init", _OBJECT, (_SHARED, From("u32")), needs=SM80, **_WORDS)
define_machine("mbarrier.inval", _OBJECT, (_SHARED,), needs=SM80, **_WORDS)
define_machine("mbarrier.expect_tx", _OBJECT, (_SHARED, From("u32")), needs=_SM90, **_WORDS)
define_machine(
    "mbarrier.arrive",
    _OBJECT,
    (_STATE, _SHARED, From("u32", optional=True, needs=_TRY)),
    needs=SM80,
    **_WORDS,
)
define_machine(
    "mbarrier.arrive.expect_tx", _OBJECT, (_STATE, _SHARED, From("u32")), needs=_SM90, **_WORDS
)
define_machine("mbarrier.test_wait", _OBJECT, (To("pred"), _SHARED, _PHASE), needs=SM80, **_WORDS)
define_machine(
    "mbarrier.test_wait.parity",
    _OBJECT,
    (To("pred"), _SHARED, _PARITY),
    needs=((7, 1), 80),
    **_WORDS,
)
define_machine(
    "mbarrier.try_wait", _OBJECT, (To("pred"), _SHARED, _PHASE, _HINT), needs=_TRY, **_WORDS
)
define_machine(
    "mbarrier.try_wait.parity", _OBJECT, (To("pred"), _SHARED, _PARITY, _HINT), needs=_TRY, **_WORDS
)

# --- bulk copies ---

_POLICY = From("b64")


def _load(words: Words) -> Operands:
    policy = (_POLICY,) if words["hint"] else ()
    return _SHARED, At("global"), From("u32"), _SHARED, *policy


def _store(words: Words) -> Operands:
    return At("global"), _SHARED, From("u32"), *((_POLICY,) if words["hint"] else ())


_HINTED = {"hint": "L2::cache_hint"}
for _to in ("shared::cluster", "shared::cta"):
    define_machine(
        f"cp.async.bulk.{_to}.global",
        ".mbarrier::complete_tx::bytes{.hint}",
        _load,
        needs=_SM90,
        **_HINTED,
    )
define_machine(
    "cp.async.bulk.global", ".shared::cta.bulk_group{.hint}", _store, needs=_SM90, **_HINTED
)
define_machine(
    "cp.async.bulk.prefetch.L2",
    ".global{.hint}",
    lambda words: (At("global"), From("u32"), *((_POLICY,) if words["hint"] else ())),
    needs=_SM90,
    **_HINTED,
)
define_machine("cp.async.bulk.commit_group", "", (), needs=_SM90)
define_machine(
    "cp.async.bulk.wait_group",
    "{.read}",
    (Number("waits for a number of groups"),),
    needs=_SM90,
    read="read",
)

# --- fences ---

define_machine("fence.proxy.async", "{.space}", (), needs=_SM90, space="shared::cta")
define_machine("fence.mbarrier_init", ".release.cluster", (), needs=_SM90)
