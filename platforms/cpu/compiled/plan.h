// Which work the attention of a step is: tiles of queries, and the parts of contexts that they walk.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>
#include "attention.h"
#include "step.h"

namespace isthmus {

struct Item {  // a tile of a chunk's queries over all of its context, or of decode rows over one part of theirs
    int32_t row, token, tokens, head;
    int64_t from, to;
    int32_t decode, member, members, common;  // members: rows whose first `common` positions of the part are the same
};
struct Member {  // a decode row in an item. part: where its sums go, of the item's head 0, -1 = its context is one part
    int32_t row, token, part;
};
struct Plan {  // of one step, for all layers of one form
    std::vector<Item> items;
    std::vector<Member> members;
    std::vector<int32_t> parts;  // first part of each token's row, -1 = not split
    std::vector<int32_t> count;
    std::vector<float> out, most, total;
    std::atomic<long> next{0};
    long heads = 0, d = 0, group = 0;

    void make(const Op& op, const Step& step);

  private:
    void add_part(const Step& step, long part, std::vector<Member>& rows);
};

// Positions from `first` on that two rows have in the same pages, whole blocks, up to `limit`.
static long shared_positions(const Step& step, long a, long b, long first, long limit) {
    const int32_t *one = step.pages + a * step.page_stride, *other = step.pages + b * step.page_stride;
    long page = first / step.page_size;
    if (a == b) return limit;
    while (page * step.page_size < first + limit && one[page] == other[page]) page++;
    return std::max(0L, std::min(limit, page * step.page_size - first)) / KEYS * KEYS;
}

inline void Plan::make(const Op& op, const Step& step) {
    const Layer& layer = step.layers[op.layer];
    heads = layer.kv_heads, d = layer.d, group = op.heads / layer.kv_heads;
    const long each = std::max<long>(1, QUERIES / group);
    long total_parts = 0, longest = 0;
    items.clear(), members.clear();
    parts.assign(op.rows, -1);
    count.assign(op.rows, 0);
    for (int32_t row = 0; row < step.rows; row++) {
        const int32_t begin = step.starts[row], end = step.starts[row + 1], length = step.lengths[row];
        if (end - begin == 1) {
            const long first = op.window ? std::max(0L, (long)length - op.window) / SPLIT : 0;
            const long last = (length - 1) / SPLIT;
            longest = std::max(longest, last + 1);
            if (last == first) continue;
            parts[begin] = (int32_t)total_parts, count[begin] = (int32_t)(last - first + 1);
            total_parts += heads * (last - first + 1);
            continue;
        }
        for (int32_t t = begin; t < end; t += (int32_t)each)
            for (int32_t head = 0; head < heads; head++)
                items.push_back({row, t, (int32_t)std::min<long>(each, end - t), head, 0, length, 0, 0, 0, 0});
    }
    std::vector<Member> rows;
    for (long part = 0; part < longest; part++) {
        rows.clear();
        for (int32_t row = 0; row < step.rows; row++) {
            const int32_t token = step.starts[row], length = step.lengths[row];
            if (step.starts[row + 1] - token != 1 || (length - 1) / SPLIT < part) continue;
            const long first = op.window ? std::max(0L, (long)length - op.window) / SPLIT : 0;
            if (part < first) continue;
            rows.push_back({row, token, parts[token] < 0 ? -1 : (int32_t)(parts[token] + part - first)});
        }
        add_part(step, part, rows);
    }
    std::reverse(items.begin(), items.end());  // the longest contexts first
    out.resize(total_parts * group * d), most.resize(total_parts * group), total.resize(total_parts * group);
    next.store(0, std::memory_order_relaxed);
}

// Items of the decode rows that see something of a part: rows that begin it with the same page go together.
inline void Plan::add_part(const Step& step, long part, std::vector<Member>& rows) {
    const long first = part * SPLIT, at = first / step.page_size, each = std::max<long>(1, QUERIES / group);
    const auto page = [&](const Member& m) { return step.pages[m.row * step.page_stride + at]; };
    std::stable_sort(rows.begin(), rows.end(), [&](const Member& a, const Member& b) { return page(a) < page(b); });
    for (size_t i = 0, j; i < rows.size(); i = j) {
        long common = std::min<long>(SPLIT, step.lengths[rows[i].row] - first);
        for (j = i + 1; j < rows.size() && (long)(j - i) < each && page(rows[j]) == page(rows[i]); j++) {
            const long limit = std::min<long>(common, step.lengths[rows[j].row] - first);
            const long both = shared_positions(step, rows[i].row, rows[j].row, first, limit);
            if ((long)(j - i) * both <= (long)(j - i - 1) * common) break;  // less would be read once than without it
            common = both;
        }
        const int32_t member = (int32_t)members.size(), many = (int32_t)(j - i);
        members.insert(members.end(), rows.begin() + i, rows.begin() + j);
        if (many == 1) common = 0;
        for (int32_t head = 0; head < heads; head++)
            items.push_back({0, 0, 0, head, first, first + SPLIT, 1, member, many, (int32_t)common});
    }
}

}  // namespace isthmus
