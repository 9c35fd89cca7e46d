// Linear layers and attention for a few tokens, at the speed of the memory that holds weights and cache.
//
// Whatever is computed for a token has the same bits however many tokens, texts and empty slots stand beside it: sums
// are float32, in an order that depends on the weight alone (or on the slots that are seen).
//
// A weight (features, inputs) lies in panels of PANEL features, so that one pass over a panel reads consecutive
// memory: (panels, inputs / STEP, PANEL, STEP). STEP inputs of a feature lie side by side: two of bfloat16, which one
// instruction multiplies, and one of float32.

#include "lanes.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
    constexpr int REQUEST = 0x1023, DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
    return allowed && work.steps % SIDE == 0;
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
    struct alignas(LINE) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t heights[16] = {};
    } tiles;
    const int64_t first = std::min(rows, SIDE);
    const int64_t heights[] = {first, first, rows - first, rows - first, first, rows - first, SIDE, SIDE};
    for (int i = 0; i < 8; ++i) {
      tiles.heights[i] = static_cast<uint8_t>(heights[i]);
      tiles.bytes[i] = heights[i] ? LINE : 0;
    }
    asm volatile("" ::"m"(tiles) : "memory");  // the intrinsic reads more than compilers know
    _tile_loadconfig(&tiles);
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
  torch::stable::parallel_for(0, panels, std::max<int64_t>(1, SHARE / cost), [&](int64_t begin, int64_t end) {
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

template <class Type>
void run(const Tensor& inputs, const std::vector<Given>& layers, const Tensor& outputs) {
  using Item = typename Type::Item;
  const int64_t width = inputs.size(inputs.dim() - 1);
  Product<Type> work{static_cast<const Item*>(inputs.data_ptr()), static_cast<Item*>(outputs.data_ptr()),
                     inputs.numel() / std::max<int64_t>(1, width), width / Type::STEP, 0, width, {}};
  for (const Given& layer : layers) {
    check(inputs, layer, Type::STEP);
    work.layers.push_back({static_cast<const Item*>(layer.weight.data_ptr()),
                           layer.bias ? static_cast<const Item*>(layer.bias->data_ptr()) : nullptr, layer.features,
                           work.features});
    work.features += layer.features;
  }
  std::unique_ptr<Item[]> copy;  // with rows that do not push each other out of the cache
  if (work.rows > FEW && width && width * sizeof(Item) % COLLIDING == 0) {
    work.apart += LINE / sizeof(Item);
    copy.reset(new Item[work.rows * work.apart]);
    torch::stable::parallel_for(0, work.rows, std::max<int64_t>(1, SHARE / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        std::copy_n(static_cast<const Item*>(inputs.data_ptr()) + row * width, width, copy.get() + row * work.apart);
    });
    work.inputs = copy.get();
  }
  multiply<Type>(work);
}

// (..., inputs) and layers that read them -> (..., features of all), one layer's behind the other's.
Tensor product(const Tensor& inputs, const std::vector<Given>& layers) {
  std::vector<int64_t> shape(inputs.sizes().begin(), inputs.sizes().end());
  shape.back() = 0;
  for (const Given& layer : layers) shape.back() += layer.features;
  Tensor outputs = torch::stable::new_empty(inputs, shape);
  if (inputs.scalar_type() == ScalarType::BFloat16)
    run<BFloat16>(inputs, layers, outputs);
  else if (inputs.scalar_type() == ScalarType::Float)
    run<Float32>(inputs, layers, outputs);
  else
    STD_TORCH_CHECK(false, "slipstream::linear: float32 or bfloat16");
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

// ---- attention ------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int MOST_QUERIES = 6;  // beside each other, with CHUNK sums each
#else
constexpr int MOST_QUERIES = 2;
#endif
constexpr int CHUNK = 4;               // lanes of a value that are summed at a time
constexpr float HIDDEN = -1e30f;       // what a mask adds where nothing is to be seen
constexpr float LEAST_EXPONENT = -87;  // below it the exponential is nothing

// What attention reads and writes. Every tensor has its own steps between rows, heads and tokens (or slots).
struct Steps {
  int64_t row, head, token;
};

template <class Type>
struct Attention {
  const typename Type::Item *queries, *keys, *values, *mask;  // mask may be null: all slots are seen
  typename Type::Item* outputs;                               // (rows, tokens, heads, width)
  Steps query, key, value, masked;
  int64_t rows, heads, groups, tokens, slots, width;  // `groups`: query heads for one head of keys
  float scale;
};

float sum(const Lanes& lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)lanes);
#else
  float parts[LANES];
  std::memcpy(parts, &lanes, sizeof(parts));
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
#endif
}

// e to the power of numbers that are not above 0: halves of ln 2 taken off, then a polynomial.
Lanes exponential(Lanes power) {
  const Whole nothing = power < LEAST_EXPONENT;
  power = nothing ? Lanes{} : power;
  const Whole twos = __builtin_convertvector(power * 1.44269504f - 0.5f, Whole);
  const Lanes count = __builtin_convertvector(twos, Lanes);
  const Lanes rest = power - count * 0.693359375f + count * 2.12194440e-4f;
  Lanes found = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  found = found * rest + 8.3334519073e-3f;
  found = found * rest + 4.1665795894e-2f;
  found = found * rest + 1.6666665459e-1f;
  found = found * rest + 5.0000001201e-1f;
  found = found * rest * rest + rest + 1.0f;
  return nothing ? Lanes{} : found * (Lanes)((twos + 127) << 23);
}

// Some lanes of a key or value; the last ones of a width may be fewer, unless it is WHOLE chunks.
template <class Type, bool WHOLE>
Lanes lanes(const typename Type::Item* place, int64_t count) {
  if (WHOLE || count >= LANES) return Type::load(place);
  if (count <= 0) return Lanes{};
  typename Type::Item padded[LANES] = {};
  std::copy(place, place + count, padded);
  return Type::load(padded);
}

// Room for one tile, kept by a thread from tile to tile.
struct Scratch {
  std::vector<float> inputs, weights;
  std::vector<int64_t> seen;
};

// What the mask adds, or 0.
template <class Type>
float added(const Attention<Type>& work, int64_t row, int64_t head, int64_t token, int64_t slot) {
  if (!work.mask) return 0;
  return Type::widen(work.mask[row * work.masked.row + head * work.masked.head + token * work.masked.token + slot]);
}

// The slots that any of these tokens sees: what lies in the others may be anything.
template <class Type>
void look(const Attention<Type>& work, int64_t row, int64_t head, int64_t first, int queries, Scratch& room) {
  room.seen.clear();
  for (int64_t slot = 0; slot < work.slots; ++slot) {
    bool seen = false;
    for (int q = 0; q < queries; ++q) seen |= added(work, row, head, first + q, slot) > HIDDEN;
    if (seen) room.seen.push_back(slot);
  }
}

// Weights before they are made to sum to one, of QUERIES tokens -> what they sum to.
template <class Type, int QUERIES, bool WHOLE>
void weigh(const Attention<Type>& work, int64_t row, int64_t head, int64_t first, Scratch& room, float* totals) {
  const int64_t blocks = (work.width + LANES - 1) / LANES, count = room.seen.size();
  const int64_t stride = (count + LANES - 1) / LANES * LANES;
  room.inputs.assign(QUERIES * blocks * LANES, 0);
  for (int q = 0; q < QUERIES; ++q) {
    const auto* query = work.queries + row * work.query.row + head * work.query.head + (first + q) * work.query.token;
    for (int64_t i = 0; i < work.width; ++i) room.inputs[q * blocks * LANES + i] = Type::widen(query[i]);
  }
  room.weights.assign(QUERIES * stride, -std::numeric_limits<float>::infinity());
  const auto* keys = work.keys + row * work.key.row + head / work.groups * work.key.head;
  for (int64_t i = 0; i < count; ++i) {
    const auto* key = keys + room.seen[i] * work.key.token;
    Lanes products[QUERIES] = {};
    for (int64_t block = 0; block < blocks; ++block) {
      const Lanes part = lanes<Type, WHOLE>(key + block * LANES, work.width - block * LANES);
      for (int q = 0; q < QUERIES; ++q)
        products[q] += part * Float32::load(room.inputs.data() + (q * blocks + block) * LANES);
    }
    for (int q = 0; q < QUERIES; ++q)
      room.weights[q * stride + i] = sum(products[q]) * work.scale + added(work, row, head, first + q, room.seen[i]);
  }
  for (int q = 0; q < QUERIES; ++q) {
    float* weights = room.weights.data() + q * stride;
    const float found = *std::max_element(weights, weights + stride);
    const float greatest = std::isinf(found) && found < 0 ? 0 : found;  // a token that sees nothing
    for (int64_t i = 0; i < stride; i += LANES) {
      const Lanes weight = exponential(Float32::load(weights + i) - greatest);
      std::memcpy(weights + i, &weight, sizeof(weight));
    }
  }
  for (int64_t i = 0; i < count; ++i)  // one after another: slots that only others see add nothing, and move nothing
    for (int q = 0; q < QUERIES; ++q) totals[q] += room.weights[q * stride + i];
}

// The outputs of QUERIES tokens of a head, beginning with `first`.
template <class Type, int QUERIES, bool WHOLE>
void attend_tile(const Attention<Type>& work, int64_t row, int64_t head, int64_t first, Scratch& room) {
  look(work, row, head, first, QUERIES, room);
  float totals[QUERIES] = {};
  if (!room.seen.empty()) weigh<Type, QUERIES, WHOLE>(work, row, head, first, room, totals);
  const int64_t stride = room.seen.empty() ? 0 : room.weights.size() / QUERIES;
  const auto* values = work.values + row * work.value.row + head / work.groups * work.value.head;
  for (int64_t begin = 0; begin < work.width; begin += CHUNK * LANES) {
    Lanes sums[QUERIES][CHUNK] = {};
    for (size_t i = 0; i < room.seen.size(); ++i) {
      const auto* value = values + room.seen[i] * work.value.token + begin;
      for (int part = 0; part < CHUNK; ++part) {
        const Lanes taken = lanes<Type, WHOLE>(value + part * LANES, work.width - begin - part * LANES);
        for (int q = 0; q < QUERIES; ++q) sums[q][part] += taken * room.weights[q * stride + i];
      }
    }
    for (int q = 0; q < QUERIES; ++q) {
      float found[CHUNK * LANES];
      std::memcpy(found, sums[q], sizeof(found));
      auto* output = work.outputs + ((row * work.tokens + first + q) * work.heads + head) * work.width + begin;
      for (int64_t i = 0; i < std::min<int64_t>(CHUNK * LANES, work.width - begin); ++i)
        output[i] = Type::round(totals[q] == 0 ? 0 : found[i] / totals[q]);
    }
  }
}

template <class Type>
void attend_all(const Attention<Type>& work) {
  const int64_t tiles = (work.tokens + MOST_QUERIES - 1) / MOST_QUERIES;
  const int64_t cost = std::max<int64_t>(1, work.tokens * work.slots * work.width * 2 / std::max<int64_t>(1, tiles));
  const int64_t share = std::max<int64_t>(1, SHARE / cost);
  torch::stable::parallel_for(0, work.rows * work.heads * tiles, share, [&](int64_t begin, int64_t end) {
    Scratch room;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t part = item % tiles, head = item / tiles % work.heads, row = item / tiles / work.heads;
      const int64_t first = work.tokens * part / tiles;
      as_constant<MOST_QUERIES>(work.tokens * (part + 1) / tiles - first, [&](auto count) {
        if (work.width % (CHUNK * LANES) == 0)
          attend_tile<Type, decltype(count)::value, true>(work, row, head, first, room);
        else
          attend_tile<Type, decltype(count)::value, false>(work, row, head, first, room);
      });
    }
  });
}

// Steps over (rows, heads, tokens, width); a size of one is the same for all.
Steps steps(const Tensor& tensor) {
  const auto step = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
  return {step(0), step(1), step(2)};
}

template <class Type>
void run_attention(const Tensor& queries, const Tensor& keys, const Tensor& values, const std::optional<Tensor>& mask,
                   double scale, const Tensor& outputs) {
  using Item = typename Type::Item;
  const auto place = [](const Tensor& tensor) { return static_cast<const Item*>(tensor.data_ptr()); };
  attend_all<Type>({place(queries), place(keys), place(values), mask ? place(*mask) : nullptr,
                    static_cast<Item*>(outputs.data_ptr()), steps(queries), steps(keys), steps(values),
                    mask ? steps(*mask) : Steps{}, queries.size(0), queries.size(1), queries.size(1) / keys.size(1),
                    queries.size(2), keys.size(2), queries.size(3), static_cast<float>(scale)});
}

// Queries (rows, heads, tokens, width), keys and values (rows, fewer or as many heads, slots, width), and what is added
// to their products, (rows or 1, heads or 1, tokens or 1, slots) -> (rows, tokens, heads, width).
Tensor attend(Tensor queries, Tensor keys, Tensor values, std::optional<Tensor> mask, double scale) {
  for (const Tensor& tensor : {queries, keys, values, mask ? *mask : queries})
    STD_TORCH_CHECK(tensor.dim() == 4 && tensor.scalar_type() == queries.scalar_type() &&
                        (tensor.stride(3) == 1 || tensor.size(3) == 1),
                    "slipstream::attend: four dimensions, of which the last is dense, and one type");
  STD_TORCH_CHECK(keys.size(3) == queries.size(3) && values.size(3) == queries.size(3) && keys.size(2) == values.size(2) &&
                      keys.size(1) == values.size(1) && queries.size(1) % keys.size(1) == 0 &&
                      keys.size(0) == queries.size(0) && values.size(0) == queries.size(0),
                  "slipstream::attend: queries, keys and values do not fit");
  STD_TORCH_CHECK(!mask || (mask->size(3) == keys.size(2) && (mask->size(2) == 1 || mask->size(2) == queries.size(2)) &&
                            (mask->size(1) == 1 || mask->size(1) == queries.size(1)) &&
                            (mask->size(0) == 1 || mask->size(0) == queries.size(0))),
                  "slipstream::attend: the mask does not fit");
  const std::vector<int64_t> shape = {queries.size(0), queries.size(2), queries.size(1), queries.size(3)};
  Tensor outputs = torch::stable::new_empty(queries, shape);
  if (queries.scalar_type() == ScalarType::BFloat16)
    run_attention<BFloat16>(queries, keys, values, mask, scale, outputs);
  else if (queries.scalar_type() == ScalarType::Float)
    run_attention<Float32>(queries, keys, values, mask, scale, outputs);
  else
    STD_TORCH_CHECK(false, "slipstream::attend: float32 or bfloat16");
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY(slipstream, m) {
  m.def("attend(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
  m.def("linear(Tensor inputs, Tensor weight, Tensor? bias, int features) -> Tensor");
  m.def("linears(Tensor inputs, Tensor first, Tensor? first_bias, int first_features, Tensor second, "
        "Tensor? second_bias, int second_features, Tensor? third, Tensor? third_bias, int third_features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linears", TORCH_BOX(&linears));
}
