"""Drafts, priorities and salts of an engine's requests."""

from __future__ import annotations

from typing import Any

import pytest

from jax_q4k import models

from ..golden_files import model

FIELDS = {"max_new_tokens": 24, "ignore_end": True}


@pytest.mark.slow("compiles programs with drafts")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("draft", ["lookup", "model"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_drafts_change_no_tokens(name: str, draft: str) -> None:
    """Pages are short, so that requests are preempted between drafts."""
    loaded = model(name)
    prompts = [[7, 8, 9] * 8, [5, 6, 7, 8], list(range(20, 60))]
    sampling = models.Sampling(temperature=0.6, repetition_penalty=1.1, **FIELDS)
    want = [output.tokens for output in models.generate(loaded, prompts, sampling)]
    kind: Any = loaded if draft == "model" else models.drafts.PromptLookup(shortest=1)
    options: Any = {"max_rows": 2, "max_context": 96, "pages": 8}
    with models.Engine(loaded, draft=kind, **options) as engine:
        engine._loop.stepper.draft_costs = {2: 0.01}  # a model never pays as its own draft
        outputs = engine.generate(prompts, sampling)
        assert [output.tokens for output in outputs] == want
        assert sum(output.timings.drafted_tokens for output in outputs) > 0
        engine.check()


@pytest.mark.usefixtures("exact")
def test_salts_and_priorities() -> None:
    loaded, prompt = model("llama-gqa"), list(range(40, 80))
    with models.Engine(loaded, max_rows=1, max_context=96, warm_up=False) as engine:

        def reused(salt: str) -> int:
            request = engine.submit(prompt, max_new_tokens=2, cache_salt=salt)
            return request.result().timings.reused_tokens

        assert [reused("a"), reused("a"), reused("b"), reused("")] == [0, 32, 0, 0]
        first = engine.submit(prompt, **FIELDS)
        late, early = (engine.submit(prompt, priority=p, max_new_tokens=4) for p in (1, -1))
        late.result()
        assert early.is_done and first.is_done
        assert early.timings.first_token < late.timings.first_token
    with pytest.raises(TypeError, match="draft is a int"):
        models.Engine(loaded, draft=3)
