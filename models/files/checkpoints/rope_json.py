"""Converts rope parameters of config.json to GGUF metadata and frequency divisors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_q4k.gguf import REQUIRED

from ...architectures.base import QUERY_FACTOR, Architecture, CheckpointClass
from ...config import Config
from ...config.rope import CAPACITY_UNIT, exact_frequencies, frequencies, pair_of
from ...config.rope_fields import MIN_DIVISOR
from ...support.json_fields import JSONFields
from ...support.warn import warn
from . import config_keys

_ORIGINAL = "original_max_position_embeddings"
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
#: Divisor for pairs that do not rotate, as in llama.cpp's converter.
_STANDS_STILL = 1e30
_THETA = 10000.0


def _rope_section(fields: JSONFields, unknown: list[str]) -> JSONFields | None:
    """Returns the object `rope_scaling` or `rope_parameters` of config.json; None if absent.

    If both exist, returns `rope_scaling`, as in transformers 5. Adds their unknown keys to
    `unknown`. Raises CheckpointError if they differ.
    """
    keys = "rope_parameters", "rope_scaling"
    found = [inner for key in keys if (inner := fields.object(key)) is not None and inner.values]
    for section in found:
        of_types = (section.object(f"{kind}_attention") for kind in ("full", "sliding"))
        for inner in filter(None, (section, *of_types)):
            unknown += config_keys.check_rope(inner)
    if len(found) < 2:
        return found[0] if found else None
    new, early = (_renamed(section.values) for section in found)
    defaults = {"rope_theta": _THETA, "partial_rotary_factor": 1.0, "rope_type": "default"}
    for key, value in new.items():
        outer = fields.values.get(key) if key in ("rope_theta", "partial_rotary_factor") else None
        other = early.get(key, defaults.get(key) if outer is None else outer)
        if value != other:
            fields.fail("rope_scaling", f"differs from rope_parameters in {key}")
    return found[1]


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rope parameters without null values, and with `type` renamed to `rope_type`."""
    said = {key: value for key, value in values.items() if value is not None}
    early = said.pop("type", None)
    return said if early is None else {"rope_type": early, **said}


class Rope:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of transformers 4.

    There may be parameters per layer type; windowed layers then have only a theta.

    values: GGUF metadata. unknown: keys of rope parameters that are ignored.
    """

    def __init__(
        self, fields: JSONFields, architecture: Architecture, checkpoint: CheckpointClass
    ) -> None:
        self.unknown: list[str] = []
        rope = _rope_section(fields, self.unknown)
        if rope is None and checkpoint.rope_needed:
            fields.fail("rope_parameters", "is missing, as is rope_scaling")
        self._config, self._kind_of_decoder = fields, architecture
        self._outer = self._fields = fields if rope is None else rope
        if rope is not None and checkpoint.rope_by_type and rope.prefix.endswith("parameters."):
            rope.mapping("full_attention")
        self.values: dict[str, Any] = {}
        if rope is not None and (full := rope.object("full_attention")) is not None:
            self._read_local(self._fields.object("sliding_attention"))
            self._fields = full
        inner = "rope_theta" in self._fields
        name = "rope_theta" if inner else checkpoint.renamed.get("rope_theta", "rope_theta")
        theta = self._fields if inner else fields
        self.values["rope.freq_base"] = theta.number(name, _THETA)
        self._kind = "default" if rope is None else self._kind_of_scaling(checkpoint)
        part = 1.0 if self._kind == "proportional" else self._partial(checkpoint)
        self._dim = None if part == 1.0 else max(1, int(self._head_dim() * part))
        if self._dim is not None:  # transformers rounds an odd number up
            self.values["rope.dimension_count"] = self._dim + self._dim % 2
        if checkpoint.sections and (sections := self._sections(checkpoint, part)) is not None:
            self.values["rope.dimension_sections"] = sections
        if self._kind == "proportional" and "factor" not in self._fields:
            pass
        elif self._kind in ("linear", "proportional"):
            self.values |= {"rope.scaling.type": "linear", "rope.scaling.factor": self._factor()}
        elif self._kind == "dynamic":
            self._warn_of_dynamic()
        elif self._kind == "yarn":
            self.values |= self._yarn()
        elif self._kind == "longrope":
            self.values |= self._longrope()
        if architecture.latent and self._kind not in ("default", "yarn"):
            self.values |= self._latent_scale()
        if architecture.temperature:
            beta = self._fields.number("llama_4_scaling_beta", 0.0)
            self.values["attention.temperature_scale"] = beta
        elif "llama_4_scaling_beta" in self._fields:
            self._fields.fail("llama_4_scaling_beta", "is not supported")

    def divisors(self, config: Config) -> dict[str, np.ndarray]:
        """Returns GGUF name -> frequency divisors, float32 (rope_dim / 2,)."""
        odd = self._odd_divisors(config)
        if self._kind == "llama3":
            return {"rope_freqs.weight": self._llama3(config)}
        if self._kind == "proportional":
            return {"rope_freqs.weight": self._proportional(config)}
        if self._kind == "yarn":
            divisors = self._yarn_divisors(config)
            return {} if (divisors == 1).all() else {"rope_freqs.weight": divisors}
        if self._kind != "longrope":
            return {} if odd is None else {"rope_freqs.weight": odd}
        return {
            f"rope_factors_{name}.weight": self._factors(f"{name}_factor", config.rope_dim // 2)
            for name in ("long", "short")
        }

    def _warn_of_dynamic(self) -> None:
        """Warns that dynamic scaling, which begins beyond the context length, has no effect."""
        context = self._config.integer("max_position_embeddings", least=1, most=1 << 28)
        self._factor()
        warn(
            f"{self._fields.prefix}rope_type 'dynamic' has no effect within "
            f"max_position_embeddings={context}, where the context ends"
        )

    def _odd_divisors(self, config: Config) -> np.ndarray | None:
        """Returns divisors if an odd number of dimensions is rotated; None otherwise.

        transformers then divides exponents by the odd number, GGUF by the even one above it.
        """
        if self._dim is None or self._dim % 2 == 0:
            return None
        if self._kind not in ("default", "linear", "dynamic"):
            problem = f"rotates {self._dim} dimensions; with rope_type {self._kind!r}"
            self._fields.fail("partial_rotary_factor", f"{problem} the number must be even")
        rope = config.ropes[0]
        wanted = exact_frequencies(rope._replace(dim=self._dim), None)
        return (exact_frequencies(rope, None) / wanted).astype(np.float32)

    def _read_local(self, local: JSONFields | None) -> None:
        """Reads the rope base (theta) of windowed layers into `values`."""
        if local is None:
            return
        if (kind := local.string("rope_type", "default")) != "default":
            local.fail("rope_type", f"{kind[:100]!r} is not supported, expected 'default'")
        theta: Any = self._kind_of_decoder.local_rope_theta
        if theta == "global":
            theta = self._config.number("rope_theta", _THETA)
        theta = self._config.number("rope_local_base_freq", theta or _THETA)
        self.values["rope.freq_base_swa"] = local.number("rope_theta", theta)

    def _kind_of_scaling(self, checkpoint: CheckpointClass) -> str:
        early = self._fields.string("type", "default")  # old name of rope_type
        kind = self._fields.string("rope_type", early)
        if kind == "mrope" and checkpoint.sections:
            return "default"
        if kind == "su" or (kind == "yarn" and "long_factor" in self._fields):
            return "longrope"  # early Phi 3 files use the other names
        if kind not in _KINDS:
            problem = f"{kind[:100]!r} is not supported; supported: {', '.join(_KINDS)}"
            self._fields.fail("rope_type", problem)
        return kind

    def _partial(self, checkpoint: CheckpointClass) -> float:
        """Returns the rotated fraction of a head.

        Classes without partial rotation ignore the key. With a scaled rope transformers would
        compute too few frequencies for them, and fail.
        """
        key = "partial_rotary_factor"
        where = self._fields if key in self._fields else self._config
        part = where.number(key, 1.0)
        if checkpoint.partial_rope:
            return self._checked_part(where, key, part)
        if part != 1.0 and self._kind != "default":
            problem = f"is {part}, expected 1: {checkpoint.name} rotates whole heads"
            where.fail(key, f"{problem}, also with rope_type {self._kind!r}")
        return 1.0

    @staticmethod
    def _checked_part(where: JSONFields, key: str, part: float) -> float:
        if not 0 < part <= 1:
            where.fail(key, f"must be above 0 and up to 1, not {part}")
        return part

    def _head_dim(self) -> int:
        heads = self._config.integer("num_attention_heads", least=1)
        hidden = self._config.integer("hidden_size", least=1, most=1 << 24)
        return self._config.integer("head_dim", max(1, hidden // heads), least=1, most=1 << 24)

    def _sections(self, checkpoint: CheckpointClass, part: float) -> np.ndarray | None:
        """Returns the numbers of pairs rotated by time, height and width.

        None means that the architecture's numbers do, because text does not depend on them.
        """
        key, pairs = "mrope_section", int(self._head_dim() * part) // 2
        where = self._fields if key in self._fields else self._config
        sections = where.array(key, [] if checkpoint.free_sections else REQUIRED)
        counts = all(type(count) is int and 0 <= count < 1 << 24 for count in sections)
        if len(sections) == 3 and counts and sum(sections) == pairs:
            return np.array([*sections, 0], np.int32)
        if checkpoint.free_sections and counts and len(sections) in (0, 3):
            return None
        total = "" if checkpoint.free_sections else f", {pairs} in total"
        return where.fail(key, f"must be 3 counts of pairs{total}, not {sections!r:.100}")

    def _yarn(self) -> dict[str, Any]:
        """Returns YaRN metadata.

        `attn_factor` makes up for what the other keys cannot express of the magnitude, and
        `_yarn_divisors` for what they cannot express of the frequencies. llama.cpp multiplies all
        scores of MLA by the square of its magnitude, so that must be 1: queries have it instead.
        """
        get, named = self._fields, self._kind_of_decoder.yarn_keys
        latent = self._kind_of_decoder.latent
        factor = self._yarn_factor()
        growth = 0.1 * math.log(factor) if factor > 1 else 0.0
        log_multiplier = 0.0
        magnitude = 1 + growth
        both = get.number("mscale", 0.0), get.number("mscale_all_dim", 0.0)
        if all(both):
            magnitude = (1 + both[0] * growth) / (1 + both[1] * growth)
            log_multiplier = both[1] if named else 0.0
        if latent:  # GGUF stores 0.1 * mscale_all_dim, which also scales MLA's scores
            log_multiplier = float(np.float32(0.1 * both[1]))
        magnitude = get.number("attention_factor", magnitude)
        values = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": self._original(),
        }
        if named:
            values["rope.scaling.yarn_log_multiplier"] = log_multiplier
        self._betas = self._beta("beta_fast", 32.0), self._beta("beta_slow", 1.0)
        if named:
            keys = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"
            values |= dict(zip(keys, self._betas, strict=True))
        if latent:
            values |= self._magnitude(1.0 if log_multiplier else 1 / (1 + growth))
            return values | self._query_factor(magnitude)
        implied = (1 + growth) / (1 + log_multiplier * growth)
        return values | self._magnitude(magnitude / implied)

    def _query_factor(self, magnitude: float) -> dict[str, float]:
        """Returns metadata with the factor of rotated queries that replaces a rope's magnitude."""
        if not MIN_DIVISOR < magnitude <= 1e3:
            problem = f"must be above {MIN_DIVISOR} and up to 1e3, not {magnitude}"
            self._fields.fail("attention_factor", problem)
        factor = float(np.float32(magnitude**2))
        return {} if factor == 1.0 else {QUERY_FACTOR: factor}

    def _latent_scale(self) -> dict[str, float]:
        """Returns MLA's factor of scores if mscale_all_dim, of any scaled rope, changes it."""
        log_multiplier = self._fields.number("mscale_all_dim", 0.0)
        if not log_multiplier or (factor := self._factor(1.0)) <= 1:
            return {}
        sizes = (self._config.integer(f"qk_{part}_head_dim", least=1) for part in ("nope", "rope"))
        growth = 1 + 0.1 * log_multiplier * math.log(factor)
        return {"attention.scale": float(np.float32(growth**2 / math.sqrt(sum(sizes))))}

    def _yarn_factor(self) -> float:
        """Returns YaRN's factor; by default the context length's ratio to the original one."""
        context = self._config.integer("max_position_embeddings", least=1, most=1 << 28)
        return self._factor(context / self._original())

    def _beta(self, key: str, default: float) -> float:
        """Reads YaRN's beta_fast or beta_slow; 0 selects the default, as in transformers."""
        if (value := self._fields.number(key, 0.0)) == 0:
            return default
        if not MIN_DIVISOR <= value <= 1e6:
            self._fields.fail(key, f"must be 0 or from {MIN_DIVISOR} to 1e6, not {value}")
        return value

    def _yarn_divisors(self, config: Config) -> np.ndarray:
        """Returns divisors that turn GGUF's YaRN frequencies into those of transformers.

        In transformers' `_compute_yarn_parameters`, unlike in GGUF, the ramp may begin and end
        between pairs (`truncate`), and every class has betas.
        """
        rope, original = config.ropes[0], self._original()
        first, last = (pair_of(rope, original, beta) for beta in self._betas)
        # transformers reads it from the outer object, not per layer type; null is false.
        if self._outer.boolean("truncate", "truncate" not in self._outer):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rope.dim - 1)
        last += 0.001 if first == last else 0
        stretched = np.clip((np.arange(rope.dim // 2) - first) / (last - first), 0.0, 1.0)
        wanted = exact_frequencies(rope, stretched)
        divisors = (frequencies(rope) / wanted).astype(np.float32)
        same = wanted.astype(np.float32) == frequencies(rope)
        divisors = np.where(same, np.float32(1), divisors)
        if not (divisors > MIN_DIVISOR).all():
            self._fields.fail("factor", f"is {rope.factor:g}, too large for these betas")
        return divisors

    def _longrope(self) -> dict[str, Any]:
        """Returns LongRoPE metadata (https://arxiv.org/abs/2402.13753).

        The magnitude is sqrt(1 + ln scale / ln original). Warns if rounding a context changes the
        factors that it uses.
        """
        original = self._original()
        context = self._config.integer("max_position_embeddings", least=1, most=1 << 28)
        if (whole := original // CAPACITY_UNIT * CAPACITY_UNIT) < original < context:
            warn(
                f"{self._fields.prefix}long_factor is used for contexts above {whole} tokens, "
                f"which are rounded up to multiples of {CAPACITY_UNIT} as in llama.cpp; "
                f"transformers uses short_factor up to {_ORIGINAL}={original}"
            )
        factor = self._fields.number("factor", context / original)
        grown = factor > 1 and original > 1
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if grown else 1.0
        magnitude = self._fields.number("attention_factor", magnitude)
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
        } | self._magnitude(magnitude)

    def _magnitude(self, factor: float) -> dict[str, float]:
        if not MIN_DIVISOR < factor <= 1e6:
            self._fields.fail("attention_factor", f"must be a positive number, not {factor}")
        rounded = float(np.float32(factor))  # as GGUF stores it
        return {} if rounded == 1.0 else {"rope.scaling.attn_factor": rounded}

    def _original(self) -> int:
        """Returns the context length in tokens before its extension."""
        where = self._fields if _ORIGINAL in self._fields else self._config
        if where.value(_ORIGINAL, None) is None:
            return self._config.integer("max_position_embeddings", least=1, most=1 << 28)
        original = where.number(_ORIGINAL)  # some files write 4096.0
        if (other := self._config.number(_ORIGINAL, original)) != original:
            where.fail(
                _ORIGINAL, f"is {original:g}, but outside {where.prefix[:-1]} it is {other:g}"
            )
        if not 0 < original <= 1 << 28 or original != int(original):
            where.fail(_ORIGINAL, f"must be from 1 to {1 << 28}, not {original}")
        return int(original)

    def _factors(self, key: str, pairs: int) -> np.ndarray:
        values = self._fields.array(key)
        divisors = [
            value
            for value in values
            if isinstance(value, int | float) and MIN_DIVISOR < value <= 1e6
        ]
        if len(values) != pairs or len(divisors) != pairs:
            problem = f"must be {pairs} numbers above {MIN_DIVISOR} and up to 1e6"
            self._fields.fail(key, problem)
        return np.array(divisors, np.float32)

    def _proportional(self, config: Config) -> np.ndarray:
        """Returns frequency divisors with which only the first dimension pairs of a head rotate."""
        key, pairs = "partial_rotary_factor", config.rope_dim // 2
        part = self._checked_part(self._fields, key, self._fields.number(key, 1.0))
        rotated = int(part * config.rope_dim // 2)
        return np.where(np.arange(pairs) < rotated, 1.0, _STANDS_STILL).astype(np.float32)

    def _llama3(self, config: Config) -> np.ndarray:
        """Returns the frequency divisors of Llama 3.1's rope scaling.

        With L = original_max_position_embeddings, wavelengths up to L / high_freq_factor tokens
        are kept, and wavelengths from L / low_freq_factor on are stretched by `factor`. In between,
        frequencies are interpolated linearly in L / wavelength.
        """
        factor = self._factor()
        low = self._fields.number("low_freq_factor")
        high = self._fields.number("high_freq_factor")
        original = self._original()
        if not 0 < low < high:
            self._fields.fail(
                "high_freq_factor",
                f"must be above low_freq_factor={low}, and that above 0, not {high}",
            )
        # original_max_position_embeddings / wavelength
        periods = original * frequencies(config.ropes[0]).astype(np.float64) / (2 * math.pi)
        # Fraction of a frequency that is not stretched.
        unscaled = np.clip((periods - low) / (high - low), 0.0, 1.0)
        return (1 / ((1 - unscaled) / factor + unscaled)).astype(np.float32)

    def _factor(self, default: float = REQUIRED) -> float:
        factor = self._fields.number("factor", default)
        if not MIN_DIVISOR < factor <= 1e6:
            self._fields.fail(
                "factor", f"must be a number above {MIN_DIVISOR} and up to 1e6, not {factor}"
            )
        return factor
