"""An engine without a model, for tests of everything around it: request n gives the ids of its prompt back, in turn."""
from __future__ import annotations

import gc
import os
import time
from collections import OrderedDict

from isthmus.core.errors import Overloaded, RequestError
from isthmus.core.messages import TokenOutput, pack_ids, unpack_ids
from isthmus.core.scheduler.outputs import StepOutputs

SPECIAL = 0  # a prompt that starts with one of these misbehaves on purpose
REFUSE, CRASH, RAISE, FULL, BUG = 250, 251, 252, 253, 254
EOS = 255


class ByteTokenizer:
    """Token i is the byte i."""

    strip_leading_space = False
    vocab_size, bos_id, eos_ids, special_ids, add_bos, chat_template = 256, None, (EOS,), (EOS,), False, None

    def __init__(self, config=None):
        pass

    def encode(self, text, add_special=False, parse_special=False):
        return list(text.encode())

    def decode(self, ids, skip_special=True):
        return self.join_bytes(ids, skip_special).decode(errors="replace")

    def join_bytes(self, ids, skip_special=True):
        return b"".join(self.token_bytes(int(i)) for i in ids if not (skip_special and i in self.special_ids))

    def token_bytes(self, id):
        return bytes([id])

    def id_to_token(self, id):
        return f"<{id}>"


class FakeEngine:
    """Emits each prompt's ids one a step, over and over, until max_tokens; id 255 ends a request."""

    def __init__(self, config, progress=None):
        self.running = OrderedDict()
        self.ended = []
        self.closed = False
        self.steps = 0
        self.delay = 0.001
        for done in range(3):
            (progress or (lambda *a: None))("load weights", done, 2)
        if config.model.model == "broken":
            raise RequestError("need 12 GiB, 3 GiB are free; try --max-model-len 2048")
        self.info = {"model": config.model.model, "served_name": "fake", "platform": "none", "pid": os.getpid(),
                     "max_model_len": 1000, "vocab_size": 256}

    def submit(self, request):
        prompt = unpack_ids(request.prompt)
        if prompt[0] == REFUSE:
            raise RequestError("prompt has 5000 tokens, the context is 1000", param="prompt",
                               code="context_length_exceeded")
        if prompt[0] == FULL:
            raise Overloaded("8 requests are waiting, 8 may")
        if prompt[0] == BUG:
            raise KeyError("a bug")
        if request.id in self.running:
            raise ValueError(f"request id {request.id!r} is in use")
        if prompt[0] == CRASH:
            os._exit(7)
        self.running[request.id] = (prompt, request.params, 0)

    def abort(self, ids, reason):
        for id in ids:
            if self.running.pop(id, None) is not None:
                self.ended.append(TokenOutput(id, b"", reason))

    @property
    def has_work(self):
        return bool(self.running or self.ended)

    def step(self):
        time.sleep(self.delay)
        self.steps += 1
        outputs, self.ended = self.ended, []
        for id, (prompt, params, n) in list(self.running.items()):
            token = int(prompt[n % len(prompt)])
            if token == RAISE:
                raise ZeroDivisionError("the step went wrong")
            finish = "stop" if token == EOS else "length" if n + 1 >= params.max_tokens else None
            outputs.append(TokenOutput(id, pack_ids([token]), finish, stop_id=EOS if token == EOS else -1,
                                       prompt_tokens=len(prompt) if n == 0 else 0))
            if finish:
                del self.running[id]
            else:
                self.running[id] = (prompt, params, n + 1)
        return StepOutputs(outputs)

    def command(self, name):
        if name == "flush_cache":
            raise RequestError("2 requests are running")
        if name == "frozen":
            return {"objects": gc.get_freeze_count()}
        return {"running": len(self.running), "steps": self.steps, "busy": self.has_work}

    def report(self):
        return f"fake: {len(self.running)} running, after step {self.steps}"

    def save(self):
        """Nothing is recorded."""

    def close(self):
        self.closed = True
