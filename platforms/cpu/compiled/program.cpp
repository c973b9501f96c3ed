// Runs a program of ops over one step, on all threads of a pool.
#include <memory>
#include "attention.h"
#include "matrix.h"
#include "pack.h"
#include "plan.h"
#include "pool.h"
#include "rows.h"
#include "step.h"
#include "tiled.h"

namespace isthmus {

struct Range {
    long first, last;
};
static inline Range share(long n, int thread, int threads, long unit = 1) {
    const long units = (n + unit - 1) / unit;
    return {std::min(n, units * thread / threads * unit), std::min(n, units * (thread + 1) / threads * unit)};
}

constexpr int FEW = 8;  // rows up to which every thread computes the norm before a product itself

struct Local {  // one thread's memory
    Desk attention;
    Coded coded;
#if defined(__AMX_BF16__)
    Rounded rounded;
    alignas(64) Sums sums[4];
#endif
    std::vector<float> panel, normed, queries, out, part, gathered;
    std::vector<long> own;
    float most[QUERIES], total[QUERIES], part_most[QUERIES], part_total[QUERIES];
    long at[QUERIES];
    Run runs[QUERIES + 1];
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
    template <class W>
    void linear_coded(const Op& op, int thread);
#if defined(__AMX_BF16__)
    void linear_by_tiles(const Op& op, int thread);
    Rounded rounded_;  // of a product of many rows
#endif
    void low(const Op& op, int thread);
    void up(const Op& op, int thread);
    void attention(const Op& op, const Step& step, int thread);
    void chunk_item(const Op& op, const Step& step, const Item& item, Plan& plan, Local& l);
    void decode_item(const Op& op, const Step& step, const Item& item, Plan& plan, Local& l);
    std::vector<std::unique_ptr<Local>> local_;
    Coded coded_;  // of a product of many rows
    std::vector<std::unique_ptr<Plan>> plans_;
};

// ---- products

// Outputs [first, first + some) and what follows a product, of rows [row, row + rows). sums [rows][width]: the products,
// and behind them, where the op has an activation, those of the second half of the outputs.
static void finish_rows(const Op& op, const float* sums, long first, long some, long width, long row, long rows) {
    const long N = op.w.outputs;
    const bool pair = op.act >= 0;
    const float *y = sums, *up = sums + rows * width;
    const long count = std::min(some, (pair ? N / 2 : N) - first);
    for (long m = row; m < row + rows; m++, y += width, up += width) {
        float* to = op.z.at + m * op.z.row + first;
        const float* add = op.y.at ? op.y.at + m * op.y.row + first : nullptr;
        long i = 0;
        for (; i + LANES <= count; i += LANES) {
            f32x16 v = load<f32x16>(y + i);
            if (op.bias) v += load<f32x16>(op.bias + first + i);
            if (pair)
                v = activate(v, (int)op.act) *
                    (load<f32x16>(up + i) + (op.bias ? load<f32x16>(op.bias + N / 2 + first + i) : f32x16{}));
            if (add) v += load<f32x16>(add + i);
            store(to + i, v);
        }
        for (; i < count; i++) to[i] = y[i] + (op.bias ? op.bias[first + i] : 0) + (add ? add[i] : 0);
    }
}

static void finish_product(const Op& op, const float* sums, long first, long width) {
    finish_rows(op, sums, first, width, width, 0, op.rows);
}

// NB blocks from `first` on.
template <class W, int NB>
static void outputs(const Op& op, const float* x, long xs, long first, Local& l) {
    const long M = op.rows, K = op.w.inputs, block = op.w.block;
    float* y = l.out.data();
    products<W, NB>(x, xs, M, op.w.at + first * block, block, K, l.panel.data(), y);
    if (op.act >= 0)
        products<W, NB>(x, xs, M, op.w.at + (first + op.w.outputs / 2 / LANES) * block, block, K, l.panel.data(),
                        y + M * NB * LANES);
    finish_product(op, y, first * LANES, NB * LANES);
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

template <class W>
void Engine::linear_coded(const Op& op, int thread) {
    Local& l = *local_[thread];
    const long M = op.rows, K = op.w.inputs, N = op.act >= 0 ? op.w.outputs / 2 : op.w.outputs;
    const bool together = M > FEW;
    Coded& x = together ? coded_ : l.coded;
    if (together) pool.barrier.wait();  // nobody reads the product before
    if (!together || thread == 0) x.resize(M, K);
    if (together) pool.barrier.wait();
    l.normed.resize(K);
    const Range rows = together ? share(M, thread, pool.count, ROWS) : Range{0, M};
    for (long m = rows.first; m < rows.last; m++) {
        const float* row = op.x.at + m * op.x.row;
        if (op.norm) rms_norm(row, op.norm, op.eps, K, l.normed.data()), row = l.normed.data();
        x.encode(row, m, M, K);
    }
    if (together) pool.barrier.wait();
    const Range r = share((N + LANES - 1) / LANES, thread, pool.count);
    l.out.resize(std::max<size_t>(l.out.size(), 2 * M * LANES));
    float* y = l.out.data();
    for (long b = r.first; b < r.last; b++) {
        coded_products<W>(x, M, op.w.at + b * op.w.block, K, y, LANES);
        if (op.act >= 0)
            coded_products<W>(x, M, op.w.at + (b + op.w.outputs / 2 / LANES) * op.w.block, K, y + M * LANES, LANES);
        finish_product(op, y, b * LANES, LANES);
    }
}

#if defined(__AMX_BF16__)
void Engine::linear_by_tiles(const Op& op, int thread) {
    Local& l = *local_[thread];
    const long M = op.rows, K = op.w.inputs, N = op.act >= 0 ? op.w.outputs / 2 : op.w.outputs;
    const bool together = M > FEW;
    Rounded& x = together ? rounded_ : l.rounded;
    if (together) pool.barrier.wait();  // nobody reads the product before
    if (!together || thread == 0) x.resize(M, K);
    if (together) pool.barrier.wait();
    l.normed.resize(std::max<size_t>(l.normed.size(), K));
    const Range rows = together ? share(M, thread, pool.count, TILE) : Range{0, M};
    for (long m = rows.first; m < rows.last; m++) {
        const float* row = op.x.at + m * op.x.row;
        if (op.norm) rms_norm(row, op.norm, op.eps, K, l.normed.data()), row = l.normed.data();
        x.encode(row, m, K);
    }
    if (together) pool.barrier.wait();
    const Range r = share((N + LANES - 1) / LANES, thread, pool.count);
    if (r.first == r.last) return;
    l.out.resize(std::max<size_t>(l.out.size(), 4 * TILE * LANES));
    const int tiles = M > TILE ? 2 : 1, blocks = 4 / tiles, run = op.act >= 0 ? blocks / 2 : blocks;
    const long step = x.rows * DEPTH, near = std::max(2L * TILE, NEAR / (2 * K) / (2 * TILE) * (2 * TILE));
    const Tiles shape((int)x.rows);
    for (long from = 0; from < M; from += near)
        for (long b = r.first; b < r.last; b += run) {
            const uint8_t* w[4];
            for (int n = 0; n < blocks; n++)
                w[n] = op.w.at + (std::min(b + n % run, r.last - 1) + n / run * N / LANES) * op.w.block;
            for (long m = from; m < std::min(M, from + near); m += tiles * TILE) {
                const long t = m / TILE, most = std::min<long>(tiles * TILE, M - m);
                const uint16_t *one = x.tile(t, K), *other = most > TILE ? x.tile(t + 1, K) : one;
                if (tiles == 1)
                    multiply_1_4(one, w, K, step, l.sums);
                else
                    multiply_2_2(one, other, w, K, step, l.sums, m == from);
                gather_sums(l.sums, tiles, blocks, run, most, l.out.data());
                finish_rows(op, l.out.data(), b * LANES, std::min<long>(run, r.last - b) * LANES, run * LANES, m, most);
            }
        }
}
#endif

void Engine::linear(const Op& op, int thread) {
#if defined(__AMX_BF16__)
    if (op.w.format == BF16 && op.w.inputs % DEPTH == 0) return linear_by_tiles(op, thread);
#endif
    switch (op.w.format) {
        case BF16: return linear_as<Bf16>(op, thread);
        case INT8: return linear_coded<Int8>(op, thread);
        case INT4: return linear_coded<Int4>(op, thread);
        case FLOAT32: return linear_as<F32>(op, thread);
    }
}

// ---- low-rank adapters: weights in bf16, sixteen columns of one adapter to a block. A token is multiplied with the
// columns of its own adapter alone, beside the other tokens that have it.

// Those tokens, into `own`, and their first K numbers as rows next to each other; `stride` is from one to the next.
static const float* own_rows(const Adapters& a, int32_t owner, long M, const float* x, long& stride, long K, Local& l) {
    l.own.clear();
    for (long m = 0; m < M; m++)
        if (a.owners[m] == owner) l.own.push_back(m);
    const long count = l.own.size();
    if (!count || l.own.back() - l.own.front() == count - 1) return x + (count ? l.own.front() * stride : 0);
    l.gathered.resize(std::max<size_t>(l.gathered.size(), count * K));
    for (long i = 0; i < count; i++) std::copy_n(x + l.own[i] * stride, K, l.gathered.data() + i * K);
    stride = K;
    return l.gathered.data();
}

// z = x A^T, for each token those columns that are its adapter's: `up` does not look at others.
void Engine::low(const Op& op, int thread) {
    Local& l = *local_[thread];
    const Adapters& a = *(const Adapters*)op.bias;
    const long M = op.rows, K = op.w.inputs;
    const Range r = share(op.w.outputs / LANES, thread, pool.count);
    const float* x = op.x.at;
    long xs = op.x.row;
    if (r.first == r.last) return;
    if (op.norm) {
        l.normed.resize(M * K);
        for (long m = 0; m < M; m++) rms_norm(x + m * xs, op.norm, op.eps, K, l.normed.data() + m * K);
        x = l.normed.data(), xs = K;
    }
    l.out.resize(std::max<size_t>(l.out.size(), M * LANES));
    for (long b = r.first; b < r.last; b++) {
        const int32_t owner = a.blocks[b % a.count];
        if (!a.active[owner]) continue;
        long stride = xs;
        const float* rows = own_rows(a, owner, M, x, stride, K, l);
        const float* y = l.out.data();
        products<Bf16, 1>(rows, stride, l.own.size(), op.w.at + b * op.w.block, op.w.block, K, l.panel.data(),
                          l.out.data());
        for (long m : l.own) store(op.z.at + m * op.z.row + b * LANES, load<f32x16>(y)), y += LANES;
    }
}

// Outputs [first, first + width) of the tokens in `own`, from products that lie there next to each other; none = zeros.
static void finish_up(const Op& op, const std::vector<long>& own, const float* y, long first, long width) {
    const long count = std::min(width, (long)op.w.outputs - first);
    for (long m : own) {
        float* to = op.z.at + m * op.z.row + first;
        const float* add = op.y.at ? op.y.at + m * op.y.row + first : nullptr;
        for (long i = 0; i < count; i++) to[i] = (y ? y[i] : 0) + (add ? add[i] : 0);
        if (y) y += width;
    }
}

template <int NB>
static void up_outputs(const Op& op, const float* x, long stride, long K, long from, long first, Local& l) {
    const uint8_t* w = op.w.at + first * op.w.block + from / Bf16::GROUP * Bf16::BYTES;
    products<Bf16, NB>(x, stride, l.own.size(), w, op.w.block, K, l.panel.data(), l.out.data());
    finish_up(op, l.own, l.out.data(), first * LANES, NB * LANES);
}

// z = x B^T, on top of y where there is one.
void Engine::up(const Op& op, int thread) {
    Local& l = *local_[thread];
    const Adapters& a = *(const Adapters*)op.bias;
    const Range r = share((op.w.outputs + LANES - 1) / LANES, thread, pool.count);
    l.out.resize(std::max<size_t>(l.out.size(), op.rows * 4 * LANES));
    for (long b = 0, next; b < a.count; b = next) {
        for (next = b + 1; next < a.count && a.blocks[next] == a.blocks[b];) next++;
        if (!a.active[a.blocks[b]]) continue;
        const long K = (next - b) * LANES;
        long stride = op.x.row, n = r.first;
        const float* x = own_rows(a, a.blocks[b], op.rows, op.x.at + b * LANES, stride, K, l);
        for (; n + 4 <= r.last; n += 4) up_outputs<4>(op, x, stride, K, b * LANES, n, l);
        for (; n < r.last; n++) up_outputs<1>(op, x, stride, K, b * LANES, n, l);
    }
    l.own.clear();
    for (long m = 0; m < op.rows; m++)
        if (!a.owners[m]) l.own.push_back(m);
    finish_up(op, l.own, nullptr, r.first * LANES, (r.last - r.first) * LANES);
}

static void embed(const Weight& w, long n, float* y) {
    switch (w.format) {
        case BF16: return row_of<Bf16>(w.at, w.block, w.inputs, n, y);
        case INT8: return row_of_codes<Int8>(w.at, w.block, w.inputs, n, y);
        case INT4: return row_of_codes<Int4>(w.at, w.block, w.inputs, n, y);
        case FLOAT32: return row_of<F32>(w.at, w.block, w.inputs, n, y);
    }
}

// ---- attention

static Sight sight_of(const Op& op, const Step& step, const Plan& p, long row) {
    return {step.layers[op.layer].kv, step.pages + row * step.page_stride, step.page_size, p.heads, p.d, op.window,
            op.scale, op.softcap};
}

void Engine::chunk_item(const Op& op, const Step& step, const Item& it, Plan& p, Local& l) {
    const long d = p.d, g = p.group, M = it.tokens * g;
    const Sight sight = sight_of(op, step, p, it.row);
    const long base = (long)step.lengths[it.row] - step.starts[it.row + 1];  // position of token t is base + t
    for (long t = 0; t < it.tokens; t++)
        for (long h = 0; h < g; h++) {
            l.at[t * g + h] = base + it.token + t;
            std::memcpy(l.queries.data() + (t * g + h) * d,
                        op.x.at + (it.token + t) * op.x.row + (it.head * g + h) * op.x.head, d * sizeof(float));
        }
    take_queries(sight, (int)M, l.queries.data(), l.attention);
    float *sums = l.part.data(), *part = sums + QUERIES * 256;
    for (long m = 0; m < M; m++) l.most[m] = -INFINITY, l.total[m] = 0;
    std::memset(sums, 0, M * d * sizeof(float));
    const long low = op.window ? std::max(0L, l.at[0] - op.window + 1) : 0;
    for (long c = low / SPLIT; c * SPLIT <= l.at[M - 1]; c++) {
        const Run all{sight.pages, 0, (int)M, c * SPLIT, (c + 1) * SPLIT};
        attend(sight, it.head, (int)M, l.at, c * SPLIT, &all, 1, part, l.part_most, l.part_total, l.attention);
        for (long m = 0; m < M; m++)
            merge(sums + m * d, l.most[m], l.total[m], part + m * d, l.part_most[m], l.part_total[m], d,
                  unit_of_scores(d));
    }
    for (long t = 0; t < it.tokens; t++)
        for (long h = 0; h < g; h++)
            finish(sums + (t * g + h) * d, l.total[t * g + h], d,
                   op.z.at + (it.token + t) * op.z.row + (it.head * g + h) * d);
}

void Engine::decode_item(const Op& op, const Step& step, const Item& it, Plan& p, Local& l) {
    const long d = p.d, g = p.group;
    const Member* members = p.members.data() + it.member;
    for (long i = 0; i < it.members; i++)
        for (long h = 0; h < g; h++) {
            l.at[i * g + h] = step.lengths[members[i].row] - 1;
            std::memcpy(l.queries.data() + (i * g + h) * d,
                        op.x.at + members[i].token * op.x.row + (it.head * g + h) * op.x.head, d * sizeof(float));
        }
    float* sums = l.part.data();
    const long apart = it.from + it.common;
    Run* runs = l.runs;
    int count = 0;
    const auto pages = [&](long i) { return step.pages + members[i].row * step.page_stride; };
    if (it.common) runs[count++] = {pages(0), 0, (int)(it.members * g), it.from, apart};
    for (long i = 0; i < it.members; i++)
        if (apart < std::min<long>(it.to, step.lengths[members[i].row]))
            runs[count++] = {pages(i), (int)(i * g), (int)g, apart, it.to};
    const Sight sight = sight_of(op, step, p, members[0].row);
    take_queries(sight, (int)(it.members * g), l.queries.data(), l.attention);
    attend(sight, it.head, (int)(it.members * g), l.at, it.from, runs, count, sums, l.part_most, l.part_total, l.attention);
    for (long i = 0; i < it.members; i++) {
        const Member& m = members[i];
        const long q = i * g;
        for (long h = 0; h < g; h++) {
            const float* out = sums + (q + h) * d;
            if (m.part < 0) {
                finish(out, l.part_total[q + h], d, op.z.at + m.token * op.z.row + (it.head * g + h) * d);
                continue;
            }
            const long to = (m.part + it.head * p.count[m.token]) * g + h;
            std::memcpy(p.out.data() + to * d, out, d * sizeof(float));
            p.most[to] = l.part_most[q + h], p.total[to] = l.part_total[q + h];
        }
    }
}

void Engine::attention(const Op& op, const Step& step, int thread) {
    Plan& p = *plans_[op.index];
    Local& l = *local_[thread];
    const long items = (long)p.items.size();
    l.queries.resize(QUERIES * 256), l.part.resize(2 * QUERIES * 256);
    for (long i; (i = p.next.fetch_add(1, std::memory_order_relaxed)) < items;) {
        const Item& it = p.items[i];
        it.decode ? decode_item(op, step, it, p, l) : chunk_item(op, step, it, p, l);
    }
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
                for (long c = 0; c < p.count[t]; c++) {
                    const long at = first + c * p.group;
                    merge(sums, most, total, p.out.data() + at * p.d, p.most[at], p.total[at], p.d,
                          unit_of_scores(p.d));
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
        case LOW: low(op, thread); break;
        case UP: up(op, thread); break;
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
            if (thread == 0) plans_[op.index]->make(op, step);
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

// Kinds of ops that there are.
int isthmus_kinds() { return isthmus::KINDS; }
// A number that changes when the order of packed matrices does.
int isthmus_order() { return 2; }

// Does this processor run this build? Asked before anything else.
int isthmus_runs() {
#if defined(__AMX_BF16__)
    return isthmus::has_matrix_unit();
#else
    return 1;
#endif
}

void* isthmus_engine(int threads) { return new isthmus::Engine(threads); }
void isthmus_close(void* engine) { delete (isthmus::Engine*)engine; }
void isthmus_run(void* engine, const isthmus::Op* ops, long count, const isthmus::Step* step) {
    ((isthmus::Engine*)engine)->run(ops, count, *step);
}

}  // extern "C"
