// What a round asks of laws over a whole vocabulary: in one reading of each, where single operations of torch would write
// and read them several times.
//
// A position is computed by one thread, in an order that depends on the vocabulary alone, so its numbers have the same
// bits whatever stands beside it.

#include "lanes.h"
#include "parallel.h"

namespace {

constexpr int64_t BLOCK = 64 * LANES;  // of a vocabulary: summed in float32; blocks are added in float64

using slipstream::Laws;

Laws laws_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.size(0), tensor.size(1), tensor.size(2), tensor.stride(0), tensor.stride(1)};
}

double total(const Lanes& lanes) {
  double sum = 0;
  for (int i = 0; i < LANES; ++i) sum += lanes[i];
  return sum;
}

// Calls `each(lanes of p, lanes of q, place)` for a vocabulary in blocks, and `end()` after each block. Lanes behind the
// vocabulary are zero.
template <class Each, class End>
void in_blocks(const float* p, const float* q, int64_t vocabulary, const Each& each, const End& end) {
  for (int64_t first = 0; first < vocabulary; first += BLOCK, end()) {
    const int64_t stop = std::min(vocabulary, first + BLOCK);
    int64_t place = first;
    for (; place + LANES <= stop; place += LANES) each(Float32::load(p + place), Float32::load(q + place), place);
    if (place < stop) {
      Lanes left = {}, right = {};
      std::memcpy(&left, p + place, (stop - place) * sizeof(float));
      std::memcpy(&right, q + place, (stop - place) * sizeof(float));
      each(left, right, place);
    }
  }
}

// max(weight p - q, 0)
Lanes excess(const Lanes& p, float weight, const Lanes& q) {
  const Lanes more = fused(p, weight, -q);
  return more > 0 ? more : Lanes{};
}

// Every position of so many rows, divided among threads.
template <class Run>
void for_positions(int64_t rows, int64_t positions, int64_t vocabulary, const Run& run) {
  slipstream::parallel_for(0, rows * positions, share_of(vocabulary), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i, i / positions, i % positions);
  });
}

void check(const Tensor& p, const Tensor& q) {
  for (const Tensor& law : {p, q})
    STD_TORCH_CHECK(law.dim() == 3 && law.scalar_type() == ScalarType::Float && (law.stride(2) == 1 || law.size(2) <= 1),
                    "slipstream: laws are (rows, positions, vocabulary) in float32");
  STD_TORCH_CHECK(p.size(0) == q.size(0) && p.size(1) >= q.size(1) && p.size(2) == q.size(2),
                  "slipstream: laws of other shapes");
}

// The sums of min(p, q), and of max(weight p - q, 0), over the vocabulary of a position.
std::pair<double, double> compare(const Laws& p, const Laws& q, int64_t row, int64_t position, float weight) {
  double both = 0, rest = 0;
  Lanes less = {}, more = {};
  in_blocks(p.at<float>(row, position), q.at<float>(row, position), q.vocabulary,
            [&](const Lanes& left, const Lanes& right, int64_t) {
              less += left < right ? left : right;
              more += excess(left, weight, right);
            },
            [&] {
              both += total(less);
              rest += total(more);
              less = more = Lanes{};
            });
  return {both, rest};
}

// Laws p and q -> the sums of min(p, q) at the positions of q.
Tensor overlap(Tensor p, Tensor q) {
  check(p, q);
  const Laws ours = laws_of(p), theirs = laws_of(q);
  Tensor shared = torch::stable::new_empty(p, std::vector<int64_t>{theirs.rows, theirs.positions}, ScalarType::Float);
  for_positions(theirs.rows, theirs.positions, theirs.vocabulary, [&](int64_t i, int64_t row, int64_t position) {
    static_cast<float*>(shared.data_ptr())[i] = static_cast<float>(compare(ours, theirs, row, position, 0).first);
  });
  return shared;
}

// Writes b_0..b_n of n drafted tokens: b_i = min(1, b_(i-1) p(x_i)/q(x_i)).
void write_survival(const Laws& ours, const Laws& theirs, int64_t row, const int64_t* tokens, double* b) {
  b[0] = 1;
  for (int64_t i = 0; i < theirs.positions; ++i) {
    STD_TORCH_CHECK(tokens[i] >= 0 && tokens[i] < theirs.vocabulary, "slipstream::block_tests: token ", tokens[i]);
    const double numerator = b[i] * ours.at<float>(row, i)[tokens[i]], denominator = theirs.at<float>(row, i)[tokens[i]];
    b[i + 1] = numerator < denominator ? numerator / denominator : numerator > 0;
  }
}

// Block verification of tokens (rows, n) that were drafted by the law q, up to each row's length -> b (rows, n + 1) and the
// weights (rows, n, 2) of the coins for "these stand" and "they do not" in float64, and the sums of min(p, q) in float32.
std::tuple<Tensor, Tensor, Tensor> block_tests(Tensor p, Tensor q, Tensor tokens, Tensor lengths) {
  check(p, q);
  const Laws ours = laws_of(p), theirs = laws_of(q);
  const int64_t rows = theirs.rows, count = theirs.positions;
  STD_TORCH_CHECK(tokens.scalar_type() == ScalarType::Long && tokens.is_contiguous() && tokens.numel() == rows * count &&
                      lengths.scalar_type() == ScalarType::Long && lengths.is_contiguous() && lengths.numel() == rows,
                  "slipstream::block_tests: tokens or lengths for other rows");
  Tensor survival = torch::stable::new_empty(p, std::vector<int64_t>{rows, count + 1}, ScalarType::Double);
  Tensor coins = torch::stable::new_empty(p, std::vector<int64_t>{rows, count, 2}, ScalarType::Double);
  Tensor shared = torch::stable::new_empty(p, std::vector<int64_t>{rows, count}, ScalarType::Float);
  const auto* drafted = static_cast<const int64_t*>(tokens.data_ptr());
  const auto* ends = static_cast<const int64_t*>(lengths.data_ptr());
  auto* b = static_cast<double*>(survival.data_ptr());
  const auto toss = [&](int64_t row, int64_t place, double rest) {  // the prefix of `place` tokens stands with its chance
    double* coin = static_cast<double*>(coins.data_ptr()) + 2 * (row * count + place - 1);
    const double stands = b[row * (count + 1) + place];
    coin[0] = place > ends[row] ? 0 : place == ends[row] ? stands : rest;
    coin[1] = place > ends[row] ? 1 : 1 - stands;
    if (!(coin[0] + coin[1] > 0)) coin[0] = 1;  // 0/0 stands for certainty
  };
  for (int64_t row = 0; row < rows; ++row) write_survival(ours, theirs, row, drafted + row * count, b + row * (count + 1));
  for_positions(rows, count, theirs.vocabulary, [&](int64_t i, int64_t row, int64_t position) {
    const float weight = static_cast<float>(b[row * (count + 1) + position]);
    const auto [both, rest] = compare(ours, theirs, row, position, weight);
    static_cast<float*>(shared.data_ptr())[i] = static_cast<float>(both);
    if (position > 0) toss(row, position, rest);
    if (position == count - 1) toss(row, count, 0);  // behind the last token there is no law of the draft
  });
  return {survival, coins, shared};
}

// Writes max(weight p - q, 0) divided by its sum. Returns false, and has written nothing, where that is nothing.
bool write_residual(const float* p, const float* q, float weight, int64_t vocabulary, float* output) {
  double sum = 0;
  Lanes part = {};
  in_blocks(p, q, vocabulary,
            [&](const Lanes& left, const Lanes& right, int64_t) { part += excess(left, weight, right); },
            [&] {
              sum += total(part);
              part = Lanes{};
            });
  if (!(sum > 0)) return false;
  in_blocks(p, q, vocabulary,
            [&](const Lanes& left, const Lanes& right, int64_t place) {
              const Lanes found = excess(left, weight, right) / static_cast<float>(sum);
              std::memcpy(output + place, &found, std::min<int64_t>(LANES, vocabulary - place) * sizeof(float));
            },
            [] {});
  return true;
}

// The law after `accepted` (rows) tokens -> (rows, 1, vocabulary): after a refusal the residual norm(max(weight p - q, 0)),
// with weights (rows), or p where that is nothing; after all tokens p.
Tensor following(Tensor p, Tensor q, Tensor accepted, Tensor refused, Tensor weights) {
  check(p, q);
  const Laws ours = laws_of(p), theirs = laws_of(q);
  STD_TORCH_CHECK(accepted.scalar_type() == ScalarType::Long && refused.scalar_type() == ScalarType::Bool &&
                      weights.scalar_type() == ScalarType::Double && accepted.numel() == ours.rows &&
                      refused.numel() == ours.rows && weights.numel() == ours.rows && accepted.is_contiguous() &&
                      refused.is_contiguous() && weights.is_contiguous(),
                  "slipstream::following: counts or weights for other rows");
  Tensor outputs = torch::stable::new_empty(p, std::vector<int64_t>{ours.rows, 1, ours.vocabulary});
  const auto* places = static_cast<const int64_t*>(accepted.data_ptr());
  const auto* rests = static_cast<const bool*>(refused.data_ptr());
  for (int64_t row = 0; row < ours.rows; ++row)  // here, since what a thread says is lost
    STD_TORCH_CHECK(places[row] >= 0 && places[row] < (rests[row] ? theirs.positions : ours.positions),
                    "slipstream::following: ", places[row], " tokens of ", theirs.positions);
  for_positions(ours.rows, 1, ours.vocabulary, [&](int64_t, int64_t row, int64_t) {
    const int64_t place = places[row];
    const bool rest = rests[row];
    const float weight = static_cast<float>(static_cast<const double*>(weights.data_ptr())[row]);
    float* output = static_cast<float*>(outputs.data_ptr()) + row * ours.vocabulary;
    const float* law = ours.at<float>(row, place);
    if (!rest || !write_residual(law, theirs.at<float>(row, place), weight, ours.vocabulary, output))
      std::copy_n(law, ours.vocabulary, output);
  });
  return outputs;
}

// The greatest of a position's logits and where it first stands. What is not a number is greater than all else.
// Several vectors are compared at once, since each comparison waits for the one before; the place is looked up then.
template <class Type>
void find_greatest(const typename Type::Item* logits, int64_t vocabulary, float& value, int64_t& index) {
  constexpr int64_t AT_ONCE = 4, STRIDE = AT_ONCE * LANES;
  const int64_t whole = vocabulary / STRIDE * STRIDE;
  Lanes most[AT_ONCE];
  Whole odd = {};  // lanes in which something was not a number
  for (Lanes& each : most) each = Lanes{} - std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < whole; i += STRIDE)
    for (int64_t part = 0; part < AT_ONCE; ++part) {
      const Lanes some = Type::load(logits + i + part * LANES);
      most[part] = some > most[part] ? some : most[part];
      odd |= some != some;
    }
  value = -std::numeric_limits<float>::infinity();
  bool broken = false;
  for (int lane = 0; lane < LANES; ++lane) {
    broken = broken || odd[lane];
    for (const Lanes& each : most) value = std::max(value, each[lane]);
  }
  for (int64_t i = whole; i < vocabulary; ++i) {
    const float other = Type::widen(logits[i]);
    broken = broken || other != other;
    value = std::max(value, other);
  }
  if (broken) value = std::numeric_limits<float>::quiet_NaN();
  const auto found = [&](int64_t i) {
    const float other = Type::widen(logits[i]);
    return broken ? other != other : other == value;
  };
  for (index = 0; index < whole && !broken; index += STRIDE) {
    Whole same = {};
    for (int64_t part = 0; part < AT_ONCE; ++part) same |= Type::load(logits + index + part * LANES) == value;
    uint64_t pairs[LANES / 2], any = 0;
    std::memcpy(pairs, &same, sizeof(same));
    for (const uint64_t pair : pairs) any |= pair;
    if (any) break;
  }
  while (!found(index)) ++index;
}

}  // namespace

void slipstream::greatest(Number number, const Laws& logits, float* values, int64_t* indices) {
  with_type(number, [&](auto type) {
    using Type = decltype(type);
    for_positions(logits.rows, logits.positions, logits.vocabulary, [&](int64_t i, int64_t row, int64_t position) {
      const auto* some = logits.at<typename Type::Item>(row, position);
      find_greatest<Type>(some, logits.vocabulary, values[i], indices[i]);
    });
  });
}

namespace {

// Logits (rows, positions, vocabulary) -> the greatest of each position in float32, and its index.
std::tuple<Tensor, Tensor> greatest(Tensor logits) {
  STD_TORCH_CHECK(logits.dim() == 3 && logits.size(2) > 0 && (logits.stride(2) == 1 || logits.size(2) == 1),
                  "slipstream::greatest: logits are (rows, positions, vocabulary)");
  const std::vector<int64_t> shape = {logits.size(0), logits.size(1)};
  Tensor values = torch::stable::new_empty(logits, shape, ScalarType::Float);
  Tensor indices = torch::stable::new_empty(logits, shape, ScalarType::Long);
  slipstream::greatest(number_of(logits, "greatest"), laws_of(logits), static_cast<float*>(values.data_ptr()),
                       static_cast<int64_t*>(indices.data_ptr()));
  return {values, indices};
}

// The sum of weights in float64: in lanes, which are added at the end.
template <class Item>
double sum_of(const Item* weights, int64_t count) {
  typedef double Doubles __attribute__((vector_size(8 * LANES)));
  typedef Item Items __attribute__((vector_size(sizeof(Item) * LANES)));
  Doubles lanes = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    Items some;
    std::memcpy(&some, weights + i, sizeof(some));
    lanes += __builtin_convertvector(some, Doubles);
  }
  double sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += lanes[lane];
  for (; i < count; ++i) sum += weights[i];
  return sum;
}

// The first index at which the summed weights exceed `chance` in [0, 1) of their total. One of weight zero is never found.
template <class Item>
int64_t find_inverse(const Item* weights, int64_t vocabulary, double chance) {
  std::vector<double> ends((vocabulary + BLOCK - 1) / BLOCK);  // the summed weights at the ends of blocks
  double sum = 0;
  for (int64_t block = 0; block < static_cast<int64_t>(ends.size()); ++block) {
    sum += sum_of(weights + block * BLOCK, std::min(BLOCK, vocabulary - block * BLOCK));
    ends[block] = sum;
  }
  const double aim = std::min(chance * sum, std::nextafter(sum, 0.0));  // the product may round up to the sum itself
  const int64_t block = std::upper_bound(ends.begin(), ends.end(), aim) - ends.begin();
  const int64_t first = block * BLOCK, stop = std::min(vocabulary, first + BLOCK);
  int64_t last = vocabulary - 1;
  double passed = block ? ends[block - 1] : 0;
  for (int64_t i = first; i < stop; ++i) {
    passed += weights[i];
    if (passed > aim) return i;
    if (weights[i] > 0) last = i;
  }
  return last;  // one by one, the weights of the block add up to a little less than in lanes
}

template <class Item>
void inverse_of(const Item* weights, int64_t rows, int64_t vocabulary, int64_t apart, const double* chances,
                int64_t* found) {
  for_positions(rows, 1, vocabulary, [&](int64_t i, int64_t row, int64_t) {
    found[i] = find_inverse(weights + row * apart, vocabulary, chances[i]);
  });
}

}  // namespace

void slipstream::inverse(const float* weights, int64_t rows, int64_t vocabulary, int64_t apart, const double* chances,
                         int64_t* found) {
  inverse_of(weights, rows, vocabulary, apart, chances, found);
}

namespace {

// Weights (rows, vocabulary) and chances (rows) in [0, 1) -> for each row the first index at which its summed weights exceed
// that part of their total.
Tensor inverse(Tensor weights, Tensor chances) {
  STD_TORCH_CHECK(weights.dim() == 2 && weights.size(1) > 0 && (weights.stride(1) == 1 || weights.size(1) == 1) &&
                      chances.scalar_type() == ScalarType::Double && chances.is_contiguous() &&
                      chances.numel() == weights.size(0),
                  "slipstream::inverse: weights are (rows, vocabulary), with a chance in float64 for each row");
  Tensor found = torch::stable::new_empty(chances, std::vector<int64_t>{weights.size(0)}, ScalarType::Long);
  const auto run = [&](auto item) {
    inverse_of(static_cast<const decltype(item)*>(weights.data_ptr()), weights.size(0), weights.size(1), weights.stride(0),
               static_cast<const double*>(chances.data_ptr()), static_cast<int64_t*>(found.data_ptr()));
  };
  if (weights.scalar_type() == ScalarType::Double)
    run(double());
  else if (weights.scalar_type() == ScalarType::Float)
    run(float());
  else
    STD_TORCH_CHECK(false, "slipstream::inverse: float32 or float64");
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("overlap(Tensor p, Tensor q) -> Tensor");
  m.def("following(Tensor p, Tensor q, Tensor accepted, Tensor refused, Tensor weights) -> Tensor");
  m.def("greatest(Tensor logits) -> (Tensor, Tensor)");
  m.def("block_tests(Tensor p, Tensor q, Tensor tokens, Tensor lengths) -> (Tensor, Tensor, Tensor)");
  m.def("inverse(Tensor weights, Tensor chances) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("overlap", TORCH_BOX(&overlap));
  m.impl("following", TORCH_BOX(&following));
  m.impl("greatest", TORCH_BOX(&greatest));
  m.impl("block_tests", TORCH_BOX(&block_tests));
  m.impl("inverse", TORCH_BOX(&inverse));
}
