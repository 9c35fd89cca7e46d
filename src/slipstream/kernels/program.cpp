// Runs recorded functions: lists of instructions over memory that is there already, with neither Python nor torch between
// them. execution/recording.py makes the lists; numbers of instructions are places in CODES of execution/instructions.py.
//
// Every number is computed from others in an order that depends on sizes of one token alone, never on how many rows and
// tokens stand beside it: so a token has the same bits in every pass.

#include <array>
#include <deque>

#include "lanes.h"
#include "parallel.h"
#include "products.h"

namespace {

constexpr int MOST_DIMS = 6;
constexpr int64_t BLOCK = 256;                 // numbers that are computed at a time
constexpr int64_t CHUNK = 16 * BLOCK;          // of them that a thread takes at a time
constexpr int CHAINS = 16;                     // sums that are added in turns, whatever the processor's vectors are
constexpr int64_t ABSENT = -(int64_t{1} << 40);  // what stands for an operand that is not there

enum Code : int64_t {
  COPY, NEG, ABS, EXP, LOG, LOG1P, SQRT, RSQRT, RECIPROCAL, SIN, COS, TANH, SIGMOID, SILU, RELU, GELU, GELU_TANH, FLOOR,
  CEIL, ROUND, NOT, ISNAN, ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, POW, EQ, NE, LT, LE, GT, GE, AND, OR, FLOOR_DIVIDE, WHERE,
  ARANGE, SUM, MEAN, AMAX, ARGMAX, SOFTMAX, LAYER_NORM, GATHER, SCATTER, MATMUL, LINEAR, QUANTIZED_LINEAR, QUANTIZED_ROWS,
  ATTEND, GREATEST, INVERSE, REMAINDER,
};

enum class Type : int64_t { FLOAT32, BFLOAT16, FLOAT64, INT64, INT32, BOOL, INT8, UINT8, FLOAT16, INT16, COMPLEX64 };
constexpr int64_t BYTES[] = {4, 2, 8, 8, 4, 1, 1, 1, 2, 2, 8};

// Calls `run` with the item of a type, and whether it is a bfloat16.
template <class Run>
void with_item(Type type, const Run& run) {
  using Yes = std::true_type;
  using No = std::false_type;
  switch (type) {
    case Type::FLOAT32: return run(float(), No());
    case Type::BFLOAT16: return run(uint16_t(), Yes());
    case Type::FLOAT64: return run(double(), No());
    case Type::INT64: return run(int64_t(), No());
    case Type::INT32: return run(int32_t(), No());
    case Type::INT8: return run(int8_t(), No());
    case Type::BOOL:
    case Type::UINT8: return run(uint8_t(), No());
    default: STD_TORCH_CHECK(false, "slipstream::program: there is no arithmetic with this type");
  }
}

bool whole(Type type) { return type >= Type::INT64 && type <= Type::UINT8; }

// ---- arrays ---------------------------------------------------------------------------------------------------------

// A number times some of the sizes that vary, which are bits of `symbols`.
struct Size {
  int64_t number = 0, symbols = 0;
};

// Where a tensor lies, in whatever memory a run has.
struct Form {
  int64_t storage;
  Type type;
  Size offset;
  int dims;
  std::array<Size, MOST_DIMS> sizes, strides;
};

// A tensor of a run; steps are counted in items. A number that stands for a tensor has no memory.
struct Array {
  char* data = nullptr;
  Type type = Type::FLOAT64;
  int dims = 0;
  int64_t sizes[MOST_DIMS] = {}, strides[MOST_DIMS] = {};
  double number = 0;
  bool absent = false;

  int64_t count() const {
    int64_t found = 1;
    for (int dim = 0; dim < dims; ++dim) found *= sizes[dim];
    return found;
  }

  char* at(int64_t place) const { return data + place * BYTES[static_cast<int>(type)]; }

  // The step of a dimension; 0 if all share one item.
  int64_t step(int dim) const { return sizes[dim] == 1 ? 0 : strides[dim]; }
};

using Arrays = std::vector<const Array*>;

// Arrays that are walked through together, the first of which has all dimensions: those that lie side by side in all of
// them become one. The last one is the inner one.
template <int COUNT>
struct Walk {
  int dims = 0;
  int64_t sizes[MOST_DIMS], steps[COUNT][MOST_DIMS];

  explicit Walk(const Array* const (&arrays)[COUNT]) {
    const Array& first = *arrays[0];
    for (int dim = 0; dim < first.dims; ++dim) {
      if (first.sizes[dim] == 1) continue;
      bool joins = dims > 0;
      for (int i = 0; joins && i < COUNT; ++i)
        joins = steps[i][dims - 1] == (arrays[i]->dims ? arrays[i]->strides[dim] : 0) * first.sizes[dim];
      if (!joins) sizes[dims++] = 1;
      sizes[dims - 1] *= first.sizes[dim];
      for (int i = 0; i < COUNT; ++i) steps[i][dims - 1] = arrays[i]->dims ? arrays[i]->strides[dim] : 0;
    }
    if (!dims) {
      sizes[dims++] = 1;
      for (auto& own : steps) own[0] = 0;
    }
  }

  int64_t inner() const { return sizes[dims - 1]; }

  int64_t outer() const {
    int64_t found = 1;
    for (int dim = 0; dim < dims - 1; ++dim) found *= sizes[dim];
    return found;
  }

  // Where a number of the outer dimensions begins in every array.
  void begin(int64_t number, int64_t (&places)[COUNT]) const {
    std::fill_n(places, COUNT, 0);
    for (int dim = dims - 2; dim >= 0; --dim) {
      for (int i = 0; i < COUNT; ++i) places[i] += number % sizes[dim] * steps[i][dim];
      number /= sizes[dim];
    }
  }

  // Calls `run(places, first, count)` for stretches of the inner dimension, divided among threads.
  template <class Run>
  void each(const Run& run) const {
    if (!inner() || !outer()) return;
    const int64_t chunks = (inner() + CHUNK - 1) / CHUNK;
    const int64_t grain = share_of(4 * std::min(inner(), CHUNK));
    slipstream::parallel_for(0, outer() * chunks, grain, [&](int64_t from, int64_t to) {
      for (int64_t item = from; item < to; ++item) {
        int64_t places[COUNT];
        begin(item / chunks, places);
        const int64_t first = item % chunks * CHUNK;
        run(places, first, std::min(CHUNK, inner() - first));
      }
    });
  }
};

// ---- numbers --------------------------------------------------------------------------------------------------------

template <class Compute>
void load(const Array& array, int64_t place, int64_t step, int64_t count, Compute* to) {
  if (!array.data) return (void)std::fill_n(to, count, static_cast<Compute>(array.number));
  with_item(array.type, [&](auto item, auto half) {
    const auto* from = reinterpret_cast<const decltype(item)*>(array.data) + place;
    const auto widen = [](auto value) {
      if constexpr (decltype(half)::value) return static_cast<Compute>(BFloat16::widen(value));
      else return static_cast<Compute>(value);
    };
    if (step == 1)
      for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
    else if (step == 0)
      std::fill_n(to, count, widen(*from));
    else
      for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i * step]);
  });
}

template <class Compute>
void store(const Array& array, int64_t place, int64_t step, int64_t count, const Compute* from) {
  with_item(array.type, [&](auto item, auto half) {
    auto* to = reinterpret_cast<decltype(item)*>(array.data) + place;
    const bool truth = array.type == Type::BOOL;
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (decltype(half)::value) to[i * step] = BFloat16::round(static_cast<float>(from[i]));
      else to[i * step] = truth ? from[i] != 0 : static_cast<decltype(item)>(from[i]);
    }
  });
}

// e to the power of -|x|, and what is made of it.
Lanes falling(const Lanes& x) { return exponential(x < 0 ? x : -x); }

Lanes sigmoid(const Lanes& x) {
  const Lanes e = falling(x);
  return (x < 0 ? e : Lanes{} + 1) / (1 + e);
}

Lanes tanh(const Lanes& x) {
  const Lanes e = falling(x + x), found = (1 - e) / (1 + e);
  const Lanes square = x * x, near = x - x * square * (1.0f / 3 - square * (2.0f / 15));  // where 1 - e has few digits
  const Whole small = square < 0.0025f;
  return small ? near : x < 0 ? -found : found;
}

// The error function by Abramowitz and Stegun 7.1.26, within 1.5e-7.
Lanes erf(const Lanes& x) {
  const Lanes size = x < 0 ? -x : x, t = 1 / (1 + 0.3275911f * size);
  Lanes sum = Lanes{} + 1.061405429f;
  for (float each : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fused(sum, t, Lanes{} + each);
  const Lanes found = 1 - sum * t * exponential(-size * size);
  return x < 0 ? -found : found;
}

template <class Run>
void by_lanes(int64_t count, const float* in, float* out, const Run& run) {  // both have room for a whole vector
  for (int64_t i = 0; i < count; i += LANES) {
    const Lanes found = run(Float32::load(in + i));
    std::memcpy(out + i, &found, sizeof(found));
  }
}

// A block of numbers, each of which is computed from its own operands.
template <class Compute>
void compute(Code code, int64_t count, const Compute* const* in, Compute* out) {
  const auto one = [&](const auto& run) {
    for (int64_t i = 0; i < count; ++i) out[i] = run(in[0][i]);
  };
  const auto two = [&](const auto& run) {
    for (int64_t i = 0; i < count; ++i) out[i] = run(in[0][i], in[1][i]);
  };
  using C = Compute;
  if constexpr (std::is_same_v<C, float>) {
    switch (code) {
      case SIGMOID: return by_lanes(count, in[0], out, sigmoid);
      case TANH: return by_lanes(count, in[0], out, [](const Lanes& x) { return tanh(x); });
      case SILU: return by_lanes(count, in[0], out, [](const Lanes& x) { return x * sigmoid(x); });
      case GELU:
        return by_lanes(count, in[0], out, [](const Lanes& x) { return 0.5f * x * (1 + erf(x * 0.70710678f)); });
      case GELU_TANH:
        return by_lanes(count, in[0], out, [](const Lanes& x) {
          return 0.5f * x * (1 + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
        });
      default: break;
    }
  }
  if constexpr (!std::is_integral_v<C>) {
    switch (code) {
      case EXP: return one([](C x) { return std::exp(x); });
      case LOG: return one([](C x) { return std::log(x); });
      case LOG1P: return one([](C x) { return std::log1p(x); });
      case SQRT: return one([](C x) { return std::sqrt(x); });
      case RSQRT: return one([](C x) { return 1 / std::sqrt(x); });
      case RECIPROCAL: return one([](C x) { return 1 / x; });
      case SIN: return one([](C x) { return std::sin(x); });
      case COS: return one([](C x) { return std::cos(x); });
      case FLOOR: return one([](C x) { return std::floor(x); });
      case CEIL: return one([](C x) { return std::ceil(x); });
      case ROUND: return one([](C x) { return std::nearbyint(x); });
      case ISNAN: return one([](C x) { return std::isnan(x); });
      case DIV: return two([](C x, C y) { return x / y; });
      case FLOOR_DIVIDE: return two([](C x, C y) { return std::floor(x / y); });
      case POW: return two([](C x, C y) { return std::pow(x, y); });
      default: break;
    }
  } else {
    if (code == FLOOR_DIVIDE) return two([](C x, C y) { return y ? x / y - (x % y != 0 && (x < 0) != (y < 0)) : 0; });
    if (code == REMAINDER) return two([](C x, C y) { return y ? (x % y + y) % y : 0; });
  }
  switch (code) {
    case COPY: return one([](C x) { return x; });
    case NEG: return one([](C x) { return -x; });
    case ABS: return one([](C x) { return x < 0 ? -x : x; });
    case RELU: return one([](C x) { return x < 0 ? C(0) : x; });
    case NOT: return one([](C x) { return C(x == 0); });
    case ADD: return two([](C x, C y) { return x + y; });
    case SUB: return two([](C x, C y) { return x - y; });
    case MUL: return two([](C x, C y) { return x * y; });
    case MAXIMUM: return two([](C x, C y) { return x != x || x > y ? x : y; });
    case MINIMUM: return two([](C x, C y) { return x != x || x < y ? x : y; });
    case EQ: return two([](C x, C y) { return C(x == y); });
    case NE: return two([](C x, C y) { return C(x != y); });
    case LT: return two([](C x, C y) { return C(x < y); });
    case LE: return two([](C x, C y) { return C(x <= y); });
    case GT: return two([](C x, C y) { return C(x > y); });
    case GE: return two([](C x, C y) { return C(x >= y); });
    case AND: return two([](C x, C y) { return C(x != 0 && y != 0); });
    case OR: return two([](C x, C y) { return C(x != 0 || y != 0); });
    case WHERE:
      for (int64_t i = 0; i < count; ++i) out[i] = in[0][i] != 0 ? in[1][i] : in[2][i];
      return;
    default: STD_TORCH_CHECK(false, "slipstream::program: instruction ", static_cast<int64_t>(code), " of such numbers");
  }
}

template <class Compute, int COUNT>
void elementwise(Code code, const Array* const (&arrays)[COUNT]) {
  constexpr bool REAL = std::is_floating_point_v<Compute>;
  constexpr Type OWN = !REAL ? Type::INT64 : sizeof(Compute) == sizeof(float) ? Type::FLOAT32 : Type::FLOAT64;
  const Walk<COUNT> walk(arrays);
  const Array& out = *arrays[0];
  const int64_t* steps[COUNT];
  for (int i = 0; i < COUNT; ++i) steps[i] = walk.steps[i] + walk.dims - 1;
  const bool plain = code == COPY && COUNT > 1 && arrays[COUNT - 1]->data && arrays[COUNT - 1]->type == out.type &&
                     *steps[0] == 1 && *steps[COUNT - 1] == 1;
  walk.each([&](const int64_t (&places)[COUNT], int64_t first, int64_t count) {
    if (plain)
      return (void)std::memcpy(out.at(places[0] + first), arrays[COUNT - 1]->at(places[COUNT - 1] + first),
                               count * BYTES[static_cast<int>(out.type)]);
    alignas(LINE) Compute blocks[COUNT][BLOCK];
    for (int64_t begin = first; begin < first + count; begin += BLOCK) {
      const int64_t some = std::min(BLOCK, first + count - begin);
      Compute* used[COUNT];  // numbers that lie side by side are computed where they lie, in whole vectors
      for (int i = COUNT - 1; i >= 0; --i) {
        const int64_t place = places[i] + begin * *steps[i];
        const bool lies = arrays[i]->data && arrays[i]->type == OWN && *steps[i] == 1 && some % LANES == 0;
        used[i] = lies ? reinterpret_cast<Compute*>(arrays[i]->data) + place : blocks[i];
        if (i && !lies) load(*arrays[i], place, *steps[i], some, blocks[i]);
      }
      compute<Compute>(code, some, used + 1, used[0]);
      if (used[0] == blocks[0]) store(out, places[0] + begin * *steps[0], *steps[0], some, blocks[0]);
    }
  });
}

// Whole numbers are computed as such, doubles in double precision, and all others in float32.
template <int COUNT>
void elementwise(Code code, const Array* const (&arrays)[COUNT]) {
  bool all = whole(arrays[0]->type), doubled = false;
  for (const Array* array : arrays) {
    all &= array->data ? whole(array->type) : array->number == std::floor(array->number);
    doubled |= array->data && array->type == Type::FLOAT64;
  }
  all ? elementwise<int64_t>(code, arrays) : doubled ? elementwise<double>(code, arrays) : elementwise<float>(code, arrays);
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// Sums in CHAINS, which are put together by halves.
template <class Compute, class Of>
Compute sum(int64_t count, const Of& of) {
  Compute chains[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS <= count; i += CHAINS)
    for (int lane = 0; lane < CHAINS; ++lane) chains[lane] += of(i + lane);
  for (int lane = 0; i + lane < count; ++lane) chains[lane] += of(i + lane);
  for (int half = CHAINS / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) chains[lane] += chains[lane + half];
  return chains[0];
}

// Calls `run(row, numbers)` with every row of the last `reduced` dimensions of an array.
template <class Compute, class Run>
void for_rows(const Array& array, int reduced, const Run& run) {
  Array outer = array, inner = array;
  outer.dims = array.dims - reduced;
  inner.dims = reduced;
  std::copy_n(array.sizes + outer.dims, reduced, inner.sizes);
  std::copy_n(array.strides + outer.dims, reduced, inner.strides);
  const int64_t width = inner.count();
  if (!outer.count()) return;
  const Walk<1> rows({&outer}), places({&inner});
  slipstream::parallel_for(0, outer.count(), share_of(4 * width), [&](int64_t from, int64_t to) {
    std::vector<Compute> numbers(width + LANES);
    for (int64_t row = from; row < to; ++row) {
      int64_t start[1], place[1];
      rows.begin(row / rows.inner(), start);
      start[0] += row % rows.inner() * rows.steps[0][rows.dims - 1];
      for (int64_t i = 0; i < places.outer(); ++i) {
        places.begin(i, place);
        load(array, start[0] + place[0], places.steps[0][places.dims - 1], places.inner(),
             numbers.data() + i * places.inner());
      }
      run(row, numbers.data(), width);
    }
  });
}

// The place of a row in an array of as many rows, which has no other dimensions.
int64_t place_of(const Array& array, int64_t row) {
  int64_t place = 0;
  for (int dim = array.dims - 1; dim >= 0; --dim) {
    place += row % array.sizes[dim] * array.strides[dim];
    row /= array.sizes[dim];
  }
  return place;
}

template <class Compute>
void reduce(Code code, const Array& out, const Array& in, int reduced) {
  for_rows<Compute>(in, reduced, [&](int64_t row, const Compute* numbers, int64_t width) {
    Compute found;
    if (code == SUM || code == MEAN) {
      found = sum<Compute>(width, [&](int64_t i) { return numbers[i]; });
      if (code == MEAN) found /= static_cast<Compute>(width);
    } else {
      int64_t best = 0;
      for (int64_t i = 1; i < width && numbers[best] == numbers[best]; ++i)
        if (!(numbers[i] <= numbers[best])) best = i;
      found = code == AMAX ? numbers[best] : static_cast<Compute>(best);
      if (code == ARGMAX) {  // exact also where the numbers are floats
        const int64_t index = best;
        return store(out, place_of(out, row), 1, 1, &index);
      }
    }
    store(out, place_of(out, row), 1, 1, &found);
  });
}

// An array without its last dimension.
Array rows_of(const Array& array) {
  Array rows = array;
  --rows.dims;
  return rows;
}

void softmax(const Array& out, const Array& in) {
  const Array rows = rows_of(out);
  for_rows<float>(in, 1, [&](int64_t row, float* numbers, int64_t width) {
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < width; ++i) most = !(numbers[i] <= most) ? numbers[i] : most;
    if (std::isinf(most)) {  // nothing is seen
      std::fill_n(numbers, width, most < 0 ? 0 : std::numeric_limits<float>::quiet_NaN());
    } else {
      by_lanes(width, numbers, numbers, [&](const Lanes& x) { return exponential(x - most); });
      const float total = sum<float>(width, [&](int64_t i) { return numbers[i]; });
      for (int64_t i = 0; i < width; ++i) numbers[i] /= total;
    }
    store(out, place_of(rows, row), out.strides[out.dims - 1], width, numbers);
  });
}

void layer_norm(const Array& out, const Array& in, const Array& weight, const Array& bias, float eps) {
  const Array rows = rows_of(out);
  const int64_t width = in.sizes[in.dims - 1];
  std::vector<float> scale(width, 1), shift(width, 0);
  if (!weight.absent) load(weight, 0, weight.strides[0], width, scale.data());
  if (!bias.absent) load(bias, 0, bias.strides[0], width, shift.data());
  for_rows<float>(in, 1, [&](int64_t row, float* numbers, int64_t) {
    const float mean = sum<float>(width, [&](int64_t i) { return numbers[i]; }) / width;
    const float variance = sum<float>(width, [&](int64_t i) { return (numbers[i] - mean) * (numbers[i] - mean); }) / width;
    const float factor = 1 / std::sqrt(variance + eps);
    for (int64_t i = 0; i < width; ++i) numbers[i] = (numbers[i] - mean) * factor * scale[i] + shift[i];
    store(out, place_of(rows, row), out.strides[out.dims - 1], width, numbers);
  });
}

// Copies between an array and the places of another one that indices name along a dimension with this step and size.
template <bool TO>
void at_indices(const Array& array, const Array& other, const Array& indices, int64_t along, int64_t size) {
  STD_TORCH_CHECK(array.type == other.type && indices.type == Type::INT64, "slipstream::program: indices of other types");
  const Walk<3> walk({&array, &other, &indices});
  const int64_t bytes = BYTES[static_cast<int>(array.type)];
  const auto last = [&](int i) { return walk.steps[i][walk.dims - 1]; };
  const bool together = last(0) == 1 && last(1) == 1 && last(2) == 0;
  const auto* numbers = reinterpret_cast<const int64_t*>(indices.data);
  walk.each([&](const int64_t (&places)[3], int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; i += together ? count : 1) {
      int64_t index = numbers[places[2] + i * last(2)];
      index += index < 0 ? size : 0;
      STD_TORCH_CHECK(index >= 0 && index < size, "slipstream::program: index ", index, " of ", size);
      char *item = array.at(places[0] + i * last(0)), *indexed = other.at(places[1] + i * last(1) + index * along);
      std::memcpy(TO ? indexed : item, TO ? item : indexed, bytes * (together ? count : 1));
    }
  });
}

// Arrays (batch, m, k) and (batch, k, n): sums in the order of k, or in chains where k lies side by side.
void matmul(const Array& out, const Array& left, const Array& right) {
  const int64_t m = left.sizes[1], k = left.sizes[2], n = right.sizes[2];
  slipstream::parallel_for(0, left.sizes[0] * m, share_of(k * n), [&](int64_t from, int64_t to) {
    std::vector<float> own(k), other(std::max(k, n)), sums(n);
    for (int64_t item = from; item < to; ++item) {
      const int64_t batch = item / m, row = item % m, place = batch * right.strides[0];
      load(left, batch * left.strides[0] + row * left.strides[1], left.strides[2], k, own.data());
      if (right.strides[2] == 1) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t i = 0; i < k; ++i) {
          load(right, place + i * right.strides[1], 1, n, other.data());
          for (int64_t j = 0; j < n; ++j) sums[j] += own[i] * other[j];
        }
      } else {
        for (int64_t j = 0; j < n; ++j) {
          load(right, place + j * right.strides[2], right.strides[1], k, other.data());
          sums[j] = sum<float>(k, [&](int64_t i) { return own[i] * other[i]; });
        }
      }
      store(out, batch * out.strides[0] + row * out.strides[1], out.strides[2], n, sums.data());
    }
  });
}

// ---- kernels --------------------------------------------------------------------------------------------------------

slipstream::Number number_of(const Array& array) {
  STD_TORCH_CHECK(array.type == Type::FLOAT32 || array.type == Type::BFLOAT16, "slipstream::program: float32 or bfloat16");
  return array.type == Type::FLOAT32 ? slipstream::Number::FLOAT32 : slipstream::Number::BFLOAT16;
}

void linear(const Arrays& outs, const Arrays& in, const int64_t* features) {
  const int64_t width = in[0]->sizes[in[0]->dims - 1];
  std::vector<slipstream::PanelLayer> layers;
  for (size_t i = 0; i < outs.size(); ++i)
    layers.push_back({in[1 + 2 * i]->data, in[2 + 2 * i]->data, features[i], outs[i]->data, features[i]});
  slipstream::multiply(number_of(*in[0]), in[0]->data, in[0]->count() / width, width, layers);
}

slipstream::Weights weights_of(const Array* const* parts, int64_t bits) {
  const auto& [codes, scales, zeros, steps] = std::tie(*parts[0], *parts[1], *parts[2], *parts[3]);
  const int64_t blocks = scales.sizes[1], groups = steps.absent ? blocks : steps.sizes[1];
  return {codes.data, scales.data, zeros.data, steps.data, codes.sizes[1] * codes.sizes[3], groups, blocks, bits,
          zeros.type == Type::UINT8, scales.type == Type::FLOAT16};
}

void quantized_linear(const Arrays& outs, const Arrays& in, const int64_t* numbers) {
  const int64_t width = in[0]->sizes[in[0]->dims - 1], rows = in[0]->count() / width, *features = numbers + 2;
  std::vector<slipstream::QuantizedLayer> layers;
  for (size_t i = 0; i < outs.size(); ++i)
    layers.push_back({weights_of(&in[1 + 5 * i], numbers[0]), in[5 + 5 * i]->data, features[i], outs[i]->data, features[i]});
  const slipstream::Number number = number_of(*in[0]);
  if (!numbers[1]) return slipstream::multiply(number, in[0]->data, rows, width, layers);
  thread_local slipstream::WholeInputs rounded;
  rounded.take(number, in[0]->data, rows, width, layers[0].weight.groups, layers[0].weight.group);
  slipstream::multiply(rounded, layers, number);
}

void attend(const Array& out, const Arrays& in, float scale) {
  const auto& [queries, keys, values, mask] = std::tie(*in[0], *in[1], *in[2], *in[3]);
  const auto steps = [](const Array& array) -> slipstream::Steps {
    return array.absent ? slipstream::Steps{} : slipstream::Steps{array.step(0), array.step(1), array.step(2)};
  };
  const auto stored = [&](const Array& items, const Array& scales) -> slipstream::Stored {
    return {items.data, scales.data, steps(items), steps(scales)};
  };
  if (out.count())
    slipstream::attend(number_of(queries),
                       {queries.data, mask.data, out.data, stored(keys, *in[4]), stored(values, *in[5]), steps(queries),
                        steps(mask), queries.sizes[0], queries.sizes[1], queries.sizes[1] / keys.sizes[1], queries.sizes[2],
                        keys.sizes[2], queries.sizes[3], scale});
}

// ---- programs -------------------------------------------------------------------------------------------------------

enum class Memory : int64_t { CONSTANT, INPUT, OUTPUT, OWN };

struct Storage {
  Memory memory;
  int64_t place;  // an address, or the number of an input, of an output or of a piece of the program's own memory
};

struct Instruction {
  Code code;
  Arrays outs, ins;
  std::vector<int64_t> numbers;
};

class Program {
 public:
  explicit Program(const int64_t* words) : words_(words) {
    symbols_ = next();
    outside_ = next();
    storages_.resize(next());
    for (Storage& storage : storages_) storage = {static_cast<Memory>(next()), next()};
    slots_.resize(next());
    for (Size& slot : slots_) slot = size();
    forms_.resize(next());
    for (Form& form : forms_) {
      form.storage = next();
      form.type = static_cast<Type>(next());
      form.offset = size();
      form.dims = static_cast<int>(next());
      STD_TORCH_CHECK(form.dims <= MOST_DIMS, "slipstream::program: a tensor of ", form.dims, " dimensions");
      for (int dim = 0; dim < form.dims; ++dim) {
        form.sizes[dim] = size();
        form.strides[dim] = size();
      }
    }
    arrays_.resize(forms_.size());
    instructions_.resize(next());
    for (Instruction& each : instructions_) {
      each.code = static_cast<Code>(next());
      const std::vector<int64_t> outs = list(), ins = list();  // negative ones are numbers that stand for arrays
      const int64_t scalars = next();
      each.numbers = list();
      for (int64_t place : outs) each.outs.push_back(&arrays_[place]);
      for (int64_t place : ins) each.ins.push_back(place < 0 ? scalar(each, place) : &arrays_[place]);
      each.numbers.erase(each.numbers.begin(), each.numbers.begin() + scalars);
    }
  }

  // Runs instructions from `start` to `stop`. `given` are the sizes that vary, the address of the program's own memory, and
  // those of inputs and outputs.
  void run(const int64_t* given, int64_t count, int64_t start, int64_t stop) {
    STD_TORCH_CHECK(count == symbols_ + 1 + outside_ && start >= 0 && stop <= static_cast<int64_t>(instructions_.size()),
                    "slipstream::run_program: ", count, " numbers");
    if (!std::equal(given, given + count, given_.begin(), given_.end())) lay(given);
    given_.assign(given, given + count);
    for (int64_t i = start; i < stop; ++i) run(instructions_[i]);
  }

 private:
  const int64_t* words_;
  int64_t symbols_, outside_;
  std::vector<Storage> storages_;
  std::vector<Size> slots_;
  std::vector<Form> forms_;
  std::vector<Array> arrays_;  // of the forms, where they lie in this run
  std::deque<Array> scalars_;  // and numbers that stand for arrays
  std::vector<Instruction> instructions_;
  std::vector<int64_t> given_, products_, starts_;  // of a run; products of all sets of sizes, and where pieces begin

  int64_t next() { return *words_++; }

  std::vector<int64_t> list() {
    std::vector<int64_t> found(next());
    for (int64_t& each : found) each = next();
    return found;
  }

  Size size() {
    const int64_t number = next();
    return {number, next()};
  }

  int64_t value(const Size& size) const { return size.number * products_[size.symbols]; }

  const Array* scalar(const Instruction& instruction, int64_t place) {
    Array& made = scalars_.emplace_back();
    made.absent = place == ABSENT;
    if (!made.absent) made.number = bits<double>(instruction.numbers[-1 - place]);
    return &made;
  }

  // Finds where all arrays lie, and their sizes.
  void lay(const int64_t* given) {
    products_.assign(int64_t{1} << symbols_, 1);
    for (int64_t symbol = 0; symbol < symbols_; ++symbol)
      for (int64_t set = 0; set < static_cast<int64_t>(products_.size()); ++set)
        if (set >> symbol & 1) products_[set] *= given[symbol];
    starts_.clear();
    for (int64_t place = given[symbols_]; const Size& slot : slots_) {
      starts_.push_back(place);
      place += (value(slot) + LINE - 1) / LINE * LINE;
    }
    for (size_t i = 0; i < forms_.size(); ++i) {
      const Form& form = forms_[i];
      const auto& [memory, number] = storages_[form.storage];
      Array& array = arrays_[i];
      array.type = form.type;
      array.dims = form.dims;
      array.data = reinterpret_cast<char*>(memory == Memory::CONSTANT ? number
                                           : memory == Memory::OWN    ? (slots_.empty() ? 0 : starts_[number])
                                                                      : given[symbols_ + 1 + number]);
      array.data = array.at(value(form.offset));
      for (int dim = 0; dim < form.dims; ++dim) {
        array.sizes[dim] = value(form.sizes[dim]);
        array.strides[dim] = value(form.strides[dim]);
      }
    }
  }

  void run(const Instruction& instruction) {
    const auto& [code, outs, ins, given] = instruction;
    const int64_t* numbers = given.data();
    const Array& out = *outs[0];
    const auto real = [&](int64_t word) { return static_cast<float>(bits<double>(word)); };
    switch (code) {
      case ARANGE: return count_up(out, ins[0]->number, ins[1]->number);
      case SUM: case MEAN: case AMAX: case ARGMAX: {
        const int dims = static_cast<int>(numbers[0]);
        if (whole(ins[0]->type) && whole(out.type)) return reduce<int64_t>(code, out, *ins[0], dims);
        if (ins[0]->type == Type::FLOAT64) return reduce<double>(code, out, *ins[0], dims);
        return reduce<float>(code, out, *ins[0], dims);
      }
      case SOFTMAX: return softmax(out, *ins[0]);
      case LAYER_NORM: return layer_norm(out, *ins[0], *ins[1], *ins[2], real(numbers[0]));
      case GATHER:
        return at_indices<false>(out, *ins[0], *ins[1], value({numbers[0], numbers[1]}), value({numbers[2], numbers[3]}));
      case SCATTER:
        return at_indices<true>(*ins[0], out, *ins[1], value({numbers[0], numbers[1]}), value({numbers[2], numbers[3]}));
      case MATMUL: return matmul(out, *ins[0], *ins[1]);
      case LINEAR: return linear(outs, ins, numbers);
      case QUANTIZED_LINEAR: return quantized_linear(outs, ins, numbers);
      case QUANTIZED_ROWS: {
        const auto* rows = reinterpret_cast<const int64_t*>(ins[0]->data);
        for (int64_t i = 0; i < ins[0]->count(); ++i)
          STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < ins[1]->sizes[0] * PANEL, "slipstream::program: index ", rows[i]);
        return slipstream::read_rows(weights_of(&ins[1], numbers[0]), rows, ins[0]->count(),
                                     out.sizes[out.dims - 1], reinterpret_cast<float*>(out.data));
      }
      case ATTEND: return attend(out, ins, real(numbers[0]));
      case GREATEST: {
        const Array& logits = *ins[0];
        return slipstream::greatest(number_of(logits),
                                    {logits.data, logits.sizes[0], logits.sizes[1], logits.sizes[2], logits.strides[0],
                                     logits.strides[1]},
                                    reinterpret_cast<float*>(out.data), reinterpret_cast<int64_t*>(outs[1]->data));
      }
      case INVERSE:
        return slipstream::inverse(reinterpret_cast<const float*>(ins[0]->data), ins[0]->sizes[0], ins[0]->sizes[1],
                                   ins[0]->strides[0], reinterpret_cast<const double*>(ins[1]->data),
                                   reinterpret_cast<int64_t*>(out.data));
      default:
        switch (ins.size()) {
          case 1: return elementwise(code, {&out, ins[0]});
          case 2: return elementwise(code, {&out, ins[0], ins[1]});
          case 3: return elementwise(code, {&out, ins[0], ins[1], ins[2]});
          default: STD_TORCH_CHECK(false, "slipstream::program: ", ins.size(), " operands");
        }
    }
  }

  static void count_up(const Array& out, double start, double step) {
    for (int64_t i = 0; i < out.count(); ++i) {
      const double found = start + step * static_cast<double>(i);
      store(out, i * out.strides[0], 1, 1, &found);
    }
  }
};

// A list of instructions as words -> the number by which it is run and forgotten.
int64_t make(Tensor words) { return reinterpret_cast<int64_t>(new Program(static_cast<const int64_t*>(words.data_ptr()))); }

void run_program(Tensor given, int64_t program, int64_t start, int64_t stop) {
  reinterpret_cast<Program*>(program)->run(static_cast<const int64_t*>(given.data_ptr()), given.numel(), start, stop);
}

void forget(Tensor, int64_t program) { delete reinterpret_cast<Program*>(program); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("program(Tensor words) -> int");
  m.def("run_program(Tensor given, int program, int start, int stop) -> ()");
  m.def("forget_program(Tensor words, int program) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("program", TORCH_BOX(&make));
  m.impl("run_program", TORCH_BOX(&run_program));
  m.impl("forget_program", TORCH_BOX(&forget));
}
