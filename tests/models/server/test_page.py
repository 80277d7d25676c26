"""The chat page: its headers, and what it does in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.cli.commands import serve
from jax_q4k.models.server import page

from ..engine.engine_runs import Gate, is_idle, wait_until
from .browser import Visit, chromium, event, streamed
from .running import Running, serving

HTML = Path(page.__file__).with_name("page.html").read_text()

in_a_browser = pytest.mark.slow("opens a browser")


# Without a browser


def policy_of(response: httpx.Response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split("; ")
    return dict(one.split(" ", 1) for one in parts)


def test_its_policy_allows_its_own_script_and_style_alone(unready: Running) -> None:
    found = unready.client.get("/")
    assert found.status_code == 200 and found.text == HTML
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"

    def source(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = hashlib.sha256(text.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    assert policy_of(found) == {
        "default-src": "'none'",
        "script-src": source("script"),
        "style-src": source("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_a_browser_that_has_it_gets_304(unready: Running) -> None:
    first = unready.client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"a", {tag}', "*"):
        again = unready.client.get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert policy_of(again) == policy_of(first)
    assert unready.client.get("/", headers={"if-none-match": '"a"'}).status_code == 200
    head = unready.client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(HTML.encode()))


def test_the_file_is_short_and_loads_nothing() -> None:
    assert HTML.count("\n") <= 700
    assert max(map(len, HTML.splitlines())) <= 130
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in HTML
    markup = re.sub(r"<(script|style)>.*?</\1>", "", HTML, flags=re.DOTALL)
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", markup)
    assert not re.findall(r"<[^>]*\s(?:src|href|action)=\"(?!data:)", markup)
    assert not re.findall(r"url\(|@import|import\(|Worker\(", HTML)
    assert set(re.findall(r"https?://\w[\w.]*", HTML)) == {"http://www.w3.org"}


def test_without_the_page() -> None:
    with serving(None, page=False, api_keys=("one",)) as server:
        assert server.client.get("/").status_code == 404
    for options, has_page in (((), True), (("--no-page",), False)):
        found = serve.settings_of(cli.parse(["serve", "--demo", *options]))
        assert found.page == has_page


def test_it_needs_no_key_where_the_application_is_mounted() -> None:
    with serving(None, below="/models", api_keys=("one",)) as server:
        paths = {"/": 200, "/health": 503, "/v1/models": 401, "/models/": 401}
        for path, want in paths.items():
            assert server.client.get(f"/models{path}").status_code == want


@pytest.fixture(scope="module")
def unready() -> Iterator[Running]:
    """Returns a server whose model is loading."""
    with serving(None) as server:
        yield server


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visiting(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Returns a function that opens a server's page; fails for errors on its console."""
    visits: list[Visit] = []

    def visit(server: Running, path: str = "/", **options: Any) -> Visit:
        visits.append(Visit(browser, server.url + path, **options))
        return visits[-1]

    yield visit
    for one in visits:
        one.close()


@pytest.fixture
def visit(visiting: Callable[..., Visit], server: Running) -> Visit:
    return visiting(server)


def texts(found: Any) -> list[str]:
    return [" ".join(text.split()) for text in found.all_inner_texts()]


def list_of(visit: Visit) -> list[str]:
    return texts(visit.page.locator("#list li"))


def live(visit: Visit, text: str) -> None:
    """Waits until the live region says a text."""
    visit.page.wait_for_function("(text) => live.textContent.includes(text)", arg=text)


def limit_answers(visit: Visit, tokens: int) -> None:
    visit.page.get_by_role("button", name="Settings").click()
    visit.page.get_by_label("Temperature").fill("0")
    visit.page.get_by_label("Maximum tokens").fill(str(tokens))
    visit.page.get_by_role("button", name="Done").click()


def test_conversations(engine: models.Engine, server: Running, visit: Visit) -> None:
    """Asks, reloads, asks again in a second conversation, and deletes that one."""
    page = visit.page
    page.get_by_text("demo · context of 512 tokens").wait_for()
    assert page.title() == "demo"
    limit_answers(visit, 12)
    visit.ask("Where is the sea?")
    answer = visit.answer()
    body = {"messages": [{"role": "user", "content": "Where is the sea?"}]}
    want = server.client.post(
        "/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": 12}
    )
    content = want.json()["choices"][0]["message"]["content"]
    assert texts(answer.locator("> .text")) == [" ".join(content.split())]
    assert re.fullmatch(
        r"[\d.,]+ tokens/s · first after [\d.]+ s · \d+ prompt tokens( \(\d+ cached\))? · "
        r"12 new · length limit",
        answer.locator(".meta").inner_text().strip(),
    )
    live(visit, f"Answer: {content.strip()[:20]}")
    page.reload()
    assert texts(visit.answer().locator("> .text")) == [" ".join(content.split())]
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("What would you like to ask demo?").wait_for()
    visit.ask("A second <b>one</b>\nwith lines")
    visit.answer()
    assert list_of(visit) == ["A second <b>one</b>", "Where is the sea?"]
    page.get_by_label("Delete A second").click()
    assert list_of(visit) == ["Where is the sea?"]
    page.get_by_role("button", name="Undo").click()
    assert list_of(visit) == ["A second <b>one</b>", "Where is the sea?"]
    page.go_back()
    wait_until(lambda: is_idle(engine))


def test_stop_frees_the_engine(engine: models.Engine, server: Running, visit: Visit) -> None:
    """Stops an answer with Escape, and one with the button; what came stays."""
    escape = lambda: visit.page.keyboard.press("Escape")  # noqa: E731
    for stops in (escape, visit.page.get_by_label("Stop").click):
        with Gate(engine) as gate:
            before = engine.stats().new_tokens
            visit.ask("Where is the sea?")
            gate.step(12)
            answer = visit.page.locator("article").last
            wait_until(lambda answer=answer: len(answer.locator("> .text").inner_text()) > 10)  # type: ignore[misc]
            assert answer.get_attribute("aria-busy") == "true"
            stops()
            wait_until(lambda: server.service.places.taken == 0)
        wait_until(lambda: is_idle(engine), 5)
        assert engine.stats().new_tokens < before + 30
        assert "stopped" in visit.answer().inner_text()
        live(visit, "Stopped")
        assert visit.page.evaluate("document.activeElement.id") == "input"
    visit.page.reload()
    assert "stopped" in visit.answer().inner_text()


#: Markdown -> HTML, without copy buttons and attributes that `plain` removes.
MARKDOWN = {
    "a **b** *c* ***d*** `e*` ~~f~~": "<p>a <strong>b</strong> <em>c</em> "
    "<strong><em>d</em></strong> <code>e*</code> <del>f</del></p>",
    "snake_case_name 2 * 3 * 4 \\*x\\* _y_": "<p>snake_case_name 2 * 3 * 4 *x* <em>y</em></p>",
    "``a ` b`` and ` c": "<p><code>a ` b</code> and ` c</p>",
    "a\nb\n\nc": "<p>a<br>b</p><p>c</p>",
    "# A #\n## B\n####### C": "<h3>A</h3><h4>B</h4><p>####### C</p>",
    "- a\n- b\n  1. c\n  2. d\n- e": "<ul><li><p>a</p></li><li><p>b</p>"
    "<ol><li><p>c</p></li><li><p>d</p></li></ol></li><li><p>e</p></li></ul>",
    "3. a\n\n   b\n\n4. c\nlazy\n\nend": '<ol start="3"><li><p>a</p><p>b</p></li>'
    "<li><p>c<br>lazy</p></li></ol><p>end</p>",
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    '[a](https://b.c/d_(e)?f=1 "t") <https://x.y/z>.': '<p><a href="https://b.c/d_(e)?f=1">a</a> '
    '&lt;<a href="https://x.y/z">https://x.y/z</a>&gt;.</p>',
    "![a](https://b.c/d.png)": '<p><a href="https://b.c/d.png">a</a></p>',
    "|a|b|\n|:-|-:|\n|`c`|d\\|e|\n|f|": '<div class="table"><table><thead><tr><th>a</th>'
    '<th class="right">b</th></tr></thead><tbody><tr><td><code>c</code></td>'
    '<td class="right">d|e</td></tr><tr><td>f</td><td class="right"></td></tr></tbody></table>'
    "</div>",
    "```py\na <b>\n\n  c\n``` x\n```\nd": '<div class="code"><div class="row">'
    '<span class="soft cut">py</span></div><pre><code>a &lt;b&gt;\n\n  c\n``` x</code></pre></div>'
    "<p>d</p>",
    # What must not become markup.
    "<img src=x onerror=alert(1)> <b>c</b>": "<p>&lt;img src=x onerror=alert(1)&gt; "
    "&lt;b&gt;c&lt;/b&gt;</p>",
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](//a.b)": "<p>[x](javascript:alert(1)) "
    "[y](data:text/html,z) [z](//a.b)</p>",
    '[x](https://a.b"onclick=alert(1))': '<p><a href="https://a.b&quot;onclick=alert(1)">x</a></p>',
}


def plain(html: str) -> str:
    """Returns HTML without the copy buttons and the attributes that all such elements have."""
    html = re.sub(r"<button.*?</button>", "", html)
    for same in (' target="_blank" rel="noopener noreferrer"', ' tabindex="0"', ' class=""'):
        html = html.replace(same, "")
    return html.replace('ol start="1"', "ol")


def test_markdown(visit: Visit) -> None:
    """Renders texts, also character by character."""
    shown = """([text, step]) => {
      const node = document.createElement("div"), markdown = new Markdown(node);
      for (let end = 0; end < text.length; end += step) markdown.update(text.slice(0, end + step));
      return node.innerHTML;
    }"""
    for text, want in MARKDOWN.items():
        for step in (len(text), 1):
            assert plain(visit.page.evaluate(shown, [text, step])) == want, text
    visit.will_answer(*streamed("\n\n".join(MARKDOWN)))
    visit.ask("?")
    assert plain(visit.html_of_answer()).startswith("<p>a <strong>b</strong>")
    unsafe = (
        "a:not([target=_blank][rel='noopener noreferrer']), article :is(img, script, style, iframe)"
    )
    assert visit.page.locator(unsafe).count() == 0


@in_a_browser
def test_a_long_text_in_pieces(visit: Visit) -> None:
    """Renders a text as it grows, with chunks that end inside of characters and events."""
    text = "\n\n".join([*MARKDOWN, "Ünï© 漢字 🎉 end"])
    visit.will_answer(*streamed([text]))
    visit.ask("?")
    whole = visit.html_of_answer()
    body = [
        event(role="assistant", content=""),
        ": ping\n\n",
        *streamed(re.findall(r"(?s).{1,9}", text)),
    ]
    for ends in ("\n", "\r\n"):
        raw = "".join(body).replace("\n", ends).replace("\\u00dc", "Ü").replace("\\u6f22", "漢")
        visit.will_answer(raw, at_once=7)
        visit.ask("?")
        assert visit.html_of_answer() == whole


@in_a_browser
def test_long_answers_stay_fast(visit: Visit) -> None:
    text = "".join(f"Word {i} of a *paragraph* with `code`.\n\n" for i in range(1000))
    visit.will_answer(*streamed([text[i : i + 400] for i in range(0, len(text), 200)]))
    visit.ask("?")
    visit.answer()
    seconds = visit.page.evaluate(
        """async () => {
          const started = performance.now(), node = document.createElement("div");
          const shown = new Markdown(node), marks = ["*", "[", "`a ", "_a", "**a ", "| a "];
          const text = "Some *text* of [one](https://a.b).\\n".repeat(40) + "\\n- item\\n\\n";
          let all = "";
          for (let i = 0; i < 300; i++) shown.update(all += text);
          for (const one of marks) new Markdown(node).update(one.repeat(20000));
          return (performance.now() - started) / 1000;
        }"""
    )
    assert seconds < 3


@in_a_browser
def test_reasoning_is_folded(visit: Visit) -> None:
    thought = [event(reasoning_content=piece) for piece in ("secret", " *plan*", "\n\nof mine")]
    visit.will_answer(*thought, breaks="never")
    visit.ask("?")
    answer = visit.page.locator("article[aria-label=Answer]").last
    answer.get_by_text("Thinking…").wait_for()
    live(visit, "Thinking…")
    assert re.fullmatch(r"\d s", answer.locator(".meta").inner_text().strip())
    assert not answer.get_by_text("secret").is_visible()
    visit.page.keyboard.press("Escape")
    live(visit, "Stopped")
    visit.will_answer(
        *thought, *streamed("Done", completion_tokens_details={"reasoning_tokens": 9})
    )
    visit.page.get_by_label("Regenerate").click()
    live(visit, "Answer: Done")
    answer = visit.answer()
    assert plain(visit.html_of_answer()) == "<p>Done</p>"
    assert re.fullmatch(r"Thought for \d(\.\d)? s", answer.locator("summary").inner_text())
    assert "3 new (9 thinking)" in answer.inner_text() and "Thinking" not in answer.inner_text()
    assert not answer.get_by_text("secret").is_visible()
    answer.locator("summary").press("Enter")
    assert answer.get_by_text("secret plan").is_visible()
    visit.page.reload()  # from the storage
    answer = visit.answer()
    assert answer.locator("summary").inner_text().startswith("Thought for ")
    assert texts(answer.locator("> .text")) == ["Done"]
    visit.will_answer(*streamed("Yes"))
    visit.ask("And?")
    assert not visit.answer().locator("details").is_visible()
    assert visit.sent()[-1]["messages"] == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Done", "reasoning_content": "secret *plan*\n\nof mine"},
        {"role": "user", "content": "And?"},
    ]


@in_a_browser
def test_thoughts_in_the_text_are_folded(visit: Visit) -> None:
    """Earlier versions stored them there, and a template may not tell the server of thoughts."""
    stored = [
        {"role": "user", "content": "<think>?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOld"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Older", "reasoning": "Hm so."},
    ]
    text = json.dumps({"title": "A", "messages": stored})
    visit.page.evaluate("(text) => localStorage.setItem('jax-q4k:/:chat:a', text)", text)
    visit.page.goto(f"{visit.url}#a")
    visit.page.reload()
    answers = visit.page.locator("article[aria-label=Answer]")
    assert texts(answers.locator("> .text")) == ["Old", "Older"]
    assert answers.locator("summary").all_inner_texts() == ["Thoughts"] * 2
    assert answers.locator("details .text").all_text_contents() == ["Hm.", "Hm so."]
    visit.will_answer(*streamed(["<thi", "nk>Hm", " *so*</th", "ink>\n\nDone"]))
    visit.ask("!")
    assert plain(visit.html_of_answer()) == "<p>Done</p>"
    assert visit.answer().locator("details .text").text_content() == "Hm so"
    sent = visit.sent()[-1]["messages"]
    assert [one["content"] for one in sent] == ["<think>?", "\n\nOld", "And?", "Older", "!"]
    thoughts = [one.get("reasoning_content") for one in sent]
    assert thoughts == [None, "\nHm.\n", None, "Hm so.", None]


@in_a_browser
def test_regenerate_and_edit(visit: Visit) -> None:
    for text in ("one", "two"):
        visit.will_answer(*streamed(f"Answer {text}"))
        visit.ask(text)
        visit.answer()
    visit.will_answer(*streamed("Another"))
    visit.page.get_by_label("Regenerate").last.click()
    visit.wait_for("Another")
    articles = visit.page.locator("article")
    assert [one.split("\n")[0] for one in articles.all_inner_texts()] == [
        "one",
        "Answer one",
        "two",
        "Another",
    ]
    pen = visit.page.get_by_label("Edit", exact=True).first
    pen.click()
    visit.page.keyboard.press("Escape")
    assert articles.count() == 4
    pen.click()
    visit.page.get_by_label("Edit the message").fill("three")
    visit.will_answer(*streamed("Answer three"))
    visit.page.keyboard.press("Enter")
    visit.wait_for("Answer three")
    assert [one.split("\n")[0] for one in articles.all_inner_texts()] == ["three", "Answer three"]
    assert visit.sent()[-1]["messages"] == [{"role": "user", "content": "three"}]


@in_a_browser
def test_settings_are_sent(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Top p").fill("1.5")
    page.get_by_role("button", name="Done").click()
    assert page.get_by_label("Top p").is_visible()  # out of range
    for label, value in {"Top p": "0.5", "Top k": "40", "Min p": "0.1", "Seed": "7"}.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Done").click()
    page.reload()
    visit.will_answer(*streamed("a"))
    visit.ask("?")
    visit.answer()
    assert visit.sent() == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "?"},
            ],
            **{"top_p": 0.5, "top_k": 40, "min_p": 0.1, "seed": 7},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }
    ]


PARTS = (event(content="A part"), event(content=" stays"))
BROKEN: dict[str, tuple[tuple[str, ...], str, str]] = {
    "error": ((*PARTS, 'data: {"error": {"message": "no memory"}}\n\n'), "", "no memory."),
    "cut": (PARTS, "", "incomplete: the server closed the connection."),
    "cut-event": ((*PARTS, "data: [DONE]\n"), "", "incomplete: the server closed the connection."),
    "network": (PARTS, "error", "incomplete: the connection broke off."),
    "no-json": ((*PARTS, "data: {\n\n"), "", "what is not JSON."),
}


@in_a_browser
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_streams(visit: Visit, kind: str) -> None:
    chunks, breaks, message = BROKEN[kind]
    visit.will_answer(*chunks, breaks=breaks)
    visit.ask("?")
    answer = visit.answer()
    assert "A part stays" in answer.inner_text() and message in answer.inner_text()
    live(visit, "Error: ")
    visit.page.reload()
    assert message in visit.answer().inner_text()
    visit.will_answer(*streamed("All is well"))
    visit.page.get_by_role("button", name="Try again").click()
    visit.wait_for("All is well")
    assert message not in visit.answer().inner_text()


@in_a_browser
def test_a_busy_server(visit: Visit, server: Running) -> None:
    visit.expected = "status of 429"
    server.service.places.take(8)
    try:
        visit.ask("?")
        text = visit.answer().inner_text()
    finally:
        server.service.places.give_back(8)
    assert "The server is busy" in text
    limit_answers(visit, 2)
    visit.page.get_by_role("button", name="Try again").click()
    visit.wait_for("2 new")


@in_a_browser
def test_a_model_that_is_loading(engine: models.Engine, visiting: Callable[..., Visit]) -> None:
    """Waits, sends what was asked meanwhile, and says so when the server ends."""
    with serving(None) as server:
        visit = visiting(server, expected="status of 503")
        waiting = visit.page.get_by_text("The model is loading…")
        waiting.wait_for()
        limit_answers(visit, 2)
        visit.ask("Where is the sea?")
        server.service.start(engine)
        visit.wait_for("2 new")
        assert not waiting.is_visible()
        visit.page.get_by_text("demo · context of 512 tokens").wait_for()
        server.service.is_draining = True
        visit.ask("And now?")
        assert (
            "The server is not ready: the server is shutting down." in visit.answer().inner_text()
        )
        visit.page.get_by_text("the server is shutting down…").wait_for()
        visit.close()


@in_a_browser
def test_keys(engine: models.Engine, visiting: Callable[..., Visit]) -> None:
    with serving(engine, api_keys=("secret",)) as server:
        visit = visiting(server, expected="status of 401")
        field = visit.page.get_by_role("textbox", name="API key")
        field.fill("wrong")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_function("() => document.getElementById('entry').value === ''")
        visit.page.get_by_role("button", name="Cancel").click()
        limit_answers(visit, 2)
        visit.ask("?")
        assert "needs an API key: the API key is wrong." in visit.answer().inner_text()
        field.fill("secret")
        visit.page.keyboard.press("Enter")
        visit.wait_for("2 new")
        stored = "JSON.stringify([Object.values(localStorage), Object.values(sessionStorage)])"
        kept = json.loads(visit.page.evaluate(stored))
        assert "secret" not in str(kept[0]) and kept[1] == ["secret"]
        assert "secret" not in visit.page.content()
        visit.page.reload()
        visit.page.get_by_text("context of 512").wait_for()
        visit.page.get_by_role("button", name="Settings").click()
        visit.page.get_by_role("button", name="API key").click()
        assert field.input_value() == ""
        field.fill("secret")
        visit.page.get_by_label("Keep it in this browser").check()
        visit.page.keyboard.press("Enter")
        other = visit.tab()
        other.get_by_text("context of 512").wait_for()


@in_a_browser
def test_two_tabs(visit: Visit) -> None:
    """Adds conversations in both, deletes one, and answers one in both at a time."""
    first, second = visit.page, visit.tab()
    visit.will_answer(*streamed("1"))
    visit.ask("From the first")
    visit.answer()
    second.get_by_role("button", name="From the first", exact=True).click()
    assert second.get_by_label("Your message").all_inner_texts() == ["From the first"]
    visit.will_answer(event(content="slow"), breaks="never")
    visit.ask("More")
    visit.wait_for("slow")
    visit.page = second
    visit.will_answer(*streamed("2"))
    visit.ask("From the second")
    visit.answer()
    first.keyboard.press("Escape")
    visit.page = first
    visit.answer()
    assert list_of(visit) == ["From the first"] * 2
    second.wait_for_function("document.querySelectorAll('#list li').length === 2")
    stored = first.evaluate(
        "Object.entries(localStorage).filter(([key]) => key.includes('chat:')).map(String)"
    )
    assert len(stored) == 2
    assert ["From the second" in one for one in sorted(stored, key=len)].count(True) == 1
    for label in ("Delete From the first",) * 2:
        second.get_by_label(label).first.click()
    wait_until(lambda: not list_of(visit))
    assert first.locator("#empty").is_visible()


@in_a_browser
def test_storage_that_is_corrupt_or_full(visit: Visit) -> None:
    page = visit.page
    page.evaluate(
        """() => {
          const put = (key, value) => localStorage.setItem(`jax-q4k:/:${key}`, value);
          put("chat:a", "{");
          put("chat:b", '{"messages": [{"role": "user"}]}');
          put("chat:c", '{"messages": [{"role": "user", "content": "kept"}], "title": 7}');
          put("settings", '[]');
        }"""
    )
    page.reload()
    page.get_by_text("A stored conversation cannot be read").wait_for()
    assert list_of(visit) == ["7"]
    page.evaluate(
        """() => {
          let text = "x".repeat(1 << 20);
          while (text) try { localStorage.setItem("full" + Math.random(), text); }
            catch { text = text.slice(text.length >> 1 || 1); }
        }"""
    )
    visit.will_answer(*streamed("An answer that is longer than what is left"))
    visit.ask("?")
    visit.answer()
    page.get_by_text("storage is full").wait_for()
    assert list_of(visit) == ["?", "7"]


@in_a_browser
def test_titles(visit: Visit) -> None:
    visit.will_answer(*streamed("a"))
    visit.ask("A title of one line\nand more")
    visit.answer()
    visit.page.get_by_label("Rename A title").click()
    assert visit.page.get_by_role("textbox", name="Title").input_value() == "A title of one line"
    visit.page.get_by_role("textbox", name="Title").fill("Better")
    visit.page.keyboard.press("Enter")
    visit.page.get_by_role("heading", name="Better").wait_for()
    visit.page.reload()
    assert list_of(visit) == ["Better"]


@in_a_browser
def test_copying(visiting: Callable[..., Visit], server: Running) -> None:
    visit = visiting(server, permissions=["clipboard-read", "clipboard-write"])
    visit.will_answer(event(reasoning_content="Hm"), *streamed("Look:\n```js\nlet a;\n```"))
    visit.ask("A question")
    answer = visit.answer()
    for button, want in (
        (answer.locator("pre").locator("xpath=..").get_by_label("Copy"), "let a;"),
        (answer.locator(".meta").get_by_label("Copy"), "Look:\n```js\nlet a;\n```"),
        (visit.page.get_by_label("Your message").get_by_label("Copy"), "A question"),
    ):
        button.click()
        live(visit, "Copied")
        assert visit.page.evaluate("navigator.clipboard.readText()") == want


@in_a_browser
def test_keyboard(visit: Visit) -> None:
    page = visit.page
    field = page.get_by_label("Message", exact=True)
    assert field.evaluate("(field) => field === document.activeElement")
    field.fill("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert field.input_value() == "a\nb"
    composes = "(field, how) => field.dispatchEvent(new KeyboardEvent('keydown', how))"
    for how in ({"isComposing": True}, {"keyCode": 229}):
        field.evaluate(composes, {"key": "Enter", "bubbles": True, **how})
    assert page.locator("article").count() == 0
    visit.will_answer(*streamed("Text\n```js\nlet a;\n```\n\n|a|\n|-|\n|b|"))
    page.keyboard.press("Enter")
    visit.answer()
    page.keyboard.press("Shift+Tab")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        name = "document.activeElement.ariaLabel || document.activeElement.textContent.slice(0, 20)"
        reached.add(page.evaluate(name))
        shown = "getComputedStyle(document.activeElement)"
        outline = page.evaluate(f"{shown}.outlineStyle + {shown}.opacity")
        assert outline in ("solid1", "none1", "auto1"), page.evaluate(name)
    assert reached >= {"Message", "Send", "New chat", "Rename a", "Delete a", "Light or dark"}
    assert reached >= {"Settings", "Copy", "Edit", "Regenerate"}


@in_a_browser
def test_it_follows_the_end_unless_the_reader_scrolled_up(visit: Visit) -> None:
    lines = [f"Line {i}\n\n" for i in range(60)]
    visit.will_answer(*streamed(lines))
    visit.ask("?")
    visit.answer()
    at_end = "main.scrollHeight - main.scrollTop - main.clientHeight < 2"
    assert visit.page.evaluate(at_end)
    visit.will_answer(*map(lambda text: event(content=text), lines), breaks="never")
    visit.ask("?")
    visit.page.get_by_text("Line 5", exact=True).last.wait_for()
    visit.page.evaluate("main.scrollTop = 100")
    visit.page.get_by_text("Line 59").last.wait_for()
    assert visit.page.evaluate("main.scrollTop") == 100
    visit.page.get_by_label("Go to the end").click()
    assert visit.page.evaluate(at_end)


CONVERSATION = "\n\n".join(
    [
        *MARKDOWN,
        "x" * 300,
        "```\n" + "y" * 300 + "\n```",
        "|" + "wide cell |" * 20 + "\n|" + "-|" * 20,
    ]
)


@in_a_browser
@pytest.mark.parametrize("width", [360, 719, 720, 1280, 1920])
def test_nothing_overflows(visiting: Callable[..., Visit], server: Running, width: int) -> None:
    visit = visiting(server, viewport={"width": width, "height": 700})

    def check() -> None:
        boxes = "[document.scrollingElement, main, document.querySelector('dialog')]"
        wide = f"{boxes}.map((box) => box.scrollWidth - box.clientWidth)"
        assert visit.page.evaluate(wide) == [0, 0, 0]

    check()
    visit.will_answer(*streamed(CONVERSATION))
    visit.ask("Q" * 300)
    visit.answer()
    check()
    visit.will_answer("<html>" + "e" * 300, status=502)
    visit.page.get_by_label("Regenerate").click()
    visit.wait_for("HTTP status 502")
    check()
    box = visit.page.locator("#thread").bounding_box()
    assert box is not None and 320 <= box["width"] <= 640
    visit.page.get_by_role("button", name="Settings").click()
    check()
    visit.page.keyboard.press("Escape")
    menu = visit.page.locator("#menu")
    assert menu.is_visible() == (width < 720)
    if width < 720:
        new = visit.page.get_by_role("button", name="New chat")
        assert not new.is_visible()
        menu.click()
        new.wait_for()
        visit.page.keyboard.press("Escape")
        new.wait_for(state="hidden")
        assert menu.evaluate("(menu) => menu === document.activeElement")


@in_a_browser
def test_names_for_screen_readers(visit: Visit) -> None:
    visit.will_answer(*streamed("Text\n```js\nlet a;\n```"))
    visit.ask("?")
    visit.answer()

    def unnamed() -> list[Any]:
        client = visit.context.new_cdp_session(visit.page)
        nodes = client.send("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "textbox", "checkbox", "spinbutton", "link", "dialog", "article", "main"}
        roles |= {"complementary", "navigation"}
        shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
        assert len(shown) >= 5
        return [node for node in shown if not node.get("name", {}).get("value")]

    assert not unnamed()
    visit.page.get_by_role("button", name="Settings").click()
    assert not unnamed()
    visit.page.get_by_role("button", name="API key").click()
    assert not unnamed()


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(visiting: Callable[..., Visit], server: Running, scheme: str) -> None:
    """Checks contrasts of both themes: WCAG AA."""
    visit = visiting(server, color_scheme=scheme)
    pairs = [
        (text, paper) for text in ("ink", "soft") for paper in ("paper", "side", "raised", "chosen")
    ]
    pairs += [("accent", "paper"), ("on-accent", "accent"), ("bad", "bad-paper"), ("edge", "paper")]

    def luminance(name: str) -> float:
        visit.page.evaluate("(name) => { live.style.color = `var(--${name})`; }", name)
        color = visit.page.evaluate("getComputedStyle(live).color")
        channels = [int(one) / 255 for one in re.findall(r"\d+", color)]
        linear = [
            one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels
        ]
        return sum(w * one for w, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for text, paper in pairs:
        dark, light = sorted((luminance(text), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) >= (3 if text == "edge" else 4.5), (text, paper)
    background = "getComputedStyle(document.body).backgroundColor"
    before = visit.page.evaluate(background)
    visit.page.get_by_label("Light or dark").click()
    after = visit.page.evaluate(background)
    assert after != before
    visit.page.reload()
    assert visit.page.evaluate(background) == after


@in_a_browser
def test_mounted_under_a_prefix(engine: models.Engine, visiting: Callable[..., Visit]) -> None:
    """Serves the application below /models/."""
    with serving(engine, below="/models") as server:
        visit = visiting(server, "/models/")
        visit.page.get_by_text("demo · context of 512 tokens").wait_for()
        limit_answers(visit, 2)
        visit.ask("?")
        visit.wait_for("2 new")
