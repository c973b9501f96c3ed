// What crosses from Python: a program of ops with absolute addresses, and the arrays of one step.
#pragma once
#include <cstdint>

namespace isthmus {

enum Format { BF16 = 0, INT8 = 1, INT4 = 2, FLOAT32 = 3 };
enum Kind { EMBED, LINEAR, NORM, TURNS, ROPE, WRITE, PLAN, ATTEND, ADD, SCALE, GATHER, ACT_MUL, LOW, UP, KINDS };

// A view of rows: [rows][heads][width] floats, heads and rows `head` and `row` floats apart.
struct View {
    float* at;
    int64_t row, head;
};

struct Weight {
    const uint8_t* at;
    int64_t format, outputs, inputs, block;  // block: bytes of sixteen outputs
};

struct Op {
    int64_t kind, barrier;  // barrier: wait for all threads before
    View x, y, z;           // sources and target as the kind says
    Weight w;
    const float *norm, *bias;
    int64_t rows, heads, width, act, layer, index;
    float eps, scale, softcap;
    int32_t window;
};

struct Adapters {  // of the low-rank products LOW and UP, where `bias` points to it
    const int32_t *owners, *blocks, *active;  // adapter of each token, of each 16 columns; is it any token's, by adapter
    int64_t count;                            // of the blocks
};

struct Layer {  // K and V of one layer, [pages * page_size][2][kv_heads][d] bf16
    uint16_t* kv;
    int64_t kv_heads, d;
};

struct Step {
    const int32_t *tokens, *positions, *slots, *starts, *lengths, *pages, *logit_rows;
    int64_t rows, page_stride, page_size;
    const Layer* layers;
};

}  // namespace isthmus
