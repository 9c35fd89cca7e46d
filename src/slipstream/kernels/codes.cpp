// Chooses codes of 8 or 4 bits for weights: the nearest ones, with the scale of each group that has the least error.

#include "lanes.h"
#include "parallel.h"

namespace {

constexpr float CUTS[] = {1, 0.94f, 0.88f, 0.82f};  // the parts of a group's range that are tried for 4 bits
constexpr int64_t MOST = 256;                       // inputs of a group

// The group of one feature, its codes around zero, and what it has cost to round.
struct Group {
  alignas(LINE) float weights[MOST];
  int64_t count;

  // The weight that is farthest from zero, the first of equals.
  float extreme() const {
    float found = weights[0];
    for (int64_t i = 1; i < count; ++i)
      if (std::fabs(weights[i]) > std::fabs(found)) found = weights[i];
    return found;
  }

  // Writes the nearest codes for a scale, and returns the squared error.
  float round(float scale, float least, float most, float* codes) const {
    constexpr float WHOLE = 12582912;  // adding it leaves no place for fractions: to the nearest, ties to even
    const float inverse = scale == 0 ? 0 : 1 / scale;
    Lanes errors = {};
    for (int64_t i = 0; i < count; i += LANES) {
      const Lanes some = Float32::load(weights + i);
      Lanes code = some * inverse + WHOLE - WHOLE;
      code = code < least ? Lanes{} + least : code > most ? Lanes{} + most : code;
      std::memcpy(codes + i, &code, sizeof(code));
      const Lanes error = fused(code, scale, -some);
      errors = fused(error, error, errors);
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += errors[lane];
    return sum;
  }
};

// Writes the codes of a group, and returns its scale in bfloat16.
uint16_t choose(const Group& group, int64_t bits, uint8_t* codes) {
  const float middle = bits == 8 ? 128 : 8, extreme = group.extreme();
  float best[MOST], tried[MOST], least = 0;
  uint16_t scale = 0;
  for (int cut = 0; cut < (bits == 8 ? 1 : 4); ++cut) {
    // Of 16 codes one more lies below zero than above it: the sign of a scale puts it on the side of the greatest weight.
    const float wide = bits == 8 ? std::fabs(extreme) / (middle - 1) : extreme * CUTS[cut] / -middle;
    const uint16_t some = BFloat16::round(wide);
    const float error = group.round(BFloat16::widen(some), -middle, middle - 1, tried);
    if (cut && !(error < least)) continue;
    least = error;
    scale = some;
    std::copy_n(tried, group.count, best);
  }
  for (int64_t i = 0; i < group.count; ++i) codes[i] = static_cast<uint8_t>(best[i] + middle);
  return scale;
}

template <class Type>
void choose_all(const Tensor& weight, int64_t size, int64_t bits, const Tensor& codes, const Tensor& scales) {
  const int64_t inputs = weight.size(1), groups = scales.size(1);
  const auto* data = static_cast<const typename Type::Item*>(weight.data_ptr());
  slipstream::parallel_for(0, weight.size(0), share_of(inputs), [&](int64_t begin, int64_t end) {
    for (int64_t feature = begin; feature < end; ++feature)
      for (int64_t g = 0; g < groups; ++g) {
        Group group;
        group.count = size;
        for (int64_t i = 0; i < size; ++i) {
          const int64_t input = g * size + i;
          group.weights[i] = input < inputs ? Type::widen(data[feature * inputs + input]) : 0;
        }
        const int64_t place = feature * groups + g;
        static_cast<uint16_t*>(scales.data_ptr())[place] =
            choose(group, bits, static_cast<uint8_t*>(codes.data_ptr()) + place * size);
      }
  });
}

// A weight (features, inputs) -> codes (features, groups * size), the middle of which is zero, and scales (features, groups)
// in bfloat16. Inputs that only fill up the last group have the weight zero.
std::tuple<Tensor, Tensor> nearest_codes(Tensor weight, int64_t size, int64_t bits) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && size % 16 == 0 && size <= MOST && (bits == 8 || bits == 4),
                  "slipstream::nearest_codes: weights are (features, inputs), in groups of 16 to 256, with 8 or 4 bits");
  const int64_t groups = (weight.size(1) + size - 1) / size;
  Tensor codes = torch::stable::new_empty(weight, std::vector<int64_t>{weight.size(0), groups * size}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(weight, std::vector<int64_t>{weight.size(0), groups}, ScalarType::BFloat16);
  with_type(number_of(weight, "nearest_codes"),
            [&](auto type) { choose_all<decltype(type)>(weight, size, bits, codes, scales); });
  return {codes, scales};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("nearest_codes(Tensor weight, int size, int bits) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) { m.impl("nearest_codes", TORCH_BOX(&nearest_codes)); }
