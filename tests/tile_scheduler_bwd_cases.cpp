// The functions of the backward's tile scheduler (sm90 class) for ctypes.
#include <cstdint>
#include <cute/numeric/math.hpp>
#include <vector>

static struct {
    unsigned x;
} gridDim, blockIdx;
static unsigned atomicExch(unsigned *, unsigned) { return 0; }
static unsigned atomicAdd(unsigned *, unsigned) { return 0; }

#include "shared_tiles_sm90.h"

using flash::Flash_bwd_params;
using flash::WorkTile;

// kCausal, kFull, kNarrow, kWindow and kWideWindow, configurations, precede this text.
template <flash::BwdConfig C, bool kStores>
struct Traits {
    static constexpr flash::BwdConfig kConfig = C;
    static constexpr flash::MaskKind kMask = kConfig.mask;
    static constexpr bool kVarlen = false, kMayOwnHeads = true, kStoresFirst = kStores;
    static constexpr bool kWide = false;
    static constexpr bool kMayAscend = kMask == flash::MaskKind::causal;
    static constexpr bool kSteals = kMask != flash::MaskKind::none || kStores;
    static constexpr bool kMayShare = kMask == flash::MaskKind::none && !kStores;
    static constexpr int kTileM = kConfig.dkv.step, kTileN = kConfig.dkv.rows;
    static constexpr int kCluster = 1, kTileKeys = kTileN, kHeadDim = kConfig.head_dim;
};
template <flash::BwdConfig C>
struct RaggedTraits : Traits<C, true> {
    static constexpr bool kVarlen = true;
};
struct ClusterTraits : Traits<kFull, false> {
    static constexpr int kCluster = 2, kTileKeys = kCluster * kTileN;
};
using Scheduler = flash::TileSchedulerBwdSm90<Traits<kCausal, false>>;
template <flash::BwdConfig C>
using Storing = flash::TileSchedulerBwdSm90<Traits<C, true>>;

// Tiles of CTAs, or of clusters of two.
template <class Call>
auto with_shared(bool clusters, Call const &call) {
    return clusters ? call(flash::SharedTilesSm90<ClusterTraits>{})
                    : call(flash::SharedTilesSm90<Traits<kFull, false>>{});
}

extern "C" {

int64_t num_tiles(Flash_bwd_params const *params) { return Scheduler::num_tiles(*params); }

int heads_in_group(Flash_bwd_params const *params, int workers) {
    return Scheduler::heads_in_group(*params, workers);
}

bool may_store_first(Flash_bwd_params const *params, int sms, bool causal) {
    return causal ? Storing<kCausal>::may_store_first(*params, sms)
                  : Storing<kFull>::may_store_first(*params, sms);
}

// Likewise under a window, in launches of any size; wide: above d = 128.
bool stores_under_window(Flash_bwd_params const *params, bool wide) {
    return wide ? flash::FirstSumsSm90<kWideWindow>::pays(*params, params->seqlen_q,
                                                          params->seqlen_k)
                : flash::FirstSumsSm90<kWindow>::pays(*params, params->seqlen_q, params->seqlen_k);
}

int heads_in_window_group(Flash_bwd_params const *params, int workers) {
    return Storing<kWindow>::heads_in_group(*params, workers);
}

// Where first tiles store dQ.
int heads_in_storing_group(Flash_bwd_params const *params, int workers, bool causal) {
    return causal ? Storing<kCausal>::heads_in_group(*params, workers)
                  : Storing<kFull>::heads_in_group(*params, workers);
}

bool owns_heads(Flash_bwd_params const *params, int sms, bool or_stores, int head_dim) {
    using Narrow = flash::TileSchedulerBwdSm90<Traits<kNarrow, false>>;
    return head_dim > 32 ? Scheduler::owns_heads(*params, sms, or_stores)
                         : Narrow::owns_heads(*params, sms, or_stores);
}

// Key heads whose tiles come together in a ragged batch whose plan has so many tiles of each,
// negated where its sequences come one after the other. mask: 0 none, 1 causal, 2 local.
int heads_in_ragged_group(Flash_bwd_params const *of_call, int mask, int sms, int count) {
    auto const group = [&](auto scheduler) {
        using Ragged = decltype(scheduler);
        flash::WorkPlan plan{.count = count};
        Flash_bwd_params params = *of_call;
        params.plan_ptr = &plan;
        params.plan_in_order = Ragged::has_sequences_in_order(params);
        gridDim.x = sms;
        int const launched = Ragged::heads_in_group(params, sms);
        flash::TileQueue const queue = Ragged::queue(params, {0, launched, nullptr, nullptr});
        int const sign = params.plan_in_order != 0 ? -1 : 1;
        return queue.tiles == count * params.h_k ? sign * queue.group : 0;
    };
    return mask == 0   ? group(flash::TileSchedulerBwdSm90<RaggedTraits<kFull>>{})
           : mask == 1 ? group(flash::TileSchedulerBwdSm90<RaggedTraits<kCausal>>{})
                       : group(flash::TileSchedulerBwdSm90<RaggedTraits<kWindow>>{});
}

int first_owned(Flash_bwd_params const *params, int worker) {
    return Scheduler::first_owned(*params, worker);
}

int next_owned(Flash_bwd_params const *params, int index, int workers) {
    return Scheduler::next_owned(*params, index, workers);
}

int shared_tiles(Flash_bwd_params const *params, int workers, bool clusters) {
    return with_shared(clusters, [&](auto of) { return decltype(of)::count(*params, workers); });
}

int64_t most_steps(Flash_bwd_params const *params, int workers, bool clusters) {
    return with_shared(clusters,
                       [&](auto of) { return decltype(of)::most_steps(*params, workers); });
}

// Three pieces; returns how many tiles there are.
int get_pieces(Flash_bwd_params const *params, int workers, bool clusters, int rest, int worker,
               flash::SharedPiece *pieces) {
    return with_shared(clusters, [&](auto of) {
        using Shared = decltype(of);
        int const tiles = static_cast<int>(Shared::Scheduler::num_tiles(*params));
        Shared::get_pieces(*params, {tiles, 1, nullptr, nullptr}, workers, rest, worker, pieces);
        return tiles;
    });
}

// Of a window: the blocks of queries that tile n of keys visits, [*begin, *end), and the first tile
// that visits block m.
using Window = flash::BlockInfo<flash::MaskKind::local, 64, 128>;
void visited_blocks(Flash_bwd_params const *params, int n, int *begin, int *end) {
    WorkTile const tile{.m_block = n, .seqlen_q = params->seqlen_q, .seqlen_k = params->seqlen_k};
    flash::BlockRange const blocks = Window::query_block_range(*params, tile, n);
    *begin = blocks.begin;
    *end = blocks.begin + blocks.count;
}
int first_visitor(Flash_bwd_params const *params, int m) {
    WorkTile const tile{.seqlen_q = params->seqlen_q, .seqlen_k = params->seqlen_k};
    return Window::first_visitor(*params, tile, m);
}

// Writes the query head and the block of each step of tile `index` of one group, each of which has
// the one before it as its before(), and returns how many there are; -1: one has not. window: as in
// MaskKind::local.
int steps(Flash_bwd_params const *params, bool window, int index, int *heads, int *blocks) {
    using Of = flash::TileSchedulerBwdSm90<Traits<kWindow, false>>;
    int const ratio = params->h_h_k_ratio;
    auto const walk = [&](auto scheduler) {
        using S = decltype(scheduler);
        int const tiles = static_cast<int>(S::num_tiles(*params));
        WorkTile const tile = S::get_tile(*params, {tiles, 1, nullptr, nullptr}, index);
        auto step = S::first_step(*params, tile);
        int const count = tile.blocks.count * ratio;
        for (int i = 0; i < count; ++i) {
            heads[i] = step.head;
            blocks[i] = tile.blocks.begin + step.visit;
            auto const now = step;
            step.advance(ratio);
            auto const back = step.before(ratio);
            if (i + 1 < count && (back.head != now.head || back.visit != now.visit)) return -1;
        }
        return count;
    };
    return window ? walk(Of{}) : walk(Scheduler{});
}

WorkTile get_tile(Flash_bwd_params const *params, int tiles, int group, int index) {
    return Scheduler::get_tile(*params, {tiles, group, nullptr, nullptr}, index);
}

// Of a ragged batch with `count` tiles of each key head, which m_block numbers.
WorkTile get_ragged_tile(Flash_bwd_params const *of_call, int count, int group, int index) {
    std::vector<flash::PlanTile> memory(count + 1);
    auto &plan = reinterpret_cast<flash::WorkPlan &>(memory[0]);
    plan.count = count;
    for (int i = 0; i < count; ++i) {
        plan.tiles[i] = {.m_block = i, .seqlen_q = 1, .seqlen_k = 1};
    }
    Flash_bwd_params params = *of_call;
    params.plan_ptr = &plan;
    using Ragged = flash::TileSchedulerBwdSm90<RaggedTraits<kCausal>>;
    return Ragged::get_tile(params, {count * params.h_k, group, nullptr, nullptr}, index);
}
}
