// Linear layers for a few tokens, at the speed of the memory that holds their weights.
//
// Whatever is computed for a token has the same bits however many tokens, texts and empty slots stand beside it: sums
// are float32, in an order that depends on the weight alone.
//
// A weight (features, inputs) lies in panels of PANEL features, so that one pass over a panel reads consecutive
// memory: (panels, inputs / STEP, PANEL, STEP). STEP inputs of a feature lie side by side: two of bfloat16, which one
// instruction multiplies, and one of float32.

#include "lanes.h"
#include "parallel.h"

namespace {

using slipstream::PanelLayer;

// ---- linear layers --------------------------------------------------------------------------------------------------

// Rows that share weights while these are in registers, and sums beyond which a tile has only two vectors of a panel.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 15, SUMS = 30;  // inputs are read where they lie
#elif defined(__ARM_NEON)
constexpr int MOST_ROWS = 6, SUMS = 24;
#else
constexpr int MOST_ROWS = 6, SUMS = 8;
#endif

constexpr int64_t ROOM = 48;  // rows whose sums are held at a time

// Many rows meet all weights by so many bytes of them, which the second cache holds, and by so many rows.
constexpr int64_t TOGETHER = 1 << 19, LEAST_TOGETHER = 128, MOST_TOGETHER = 512;

// Vectors of a panel that ROWS rows multiply at a time.
constexpr int together(int rows) {
  int parts = PARTS;
  while (parts > 2 && rows * parts > SUMS) parts /= 2;
  return parts;
}

// What inputs are multiplied as, and how: without instructions for bfloat16, its pairs are two vectors of weights.
template <class Type>
struct Factor {
  using Item = float;
  static constexpr int PLANES = 1;
  static Item take(float input) { return input; }
  static Lanes plane(const Lanes& weights, int) { return weights; }
  static void add(Lanes& sum, const Lanes& weights, const Item* input) { fuse(sum, weights, *input); }
};

template <>
struct Factor<BFloat16> {
#if defined(__AVX512BF16__)
  using Item = uint16_t;
  static constexpr int PLANES = 1;
  static Item take(uint16_t input) { return input; }
  static Lanes plane(const Lanes& weights, int) { return weights; }
  static void add(Lanes& sum, const Lanes& weights, const Item* input) { BFloat16::add(sum, weights, input); }
#else
  using Item = float;
  static constexpr int PLANES = 2;
  static Item take(uint16_t input) { return BFloat16::widen(input); }
  static Lanes plane(const Lanes& weights, int plane) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // a register less than with a mask
    if (plane) return (Lanes)_mm256_slli_epi32(_mm256_srli_epi32((__m256i)weights, 16), 16);
#endif
    return (Lanes)(plane ? (Words)weights & 0xffff0000u : (Words)weights << 16);
  }
  static void add(Lanes& sum, const Lanes& weights, const Item* input) { fuse(sum, weights, *input); }
#endif
};

// What a product reads and writes. `steps` are pairs (or single ones) of inputs.
template <class Type>
struct Product {
  const typename Factor<Type>::Item* inputs;  // (rows, steps * STEP), rows `apart` items from each other
  int64_t rows, steps, apart;
  std::span<const PanelLayer> layers;

  // The weights of a layer's panel.
  const typename Type::Item* panel(const PanelLayer& layer, int64_t number) const {
    return static_cast<const typename Type::Item*>(layer.weight) + number * steps * PANEL * Type::STEP;
  }
};

// Adds the products of `steps` steps to sums (ROWS, PANEL) of some vectors of a panel. Every step asks for `pace` bytes, at
// most two lines, of what comes `later`.
template <class Type, int ROWS>
void add_tile(const typename Type::Item* weight, const typename Factor<Type>::Item* inputs, int64_t apart, int64_t steps,
              float* to, uintptr_t later, int64_t pace) {
  constexpr int WIDE = together(ROWS), STEP = Type::STEP;
  Lanes sums[ROWS][WIDE];
  for (int r = 0; r < ROWS; ++r)
    for (int part = 0; part < WIDE; ++part) sums[r][part] = vector_at(to + r * PANEL + part * LANES);
  for (int64_t step = 0; step < steps; ++step, weight += PANEL * STEP, inputs += STEP, later += pace) {
    ask(later);
    ask(later + pace / 2);
    for (int plane = 0; plane < Factor<Type>::PLANES; ++plane) {
      Lanes weights[WIDE];
      for (int part = 0; part < WIDE; ++part)
        weights[part] = Factor<Type>::plane(vector_at(weight + part * LANES * STEP), plane);
      for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < WIDE; ++part) Factor<Type>::add(sums[r][part], weights[part], inputs + r * apart + plane);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int part = 0; part < WIDE; ++part) std::memcpy(to + r * PANEL + part * LANES, &sums[r][part], sizeof(Lanes));
}

// Adds the products of a panel's weights with the inputs of `rows` rows to sums (rows, PANEL), each one after another in the
// order of inputs. Blocks of weights, which the first cache holds, meet all rows there, in tiles of nearly the same height,
// which meanwhile ask for the next block, each for its part.
template <class Type>
void add_panel(const Product<Type>& work, const typename Type::Item* weight, int64_t first, int64_t rows,
               float (*sums)[PANEL]) {
  constexpr int64_t STEP = Type::STEP, BYTES = PANEL * STEP * sizeof(*weight);
  const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t near = rows == 1 || tiles > 1 ? AHEAD : AHEAD / 2;  // a few rows take longer, and caches forget
  const int64_t most = near / BYTES;
  for (int64_t begin = 0; begin < work.steps; begin += most) {
    const int64_t steps = std::min(most, work.steps - begin);
    const typename Type::Item* block = weight + begin * PANEL * STEP;
    uintptr_t later = reinterpret_cast<uintptr_t>(block) + near;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = rows * i / tiles;
      const auto* inputs = work.inputs + (first + row) * work.apart + begin * STEP;
      as_constant<MOST_ROWS>(rows * (i + 1) / tiles - row, [&](auto constant) {
        constexpr int ROWS = decltype(constant)::value, WIDE = together(ROWS);
        const int64_t pace = BYTES * WIDE / (PARTS * tiles);
        for (int part = 0; part < PARTS; part += WIDE, later += pace * steps)
          add_tile<Type, ROWS>(block + part * LANES * STEP, inputs, work.apart, steps, sums[row] + part * LANES, later, pace);
      });
    }
  }
}

// A panel's features of some rows.
template <class Type>
void fill(const Product<Type>& work, const PanelLayer& layer, int64_t panel, int64_t first, int64_t count) {
  for (int64_t row = first; row < first + count; row += ROOM) {
    const int64_t rows = std::min(ROOM, first + count - row);
    float sums[ROOM][PANEL];
    std::fill_n(sums[0], rows * PANEL, 0.0f);
    add_panel(work, work.panel(layer, panel), row, rows, sums);
    for (int64_t r = 0; r < rows; ++r) write_panel<Type>(layer, panel, row + r, sums[r]);
  }
}

// Products by tiles, which most types and processors do not have.
template <class Type>
struct Tiles {
  static bool fit(const Product<Type>&) { return false; }
  void fill(const Product<Type>&, const PanelLayer&, int64_t, int64_t, int64_t) {}
};

#if defined(__AMX_BF16__)
// Intel's tiles (AMX) multiply 16 rows of bfloat16 by 16 features, 16 steps at a time. They sum in another order, so a
// layer goes this way for any number of rows, or never; a single row waits for its weights anyway.
template <>
class Tiles<BFloat16> {
 public:
  static bool fit(const Product<BFloat16>& work) { return tiles_allowed() && work.steps % SIDE == 0; }

  // A panel's features of some rows, at most MOST_TOGETHER. Blocks of weights, which the first cache holds, meet all of
  // them there.
  void fill(const Product<BFloat16>& work, const PanelLayer& layer, int64_t panel, int64_t first, int64_t rows) {
    constexpr int64_t STEP = BFloat16::STEP;
    const uint16_t* weight = work.panel(layer, panel);
    const auto* outputs = static_cast<const uint16_t*>(layer.outputs) + first * layer.apart + panel * PANEL;
    const int64_t most = rows > 2 * SIDE ? BLOCK : work.steps;
    float sums[MOST_TOGETHER][PANEL];
    for (int64_t begin = 0; begin < work.steps; begin += most)
      for (int64_t row = 0; row < rows; row += 2 * SIDE) {
        const int64_t some = std::min(2 * SIDE, rows - row), steps = std::min(most, work.steps - begin);
        const uint16_t* inputs = work.inputs + (first + row) * work.apart + begin * STEP;
        const auto multiplied = some > SIDE ? multiply<true> : multiply<false>;
        const bool last = begin + steps == work.steps;
        tiles_.shape(some);
        if (last)
          for (int64_t r = row; r < row + some; ++r) __builtin_prefetch(outputs + r * layer.apart, 1);
        multiplied(weight + begin * PANEL * STEP, inputs, work.apart, steps, begin > 0, row == 0, sums + row);
        if (last)
          for (int64_t r = row; r < row + some; ++r) write_panel<BFloat16>(layer, panel, first + r, sums[r]);
      }
  }

 private:
  static constexpr int64_t BLOCK = 8 * SIDE;  // steps of weights
  AmxTiles tiles_;

  // Begins the sums, or goes on with them (`more`). The rows that come first ask for the next weights.
  template <bool BOTH>
  static void multiply(const uint16_t* weight, const uint16_t* inputs, int64_t apart, int64_t steps, bool more, bool asks,
                       float (*sums)[PANEL]) {
    constexpr int64_t WIDTH = PANEL * BFloat16::STEP;  // numbers of a step's weights
    constexpr int64_t ROW = PANEL * sizeof(float);
    more ? load_sums<BOTH>(sums, ROW, ROW / 2, SIDE * ROW) : zero_sums<BOTH>();
    for (int64_t step = 0; step < steps; step += SIDE, weight += SIDE * WIDTH, inputs += SIDE * BFloat16::STEP) {
      if (asks) prefetch(weight, SIDE * WIDTH * sizeof(*weight));
      add_products<BOTH>(inputs, apart, weight, weight + PANEL, WIDTH);
    }
    store_sums<BOTH>(sums, ROW, ROW / 2, SIDE * ROW);
  }
};
#endif

// Every thread takes its part of the panels, whose memory is one stretch. (Panels taken as threads come to it were slower.)
template <class Type>
void multiply(const Product<Type>& work) {
  int64_t panels = 0;
  for (const PanelLayer& layer : work.layers) panels += panels_of(layer.features);
  const int64_t cost = work.rows * work.steps * Type::STEP * PANEL;
  const bool tiled = Tiles<Type>::fit(work);
  const int64_t wide = work.steps * Type::STEP * sizeof(*work.inputs);
  const int64_t most = std::clamp(TOGETHER / std::max<int64_t>(1, wide) / 64 * 64, LEAST_TOGETHER, MOST_TOGETHER);
  slipstream::parallel_for(0, panels, share_of(cost), [&](int64_t begin, int64_t end) {
    Tiles<Type> tiles;
    for (int64_t row = 0; row < work.rows; row += most) {
      const int64_t rows = std::min(most, work.rows - row);
      int64_t before = 0;  // panels of earlier layers
      for (const PanelLayer& layer : work.layers) {
        const int64_t count = panels_of(layer.features);
        for (int64_t panel = std::max<int64_t>(0, begin - before); panel < std::min(count, end - before); ++panel)
          tiled ? tiles.fill(work, layer, panel, row, rows) : fill(work, layer, panel, row, rows);
        before += count;
      }
    }
  });
}

template <class Type>
void run(const typename Type::Item* inputs, int64_t rows, int64_t width, std::span<const PanelLayer> layers) {
  using Input = typename Factor<Type>::Item;
  constexpr bool SAME = std::is_same_v<typename Type::Item, Input>;
  Product<Type> work{nullptr, rows, width / Type::STEP, width, layers};
  const bool colliding = rows > FEW && width && width * sizeof(Input) % COLLIDING == 0;
  if constexpr (SAME) work.inputs = inputs;
  std::unique_ptr<Input[]> copy;
  if (!SAME || colliding) {  // as they are multiplied, with rows that do not push each other out of the cache
    work.apart += colliding ? LINE / sizeof(Input) : 0;
    copy.reset(new Input[rows * work.apart]);
    slipstream::parallel_for(0, rows, share_of(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < width; ++i) copy[row * work.apart + i] = Factor<Type>::take(inputs[row * width + i]);
    });
    work.inputs = copy.get();
  }
  multiply<Type>(work);
}

}  // namespace

void slipstream::multiply(Number number, const void* inputs, int64_t rows, int64_t width,
                          std::span<const PanelLayer> layers) {
  with_type(number, [&](auto type) {
    run<decltype(type)>(static_cast<const typename decltype(type)::Item*>(inputs), rows, width, layers);
  });
}

// ---- operators of torch ---------------------------------------------------------------------------------------------

namespace {

// Inputs (..., width) -> (..., features).
Tensor linear(Tensor inputs, Tensor weight, std::optional<Tensor> bias, int64_t features) {
  const slipstream::Number number = number_of(inputs, "linear");
  const int64_t step = number == slipstream::Number::FLOAT32 ? Float32::STEP : BFloat16::STEP;
  const int64_t width = inputs.size(inputs.dim() - 1);
  STD_TORCH_CHECK(inputs.scalar_type() == weight.scalar_type() && (!bias || bias->scalar_type() == inputs.scalar_type()),
                  "slipstream::linear: tensors must have one type");
  STD_TORCH_CHECK(weight.dim() == 4 && weight.size(2) == PANEL && weight.size(3) == step,
                  "slipstream::linear: the weight is not packed for this type");
  STD_TORCH_CHECK(panels_of(features) == weight.size(0) && (!bias || bias->numel() == features), "slipstream::linear: ",
                  features, " features for a weight of ", weight.size(0), " panels");
  STD_TORCH_CHECK(width == weight.size(1) * step, "slipstream::linear: inputs of ", width, " for a weight of ",
                  weight.size(1) * step);
  STD_TORCH_CHECK(inputs.is_contiguous() && weight.is_contiguous() && (!bias || bias->is_contiguous()),
                  "slipstream::linear: tensors must be contiguous");
  std::vector<int64_t> shape(inputs.sizes().begin(), inputs.sizes().end());
  shape.back() = features;
  Tensor outputs = torch::stable::new_empty(inputs, shape);
  const PanelLayer layer{weight.data_ptr(), bias ? bias->data_ptr() : nullptr, features, outputs.data_ptr(), features};
  slipstream::multiply(number, inputs.data_ptr(), inputs.numel() / std::max<int64_t>(1, width), width, {&layer, 1});
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY(slipstream, m) {
  m.def("linear(Tensor inputs, Tensor weight, Tensor? bias, int features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
}
