"""The sums along `in` of the linear and MoE kernels: a tile of weight rows times a tile of tokens, by kind of weight.

The weight is the left operand, [ROWS, k] x [k, TOKENS]: rows are many even when tokens are few, and what has to be
unpacked stays in registers (Hopper's and AMD's matrix instructions take the left operand from there).
Codes enter the product as they are, exact in every activation type; scales are applied to sums of a group in float32,
so that a quantized weight is never rounded a second time.
"""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 of eight significant bits or fewer in a shorter type: for bf16 nothing is to round, its bits are cut."""
    if dtype == tl.bfloat16:
        y = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def whole(byte, dtype: tl.constexpr):
    """Integers 0..255 as floats without a conversion instruction (those are slow): 2^23 + n has n in its low bits."""
    return narrow((byte.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0, dtype)


@triton.constexpr_function
def offset(dtype):
    """What `nibbles` adds to a code."""
    return 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0


@triton.jit
def either(words, QUARTER: tl.constexpr, ROWS: tl.constexpr):
    """Nibbles QUARTER and QUARTER + 4 of 16 words a row, one behind the other: [ROWS, 32] int32."""
    pair = (words >> (4 * QUARTER)) & 0x000F000F
    return tl.reshape(tl.join(pair & 0xFFFF, pair >> 16), (ROWS, 32))


@triton.constexpr_function
def begins(group, quarter):
    """Whether a group of `affine4` begins with this quarter of a panel; one of the whole row began with the row."""
    return group == 32 or (group == 64 and quarter % 2 == 0) or (group > 64 and quarter == 0)


@triton.jit
def nibbles(words, dtype: tl.constexpr, QUARTER: tl.constexpr, ROWS: tl.constexpr):
    """Codes of a quarter of a panel, [ROWS, 32], plus `offset`: one `or` with the bits of 128 (bf16) or 1024 (f16)
    makes 128 + n or 1024 + n of two codes, which stay side by side, where the product wants them."""
    if dtype == tl.float32:
        y = whole(either(words, QUARTER, ROWS), dtype)
    else:
        MAGIC: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        pair = ((words >> (4 * QUARTER)) & 0x000F000F) | MAGIC
        both = tl.join((pair & 0xFFFF).to(tl.uint16), (pair >> 16).to(tl.uint16))
        y = tl.reshape(both, (ROWS, 32)).to(dtype, bitcast=True)
    return y


@triton.jit
def sums_of(x, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Sum of each token's activations [k, TOKENS], so that it can be added to a product: [ROWS, TOKENS], or
    [1, TOKENS]. For few tokens the matrix unit, which has time, takes the place of shuffles. Its ones are joined as
    codes are: so both products read the activations in one form, which the pipeline then holds once."""
    if TOKENS <= 32:
        ones = tl.full((ROWS, x.shape[0] // 2), 1.0, tl.float32).to(x.dtype)
        y = tl.dot(tl.reshape(tl.join(ones, ones), (ROWS, x.shape[0])), x, input_precision="ieee")
    else:
        y = tl.sum(x.to(tl.float32), 0)[None, :]
    return y


@triton.jit
def e2m1(code):
    """Codes 0..15 of e2m1 as float32: its bits are those of a float up to the exponent's offset, subnormal too."""
    bits = code.to(tl.uint32)
    return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e4m3(code):
    """Bytes of e4m3 as float32, as `e2m1`; its NaN, which no weight has, reads as 480."""
    bits = code.to(tl.uint32)
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def expanded(w, dtype: tl.constexpr):
    """fp8 weights in the activations' type: bytes of e4m3 by their bits, the type itself by the device."""
    if w.dtype == tl.uint8:
        y = narrow(e4m3(w), dtype)
    else:
        # NVIDIA's way is by half floats: from there to float32 and a cut are at full rate, to bf16 is at half of it.
        y = narrow(w.to(tl.float32), dtype)
    return y


@triton.jit
def e8m0(code):
    """Powers of two as float32; code 0 is 2^-127, a subnormal number."""
    bits = code.to(tl.uint32)
    return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def read_tokens(at, k, width, EVEN: tl.constexpr):
    """[k, TOKENS] activations; beyond `width` zeros, so that what is stored behind a row never counts."""
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(k < width)[:, None], other=0.0)
    return x


@triton.jit
def plain(x_ptr, w_ptr, token, row, first, last, width, x_stride, EVEN: tl.constexpr, ROWS: tl.constexpr,
          TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes times activations, unscaled: int8 in int32, all others in float32."""
    k = first * WIDTH + tl.arange(0, WIDTH)
    x_at = x_ptr + token[None, :] * x_stride + k[:, None]
    w_at = w_ptr + row[:, None] * width + k[None, :]
    if x_ptr.dtype.element_ty == tl.int8:
        acc = tl.zeros((ROWS, TOKENS), tl.int32)
    else:
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for _ in range(first, last):
        x = read_tokens(x_at, k, width, EVEN)
        if EVEN:
            w = tl.load(w_at)
        else:
            w = tl.load(w_at, mask=(k < width)[None, :], other=0.0)
        if x_ptr.dtype.element_ty == tl.int8:
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
        elif x.dtype.is_fp8():
            # Hopper adds fp8 products in 14 bits: no more than one step's before they go into float32.
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=WIDTH)
        elif w.dtype != x.dtype:
            acc = tl.dot(expanded(w, x.dtype), x, acc, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        x_at += WIDTH
        w_at += WIDTH
        k += WIDTH
    return acc


@triton.jit
def blocked(x_ptr, xs_ptr, w_ptr, ws_ptr, token, row, scale_row, first, last, width, x_stride, xs_stride,
            EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """fp8 in blocks of 128 x 128: the sum of every 128 values is scaled by itself."""
    blocks = (width + 127) // 128
    k = first * 128 + tl.arange(0, 128)
    x_at = x_ptr + token[None, :] * x_stride + k[:, None]
    w_at = w_ptr + row[:, None] * width + k[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(first, last):
        x = read_tokens(x_at, k, width, EVEN)
        if EVEN:
            w = tl.load(w_at)
        else:
            w = tl.load(w_at, mask=(k < width)[None, :], other=0.0)
        scale = tl.load(ws_ptr + scale_row * blocks + step)[:, None]
        if x.dtype.is_fp8():
            scale = scale * tl.load(xs_ptr + token * xs_stride + step)[None, :]
            acc += tl.dot(w, x) * scale
        else:
            acc += tl.dot(expanded(w, x.dtype), x, input_precision="ieee") * scale
        x_at += 128
        w_at += 128
        k += 128
    return acc


@triton.jit
def group_scale(scale_ptr, second_ptr, at, OFFSET: tl.constexpr, ZERO: tl.constexpr):
    """(scale, shift) of one group [ROWS] float32: w = scale * (code + OFFSET) + shift."""
    scale = tl.load(scale_ptr + at).to(tl.float32)
    second = tl.load(second_ptr + at).to(tl.float32)
    if ZERO:
        shift = -(second + OFFSET) * scale
    else:
        shift = second - OFFSET * scale
    return scale, shift


@triton.jit
def affine4(x_ptr, w_ptr, scale_ptr, second_ptr, token, row, first, last, width, rows, x_stride, GROUP: tl.constexpr,
            ZERO: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Groups w = scale * code + minimum: sum(x w) = scale * sum(x code) + minimum * sum(x). Panels of 128 codes."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    OFFSET: tl.constexpr = offset(dtype)
    k = first * 128 + tl.arange(0, 32)
    x_at = x_ptr + token[None, :] * x_stride + k[:, None]
    w_at = w_ptr + (tl.cast(first, tl.int64) * rows + row[:, None]) * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    part = tl.zeros((ROWS, TOKENS), tl.float32)
    sums = tl.zeros((ROWS if TOKENS <= 32 else 1, TOKENS), tl.float32)
    scale = tl.zeros((ROWS,), tl.float32)
    shift = tl.zeros((ROWS,), tl.float32)
    for step in range(first, last):
        # Scales are asked for before the codes are waited for: nothing pipelines them, and they come from memory.
        if GROUP > 64:
            scale, shift = group_scale(scale_ptr, second_ptr, step // (GROUP // 128) * rows + row, OFFSET, ZERO)
        words = tl.load(w_at)
        for quarter in tl.static_range(4):
            if GROUP == 32:
                scale, shift = group_scale(scale_ptr, second_ptr, (4 * step + quarter) * rows + row, OFFSET, ZERO)
            elif GROUP == 64 and quarter % 2 == 0:
                scale, shift = group_scale(scale_ptr, second_ptr, (2 * step + quarter // 2) * rows + row, OFFSET, ZERO)
            x = read_tokens(x_at + 32 * quarter, k + 32 * quarter, width, EVEN)
            codes = nibbles(words, dtype, quarter, ROWS)
            if begins(GROUP, quarter):
                part = tl.dot(codes, x, input_precision="ieee")
                sums = sums_of(x, ROWS, TOKENS)
            else:
                part = tl.dot(codes, x, part, input_precision="ieee")
                sums += sums_of(x, ROWS, TOKENS)
            if GROUP == 32 or (GROUP == 64 and quarter % 2 == 1):
                acc = acc + scale[:, None] * part + shift[:, None] * sums
        if GROUP > 64:
            acc = acc + scale[:, None] * part + shift[:, None] * sums
        x_at += 128
        w_at += tl.cast(rows, tl.int64) * 16
        k += 128
    if GROUP == 0:
        scale, shift = group_scale(scale_ptr, second_ptr, row, OFFSET, ZERO)
        acc = acc + scale[:, None] * part + shift[:, None] * sums
    return acc


@triton.jit
def affine8(x_ptr, w_ptr, scale_ptr, second_ptr, token, row, first, last, width, rows, x_stride, GROUP: tl.constexpr,
            HALF: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """As `affine4`, in panels of HALF codes."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = first * HALF + tl.arange(0, HALF)
    x_at = x_ptr + token[None, :] * x_stride + k[:, None]
    w_at = w_ptr + (tl.cast(first, tl.int64) * rows + row[:, None]) * HALF + tl.arange(0, HALF)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    total = tl.zeros((ROWS if TOKENS <= 32 else 1, TOKENS), tl.float32)
    for step in range(first, last):
        if GROUP == 0:
            packed = tl.load(w_at)
            x = read_tokens(x_at, k, width, EVEN)
            acc = tl.dot(whole(packed, dtype), x, acc, input_precision="ieee")
            total += sums_of(x, ROWS, TOKENS)
        else:
            scale, shift = group_scale(scale_ptr, second_ptr, step // (GROUP // HALF) * rows + row, 0.0, ZERO)
            packed = tl.load(w_at)
            x = read_tokens(x_at, k, width, EVEN)
            part = tl.dot(whole(packed, dtype), x, input_precision="ieee")
            acc = acc + scale[:, None] * part + shift[:, None] * sums_of(x, ROWS, TOKENS)
        x_at += HALF
        w_at += tl.cast(rows, tl.int64) * HALF
        k += HALF
    if GROUP == 0:
        scale, shift = group_scale(scale_ptr, second_ptr, row, 0.0, ZERO)
        acc = scale[:, None] * acc + shift[:, None] * total
    return acc


@triton.jit
def float4(x_ptr, w_ptr, scale_ptr, token, row, first, last, width, rows, x_stride, GROUP: tl.constexpr,
           EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """e2m1 in blocks of 32 (e8m0: the sum of a block is scaled) or of 16 (e4m3: each value is; six significant bits,
    exact in bf16 and f16). Panels of 128 codes, as in `affine4`."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = first * 128 + tl.arange(0, 32)
    x_at = x_ptr + token[None, :] * x_stride + k[:, None]
    w_at = w_ptr + (tl.cast(first, tl.int64) * rows + row[:, None]) * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(first, last):
        words = tl.load(w_at)
        for quarter in tl.static_range(4):
            x = read_tokens(x_at + 32 * quarter, k + 32 * quarter, width, EVEN)
            values = e2m1(either(words, quarter, ROWS))
            if GROUP == 16:
                group = 8 * step + 2 * quarter + tl.arange(0, 2)
                scale = e4m3(tl.load(scale_ptr + group[None, :] * rows + row[:, None]))
                spread = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, 2, 16)), (ROWS, 32))
                acc = tl.dot(narrow(values * spread, dtype), x, acc, input_precision="ieee")
            else:
                scale = e8m0(tl.load(scale_ptr + (4 * step + quarter) * rows + row))
                acc += scale[:, None] * tl.dot(narrow(values, dtype), x, input_precision="ieee")
        x_at += 128
        w_at += tl.cast(rows, tl.int64) * 16
        k += 128
    return acc


@triton.jit
def product(x_ptr, xs_ptr, w_ptr, scale_ptr, second_ptr, token, row, scale_row, first, last, width, rows, x_stride,
            xs_stride, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ZERO: tl.constexpr,
            EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, TOKENS] float32: weight rows `row` (int64) times tokens `token` (int64), steps first .. last along `in`,
    all scales applied. Layouts: `linear_tiles.Matrix`; xs: scale of each token (and 128 values)."""
    if KIND == "affine4":
        acc = affine4(x_ptr, w_ptr, scale_ptr, second_ptr, token, row, first, last, width, rows, x_stride, GROUP, ZERO,
                      EVEN, ROWS, TOKENS)
    elif KIND == "affine8":
        acc = affine8(x_ptr, w_ptr, scale_ptr, second_ptr, token, row, first, last, width, rows, x_stride, GROUP, HALF,
                      ZERO, EVEN, ROWS, TOKENS)
    elif KIND == "mxfp4":
        acc = float4(x_ptr, w_ptr, scale_ptr, token, row, first, last, width, rows, x_stride, 32, EVEN, ROWS, TOKENS)
    elif KIND == "nvfp4":
        acc = float4(x_ptr, w_ptr, scale_ptr, token, row, first, last, width, rows, x_stride, 16, EVEN, ROWS, TOKENS)
        acc = acc * tl.load(second_ptr + row)[:, None]
    elif KIND == "fp8_block" or KIND == "fp8_block_weight":
        acc = blocked(x_ptr, xs_ptr, w_ptr, scale_ptr, token, row, scale_row, first, last, width, x_stride, xs_stride,
                      EVEN, ROWS, TOKENS)
    else:
        acc = plain(x_ptr, w_ptr, token, row, first, last, width, x_stride, EVEN, ROWS, TOKENS, WIDTH).to(tl.float32)
        if KIND != "dense":
            acc = acc * tl.load(scale_ptr + row)[:, None]
        if KIND == "int8" or KIND == "fp8":
            acc = acc * tl.load(xs_ptr + token * xs_stride)[None, :]
    return acc
