"""The engine behind one asynchronous interface, in three processes or in one.

    API + tokenizer --Submit(+Watch), Abort, Command--> scheduler --Watch, TokenOutputs, ...--> detokenizer
          ^-------------------- TextOutputs, Reply, Ready, Progress, Failed -------------------------'
                              scheduler <--Abort("stop"), Ready-- detokenizer

Each arrow is one PUSH/PULL pair of bounded ipc sockets in a directory that only its owner can enter, and that is
removed as soon as all are connected. Messages are msgspec structs; nothing is ever pickled.
"""
from .client import EngineClient

__all__ = ["EngineClient"]
