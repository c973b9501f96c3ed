"""Hostile input for as long as you like: bodies, headers, chat templates, checkpoint files, grammars, texts of tools.

    python -m tests.fuzz --what gguf --minutes 5

What is made up depends on the seed and the number of a case alone, so `--seed S --only N` does one again. Any error but
the one that is meant for bad input fails, and so does a case that computes for more than a second, one that hangs, and
memory that grows after the first fifth of the time. Exits 1 then, with the case in the last line.
"""
from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.errors import CheckpointError, RequestError
from isthmus.core.grammar.contract import GrammarError
from isthmus.core.grammar.ebnf import schema_to_gbnf
from isthmus.core.grammar.library import open_backend
from isthmus.core.parsers.choose import Parsers  # registers all  # noqa: F401
from isthmus.core.parsers.contract import CALLS, THINKING
from isthmus.core.text.template import ChatTemplate
from isthmus.core.weights.checkpoint import open_checkpoint
from starlette.testclient import TestClient

from .checkpoints import Stored, gguf_bytes, safetensors_bytes, tiny_llama_gguf
from .fake_client import make_app
from .json_schema_suite import Bytes, next_tokens
from .live import listening
from .memory import allocated
from .reply_samples import SAMPLES, TOOLS
from .vocabularies import CHATML

COMPUTES, HANGS = 1.0, 120.0  # seconds of processor time, and on the clock of a machine that has much else to do
GROWS = 64 << 20              # bytes
DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
TEMPLATES = DATA / "llama_cpp_models" / "models" / "templates"
WORDS = ["", "a", "é", "\U0001F98A", "\ud800", "\x00", "true", "type", "object", "string", "array", "integer",
         "#/$defs/a", "tiny", "user", "assistant", "system", "tool", "text", "function", "auto", "required", "none",
         "json_schema", "json_object", "json", "date", "a+", "(a|b)*", "<think>", "<|im_end|>", "resp_1",
         "http://127.0.0.1/x",
         "9" * 400]
NUMBERS = [0, 1, -1, 2, 3.5, 1e308, -1e-308, 2**31, 2**63, 2**64, -(2**63), 10**30, 300, 0.1]
FIELDS = """model messages prompt input role content type text tools tool_choice function name parameters arguments id
    tool_calls tool_call_id response_format json_schema schema strict stream stream_options include_usage n best_of
    max_tokens max_completion_tokens max_output_tokens temperature top_p top_k min_p seed stop stop_token_ids logit_bias
    logprobs top_logprobs echo min_tokens guided_json guided_regex guided_choice guided_grammar structured_outputs
    cache_salt priority session_id cache_hint next_within chat_template_kwargs reasoning effort thinking budget_tokens
    system metadata previous_response_id store include instructions text format options num_predict raw images suffix
    ignore_eos return_token_ids sampling_params input_ids rid tokens bad_words allowed_token_ids logits_processors
    prefix adapter encoding_format dimensions query documents lora_name lora_path user truncation""".split()
KEYWORDS = """type properties items enum pattern minLength maxLength minimum exclusiveMaximum required anyOf $ref format
    additionalProperties prefixItems const multipleOf patternProperties allOf oneOf $defs minItems maxItems
    maxProperties minProperties title not""".split()
PIECES = [*"ab(){}[]|*+?.^$\\-,:=\"'/ \n", "::=", "root ", "root ::= ", "start: ", "{1,9}", "{1000000}", "\\d", "\\w",
          "%json {", "<[1]>", "(?i)", "[a-z]", "(a+)+", '"a" ', "| ", "\ud800", "é", "//", "#"]
JINJA = ["{{ ", " }}", "{% for m in messages %}", "{% endfor %}", "{% if ", " %}", "{% endif %}", "{% set x = ",
         "m.content", "messages", "range(10**9)", "'a' * 10**9", "raise_exception('no')", " ~ ", " | tojson",
         " | length", "[0]",
         ".__class__", "namespace(n=0)", "{% macro f() %}", "{{ f() }}", "{% endmacro %}", "x", "tools", " + ",
         "1", "'", '"']
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
         "/api/chat", "/api/generate", "/api/show", "/generate", "/tokenize", "/detokenize",
         "/abort_request")


class Fault(AssertionError):
    """What a case found."""


def value(rng: random.Random, names: list[str], depth: int = 0) -> Any:
    """Any JSON, in which these names are likely."""
    kind = rng.randrange(12 if depth < 5 else 7)
    if kind >= 9:
        return {rng.choice(names): value(rng, names, depth + 1) for _ in range(rng.randrange(6))}
    if kind >= 7:
        return [value(rng, names, depth + 1) for _ in range(rng.randrange(4))]
    return rng.choice([None, True, False, rng.choice(NUMBERS), rng.randint(-3, 300), *rng.choices(WORDS, k=2)])


def damaged(rng: random.Random, data: bytes, pieces: list[bytes] = ()) -> bytes:
    """With some bytes changed, left out, repeated, or these pieces put in."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 12])):
        at, kind = rng.randrange(len(out) + 1), rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1 and at + 8 <= len(out):
            number = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(2**16)])
            out[at:at + 8] = number.to_bytes(8, "little")
        elif kind == 2:
            del out[at:at + rng.choice([1, 4, 40])]
        elif kind == 3:
            out[at:at] = out[at:at + rng.choice([1, 8, 200])]
        elif kind == 4 and pieces:
            out[at:at] = rng.choice(pieces)
        elif kind == 5 and rng.random() < 0.2:
            del out[at:]
    return bytes(out)


@contextmanager
def bodies() -> Iterator[Callable[[random.Random], None]]:
    """JSON, and what is hardly JSON, for every endpoint: an answer, or an error of the client's."""
    made = make_app(text="<think>hé</think>one", model={"reasoning_parser": "think", "tool_parser": "hermes"})
    with TestClient(made.app) as http:
        def case(rng: random.Random) -> None:
            body = {name: value(rng, FIELDS) for name in rng.sample(FIELDS, rng.randrange(12))}
            body |= {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 9} \
                if rng.random() < 0.5 else {}
            data = json.dumps(body if rng.random() < 0.9 else value(rng, FIELDS)).encode("utf-8", "replace")
            if rng.random() < 0.3:
                data = damaged(rng, data, [b"[" * 2000, b'{"a":' * 500, b"\xff", b"1e999999", b"NaN"])
            answer = http.post(rng.choice(PATHS), content=data, headers={"content-type": "application/json"})
            if answer.status_code >= 500 or answer.status_code >= 400 and len(answer.content) > 8000:
                raise Fault(f"{answer.status_code} {answer.text[:500]} for {data[:2000]!r}")
        yield case


@contextmanager
def headers() -> Iterator[Callable[[random.Random], None]]:
    """Requests of any bytes on a socket: an answer below 500, or none, and then others are answered."""
    names = ["host", "content-length", "transfer-encoding", "content-type", "authorization", "origin", "x-request-id",
             "traceparent", "connection", "upgrade", "expect", "accept", "cookie", "anthropic-version", "forwarded"]
    values = ["", "x", "-1", "99999999999999999999", "chunked", "chunked, chunked", "application/json", "Bearer ", "é",
              "\t",
              "text/plain", "0", "5", "100-continue", "h2c", "websocket", "a" * 9000,
              "00-" + "f" * 32 + "-" + "f" * 16 + "-01"]
    made = make_app(server={"api_key": "sekret"})
    with listening(made.app) as url:
        host, port = url.removeprefix("http://").split(":")

        def asked(data: bytes) -> bytes:
            with socket.create_connection((host, int(port)), timeout=30) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                found = b""
                try:
                    while len(found) < 100_000 and (more := sock.recv(65536)):
                        found += more
                except ConnectionResetError:
                    pass
                return found

        def case(rng: random.Random) -> None:
            path = rng.choice([*PATHS, "/", "/%00", "/../x", "*"])
            lines = [f"{rng.choice(['GET', 'POST', 'POST', 'PUT', 'X'])} {path} HTTP/1.1"]
            lines += [f"{rng.choice(names)}: {rng.choice(values)}" for _ in range(rng.randrange(8))]
            data = ("\r\n".join(lines) + "\r\n\r\n" + rng.choice(["", "{}", "5\r\nhello\r\n0\r\n\r\n"])).encode("utf-8")
            data = damaged(rng, data, [b"\r\n", b"\x00", b"a: b\r\n" * 300]) if rng.random() < 0.5 else data
            for status in (line.split(b" ")[1:2] for line in asked(data).splitlines() if line.startswith(b"HTTP/1.")):
                if status and status[0][:1] == b"5" and status[0] != b"501":
                    raise Fault(f"{status} for {data[:2000]!r}")
            if rng.random() < 0.05 and b" 200 " not in asked(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")[:20]:
                raise Fault(f"not healthy after {data[:2000]!r}")
        yield case


@contextmanager
def templates() -> Iterator[Callable[[random.Random], None]]:
    """Templates as models have them, damaged, over any messages: a text, or an error of the client's."""
    seeds = [CHATML.encode()] + [path.read_bytes() for path in sorted(TEMPLATES.glob("*.jinja"))[:40]]
    pieces = [piece.encode() for piece in JINJA]

    def case(rng: random.Random) -> None:
        source = damaged(rng, rng.choice(seeds), pieces).decode("utf-8", "replace") if rng.random() < 0.7 else "".join(
            rng.choices(JINJA, k=rng.randrange(30)))
        messages = [{"role": rng.choice(WORDS), "content": rng.choice([rng.choice(WORDS), value(rng, FIELDS)])}
                    for _ in range(rng.randrange(1, 4))]
        try:
            template = ChatTemplate(source, None, {"bos_token": "<s>", "eos_token": "</s>"})
            template.render(messages, rng.choice([None, [{"type": "function", "function": {"name": "f"}}]]))
        except RequestError as error:
            if len(str(error)) > 4000:
                raise Fault(f"{len(str(error))} characters of error for {source[:2000]!r}") from error
    yield case


@contextmanager
def checkpoint(name: str, seeds: list[bytes]) -> Iterator[Callable[[random.Random], None]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        Path(folder, "config.json").write_text("{}")

        def case(rng: random.Random) -> None:
            path.write_bytes(damaged(rng, rng.choice(seeds), [b'{"a":' * 300, b"[" * 3000, bytes(9)]))
            try:
                with open_checkpoint(path if name.endswith("gguf") else folder) as found:
                    for each in found.names:
                        found.tensor(each)
            except CheckpointError as error:
                if len(str(error)) > 4000:
                    raise Fault(f"{len(str(error))} characters of error") from error
        yield case


def gguf() -> Any:
    """Files of which any bytes are wrong: a checkpoint, or an error that says why not."""
    small = gguf_bytes({"general.architecture": "llama", "a": [1, 2], "b": ["x"] * 9, "deep": [[1], [2]]},
                       {"output.weight": Stored("q8_0", (2, 32), bytes(68)), "x": np.ones((4, 8), np.float32)})
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(tiny_llama_gguf(Path(folder, "tiny.gguf"))).read_bytes()
    return checkpoint("model.gguf", [small, small, whole])


def safetensors() -> Any:
    """The same of safetensors."""
    return checkpoint("model.safetensors", [safetensors_bytes(
        {"a": np.ones(4, np.float32), "b": Stored("bf16", (3, 2), bytes(12))}, {"format": "pt"})])


@contextmanager
def grammars() -> Iterator[Callable[[random.Random], None]]:
    """Regular expressions, grammars and schemas: refused, or followed for some tokens."""
    backend = open_backend("llguidance", Bytes())

    def case(rng: random.Random) -> None:
        kind = rng.choice(["regex", "grammar", "json_schema", "json_schema", "structural_tag", "choice"])
        source = "".join(rng.choices(PIECES, k=rng.randrange(40)))
        if kind not in ("regex", "grammar"):
            source = json.dumps({rng.choice(KEYWORDS): value(rng, KEYWORDS) for _ in range(rng.randrange(5))})
        try:
            if kind == "json_schema" and rng.random() < 0.3:
                schema_to_gbnf(source)
                return
            if kind == "choice":
                source = json.dumps([rng.choice([word for word in WORDS if word]) for _ in range(rng.randrange(1, 9))])
            matcher = backend.compile(kind, source).start()
        except GrammarError as error:
            if len(str(error)) > 4000:
                raise Fault(f"{len(str(error))} characters of error for {source[:2000]!r}") from error
            return
        for _ in range(12):
            choices = next_tokens(matcher)
            if not choices or matcher.is_complete() or not matcher.accept(rng.choice(choices)):
                break
    yield case


@contextmanager
def tools() -> Iterator[Callable[[random.Random], None]]:
    """What models write, damaged and cut anywhere, through every parser: events, whatever it is."""
    marks = sorted({mark for name in CALLS for mark in CALLS.create(name).controls} | {
        mark for name in THINKING for mark in THINKING.create(name).controls} | {*'[]{}"\'\\(),:= \n<>', "get_weather"})
    samples = [sample[1] for sample in SAMPLES if isinstance(sample[1], str)]

    def case(rng: random.Random) -> None:
        text = rng.choice(samples) if rng.random() < 0.6 else ""
        for _ in range(rng.randrange(8)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice([rng.choice(marks), rng.choice(WORDS), rng.choice(marks) * 400]) + text[at:]
        for name in rng.sample(sorted(CALLS), 3):
            parser = CALLS.create(name).parser(TOOLS)
            if rng.random() < 0.5:
                name = rng.choice(sorted(THINKING))
                parser = THINKING.create(name).parser(rng.random() < 0.5, parser, TOOLS)
            at = 0
            while at < len(text):
                size = rng.choice([1, 3, 50, 2000])
                for event in parser.feed(text[at:at + size]):
                    assert event is not None
                at += size
            parser.finish()
    yield case


TARGETS = {"bodies": bodies, "headers": headers, "templates": templates, "gguf": gguf, "safetensors": safetensors,
           "grammars": grammars, "tools": tools}


def memory() -> int:
    gc.collect()
    return allocated()


def fuzz(what: str, seed: int, seconds: float, first: int = 0, most: int | None = None) -> dict[str, Any]:
    """Cases from `first` on until the time is up, or so many. Raises `Fault`."""
    began, number, slowest, warm = time.monotonic(), first, 0.0, None
    with TARGETS[what]() as case:
        while time.monotonic() - began < seconds and (most is None or number - first < most):
            faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.__stderr__)
            started = time.process_time()
            try:
                case(random.Random(f"{what} {seed} {number}"))
            except Exception as error:
                raise Fault(f"{what} --seed {seed} --only {number}: {type(error).__name__}: {error}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()
            slowest = max(slowest, spent := time.process_time() - started)
            if spent > COMPUTES and number > first:
                raise Fault(f"{what} --seed {seed} --only {number}: it computed for {spent:.1f} s")
            number += 1
            if warm is None and time.monotonic() - began > seconds / 5:
                warm = memory()
        grown = 0 if warm is None else memory() - warm
        if grown > GROWS:
            raise Fault(f"{what} --seed {seed}: {grown >> 20} MiB more after {number - first} cases")
    return {"what": what, "seed": seed, "cases": number - first, "slowest_s": round(slowest, 3), "grown": grown}


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="of one case")
    given = parser.parse_args(argv)
    for what in TARGETS if given.what == "all" else [given.what]:
        try:
            print(json.dumps(fuzz(what, given.seed, given.minutes * 60, given.only or 0,
                                  None if given.only is None else 1)), flush=True)
        except Fault as fault:
            print(fault)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
