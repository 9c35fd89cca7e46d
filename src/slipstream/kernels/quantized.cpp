// Linear layers whose weights are whole numbers of 8 or 4 bits, with a scale for every group of inputs of a feature.
//
// Inputs become whole numbers of 8 bits too, every group of a row with a scale of its own. What is summed within a group
// is exact, in any order and on any processor; the sums of the groups are scaled and added one after another in float32.
// So a row has the same bits however many rows stand beside it, and whether tiles (AMX) multiply them or vectors.
//
// How weights lie in memory, and what they stand for, is in weights.h. Inputs may also stay as they are.

#include "lanes.h"
#include "parallel.h"
#include "weights.h"

namespace {

constexpr double ROUND = 6755399441055744;  // 1.5 * 2^52: what is added to it and taken off again is a whole number
constexpr float LEAST = 1e-30f;    // inputs below it are nothing

constexpr int WHOLE_ROWS = 6;  // whose sums of a group stay in registers
constexpr int MORE_ROWS = 8;   // which take turns with codes that stay there

// There is no instruction that adds four products, but one that adds two.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define PAIRS true
#else
#define PAIRS false
#endif

// Whether rows take turns with codes. With 16 registers this pays from four rows on, and where codes of 8 bits are
// multiplied by halves, for groups of 16.
template <class Form, int ROWS>
constexpr bool TURNS = PAIRS && (LANES == 16 || ROWS > 3) && (Form::BITS == 4 || Form::SCALE == Scale::STEPS);

using Inputs = slipstream::WholeInputs;

// The whole numbers nearest to exact products, of which the even ones if there are two: the same on any processor.
inline Lanes nearest(const Lanes& values, float factor) {
#if defined(__FMA__) || defined(__ARM_NEON)
  constexpr float WHOLE = 12582912;  // adding it leaves no place for fractions
  const Lanes product = values * factor, rest = fused(values, factor, -product);
  const Lanes code = product + WHOLE - WHOLE, half = product - code;
  return (half * half == 0.25f) & (half * rest > 0) ? code + 2 * half : code;
#else
  Lanes found;
  for (int i = 0; i < LANES; ++i) found[i] = static_cast<float>((values[i] * double{factor} + ROUND) - ROUND);
  return found;
#endif
}

// (Within the function that knows `Inputs`, compilers would fear that bytes change its members, and take one by one.)
inline void narrow(const int32_t* __restrict from, int64_t count, int8_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(from[i]);
}

// A group of which `count` inputs are given; those behind them are nothing. If one of them is not finite, neither is
// anything that the group is multiplied by.
template <class Type>
void quantize_group(const typename Type::Item* given, int64_t count, Inputs& inputs, int64_t row, int64_t group) {
  const int64_t place = group * inputs.rows + row, vectors = inputs.group / LANES;
  int8_t* codes = inputs.codes.data() + row * inputs.apart + group * inputs.group;
  typename Type::Item filled[MOST_GROUP];
  if (count < inputs.group) {
    std::fill(std::copy_n(given, count, filled), filled + inputs.group, 0);
    given = filled;
  }
  Words sizes = {};  // compared as bits, where infinities and what is not a number are greater than all else
  for (int64_t i = 0; i < vectors; ++i) {
    const Words size = (Words)Type::load(given + i * LANES) & 0x7fffffffu;
    sizes = size > sizes ? size : sizes;
  }
  uint32_t most = 0;
  for (int i = 0; i < LANES; ++i) most = std::max(most, sizes[i]);
  const float greatest = bits<float>(most);
  if (most >= 0x7f800000u) {
    inputs.scales[place] = inputs.totals[place] = std::numeric_limits<float>::quiet_NaN();
  } else if (greatest >= LEAST) {
    int32_t numbers[MOST_GROUP];
    Whole sums = {};
    for (int64_t i = 0; i < vectors; ++i) {
      const Whole found = __builtin_convertvector(nearest(Type::load(given + i * LANES), 127 / greatest), Whole);
      std::memcpy(numbers + i * LANES, &found, sizeof(found));
      sums += found;
    }
    narrow(numbers, vectors * LANES, codes);
    int32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += sums[i];
    inputs.scales[place] = greatest / 127;
    inputs.sums[place] = static_cast<float>(sum);
    inputs.totals[place] = inputs.scales[place] * inputs.sums[place];
  }
}

// A layer of a product, with bias and outputs in float32 if it is `wide`, else in bfloat16.
struct Layer : slipstream::QuantizedLayer {
  bool wide;

  // Writes a row's features of a panel.
  void write(int64_t panel, int64_t row, const float* sums) const {
    wide ? write_panel<Float32>(*this, panel, row, sums) : write_panel<BFloat16>(*this, panel, row, sums);
  }
};

// Sums of products of codes with inputs, within a group.
#if !PAIRS
template <int BITS, int ROWS>
struct Products {
  static constexpr int CHAINS = BITS == 4 && ROWS <= 2 ? 2 : 1;  // sums that wait for each other; many rows do not wait
  Whole sums[CHAINS] = {};

  // Adds the products of a step's codes of every feature with its inputs.
  void add(const Words& codes, const int8_t* inputs) {
    if constexpr (BITS == 8) return add_four(sums[0], codes, inputs);
    add_four(sums[0], codes & 0x0f0f0f0fu, inputs);
    add_four(sums[CHAINS - 1], (codes >> 4) & 0x0f0f0f0fu, inputs + QUAD);
  }

  void settle() {}
  Whole total() const { return CHAINS == 1 ? sums[0] : sums[0] + sums[CHAINS - 1]; }

 private:
  static void add_four(Whole& sum, const Words& codes, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof(four));
#if defined(__AVX512VNNI__)
    sum = (Whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    sum = (Whole)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four));
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t given = (int8x16_t)vdupq_n_s32(four), middle = vdupq_n_s8(BITS == 8 ? -128 : 0);
    sum = (Whole)vdotq_s32((int32x4_t)sum, (int8x16_t)codes ^ middle, given);  // codes of 8 bits less 128, with a sign
    if constexpr (BITS == 8) sum -= (Whole)vdotq_s32(int32x4_t{}, middle, given);
#else
    for (int i = 0; i < QUAD; ++i) sum += (Whole)((codes >> (8 * i)) & 0xffu) * static_cast<int32_t>(inputs[i]);
#endif
  }
};
#else
// Products of 4 bits and 8, and sums of 16 of them, fit into 16 bits: codes of 8 bits are multiplied by halves.
template <int BITS, int>
struct Products {
  typedef int16_t Short __attribute__((vector_size(4 * LANES)));

  Short sums[BITS == 8 ? 2 : 1] = {};
  Whole settled = {};

  void add(const Words& codes, const int8_t* inputs) {
    pairs(sums[0], codes & 0x0f0f0f0fu, inputs);
    pairs(sums[BITS == 8], (codes >> 4) & 0x0f0f0f0fu, inputs + (BITS == 8 ? 0 : QUAD));
  }

  void settle() {
    settled += joined(sums[0], 1);
    if constexpr (BITS == 8) settled += joined(sums[1], 16);
    for (Short& sum : sums) sum = Short{};
  }

  Whole total() const { return settled; }

#if defined(__AVX512BW__)
  static void pairs(Short& sum, const Words& codes, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof(four));
    sum += (Short)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(four));
  }

  static Whole joined(const Short& sum, int16_t factor) {
    return (Whole)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(factor));
  }
#else
  static void pairs(Short& sum, const Words& codes, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof(four));
    sum += (Short)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(four));
  }

  static Whole joined(const Short& sum, int16_t factor) {
    return (Whole)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(factor));
  }
#endif
};

// The products of LANES features' codes of STEPS with each row's inputs, or their sums with `found`.
template <int BITS, int STEPS, int ROWS, bool FIRST>
void take_turns(const uint8_t* codes, const int8_t* given, int64_t apart, Whole* found) {
  using Own = Products<BITS, ROWS>;
  constexpr int64_t STEP = QUAD * 8 / BITS, WIDTH = PANEL * QUAD;
  Words low[STEPS], high[STEPS];
  for (int step = 0; step < STEPS; ++step) {
    const Words some = (Words)vector_at(codes + step * WIDTH);
    low[step] = some & 0x0f0f0f0fu;
    high[step] = (some >> 4) & 0x0f0f0f0fu;
  }
  for (int r = 0; r < ROWS; ++r) {
    const int8_t* inputs = given + r * apart;
    asm("" : "+r"(inputs));  // else GCC reads the inputs of all rows first, and has no place for them
    typename Own::Short sums[2] = {};
    for (int step = 0; step < STEPS; ++step) {
      Own::pairs(sums[0], low[step], inputs + step * STEP);
      Own::pairs(sums[1], high[step], inputs + (step + 1) * STEP - QUAD);
    }
    const Whole four = Own::joined(BITS == 4 ? sums[0] + sums[1] : sums[0], 1);
    const Whole all = BITS == 4 ? four : four + Own::joined(sums[1], 16);
    found[r] = FIRST ? all : found[r] + all;
  }
}
#endif

// Adds a group's products, a row's with LANES features, to the row's sums. `own` is the place of the row's group. All is
// exact until it is scaled: no number has more than 24 bits.
template <class Form>
void add_group(Lanes& sum, const Whole& products, const Lanes& zero, const Lanes& scale, const Lanes& offset,
               const Inputs& inputs, int64_t own) {
  Lanes found = __builtin_convertvector(products, Lanes);
  if constexpr (Form::ZERO != Zero::OFFSET) found = fused(-zero, inputs.sums[own], found);
  sum = fused(found, scale * inputs.scales[own], sum);
  if constexpr (Form::ZERO == Zero::OFFSET) sum = fused(offset, inputs.totals[own], sum);
}

#if PAIRS
// A panel's features of ROWS rows, beginning with `row`, which take turns with the codes of STEPS.
template <class Form, int ROWS, int STEPS>
void tile_in_turns(const Layer& layer, const Inputs& inputs, int64_t panel, int64_t row) {
  constexpr int64_t STEP = QUAD * 8 / Form::BITS, VECTOR = LANES * QUAD, BYTES = STEPS * PANEL * QUAD;
  const int64_t apart = inputs.apart;
  const uint8_t* codes = layer.weight.codes + panel * inputs.groups * (inputs.group / STEP) * PANEL * QUAD;
  const int8_t* given = inputs.codes.data() + row * apart;
  Lanes sums[ROWS][PARTS] = {};
  for (int64_t group = 0; group < inputs.groups; ++group) {
    Whole found[PARTS][ROWS];
    for (int64_t begin = 0; begin < inputs.group; begin += STEPS * STEP, codes += BYTES, given += STEPS * STEP)
      for (int part = 0; part < PARTS; ++part) {
        prefetch(codes + part * BYTES / PARTS, BYTES / PARTS);
        begin ? take_turns<Form::BITS, STEPS, ROWS, false>(codes + part * VECTOR, given, apart, found[part])
              : take_turns<Form::BITS, STEPS, ROWS, true>(codes + part * VECTOR, given, apart, found[part]);
      }
    const Numbers<Form> numbers(layer.weight, panel, group);
    for (int part = 0; part < PARTS; ++part) {
      const Lanes zero = numbers.zeros(part), scale = numbers.scales(part), offset = numbers.offsets(part);
      for (int r = 0; r < ROWS; ++r)
        add_group<Form>(sums[r][part], found[part][r], zero, scale, offset, inputs, group * inputs.rows + row + r);
    }
  }
  for (int r = 0; r < ROWS; ++r) layer.write(panel, row + r, reinterpret_cast<const float*>(sums[r]));
}
#endif

// A panel's features of ROWS rows, beginning with `row`. Products are settled after at most 32 inputs.
template <class Form, int ROWS>
void tile(const Layer& layer, const Inputs& inputs, int64_t panel, int64_t row) {
#if PAIRS
  if constexpr (TURNS<Form, ROWS>)
    return Form::BITS == 4 && inputs.group % 32 ? tile_in_turns<Form, ROWS, 2>(layer, inputs, panel, row)
                                                : tile_in_turns<Form, ROWS, 4>(layer, inputs, panel, row);
#endif
  constexpr int BITS = Form::BITS;
  constexpr int64_t STEP = QUAD * 8 / BITS, WIDTH = PANEL * QUAD, VECTOR = LANES * QUAD;
  constexpr int WIDE = LANES == 16 ? PARTS : ROWS == 1 ? 4 : ROWS <= (BITS == 8 ? 2 : 3) ? 2 : 1;  // vectors of a panel
  const int64_t steps = inputs.group / STEP, run = std::min<int64_t>(inputs.group, 32) / STEP, apart = inputs.apart;
  const uint8_t* codes = layer.weight.codes + panel * inputs.groups * steps * WIDTH;
  const int8_t* given = inputs.codes.data() + row * apart;
  Lanes sums[ROWS][PARTS] = {};
  for (int64_t group = 0; group < inputs.groups; ++group, codes += steps * WIDTH, given += inputs.group) {
    const Numbers<Form> numbers(layer.weight, panel, group);
    for (int first = 0; first < PARTS; first += WIDE) {
      Products<BITS, ROWS> found[ROWS][WIDE];
      uintptr_t later = reinterpret_cast<uintptr_t>(codes) + AHEAD + first * VECTOR * steps;
      for (int64_t begin = 0; begin < steps; begin += run, later += WIDE * VECTOR * run) {
        for (int64_t line = 0; WIDE * VECTOR < LINE && line < WIDE * VECTOR * run; line += LINE) ask(later + line);
        const uint8_t* place = codes + begin * WIDTH + first * VECTOR;
        for (int64_t step = 0; step < run; ++step) {
          for (int64_t line = 0; line + LINE <= WIDE * VECTOR; line += LINE) ask(later + step * WIDE * VECTOR + line);
          for (int part = 0; part < WIDE; ++part) {
            const Words some = (Words)vector_at(place + step * WIDTH + part * VECTOR);
            for (int r = 0; r < ROWS; ++r) found[r][part].add(some, given + (begin + step) * STEP + r * apart);
          }
        }
        for (auto& parts : found)
          for (auto& products : parts) products.settle();
      }
      for (int part = 0; part < WIDE; ++part) {
        const Lanes zero = numbers.zeros(first + part), scale = numbers.scales(first + part);
        const Lanes offset = numbers.offsets(first + part);
        for (int r = 0; r < ROWS; ++r)
          add_group<Form>(sums[r][first + part], found[r][part].total(), zero, scale, offset, inputs,
                          group * inputs.rows + row + r);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) layer.write(panel, row + r, reinterpret_cast<const float*>(sums[r]));
}

#if defined(__AMX_INT8__) && defined(__AVX512F__)
// Products by Intel's tiles (AMX): up to 32 rows with a panel, up to 64 inputs of a group at a time. A few rows are as fast
// by vectors.
template <class Form>
class Tiles {
 public:
  // How many rows, from the first one on, go by tiles.
  static int64_t rows(const Inputs& inputs) {
    const int64_t others = inputs.rows % (2 * SIDE);
    return tiles_allowed() ? inputs.rows - (others < SIDE ? others : 0) : 0;
  }

  explicit Tiles(const Inputs& inputs) : inputs_(inputs), depth_(std::min(inputs.group, SIDE * QUAD)) {}

  // A panel's features of the first `rows` rows.
  void fill(const Layer& layer, int64_t panel, int64_t rows) {
    for (int64_t row = 0; row < rows; row += 2 * SIDE) {
      const int64_t some = std::min(2 * SIDE, rows - row);
      tiles_.shape(some, depth_ / QUAD, depth_);
      some > SIDE ? sum<true>(layer, panel, row, some) : sum<false>(layer, panel, row, some);
    }
  }

 private:
  static constexpr int BITS = Form::BITS;
  static constexpr int64_t WIDTH = PANEL * QUAD;    // bytes of a step
  static constexpr int64_t STEP = QUAD * 8 / BITS;  // inputs of a step

  const Inputs& inputs_;
  const int64_t depth_;  // inputs of a tile
  AmxTiles tiles_;

  // A panel's features of `rows` rows. Tiles multiply a group while vectors scale and add the products of the one before.
  template <bool BOTH>
  void sum(const Layer& layer, int64_t panel, int64_t row, int64_t rows) const {
    alignas(LINE) Lanes sums[2 * SIDE][PARTS] = {};
    alignas(LINE) Whole products[2][PARTS * 2][SIDE];
    const int64_t groups = inputs_.groups, bytes = inputs_.group / STEP * WIDTH;
    const uint8_t* codes = layer.weight.codes + panel * groups * bytes;
    const int8_t* given = inputs_.codes.data() + row * inputs_.apart;
    multiply<BOTH>(codes, given, products[0]);
    for (int64_t group = 0; group < groups; ++group) {
      if (row == 0) prefetch(codes + group * bytes, bytes);
      const int64_t next = group + 1;
      if (next < groups) multiply<BOTH>(codes + next * bytes, given + next * inputs_.group, products[next % 2]);
      const Numbers<Form> numbers(layer.weight, panel, group);
      for (int tile = 0; tile < (BOTH ? 4 : 2); ++tile) {
        const int part = tile % PARTS;
        const int64_t first = tile / PARTS * SIDE, place = group * inputs_.rows + row + first;
        const Lanes zero = numbers.zeros(part), scale = numbers.scales(part), offset = numbers.offsets(part);
        const Whole* found = products[group % 2][tile];
        const auto add = [&](int r) {
          add_group<Form>(sums[first + r][part], found[r], zero, scale, offset, inputs_, place + r);
        };
        if (rows - first >= SIDE)
#pragma GCC unroll 16
          for (int r = 0; r < SIDE; ++r) add(r);
        else
          for (int r = 0; r < rows - first; ++r) add(r);
      }
    }
    for (int64_t r = 0; r < rows; ++r) layer.write(panel, row + r, reinterpret_cast<const float*>(sums[r]));
  }

  // A group's codes of a panel with its inputs of all rows.
  template <bool BOTH>
  inline __attribute__((always_inline)) void multiply(const uint8_t* codes, const int8_t* given,
                                                      Whole (*products)[SIDE]) const {
    zero_sums<BOTH>();
    for (int64_t first = 0; first < inputs_.group; first += depth_, codes += depth_ / STEP * WIDTH) {
      alignas(LINE) Words single[SIDE][PARTS];  // codes in bytes of their own
      const uint8_t* from = codes;
      if constexpr (BITS == 4) {
        for (int64_t step = 0; step < depth_ / STEP; ++step)
          for (int part = 0; part < PARTS; ++part) {
            const Words some = (Words)vector_at(codes + step * WIDTH + part * LINE);
            single[2 * step][part] = some & 0x0f0f0f0fu;
            single[2 * step + 1][part] = (some >> 4) & 0x0f0f0f0fu;
          }
        asm volatile("" ::"m"(single) : "memory");  // the intrinsic reads more than compilers know
        from = reinterpret_cast<const uint8_t*>(single);
      }
      _tile_loadd(4, given + first, inputs_.apart);
      _tile_loadd(6, from, WIDTH);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, from + LINE, WIDTH);
      _tile_dpbsud(1, 4, 7);
      if constexpr (BOTH) {
        _tile_loadd(5, given + SIDE * inputs_.apart + first, inputs_.apart);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
    store_sums<BOTH>(products, LINE, SIDE * LINE, 2 * SIDE * LINE);
  }
};
#else
// Products by tiles, which most processors do not have.
template <class Form>
struct Tiles {
  explicit Tiles(const Inputs&) {}
  static int64_t rows(const Inputs&) { return 0; }
  void fill(const Layer&, int64_t, int64_t) {}
};
#endif

// A panel's features of all rows, in tiles of nearly the same height.
template <class Form>
void fill(const Layer& layer, const Inputs& inputs, int64_t panel, Tiles<Form>& tiles) {
  const int64_t tiled = tiles.rows(inputs), others = inputs.rows - tiled;
  tiles.fill(layer, panel, tiled);
  constexpr int MOST = TURNS<Form, MORE_ROWS> ? MORE_ROWS : WHOLE_ROWS;
  const int64_t parts = (others + MOST - 1) / MOST;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t row = tiled + others * i / parts;
    as_constant<MOST>(tiled + others * (i + 1) / parts - row, [&](auto rows) {
      tile<Form, decltype(rows)::value>(layer, inputs, panel, row);
    });
  }
}

// Every thread takes its part of the panels of all layers.
template <class Form>
void multiply(const std::vector<Layer>& layers, const Inputs& inputs) {
  const int64_t cost = inputs.rows * inputs.groups * inputs.group * PANEL;
  int64_t panels = 0;
  for (const Layer& layer : layers) panels += panels_of(layer.features);
  slipstream::parallel_for(0, panels, share_of(cost), [&](int64_t begin, int64_t end) {
    Tiles<Form> tiles(inputs);
    for (const Layer& layer : layers) {
      const int64_t count = panels_of(layer.features);
      for (int64_t panel = std::max<int64_t>(0, begin); panel < std::min(count, end); ++panel)
        fill(layer, inputs, panel, tiles);
      begin -= count;
      end -= count;
    }
  });
}

// Inputs as they are (rows, width), in float32, with weights that become float32 group by group.
struct Plain {
  int64_t rows, groups, group, apart;
  std::vector<float> values;  // zero behind the width
};

template <class Type>
Plain plain(const typename Type::Item* given, int64_t rows, int64_t width, int64_t groups, int64_t group) {
  Plain inputs{rows, groups, group, groups * group, std::vector<float>(rows * groups * group)};
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < width; ++i) inputs.values[row * inputs.apart + i] = Type::widen(given[row * width + i]);
  return inputs;
}

// A panel's features of ROWS rows, beginning with `row`: products are added one after another, in the order of inputs.
template <class Form, int ROWS>
void plain_tile(const Layer& layer, const Plain& inputs, int64_t panel, int64_t row) {
  constexpr int BITS = Form::BITS;
  constexpr int64_t STEP = QUAD * 8 / BITS, WIDTH = PANEL * QUAD;
  const int64_t steps = inputs.group / STEP;
  const uint8_t* codes = layer.weight.codes + panel * inputs.groups * steps * WIDTH;
  const float* given = inputs.values.data() + row * inputs.apart;
  Lanes sums[ROWS][PARTS] = {};
  for (int64_t group = 0; group < inputs.groups; ++group) {
    const Numbers<Form> numbers(layer.weight, panel, group);
    for (int64_t step = 0; step < steps; ++step, codes += WIDTH, given += STEP) {
      prefetch(codes, WIDTH);
      for (int part = 0; part < PARTS; ++part) {
        const Lanes scale = numbers.scales(part), offset = numbers.offsets(part);
        const Whole zero = __builtin_convertvector(numbers.zeros(part), Whole);
        Words some;
        std::memcpy(&some, codes + part * LANES * QUAD, sizeof(some));
        for (int64_t i = 0; i < STEP; ++i) {
          const Whole code = (Whole)((some >> (8 * (i % QUAD) + 4 * (i / QUAD))) & ((1u << BITS) - 1)) - zero;
          Lanes weight = __builtin_convertvector(code, Lanes) * scale;
          if constexpr (Form::ZERO == Zero::OFFSET) weight += offset;
          for (int r = 0; r < ROWS; ++r) sums[r][part] = fused(weight, given[r * inputs.apart + i], sums[r][part]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) layer.write(panel, row + r, reinterpret_cast<const float*>(sums[r]));
}

template <class Form>
void multiply(const std::vector<Layer>& layers, const Plain& inputs) {
  constexpr int64_t SOME = 4;  // rows for which a weight is made once
  for (const Layer& layer : layers)
    slipstream::parallel_for(0, panels_of(layer.features), 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        int64_t row = 0;
        for (; row + SOME <= inputs.rows; row += SOME) plain_tile<Form, SOME>(layer, inputs, panel, row);
        for (; row < inputs.rows; ++row) plain_tile<Form, 1>(layer, inputs, panel, row);
      }
    });
}

template <class Type, class Given>
void run(const Given& inputs, std::span<const slipstream::QuantizedLayer> layers) {
  std::vector<Layer> found;
  for (const auto& layer : layers) found.push_back({layer, std::is_same_v<Type, Float32>});
  with_form(layers[0].weight, [&](auto form) { multiply<decltype(form)>(found, inputs); });
}

}  // namespace

void slipstream::WholeInputs::take(Number number, const void* inputs, int64_t own_rows, int64_t width, int64_t own_groups,
                                   int64_t own_group) {
  rows = own_rows, groups = own_groups, group = own_group;
  apart = groups * group + (groups * group % COLLIDING ? 0 : LINE);
  codes.assign(rows * apart, 0);
  for (auto* numbers : {&scales, &sums, &totals}) numbers->assign(rows * groups, 0);
  with_type(number, [&](auto type) {
    using Type = decltype(type);
    const auto* given = static_cast<const typename Type::Item*>(inputs);
    parallel_for(0, rows, share_of(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < groups; ++i)
          quantize_group<Type>(given + row * width + i * group, std::min(group, width - i * group), *this, row, i);
    });
  });
}

void slipstream::multiply(const WholeInputs& inputs, std::span<const QuantizedLayer> layers, Number number) {
  with_type(number, [&](auto type) { run<decltype(type)>(inputs, layers); });
}

void slipstream::multiply(Number number, const void* inputs, int64_t rows, int64_t width,
                          std::span<const QuantizedLayer> layers) {
  with_type(number, [&](auto type) {
    using Type = decltype(type);
    const Weights& first = layers[0].weight;
    const auto* given = static_cast<const typename Type::Item*>(inputs);
    run<Type>(plain<Type>(given, rows, width, first.groups, first.group), layers);
  });
}

void slipstream::read_rows(const Weights& weights, const int64_t* features, int64_t count, int64_t width, float* outputs) {
  with_form(weights, [&](auto form) {
    parallel_for(0, count, share_of(width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) write_row<decltype(form)>(weights, features[i], width, outputs + i * width);
    });
  });
}

// ---- operators of torch ---------------------------------------------------------------------------------------------

namespace {

// Inputs (..., width) -> (..., features). `whole`: the inputs become whole numbers.
Tensor quantized_linear(Tensor inputs, Tensor codes, Tensor scales, std::optional<Tensor> zeros, std::optional<Tensor> steps,
                        std::optional<Tensor> bias, int64_t features, int64_t bits, bool whole) {
  const Packed packed{codes, scales, zeros, steps};
  const slipstream::Number number = number_of(inputs, "quantized_linear");
  packed.check(features, bits);
  STD_TORCH_CHECK(!bias || (bias->numel() == features && bias->scalar_type() == inputs.scalar_type()),
                  "slipstream::quantized_linear: the bias does not fit");
  const int64_t group = packed.group(bits), most = group * packed.groups(), width = inputs.size(inputs.dim() - 1);
  STD_TORCH_CHECK(most - group < width && width <= most, "slipstream::quantized_linear: inputs of ", width,
                  " for groups of ", group);
  for (const Tensor& tensor : {inputs, bias ? *bias : inputs})
    STD_TORCH_CHECK(tensor.is_contiguous(), "slipstream::quantized_linear: tensors must be contiguous");
  std::vector<int64_t> shape(inputs.sizes().begin(), inputs.sizes().end());
  shape.back() = features;
  Tensor outputs = torch::stable::new_empty(inputs, shape);
  const slipstream::QuantizedLayer layer{packed.weights(bits), bias ? bias->data_ptr() : nullptr, features,
                                         outputs.data_ptr(), features};
  const int64_t rows = inputs.numel() / std::max<int64_t>(1, width);
  if (whole) {
    Inputs rounded;
    rounded.take(number, inputs.data_ptr(), rows, width, packed.groups(), group);
    slipstream::multiply(rounded, {&layer, 1}, number);
  } else {
    slipstream::multiply(number, inputs.data_ptr(), rows, width, {&layer, 1});
  }
  return outputs;
}

// Rows of weights in float32: (n) numbers of features -> (n, width), as they are read from an embedding.
Tensor quantized_rows(Tensor features, Tensor codes, Tensor scales, std::optional<Tensor> zeros,
                      std::optional<Tensor> steps, int64_t bits, int64_t width) {
  const Packed packed{codes, scales, zeros, steps};
  const int64_t count = features.numel(), most = codes.size(0) * PANEL, group = packed.group(bits);
  packed.check(most, bits);
  STD_TORCH_CHECK(features.scalar_type() == ScalarType::Long && features.is_contiguous() &&
                      width <= group * packed.groups(),
                  "slipstream::quantized_rows: numbers of features are int64, and rows have ", width, " inputs");
  Tensor outputs = torch::stable::new_empty(scales, {count, width}, ScalarType::Float);
  const int64_t* wanted = static_cast<const int64_t*>(features.data_ptr());
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(wanted[i] >= 0 && wanted[i] < most, "slipstream::quantized_rows: there is no feature ", wanted[i]);
  slipstream::read_rows(packed.weights(bits), wanted, count, width, static_cast<float*>(outputs.data_ptr()));
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("quantized_linear(Tensor inputs, Tensor codes, Tensor scales, Tensor? zeros, Tensor? steps, Tensor? bias, "
        "int features, int bits, bool whole) -> Tensor");
  m.def("quantized_rows(Tensor features, Tensor codes, Tensor scales, Tensor? zeros, Tensor? steps, int bits, int width) "
        "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  m.impl("quantized_rows", TORCH_BOX(&quantized_rows));
}
