// Quantized weights in memory, and the numbers that their codes stand for.
//
// What kernels do for every group is chosen when they are compiled, by a `Form`: the bits of codes, what zeros are, and how
// scales are stored.
//
// Codes have no sign: a weight is scale * (code - zero), where zero is the middle of the range unless `zeros` are given.
// Zeros of bytes are codes; zeros of float16 are offsets, and a weight is scale * code + offset.
// Codes lie in panels, as in cpu.cpp: (panels, inputs / STEP, PANEL, QUAD) bytes. A byte is one code of 8 bits (STEP 4),
// or two of 4 bits (STEP 8), of which the lower one belongs to an input in the first half of the step. Scales and zeros
// are (panels, groups, PANEL), in bfloat16 or float16.
// Where several groups form a block, scales and offsets are (panels, blocks, PANEL), and those of a group are `steps` of
// them: whole numbers (panels, groups, 1, PANEL), or with offsets (panels, groups, 2, PANEL). Both are float16 then.

#pragma once

#include "lanes.h"

namespace {

using slipstream::Scale;
using slipstream::Weights;
using slipstream::Zero;

constexpr int QUAD = 4;          // inputs that one instruction multiplies
constexpr int MOST_GROUP = 256;  // inputs that share a scale

template <int BITS_, Zero ZERO_, Scale SCALE_>
struct Form {
  static constexpr int BITS = BITS_;
  static constexpr Zero ZERO = ZERO_;
  static constexpr Scale SCALE = SCALE_;
};

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Signed __attribute__((vector_size(LANES)));

// Bytes as float32.
template <class Kind>
Lanes from_bytes(const void* place) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i own = _mm_loadl_epi64(static_cast<const __m128i*>(place));
  return (Lanes)_mm256_cvtepi32_ps(std::is_same_v<Kind, Signed> ? _mm256_cvtepi8_epi32(own) : _mm256_cvtepu8_epi32(own));
#else
  Kind own;
  std::memcpy(&own, place, sizeof(own));
  return __builtin_convertvector(own, Lanes);
#endif
}

// The numbers of a panel's features for a group.
template <class Form>
struct Numbers {
  static constexpr bool OFFSETS = Form::ZERO == Zero::OFFSET, STEPS = Form::SCALE == Scale::STEPS;

  const Weights& weights;
  int64_t place, step = 0;  // of the group's scales, and of its steps

  Numbers(const Weights& weights, int64_t panel, int64_t group) : weights(weights) {
    if constexpr (STEPS) {
      place = (panel * weights.blocks + (group >> weights.shift)) * PANEL;
      step = (panel * weights.groups + group) * (OFFSETS ? 2 : 1) * PANEL;
    } else {
      place = (panel * weights.groups + group) * PANEL;
    }
  }

  Lanes stepped(const Lanes& number, int64_t first) const {
    if constexpr (!STEPS) return number;
    return number * from_bytes<Signed>(weights.steps + step + first);
  }

  Lanes scales(int part) const {
    const uint16_t* from = weights.scales + place + part * LANES;
    if constexpr (Form::SCALE == Scale::BFLOAT16) return BFloat16::load(from);
    return stepped(Float16::load(from), part * LANES);
  }

  Lanes offsets(int part) const {
    if constexpr (!OFFSETS) return Lanes{};
    return stepped(Float16::load(static_cast<const uint16_t*>(weights.zeros) + place + part * LANES), PANEL + part * LANES);
  }

  // The codes of the weight 0; 0 where codes have offsets.
  Lanes zeros(int part) const {
    if constexpr (Form::ZERO != Zero::CODE) return Lanes{} + (OFFSETS ? 0.0f : 1 << (Form::BITS - 1));
    return from_bytes<Bytes>(static_cast<const uint8_t*>(weights.zeros) + place + part * LANES);
  }
};

// Writes the first `width` weights of a feature.
template <class Form>
void write_row(const Weights& weights, int64_t feature, int64_t width, float* to) {
  constexpr int64_t STEP = QUAD * 8 / Form::BITS;
  const int64_t group = weights.group;
  const int64_t panel = feature / PANEL, lane = feature % PANEL, part = lane / LANES;
  const uint8_t* codes = weights.codes + (panel * weights.groups * group / STEP * PANEL + lane) * QUAD;
  for (int64_t first = 0; first < width; first += group) {
    const Numbers<Form> numbers(weights, panel, first / group);
    const float scale = numbers.scales(part)[lane % LANES], offset = numbers.offsets(part)[lane % LANES];
    const float zero = numbers.zeros(part)[lane % LANES];
    for (int64_t i = first; i < std::min(width, first + group); ++i) {
      const uint8_t byte = codes[i / STEP * PANEL * QUAD + i % QUAD];
      const int32_t code = Form::BITS == 8 ? byte : (byte >> (i % STEP / QUAD * 4)) & 15;
      const float weight = (static_cast<float>(code) - zero) * scale;
      to[i] = Form::ZERO == Zero::OFFSET ? weight + offset : weight;
    }
  }
}

// A weight's tensors as the caller has them.
struct Packed {
  Tensor codes, scales;
  std::optional<Tensor> zeros, steps;

  int64_t groups() const { return steps ? steps->size(1) : scales.size(1); }
  int64_t group(int64_t bits) const { return codes.size(1) * QUAD * 8 / bits / groups(); }
  Weights weights(int64_t bits) const {
    return {codes.data_ptr(), scales.data_ptr(), zeros ? zeros->data_ptr() : nullptr, steps ? steps->data_ptr() : nullptr,
            codes.size(1) * QUAD, groups(), scales.size(1), bits, zeros && zeros->scalar_type() == ScalarType::Byte,
            scales.scalar_type() == ScalarType::Half};
  }

  void check(int64_t features, int64_t bits) const {
    STD_TORCH_CHECK(bits == 4 || bits == 8, "slipstream::quantized_linear: codes of ", bits, " bits");
    STD_TORCH_CHECK(codes.dim() == 4 && codes.size(0) == panels_of(features) && codes.size(2) == PANEL &&
                        codes.size(3) == QUAD && codes.scalar_type() == ScalarType::Byte,
                    "slipstream::quantized_linear: the codes are not packed for ", features, " features");
    const auto kind = scales.scalar_type();
    STD_TORCH_CHECK(scales.dim() == 3 && scales.size(0) == codes.size(0) && scales.size(1) > 0 &&
                        scales.size(2) == PANEL && (kind == ScalarType::Half || (kind == ScalarType::BFloat16 && !steps)),
                    "slipstream::quantized_linear: the scales do not fit the codes");
    STD_TORCH_CHECK(!zeros || (zeros->numel() == scales.numel() &&
                               ((kind == ScalarType::Half && zeros->scalar_type() == kind) ||
                                (!steps && zeros->scalar_type() == ScalarType::Byte))),
                    "slipstream::quantized_linear: the zeros do not fit the scales");
    STD_TORCH_CHECK(!steps || (steps->dim() == 4 && steps->size(0) == codes.size(0) && steps->size(1) > 0 &&
                               steps->size(2) == (zeros ? 2 : 1) && steps->size(3) == PANEL &&
                               steps->scalar_type() == ScalarType::Char),
                    "slipstream::quantized_linear: the steps do not fit the scales");
    const Weights all = weights(bits);
    const int64_t step = QUAD * 8 / bits, inputs = codes.size(1) * step;
    STD_TORCH_CHECK(all.blocks << all.shift == groups() && group(bits) * groups() == inputs && group(bits) % step == 0 &&
                        group(bits) <= MOST_GROUP,
                    "slipstream::quantized_linear: ", inputs, " inputs in ", groups(), " groups");
    for (const Tensor& tensor : {codes, scales, zeros ? *zeros : codes, steps ? *steps : codes})
      STD_TORCH_CHECK(tensor.is_contiguous(), "slipstream::quantized_linear: tensors must be contiguous");
  }
};

// Calls `run` with the form of a weight, if it is among those with these zeros and scales.
template <Zero ZERO, Scale SCALE, class Run>
void if_form(const Weights& weights, const Run& run) {
  if (weights.zero != ZERO || weights.scale != SCALE) return;
  weights.bits == 8 ? run(Form<8, ZERO, SCALE>()) : run(Form<4, ZERO, SCALE>());
}

template <class Run>
void with_form(const Weights& weights, const Run& run) {
  if_form<Zero::MIDDLE, Scale::BFLOAT16>(weights, run);
  if_form<Zero::CODE, Scale::BFLOAT16>(weights, run);
  if_form<Zero::MIDDLE, Scale::FLOAT16>(weights, run);
  if_form<Zero::CODE, Scale::FLOAT16>(weights, run);
  if_form<Zero::OFFSET, Scale::FLOAT16>(weights, run);
  if_form<Zero::MIDDLE, Scale::STEPS>(weights, run);
  if_form<Zero::OFFSET, Scale::STEPS>(weights, run);
}

}  // namespace
