// Linear layers for a few rows, at the speed of the memory that holds the weights.
//
// The weight (features, inputs) lies in panels of PANEL features, so that one pass over a panel reads consecutive
// memory: (panels, inputs / STEP, PANEL, STEP). STEP inputs of a feature lie side by side: two of bfloat16, which one
// instruction multiplies, and one of float32. Sums are float32, each over its inputs in their order, whatever the
// number of rows: a token's logits do not depend on how many tokens are scored beside it.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int LANES = 16;  // 32 registers: MOST_ROWS * PARTS sums, the weights, and one input
constexpr int MOST_ROWS = 12;
#else
constexpr int LANES = 8;  // 16 registers
constexpr int MOST_ROWS = 3;
#endif
constexpr int PANEL = 32;  // features; kernel.py has the same number
constexpr int PARTS = PANEL / LANES;
constexpr int64_t AHEAD = 512;     // bytes that weights are fetched ahead
constexpr int64_t SHARE = 1 << 15;  // multiplications that are worth a thread

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

template <class To, class From>
To bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Float32 {
  using Item = float;
  static constexpr int STEP = 1;
  static void add(Lanes& sum, const Lanes& weights, const Item* input) { sum += weights * *input; }
  static Item round(float value) { return value; }
  static float widen(Item value) { return value; }
};

struct BFloat16 {
  using Item = uint16_t;
  static constexpr int STEP = 2;
  static float widen(Item value) { return bits<float>(static_cast<uint32_t>(value) << 16); }
  static void add(Lanes& sum, const Lanes& weights, const Item* input) {
#if defined(__AVX512BF16__)
    int32_t pair;
    std::memcpy(&pair, input, sizeof(pair));
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
#else
    const Words pairs = (Words)weights;
    sum += (Lanes)(pairs << 16) * widen(input[0]);
    sum += (Lanes)(pairs & 0xffff0000u) * widen(input[1]);
#endif
  }
  static Item round(float value) {  // to the nearest, ties to even; what is not a number stays so
    const uint32_t all = bits<uint32_t>(value);
    const uint32_t rounded = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    return static_cast<Item>((all & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

// What a product reads and writes. `steps` are pairs (or single ones) of inputs.
template <class Type>
struct Product {
  const typename Type::Item* inputs;  // (rows, steps * STEP)
  const typename Type::Item* weight;
  const typename Type::Item* bias;    // (features) or null
  typename Type::Item* outputs;       // (rows, features)
  int64_t rows, steps, features;
};

// A panel's features of ROWS rows, beginning with `row`.
template <class Type, int ROWS>
void tile(const Product<Type>& work, int64_t panel, int64_t row) {
  constexpr int STEP = Type::STEP;
  const int64_t width = work.steps * STEP;
  const typename Type::Item* weight = work.weight + panel * PANEL * width;
  const typename Type::Item* inputs = work.inputs + row * width;
  Lanes sums[ROWS][PARTS] = {};
  for (int64_t step = 0; step < work.steps; ++step, weight += PANEL * STEP) {
    Lanes weights[PARTS];
    for (int part = 0; part < PARTS; ++part) {
      const typename Type::Item* place = weight + part * LANES * STEP;
      std::memcpy(&weights[part], place, sizeof(Lanes));
      __builtin_prefetch(reinterpret_cast<const char*>(place) + AHEAD);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int part = 0; part < PARTS; ++part) Type::add(sums[r][part], weights[part], inputs + r * width + step * STEP);
  }
  const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, work.features - first);
  for (int r = 0; r < ROWS; ++r) {
    float found[PANEL];
    typename Type::Item rounded[PANEL];
    std::memcpy(found, sums[r], sizeof(found));
    if (work.bias)
      for (int64_t i = 0; i < count; ++i) found[i] += Type::widen(work.bias[first + i]);
    for (int i = 0; i < PANEL; ++i) rounded[i] = Type::round(found[i]);
    std::memcpy(work.outputs + (row + r) * work.features + first, rounded, count * sizeof(rounded[0]));
  }
}

// The tile for a number of rows that is known only when it runs.
template <class Type, int... ROWS>
void any(const Product<Type>& work, int64_t panel, int64_t row, int64_t rows, std::integer_sequence<int, ROWS...>) {
  (void)((rows == ROWS + 1 && (tile<Type, ROWS + 1>(work, panel, row), true)) || ...);
}

// A panel's features of all rows, in tiles of nearly the same height.
template <class Type>
void fill(const Product<Type>& work, int64_t panel) {
  const int64_t tiles = (work.rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t row = work.rows * i / tiles;
    any(work, panel, row, work.rows * (i + 1) / tiles - row, std::make_integer_sequence<int, MOST_ROWS>());
  }
}

// Every thread takes its part of the panels, whose memory is one stretch. (Panels taken as threads come to it were slower.)
template <class Type>
void multiply(const Product<Type>& work) {
  const int64_t panels = (work.features + PANEL - 1) / PANEL;
  const int64_t cost = std::max<int64_t>(1, work.rows * work.steps * Type::STEP * PANEL);
  torch::stable::parallel_for(0, panels, std::max<int64_t>(1, SHARE / cost), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) fill(work, panel);
  });
}

template <class Type>
void run(const Tensor& inputs, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& outputs) {
  using Item = typename Type::Item;
  STD_TORCH_CHECK(weight.dim() == 4 && weight.size(2) == PANEL && weight.size(3) == Type::STEP,
                  "slipstream::linear: the weight is not packed for this type");
  const int64_t width = inputs.size(inputs.dim() - 1), features = outputs.size(outputs.dim() - 1);
  STD_TORCH_CHECK(width == weight.size(1) * Type::STEP, "slipstream::linear: inputs of ", width, " for a weight of ",
                  weight.size(1) * Type::STEP);
  STD_TORCH_CHECK(inputs.is_contiguous() && weight.is_contiguous() && (!bias || bias->is_contiguous()),
                  "slipstream::linear: tensors must be contiguous");
  multiply<Type>({static_cast<const Item*>(inputs.data_ptr()), static_cast<const Item*>(weight.data_ptr()),
                  bias ? static_cast<const Item*>(bias->data_ptr()) : nullptr, static_cast<Item*>(outputs.data_ptr()),
                  inputs.numel() / std::max<int64_t>(1, width), weight.size(1), features});
}

// (..., inputs) and a packed weight -> (..., features).
Tensor linear(Tensor inputs, Tensor weight, std::optional<Tensor> bias, int64_t features) {
  STD_TORCH_CHECK(inputs.scalar_type() == weight.scalar_type() && (!bias || bias->scalar_type() == inputs.scalar_type()),
                  "slipstream::linear: tensors must have one type");
  STD_TORCH_CHECK((features + PANEL - 1) / PANEL == weight.size(0) && (!bias || bias->numel() == features),
                  "slipstream::linear: ", features, " features for a weight of ", weight.size(0), " panels");
  std::vector<int64_t> shape(inputs.sizes().begin(), inputs.sizes().end());
  shape.back() = features;
  Tensor outputs = torch::stable::new_empty(inputs, shape);
  if (inputs.scalar_type() == ScalarType::BFloat16)
    run<BFloat16>(inputs, weight, bias, outputs);
  else if (inputs.scalar_type() == ScalarType::Float)
    run<Float32>(inputs, weight, bias, outputs);
  else
    STD_TORCH_CHECK(false, "slipstream::linear: float32 or bfloat16");
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY(slipstream, m) {
  m.def("linear(Tensor inputs, Tensor weight, Tensor? bias, int features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }
