"""One batch of a model on a platform: what a prefill and a decode take, beside the least that they could."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..models.config import ModelConfig
from ..platform import Unsupported
from ..startup import Loaded
from .ceilings import Ceilings
from .result import Run
from .steps import Place, make_batch


@dataclass(frozen=True)
class Counts:
    """What a step must read and multiply, from the model's configuration. Numbers of values, not of bytes."""

    config: ModelConfig

    @property
    def head(self) -> int:
        return self.config.vocab_size * self.config.hidden

    @property
    def attention(self) -> int:
        """Projections of one layer."""
        q, k, v = self.config.qkv_widths
        return self.config.hidden * (2 * q + k + v)

    def layers(self, tokens: float) -> Iterator[tuple[float, float]]:
        """(values that all tokens together read, values that each is multiplied with) of each layer. Which experts a
        batch meets is taken as even chance has it."""
        config, sparse = self.config, self.config.sparse
        for layer in range(config.layers):
            if sparse is None or not sparse.layers[layer]:
                dense = 3 * config.hidden * config.intermediate
                yield self.attention + dense, self.attention + dense
                continue
            spec, expert = sparse.spec, 3 * config.hidden * sparse.width
            met = spec.experts * (1 - (1 - spec.top_k / spec.experts) ** tokens)
            rest = self.attention + config.hidden * spec.experts + 3 * config.hidden * sparse.shared
            yield rest + met * expert, rest + spec.top_k * expert

    def share_read(self, tokens: int) -> float:
        """Of all weights, those that a step of so many tokens reads: of the embedding only rows."""
        whole = sum(read for read, _ in self.layers(float("inf"))) + self.head * (1 if self.config.tied else 2)
        return (sum(read for read, _ in self.layers(tokens)) + self.head) / whole

    def operations(self, rows: int, tokens: int, context: int) -> float:
        """Of `rows` rows with so many new tokens each: products of weights, the head's for one token a row, and of
        attention over all that each token sees."""
        config, each = self.config, sum(per for _, per in self.layers(rows * tokens))
        seen = 0.0
        for spec in config.attention:
            whole = sum(min(position, spec.window or position) for position in
                        range(context - tokens + 1, context + 1))
            seen += 4 * config.heads * config.head_dim * whole
        return 2 * rows * tokens * each + 2 * rows * self.head + rows * seen

    def tokens_kept(self, context: int) -> float:
        """Of a row, the tokens whose K and V are read, on average over the layers: windows read fewer."""
        spans = [min(context, spec.window or context) for spec in self.config.attention]
        return sum(spans) / max(1, len(spans))


def measure(loaded: Loaded, ceilings: Ceilings, rows: int, tokens: int, context: int,
            steps: int | None = None) -> Run:
    """A step of `rows` rows, each with `tokens` new tokens and `context` with them: one token each is a decode."""
    config, spec = loaded.model.config, loaded.sizes.state
    counts, kind = Counts(config), "decode" if tokens == 1 else "prefill"
    if context > loaded.sizes.max_model_len or rows > loaded.sizes.max_running:
        raise Unsupported(f"{rows} rows of {context} tokens: this engine takes {loaded.sizes.max_running} rows of "
                          f"{loaded.sizes.max_model_len} tokens")
    batch = make_batch(rows, tokens, context, spec.page_size, config.vocab_size)
    place = Place(loaded.platform, loaded.manifest, loaded.dtype)
    timing = place.timed(loaded.model.forward, loaded.model.weights, batch, spec, steps)
    kept = rows * counts.tokens_kept(context) * spec.page_bytes() / spec.page_size
    nbytes = loaded.model.nbytes * counts.share_read(rows * tokens) + kept
    operations, seconds = counts.operations(rows, tokens, context), timing.median
    least = ceilings.seconds(nbytes, operations)
    label = f"decode {rows} x {context}" if kind == "decode" else f"prefill {rows} x {tokens}" + (
        f" behind {context - tokens}" if context > tokens else "")
    return Run(label, {"ms": 1e3 * seconds, "tokens_per_s": rows * tokens / seconds, "roof_share": least / seconds,
                       "gb_per_s": nbytes / seconds / 1e9, "tflop_per_s": operations / seconds / 1e12},
               {"kind": kind, "rows": rows, "tokens": tokens, "context": context, "least_ms": 1e3 * least,
                "bound": ceilings.bound(nbytes, operations), "bytes": nbytes, "operations": operations,
                "first_ms": 1e3 * timing.first, "steps": len(timing.steps), "spread": timing.spread})
