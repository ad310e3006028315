// Replaces CUTLASS's <cute/arch/cluster_sm90.hpp>: a block's place in its cluster, barrier.cluster,
// and addresses in the shared memory of the other blocks.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/numeric_types.hpp>

namespace cute {

inline void cluster_arrive_relaxed() { sim::cluster_arrive(true); }
inline void cluster_arrive() { sim::cluster_arrive(false); }
inline void cluster_wait() { sim::cluster_wait(); }
inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

inline dim3 cluster_shape() {
    auto const shape = sim::cluster_shape();
    return {shape.x, shape.y, shape.z};
}
inline dim3 cluster_grid_dims() {
    auto const shape = sim::cluster_shape();
    return {gridDim.x / shape.x, gridDim.y / shape.y, gridDim.z / shape.z};
}
inline dim3 cluster_id_in_grid() {
    auto const shape = sim::cluster_shape();
    return {blockIdx.x / shape.x, blockIdx.y / shape.y, blockIdx.z / shape.z};
}
inline dim3 block_id_in_cluster() {
    auto const shape = sim::cluster_shape();
    return {blockIdx.x % shape.x, blockIdx.y % shape.y, blockIdx.z % shape.z};
}
inline uint32_t block_rank_in_cluster() {
    auto const shape = sim::cluster_shape();
    dim3 const id = block_id_in_cluster();
    return id.x + shape.x * (id.y + shape.y * id.z);
}

inline uint32_t set_block_rank(uint32_t address, uint32_t rank) {
    return sim::map_smem_address(address, rank);
}
inline void store_shared_remote(uint32_t value, uint32_t address, uint32_t barrier, uint32_t rank) {
    sim::store_async(value, address, barrier, rank);
}

inline uint32_t elect_one_sync() { return sim::elect_one(); }

struct ElectOneLaneIdReturnType {
    uint32_t is_leader;
    uint32_t leader_lane_id;
};
inline ElectOneLaneIdReturnType elect_one_leader_sync() {
    sim::not_covered("elect.sync with the lane's number");
}

}  // namespace cute
