"""GLM-4.5 and 4.6 (`glm4_moe`) and dots.llm1 (`dots1`): Llama's attention and the routing of DeepSeek-V3."""
from __future__ import annotations

from . import feed_forward, llama
from .config import FULL, Family
from .fields import Fields
from .rope import LOCAL


def upper_sliding(fields: Fields, layers: int) -> tuple[str, ...]:
    """dots.llm1: layers from `max_window_layers` on have the window, if there is one."""
    first = fields.integer("max_window_layers", 62, low=0)
    return tuple(LOCAL if i >= first and "sliding_window" in fields else FULL for i in range(layers))


# Configurations may leave out what equals the defaults of Glm4MoeConfig.
GLM4_MOE = Family(llama.all_full, {
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}, o_bias=False, qk_norm=None, partial_rope=True, sparse=feed_forward.deepseek)
DOTS1 = Family(upper_sliding, qk_norm=True, sparse=feed_forward.deepseek)
