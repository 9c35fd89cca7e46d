// Unpacks weights in the block formats of llama.cpp (GGUF) into the panels that weights.h describes, without rounding.
//
// A block holds the weights of one feature for 32 or 256 inputs. Its scale in float16 becomes a scale of the panels, the
// whole numbers by which the groups of a block multiply it become steps. Codes of less than 4 bits get 4, others get 8.

#include "lanes.h"
#include "parallel.h"
#include "weights.h"

namespace {

constexpr int MOST_BLOCK = 256, MOST_STEPS = 16;
constexpr int8_t IQ4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // in halves

// A block of a feature. Codes are those of the panels, with the weight 0 in their middle unless there is an offset.
struct Block {
  uint8_t codes[MOST_BLOCK];
  uint16_t scale = 0, offset = 0;
  int8_t steps[MOST_STEPS], offset_steps[MOST_STEPS];
};

inline uint16_t half_at(const uint8_t* place) { return static_cast<uint16_t>(place[0] | place[1] << 8); }
inline uint16_t negative(uint16_t half) { return half ^ 0x8000; }

// A format of blocks, by llama.cpp's number: the bits of codes in panels, the inputs and bytes of a block, the inputs of a
// group, and whether groups have offsets.
template <int NUMBER_, int BITS_, int INPUTS_, int BYTES_, int GROUP_, bool OFFSETS_ = false>
struct BlockFormat {
  static constexpr int NUMBER = NUMBER_, BITS = BITS_, INPUTS = INPUTS_, BYTES = BYTES_, GROUP = GROUP_;
  static constexpr bool OFFSETS = OFFSETS_;
};

// Codes of 4 bits in COUNT bytes: the lower ones first, then the upper ones.
template <int COUNT>
void halves(const uint8_t* __restrict from, uint8_t* __restrict to) {
  constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
  for (int i = 0; i < COUNT; i += 8) {
    uint64_t some;
    std::memcpy(&some, from + i, sizeof(some));
    const uint64_t low = some & LOW, high = some >> 4 & LOW;
    std::memcpy(to + i, &low, sizeof(low));
    std::memcpy(to + COUNT + i, &high, sizeof(high));
  }
}

// The same for 32 codes that stand for numbers of a table.
inline void from_table(const uint8_t* from, const int8_t* table, uint8_t* to) {
  halves<16>(from, to);
  for (int i = 0; i < 32; ++i) to[i] = static_cast<uint8_t>(table[to[i]] + 128);
}

// Codes of BITS bits in 32 bytes: the lowest ones of all bytes first.
template <int BITS>
void slices(const uint8_t* __restrict from, uint8_t* __restrict to) {
  for (int shift = 0; shift < 8; shift += BITS, to += 32)
    for (int i = 0; i < 32; ++i) to[i] = from[i] >> shift & ((1 << BITS) - 1);
}

// Adds `more`, and other codes that are moved up by SHIFT bits, to COUNT codes.
template <int COUNT, int SHIFT>
void add(const uint8_t* __restrict high, uint8_t more, uint8_t* __restrict codes) {
  for (int i = 0; i < COUNT; ++i) codes[i] = static_cast<uint8_t>(codes[i] + (high[i] << SHIFT) + more);
}

struct Q4_0 : BlockFormat<2, 4, 32, 18, 32> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    halves<16>(from + 2, to.codes);
  }
};

struct Q4_1 : BlockFormat<3, 4, 32, 20, 32, true> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    to.offset = half_at(from + 2);
    halves<16>(from + 4, to.codes);
  }
};

// Adds the fifth bits of 32 codes.
inline void add_fifth(const uint8_t* from, uint8_t* codes, int more) {
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] + ((from[i / 8] >> (i % 8) & 1) << 4) + more);
}

struct Q5_0 : BlockFormat<6, 8, 32, 22, 32> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    halves<16>(from + 6, to.codes);
    add_fifth(from + 2, to.codes, 128 - 16);
  }
};

struct Q5_1 : BlockFormat<7, 8, 32, 24, 32, true> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    to.offset = half_at(from + 2);
    halves<16>(from + 8, to.codes);
    add_fifth(from + 4, to.codes, 0);
  }
};

struct Q8_0 : BlockFormat<8, 8, 32, 34, 32> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 128;
  }
};

struct Q2_K : BlockFormat<10, 4, 256, 84, 16, true> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from + 80);
    to.offset = negative(half_at(from + 82));
    for (int i = 0; i < 16; ++i) {
      to.steps[i] = from[i] & 15;
      to.offset_steps[i] = from[i] >> 4;
    }
    for (int i = 0; i < 2; ++i) slices<2>(from + 16 + 32 * i, to.codes + 128 * i);
  }
};

struct Q3_K : BlockFormat<11, 4, 256, 110, 16> {
  static void unpack(const uint8_t* from, Block& to) {
    const uint8_t* scales = from + 96;
    to.scale = half_at(from + 108);
    for (int i = 0; i < 16; ++i) {
      const int low = scales[i % 8] >> (i / 8 * 4) & 15, high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
      to.steps[i] = static_cast<int8_t>((low | high << 4) - 32);
    }
    for (int i = 0; i < 2; ++i) slices<2>(from + 32 + 32 * i, to.codes + 128 * i);
    uint8_t high[256];
    slices<1>(from, high);
    add<256, 2>(high, 8 - 4, to.codes);
  }
};

// The steps of scales and offsets in 12 bytes, 6 bits each.
inline void unpack_steps(const uint8_t* from, Block& to) {
  for (int i = 0; i < 4; ++i) {
    to.steps[i] = from[i] & 63;
    to.offset_steps[i] = from[i + 4] & 63;
    to.steps[i + 4] = static_cast<int8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
    to.offset_steps[i + 4] = static_cast<int8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
  }
}

struct Q4_K : BlockFormat<12, 4, 256, 144, 32, true> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    to.offset = negative(half_at(from + 2));
    unpack_steps(from + 4, to);
    for (int i = 0; i < 4; ++i) halves<32>(from + 16 + 32 * i, to.codes + 64 * i);
  }
};

struct Q5_K : BlockFormat<13, 8, 256, 176, 32, true> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    to.offset = negative(half_at(from + 2));
    unpack_steps(from + 4, to);
    for (int i = 0; i < 4; ++i) halves<32>(from + 48 + 32 * i, to.codes + 64 * i);
    uint8_t high[256];
    slices<1>(from + 16, high);
    add<256, 4>(high, 0, to.codes);
  }
};

struct Q6_K : BlockFormat<14, 8, 256, 210, 16> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from + 208);
    std::memcpy(to.steps, from + 192, 16);
    uint8_t high[256];
    for (int i = 0; i < 2; ++i) {
      halves<64>(from + 64 * i, to.codes + 128 * i);
      slices<2>(from + 128 + 32 * i, high + 128 * i);
    }
    add<256, 4>(high, 128 - 32, to.codes);
  }
};

struct IQ4_NL : BlockFormat<20, 8, 32, 18, 32> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    from_table(from + 2, IQ4, to.codes);
  }
};

struct IQ4_XS : BlockFormat<23, 8, 256, 136, 32> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    const int high = half_at(from + 2);
    for (int i = 0; i < 8; ++i) {
      to.steps[i] = static_cast<int8_t>(((from[4 + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4) - 32);
      from_table(from + 8 + 16 * i, IQ4, to.codes + 32 * i);
    }
  }
};

struct TQ1_0 : BlockFormat<34, 4, 256, 54, 256> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from + 52);
    uint8_t* codes = trits(from, 32, 5, to.codes);
    trits(from + 48, 4, 4, trits(from + 32, 16, 5, codes));
  }

  // Bytes of `digits` of base 3, as fractions: the first ones of all of them, then the second ones.
  static uint8_t* trits(const uint8_t* from, int bytes, int digits, uint8_t* to) {
    for (int digit = 0, power = 1; digit < digits; ++digit, power *= 3)
      for (int i = 0; i < bytes; ++i) *to++ = ((static_cast<uint8_t>(from[i] * power) * 3) >> 8) + 8 - 1;
    return to;
  }
};

struct TQ2_0 : BlockFormat<35, 4, 256, 66, 256> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = half_at(from + 64);
    for (int i = 0; i < 2; ++i) slices<2>(from + 32 * i, to.codes + 128 * i);
    for (uint8_t& code : to.codes) code += 8 - 1;
  }
};

struct MXFP4 : BlockFormat<39, 8, 32, 17, 32> {
  static void unpack(const uint8_t* from, Block& to) {
    const int power = from[0] - 1;  // of 2, in bfloat16 with its bias, one less for the halves
    to.scale = static_cast<uint16_t>(power > 0 ? power << 7 : 0x40 >> -power);
    from_table(from + 1, E2M1, to.codes);
  }
};

// Where the panels of a weight are written to.
struct Panels {
  uint8_t* codes;
  uint16_t *scales, *offsets;
  int8_t* steps;
};

// Writes a feature's block into its place in a panel. `number` is the block's, among `blocks` of a feature.
template <class Format>
void place(const Block& block, const Panels& to, int64_t panel, int64_t lane, int64_t number, int64_t blocks) {
  constexpr int STEP = QUAD * 8 / Format::BITS, GROUPS = Format::INPUTS / Format::GROUP;
  uint8_t* codes = to.codes + ((panel * blocks + number) * (Format::INPUTS / STEP) * PANEL + lane) * QUAD;
  for (int i = 0; i < Format::INPUTS; i += STEP, codes += PANEL * QUAD) {
    uint32_t four, high = 0;
    std::memcpy(&four, block.codes + i, sizeof(four));
    if constexpr (Format::BITS == 4) std::memcpy(&high, block.codes + i + QUAD, sizeof(high));
    four |= high << 4;
    std::memcpy(codes, &four, sizeof(four));
  }
  const int64_t at = (panel * blocks + number) * PANEL + lane;
  to.scales[at] = block.scale;
  if constexpr (Format::OFFSETS) to.offsets[at] = block.offset;
  if constexpr (GROUPS > 1)
    for (int group = 0; group < GROUPS; ++group) {
      int8_t* steps = to.steps + ((panel * blocks + number) * GROUPS + group) * (Format::OFFSETS ? 2 : 1) * PANEL + lane;
      steps[0] = block.steps[group];
      if constexpr (Format::OFFSETS) steps[PANEL] = block.offset_steps[group];
    }
}

template <class Format>
void unpack_all(const uint8_t* from, int64_t features, int64_t blocks, const int64_t* order, const Panels& to) {
  slipstream::parallel_for(0, panels_of(features), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t number = 0; number < blocks; ++number)
        for (int64_t lane = 0; lane < PANEL; ++lane) {
          const int64_t feature = panel * PANEL + lane;
          Block block{};
          if (feature < features)
            Format::unpack(from + ((order ? order[feature] : feature) * blocks + number) * Format::BYTES, block);
          place<Format>(block, to, panel, lane, number, blocks);
        }
  });
}

// The bytes of a weight (features, bytes) in the format with llama.cpp's `number`, its features in an `order` -> panels:
// codes, scales, zeros and steps, which have to be of the right shapes.
void unpack_blocks(Tensor bytes, int64_t number, std::optional<Tensor> order, Tensor codes, Tensor scales,
                   std::optional<Tensor> zeros, std::optional<Tensor> steps) {
  const int64_t features = bytes.size(0);
  STD_TORCH_CHECK(bytes.dim() == 2 && bytes.is_contiguous() && bytes.scalar_type() == ScalarType::Byte,
                  "slipstream::unpack_blocks: blocks are bytes (features, n)");
  STD_TORCH_CHECK(!order || (order->numel() == features && order->scalar_type() == ScalarType::Long &&
                             order->is_contiguous()),
                  "slipstream::unpack_blocks: the order does not fit the features");
  const Panels to{static_cast<uint8_t*>(codes.data_ptr()), static_cast<uint16_t*>(scales.data_ptr()),
                  zeros ? static_cast<uint16_t*>(zeros->data_ptr()) : nullptr,
                  steps ? static_cast<int8_t*>(steps->data_ptr()) : nullptr};
  bool found = false;
  const auto with = [&](auto format) {
    using Format = decltype(format);
    if (number != Format::NUMBER) return;
    found = true;
    const int64_t blocks = bytes.size(1) / Format::BYTES;
    const Packed packed{codes, scales, zeros, steps};
    packed.check(features, Format::BITS);
    STD_TORCH_CHECK(blocks * Format::BYTES == bytes.size(1) && packed.group(Format::BITS) == Format::GROUP &&
                        scales.size(1) == blocks && packed.groups() * Format::GROUP == blocks * Format::INPUTS &&
                        zeros.has_value() == Format::OFFSETS,
                    "slipstream::unpack_blocks: the panels do not fit the blocks");
    const int64_t* own = order ? static_cast<const int64_t*>(order->data_ptr()) : nullptr;
    for (int64_t i = 0; own && i < features; ++i)
      STD_TORCH_CHECK(own[i] >= 0 && own[i] < features, "slipstream::unpack_blocks: there is no feature ", own[i]);
    unpack_all<Format>(static_cast<const uint8_t*>(bytes.data_ptr()), features, blocks, own, to);
  };
  with(Q4_0{}), with(Q4_1{}), with(Q5_0{}), with(Q5_1{}), with(Q8_0{}), with(Q2_K{}), with(Q3_K{}), with(Q4_K{});
  with(Q5_K{}), with(Q6_K{}), with(IQ4_NL{}), with(IQ4_XS{}), with(TQ1_0{}), with(TQ2_0{}), with(MXFP4{});
  STD_TORCH_CHECK(found, "slipstream::unpack_blocks: format ", number, " is not read");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("unpack_blocks(Tensor bytes, int number, Tensor? order, Tensor(a!) codes, Tensor(b!) scales, Tensor(c!)? zeros, "
        "Tensor(d!)? steps) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) { m.impl("unpack_blocks", TORCH_BOX(&unpack_blocks)); }
