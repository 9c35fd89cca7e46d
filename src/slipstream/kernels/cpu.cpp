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

// ---- linear layers --------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 15;  // MOST_ROWS * PARTS sums and the weights; inputs are read where they lie
#else
constexpr int MOST_ROWS = 3;
#endif

// A layer of a product.
template <class Type>
struct Layer {
  const typename Type::Item* weight;
  const typename Type::Item* bias;  // (features) or null
  int64_t features, place;          // `place`: where its features begin in the outputs
};

// What a product reads and writes. `steps` are pairs (or single ones) of inputs.
template <class Type>
struct Product {
  const typename Type::Item* inputs;  // (rows, steps * STEP), rows `apart` items from each other
  typename Type::Item* outputs;       // (rows, features)
  int64_t rows, steps, features, apart;
  std::vector<Layer<Type>> layers;
};

// Writes a row's features of a panel.
template <class Type>
void write(const Product<Type>& work, const Layer<Type>& layer, int64_t panel, int64_t row, const void* sums) {
  const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, layer.features - first);
  write_panel<Type>(static_cast<const float*>(sums), layer.bias ? layer.bias + first : nullptr,
                    work.outputs + row * work.features + layer.place + first, count);
}

// A panel's features of ROWS rows, beginning with `row`.
template <class Type, int ROWS>
void tile(const Product<Type>& work, const Layer<Type>& layer, int64_t panel, int64_t row) {
  constexpr int STEP = Type::STEP;
  const int64_t width = work.steps * STEP;
  const typename Type::Item* weight = layer.weight + panel * PANEL * width;
  const typename Type::Item* inputs = work.inputs + row * work.apart;
  Lanes sums[ROWS][PARTS];
  for (auto& parts : sums)
    for (Lanes& sum : parts) sum = Lanes{};
  for (int64_t step = 0; step < work.steps; ++step, weight += PANEL * STEP) {
    Lanes weights[PARTS];
    prefetch(weight, sizeof(weights));
    for (int part = 0; part < PARTS; ++part) std::memcpy(&weights[part], weight + part * LANES * STEP, sizeof(Lanes));
    for (int r = 0; r < ROWS; ++r)
      for (int part = 0; part < PARTS; ++part) Type::add(sums[r][part], weights[part], inputs + r * work.apart + step * STEP);
  }
  for (int r = 0; r < ROWS; ++r) write(work, layer, panel, row + r, sums[r]);
}

// A panel's features of all rows, in tiles of nearly the same height.
template <class Type>
void fill(const Product<Type>& work, const Layer<Type>& layer, int64_t panel) {
  const int64_t tiles = (work.rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t row = work.rows * i / tiles;
    as_constant<MOST_ROWS>(work.rows * (i + 1) / tiles - row,
                           [&](auto rows) { tile<Type, decltype(rows)::value>(work, layer, panel, row); });
  }
}

// Products by tiles, which most types and processors do not have.
template <class Type>
struct Tiles {
  static bool fit(const Product<Type>&) { return false; }
  void fill(const Product<Type>&, const Layer<Type>&, int64_t) {}
};

#if defined(__AMX_BF16__)
// Intel's tiles (AMX) multiply 16 rows of bfloat16 by 16 features, 16 steps at a time. They sum in another order, so a
// layer goes this way for any number of rows, or never; a single row waits for its weights anyway.
template <>
class Tiles<BFloat16> {
 public:
  static constexpr int64_t SIDE = 16;

  static bool fit(const Product<BFloat16>& work) {
    return tiles_allowed() && work.steps % SIDE == 0;
  }

  ~Tiles() {
    if (shaped_) _tile_release();
  }

  // A panel's features of all rows.
  void fill(const Product<BFloat16>& work, const Layer<BFloat16>& layer, int64_t panel) {
    for (int64_t row = 0; row < work.rows; row += 2 * SIDE) {
      const int64_t rows = std::min(2 * SIDE, work.rows - row);
      shape(rows);
      float sums[2 * SIDE][PANEL];
      if (rows > SIDE)
        multiply<true>(work, layer, panel, row, sums);
      else
        multiply<false>(work, layer, panel, row, sums);
      for (int64_t r = 0; r < rows; ++r) write(work, layer, panel, row + r, sums[r]);
    }
  }

 private:
  int64_t shaped_ = 0;

  // The tiles: 0 to 3 are sums, two halves of a panel for up to 16 rows and two for others; 4 and 5 inputs of these rows,
  // 6 and 7 the weights' halves.
  void shape(int64_t rows) {
    if (shaped_ == rows) return;
    TileShapes tiles;
    const int64_t first = std::min(rows, SIDE);
    const int64_t heights[] = {first, first, rows - first, rows - first, first, rows - first, SIDE, SIDE};
    for (int i = 0; i < 8; ++i) {
      tiles.heights[i] = static_cast<uint8_t>(heights[i]);
      tiles.bytes[i] = heights[i] ? LINE : 0;
    }
    tiles.load();
    shaped_ = rows;
  }

  template <bool BOTH>
  static void multiply(const Product<BFloat16>& work, const Layer<BFloat16>& layer, int64_t panel, int64_t row,
                       float (*sums)[PANEL]) {
    constexpr int64_t WIDTH = PANEL * BFloat16::STEP * sizeof(uint16_t);  // bytes of a step's weights
    const uint16_t* weight = layer.weight + panel * work.steps * PANEL * BFloat16::STEP;
    const uint16_t* inputs = work.inputs + row * work.apart;
    const int64_t apart = work.apart * sizeof(uint16_t);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t step = 0; step < work.steps; step += SIDE) {
      prefetch(weight, SIDE * WIDTH);
      _tile_loadd(6, weight, WIDTH);
      _tile_loadd(7, weight + PANEL, WIDTH);
      _tile_loadd(4, inputs, apart);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (BOTH) {
        _tile_loadd(5, inputs + SIDE * work.apart, apart);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      weight += SIDE * PANEL * BFloat16::STEP;
      inputs += SIDE * BFloat16::STEP;
    }
    constexpr int64_t ROW = PANEL * sizeof(float);
    _tile_stored(0, sums[0], ROW);
    _tile_stored(1, sums[0] + PANEL / 2, ROW);
    if constexpr (BOTH) {
      _tile_stored(2, sums[SIDE], ROW);
      _tile_stored(3, sums[SIDE] + PANEL / 2, ROW);
    }
  }
};
#endif

// Every thread takes its part of the panels, whose memory is one stretch. (Panels taken as threads come to it were slower.)
template <class Type>
void multiply(const Product<Type>& work) {
  int64_t panels = 0;
  for (const Layer<Type>& layer : work.layers) panels += panels_of(layer.features);
  const int64_t cost = std::max<int64_t>(1, work.rows * work.steps * Type::STEP * PANEL);
  const bool tiled = Tiles<Type>::fit(work);
  slipstream::parallel_for(0, panels, std::max<int64_t>(1, SHARE / cost), [&](int64_t begin, int64_t end) {
    Tiles<Type> tiles;
    for (const Layer<Type>& layer : work.layers) {
      const int64_t count = panels_of(layer.features);
      for (int64_t panel = std::max<int64_t>(0, begin); panel < std::min(count, end); ++panel)
        tiled ? tiles.fill(work, layer, panel) : fill(work, layer, panel);
      begin -= count;
      end -= count;
    }
  });
}

template <class Type>
void run(const typename Type::Item* inputs, int64_t rows, int64_t width, std::span<const slipstream::PanelLayer> layers,
         typename Type::Item* outputs) {
  using Item = typename Type::Item;
  Product<Type> work{inputs, outputs, rows, width / Type::STEP, 0, width, {}};
  for (const auto& [weight, bias, features] : layers) {
    work.layers.push_back({static_cast<const Item*>(weight), static_cast<const Item*>(bias), features, work.features});
    work.features += features;
  }
  std::unique_ptr<Item[]> copy;  // with rows that do not push each other out of the cache
  if (rows > FEW && width && width * sizeof(Item) % COLLIDING == 0) {
    work.apart += LINE / sizeof(Item);
    copy.reset(new Item[rows * work.apart]);
    slipstream::parallel_for(0, rows, std::max<int64_t>(1, SHARE / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) std::copy_n(inputs + row * width, width, copy.get() + row * work.apart);
    });
    work.inputs = copy.get();
  }
  multiply<Type>(work);
}

}  // namespace

void slipstream::multiply(Number number, const void* inputs, int64_t rows, int64_t width,
                          std::span<const PanelLayer> layers, void* outputs) {
  with_type(number, [&](auto type) {
    using Item = typename decltype(type)::Item;
    run<decltype(type)>(static_cast<const Item*>(inputs), rows, width, layers, static_cast<Item*>(outputs));
  });
}

// ---- operators of torch ---------------------------------------------------------------------------------------------

namespace {

// A layer's tensors as the caller has them.
struct Given {
  Tensor weight;
  std::optional<Tensor> bias;
  int64_t features;
};

void check(const Tensor& inputs, const Given& layer, int64_t step) {
  const auto& [weight, bias, features] = layer;
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
}

// (..., inputs) and layers that read them -> (..., features of all), one layer's behind the other's.
Tensor product(const Tensor& inputs, const std::vector<Given>& given) {
  const slipstream::Number number = number_of(inputs, "linear");
  const int64_t width = inputs.size(inputs.dim() - 1);
  std::vector<int64_t> shape(inputs.sizes().begin(), inputs.sizes().end());
  std::vector<slipstream::PanelLayer> layers;
  shape.back() = 0;
  for (const Given& layer : given) {
    check(inputs, layer, number == slipstream::Number::FLOAT32 ? Float32::STEP : BFloat16::STEP);
    layers.push_back({layer.weight.data_ptr(), layer.bias ? layer.bias->data_ptr() : nullptr, layer.features});
    shape.back() += layer.features;
  }
  Tensor outputs = torch::stable::new_empty(inputs, shape);
  slipstream::multiply(number, inputs.data_ptr(), inputs.numel() / std::max<int64_t>(1, width), width, layers,
                       outputs.data_ptr());
  return outputs;
}

Tensor linear(Tensor inputs, Tensor weight, std::optional<Tensor> bias, int64_t features) {
  return product(inputs, {{weight, bias, features}});
}

// Two or three layers. (Not a list of them, for which torch's generated code goes a slower way.)
Tensor linears(Tensor inputs, Tensor first, std::optional<Tensor> first_bias, int64_t first_features, Tensor second,
               std::optional<Tensor> second_bias, int64_t second_features, std::optional<Tensor> third,
               std::optional<Tensor> third_bias, int64_t third_features) {
  std::vector<Given> layers = {{first, first_bias, first_features}, {second, second_bias, second_features}};
  if (third) layers.push_back({*third, third_bias, third_features});
  return product(inputs, layers);
}

}  // namespace

STABLE_TORCH_LIBRARY(slipstream, m) {
  m.def("linear(Tensor inputs, Tensor weight, Tensor? bias, int features) -> Tensor");
  m.def("linears(Tensor inputs, Tensor first, Tensor? first_bias, int first_features, Tensor second, "
        "Tensor? second_bias, int second_features, Tensor? third, Tensor? third_bias, int third_features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linears", TORCH_BOX(&linears));
}
