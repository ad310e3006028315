// Small kernels: the tensor maps of ragged batches, whose addresses are computed modulo 2^64. And
// the priority in L2 that keys and values of a cache have.
#include <arch_sm90.h>
#include <cases.h>
#include <tensor_maps_bwd_sm90.h>

using namespace flash;
using cutlass::half_t;

namespace {

// Rows of two heads, each element (row, head, column) being 16 row + head + column % 8.
struct Ragged {
    static constexpr int kRows = 16, kColumns = 64, kTotal = 40, kHeads = 2;

    struct Traits {
        using Element = half_t;
        static constexpr struct {
            DType dtype;
        } kConfig{DType::fp16};
        static constexpr int kSmemRow = kColumns;
    };

    struct Box {
        int row, begin, length, head;
    };

    static __global__ void kernel(CUtensorMap const map, Box const box, int *wrong) {
        auto *const barrier = reinterpret_cast<sm90::Barrier *>(smem() + 8192);
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier, 1);
            sm90::fence_barrier_init();
            sm90::barrier_arrive_expect(barrier, kRows * kColumns * 2);
            sm90::tma_load(&map, barrier, sm90::CacheHint::evict_first, smem(), 0,
                           kRaggedRows - box.length + box.row, box.head, box.begin + box.length,
                           kRaggedZ);
        }
        __syncthreads();
        sm90::barrier_wait(barrier, 0);
        for (int i = threadIdx.x; i < kRows * kColumns; i += 32) {
            int const row = box.row + i / kColumns, at = i * 2;
            float const found =
                float(*reinterpret_cast<half_t *>(smem() + (at ^ (at >> 7 & 7) << 4)));
            float const expected = 16 * (box.begin + row) + box.head + i % 8;
            *wrong += !(found == (row < box.length ? expected : 0.f));
        }
    }

    static std::vector<half_t> data(int total) {
        std::vector<half_t> all(total * kHeads * kColumns);
        for (int i = 0; i < total * kHeads * kColumns; ++i) {
            int const row = i / kColumns / kHeads, head = i / kColumns % kHeads;
            all[i] = half_t(float(16 * row + head + i % 8));
        }
        return all;
    }

    static cudaError_t load(half_t const *data, int total, int row_stride, Box box) {
        alignas(64) CUtensorMap map;
        cudaError_t const error = make_ragged_map<Traits>(map, data, kColumns, total, kHeads,
                                                          row_stride, kColumns, kRows);
        expect(error == cudaSuccess, "encoding");
        int wrong = 0;
        cudaError_t const launched = launch(&kernel, 1, 32, 9216, map, box, &wrong);
        expect(wrong == 0, "values");
        return launched;
    }

    static cudaError_t inside() {
        auto all = data(kTotal);
        know("rows", all);
        // Whole boxes, a part of one, behind the first row; up to the tensor's end; one row.
        for (Box const box : {Box{0, 0, kTotal, 0}, Box{0, 3, 5, 1}, Box{16, 2, 20, 0},
                              Box{16, 10, 30, 1}, Box{0, kTotal - 1, 1, 0}}) {
            cudaError_t const error = load(all.data(), kTotal, kHeads * kColumns, box);
            if (error != cudaSuccess) return error;
        }
        return cudaSuccess;
    }
    static cudaError_t single() {  // which has no stride
        auto all = data(1);
        know("rows", all);
        return load(all.data(), 1, 0, {0, 0, 1, 1});
    }
    static cudaError_t behind() {
        auto all = data(kTotal);
        know("rows", all);
        return load(all.data(), kTotal, kHeads * kColumns, {0, kTotal - 3, 4, 0});
    }
    static cudaError_t before() {
        auto all = data(kTotal);
        know("rows", all);
        return load(all.data(), kTotal, kHeads * kColumns, {0, -1, 4, 0});
    }
    static cudaError_t next_tensor() {
        auto both = data(2 * kTotal);
        auto *const bytes = reinterpret_cast<std::byte const *>(both.data());
        size_t const half = both.size() * sizeof(half_t) / 2;
        sim::state().regions = {{"rows", bytes, half}, {"others", bytes + half, half}};
        return load(both.data(), kTotal, kHeads * kColumns, {0, kTotal, 4, 0});
    }
};

struct Hints {
    static constexpr FwdConfig kContiguous{.arch = 90,
                                           .dtype = DType::bf16,
                                           .head_dim = 128,
                                           .mask = MaskKind::none,
                                           .tile_m = 64,
                                           .tile_n = 64,
                                           .warps = 4,
                                           .stages = 2,
                                           .min_ctas = 1};
    static constexpr FwdConfig paged() {
        FwdConfig config = kContiguous;
        config.paged = true;
        return config;
    }
    static constexpr FwdConfig dense() {
        FwdConfig config = kContiguous;
        config.min_ctas = 3;
        config.head_dim = 64;
        return config;
    }

    // 8 key heads of 4 query heads each, which share tiles.
    template <FwdConfig C>
    static bool is_first(int b, int seqlen_q, int seqlen_k) {
        Flash_fwd_params params{};
        params.b = b;
        params.seqlen_q = seqlen_q;
        params.seqlen_k = seqlen_k;
        params.h = 32;
        params.h_k = 8;
        params.h_h_k_ratio = 4;
        params.pack_shift = 2;
        params.d = C.head_dim;
        return kv_hint<KernelTraitsSm90<C>>(params) == sm90::CacheHint::evict_first;
    }

    template <FwdConfig C>
    static void of_cache() {
        expect(is_first<C>(16, 1, 4095), "less than 256 MiB");
        expect(!is_first<C>(16, 1, 4096), "256 MiB");
        expect(!is_first<C>(1 << 20, 1, 1 << 20), "2^52 bytes");
        expect(is_first<C>(1, 16, 64), "all rows of a key head in a tile");
        expect(!is_first<C>(1, 17, 64), "keys that two tiles read");
    }
    static cudaError_t hints() {
        of_cache<kContiguous>();
        of_cache<paged()>();
        expect(!is_first<dense()>(1, 1, 64), "a kernel of dense calls");
        return cudaSuccess;
    }
};

Cases const cases{
    {"inside", &Ragged::inside}, {"single", &Ragged::single},           {"behind", &Ragged::behind},
    {"before", &Ragged::before}, {"next_tensor", &Ragged::next_tensor}, {"hints", &Hints::hints},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
