"""Text in and out: tokenizers, incremental detokenizing, stop strings, chat templates."""
from .detokenizer import Detokenizer, Utf8Stream
from .stop import StopFilter
from .template import ChatTemplate
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopFilter", "Tokenizer", "Utf8Stream", "load_tokenizer"]
