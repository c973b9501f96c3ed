"""Writing K and V to their pages: plain, quantized, with rope in the same launch; and copying whole pages."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_launch import padded
from .fp8 import encode
from .launch import Specialization, launch
from .paged import PagedKV

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2: 57344.0,
           torch.float8_e5m2fnuz: 57344.0}  # of the types that a native cast does not clamp by itself


@triton.jit
def store_heads(ptr, scales_ptr, x, head, real, inside, place, scale_place, h_stride, s_stride, inverse, largest,
                FORMAT: tl.constexpr, PADDED: tl.constexpr):
    """x [HEADS, PADDED] float32 of one token to its slot, quantized as FORMAT says."""
    d = tl.arange(0, PADDED)
    at = ptr + place + head[:, None] * h_stride + d[None, :]
    if FORMAT == "int8":
        peak = tl.max(tl.where(inside, tl.abs(x), 0.0), 1)
        scale = peak / 127.0
        y = x / tl.where(peak > 0, scale, 1.0)[:, None]
        y = tl.where(y < 0, tl.ceil(y - 0.5), tl.floor(y + 0.5))
        tl.store(scales_ptr + scale_place + head * s_stride, scale, mask=real)
        tl.store(at, tl.minimum(tl.maximum(y, -127.0), 127.0).to(tl.int8), mask=inside)
    elif FORMAT == "native":
        y = x * inverse
        if largest is not None:
            y = tl.minimum(tl.maximum(y, -largest), largest)
        tl.store(at, y.to(ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(at, encode(x * inverse, FORMAT), mask=inside)


@triton.jit
def rotated(ptr, cos_ptr, sin_ptr, token, head, inside, x_token, x_head, HALF: tl.constexpr, PADDED: tl.constexpr):
    """x [HEADS, PADDED] of one token in float32, its first 2 * HALF dims rotated (the first half with the second)."""
    d = tl.arange(0, PADDED)
    at = ptr + token.to(tl.int64) * x_token + head[:, None] * x_head
    x = tl.load(at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        turns = d < 2 * HALF
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        other = tl.load(at + partner[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
        angle = token.to(tl.int64) * HALF + d % HALF
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        sin = tl.where(d < HALF, -sin, sin)
        x = x * cos[None, :] + other * sin[None, :]
    return x


@triton.jit
def write_kernel(
    q_ptr, q_out_ptr, k_in_ptr, v_in_ptr, cos_ptr, sin_ptr, slots_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    heads, kv_heads, q_token, q_head, ki_token, ki_head, vi_token, vi_head, k_page, k_token, k_head, v_page, v_token,
    v_head, s_page, s_token, s_head, k_inverse, v_inverse, largest,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, FORMAT: tl.constexpr,
):
    """Grid [tokens, blocks of q heads + blocks of KV heads], HEADS heads in a block; without q only the latter."""
    token = tl.program_id(0)
    q_blocks = tl.cdiv(heads, HEADS)
    block = tl.program_id(1)
    if block < q_blocks:
        if q_ptr is not None:
            head = block * HEADS + tl.arange(0, HEADS)
            inside = (head < heads)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
            x = rotated(q_ptr, cos_ptr, sin_ptr, token, head, inside, q_token, q_head, HALF, PADDED)
            at = q_out_ptr + (token.to(tl.int64) * heads + head)[:, None] * WIDTH + tl.arange(0, PADDED)[None, :]
            tl.store(at, x.to(q_out_ptr.dtype.element_ty), mask=inside)
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        real = head < kv_heads
        slot = tl.load(slots_ptr + token)
        page = (slot // PAGE).to(tl.int64)
        offset = slot % PAGE
        inside = real[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
        k = rotated(k_in_ptr, cos_ptr, sin_ptr, token, head, inside, ki_token, ki_head, HALF, PADDED)
        scale_place = page * s_page + offset * s_token
        store_heads(k_ptr, k_scales_ptr, k, head, real, inside, page * k_page + offset * k_token, scale_place, k_head,
                    s_head, k_inverse, largest, FORMAT, PADDED)
        inside = real[:, None] & (tl.arange(0, V_PADDED) < V_WIDTH)[None, :]
        v = rotated(v_in_ptr, cos_ptr, sin_ptr, token, head, inside, vi_token, vi_head, 0, V_PADDED)
        store_heads(v_ptr, v_scales_ptr, v, head, real, inside, page * v_page + offset * v_token, scale_place, v_head,
                    s_head, v_inverse, largest, FORMAT, V_PADDED)


@triton.jit
def copy_pages_kernel(memory_ptr, src_ptr, dst_ptr, words, BLOCK: tl.constexpr):
    """Grid [pages copied, blocks of words]."""
    src = tl.load(src_ptr + tl.program_id(0)).to(tl.int64) * words
    dst = tl.load(dst_ptr + tl.program_id(0)).to(tl.int64) * words
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(memory_ptr + dst + n, tl.load(memory_ptr + src + n, mask=n < words), mask=n < words)


def write_kv(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: PagedKV) -> None:
    """k [T, kv_heads, d] and v [T, kv_heads, dv] to slots [T] int32 (page * page_size + offset), cast or quantized.

    fp8: stored = value / scale, clamped to the largest number. int8: one scale per token and head, peak / 127.
    Padding tokens write to page 0. Two tokens must not share a slot of another page. ValueError where shapes differ.
    """
    write(None, k, v, None, None, slots, kv)


def rope_write(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
               slots: torch.Tensor, kv: PagedKV) -> torch.Tensor:
    """Rotate q and k, write k and v to their slots, in one launch -> rotated q [T, heads, d], contiguous, q's dtype.

    cos, sin: [T, rot / 2] f32 tables of the step's tokens, contiguous; the first rot dims of a head turn, the first
    half with the second, the rest passes. k goes to the pages without being rounded to its dtype in between.
    Otherwise as `write_kv`. Source: Su et al. 2021 (RoFormer).
    """
    return write(q, k, v, cos, sin, slots, kv)


def write(q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None,
          sin: torch.Tensor | None, slots: torch.Tensor, kv: PagedKV) -> torch.Tensor | None:
    """Check and launch `write_kernel`."""
    tokens, kv_heads, width = k.shape
    if (kv_heads, width) != tuple(kv.k.shape[2:]) or v.shape != (tokens, *kv.v.shape[2:]) or slots.shape != (tokens,):
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)} and slots {tuple(slots.shape)} do not fit pages of "
                         f"{tuple(kv.k.shape)} and {tuple(kv.v.shape)}")
    if slots.dtype != torch.int32:
        raise ValueError(f"slots must be int32, not {slots.dtype}")
    half, heads, out, q_strides = 0, 0, None, (0, 0)
    if q is not None:
        half, heads = cos.shape[1], q.shape[1]
        if q.shape != (tokens, heads, width) or cos.shape != sin.shape or len(cos) != tokens or 2 * half > width:
            raise ValueError(f"q {tuple(q.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit k "
                             f"{tuple(k.shape)}")
        if any(x.dtype != torch.float32 or not x.is_contiguous() for x in (cos, sin)):
            raise ValueError("cos and sin must be contiguous float32 tables")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        q_strides = q.stride()[:2]
    if any(x is not None and x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("q, k and v need a contiguous last axis")
    block = heads_in_block(kv_heads, width)
    s = (0, 0, 0) if kv.k_scales is None else kv.k_scales.stride()
    launch(write_kernel, (tokens, -(-heads // block) + -(-kv_heads // block)), q, out, k, v, cos, sin, slots, kv.k,
           kv.v, kv.k_scales, kv.v_scales, heads, kv_heads, *q_strides, *k.stride()[:2], *v.stride()[:2],
           *kv.k.stride()[:3], *kv.v.stride()[:3], *s, 1.0 / kv.k_scale, 1.0 / kv.v_scale, LARGEST.get(kv.k.dtype),
           PAGE=kv.page_size, WIDTH=width, V_WIDTH=kv.v.shape[3], PADDED=padded(width), V_PADDED=padded(kv.v.shape[3]),
           HALF=half, HEADS=block, FORMAT=kv.format, num_warps=4)
    return out


def heads_in_block(kv_heads: int, width: int) -> int:
    """Heads of one program: about 1024 numbers."""
    return max(1, min(triton.next_power_of_2(kv_heads), 1024 // padded(width)))


def copy_pages(memory: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy whole pages within memory [pages, ...] (contiguous, any type): src[i] to dst[i].

    src, dst: [n] int32 on the device; the lists are disjoint and dst has no page twice, (0, 0) is allowed as padding.
    Raises ValueError where memory is not contiguous or a page is no multiple of 4 bytes.
    """
    size = memory[0].numel() * memory.element_size()
    if not memory.is_contiguous() or size % 4:
        raise ValueError(f"pages must be contiguous and multiples of 4 bytes, not {tuple(memory.shape)} with strides "
                         f"{memory.stride()} and {size} bytes a page")
    if src.shape != dst.shape or src.dtype != torch.int32 or dst.dtype != torch.int32:
        raise ValueError(f"src and dst must be int32 lists of one length, not {src.dtype} {tuple(src.shape)} and "
                         f"{dst.dtype} {tuple(dst.shape)}")
    words = memory.view(-1).view(torch.int32)
    launch(copy_pages_kernel, (len(src), triton.cdiv(size // 4, COPY_WORDS)), words, src, dst, size // 4,
           BLOCK=COPY_WORDS, num_warps=4)


COPY_WORDS = 2048


def specializations() -> list[Specialization]:
    """Rope with the write for the head dims and formats that the platforms use; the write alone; the page copy."""
    found = []
    for width, page, q, kv, form in ((64, 16, "bf16", "bf16", "native"), (64, 64, "fp16", "fp16", "native"),
                                     (128, 16, "bf16", "bf16", "native"), (128, 64, "bf16", "bf16", "native"),
                                     (128, 16, "fp32", "fp32", "native"), (128, 16, "bf16", "u8", "e4m3"),
                                     (128, 16, "bf16", "i8", "int8"), (256, 16, "bf16", "bf16", "native")):
        found.append(write_specialization(width, page, q, kv, form, rope=True))
    found.append(write_specialization(128, 16, "bf16", "bf16", "native", rope=False))
    found.append(Specialization("copy_pages", copy_pages_kernel, {
        "memory_ptr": "*i32:16", "src_ptr": "*i32:16", "dst_ptr": "*i32:16", "words": "i32:16"},
        {"BLOCK": COPY_WORDS}, warps=4))
    return found


def write_specialization(width: int, page: int, q: str, kv: str, form: str, rope: bool) -> Specialization:
    """One Specialization of `write_kernel` for a power of two of head dims and 8 KV heads."""
    types = {name: f"*{q}:16" for name in ("q_ptr", "q_out_ptr", "k_in_ptr", "v_in_ptr")}
    types |= {"k_ptr": f"*{kv}:16", "v_ptr": f"*{kv}:16", "slots_ptr": "*i32:16"}
    types |= {name: "*fp32:16" for name in ("cos_ptr", "sin_ptr", "k_scales_ptr", "v_scales_ptr")}
    types |= {"k_inverse": "fp32", "v_inverse": "fp32"}
    constants: dict[str, object] = dict(PAGE=page, WIDTH=width, V_WIDTH=width, PADDED=width, V_PADDED=width,
                                        HALF=width // 2 if rope else 0, HEADS=heads_in_block(8, width), FORMAT=form,
                                        largest=None)
    if form != "int8":
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None, "s_page": 0, "s_token": 0, "s_head": 0}
    if not rope:
        constants |= {name: None for name in ("q_ptr", "q_out_ptr", "cos_ptr", "sin_ptr")}
        constants |= {"q_token": 0, "q_head": 0, "heads": 0}
    signature = {}
    for name in write_kernel.arg_names:
        if name not in constants:
            small = name in ("heads", "kv_heads") or name.startswith("s_")
            signature[name] = types.get(name, "i32" if small else "i32:16")
    return Specialization(f"{'rope_write' if rope else 'write'} {q}/{form if form != 'native' else kv} d{width} "
                          f"p{page}", write_kernel, signature, constants, warps=4)
