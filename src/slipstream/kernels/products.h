// Products and attention over plain memory, as kernels call them from each other; torch's tensors come and go in the
// operators at the end of cpu.cpp, quantized.cpp and attention.cpp.
//
// Every function divides its work among torch's threads; within a parallel loop it runs on the calling thread.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace slipstream {

// The type of inputs, outputs and biases, and of weights that are not quantized.
enum class Number { FLOAT32, BFLOAT16 };

// A layer whose weight is in panels.
template <class Weight>
struct Layer {
  Weight weight;
  const void* bias;  // (features) or null
  int64_t features;
  void* outputs;  // of the first row; of the next ones `apart` items behind
  int64_t apart;
};

// ---- weights in float32 or bfloat16 (cpu.cpp) -----------------------------------------------------------------------

using PanelLayer = Layer<const void*>;

// Inputs (rows, width) and layers that read them.
void multiply(Number number, const void* inputs, int64_t rows, int64_t width, std::span<const PanelLayer> layers);

// ---- quantized weights (quantized.cpp; the layout is in weights.h) --------------------------------------------------

// Which code stands for the weight 0, or which weight the code 0 stands for.
enum class Zero { MIDDLE, CODE, OFFSET };

// How the scales of groups, and their offsets, are stored.
enum class Scale { BFLOAT16, FLOAT16, STEPS };

struct Weights {
  const uint8_t* codes;
  const uint16_t* scales;
  const void* zeros;    // bytes, or float16; or null
  const int8_t* steps;  // or null
  int64_t group, groups, blocks;
  int bits, shift = 0;  // a block has 1 << shift groups
  Zero zero;
  Scale scale;

  // Codes of so many bytes for each feature; `whole`: zeros, if there are any, are bytes; `half`: scales are float16.
  Weights(const void* codes, const void* scales, const void* zeros, const void* steps, int64_t bytes, int64_t groups,
          int64_t blocks, int64_t bits, bool whole, bool half)
      : codes(static_cast<const uint8_t*>(codes)), scales(static_cast<const uint16_t*>(scales)), zeros(zeros),
        steps(static_cast<const int8_t*>(steps)), group(bytes * 8 / bits / groups), groups(groups), blocks(blocks),
        bits(static_cast<int>(bits)), zero(!zeros ? Zero::MIDDLE : whole ? Zero::CODE : Zero::OFFSET),
        scale(steps ? Scale::STEPS : half ? Scale::FLOAT16 : Scale::BFLOAT16) {
    while (blocks << shift < groups) ++shift;
  }
};

using QuantizedLayer = Layer<Weights>;

// Inputs (rows, groups * group) as whole numbers from -127 to 127, with the scale of every group, the sum of its numbers,
// and their product, its total: (groups, rows). Rows of codes are `apart`, so that they do not push each other out of the
// cache. Memory is kept when others are taken.
struct WholeInputs {
  int64_t rows = 0, groups = 0, group = 0, apart = 0;
  std::vector<int8_t> codes;
  std::vector<float> scales, sums, totals;

  // Takes inputs (rows, width), where the last group may end behind the width.
  void take(Number number, const void* inputs, int64_t rows, int64_t width, int64_t groups, int64_t group);
};

// Whole inputs and layers with weights of one form and as many groups.
void multiply(const WholeInputs& inputs, std::span<const QuantizedLayer> layers, Number number);

// The same for inputs (rows, width) as they are.
void multiply(Number number, const void* inputs, int64_t rows, int64_t width, std::span<const QuantizedLayer> layers);

// The weights (count, width) of some features in float32, as embeddings are read.
void read_rows(const Weights& weights, const int64_t* features, int64_t count, int64_t width, float* outputs);

// ---- attention (attention.cpp) --------------------------------------------------------------------------------------

// Steps between rows, heads and tokens (or slots) of a tensor; 0 where one is the same for all.
struct Steps {
  int64_t row, head, token;
};

// Keys or values: numbers or, if there are scales, whole numbers of 8 bits with a scale for each slot of each head.
struct Stored {
  const void *items, *scales;
  Steps steps, scale_steps;
};

struct Attended {
  const void *queries, *mask;  // the mask is added to scaled products; null: all slots are seen
  void* outputs;               // (rows, tokens, heads, width)
  Stored keys, values;
  Steps query, masked;
  int64_t rows, heads, groups, tokens, slots, width;  // `groups`: query heads for one head of keys
  float scale;
};

void attend(Number number, const Attended& work);

// ---- laws (laws.cpp) ------------------------------------------------------------------------------------------------

// Laws or logits (rows, positions, vocabulary), the vocabulary in one piece.
struct Laws {
  const void* data;
  int64_t rows, positions, vocabulary, row_stride, stride;

  template <class Item>
  const Item* at(int64_t row, int64_t position) const {
    return static_cast<const Item*>(data) + row * row_stride + position * stride;
  }
};

// The greatest of the logits of each position, and the first index with it.
void greatest(Number number, const Laws& logits, float* values, int64_t* indices);

// For each row the first index at which its summed weights exceed that part of their total; rows are `apart`.
void inverse(const float* weights, int64_t rows, int64_t vocabulary, int64_t apart, const double* chances, int64_t* found);

}  // namespace slipstream
