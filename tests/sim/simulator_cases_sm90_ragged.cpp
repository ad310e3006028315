// Small kernels: the tensor maps of ragged batches, whose addresses are computed modulo 2^64.
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

Cases const cases{
    {"inside", &Ragged::inside}, {"single", &Ragged::single},           {"behind", &Ragged::behind},
    {"before", &Ragged::before}, {"next_tensor", &Ragged::next_tensor},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
