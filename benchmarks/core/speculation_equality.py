"""Greedy text with every drafter is the text without: prints each parting with its margin, and how many there were.

    python benchmarks/core/speculation_equality.py [--model PATH] [--platform cpu] [--prompts 64] [--tokens 128]
        [--batch 1 16] [--page 1 16] [--drafter ngram --drafter eagle,tokens=3 ...]

Every drafter, batch and page size, with overlap and without; in each engine twice, the second time on what the first
has left in the cache. What is compared with: no drafts, pages of 16, one at a time, a cold cache. A margin is by how
much the reference's token was likelier than the other, as a logarithm: 0 is a tie. Ends with 1 where one is above
--tie.
"""
from __future__ import annotations

import argparse
import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
from isthmus.core.config import (
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids, unpack_ids
from isthmus.core.text.tokenizer import load_tokenizer
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.sources import resolve_model

DRAFTERS = ["ngram,tokens=8", "suffix,tokens=8", "eagle,tokens=3", "eagle,tokens=2,branches=3", "exit,tokens=2"]
FORMS = ("What is {}?", "Tell me a story about {}.", "List five facts about {}.", "Write the word {} ten times.")
TOPICS = ("bread", "chess", "steam", "the moon", "rain", "a harbour", "bees", "clocks", "maps", "salt", "a king",
          "numbers", "snow", "tea", "wolves", "light")


def engine(given: argparse.Namespace, speculative: str = "", batch: int = 1, page: int = 16,
           overlap: bool = True) -> EngineCore:
    drafter = tuple(speculative.split(",")) + ("adaptive=0",) if speculative else ()
    return EngineCore(Config(
        model=ModelSettings(str(given.path), max_model_len=1024), platform=PlatformSettings(given.platform),
        cache=CacheSettings(page_size=page, kv_cache_memory="700MiB"),
        scheduler=SchedulerSettings(max_running_requests=batch, overlap=overlap),
        speculation=SpeculationSettings(drafter)))


def texts(core: EngineCore, prompts: list[list[int]], **params: int) -> list[list[int]]:
    for i, ids in enumerate(prompts):
        core.submit(Submit(f"{i}", pack_ids(np.array(ids)), SamplingParams(
            temperature=0.0, ignore_eos=True, **params)))
    found: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for output in core.step():
            found[int(output.id)] += unpack_ids(output.tokens).tolist()
    return found


def margin(core: EngineCore, prefix: list[int], want: int, have: int) -> float:
    """By how much `want` is likelier than `have` behind a prefix."""
    found = {}
    for token in (want, have):
        core.submit(Submit("m", pack_ids(np.array([*prefix, token])), SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0)))
        while core.has_work:
            for output in core.step():
                if output.prompt_logprobs is not None:
                    found[token] = float(np.frombuffer(output.prompt_logprobs.chosen, np.float32)[-1])
    return found[want] - found[have]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model unless given")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--page", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--drafter", action="append", metavar="SPECULATIVE", help=f"{'; '.join(DRAFTERS)} unless given")
    parser.add_argument("--tie", type=float, default=0.05, help="a margin up to which it is one (%(default)s)")
    given = parser.parse_args()
    given.path = Path(resolve_model(given.model))
    with open_checkpoint(given.path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    asked = [tokenizer.encode(f"<|im_start|>user\n{form.format(topic)}<|im_end|>\n<|im_start|>assistant\n",
                              add_special=True) for form, topic in itertools.product(FORMS, TOPICS)][:given.prompts]
    with closing(engine(given)) as reference:
        wanted = texts(reference, asked, max_tokens=given.tokens)
        worst = 0.0
        for drafter, batch, page, overlap in itertools.product(
                given.drafter or DRAFTERS, given.batch, given.page, (True, False)):
            with closing(engine(given, drafter, batch, page, overlap)) as core:
                for cache in ("cold", "warm"):
                    found = texts(core, asked, max_tokens=given.tokens)
                    partings = [(i, next(at for at in range(len(want)) if want[at:at + 1] != have[at:at + 1]))
                                for i, (want, have) in enumerate(zip(wanted, found, strict=True)) if want != have]
                    stats = core.stats()
                    print(f"{drafter}, {batch} at a time, pages of {page}, overlap {'on' if overlap else 'off'}, "
                          f"{cache}: {len(partings)} of {len(asked)} part; {stats['accepted_tokens']} of "
                          f"{stats['drafted_tokens']} drafted tokens kept so far", flush=True)
                    for i, at in partings:
                        each = margin(reference, asked[i] + wanted[i][:at], wanted[i][at], found[i][at])
                        worst = max(worst, abs(each))
                        print(f"  text {i} parts at token {at}: margin {each:.1e}", flush=True)
    print(f"the largest margin of a parting is {worst:.1e}")
    return int(worst > given.tie)


if __name__ == "__main__":
    raise SystemExit(main())
