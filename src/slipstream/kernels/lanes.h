// What all kernels share: vectors of the processor's width, number types, panels, and asking for weights early.
//
// A product that is added is rounded once where the code says `fused` (or `fuse`), and twice everywhere else: compilers,
// which would choose differently for every loop, are not allowed to (-ffp-contract=off). So the same sums have the same bits
// in all paths of a kernel, whichever compiler built it.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "products.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As many lanes as a register has: GCC keeps longer vectors in memory.
#if defined(__AVX512F__)
constexpr int LANES = 16;  // of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8;  // of 16 registers
#else
constexpr int LANES = 4;  // of 32 registers (ARM), or 16
#endif
constexpr int PANEL = 32;  // features; cpu.py has the same number
constexpr int PARTS = PANEL / LANES;
constexpr int64_t SHARE = 1 << 15;  // multiplications that are worth a thread
constexpr int64_t LINE = 64;         // bytes of the cache
constexpr int64_t AHEAD = 8192;      // bytes of weights asked for before their turn, for the processor guesses late
constexpr int64_t COLLIDING = 2048;  // bytes from row to row (or multiples) that share two places in the first cache
constexpr int64_t FEW = 8;           // rows that these places hold

// Where weights go that were asked for: AMD's processors are fastest if these pass the second cache by (0); Intel's, which
// then lose two thirds of their speed, if they go there (2). Who builds the kernels knows for which they are.
#if !defined(LOCALITY)
#define LOCALITY 2
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// How many items of so many multiplications are worth a thread.
inline int64_t share_of(int64_t cost) { return std::max<int64_t>(1, SHARE / std::max<int64_t>(1, cost)); }

template <class To, class From>
To bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The vector at a place. (Several that are copied by std::memcpy become one copy, by way of memory.)
inline Lanes vector_at(const void* place) {
  typedef float Loose __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
  return *static_cast<const Loose*>(place);
}

// one * other + sum with a single rounding, where the processor can do that in one instruction; else with two.
inline Lanes fused(const Lanes& one, const Lanes& other, const Lanes& sum) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
#elif defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#elif defined(__ARM_NEON)
  return (Lanes)vfmaq_f32((float32x4_t)sum, (float32x4_t)one, (float32x4_t)other);
#else
  return one * other + sum;
#endif
}

// Taking nothing off keeps every number, so that compilers leave a plain broadcast; adding nothing turns -0 to 0.
inline Lanes fused(const Lanes& one, float other, const Lanes& sum) { return fused(one, other - Lanes{}, sum); }

// The same, in the register of the sum: with 16 of them, GCC otherwise moves sums about in every step.
inline void fuse(Lanes& sum, const Lanes& one, float other) {
#if defined(__FMA__) && !defined(__AVX512F__) && !defined(__clang__)
  Lanes found = sum;
  asm volatile("vfmadd231ps %1, %2, %0" : "+x"(found) : "xm"(one), "x"(other - Lanes{}));
  sum = found;
#else
  sum = fused(one, other, sum);
#endif
}

// e to the power of `all` by a polynomial, divided by two to the power of `count`: so many ln 2 are taken off first.
inline Lanes without_twos(const Lanes& all, const Lanes& count) {
  const Lanes rest = fused(count, 2.12194440e-4f, fused(count, -0.693359375f, all));
  Lanes found = Lanes{} + 1.9875691500e-4f;
  for (float each : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
    found = fused(found, rest, Lanes{} + each);
  return found;
}

// e to the power of numbers that are not above 0.
inline Lanes exponential(Lanes power) {
#if defined(__AVX512F__)
  const __m512 all = _mm512_max_ps(_mm512_set1_ps(-104), (__m512)power);  // what is not a number stays so
  const __m512 count = _mm512_roundscale_ps(_mm512_mul_ps(all, _mm512_set1_ps(1.44269504f)), 0);
  return (Lanes)_mm512_scalef_ps((__m512)without_twos((Lanes)all, (Lanes)count), count);
#else
  const Whole nothing = power < -87;
  power = nothing ? Lanes{} : power;
  const Whole twos = __builtin_convertvector(power * 1.44269504f - 0.5f, Whole);
  const Lanes found = without_twos(power, __builtin_convertvector(twos, Lanes));
  return nothing ? Lanes{} : found * (Lanes)((twos + 127) << 23);
#endif
}

struct Float32 {
  using Item = float;
  static constexpr int STEP = 1;
  static void add(Lanes& sum, const Lanes& weights, const Item* input) { sum = fused(weights, *input, sum); }
  static Item round(float value) { return value; }
  static float widen(Item value) { return value; }
  static Lanes load(const Item* place) {
    Lanes found;
    std::memcpy(&found, place, sizeof(found));
    return found;
  }
};

struct BFloat16 {
  using Item = uint16_t;
  static constexpr int STEP = 2;
  static float widen(Item value) { return bits<float>(static_cast<uint32_t>(value) << 16); }
  static Lanes load(const Item* place) {
    Halves found;
    std::memcpy(&found, place, sizeof(found));
#if defined(__AVX2__) && !defined(__AVX512F__)  // by one instruction, where compilers take four
    return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)found), 16);
#else
    return (Lanes)(__builtin_convertvector(found, Words) << 16);
#endif
  }
  static void add(Lanes& sum, const Lanes& weights, const Item* input) {
#if defined(__AVX512BF16__)
    int32_t pair;
    std::memcpy(&pair, input, sizeof(pair));
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
#else
    const Words pairs = (Words)weights;
    sum = fused((Lanes)(pairs << 16), widen(input[0]), sum);
    sum = fused((Lanes)(pairs & 0xffff0000u), widen(input[1]), sum);
#endif
  }
  static Item round(float value) {  // to the nearest, ties to even; what is not a number stays so
    const uint32_t all = bits<uint32_t>(value);
    const uint32_t rounded = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    return static_cast<Item>((all & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

// Numbers of 16 bits that are read only: scales of weights in files.
struct Float16 {
  static Lanes load(const uint16_t* place) {
    Halves found;
    std::memcpy(&found, place, sizeof(found));
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps((__m256i)found);
#elif defined(__F16C__)
    return (Lanes)_mm256_cvtph_ps((__m128i)found);
#elif defined(__aarch64__)
    return (Lanes)vcvt_f32_f16((float16x4_t)found);
#else
    const Words all = __builtin_convertvector(found, Words), size = (all & 0x7fffu) << 13;
    const Words finite = (Words)((Lanes)size * 0x1p112f), endless = size | 0x7f800000u;
    return (Lanes)(((all & 0x8000u) << 16) | ((all & 0x7c00u) == 0x7c00u ? endless : finite));
#endif
  }
};

// Asks for a line of weights. Behind the last ones there may be nothing, which is no error.
inline void ask(uintptr_t place) { __builtin_prefetch(reinterpret_cast<const void*>(place), 0, LOCALITY); }

// Asks for weights AHEAD of their turn.
inline void prefetch(const void* place, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += LINE) ask(reinterpret_cast<uintptr_t>(place) + AHEAD + line);
}

#if defined(__AMX_TILE__)
constexpr int64_t SIDE = 16;  // rows and columns of a tile

// Intel's tiles (AMX), while a thread works with them: 0 to 3 are sums, two halves of a panel for up to SIDE rows and two
// for others; 4 and 5 the inputs of these rows, 6 and 7 the halves' weights.
class AmxTiles {
 public:
  ~AmxTiles() {
    if (rows_) _tile_release();
  }

  // Shapes them for `rows` rows, of which `bytes` of inputs meet weights of so many steps at a time.
  void shape(int64_t rows, int64_t steps = SIDE, int64_t bytes = LINE) {
    if (rows_ == rows) return;
    const int64_t first = std::min(rows, SIDE), rest = rows - first;
    const int64_t heights[] = {first, first, rest, rest, first, rest, steps, steps};
    Shapes shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.heights[i] = static_cast<uint8_t>(heights[i]);
      shapes.bytes[i] = static_cast<uint16_t>(!heights[i] ? 0 : i == 4 || i == 5 ? bytes : LINE);
    }
    asm volatile("" ::"m"(shapes) : "memory");  // the intrinsic reads more than compilers know
    _tile_loadconfig(&shapes);
    rows_ = rows;
  }

 private:
  struct alignas(LINE) Shapes {  // as the processor reads them
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t heights[16] = {};
  };

  int64_t rows_ = 0;
};

// The sums of tiles, of up to SIDE rows or of BOTH: from or to memory with `row` bytes from row to row, `half` to the second
// half of a panel, and `below` to the other rows.
template <bool BOTH>
inline __attribute__((always_inline)) void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (BOTH) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool BOTH>
inline __attribute__((always_inline)) void load_sums(const void* from, int64_t row, int64_t half, int64_t below) {
  const char* place = static_cast<const char*>(from);
  _tile_loadd(0, place, row);
  _tile_loadd(1, place + half, row);
  if constexpr (BOTH) {
    _tile_loadd(2, place + below, row);
    _tile_loadd(3, place + below + half, row);
  }
}

template <bool BOTH>
inline __attribute__((always_inline)) void store_sums(void* to, int64_t row, int64_t half, int64_t below) {
  char* place = static_cast<char*>(to);
  _tile_stored(0, place, row);
  _tile_stored(1, place + half, row);
  if constexpr (BOTH) {
    _tile_stored(2, place + below, row);
    _tile_stored(3, place + below + half, row);
  }
}

// Asks the system for Intel's tiles (AMX), which processes may use only then.
inline bool tiles_allowed() {
  constexpr int REQUEST = 0x1023, DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
  return allowed;
}
#endif

#if defined(__AMX_BF16__)
// Adds the products of SIDE pairs of bfloat16: inputs of up to SIDE rows, or of BOTH, with weights of both halves.
template <bool BOTH>
inline __attribute__((always_inline)) void add_products(const uint16_t* inputs, int64_t apart, const uint16_t* weights,
                                                        const uint16_t* others, int64_t onward) {
  const int64_t row = apart * sizeof(*inputs), step = onward * sizeof(*weights);
  _tile_loadd(4, inputs, row);
  _tile_loadd(6, weights, step);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, others, step);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (BOTH) {
    _tile_loadd(5, inputs + SIDE * apart, row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

// Calls `run` with the type of numbers.
template <class Run>
void with_type(slipstream::Number number, const Run& run) {
  number == slipstream::Number::FLOAT32 ? run(Float32()) : run(BFloat16());
}

// The type of a tensor's numbers, for an operator that has only these.
inline slipstream::Number number_of(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "slipstream::", name, ": float32 or bfloat16");
  return type == ScalarType::Float ? slipstream::Number::FLOAT32 : slipstream::Number::BFLOAT16;
}

inline int64_t panels_of(int64_t features) { return (features + PANEL - 1) / PANEL; }

// Calls `run` with a number from 1 to MOST as a constant.
template <class Run, int... NUMBERS>
void as_constant(int64_t number, const Run& run, std::integer_sequence<int, NUMBERS...>) {
  (void)((number == NUMBERS + 1 && (run(std::integral_constant<int, NUMBERS + 1>()), true)) || ...);
}

template <int MOST, class Run>
void as_constant(int64_t number, const Run& run) {
  as_constant(number, run, std::make_integer_sequence<int, MOST>());
}

// A panel's features of a row, of which `count` are there: the bias is added before the one rounding.
template <class Type>
void write_panel(const float* sums, const typename Type::Item* bias, typename Type::Item* output, int64_t count) {
  float found[PANEL];
  typename Type::Item rounded[PANEL];
  std::memcpy(found, sums, sizeof(found));
  if (bias)
    for (int64_t i = 0; i < count; ++i) found[i] += Type::widen(bias[i]);
  for (int i = 0; i < PANEL; ++i) rounded[i] = Type::round(found[i]);
  if (count == PANEL)  // a size that the compiler knows takes no call
    std::memcpy(output, rounded, sizeof(rounded));
  else
    std::copy(rounded, rounded + count, output);
}

template <class Type, class Weight>
void write_panel(const slipstream::Layer<Weight>& layer, int64_t panel, int64_t row, const float* sums) {
  using Item = typename Type::Item;
  const int64_t first = panel * PANEL;
  const auto* bias = static_cast<const Item*>(layer.bias);
  write_panel<Type>(sums, bias ? bias + first : nullptr, static_cast<Item*>(layer.outputs) + row * layer.apart + first,
                    std::min<int64_t>(PANEL, layer.features - first));
}

}  // namespace
