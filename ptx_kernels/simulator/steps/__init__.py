"""Compiles instructions to steps: functions with an instruction's effect on a frame's lanes."""
