"""Converts generation_config.json to GGUF's `general.sampling.*` keys."""

from __future__ import annotations

from typing import Any

from ...sampling.file_defaults import KEYS
from ...support.json_fields import JSONFields
from ...support.warn import warn

#: Defaults of transformers for sampled generation.
_DEFAULTS = {KEYS["temperature"]: 1.0, KEYS["top_k"]: 50}
#: Setting that changes the output of transformers, and that `Sampling` or GGUF's keys lack ->
#: values that disable it, besides null, [] and {}.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "token_healing": (False,),
    "watermarking_config": (),
}
#: The same, for settings that apply only with do_sample.
_NOT_APPLIED_TO_DRAWS: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "typical_p": (1,),
}


def sampling(fields: JSONFields) -> dict[str, Any]:
    """Returns GGUF metadata with the recommended sampling parameters; {} if the file has none.

    Warns of settings that are not applied. As in transformers, `do_sample: false` and a repetition
    penalty without `do_sample` select greedy decoding.

    Args:
      fields: generation_config.json, or config.json if that is missing.
    """
    draws = fields.boolean("do_sample", None)
    _warn(fields, _NOT_APPLIED | (_NOT_APPLIED_TO_DRAWS if draws else {}))
    numbers = {name: _number(fields, name) for name in KEYS if fields.value(name, None) is not None}
    if draws:
        return _DEFAULTS | {KEYS[name]: value for name, value in numbers.items()}
    penalty = numbers.get("repetition_penalty", 1.0)
    if draws is None and penalty == 1:
        return {}
    keys: dict[str, Any] = {KEYS["temperature"]: 0.0}
    return keys if penalty == 1 else keys | {KEYS["repetition_penalty"]: penalty}


def _number(fields: JSONFields, name: str) -> int | float:
    value = fields.value(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        fields.fail(name, f"{value!r:.100} must be a number")
    return int(value) if name == "top_k" else float(value)


def _warn(fields: JSONFields, settings: dict[str, tuple[Any, ...]]) -> None:
    asked = {key: fields.value(key, None) for key in settings}
    found = [
        f"{key}={value!r:.60}"
        for key, value in asked.items()
        if value not in (None, [], {}, *settings[key])
    ]
    if found:
        message = f"{', '.join(found)}: ignored here, but applied by transformers"
        warn(f"{fields.file}: {message}")
