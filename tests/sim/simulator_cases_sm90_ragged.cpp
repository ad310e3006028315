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

    // Rows from `row` on of a sequence of `length` rows, in a tensor of `total`.
    struct Box {
        int row, begin, length, head, total = kTotal;
    };

    static __global__ void kernel(CUtensorMap const map, Box const box, int *wrong) {
        auto *const barrier = reinterpret_cast<sm90::Barrier *>(smem() + 8192);
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier, 1);
            sm90::fence_barrier_init();
            sm90::barrier_arrive_expect(barrier, kRows * kColumns * 2);
            RaggedRows const rows =
                ragged_rows({1, 0, 0}, kRows, box.begin + box.row, box.length - box.row, 0, 0);
            sm90::tma_load(&map, barrier, sm90::CacheHint::evict_first, smem(), 0, rows.x, box.head,
                           rows.y, kRaggedZ);
        }
        __syncthreads();
        sm90::barrier_wait(barrier, 0);
        for (int i = threadIdx.x; i < kRows * kColumns; i += 32) {
            int const row = box.row + i / kColumns, at = i * 2;
            float const found =
                float(*reinterpret_cast<half_t *>(smem() + (at ^ (at >> 7 & 7) << 4)));
            float const expected = 16 * (box.begin + row) + box.head + i % 8;
            bool const exists = row < box.length && box.begin + box.length <= box.total;
            *wrong += !(found == (exists ? expected : 0.f));
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

    static cudaError_t load(half_t const *data, int row_stride, Box box) {
        alignas(64) CUtensorMap map;
        cudaError_t const error = make_ragged_map<Traits>(map, data, kColumns, box.total, kHeads,
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
                              Box{16, 10, 30, 1}, Box{0, kTotal - 1, 1, 0},
                              // No row of the sequence; a sequence that the tensor does not hold.
                              Box{16, 2, 10, 0}, Box{0, kTotal - 3, 4, 0}}) {
            cudaError_t const error = load(all.data(), kHeads * kColumns, box);
            if (error != cudaSuccess) return error;
        }
        return cudaSuccess;
    }
    static cudaError_t single() {  // which has no stride
        auto all = data(1);
        know("rows", all);
        return load(all.data(), 0, {0, 0, 1, 1, 1});
    }
    static cudaError_t behind() {  // the tensor is said to be longer than it is
        auto all = data(kTotal);
        know("rows", all);
        return load(all.data(), kHeads * kColumns, {0, kTotal - 3, 4, 0, kTotal + 1});
    }
    static cudaError_t before() {
        auto all = data(kTotal);
        know("rows", all);
        return load(all.data(), kHeads * kColumns, {0, -1, 4, 0});
    }
    static cudaError_t nowhere() {  // no row of the box is read, but there is no tensor
        auto all = data(kTotal);
        know("others", all);
        auto const elsewhere = data(kTotal);
        return load(elsewhere.data(), kHeads * kColumns, {16, 2, 10, 0});
    }
    static cudaError_t next_tensor() {
        auto both = data(2 * kTotal);
        auto *const bytes = reinterpret_cast<std::byte const *>(both.data());
        size_t const half = both.size() * sizeof(half_t) / 2;
        sim::state().regions = {{"rows", bytes, half}, {"others", bytes + half, half}};
        return load(both.data(), kHeads * kColumns, {0, kTotal, 4, 0, 2 * kTotal});
    }

    // Where x, y and z lead, in elements from the tensor's begin.
    static int64_t place(RaggedAxes const &axes, RaggedRows rows) {
        uint64_t const back = uint64_t(kRaggedZ) * uint64_t(axes.z_stride) * 2;  // modulo 2^64
        return rows.x * axes.x_stride + rows.y * axes.y_stride + static_cast<int64_t>(back) / 2;
    }
    static void lead_to(int64_t rows, int64_t row, int64_t heads, int64_t head, int64_t entries,
                        int64_t entry, int64_t y_stride) {
        RaggedAxes const axes(2, {rows, row}, {heads, head}, {entries, entry});
        expect(axes.y_stride == y_stride, "step of y");
        auto const last = [](int64_t size) { return static_cast<int>(size) - 1; };
        RaggedRows const begin = ragged_rows(axes.steps, 64, 0, 64, 0, 0);
        RaggedRows const end =
            ragged_rows(axes.steps, 64, last(rows), 1, last(heads), last(entries));
        expect(place(axes, begin) == 0, "first row");
        expect(place(axes, end) == last(rows) * row + last(heads) * head + last(entries) * entry,
               "last row");
        expect(end.y == axes.y_size - 1 && end.x == kRaggedRows - 1, "the tensor's end");
        expect(ragged_rows(axes.steps, 64, 5, 0, 0, 0).x == kRaggedRows, "no rows");
        expect(ragged_rows(axes.steps, 64, 5, -9, 0, 0).x > kRaggedRows, "fewer than no rows");
    }
    static cudaError_t axes() {
        lead_to(100, 512, 4, 128, 3, 51200, 128);                        // (b, s, h, d), heads in y
        lead_to(100, 512, 1, 128, 3, 51200, 512);                        // and one head
        lead_to(100, 1536, 1, 0, 3, 512, 512);                           // (s, b, h, d)
        lead_to(100, 128, 1, 0, 3, 51200, 128);                          // (b, h, s, d)
        lead_to(100, 520, 1, 0, 3, 52016, 8);                            // padded
        lead_to(1 << 20, 1 << 15, 1, 0, 64, int64_t(1) << 35, 1 << 15);  // 2^41 elements
        RaggedAxes const far(2, {1 << 20, 8}, {1, 0}, {1 << 12, 8 << 20});
        expect(far.y_size > kRaggedSize, "too many steps");
        RaggedAxes const one(2, {1, 0}, {1, 0}, {5, 0});  // strides without a meaning
        expect(one.x_stride == 8 && one.y_stride == 8 && one.y_size == 2, "one row");
        return cudaSuccess;
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
    {"inside", &Ragged::inside},   {"single", &Ragged::single},
    {"behind", &Ragged::behind},   {"before", &Ragged::before},
    {"nowhere", &Ragged::nowhere}, {"next_tensor", &Ragged::next_tensor},
    {"axes", &Ragged::axes},       {"hints", &Hints::hints},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
