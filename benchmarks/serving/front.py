"""How many streamed tokens a second the front end carries: HTTP, templates, tokenizer, scheduler, detokenizer, SSE.

    python benchmarks/serving/front.py --connections 256

A real `isthmus serve --platform=null` in its three processes: no device and no model, the next token is a hash,
so that what is measured is all that is not the model. Every connection streams a chat and asks for the next one when it
ends. The clients are one more process on the same cores, which reads bytes and counts events. Told are tokens a second,
and each process's time of a core for a token, which other work on the machine changes less.

    python benchmarks/serving/front.py --vllm PYTHON FOLDER

measures vLLM's front end in turn (`vllm_front.py`): PYTHON is of an environment that has it, FOLDER gets the same
vocabulary and template in the form that it reads.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from isthmus_server import IsthmusServer

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "core"), str(Path(__file__).resolve().parents[2] / "tests")]
VOCABULARY = Path(__file__).resolve().parents[3] / "shared/data/llama_cpp_models/models/ggml-vocab-gpt-2.gguf"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


async def stream(port: int, body: bytes, until: float, counted: list[tuple[float, int, int]]) -> None:
    """Ask again and again on one connection until the time is over; (time, tokens, events) of each answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode()
    while time.monotonic() < until:
        writer.write(head + body)
        kept, events = b"", 0
        while not kept.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError(f"the server hung up after {kept!r}")
            events += data.count(b"data: ")
            kept = (kept + data)[-2000:]
        if b"[DONE]" not in kept:
            raise RuntimeError(f"no whole answer: {kept!r}")
        usage = json.loads(kept[kept.rindex(b"data: {") + 6:].split(b"\n")[0])["usage"]
        counted.append((time.monotonic(), usage["completion_tokens"], events))
    writer.close()


class VllmServer:
    """vLLM's API server on an engine that pretends, started on construction."""

    def __init__(self, python: str, folder: str, given: argparse.Namespace):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        script = str(Path(__file__).with_name("vllm_front.py"))
        self._said = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, script, folder, str(given.step_ms), str(given.connections), f"--port={self.port}"],
            stdout=self._said, stderr=self._said)
        until = time.monotonic() + 300
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/v1/models").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        self._said.seek(0)
        raise RuntimeError(f"vLLM is not there: {self._said.read()[-2000:]}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def write_peer_model(folder: Path, model: str) -> None:
    """The tokenizer of `model` and a configuration, as transformers and vLLM read them. There are no weights."""
    from isthmus.core.text.tokenizer import load_tokenizer
    from isthmus.core.weights.checkpoint import open_checkpoint
    from tokenizers import Tokenizer, decoders
    with open_checkpoint(Path(model)) as checkpoint:
        encoder = load_tokenizer(checkpoint)._encoders[1]
    tokenizer = next(value for value in vars(encoder).values() if isinstance(value, Tokenizer))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256, "eos_token_id": 0,
        "bos_token_id": 0}))


def clients(port: int, connections: int, tokens: int, seconds: float, send) -> None:
    """A process of clients: what they counted goes back through `send`."""
    async def main() -> list[tuple[float, int, int]]:
        counted: list[tuple[float, int, int]] = []
        until = time.monotonic() + seconds
        bodies = [json.dumps({"messages": [{"role": "user", "content": f"Tell me about number {i}, at length."}],
                              "max_tokens": tokens, "ignore_eos": True, "stream": True,
                              "stream_options": {"include_usage": True}}).encode() for i in range(connections)]
        await asyncio.gather(*(stream(port, body, until, counted) for body in bodies))
        return counted
    began = time.monotonic()
    counted = asyncio.run(main())
    send.send((began, counted, time.process_time()))


def processor_times(server: psutil.Process) -> dict[str, float]:
    """Seconds of a core that each of the server's processes has used, by what it does."""
    found = {"API": sum(server.cpu_times()[:2])}
    for child in server.children(recursive=True):
        name = next((word.rsplit(".", 1)[1] for word in child.cmdline() if ".processes." in word), "other")
        found[name] = found.get(name, 0) + sum(child.cpu_times()[:2])
    return found


def ours(given: argparse.Namespace, model: str) -> IsthmusServer:
    return IsthmusServer("--platform=null", "--platform-option=check=0", f"--platform-option=delay_ms={given.step_ms}",
                         f"--chat-template={Path(model).with_name('template.jinja')}",
                         f"--max-running-requests={given.connections}", model=model)


def measure(given: argparse.Namespace, server: IsthmusServer | VllmServer) -> dict[str, float]:
    """One round: tokens a second, events a token, and microseconds of a core for a token by process."""
    try:
        process = psutil.Process(server._process.pid)
        before = processor_times(process)
        receive, send = multiprocessing.Pipe(False)
        worker = multiprocessing.Process(
            target=clients, args=(server.port, given.connections, given.tokens, given.seconds, send))
        worker.start()
        send.close()  # so that a worker that ends early is noticed
        began, counted, client = receive.recv()
        worker.join()
        used = {name: value - before.get(name, 0) for name, value in processor_times(process).items()}
    finally:
        server.close()
    tokens = sum(n for _, n, _ in counted)
    found = {"tokens/s": tokens / (max(at for at, _, _ in counted) - began),
             "events/token": sum(n for _, _, n in counted) / tokens}
    found |= {f"{name} us/token": 1e6 * value / tokens for name, value in used.items()}
    return found | {"server us/token": 1e6 * sum(used.values()) / tokens, "clients us/token": 1e6 * client / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=190, help="of each answer (the model has a context of 256)")
    parser.add_argument("--seconds", type=float, default=20, help="after which no connection asks again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=0, help="a step of the engine takes at least so long; at 0 it "
                        "is always ahead, and a stream gets several tokens in an event")
    parser.add_argument("--vllm", nargs=2, metavar=("PYTHON", "FOLDER"))
    given = parser.parse_args()
    from overlap import model_with
    with tempfile.TemporaryDirectory() as folder:
        model = str(model_with(VOCABULARY, Path(folder, "model.gguf")))
        Path(folder, "template.jinja").write_text(TEMPLATE)
        starts = {"isthmus": lambda: ours(given, model)}
        if given.vllm:
            write_peer_model(Path(given.vllm[1]), model)
            starts["vLLM"] = lambda: VllmServer(*given.vllm, given)
        rounds = [{who: measure(given, start()) for who, start in starts.items()} for _ in range(given.rounds)]
    for who in starts:
        print(who)
        for name in rounds[0][who]:
            values = [found[who].get(name, 0.0) for found in rounds]
            print(f"  {name:24} {statistics.median(values):10.2f}   [{min(values):.2f} to {max(values):.2f}]")


if __name__ == "__main__":
    main()
