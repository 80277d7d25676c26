"""Gated delta net kernels: linear attention whose recurrent state decays and corrects itself."""

from .columns import StateConfig
from .family import GATED_DELTA_RULE, GATED_DELTA_STEP
from .gated_delta_rule import GatedDeltaRuleConfig, gated_delta_rule
from .gated_delta_step import GatedDeltaStepConfig, gated_delta_step
from .rules import gated_delta_rule_rule, gated_delta_step_rule

__all__ = [
    "GATED_DELTA_RULE",
    "GATED_DELTA_STEP",
    "GatedDeltaRuleConfig",
    "GatedDeltaStepConfig",
    "StateConfig",
    "gated_delta_rule",
    "gated_delta_rule_rule",
    "gated_delta_step",
    "gated_delta_step_rule",
]
