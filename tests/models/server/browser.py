"""Opens the chat page in Chromium, with or without a real server behind it, for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

#: Replaces `fetch` where `answers` has an entry; `sent` gets the bodies of those requests.
_FAKE_FETCH = """
const real = window.fetch;
window.answers = [];
window.sent = [];
window.fetch = (path, options) => {
  if (!path.endsWith("chat/completions") || !answers.length) return real(path, options);
  sent.push(JSON.parse(options.body));
  const { status, chunks, breaks } = answers.shift();
  const body = new ReadableStream({
    async start(stream) {
      options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
      for (const [i, chunk] of chunks.entries()) {
        stream.enqueue(new Uint8Array(chunk));
        if (i % 8 === 0) await new Promise((resolve) => setTimeout(resolve, 4));
      }
      if (breaks === "error") stream.error(new TypeError("network error"));
      else if (breaks !== "never") stream.close();
    },
  });
  return Promise.resolve(new Response(body, { status }));
};
"""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Starts Chromium; skips the test, with the reason, where there is none."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("the page's tests need playwright: pip install playwright")
    if not CHROMIUM:
        pytest.skip("the page's tests need Chromium: .ci/browser installs it, or set CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A visit to the page, in a browser profile of its own.

    Attributes:
      page: the first tab.
      expected: pattern of messages on the console that are no failures.
      problems: other errors on the console, uncaught exceptions, violations of the policy.
    """

    def __init__(self, browser: Any, url: str, expected: str = r"(?!)", **options: Any) -> None:
        self.context = browser.new_context(**({"reduced_motion": "reduce"} | options))
        self.context.set_default_timeout(10_000)
        self.context.add_init_script(_FAKE_FETCH)
        self.url, self.expected = url, expected
        self.problems: list[str] = []
        self.page = self.tab()

    def tab(self) -> Any:
        """Opens another tab of the same profile."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._heard)
        page.goto(self.url)
        return page

    def close(self) -> None:
        """Closes all tabs; fails for problems."""
        self.context.close()
        assert not self.problems, self.problems

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning") and not re.search(self.expected, message.text):
            self.problems.append(message.text)

    def will_answer(
        self, *chunks: bytes | str, status: int = 200, breaks: str = "", at_once: int = 0
    ) -> None:
        """Sets the answer to the next request.

        chunks: parts of the body. breaks: "error" for a connection that breaks off, "never" for a
        body without an end. at_once: bytes of the new chunks into which the body is cut.
        """
        parts = [one.encode() if isinstance(one, str) else one for one in chunks]
        if at_once:
            whole = b"".join(parts)
            parts = [whole[i : i + at_once] for i in range(0, len(whole), at_once)]
        answer = {"status": status, "breaks": breaks, "chunks": [list(part) for part in parts]}
        self.page.evaluate("(answer) => { answers.push(answer); }", answer)

    def sent(self) -> list[dict[str, Any]]:
        """Returns the bodies of requests that `will_answer` answered."""
        return list(self.page.evaluate("sent"))

    def ask(self, text: str) -> None:
        """Sends a message, without waiting for the answer."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def answer(self) -> Any:
        """Waits until the last answer is complete; returns its element."""
        self.page.wait_for_selector("article[aria-label=Answer]:last-child[aria-busy=false]")
        return self.page.locator("article[aria-label=Answer]").last

    def wait_for(self, text: str) -> None:
        """Waits until a message contains a text."""
        self.page.locator("#thread").get_by_text(text).last.wait_for()

    def html_of_answer(self) -> str:
        return str(self.answer().locator("> .text").inner_html())


def event(**delta: Any) -> str:
    """Returns an event of a stream with this delta."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


def streamed(text: str | Sequence[str], **usage: Any) -> list[str]:
    """Returns the events of a stream that answers with a text, or with pieces of one."""
    pieces = [text] if isinstance(text, str) else text
    last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    counts = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, **usage}}
    ends = [f"data: {json.dumps(one)}\n\n" for one in (last, counts)]
    return [*(event(content=piece) for piece in pieces), *ends, "data: [DONE]\n\n"]
