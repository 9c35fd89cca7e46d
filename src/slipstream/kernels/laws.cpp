// What a round asks of laws over a whole vocabulary: in one reading of each, where single operations of torch would write
// and read them several times.
//
// A position is computed by one thread, in an order that depends on the vocabulary alone, so its numbers have the same
// bits whatever stands beside it.

#include "lanes.h"

namespace {

constexpr int64_t BLOCK = 64 * LANES;  // of a vocabulary: summed in float32; blocks are added in float64

// Laws or logits (rows, positions, vocabulary), the vocabulary in one piece.
template <class Type>
struct Laws {
  const typename Type::Item* data;
  int64_t rows, positions, vocabulary, row_stride, stride;

  explicit Laws(const Tensor& tensor)
      : data(static_cast<const typename Type::Item*>(tensor.data_ptr())), rows(tensor.size(0)), positions(tensor.size(1)),
        vocabulary(tensor.size(2)), row_stride(tensor.stride(0)), stride(tensor.stride(1)) {}

  const typename Type::Item* at(int64_t row, int64_t position) const { return data + row * row_stride + position * stride; }
};

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

Lanes above_zero(const Lanes& lanes) { return lanes > 0 ? lanes : Lanes{}; }

// Every position of so many rows, divided among threads.
template <class Run>
void for_positions(int64_t rows, int64_t positions, int64_t vocabulary, const Run& run) {
  torch::stable::parallel_for(0, rows * positions, std::max<int64_t>(1, SHARE / std::max<int64_t>(1, vocabulary)),
                              [&](int64_t begin, int64_t end) {
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

// Laws p and q and weights (rows, positions) -> the sums of min(p, q) in float32, and of max(weight p - q, 0) in float64.
std::tuple<Tensor, Tensor> overlap(Tensor p, Tensor q, Tensor weights) {
  check(p, q);
  const Laws<Float32> ours(p), theirs(q);
  const std::vector<int64_t> shape = {theirs.rows, theirs.positions};
  STD_TORCH_CHECK(weights.scalar_type() == ScalarType::Double && weights.is_contiguous() &&
                      weights.numel() == theirs.rows * theirs.positions,
                  "slipstream::overlap: weights for other positions");
  Tensor shared = torch::stable::new_empty(p, shape, ScalarType::Float);
  Tensor excess = torch::stable::new_empty(p, shape, ScalarType::Double);
  for_positions(theirs.rows, theirs.positions, theirs.vocabulary, [&](int64_t i, int64_t row, int64_t position) {
    const float weight = static_cast<float>(static_cast<const double*>(weights.data_ptr())[i]);
    double both = 0, rest = 0;
    Lanes less = {}, more = {};
    in_blocks(ours.at(row, position), theirs.at(row, position), theirs.vocabulary,
              [&](const Lanes& left, const Lanes& right, int64_t) {
                less += left < right ? left : right;
                more += above_zero(left * weight - right);
              },
              [&] {
                both += total(less);
                rest += total(more);
                less = more = Lanes{};
              });
    static_cast<float*>(shared.data_ptr())[i] = static_cast<float>(both);
    static_cast<double*>(excess.data_ptr())[i] = rest;
  });
  return {shared, excess};
}

// Writes max(weight p - q, 0) divided by its sum. Returns false, and has written nothing, where that is nothing.
bool write_residual(const float* p, const float* q, float weight, int64_t vocabulary, float* output) {
  double sum = 0;
  Lanes part = {};
  in_blocks(p, q, vocabulary,
            [&](const Lanes& left, const Lanes& right, int64_t) { part += above_zero(left * weight - right); },
            [&] {
              sum += total(part);
              part = Lanes{};
            });
  if (!(sum > 0)) return false;
  in_blocks(p, q, vocabulary,
            [&](const Lanes& left, const Lanes& right, int64_t place) {
              const Lanes found = above_zero(left * weight - right) / static_cast<float>(sum);
              std::memcpy(output + place, &found, std::min<int64_t>(LANES, vocabulary - place) * sizeof(float));
            },
            [] {});
  return true;
}

// The law after `accepted` (rows) tokens -> (rows, 1, vocabulary): after a refusal the residual norm(max(weight p - q, 0)),
// with weights (rows), or p where that is nothing; after all tokens p.
Tensor following(Tensor p, Tensor q, Tensor accepted, Tensor refused, Tensor weights) {
  check(p, q);
  const Laws<Float32> ours(p), theirs(q);
  STD_TORCH_CHECK(accepted.scalar_type() == ScalarType::Long && refused.scalar_type() == ScalarType::Bool &&
                      weights.scalar_type() == ScalarType::Double && accepted.numel() == ours.rows &&
                      refused.numel() == ours.rows && weights.numel() == ours.rows && accepted.is_contiguous() &&
                      refused.is_contiguous() && weights.is_contiguous(),
                  "slipstream::following: counts or weights for other rows");
  Tensor outputs = torch::stable::new_empty(p, std::vector<int64_t>{ours.rows, 1, ours.vocabulary});
  for_positions(ours.rows, 1, ours.vocabulary, [&](int64_t, int64_t row, int64_t) {
    const int64_t place = static_cast<const int64_t*>(accepted.data_ptr())[row];
    const bool rest = static_cast<const bool*>(refused.data_ptr())[row];
    STD_TORCH_CHECK(place >= 0 && place < (rest ? theirs.positions : ours.positions),
                    "slipstream::following: ", place, " tokens of ", theirs.positions);
    const float weight = static_cast<float>(static_cast<const double*>(weights.data_ptr())[row]);
    float* output = static_cast<float*>(outputs.data_ptr()) + row * ours.vocabulary;
    const float* law = ours.at(row, place);
    if (!rest || !write_residual(law, theirs.at(row, place), weight, ours.vocabulary, output))
      std::copy_n(law, ours.vocabulary, output);
  });
  return outputs;
}

// The greatest of a position's logits and where it first stands. What is not a number is greater than all else.
template <class Type>
void find_greatest(const typename Type::Item* logits, int64_t vocabulary, float& value, int64_t& index) {
  const int64_t whole = vocabulary / LANES * LANES;
  Lanes most = Lanes{} - std::numeric_limits<float>::infinity();
  Whole where = {}, place = {};
  for (int lane = 0; lane < LANES; ++lane) where[lane] = place[lane] = lane;
  for (int64_t i = 0; i < whole; i += LANES, place += LANES) {
    const Lanes some = Type::load(logits + i);
    const Whole above = (some > most) | ((some != some) & (most == most));
    most = above ? some : most;
    where = above ? place : where;
  }
  value = whole ? most[0] : Type::widen(logits[0]);
  index = 0;
  const auto see = [&](float other, int64_t at) {
    const bool above = other > value || (other != other && value == value);
    const bool same = other == value || (other != other && value != value);
    if (above || (same && at < index)) value = other, index = at;
  };
  if (whole) index = where[0];
  for (int lane = 0; lane < (whole ? LANES : 0); ++lane) see(most[lane], where[lane]);
  for (int64_t i = whole; i < vocabulary; ++i) see(Type::widen(logits[i]), i);
}

template <class Type>
void greatest_of(const Tensor& logits, const Tensor& values, const Tensor& indices) {
  const Laws<Type> all(logits);
  for_positions(all.rows, all.positions, all.vocabulary, [&](int64_t i, int64_t row, int64_t position) {
    find_greatest<Type>(all.at(row, position), all.vocabulary, static_cast<float*>(values.data_ptr())[i],
                        static_cast<int64_t*>(indices.data_ptr())[i]);
  });
}

// Logits (rows, positions, vocabulary) -> the greatest of each position in float32, and its index.
std::tuple<Tensor, Tensor> greatest(Tensor logits) {
  STD_TORCH_CHECK(logits.dim() == 3 && logits.size(2) > 0 && (logits.stride(2) == 1 || logits.size(2) == 1),
                  "slipstream::greatest: logits are (rows, positions, vocabulary)");
  const std::vector<int64_t> shape = {logits.size(0), logits.size(1)};
  Tensor values = torch::stable::new_empty(logits, shape, ScalarType::Float);
  Tensor indices = torch::stable::new_empty(logits, shape, ScalarType::Long);
  if (logits.scalar_type() == ScalarType::BFloat16)
    greatest_of<BFloat16>(logits, values, indices);
  else if (logits.scalar_type() == ScalarType::Float)
    greatest_of<Float32>(logits, values, indices);
  else
    STD_TORCH_CHECK(false, "slipstream::greatest: float32 or bfloat16");
  return {values, indices};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("overlap(Tensor p, Tensor q, Tensor weights) -> (Tensor, Tensor)");
  m.def("following(Tensor p, Tensor q, Tensor accepted, Tensor refused, Tensor weights) -> Tensor");
  m.def("greatest(Tensor logits) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("overlap", TORCH_BOX(&overlap));
  m.impl("following", TORCH_BOX(&following));
  m.impl("greatest", TORCH_BOX(&greatest));
}
