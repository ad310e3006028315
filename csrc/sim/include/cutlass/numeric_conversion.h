// Wraps CUTLASS's <cutlass/numeric_conversion.h> and replaces the conversion of fp32 arrays to fp16
// and bf16, for which the GPU has an instruction on pairs. CUTLASS's host path stores each half
// through a 32-bit reference and so reads two bytes past it, an error for AddressSanitizer. In its
// conversion to fp16, (1 << 31) - 1 overflows for magnitudes in [2^-45, 2^-44), an error for
// UndefinedBehaviorSanitizer.
#pragma once

#define NumericArrayConverter CutlassNumericArrayConverter
#include_next <cutlass/numeric_conversion.h>
#undef NumericArrayConverter

#include <cmath>
#include <cstring>
#include <type_traits>

namespace cutlass {

template <class To, int N>
struct SimArrayConverter {
    using result_type = Array<To, N>;
    using source_type = Array<float, N>;
    static constexpr FloatRoundStyle round_style = FloatRoundStyle::round_to_nearest;

    static result_type convert(source_type const &source) {
        NumericConverter<To, float> const round;
        To rounded[N];
        for (int i = 0; i < N; ++i) {
            float x = source[i];
            if (std::is_same_v<To, half_t> && std::abs(x) < 0x1p-26f) x = std::copysign(0.f, x);
            rounded[i] = round(x);
        }
        result_type result;
        std::memcpy(&result, rounded, sizeof rounded);
        return result;
    }
    result_type operator()(source_type const &source) const { return convert(source); }
};

// CUTLASS's own, except for the two specialisations below.
template <class To, class From, int N, FloatRoundStyle Round = FloatRoundStyle::round_to_nearest,
          class Transform = transform::thread::UnaryTransform::Identity>
struct NumericArrayConverter : CutlassNumericArrayConverter<To, From, N, Round, Transform> {};
template <int N>
struct NumericArrayConverter<half_t, float, N, FloatRoundStyle::round_to_nearest,
                             transform::thread::UnaryTransform::Identity>
    : SimArrayConverter<half_t, N> {};
template <int N>
struct NumericArrayConverter<bfloat16_t, float, N, FloatRoundStyle::round_to_nearest,
                             transform::thread::UnaryTransform::Identity>
    : SimArrayConverter<bfloat16_t, N> {};

}  // namespace cutlass
