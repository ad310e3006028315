// The table of which kernel computes which problem: C++ asks, Python decides, C++ remembers. Part
// of the binding, but without torch.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "flash.h"

#ifndef FLASHCUTE_NAMESPACE
#define FLASHCUTE_NAMESPACE flashcute  // flashcute.config.NAMESPACE
#endif
#define FLASHCUTE_STRING_OF(x) #x
#define FLASHCUTE_STRING(x) FLASHCUTE_STRING_OF(x)  // the value of macro x as a string

namespace flash {

// What the choice of a kernel for a call depends on; flashcute/ops.py mirrors the layout.
struct Problem {
    int32_t device;  // CUDA device index
    DType dtype;
    MaskKind mask;
    int32_t b, seqlen_q, seqlen_k, h, h_k, d;
    int32_t window_left, window_right;  // MaskKind::local; else 0
    int32_t softcap, alibi, dropout;    // 1: there is one
    int32_t cache;                      // 1: keys and values are a cache
    int32_t page_size;                  // of a cache in pages; else 0
    int32_t num_splits;                 // of a ragged batch; 0: by shape, -1: not split
    // 0: forward; 1: backward of all gradients; 2: backward of one side, queries or keys and
    // values. The results of either backward repeat bitwise if asked to.
    int32_t backward;
    int32_t varlen;  // 1: ragged batch

    bool operator==(const Problem &) const = default;
};

// How a problem is computed; flashcute/ops.py mirrors the layout.
struct Choice {
    const void *kernel;                            // Flash_kernel; of a backward Flash_bwd_kernel
    int32_t pack_heads;                            // 1: query heads of a key head share tiles
    int32_t num_splits, split_blocks, split_ctas;  // as in Flash_fwd_params
};

// Fills in the choice for a problem and returns 0, or writes a message of at most `error_size`
// bytes, terminating zero included, into `error` and returns another number.
using Resolver = int32_t (*)(const Problem *problem, Choice *choice, char *error,
                             int32_t error_size);

inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
// Kernels round sequence lengths up to whole tiles in 32-bit arithmetic.
inline constexpr int64_t kMaxSeqlen = kMaxInt32 - 1023;
// Bounds the table for workloads in which every call has another sequence length.
inline constexpr size_t kMaxRemembered = 4096;

inline std::string to_text(const char *text) { return text; }
template <typename Number>
std::string to_text(Number number) {
    return std::to_string(number);
}

// An error that the binding finds; named() puts the operator's name before its message.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A failure not caused by the arguments: there is no kernel, it did not start, or there is no
// memory.
struct KernelFailure : Failure {
    using Failure::Failure;
};

// Throws an error whose message joins the arguments. Without iostreams: their number formatting
// crashes where torch carries another libstdc++ than the one this file was compiled against (seen
// with g++ 13 and torch 2.11).
template <typename Error = Failure, typename... Args>
[[noreturn]] void fail(const Args &...args) {
    throw Error((to_text(args) + ...));
}

// Returns f(); if that throws a Failure, puts the operator's name before the message.
template <typename Function>
auto named(const char *op, Function f) {
    try {
        return f();
    } catch (const Failure &failure) {
        const std::string prefix = FLASHCUTE_STRING(FLASHCUTE_NAMESPACE) "::";
        throw std::runtime_error(prefix + op + ": " + failure.what());
    }
}

// Rounds a length up. Choices are remembered by rounded lengths, so that a call with another length
// rarely enters Python: exact up to 16, then in steps of 16, from 256 on in 16 steps an octave.
// rounded_length() of flashcute/problem.py is the same.
inline int32_t rounded_length(int32_t length) {
    if (length <= 16) {
        return length;
    }
    const int64_t step =
        std::max<int64_t>(16, std::bit_floor(static_cast<uint32_t>(length - 1)) / 16);
    return static_cast<int32_t>(std::min((length + step - 1) / step * step, kMaxSeqlen));
}

// Returns the length for which the kernel of a ragged batch is chosen, between the mean and the
// longest: of what the host knows, the one whose tiles suit most of the work. typical_length() of
// flashcute/problem.py is the same.
inline int32_t typical_length(int64_t total, int64_t b, int64_t longest) {
    const double most = static_cast<double>(std::min(longest, total));
    const double of_each =
        static_cast<double>(total) / static_cast<double>(std::max(b, int64_t(1)));
    const double mean = std::min(of_each, most);
    // At least 2 if the longest has 2: a single row needs no mask, two rows do.
    const int32_t least = most >= 2 ? 2 : 1;
    return std::max(static_cast<int32_t>(std::sqrt(mean * most)), least);
}

inline Problem rounded(Problem problem) {
    problem.window_left = rounded_length(std::min(problem.window_left, problem.seqlen_k));
    problem.window_right = rounded_length(std::min(problem.window_right, problem.seqlen_q));
    problem.seqlen_q = rounded_length(problem.seqlen_q);
    problem.seqlen_k = rounded_length(problem.seqlen_k);
    return problem;
}

struct ProblemHash {
    size_t operator()(const Problem &problem) const {
        // FNV-1a over the words; the high bits are folded back as buckets use the low ones.
        static_assert(sizeof(Problem) == 19 * sizeof(uint32_t), "no padding may enter the hash");
        uint32_t words[19];
        std::memcpy(words, &problem, sizeof(words));
        uint64_t hash = 0xcbf29ce484222325;
        for (const uint32_t word : words) {
            hash = (hash ^ word) * 0x100000001b3;
        }
        return hash ^ (hash >> 32);
    }
};

class KernelTable {
  public:
    void set_resolver(Resolver resolver) {
        const std::lock_guard lock(mutex_);
        resolver_ = resolver;
        if (resolver != nullptr) {
            choices_.clear();
        }
    }

    Choice find(const Problem &problem) {
        Resolver resolver = nullptr;
        {
            const std::lock_guard lock(mutex_);
            const auto found = choices_.find(problem);
            if (found != choices_.end()) {
                return found->second;
            }
            resolver = resolver_;
        }
        // Unlocked: the resolver takes the interpreter lock and may spend minutes in a compiler.
        const Choice choice = resolve(resolver, problem);
        const std::lock_guard lock(mutex_);
        if (choices_.size() >= kMaxRemembered) {
            choices_.clear();
        }
        choices_.insert_or_assign(problem, choice);
        return choice;
    }

  private:
    static Choice resolve(Resolver resolver, const Problem &problem) {
        if (resolver == nullptr) {
            fail<KernelFailure>(
                "expected a kernel resolver, got none; import flashcute and call its functions "
                "before the interpreter ends");
        }
        char error[4096] = "";
        Choice choice{};
        if (resolver(&problem, &choice, error, sizeof(error)) != 0) {
            fail<KernelFailure>(error);
        }
        if (problem.backward != 0) {
            check(*static_cast<const Flash_bwd_kernel *>(choice.kernel));
        } else {
            check(*static_cast<const Flash_kernel *>(choice.kernel));
        }
        return choice;
    }

    template <typename Params>
    static void check(const Kernel_description<Params> &kernel) {
        if (kernel.abi_version != kAbiVersion ||
            kernel.params_size != static_cast<int32_t>(sizeof(Params))) {
            fail<KernelFailure>("expected a kernel of ABI version ", kAbiVersion, " with ",
                                sizeof(Params), " bytes of parameters, got version ",
                                kernel.abi_version, " with ", kernel.params_size,
                                " bytes; remove the stale kernel from the cache");
        }
    }

    std::mutex mutex_;
    Resolver resolver_ = nullptr;
    std::unordered_map<Problem, Choice, ProblemHash> choices_;
};

inline KernelTable &kernel_table() {
    static KernelTable table;
    return table;
}

}  // namespace flash
