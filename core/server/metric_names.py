"""What is measured, and what each number is called: by us, by vLLM and by SGLang. None = not under that name.

Source of the foreign names: what Gateway API inference routers, autoscalers and the dashboards of these projects read.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
ANSWERS = (1, 2, 5, 10, 20, 50, 100)
ONE = ()  # where only a sum and a count are known: one bucket for all


class Family(NamedTuple):
    """A set of names. column: of the tables below. labels: beside the model's name."""

    prefix: str
    column: int
    labels: Mapping[str, str]


FAMILIES = {
    "isthmus": Family("isthmus_", 0, {}),
    "vllm": Family("vllm:", 1, {"engine": "0"}),
    "sglang": Family("sglang:", 2, {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}),
}

# Key in the engine's numbers, kind, our name, vLLM's, SGLang's, help. The same number may have several rows.
ENGINE = (
    ("running", "gauge", "requests_running", "num_requests_running", "num_running_reqs", "Requests being computed"),
    ("waiting", "gauge", "requests_waiting", "num_requests_waiting", "num_queue_reqs", "Requests in the queue"),
    ("pages_total", "gauge", "kv_pages", None, "num_pages", "Pages of K and V in the pool"),
    ("page_size", "gauge", None, None, "page_size", "Tokens in a page"),
    ("pages_free", "gauge", "kv_pages_free", None, None, "Pages that hold nothing"),
    ("pages_cached", "gauge", "kv_pages_cached", None, None, "Pages in the prefix cache, in use or not"),
    ("pages_used", "gauge", "kv_pages_used", None, None, "Pages that requests hold"),
    ("used_tokens", "gauge", None, None, "num_used_tokens", "Tokens in pages that requests hold, full pages assumed"),
    ("pages_quarantined", "gauge", "kv_pages_quarantined", None, None,
     "Pages taken out of use after an ownership error"),
    ("kv_usage", "gauge", "kv_cache_usage_ratio", "kv_cache_usage_perc", "token_usage",
     "Share of pages held by requests, 0 to 1"),
    ("kv_usage", "gauge", None, "gpu_cache_usage_perc", None,
     "Share of pages held by requests, 0 to 1; the older name"),
    ("hit_rate_window", "gauge", "prefix_cache_hit_ratio_window", None, "cache_hit_rate",
     "Cached share of the prompt tokens of the last first attempts, 0 to 1"),
    ("requests", "counter", "requests_admitted", None, None, "Requests that started to be computed"),
    ("prompt_tokens", "counter", "prompt_tokens", "prompt_tokens", "prompt_tokens",
     "Prompt tokens of admitted requests"),
    ("generated_tokens", "counter", "generated_tokens", "generation_tokens", "generation_tokens", "Tokens of outputs"),
    ("generated_per_s", "gauge", "generated_tokens_per_second", None, "gen_throughput",
     "Tokens of outputs a second, over the last seconds"),
    ("forced_tokens", "counter", "forced_tokens", None, None,
     "Of the tokens of outputs, known without being sampled: a grammar forced them"),
    ("drafts", "counter", "drafts", "spec_decode_num_drafts", None, "Times that tokens were drafted for a request"),
    ("drafted_tokens", "counter", "drafted_tokens", "spec_decode_num_draft_tokens", None, "Tokens drafted"),
    ("accepted_tokens", "counter", "accepted_draft_tokens", "spec_decode_num_accepted_tokens", None,
     "Of these, kept: the model drew the same"),
    ("draft_length", "gauge", "accepted_length", None, "spec_accept_length",
     "Tokens that a request got from a step with a draft, on average"),
    ("drafting", "gauge", "drafting", None, None, "1 while requests may draft, 0 while speculation pauses"),
    ("grammars_compiled", "counter", "grammars_compiled", None, None, "Grammars of structured output compiled"),
    ("grammar_compile_seconds", "counter", "grammar_compile_seconds", None, None,
     "Time that took, beside the engine's loop"),
    ("grammars_compiling", "gauge", "grammars_compiling", None, "num_grammar_queue_reqs",
     "Requests whose grammar is being compiled"),
    ("prompt_tokens", "counter", "prefix_cache_queries", "prefix_cache_queries", None,
     "Prompt tokens looked up in the prefix cache, first attempts"),
    ("cached_tokens", "counter", "prefix_cache_hits", "prefix_cache_hits", None,
     "Prompt tokens found in the prefix cache, first attempts"),
    ("cached_tokens", "counter", None, "prompt_tokens_cached", None, "Prompt tokens found in the prefix cache"),
    ("reprefill_tokens", "counter", "reprefill_tokens", None, None, "Tokens that preempted requests looked up again"),
    ("reprefill_cached_tokens", "counter", "reprefill_cached_tokens", None, None,
     "Tokens that preempted requests found in the cache again"),
    ("preemptions", "counter", "preemptions", "num_preemptions", None, "Requests that lost their pages to others"),
    ("preemptions", "gauge", None, None, "num_retracted_reqs", "Requests that lost their pages to others, ever"),
    ("evicted_pages", "counter", "kv_pages_evicted", None, None, "Cached pages given up for others"),
    ("pages_given_back", "counter", "kv_pages_given_back", None, None,
     "Pages of K and V given back for want of memory"),
    ("ownership_violations", "counter", "kv_ownership_violations", None, None, "Errors in the ownership of pages"),
    ("steps", "counter", "steps", None, None, "Forward passes"),
    ("lora_adapters", "gauge", "lora_adapters", None, None, "Adapters that requests may name"),
    ("lora_slots", "gauge", "lora_slots", None, None, "Adapters that the device has room for at once"),
    ("lora_resident", "gauge", "lora_adapters_resident", None, None, "Adapters on the device"),
    ("lora_moves", "counter", "lora_moves", None, None, "Times that an adapter came to the device"),
    ("lora_place_seconds", "counter", "lora_place_seconds", None, None, "Time that took, in which no step began"),
    ("lora_bytes", "gauge", "lora_bytes", None, None, "Memory that the adapters on the device take"),
    ("lora_waiting_requests", "gauge", "lora_waiting_requests", None, None,
     "Requests whose adapter is not on the device"),
    ("pins", "gauge", "kv_pins", None, None, "Sessions whose cached pages are pinned"),
    ("pages_pinned", "gauge", "kv_pages_pinned", None, None, "Pages that pins keep"),
    ("kv_event_batches", "counter", "kv_event_batches", None, None, "Batches of cache events published"),
    ("step_age", "gauge", "step_age_seconds", None, None,
     "Since a step finished; 0 while the engine has nothing to do"),
    ("stats_age", "gauge", "engine_stats_age_seconds", None, None,
     "Since the engine gave its numbers; it gives new ones between two steps"),
    ("restarts", "counter", "engine_restarts", None, None, "Times that an engine that had died was started anew"),
)
# What the server measures of each engine request: key, buckets, our name, vLLM's, SGLang's, help.
MEASURED = (
    ("e2e", SECONDS, *("e2e_request_latency_seconds",) * 3, "From arrival to the last token"),
    ("ttft", SECONDS, *("time_to_first_token_seconds",) * 3, "From arrival to the first token"),
    ("itl", SECONDS, *("inter_token_latency_seconds",) * 3, "Between two tokens of a request"),
    ("itl", SECONDS, None, "time_per_output_token_seconds", None, "Between two tokens of a request; the older name"),
    ("tpot", SECONDS, "request_time_per_output_token_seconds", "request_time_per_output_token_seconds", None,
     "Mean time between two tokens of a request"),
    ("queue", SECONDS, "request_queue_time_seconds", "request_queue_time_seconds", "queue_time_seconds",
     "From arrival to the first attempt"),
    ("prefill", SECONDS, "request_prefill_time_seconds", "request_prefill_time_seconds", None,
     "From the first attempt to the first token"),
    ("decode", SECONDS, "request_decode_time_seconds", "request_decode_time_seconds", None,
     "From the first token to the last"),
    ("inference", SECONDS, "request_inference_time_seconds", "request_inference_time_seconds", None,
     "From the first attempt to the last token"),
    ("prompt", TOKENS, "request_prompt_tokens", "request_prompt_tokens", None, "Prompt tokens of a request"),
    ("output", TOKENS, "request_generation_tokens", "request_generation_tokens", None,
     "Tokens generated for a request"),
    ("output", TOKENS, None, "request_max_num_generation_tokens", None,
     "Tokens of the longest of a request's answers, each of which counts as a request here"),
    ("max_tokens", TOKENS, "request_max_tokens", "request_params_max_tokens", None,
     "Most tokens that a request may generate"),
    ("n", ANSWERS, "request_answers", "request_params_n", None, "Answers that a call asks for"),
)


def derived(stats: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that follow from the engine's, where it gives these."""
    found: dict[str, float] = {}
    if stats.get("pages_total") and "pages_used" in stats:
        found["kv_usage"] = stats["pages_used"] / stats["pages_total"]
    if "page_size" in stats and "pages_used" in stats:
        found["used_tokens"] = stats["pages_used"] * stats["page_size"]
    if stats.get("drafts"):
        found["draft_length"] = 1 + stats["accepted_tokens"] / stats["drafts"]
    return found
