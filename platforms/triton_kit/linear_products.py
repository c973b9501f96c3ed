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


@triton.jit
def nibble(code, dtype: tl.constexpr):
    """Codes 0..15 plus the `offset` of the type: one `or` makes 128 + n in bf16, 1024 + n in f16."""
    if dtype == tl.bfloat16:
        y = (code.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        y = (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        y = whole(code, dtype)
    return y


@triton.constexpr_function
def offset(dtype, bits):
    """What `nibble` adds to a code."""
    if bits == 8:
        return 0.0
    return 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0


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
        elif w.dtype == tl.uint8:
            acc = tl.dot(narrow(e4m3(w), x.dtype), x, acc, input_precision="ieee")
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
            acc += tl.dot(narrow(e4m3(w), x.dtype), x, input_precision="ieee") * scale
        x_at += 128
        w_at += 128
        k += 128
    return acc


@triton.jit
def fold(acc, part, sums, scale_ptr, second_ptr, group, rows, row, OFFSET: tl.constexpr, ZERO: tl.constexpr):
    """The sums of one group, of activations times codes (+ OFFSET) and of activations, into the result."""
    at = group * rows + row
    scale = tl.load(scale_ptr + at).to(tl.float32)
    second = tl.load(second_ptr + at).to(tl.float32)
    if ZERO:
        shift = -(second + OFFSET) * scale
    else:
        shift = second - OFFSET * scale
    return acc + scale[:, None] * part + shift[:, None] * sums[None, :]


@triton.jit
def affine(x_ptr, w_ptr, scale_ptr, second_ptr, token, row, first, last, width, rows, x_stride, BITS: tl.constexpr,
           GROUP: tl.constexpr, HALF: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
           TOKENS: tl.constexpr):
    """Groups w = scale * code + minimum: sum(x w) = scale * sum(x code) + minimum * sum(x)."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    OFFSET: tl.constexpr = offset(dtype, BITS)
    SPAN: tl.constexpr = HALF * 8 // BITS
    k = first * SPAN + tl.arange(0, HALF)
    x_at = x_ptr + token[None, :] * x_stride + k[:, None]
    w_at = w_ptr + tl.cast(first, tl.int64) * rows * HALF + row[:, None] * HALF + tl.arange(0, HALF)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for step in range(first, last):
        packed = tl.load(w_at)
        x = read_tokens(x_at, k, width, EVEN)
        sums = tl.sum(x.to(tl.float32), 0)
        if BITS == 4:
            more = read_tokens(x_at + HALF, k + HALF, width, EVEN)
            low = nibble(packed & 15, dtype)
            high = nibble(packed >> 4, dtype)
            more_sums = tl.sum(more.to(tl.float32), 0)
            if GROUP == 0:
                acc = tl.dot(low, x, acc, input_precision="ieee")
                acc = tl.dot(high, more, acc, input_precision="ieee")
                total += sums + more_sums
            elif GROUP < SPAN:
                part = tl.dot(low, x, input_precision="ieee")
                acc = fold(acc, part, sums, scale_ptr, second_ptr, 2 * step, rows, row, OFFSET, ZERO)
                part = tl.dot(high, more, input_precision="ieee")
                acc = fold(acc, part, more_sums, scale_ptr, second_ptr, 2 * step + 1, rows, row, OFFSET, ZERO)
            else:
                part = tl.dot(low, x, input_precision="ieee")
                part = tl.dot(high, more, part, input_precision="ieee")
                acc = fold(acc, part, sums + more_sums, scale_ptr, second_ptr, step // (GROUP // SPAN), rows, row,
                           OFFSET, ZERO)
        elif GROUP == 0:
            acc = tl.dot(whole(packed, dtype), x, acc, input_precision="ieee")
            total += sums
        else:
            part = tl.dot(whole(packed, dtype), x, input_precision="ieee")
            acc = fold(acc, part, sums, scale_ptr, second_ptr, step // (GROUP // SPAN), rows, row, OFFSET, ZERO)
        x_at += SPAN
        w_at += tl.cast(rows, tl.int64) * HALF
        k += SPAN
    if GROUP == 0:
        acc = fold(tl.zeros((ROWS, TOKENS), tl.float32), acc, total, scale_ptr, second_ptr, 0, rows, row, OFFSET, ZERO)
    return acc


@triton.jit
def nvfp4_values(code, scale_ptr, group, rows, row, dtype: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """e2m1 times the e4m3 scale of its 16: six significant bits, exact in bf16 and f16."""
    scale = tl.load(scale_ptr + (group + tl.arange(0, HALF // 16))[None, :] * rows + row[:, None])
    spread = tl.broadcast_to(e4m3(scale)[:, :, None], (ROWS, HALF // 16, 16))
    return narrow(e2m1(code) * tl.reshape(spread, (ROWS, HALF)), dtype)


@triton.jit
def float4(x_ptr, w_ptr, scale_ptr, token, row, first, last, width, rows, x_stride, GROUP: tl.constexpr,
           HALF: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """e2m1 in blocks of 32 (e8m0: the sum of a block is scaled) or 16 (e4m3: each value is, exactly)."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = first * 2 * HALF + tl.arange(0, HALF)
    x_at = x_ptr + token[None, :] * x_stride + k[:, None]
    w_at = w_ptr + tl.cast(first, tl.int64) * rows * HALF + row[:, None] * HALF + tl.arange(0, HALF)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(first, last):
        packed = tl.load(w_at)
        x = read_tokens(x_at, k, width, EVEN)
        more = read_tokens(x_at + HALF, k + HALF, width, EVEN)
        if GROUP == 16:
            g = step * (HALF // 8)
            low = nvfp4_values(packed & 15, scale_ptr, g, rows, row, dtype, HALF, ROWS)
            high = nvfp4_values(packed >> 4, scale_ptr, g + HALF // 16, rows, row, dtype, HALF, ROWS)
            acc = tl.dot(low, x, acc, input_precision="ieee")
            acc = tl.dot(high, more, acc, input_precision="ieee")
        else:
            scale = e8m0(tl.load(scale_ptr + 2 * step * rows + row))
            acc += scale[:, None] * tl.dot(narrow(e2m1(packed & 15), dtype), x, input_precision="ieee")
            scale = e8m0(tl.load(scale_ptr + (2 * step + 1) * rows + row))
            acc += scale[:, None] * tl.dot(narrow(e2m1(packed >> 4), dtype), more, input_precision="ieee")
        x_at += 2 * HALF
        w_at += tl.cast(rows, tl.int64) * HALF
        k += 2 * HALF
    return acc


@triton.jit
def product(x_ptr, xs_ptr, w_ptr, scale_ptr, second_ptr, token, row, scale_row, first, last, width, rows, x_stride,
            xs_stride, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ZERO: tl.constexpr,
            EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, TOKENS] float32: weight rows `row` (int64) times tokens `token` (int64), steps first .. last along `in`,
    all scales applied. Layouts: `linear_tiles.Matrix`; xs: scale of each token (and 128 values)."""
    if KIND == "affine4":
        acc = affine(x_ptr, w_ptr, scale_ptr, second_ptr, token, row, first, last, width, rows, x_stride, 4, GROUP,
                     HALF, ZERO, EVEN, ROWS, TOKENS)
    elif KIND == "affine8":
        acc = affine(x_ptr, w_ptr, scale_ptr, second_ptr, token, row, first, last, width, rows, x_stride, 8, GROUP,
                     HALF, ZERO, EVEN, ROWS, TOKENS)
    elif KIND == "mxfp4":
        acc = float4(x_ptr, w_ptr, scale_ptr, token, row, first, last, width, rows, x_stride, 32, HALF, EVEN, ROWS,
                     TOKENS)
    elif KIND == "nvfp4":
        acc = float4(x_ptr, w_ptr, scale_ptr, token, row, first, last, width, rows, x_stride, 16, HALF, EVEN, ROWS,
                     TOKENS)
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
