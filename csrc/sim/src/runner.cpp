// Runs one problem through one kernel's shared object: `runner kernels.so name problem result`. It
// is a separate process, so that sanitizers can be linked in and a broken kernel harms nobody else.
// flashcute/sim/run.py packs the problem file and unpacks the result file. They consist of 8-byte
// little-endian words and of byte strings, each after its length. Of the kernel's parameters this
// program gets only the bytes and the offsets of the pointers in them.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
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
    explicit Reader(char const *path) : file_(path, std::ios::binary) {
        if (!file_) {
            throw std::runtime_error(std::string("cannot read ") + path);
        }
    }
    template <class T>
    T word() {
        static_assert(sizeof(T) == 8);
        T value;
        raw(reinterpret_cast<char *>(&value), sizeof value);
        return value;
    }
    int32_t small() { return static_cast<int32_t>(word<int64_t>()); }
    std::string bytes() {
        std::string value(word<uint64_t>(), '\0');
        raw(value.data(), value.size());
        return value;
    }

  private:
    void raw(char *destination, size_t count) {
        if (!file_.read(destination, static_cast<std::streamsize>(count))) {
            throw std::runtime_error("the problem file is short");
        }
    }

    std::ifstream file_;
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
    // Returns a message about the first byte of the margins that was overwritten, or an empty
    // string.
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

// A tensor that a pointer of the kernel's parameters points to.
struct Buffer {
    std::string name;     // in messages
    uint64_t pointer;     // its byte offset in the parameters
    bool output;          // whether the kernel writes it
    std::string initial;  // contents before the first launch; of an output, before each launch
    Guarded memory;

    explicit Buffer(Reader &in)
        : name(in.bytes()),
          pointer(in.word<uint64_t>()),
          output(in.small() != 0),
          initial(in.bytes()),
          memory(name, initial.size()) {
        reset();
    }
    void reset() { std::copy(initial.begin(), initial.end(), memory.data()); }
};

// Loads the description of kernel `name`. That of a backward differs only in the type of the
// parameters, so the type of a forward's serves for both.
flash::Flash_kernel const &load(char const *path, char const *name, size_t params_size) {
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
        static_cast<size_t>(kernel.params_size) != params_size) {
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
    settings.plan = in.small() != 0;
    settings.min_ctas = in.small();
    return settings;
}

void run(char const *library, char const *name, char const *problem_path, char const *result_path) {
    Reader in(problem_path);
    sim::state().settings = read_settings(in);
    std::string params = in.bytes();
    std::deque<Buffer> buffers;
    for (auto left = in.word<uint64_t>(); left > 0; --left) {
        Buffer &buffer = buffers.emplace_back(in);
        char *const address = buffer.memory.data();
        std::memcpy(params.data() + buffer.pointer, &address, sizeof address);
        sim::state().regions.push_back(buffer.memory.region());
    }

    flash::Flash_kernel const &kernel = load(library, name, params.size());
    auto const *const arguments = reinterpret_cast<flash::Flash_fwd_params const *>(params.data());
    // Without settings.plan there is no plan, or a run for another layer has made it. Only this
    // layer's new keys are left to append, which is all that Flash_kernel::plan does without
    // plan_ptr.
    auto const prepare = [&] {
        if (sim::state().settings.plan) {
            return kernel.plan(arguments, nullptr);
        }
        if (arguments->k_new_ptr == nullptr) {
            return 0;
        }
        flash::Flash_fwd_params append = *arguments;
        append.plan_ptr = nullptr;
        return kernel.plan(&append, nullptr);
    };
    auto const launch = [&] {
        int const code = prepare();
        return code == 0 ? kernel.launch(arguments, nullptr) : code;
    };
    auto const started = std::chrono::steady_clock::now();
    int code = launch();
    for (int i = 1; i < sim::state().settings.launches && code == 0; ++i) {
        // Every kernel adds to these, so that a launch of several kernels reports their sum.
        sim::state().counters = {};
        sim::state().trace.clear();
        // Results of an earlier launch must not hide that this one does not compute them.
        for (Buffer &buffer : buffers) {
            if (buffer.output) {
                buffer.reset();
            }
        }
        code = launch();
    }
    std::chrono::duration<double, std::nano> const elapsed =
        std::chrono::steady_clock::now() - started;
    std::string damage;
    for (Buffer &buffer : buffers) {
        if (damage.empty()) {
            damage = buffer.memory.damage();
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
    // A failed launch leaves no useful outputs, and this thread is not ordered after its stores.
    for (Buffer &buffer : buffers) {
        if (code == 0 && buffer.output) {
            out.raw(buffer.memory.data(), buffer.memory.bytes());
        }
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
