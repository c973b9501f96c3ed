"""The chat page in a browser: over the real server on the platform without a device, and over planned answers."""
from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from .browser import Browser
from .checkpoints import tiny_llama_gguf
from .page_server import USAGE, PageServer, delta, end
from .serving import Serving
from .test_dashboard import CONTRASTS

COST = 20  # seconds
SHOTS = os.environ.get("SCREENSHOTS")  # a folder, to look at
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HELLO = [delta(role="assistant", content=""), delta(content="Hello "), delta(content="**you**"), end(),
         {"choices": [], "usage": USAGE}]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture
def browser(opened):
    yield opened
    opened.js("localStorage.clear(); sessionStorage.clear()")
    _ = opened.errors  # the next test sees its own alone


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return [str(tiny_llama_gguf(folder / "tiny.gguf")), "--chat-template", str(folder / "chat.jinja"), "--in-process"]


def visit(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.until(lambda: browser.text("#state") == "ready", "it does not get ready")
    assert browser.js("return document.activeElement.id") == "input"


def finished(browser: Browser, count: int = 1) -> list[str]:
    """The texts of the answers, once there are `count` and none is running."""
    done = "return !document.querySelector('#send').hidden"
    browser.until(lambda: browser.js(done) and len(answers(browser)) >= count, "no answer")
    return answers(browser)


def answers(browser: Browser) -> list[str]:
    return browser.js("return [...document.querySelectorAll('article.assistant .body')].map(e => e.innerText)")


def figures(browser: Browser) -> str:
    return browser.js("return [...document.querySelectorAll('.figures')].at(-1).innerText")


def click(browser: Browser, words: str) -> None:
    script = "const found = [...document.querySelectorAll('button')].filter(b => b.textContent === arguments[0]); " \
             "found.at(-1)?.click(); return found.length"
    assert browser.js(script, words), f"there is no button {words}"


def shot(browser: Browser, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}.png")


# ---- over the real server


def test_a_conversation_over_the_real_server(tiny, browser, tmp_path):
    with Serving(*tiny, temporary=tmp_path, delay_ms=250) as server:  # not all at once, however busy the page is
        url = f"http://{server.address}/"
        visit(browser, url)
        assert "null" in browser.text("#where") and "tokens of context" in browser.text("#where")
        browser.js("document.querySelector('#set-max_tokens').value = 12;"
                   "document.querySelector('#set-max_tokens').dispatchEvent(new Event('input'))")
        browser.press("hello", "enter")
        first = finished(browser)
        assert re.search(r"\d tokens/s.*first token \d.*0 of \d+ prompt tokens cached.*12 tokens.*cut:",
                         figures(browser), re.DOTALL)
        assert "of " in browser.text("#room") and "1 sampling setting" in browser.text("#modes")
        browser.press("again", "enter")
        assert len(finished(browser, 2)) == 2
        cached = int(re.search(r"(\d+) of \d+ prompt tokens cached", figures(browser))[1])
        assert cached > 0, "the conversation before is in the cache"
        loaded = browser.js("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert all(name.startswith(url) for name in loaded), loaded
        browser.open(url)
        browser.until(lambda: answers(browser)[:1] == first, "the conversation is forgotten")
        assert browser.errors == []


@pytest.mark.slow
def test_a_stopped_answer_ends_at_the_server_too(tiny, browser, tmp_path):
    with Serving(*tiny, temporary=tmp_path, delay_ms=30) as server:
        visit(browser, f"http://{server.address}/")
        browser.press("hello", "enter")
        browser.until(lambda: answers(browser) and len(answers(browser)[0]) > 3, "nothing comes")
        browser.press("escape")
        browser.until(lambda: "stopped" in figures(browser), "it does not stop")
        browser.until(lambda: json.loads(server.ask("GET", "/server_info").read())["stats"]["running"] == 0,
                      "the server computes on")


@pytest.mark.slow
def test_the_key_is_asked_for_and_shared_with_the_dashboard(tiny, browser, tmp_path):
    with Serving(*tiny, "--api-key", "sekret", temporary=tmp_path) as server:
        browser.open(f"http://{server.address}/")
        browser.until(lambda: browser.js("return document.querySelector('#ask').open"), "the key is not asked for")
        browser.press("wrong", "enter")
        browser.until(lambda: browser.js("return document.querySelector('#ask').open && "
                                         "!document.querySelector('#wrong').hidden"), "a wrong key is not told")
        shot(browser, "chat-key")
        browser.press("sekret", "enter")
        browser.until(lambda: "null" in browser.text("#where"), "the right key opens nothing")
        browser.open(f"http://{server.address}/dashboard")
        browser.until(lambda: browser.text("#running") == "0", "the dashboard asks again")


def test_the_page_is_there_while_the_model_loads(browser):
    with PageServer(HELLO) as server:
        server.health = 503, {"status": "unavailable", "reason": "the model is loading: load weights 40%",
                              "progress": {"stage": "load weights", "done": 40, "total": 100}}
        browser.open(server.url)
        browser.until(lambda: "load weights 40%" in browser.text("#state"), "the progress is not shown")
        assert browser.js("return document.querySelector('#loading').value") == 0.4
        browser.press("typed ahead")
        assert browser.js("return document.querySelector('#send').disabled")
        server.health = 200, {"status": "ok"}
        browser.until(lambda: browser.text("#state") == "ready", "it does not notice that the model is there")
        browser.press("enter")
        assert finished(browser) == ["Hello you"]


# ---- over planned answers


def test_what_is_said_is_shown_as_text_and_figures(browser):
    with PageServer(HELLO) as server:
        visit(browser, server.url)
        shot(browser, "chat-empty")
        assert browser.text("#model") == "planned" and "paper on a sheet" in browser.text("#where")
        assert browser.js("return document.querySelector('#set-temperature').placeholder") == "0.25"
        browser.press("hi <b>there</b>", "enter")
        assert finished(browser) == ["Hello you"]
        assert browser.js("return document.querySelector('article.user').innerText").startswith("hi <b>there</b>")
        assert browser.js("return document.querySelector('article.assistant strong').textContent") == "you"
        assert "80 of 96 prompt tokens cached" in figures(browser)
        assert "101 of 4,096 tokens of context" in browser.text("#room")
        asked = server.asked[0]
        assert asked["messages"] == [{"role": "user", "content": "hi <b>there</b>"}] and asked["stream"] is True
        assert set(asked) == {"model", "messages", "stream", "stream_options"}, "nothing else was set"


HOSTILE = """<img src=x onerror="document.title='owned'"> <script>document.title='owned'</script>

[click](javascript:document.title='owned') ![picture](https://example.com/x.png) [good](https://example.com/a_(b))

```html
<script>document.title='owned'</script>
```
| a | b |
|---|--:|
| <i>1</i> | 2 |
"""


def test_nothing_that_a_model_says_becomes_markup(browser):
    with PageServer([delta(content=HOSTILE), end()]) as server:
        visit(browser, server.url)
        browser.press("hi", "enter")
        finished(browser)
        assert browser.js("return document.title") != "owned"
        assert browser.js("return document.querySelectorAll('.text :is(img, script, i, iframe)').length") == 0
        assert browser.js("return [...document.querySelectorAll('.text a')].map(a => a.getAttribute('href'))") == [
            "https://example.com/x.png", "https://example.com/a_(b)"]
        assert browser.js("return document.querySelector('.text pre').textContent") == (
            "<script>document.title='owned'</script>")
        assert browser.js("return document.querySelector('td').textContent") == "<i>1</i>"
        assert browser.errors == [], "the policy had nothing to refuse"


LINK = r'<a href="(https|mailto):[^"]*" rel="noopener noreferrer nofollow" target="_blank"[^>]*>'
RENDER = """
return import("/page/markdown.js").then(({show}) => {
  const place = document.createElement("div");
  show(place, arguments[0]);
  return place.innerHTML.replace(/ class="[^"]*"| tabindex="0"/g, "");
});
"""


def rendered(browser: Browser, text: str) -> str:
    return browser.js(RENDER, text)


@pytest.mark.parametrize("text, html", [
    ("a *b* **c** ~~d~~ `e*f*`", "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e*f*</code></p>"),
    ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
    ("**open and *half", "<p>**open and *half</p>"),
    ("# One #\ntext", "<h3>One</h3><p>text</p>"),
    ("- a\n- b\n  - c\n\n3. d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start=\"3\"><li>d</li></ol>"),
    ("text\n- a\n\nafter\n\n2. b", "<p>text</p><ul><li>a</li></ul><p>after</p><ol start=\"2\"><li>b</li></ol>"),
    ("1. a\n\n   ```\n   x = 1\n   ```\n2. b", None),
    ("> quoted\n> more", "<blockquote><p>quoted\nmore</p></blockquote>"),
    ("one  \ntwo\\\nthree", None),
    ("a \\*b\\* & <c>", "<p>a *b* &amp; &lt;c&gt;</p>"),
    ("---", "<hr>"),
    ("~~~ py\na`b\n~~~", "<figure><figcaption><span>py</span><button type=\"button\">Copy</button></figcaption>"
                          "<pre><code>a`b</code></pre></figure>"),
    ("`` a`b ``", "<p><code>a`b</code></p>"),
    ("[x](ftp://y) [z](mailto:a@b)", "<p>x <a>z</a></p>"),
    ("see https://example.com/x.", "<p>see <a>https://example.com/x</a>.</p>"),
])
def test_markdown(browser, text, html):
    with PageServer(HELLO) as server:
        browser.open(server.url)
        found = re.sub(LINK, "<a>", rendered(browser, text))
        if html is not None:
            assert found == html
        elif "x = 1" in text:
            assert found.startswith("<ol><li>a<figure>") and "<code>x = 1</code>" in found
            assert found.endswith("<li>b</li></ol>")
        else:
            assert found.count("<br>") == 2


@pytest.mark.slow
def test_hostile_markdown_takes_no_time(browser):
    """Each text has 200,000 characters: what grows with their square would take minutes, and the tab's time is up."""
    n = 200_000
    texts = ["*" * n, "_a" * (n // 2), "`" * n, "`a" * (n // 2), "[" * n, "[](" * (n // 3), "[](((((" * (n // 7),
             "#" * n, "# " + " " * n + "x", "# " + "#" * n + "x", "- " * (n // 2), ">" * n, "|" * n + "x",
             "|a|\n|" + " " * n + "x|", "|-" * (n // 2), "~" * n, "https://" + "." * n + "x", "a" + " " * n + "b",
             "\n" * n, "- a\n" * (n // 4), "> - " * (n // 4), "1. " * (n // 3), "**a*" * (n // 4), "\\" * n,
             "~" * n + "`", "~~~" + " " * n + "`", "# " + " " * n + "a\u2028b", "- " + " " * n + "a\u2028b"]
    with PageServer(HELLO) as server:
        browser.open(server.url)
        for text in texts:
            assert rendered(browser, text) is not None, text[:20]


def test_reasoning_is_folded_away_when_the_answer_begins(browser):
    seen = threading.Event()
    plan = [delta(reasoning_content="Let me "), delta(reasoning_content="think."), seen, delta(content="Four."), end()]
    with PageServer(plan) as server:
        visit(browser, server.url)
        browser.press("2+2?", "enter")
        browser.until(lambda: browser.js("return document.querySelector('details.thought')?.open"), "no thoughts")
        seen.set()
        finished(browser)
        assert browser.js("return document.querySelector('details.thought').open") is False
        assert browser.js("return document.querySelector('details.thought .text').textContent") == "Let me think."
        assert browser.js("return document.querySelector('.body > .text').textContent") == "Four."


CALLS = [delta(role="assistant", content=None),
         delta(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "add", "arguments": ""}}]),
         delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a": 1,'}}]),
         delta(tool_calls=[{"index": 0, "function": {"arguments": ' "b": 2}'}}]),
         delta(tool_calls=[{"index": 1, "id": "call_2", "function": {"name": "now", "arguments": "{}"}}]),
         end("tool_calls")]


def test_tools_are_offered_called_and_answered(browser):
    with PageServer(CALLS, HELLO) as server:
        visit(browser, server.url)
        browser.js("document.querySelector('#tune').click()")
        click(browser, "Put in an example")
        browser.js("document.querySelector('#input').focus()")
        browser.press("add 1 and 2", "enter")
        browser.until(lambda: browser.js("return document.querySelectorAll('.call').length") == 2, "no calls")
        boxes = "return document.querySelectorAll('.results textarea').length"
        browser.until(lambda: browser.js(boxes) == 2, "no boxes for the results")
        assert browser.js("return document.querySelector('.call pre').textContent") == '{\n  "a": 1,\n  "b": 2\n}'
        shot(browser, "chat-tools")
        browser.js("document.querySelectorAll('.results textarea').forEach((area, i) => { area.value = `r${i}`; })")
        click(browser, "Send the results")
        assert finished(browser, 2)[-1] == "Hello you"
        assert server.asked[0]["tools"][0]["function"]["name"] == "get_weather"
        assert server.asked[0]["tool_choice"] == "auto"
        said = server.asked[1]["messages"][1:]
        assert said[0]["tool_calls"][0] == {"id": "call_1", "type": "function", "function": {
            "name": "add", "arguments": '{"a": 1, "b": 2}'}}
        assert said[1:] == [{"role": "tool", "tool_call_id": "call_1", "content": "r0"},
                            {"role": "tool", "tool_call_id": "call_2", "content": "r1"}]


def test_settings_are_sent_and_wrong_ones_are_told_before_anything_is(browser):
    with PageServer(HELLO) as server:
        visit(browser, server.url)
        fill = ("const field = document.getElementById(arguments[0]); field.value = arguments[1];"
                "field.dispatchEvent(new Event('input'))")
        for name, value in {"system": "Be brief.", "set-temperature": "0.5", "set-seed": "7", "stops": "END\nstop",
                            "format": "json_schema", "schema": "{broken"}.items():
            browser.js(fill, name, value)
        browser.press("go", "enter")
        browser.until(lambda: "This is not JSON" in browser.text("#schema-wrong"), "a wrong schema is not told")
        assert server.asked == [] and browser.js("return document.activeElement.id") == "schema"
        shot(browser, "chat-settings")
        browser.js(fill, "schema", '{"type": "object"}')
        assert browser.js("return document.querySelector('#input').value") == "go", "nothing typed is lost"
        browser.js("document.querySelector('#send').click()")
        finished(browser)
        asked = server.asked[0]
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (asked["temperature"], asked["seed"], asked["stop"]) == (0.5, 7, ["END", "stop"])
        assert browser.js("return document.querySelector('figcaption span').textContent") == "json"
        assert browser.js("return document.querySelector('.text pre').textContent") == "Hello **you**", "as it came"
        assert asked["response_format"]["json_schema"] == {
            "name": "answer", "strict": True, "schema": {"type": "object"}}
        browser.open(server.url)
        browser.until(lambda: browser.js("return document.querySelector('#set-seed').value") == "7", "not kept")


REFUSALS = [
    ((400, {"error": {"message": "temperature must be less", "param": "temperature", "code": "invalid_value"}}),
     ["temperature must be less", "need a change"]),
    ((400, {"error": {"message": "4097 tokens are too many", "code": "context_length_exceeded"}}),
     ["4097 tokens are too many", "shorter", "new chat"]),
    ((429, {"error": {"message": "the queue is full", "code": "overloaded"}}), ["the queue is full", "in a moment"]),
    ((502, "<html>bad gateway</html>"), ["The server answers 502."])]


@pytest.mark.parametrize("refusal, parts", REFUSALS, ids=["field", "context", "busy", "proxy"])
def test_a_refusal_is_told_with_the_way_out(browser, refusal, parts):
    with PageServer([refusal], HELLO) as server:
        visit(browser, server.url)
        browser.press("hi", "enter")
        told = finished(browser)[0]
        assert all(part in told for part in parts), told
        if refusal[1] and "param" in str(refusal[1]):
            wrong = "return document.querySelector('#set-temperature').getAttribute('aria-invalid')"
            assert browser.js(wrong) == "true"
        shot(browser, f"chat-refused-{refusal[0]}")
        if "context" in str(refusal[1]):  # the same again would be as long
            click(browser, "Edit the message")
            assert browser.js("return document.activeElement.className") == "edit-box"
            assert "Regenerate" not in browser.js("return document.querySelector('#log').textContent")
            browser.press("shorter", "enter")
        else:
            click(browser, "Try again")
        assert finished(browser)[-1] == "Hello you"


def test_an_answer_that_breaks_off_is_kept_and_told(browser):
    cut = [delta(content="Half an"), {"error": {"message": "the engine is gone: out of memory", "code": "engine_dead"}}]
    with PageServer(cut, [delta(content="Half an"), end("length")], HELLO) as server:
        visit(browser, server.url)
        browser.press("hi", "enter")
        told = finished(browser)[0]
        assert "Half an" in told and "out of memory" in told and "started anew" in told
        click(browser, "Regenerate")
        browser.until(lambda: "cut:" in figures(browser), "the end is not told")
        click(browser, "Continue")
        browser.until(lambda: finished(browser)[-1] == "Half anHello you", "it is not continued")
        assert server.asked[-1]["continue_final_message"] is True
        assert server.asked[-1]["messages"][-1] == {"role": "assistant", "content": "Half an"}


def test_a_server_that_went_away_is_told(browser):
    with PageServer(HELLO) as server:
        visit(browser, server.url)
    browser.press("hi", "enter")
    assert "does not answer" in finished(browser)[0]


def test_edits_and_new_answers_stand_beside_the_old(browser):
    plans = [[delta(content=word), end()] for word in ("one", "two", "three")]
    with PageServer(*plans) as server:
        visit(browser, server.url)
        browser.press("first", "enter")
        assert finished(browser) == ["one"]
        click(browser, "Regenerate")
        browser.until(lambda: finished(browser) == ["two"], "no second answer")
        assert "2 of 2" in browser.js("return document.querySelector('.branches').textContent")
        browser.js("document.querySelector('.branches button').click()")
        assert answers(browser) == ["one"]
        browser.js("document.querySelector('#input').focus()")
        browser.press("\ue013")  # arrow up
        assert browser.js("return document.activeElement.className") == "edit-box"
        browser.press(" changed", "enter")
        browser.until(lambda: finished(browser) == ["three"], "the edit is not sent")
        assert server.asked[-1]["messages"] == [{"role": "user", "content": "first changed"}]
        browser.open(server.url)
        browser.until(lambda: answers(browser) == ["three"], "the branch is forgotten")


def test_conversations_are_listed_opened_and_deleted(browser):
    with PageServer(HELLO) as server:
        seen = threading.Event()
        server.plans[:0] = [[delta(content="It begins"), seen, end()]]
        visit(browser, server.url)
        browser.press("about whales", "enter")
        browser.until(lambda: answers(browser) == ["It begins"], "nothing comes")
        assert browser.js("return document.querySelector('#list .now').innerText").startswith("about whales")
        assert browser.js("return document.querySelector('article.user .tools').innerText") == "Copy"
        seen.set()
        finished(browser)
        browser.js("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'k', ctrlKey: true}))")
        browser.until(lambda: not answers(browser), "no new chat")
        browser.press("about birds", "enter")
        finished(browser)
        titles = "return [...document.querySelectorAll('#list .open')].map(b => b.textContent)"
        assert browser.js(titles) == ["about birds", "about whales"]
        click(browser, "about whales")
        assert "about whales" in browser.js("return document.querySelector('article.user').innerText")
        browser.js("window.confirm = () => true; document.querySelector('#list .now .drop').click()")
        assert browser.js(titles) == ["about birds"] and not answers(browser)


# ---- for everybody


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_it_can_be_read_in_light_and_dark(browser, scheme):
    browser.scheme(scheme)
    long = "Text with `code`, **bold** and [a link](https://example.com).\n\n```python\nprint(1)\n```\n\n- one\n- two\n"
    usage = {"choices": [], "usage": USAGE}
    with PageServer([delta(reasoning_content="Hm."), delta(content=long), end("length"), usage]) as server:
        visit(browser, server.url)
        browser.press("show me", "enter")
        finished(browser)
        browser.js("document.querySelector('#tune').click()")
        shot(browser, f"chat-{scheme}")
        low = [entry for entry in browser.js(CONTRASTS) if entry[1] < 4.5]
        assert not low, low


def test_a_narrow_window_needs_no_scrolling_sideways(browser):
    browser.width(420)
    try:
        with PageServer([delta(content="word " * 50 + "\n\n```\n" + "x" * 300 + "\n```\n"), end()]) as server:
            visit(browser, server.url)
            browser.press("hi", "enter")
            finished(browser)
            shot(browser, "chat-narrow")
            assert browser.js("return document.documentElement.scrollWidth <= innerWidth")
            browser.js("document.querySelector('#menu').click()")
            shown = "return document.querySelector('#side').checkVisibility({visibilityProperty: true})"
            browser.until(lambda: browser.js(shown), "it does not open")
            browser.press("escape")
            browser.until(lambda: not browser.js(shown), "it stays open")
    finally:
        browser.width(1200)


NAMELESS = """
const named = (e) => e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length
  || e.textContent.trim() || e.title;
return [...document.querySelectorAll("button, input, select, textarea, a, dialog, aside")].filter(
  (e) => !named(e)).map((e) => e.outerHTML);
"""


def test_everything_has_a_name_and_can_be_reached_with_the_keyboard(browser):
    with PageServer(HELLO) as server:
        visit(browser, server.url)
        browser.press("hi", "enter")
        finished(browser)
        assert browser.js(NAMELESS) == []
        browser.js("document.activeElement.blur()")
        browser.press("?")
        assert browser.js("return document.querySelector('#help').open")
        browser.press("escape")
        browser.press("/")
        assert browser.js("return document.activeElement.id") == "input"
        seen = set()
        for _ in range(30):
            browser.press("tab")
            seen.add(browser.js("const e = document.activeElement; return e.id || e.className || e.textContent"))
            if browser.js("return document.activeElement !== document.body && "
                          "getComputedStyle(document.activeElement).outlineStyle === 'none' && "
                          "document.activeElement.id !== 'input'"):
                raise AssertionError("the focus cannot be seen")
        assert {"new", "tune", "Copy", "Regenerate", "edit", "keys"} <= seen, seen
