// Paged attention and the choice of blocks. A query's result depends on its own keys alone: softmax runs
// over partitions of 512 keys, merged in order; see `Ops` and qsa/reference.py.
#pragma once

#include "strided.hpp"

namespace civetta {

// pages[page, place, group, :] of keys or values.
struct Pages {
    const void* data;
    int64_t page_stride, place_stride, group_stride;  // elements
};

struct Attention {
    Strided q;  // [rows, groups * share, width]
    Pages k, v;
    bool bf16;  // of the pages
    const int64_t* table;
    int64_t page_tokens, rows, groups, share, width;
    void* out;  // contiguous, q's type
};

// Query t sees keys 0 .. first + t.
void attend_dense(const Kernels& kernels, const Attention& a, int64_t first);

// Query t sees the keys of tokens[t], ascending, the list ended by -1 or by its length.
void attend_sparse(const Kernels& kernels, const Attention& a, const int64_t* tokens, int64_t length);

struct Choice {
    Strided q;        // [rows, heads, width]
    const void* keys;  // pages of page_blocks contiguous rows
    bool bf16;        // of the keys
    int64_t page_stride;
    const int64_t *table, *blocks;  // blocks[t]: complete blocks that query t sees, more than `keep`
    int64_t page_blocks, rows, heads, width, keep;
    int64_t* out;  // [rows, keep]
};

// The `keep` best blocks of each query, ascending; ties to the lower block.
void choose_blocks(const Kernels& kernels, const Choice& c);

}  // namespace civetta
