// Runs one forward problem with one kernel of a shared object: `runner kernels.so name problem
// result`. It is a separate process, so that sanitizers can be linked in and a crash of the kernel
// does not end the caller. flashcute/sim/run.py writes the problem file and reads the result file:
// 8-byte little-endian words, then raw tensors.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "../../flash_attn/src/flash.h"
#include "asan.h"
#include "simulator.h"

namespace {

constexpr size_t kMargin = 4096;  // bytes of poison on either side of each tensor
constexpr uint16_t kPoison = 0x7FBF;

class Reader {
  public:
    explicit Reader(char const *path) {
        std::ifstream file(path, std::ios::binary);
        if (!file) {
            throw std::runtime_error(std::string("cannot read ") + path);
        }
        bytes_.assign(std::istreambuf_iterator<char>(file), {});
    }
    void raw(void *destination, size_t count) {
        if (bytes_.size() - at_ < count) {
            throw std::runtime_error("the problem file is short");
        }
        std::memcpy(destination, bytes_.data() + at_, count);
        at_ += count;
    }
    template <class T>
    T word() {
        static_assert(sizeof(T) == 8);
        T value;
        raw(&value, sizeof value);
        return value;
    }
    int32_t small() { return static_cast<int32_t>(word<int64_t>()); }

  private:
    std::vector<char> bytes_;
    size_t at_ = 0;
};

class Writer {
  public:
    explicit Writer(char const *path) : file_(path, std::ios::binary) {}
    void raw(void const *source, size_t count) {
        file_.write(static_cast<char const *>(source), static_cast<std::streamsize>(count));
    }
    void word(uint64_t value) { raw(&value, sizeof value); }
    void text(std::string const &value) {
        word(value.size());
        raw(value.data(), value.size());
    }

  private:
    std::ofstream file_;
};

// A tensor's bytes between two margins that the kernel must not access.
class Guarded {
  public:
    Guarded(std::string name, size_t bytes) : name_(std::move(name)), bytes_(bytes) {
        // The second margin begins right after the last byte, whatever its alignment.
        storage_.resize((2 * kMargin + bytes) / sizeof(Chunk) + 1);
        auto *const all = reinterpret_cast<char *>(storage_.data());
        for (size_t i = 0; i < size(); i += 2) {
            std::memcpy(all + i, &kPoison, sizeof kPoison);
        }
        guard();
    }
    ~Guarded() { unguard(); }
    Guarded(Guarded const &) = delete;
    Guarded &operator=(Guarded const &) = delete;

    char *data() { return reinterpret_cast<char *>(storage_.data()) + kMargin; }
    size_t bytes() const { return bytes_; }
    sim::Region region() { return {name_, reinterpret_cast<std::byte const *>(data()), bytes_}; }
    // A report of the first byte of the margins that was overwritten, or empty.
    std::string damage() {
        unguard();
        auto const *const all = reinterpret_cast<char const *>(storage_.data());
        size_t const end = kMargin + bytes_;
        for (size_t i = 0; i < size(); i += 2) {
            bool const margin = i + 2 <= kMargin || i >= end + end % 2;
            if (margin && std::memcmp(all + i, &kPoison, sizeof kPoison) != 0) {
                return "the kernel wrote outside of " + name_ + ", at byte " +
                       std::to_string(int64_t(i) - int64_t(kMargin)) + " of " +
                       std::to_string(bytes_);
            }
        }
        return "";
    }

  private:
    void guard() {
        sim::asan::forbid(storage_.data(), kMargin);
        sim::asan::forbid(data() + bytes_, size() - kMargin - bytes_);
    }
    void unguard() { sim::asan::allow(storage_.data(), size()); }

    size_t size() const { return storage_.size() * sizeof(Chunk); }

    struct alignas(256) Chunk {  // as cudaMalloc aligns
        std::byte bytes[256];
    };
    std::string name_;
    size_t bytes_;
    std::vector<Chunk> storage_;
};

flash::Flash_kernel const &load(char const *path, char const *name) {
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error(dlerror());
    }
    auto *const entry = reinterpret_cast<flash::Flash_kernel const *(*)()>(dlsym(library, name));
    if (entry == nullptr) {
        throw std::runtime_error(dlerror());
    }
    flash::Flash_kernel const &kernel = *entry();
    if (kernel.abi_version != flash::kAbiVersion ||
        kernel.params_size != static_cast<int32_t>(sizeof(flash::Flash_fwd_params))) {
        throw std::runtime_error("the kernel was built against another flash.h");
    }
    return kernel;
}

sim::Settings read_settings(Reader &in) {
    sim::Settings settings;
    settings.seed = in.word<uint64_t>();
    settings.copy_mode = static_cast<sim::CopyMode>(in.small());
    settings.smem_limit = in.word<uint64_t>();
    settings.sms = in.small();
    settings.launches = in.small();
    settings.trace = in.small() != 0;
    settings.max_steps = in.word<uint64_t>();
    return settings;
}

flash::Flash_fwd_params read_params(Reader &in) {
    flash::Flash_fwd_params p{};
    for (int64_t *stride :
         {&p.q_batch_stride, &p.q_row_stride, &p.q_head_stride, &p.k_batch_stride, &p.k_row_stride,
          &p.k_head_stride, &p.v_batch_stride, &p.v_row_stride, &p.v_head_stride, &p.o_batch_stride,
          &p.o_row_stride, &p.o_head_stride}) {
        *stride = in.word<int64_t>();
    }
    for (int32_t *size : {&p.b, &p.seqlen_q, &p.seqlen_k, &p.h, &p.h_k, &p.d}) {
        *size = in.small();
    }
    p.h_h_k_ratio = p.h / p.h_k;
    auto const scale = in.word<double>();
    p.scale_softmax = static_cast<float>(scale);
    p.scale_softmax_log2 = static_cast<float>(scale * 1.4426950408889634);
    return p;
}

void run(char const *library, char const *name, char const *problem_path, char const *result_path) {
    Reader in(problem_path);
    sim::state().settings = read_settings(in);
    flash::Flash_fwd_params params = read_params(in);
    size_t sizes[4];
    for (size_t &size : sizes) {
        size = in.word<uint64_t>();
    }
    Guarded q("q", sizes[0]), k("k", sizes[1]), v("v", sizes[2]), o("out", sizes[3]);
    Guarded lse("softmax_lse", sizeof(float) * params.b * params.h * params.seqlen_q);
    for (Guarded *tensor : {&q, &k, &v, &o}) {
        in.raw(tensor->data(), tensor->bytes());
    }
    for (Guarded *tensor : {&q, &k, &v, &o, &lse}) {
        sim::state().regions.push_back(tensor->region());
    }
    params.q_ptr = q.data();
    params.k_ptr = k.data();
    params.v_ptr = v.data();
    params.o_ptr = o.data();
    params.softmax_lse_ptr = reinterpret_cast<float *>(lse.data());

    std::vector<char> const untouched(o.data(), o.data() + o.bytes());
    flash::Flash_kernel const &kernel = load(library, name);
    auto const started = std::chrono::steady_clock::now();
    int code = kernel.launch(&params, nullptr);
    for (int i = 1; i < sim::state().settings.launches && code == 0; ++i) {
        // So that an earlier launch's results cannot hide elements that this one does not write.
        std::memcpy(o.data(), untouched.data(), untouched.size());
        std::memset(lse.data(), 0xff, lse.bytes());
        code = kernel.launch(&params, nullptr);
    }
    std::chrono::duration<double, std::nano> const elapsed =
        std::chrono::steady_clock::now() - started;
    std::string damage;
    for (Guarded *tensor : {&q, &k, &v, &o, &lse}) {
        if (damage.empty()) {
            damage = tensor->damage();
        }
    }

    Writer out(result_path);
    out.word(static_cast<uint64_t>(code));
    out.word(static_cast<uint64_t>(elapsed.count()));
    out.text(code == 0 ? "" : sim::state().error);
    out.text(damage);
    out.word(std::size(sim::kCounterNames));
    for (auto const &[name, value] : sim::kCounterNames) {
        out.text(name);
        out.word(sim::state().counters.*value);
    }
    out.word(sim::state().trace.size());
    for (sim::TraceEntry const &entry : sim::state().trace) {
        out.word(entry.block);
        out.word(entry.region);
        out.word(entry.offset);
    }
    // Not after a failed launch: this thread is not ordered after its stores.
    if (code == 0) {
        out.raw(o.data(), o.bytes());
        out.raw(lse.data(), lse.bytes());
    }
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: %s kernels.so name problem result\n", argv[0]);
        return 2;
    }
    try {
        run(argv[1], argv[2], argv[3], argv[4]);
    } catch (std::exception const &error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 2;
    }
    return 0;
}
