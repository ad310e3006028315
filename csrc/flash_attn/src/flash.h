// The contract between three parties: Python (flashcute/config.py mirrors FwdConfig), the torch
// binding (flash_api.cpp fills Flash_fwd_params) and the kernels (one shared object per
// configuration). Plain C++20 without CUDA or torch, so that every one of them, and the host tests,
// can include it.
#pragma once

#include <cstdint>

namespace flash {

// Bump on any change to the parameters, Flash_kernel or their meaning: a shared object built
// against another version is refused at load with a message instead of crashing at launch.
inline constexpr int32_t kAbiVersion = 22;

enum class DType : int32_t { fp16, bf16 };
enum class MaskKind : int32_t { none, causal, local };

// Everything that is decided when a forward kernel is compiled. A structural type, so one value is
// one template argument and profilers print it in the kernel's name.
struct FwdConfig {
    int32_t arch;       // kernel class: 80 (mma.sync + cp.async) or 90 (wgmma + TMA)
    DType dtype;        // of Q, K, V and O; accumulation is fp32
    int32_t head_dim;   // instantiated head dimension; any multiple of 8 up to it is accepted
    MaskKind mask;      // aligned to the bottom-right corner; local: a window around the diagonal
    int32_t tile_m;     // query rows per CTA
    int32_t tile_n;     // keys per main loop step
    int32_t warps;      // MMA warps per CTA, each owning tile_m / warps rows
    int32_t stages;     // K/V buffers in shared memory: 1 or 2; sm90: 2 or 4
    int32_t q_in_regs;  // k16 steps of Q's fragments kept in registers instead of re-reading
                        // shared memory; sm80: none or all
    int32_t min_ctas;   // CTAs per SM that the register budget must allow
    bool ping_pong;     // sm90: consumer warpgroups take turns in issuing their wgmma
    bool softcap;       // scores become softcap * tanh(score / softcap)
    bool alibi;         // scores are lowered by the distance of query and key (ALiBi)
    bool dropout;       // attention weights are dropped at random
    bool paged;         // keys and values lie in pages, which a block table lists
};

// The tile of one backward kernel, whose CTA owns rows of one side and visits blocks of the other:
// for dQ it owns queries and visits keys, for dK and dV the other way round.
struct BwdTile {
    int32_t rows;        // rows that a CTA owns
    int32_t step;        // rows of the other side per main loop step
    int32_t warps;       // MMA warps per CTA, which divide the owned rows; sm90: each has 16 rows
    int32_t stages;      // buffers in shared memory of what a step loads: 1 or 2
    int32_t min_ctas;    // CTAs per SM that the register budget must allow
    int32_t warps_step;  // warps along a step's rows and the columns of dK and dV: 1, or more with
                         // fused; warps / warps_step divide the owned rows
};

// Everything that is decided when the kernels of a backward are compiled.
struct BwdConfig {
    int32_t arch;      // kernel class: 80 or 90
    DType dtype;       // of all tensors but the LSE and sinks; accumulation is fp32
    int32_t head_dim;  // as in FwdConfig
    MaskKind mask;
    BwdTile dq;
    BwdTile dkv;
    bool split_dkv;  // dK and dV have a kernel each: together they exceed the registers
    // One kernel computes dQ, dK and dV with the tile dkv, which is equal to dq. Its CTAs
    // accumulate dQ in global memory. sm90: always.
    bool fused;
    bool softcap;  // as in FwdConfig
    bool alibi;
    bool dropout;
    bool varlen;  // ragged batch
};

// The row statistics (row_stats_ptr) of each head, in a ragged batch those of each sequence, are
// padded to a multiple of this. Every tile divides it.
inline constexpr int32_t kRowStatsMultiple = 128;
// Rows of queries per semaphore of their sums of dQ. A kernel that orders larger blocks of rows
// uses the first semaphore of a block for all of it.
inline constexpr int32_t kSemaphoreRows = 64;
// Row statistics of a ragged batch: row_stats_begin() returns where those of sequence i begin,
// whose queries begin at row_q; row_stats_rows() returns how many rows of statistics a head has.
// One block of 128 rows is added per sequence, so that there is room for its rows in whole blocks
// and for the rows of no sequence behind it. i = -1: the rows before the first sequence; i = b:
// those behind the last one, whose tiles read statistics, too.
inline constexpr int32_t row_stats_begin(int32_t row_q, int32_t i) {
    return (row_q / kRowStatsMultiple + i + 1) * kRowStatsMultiple;
}
inline constexpr int64_t row_stats_rows(int64_t total_q, int64_t b) {
    return (total_q / kRowStatsMultiple + b + 2) * kRowStatsMultiple;
}

// Arguments of one forward launch. Strides count elements. A pointer's comment begins with the
// shape that it addresses.
struct Flash_fwd_params {
    const void *q_ptr;       // (b, seqlen_q, h, d)
    const void *k_ptr;       // (b, seqlen_k, h_k, d)
    const void *v_ptr;       // (b, seqlen_k, h_k, d)
    void *o_ptr;             // (b, seqlen_q, h, d)
    float *softmax_lse_ptr;  // (b, h, seqlen_q), natural log, -inf where a row sees no key
    // (h), attention sinks: a logit per head, for a further column of the softmax that has no
    // value. The LSE includes it. Null: no sinks.
    const float *sinks_ptr;
    // (b, h), of FwdConfig::alibi: -slope * |i + seqlen_k - seqlen_q - j| is added to the score of
    // query i and key j. The batch stride is 0 where all entries, or sequences, share their slopes.
    const float *alibi_slopes_ptr;
    // (2), of FwdConfig::dropout and its backward: seed and offset of the mask that dropout.h
    // defines.
    const int64_t *rng_state_ptr;

    // A ragged batch (varlen): sequence i has rows [cu_seqlens[i], cu_seqlens[i + 1]) of q and o,
    // (total_q, h, d), or of k and v, (total_k, h_k, d); the first seqused[i] of them count. The
    // LSE is (h, total_q). Batch strides are 0. seqlen_q bounds the query rows of a sequence: rows
    // beyond it are treated as rows of no sequence and get zeros and -inf.
    const int32_t *cu_seqlens_q_ptr;  // (b + 1); null: sequence i begins at row i * seqlen_q
    const int32_t *cu_seqlens_k_ptr;  // (b + 1); may be null over a cache
    const int32_t *seqused_q_ptr;     // (b); null: all
    const int32_t *seqused_k_ptr;     // (b); null: all
    // flash::WorkPlan, written by Flash_kernel::plan. Where the attention kernel's CTAs plan for
    // themselves (cta_plan.h), they write only the positions of split tiles there. Null: a dense
    // batch.
    void *plan_ptr;

    // A KV cache (is_cache), always in a ragged batch: k and v are (num_pages, seqlen_k, h_k, d),
    // and the keys of sequence i are rows [leftpad_k[i], seqused_k[i] + seqlen_new) of entry
    // cache_batch_idx[i]. With FwdConfig::paged they are (num_pages, page_size, h_k, d), and row j
    // of sequence i is row j % page_size of page block_table[cache_batch_idx[i], j / page_size].
    // seqlen_k is the room of an entry: page_size times the columns of the table, or less. With
    // cu_seqlens_k and without seqused_k a sequence has cu_seqlens_k[i + 1] - cu_seqlens_k[i] keys,
    // without both seqlen_k. Any values are safe: an entry that does not exist has no keys, a page
    // that does not exist holds zeros, and columns of the table behind the last key are not read.
    const int32_t *cache_batch_idx_ptr;  // (b), of [0, b_k); null: i
    const int32_t *leftpad_k_ptr;        // (b); null, and with FwdConfig::paged always: zeros
    const int32_t *block_table_ptr;      // (b_k, columns)

    // What Flash_kernel::plan appends to a cache: row j of sequence i becomes row seqused_k[i] + j,
    // if there is such a row. Without seqused_k the last new row becomes row seqlen_k - 1.
    const void *k_new_ptr;  // (b, seqlen_new, h_k, d); null: nothing is appended
    const void *v_new_ptr;  // (b, seqlen_new, h_k, d)
    // Rotary embedding: Flash_kernel::plan rotates the first rotary_dim elements of new keys and of
    // queries. A new key is rotated by the table row with the number of its row in the cache; query
    // j by row seqused_k[i] + j, or with rotary_q_step 0 every query by row seqused_k[i]. It reads
    // the queries at q_unrotated_ptr and writes them to q_ptr.
    const void *rotary_cos_ptr;   // (seqlen_rotary, rotary_dim / 2); null: nothing is rotated
    const void *rotary_sin_ptr;   // (seqlen_rotary, rotary_dim / 2)
    const void *q_unrotated_ptr;  // (b, seqlen_q, h, d)

    // Workspace for the partial results of split-KV: each part of a split tile writes float32 rows
    // of its own, which the combine kernel, or the CTA that stores the last part, merges. Aligned
    // to 16 bytes; null with num_splits 1.
    float *o_partial_ptr;    // (grid heads, partial_rows, d)
    float *lse_partial_ptr;  // (grid heads, partial_rows)

    int64_t q_batch_stride, q_row_stride, q_head_stride;
    int64_t k_batch_stride, k_row_stride, k_head_stride;
    int64_t v_batch_stride, v_row_stride, v_head_stride;
    int64_t o_batch_stride, o_row_stride, o_head_stride;
    int64_t softmax_lse_batch_stride, softmax_lse_head_stride;
    int64_t alibi_slopes_batch_stride;
    int64_t block_table_batch_stride;
    int64_t k_new_batch_stride, k_new_row_stride, k_new_head_stride;
    int64_t v_new_batch_stride, v_new_row_stride, v_new_head_stride;
    int64_t q_unrotated_batch_stride, q_unrotated_row_stride, q_unrotated_head_stride;

    int32_t b, seqlen_q, seqlen_k, h, h_k, d;
    int32_t h_h_k_ratio;  // query heads per key/value head
    // pack-GQA: log2 of the tile rows per query position, which are h_h_k_ratio rounded up to a
    // power of two. 0: heads are not packed.
    int32_t pack_shift;
    int32_t total_q, total_k;  // rows of a ragged batch
    int32_t plan_capacity;     // tiles of a grid head that plan_ptr has room for
    int32_t b_k;               // rows of the block table; without one num_pages
    int32_t num_pages, page_size;
    int32_t partial_rows;  // rows of a grid head in the workspace
    int32_t is_cache;      // 0 or 1
    int32_t seqlen_new;    // 0: nothing is appended
    int32_t seqlen_rotary, rotary_dim, rotary_q_step;
    // 1: rotary pairs are elements 2 i and 2 i + 1; 0: i and i + rotary_dim / 2
    int32_t rotary_interleaved;

    // Split-KV of a ragged batch: tiles are split along the keys into at most num_splits parts, 1
    // to kMaxSplits, of at least split_blocks key blocks. With split_ctas 0 the parts of a sequence
    // depend on its own lengths alone. split_ctas > 0: into fewer, longer parts, as few as keep so
    // many CTAs busy (sm90: one per SM), and fewer still where merging takes longer than reading
    // the keys. Not at all where sequences have one tile for each head, of more than
    // kMostRowsMerged rows, and whole tiles keep 0.45 to 1 of these CTAs busy.
    int32_t num_splits, split_blocks, split_ctas;

    // MaskKind::local: query i sees keys [i + seqlen_k - seqlen_q - window_left,
    // i + seqlen_k - seqlen_q + window_right]. Both >= 0; the sum of the two and of both lengths is
    // less than 2^31.
    int32_t window_left, window_right;

    float scale_softmax;  // applied to Q K^T
    // The kernels exponentiate in base 2: scale_softmax times log2(e); with FwdConfig::softcap,
    // whose kernels compute tanh(scale_softcap * Q K^T), softcap times log2(e).
    float scale_softmax_log2;
    float scale_softcap;  // scale_softmax / softcap; without softcap 1
    float alibi_scale;    // 1 / scale_softmax; with FwdConfig::softcap 1 / softcap

    // FwdConfig::dropout: which weights are dropped (DropoutBound), and the factor of the others,
    // one over the probability of being kept.
    uint32_t dropout_bound, dropout_flip;
    float dropout_scale;

    // Order of the tiles in a plan. 0: longest tiles first. n > 0, for tiles of keys: longest
    // sequences first, each with its tiles in their order. In the sm80 class, with up to 127
    // sequences, each group of n sequences takes turns: all first tiles, then all second ones.
    int32_t plan_in_order;
};

// Each weight draws 16 random bits, and is dropped if they are less than a bound, compared as
// numbers of type half. No bound has exactly 31745 patterns below it, as -0 equals 0, nor more than
// 63489, as NaN is never less: in these cases the comparison is flipped, and those not less are
// dropped.
struct DropoutBound {
    uint32_t bound;  // in both halves of the word
    uint32_t flip;   // all ones where the comparison is flipped; else 0

    // threshold: how many of the 65536 patterns are dropped, at most 65535.
    explicit constexpr DropoutBound(uint32_t threshold) {
        constexpr uint32_t kInf = 0x7C00;         // inf; so many patterns, with -inf, are below 0
        constexpr uint32_t kMost = 2 * kInf + 1;  // patterns less than inf, with 0 and -0
        bool const flips = threshold == kInf + 1 || threshold > kMost;
        uint32_t const less = flips ? 65536 - threshold : threshold;
        bound = (less <= kInf ? 0x8000 | (kInf - less) : less - kInf - 1) * 0x10001;
        flip = flips ? ~0u : 0;
    }
};

inline constexpr int32_t kMaxSplits = 256;

// Most rows of a tile that is merged by the CTA that stores its last part (merge_parts_sm90.h).
// Tiles of more rows are left to the combine kernel.
inline constexpr int32_t kMostRowsMerged = 16;
// Counters of stored parts of a launch, one per tile: with more tiles the combine kernel merges.
inline constexpr int32_t kArrivals = 128;

// With split_ctas tiles are split so that each CTA has at most so many parts.
inline constexpr int32_t kSplitWaves = 4;

// Upper bound of the tiles that splitting with split_ctas adds to a grid head.
inline constexpr int64_t parts_of_head(int64_t split_ctas, int64_t grid_heads) {
    return kSplitWaves * split_ctas / grid_heads + 1;
}
// Upper bound of the tiles of a grid head in a ragged batch, whatever its lengths: those of b
// sequences, of the rows between them and of the rows at the end. total_rows: total_q <<
// pack_shift.
inline constexpr int64_t plan_capacity(int64_t total_rows, int64_t b, int64_t tile_m,
                                       int64_t num_splits = 1, int64_t split_ctas = 0,
                                       int64_t grid_heads = 1) {
    int64_t const more = (num_splits - 1) * (total_rows / tile_m + b);
    int64_t const wanted = parts_of_head(split_ctas, grid_heads);
    return total_rows / tile_m + 2 * b + 1 + (split_ctas > 0 && wanted < more ? wanted : more);
}
// Size of what plan_ptr points to, in words of 32 bits.
inline constexpr int64_t plan_words(int64_t capacity, int64_t b, int64_t total_q = 0,
                                    int64_t num_splits = 1) {
    return 4 + 8 * capacity + 16 * b + 8 + (num_splits > 1 ? 4 * total_q : 0);
}
// The size for a backward, whose kernels have their plans made one after the other at the same
// place.
inline constexpr int32_t kMinBwdRows = 64;  // least rows that a CTA owns
inline constexpr int64_t bwd_plan_words(int64_t total_q, int64_t total_k, int64_t b) {
    return plan_words(plan_capacity(total_q > total_k ? total_q : total_k, b, kMinBwdRows), b);
}
// Rows of a grid head in the workspace for partial results.
inline constexpr int64_t partial_rows(int64_t total_rows, int64_t tile_m, int64_t num_splits,
                                      int64_t split_ctas, int64_t grid_heads) {
    int64_t const most = num_splits > 1 ? num_splits * total_rows : 0;
    int64_t const wanted = total_rows + tile_m * parts_of_head(split_ctas, grid_heads);
    return split_ctas > 0 && wanted < most ? wanted : most;
}

// Most rows of q, and of k, in the backward of a ragged batch: the TMA descriptors of the sm90
// class cannot address more (tensor_maps_bwd_sm90.h).
inline constexpr int64_t kMaxBwdTokens = int64_t(1) << 30;

// Arguments of one backward launch: those of the forward, whose O and LSE are read, with pack_shift
// 0, without a cache and with no more than one split, and the gradients. In a ragged batch rows of
// no sequence get zeros, plan_ptr is workspace of bwd_plan_words() words, and plan_capacity is set
// at launch.
struct Flash_bwd_params : Flash_fwd_params {
    const void *do_ptr;     // (b, seqlen_q, h, d)
    const float *dlse_ptr;  // (b, h, seqlen_q), gradient of the LSE; null: zeros
    void *dq_ptr;           // (b, seqlen_q, h, d); null: not wanted
    void *dk_ptr;           // (b, seqlen_k, h_k, d); null: neither dK nor dV is wanted
    void *dv_ptr;           // (b, seqlen_k, h_k, d); null as dk_ptr
    float *dsinks_ptr;      // (h); null: not wanted
    // Workspace, aligned to 16 bytes: (b, h, seqlen_q_rounded, 2), of each row LSE * log2(e), or
    // +inf where P is 0, and rowsum(dO * O) - dLSE.
    float *row_stats_ptr;
    // Workspace of BwdConfig::fused, aligned to 16 bytes: (b, h, seqlen_q_rounded, head_dim) with
    // the instantiated head dimension, float32 sums of dQ; rows are those of row_stats_ptr. The
    // rows of a step lie together, in the order of the accumulators that hold them. Where CTAs own
    // heads (sm90), only the heads in work have sums, at the beginning of the workspace.
    float *dq_accum_ptr;
    // Workspace of BwdConfig::fused: (b, h, seqlen_q_rounded / kSemaphoreRows) semaphores and
    // behind them the counter from which workers draw tiles. A semaphore counts the CTAs that have
    // added their part of dQ to its rows, where they do so in order (deterministic), or that have
    // stored the first part, where the first tile of keys stores it (sm90). Null: tiles are
    // assigned to workers by number and add to zeros in any order.
    uint32_t *dq_semaphore_ptr;
    // Workspace of Kernel_description::dkv_partial() floats, aligned to 16 bytes. With head_parts
    // dK and dV of each part of the heads, which a further kernel sums up. Without, where CTAs
    // share the tiles of the last wave (shared_tiles_sm90.h), each CTA's dV and dK of its part of a
    // tile, which the CTA that stores the tile adds to its own; the first words at dq_semaphore_ptr
    // then count what is stored. Null: each tile is computed by one CTA.
    float *dkv_partial_ptr;

    int64_t do_batch_stride, do_row_stride, do_head_stride;
    int64_t dlse_batch_stride, dlse_head_stride;
    int64_t dq_batch_stride, dq_row_stride, dq_head_stride;
    int64_t dk_batch_stride, dk_row_stride, dk_head_stride;
    int64_t dv_batch_stride, dv_row_stride, dv_head_stride;

    // seqlen_q rounded up to a multiple of kRowStatsMultiple; of a ragged batch row_stats_rows(),
    // and the row statistics are (h, seqlen_q_rounded, 2).
    int32_t seqlen_q_rounded;
    // 0 or 1: gradients are bitwise repeatable. With BwdConfig::fused this needs dq_semaphore_ptr.
    int32_t deterministic;
    // sm90, set at launch: the first tile of keys stores its part of dQ (first_sums_sm90.h).
    int32_t stores_first;
    // Number of equal parts into which the query heads of a key head are divided, a divisor of
    // h_h_k_ratio (head_parts.h); the more, the more CTAs share the tiles of a key head. 0: 1.
    int32_t head_parts;
    // sm80, set at launch: key heads whose tiles are scheduled together.
    int32_t heads_in_group;
};

// Describes the kernel of a shared object; returned by its one exported symbol, flash_kernel() or
// flash_bwd_kernel(). A backward has several kernels: numbers are the largest of theirs.
template <class Params>
struct Kernel_description {
    int32_t abi_version;  // == kAbiVersion
    int32_t params_size;  // == sizeof(Params)
    const char *name;     // the configuration's name, as config.py spells it
    int32_t threads;      // per CTA
    int32_t smem_bytes;   // dynamic shared memory per CTA, without a plan of its own (cta_plan.h)
    int32_t tile_m;       // query rows per CTA, from which the host derives the number of tiles
    int32_t dq_accum;     // floats at dq_accum_ptr per row of queries; 0: not used
    // Enqueues the kernel, or the kernels of a backward, on `stream` (a cudaStream_t) of the
    // current device; returns a cudaError_t.
    int32_t (*launch)(const Params *params, void *stream);
    // Enqueues the kernel that writes the plan of a ragged batch, which launch() then reads, and
    // that appends to a cache. Without plan_ptr, or where the attention kernel's CTAs plan for
    // themselves, it only appends. Null in a backward.
    int32_t (*plan)(const Params *params, void *stream);
    const char *(*error_string)(int32_t error);  // cudaGetErrorString
    // For a backward launch on the current device with these params: head_parts() returns a fast
    // Flash_bwd_params::head_parts, dkv_partial() how many floats at dkv_partial_ptr are used,
    // whatever that points to. Null: 1, and none.
    int32_t (*head_parts)(const Params *params);
    int64_t (*dkv_partial)(const Params *params);
};
using Flash_kernel = Kernel_description<Flash_fwd_params>;
using Flash_bwd_kernel = Kernel_description<Flash_bwd_params>;

}  // namespace flash

// The symbols that shared objects export; each object has one of them.
extern "C" __attribute__((visibility("default"))) const flash::Flash_kernel *flash_kernel();
extern "C" __attribute__((visibility("default"))) const flash::Flash_bwd_kernel *flash_bwd_kernel();
