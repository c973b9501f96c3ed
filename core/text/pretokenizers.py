"""Pre-tokenizers by the names that GGUF files give them in `tokenizer.ggml.pre`.

Each is the split that the model's own tokenizer.json prescribes; the names are those of the ggml project's converter,
and its published test vectors are checked in tests/test_tokenizer.py. A name that is not here is refused: a wrong split
reads slightly other text than the model was trained on and shows in nothing but worse answers.
"""
from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

from ..errors import CheckpointError, shown

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
           rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}"
           rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_O200K = (rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
          rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")


class Split(NamedTuple):
    """Regular expressions that cut one after the other, and what else hangs on the name.

    ignore_merges: a whole word that is a token is taken without merging.  add_bos: when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_FAMILIES: tuple[tuple[Split, str], ...] = (
    (Split((_GPT2,)), "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat granite-docling mellum modern-bert"),
    (Split((r"\p{N}", _GPT2)), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (Split((_CL100K,), ignore_merges=True, add_bos=True), "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2"),
    (Split((_CL100K,), ignore_merges=True), "glm4"),
    (Split((_CL100K,)), "dbrx smaug-bpe chatglm-bpe"),
    (Split((_QWEN2,)), "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez solar-open"),
    (Split((_QWEN35,)), "qwen35"),
    (Split((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (Split((_O200K,)), "gpt-4o llama4"),
    (Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")), "deepseek-coder"),
    (Split((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)), "deepseek-v3 hunyuan-dense"),
)
SPLITS: dict[str, Split] = {name: split for split, names in _FAMILIES for name in names.split()}


def named_split(name: str | None) -> Split:
    """The split for `tokenizer.ggml.pre`; `CheckpointError` for a missing or unknown name."""
    if name is None:
        raise CheckpointError("the GGUF file has no tokenizer.ggml.pre, so that the way it splits words is unknown: "
                              "convert the model again with a current converter")
    if name not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise CheckpointError(f"unknown pre-tokenizer {shown(name)} (tokenizer.ggml.pre); known: {known}. "
                              "The model's Hugging Face folder needs no such name: use that")
    return SPLITS[name]
