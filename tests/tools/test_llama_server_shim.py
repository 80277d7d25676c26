"""Options of llama-server as options of `jax-q4k serve`."""

from __future__ import annotations

import pytest

from jax_q4k.models import cli
from jax_q4k.models.cli.commands.serve import settings_of
from tools.llama_server_shim import LISTS, SAME, translated

THINKING = ["--chat-template-kwargs", '{"enable_thinking": true}']


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ("-m a.gguf --port 9 -np 2", "--model a.gguf --port 9 --rows 2"),
        ("-np 2 -c 512", "--rows 2 --context 256"),
        ("-np 2 -c 512 --kv-unified", "--rows 2 --context 512"),
        ("-c 512", "--context 512"),
        ("-np -1 -c 0", ""),
        ("--alias small,fim --api-key a,b", "--api-key a --api-key b --name fim"),
    ],
)
def test_options(options: str, ours: str) -> None:
    found, dropped = translated(options.split())
    assert found == ["--any-model", *ours.split(), *THINKING] and not dropped


def test_the_rest_is_dropped() -> None:
    found, dropped = translated("--jinja -m a.gguf --temp 0.8".split())
    assert found == ["--any-model", "--model", "a.gguf", *THINKING]
    assert dropped == ["--jinja", "--temp", "0.8"]


def test_variables_of_the_template() -> None:
    options = ["-m", "a.gguf", "--reasoning", "off", "--chat-template-kwargs", '{"mood": 1}']
    found, _ = translated(options)
    settings = settings_of(cli.parse(["serve", *found]))
    assert settings.template_variables == {"enable_thinking": False, "mood": 1}


def test_every_option_exists() -> None:
    values = {"--rows": "2", "--port": "9", "--timeout": "9"}
    for names, ours in {**SAME, **LISTS}.items():
        found, _ = translated(["-m", "a.gguf", names[0], values.get(ours, "x")])
        assert cli.parse(["serve", *found]).command, ours
