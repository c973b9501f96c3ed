// Runs a program of ops over one step, on all threads of a pool.
#include <memory>
#include "attention.h"
#include "pool.h"
#include "rows.h"
#include "step.h"

namespace isthmus {

struct Range {
    long first, last;
};
static inline Range share(long n, int thread, int threads, long unit = 1) {
    const long units = (n + unit - 1) / unit;
    return {std::min(n, units * thread / threads * unit), std::min(n, units * (thread + 1) / threads * unit)};
}

constexpr int FEW = 8;  // rows up to which every thread computes the norm before a product itself

struct Item {  // a tile of queries, or one part of a decode row's context
    int32_t row, token, tokens, head, part;
    int64_t from, to;
};
struct Plan {
    std::vector<Item> items;
    std::vector<int32_t> parts;  // first part of each token's row, -1 = not split
    std::vector<int32_t> count;
    std::vector<float> out, most, total;
    std::atomic<long> next{0};
    long heads = 0, d = 0, group = 0;
};

struct Local {  // one thread's memory
    Scratch attention;
    std::vector<float> panel, normed, queries, out, part;
    float most[QUERIES], total[QUERIES], part_most[QUERIES], part_total[QUERIES];
    long at[QUERIES];
};

class Engine {
  public:
    explicit Engine(int threads) : pool(threads), local_(threads) {
        for (auto& l : local_) {
            l = std::make_unique<Local>();
            l->panel.resize(CHUNK * 4 * LANES);
        }
    }
    void run(const Op* ops, long count, const Step& step) {
        for (long i = 0; i < count; i++)
            if (ops[i].kind == PLAN && (long)plans_.size() <= ops[i].index) plans_.resize(ops[i].index + 1);
        for (auto& plan : plans_)
            if (!plan) plan = std::make_unique<Plan>();
        pool.run([&](int thread) {
            for (long i = 0; i < count; i++) {
                if (ops[i].barrier) pool.barrier.wait();
                compute(ops[i], step, thread);
            }
        });
    }
    Pool pool;

  private:
    void compute(const Op& op, const Step& step, int thread);
    void linear(const Op& op, int thread);
    template <class W>
    void linear_as(const Op& op, int thread);
    void plan(const Op& op, const Step& step);
    void attention(const Op& op, const Step& step, int thread);
    void item(const Op& op, const Step& step, const Item& item, Plan& plan, Local& l);
    std::vector<std::unique_ptr<Local>> local_;
    std::vector<std::unique_ptr<Plan>> plans_;
};

// ---- products

// NB blocks from `first` on, with what follows a product.
template <class W, int NB>
static void outputs(const Op& op, const float* x, long xs, long first, Local& l) {
    const long M = op.rows, K = op.w.inputs, N = op.w.outputs, width = LANES * NB;
    const bool pair = op.act >= 0;
    float *y = l.out.data(), *up = y + M * width;
    products<W, NB>(x, xs, M, op.w.at + first * op.w.block, op.w.block, K, l.panel.data(), y);
    if (pair)
        products<W, NB>(x, xs, M, op.w.at + (first + N / 2 / LANES) * op.w.block, op.w.block, K, l.panel.data(), up);
    const long from = first * LANES, count = std::min(width, (pair ? N / 2 : N) - from);
    for (long m = 0; m < M; m++, y += width, up += width) {
        float* to = op.z.at + m * op.z.row + from;
        const float* add = op.y.at ? op.y.at + m * op.y.row + from : nullptr;
        long i = 0;
        for (; i + LANES <= count; i += LANES) {
            f32x16 v = load<f32x16>(y + i);
            if (op.bias) v += load<f32x16>(op.bias + from + i);
            if (pair)
                v = activate(v, (int)op.act) *
                    (load<f32x16>(up + i) + (op.bias ? load<f32x16>(op.bias + N / 2 + from + i) : f32x16{}));
            if (add) v += load<f32x16>(add + i);
            store(to + i, v);
        }
        for (; i < count; i++) to[i] = y[i] + (op.bias ? op.bias[from + i] : 0) + (add ? add[i] : 0);
    }
}

template <class W>
void Engine::linear_as(const Op& op, int thread) {
    Local& l = *local_[thread];
    const long M = op.rows, K = op.w.inputs, N = op.act >= 0 ? op.w.outputs / 2 : op.w.outputs;
    const Range r = share((N + LANES - 1) / LANES, thread, pool.count);
    const float* x = op.x.at;
    long xs = op.x.row;
    if (r.first == r.last) return;
    if (op.norm) {
        l.normed.resize(M * K);
        for (long m = 0; m < M; m++) rms_norm(x + m * xs, op.norm, op.eps, K, l.normed.data() + m * K);
        x = l.normed.data(), xs = K;
    }
    l.out.resize(2 * M * 4 * LANES);
    long b = r.first;
    for (; b + 4 <= r.last; b += 4) outputs<W, 4>(op, x, xs, b, l);
    if (b + 2 <= r.last) outputs<W, 2>(op, x, xs, b, l), b += 2;
    if (b < r.last) outputs<W, 1>(op, x, xs, b, l);
}

void Engine::linear(const Op& op, int thread) {
    switch (op.w.format) {
        case BF16: return linear_as<Bf16>(op, thread);
        case INT8: return linear_as<Int8>(op, thread);
        case INT4: return linear_as<Int4>(op, thread);
        case FLOAT32: return linear_as<F32>(op, thread);
    }
}

static void embed(const Weight& w, long n, float* y) {
    switch (w.format) {
        case BF16: return row_of<Bf16>(w.at, w.block, w.inputs, n, y);
        case INT8: return row_of<Int8>(w.at, w.block, w.inputs, n, y);
        case INT4: return row_of<Int4>(w.at, w.block, w.inputs, n, y);
        case FLOAT32: return row_of<F32>(w.at, w.block, w.inputs, n, y);
    }
}

// ---- attention

void Engine::plan(const Op& op, const Step& step) {
    Plan& p = *plans_[op.index];
    const Layer& layer = step.layers[op.layer];
    p.heads = layer.kv_heads, p.d = layer.d, p.group = op.heads / layer.kv_heads;
    const long each = std::max<long>(1, QUERIES / p.group);
    long parts = 0;
    p.items.clear();
    p.parts.assign(op.rows, -1);
    p.count.assign(op.rows, 0);
    for (int32_t row = 0; row < step.rows; row++) {
        const int32_t begin = step.starts[row], end = step.starts[row + 1], length = step.lengths[row];
        if (end - begin == 1) {
            const long low = op.window ? std::max(0L, (long)length - op.window) : 0;
            const long first = low / SPLIT, last = (length - 1) / SPLIT;
            for (int32_t head = 0; head < p.heads; head++)
                for (long c = first; c <= last; c++)
                    p.items.push_back({row, begin, 1, head,
                                       last > first ? (int32_t)(parts + head * (last - first + 1) + c - first) : -1,
                                       c * SPLIT, (c + 1) * SPLIT});
            if (last > first) {
                p.parts[begin] = (int32_t)parts, p.count[begin] = (int32_t)(last - first + 1);
                parts += p.heads * (last - first + 1);
            }
            continue;
        }
        for (int32_t t = begin; t < end; t += (int32_t)each)
            for (int32_t head = 0; head < p.heads; head++)
                p.items.push_back({row, t, (int32_t)std::min<long>(each, end - t), head, -1, 0, length});
    }
    std::reverse(p.items.begin(), p.items.end());  // the longest contexts first
    p.out.resize(parts * p.group * p.d), p.most.resize(parts * p.group), p.total.resize(parts * p.group);
    p.next.store(0, std::memory_order_relaxed);
}

void Engine::item(const Op& op, const Step& step, const Item& it, Plan& p, Local& l) {
    const long d = p.d, g = p.group, M = it.tokens * g;
    const int32_t* pages = step.pages + it.row * step.page_stride;
    const Sight sight{step.layers[op.layer].kv, pages, step.page_size, p.heads, d, op.window, op.scale, op.softcap};
    const long base = (long)step.lengths[it.row] - step.starts[it.row + 1];  // position of token t is base + t
    l.queries.resize(QUERIES * 256), l.part.resize(2 * QUERIES * 256);
    for (long t = 0; t < it.tokens; t++)
        for (long h = 0; h < g; h++) {
            l.at[t * g + h] = base + it.token + t;
            std::memcpy(l.queries.data() + (t * g + h) * d,
                        op.x.at + (it.token + t) * op.x.row + (it.head * g + h) * op.x.head, d * sizeof(float));
        }
    float *sums = l.part.data(), *part = sums + QUERIES * 256;
    if (it.part >= 0)
        return attend(sight, it.head, (int)M, l.queries.data(), d, l.at, it.from, it.to, p.out.data() + it.part * g * d,
                      p.most.data() + it.part * g, p.total.data() + it.part * g, l.attention);
    for (long m = 0; m < M; m++) l.most[m] = -INFINITY, l.total[m] = 0;
    std::memset(sums, 0, M * d * sizeof(float));
    const long low = op.window ? std::max(0L, l.at[0] - op.window + 1) : 0;
    for (long c = low / SPLIT; c * SPLIT <= l.at[M - 1]; c++) {
        attend(sight, it.head, (int)M, l.queries.data(), d, l.at, c * SPLIT, (c + 1) * SPLIT, part, l.part_most,
               l.part_total, l.attention);
        for (long m = 0; m < M; m++)
            merge(sums + m * d, l.most[m], l.total[m], part + m * d, l.part_most[m], l.part_total[m], d);
    }
    for (long t = 0; t < it.tokens; t++)
        for (long h = 0; h < g; h++)
            finish(sums + (t * g + h) * d, l.total[t * g + h], d,
                   op.z.at + (it.token + t) * op.z.row + (it.head * g + h) * d);
}

void Engine::attention(const Op& op, const Step& step, int thread) {
    Plan& p = *plans_[op.index];
    Local& l = *local_[thread];
    const long items = (long)p.items.size();
    for (long i; (i = p.next.fetch_add(1, std::memory_order_relaxed)) < items;) item(op, step, p.items[i], p, l);
    pool.barrier.wait();
    if (thread == 0) p.next.store(0, std::memory_order_relaxed);
    const Range r = share(op.rows, thread, pool.count);
    for (long t = r.first; t < r.last; t++) {
        if (p.parts[t] < 0) continue;
        for (long h = 0; h < p.heads; h++)
            for (long g = 0; g < p.group; g++) {
                const long first = (p.parts[t] + h * p.count[t]) * p.group + g;
                float* sums = l.part.data();
                float most = -INFINITY, total = 0;
                l.part.resize(2 * QUERIES * 256), sums = l.part.data();
                for (long c = 0; c < p.count[t]; c++) {
                    const long at = first + c * p.group;
                    merge(sums, most, total, p.out.data() + at * p.d, p.most[at], p.total[at], p.d);
                }
                finish(sums, total, p.d, op.z.at + t * op.z.row + (h * p.group + g) * p.d);
            }
    }
}

// ---- all ops

void Engine::compute(const Op& op, const Step& step, int thread) {
    const Range r = share(op.rows, thread, pool.count);
    switch (op.kind) {
        case EMBED:
            for (long t = r.first; t < r.last; t++) embed(op.w, step.tokens[t], op.z.at + t * op.z.row);
            break;
        case LINEAR: linear(op, thread); break;
        case NORM:
            for (long t = r.first; t < r.last; t++)
                for (long h = 0; h < op.heads; h++)
                    rms_norm(op.x.at + t * op.x.row + h * op.x.head, op.norm, op.eps, op.width,
                             op.z.at + t * op.z.row + h * op.z.head);
            break;
        case TURNS: {  // bias: float64 frequencies [width]
            const double* frequency = (const double*)op.bias;
            for (long t = r.first; t < r.last; t++)
                for (long i = 0; i < op.width; i++) {
                    const double angle = step.positions[t] * frequency[i];
                    op.z.at[t * op.z.row + i] = (float)(std::cos(angle) * op.scale);
                    op.z.at[t * op.z.row + op.width + i] = (float)(std::sin(angle) * op.scale);
                }
            break;
        }
        case ROPE:  // y: turns; index: half of what is rotated
            for (long t = r.first; t < r.last; t++)
                for (long h = 0; h < op.heads; h++)
                    rotate(op.x.at + t * op.x.row + h * op.x.head, op.y.at + t * op.y.row, op.index, op.width,
                           op.z.at + t * op.z.row + h * op.z.head);
            break;
        case WRITE: {  // x: keys, y: values
            const Layer& layer = step.layers[op.layer];
            for (long t = r.first; t < r.last; t++) {
                uint16_t* to = layer.kv + (long)step.slots[t] * 2 * layer.kv_heads * layer.d;
                for (const View* from : {&op.x, &op.y})
                    for (long h = 0; h < layer.kv_heads; h++)
                        for (long j = 0; j < layer.d; j += LANES, to += LANES)
                            to_bf16(to, load<f32x16>(from->at + t * from->row + h * from->head + j));
            }
            break;
        }
        case PLAN:
            if (thread == 0) plan(op, step);
            break;
        case ATTEND: attention(op, step, thread); break;
        case ADD:
            for (long t = r.first; t < r.last; t++)
                for (long i = 0; i < op.width; i++)
                    op.z.at[t * op.z.row + i] = op.x.at[t * op.x.row + i] + op.y.at[t * op.y.row + i];
            break;
        case SCALE:
            for (long t = r.first; t < r.last; t++)
                for (long i = 0; i < op.width; i++) op.z.at[t * op.z.row + i] = op.x.at[t * op.x.row + i] * op.scale;
            break;
        case GATHER:
            for (long t = r.first; t < r.last; t++)
                std::memcpy(op.z.at + t * op.z.row, op.x.at + step.logit_rows[t] * op.x.row, op.width * sizeof(float));
            break;
        case ACT_MUL:
            for (long t = r.first; t < r.last; t++) {
                const float *gate = op.x.at + t * op.x.row, *up = op.y.at + t * op.y.row;
                float* to = op.z.at + t * op.z.row;
                long i = 0;
                for (; i + LANES <= op.width; i += LANES)
                    store(to + i, activate(load<f32x16>(gate + i), (int)op.act) * load<f32x16>(up + i));
                if (i < op.width) {
                    f32x16 v = activate(some(gate + i, op.width - i), (int)op.act) * some(up + i, op.width - i);
                    std::memcpy(to + i, &v, (op.width - i) * sizeof(float));
                }
            }
            break;
    }
}

}  // namespace isthmus

// ---- what Python calls

extern "C" {

// Bytes of a record, for a check that both sides mean the same: 0 = Op, 1 = Layer, 2 = Step.
int isthmus_size(int which) {
    const int sizes[] = {sizeof(isthmus::Op), sizeof(isthmus::Layer), sizeof(isthmus::Step)};
    return sizes[which];
}

void* isthmus_engine(int threads) { return new isthmus::Engine(threads); }
void isthmus_close(void* engine) { delete (isthmus::Engine*)engine; }
void isthmus_run(void* engine, const isthmus::Op* ops, long count, const isthmus::Step* step) {
    ((isthmus::Engine*)engine)->run(ops, count, *step);
}

// Sixteen outputs side by side, padded with zeros. values: [outputs][inputs] bf16.
void isthmus_pack_bf16(const uint16_t* values, long outputs, long inputs, uint16_t* to) {
    const long blocks = (outputs + 15) / 16;
    for (long b = 0; b < blocks; b++)
        for (long k = 0; k < inputs; k += 2)
            for (long n = 0; n < 16; n++)
                for (long e = 0; e < 2; e++) *to++ = b * 16 + n < outputs ? values[(b * 16 + n) * inputs + k + e] : 0;
}

static void scales(const uint16_t* scale, const uint16_t* minimum, long outputs, long groups, long b, long g,
                   uint8_t* to) {
    for (const uint16_t* from : {scale, minimum})
        for (long n = 0; n < 16; n++, to += 2) {
            const uint16_t v = b * 16 + n < outputs ? from[(b * 16 + n) * groups + g] : 0;
            __builtin_memcpy(to, &v, 2);
        }
}

// codes [outputs][inputs], scale and minimum half [outputs][inputs / 32]; w = scale * code + minimum.
void isthmus_pack_int8(const int8_t* codes, const uint16_t* scale, const uint16_t* minimum, long outputs, long inputs,
                       uint8_t* to) {
    const long blocks = (outputs + 15) / 16, groups = inputs / 32;
    for (long b = 0; b < blocks; b++)
        for (long g = 0; g < groups; g++) {
            for (long k = 0; k < 32; k++)
                for (long n = 0; n < 16; n++)
                    *to++ = b * 16 + n < outputs ? (uint8_t)codes[(b * 16 + n) * inputs + g * 32 + k] : 0;
            scales(scale, minimum, outputs, groups, b, g, to), to += 64;
        }
}
void isthmus_pack_int4(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, long outputs, long inputs,
                       uint8_t* to) {
    const long blocks = (outputs + 15) / 16, groups = inputs / 32;
    for (long b = 0; b < blocks; b++)
        for (long g = 0; g < groups; g++) {
            for (long v = 0; v < 4; v++)
                for (long n = 0; n < 16; n++, to += 4) {
                    uint32_t word = 0;
                    for (long j = 0; j < 8; j++)
                        if (b * 16 + n < outputs)
                            word |= (uint32_t)(codes[(b * 16 + n) * inputs + g * 32 + 8 * v + j] & 15) << (4 * j);
                    __builtin_memcpy(to, &word, 4);
                }
            scales(scale, minimum, outputs, groups, b, g, to), to += 64;
        }
}

}  // extern "C"
