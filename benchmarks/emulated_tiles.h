// Intel's tiles (AMX) in plain C++, for processors without them: `-include` this file, and define what the compiler would
// define for a processor that has them. A tile is 16 rows of 64 bytes, of which the shape says how many are used.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated_tiles {

inline thread_local struct State {
  uint8_t shapes[64];
  alignas(64) uint8_t items[8][16][64];

  int bytes(int tile) const { return reinterpret_cast<const uint16_t*>(shapes + 16)[tile]; }
  int rows(int tile) const { return shapes[48 + tile]; }
} state;

inline float widened(uint16_t number) {
  const uint32_t bits = uint32_t(number) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

inline void load(int tile, const void* from, int64_t stride) {
  std::memset(state.items[tile], 0, sizeof(state.items[tile]));
  for (int row = 0; row < state.rows(tile); ++row)
    std::memcpy(state.items[tile][row], static_cast<const char*>(from) + row * stride, state.bytes(tile));
}

inline void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < state.rows(tile); ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, state.items[tile][row], state.bytes(tile));
}

// sums (rows, columns) += left (rows, steps of 4 bytes) times right (steps, columns of 4 bytes)
template <class Sum, class Add>
void multiply(int sums, int left, int right, const Add& add) {
  for (int row = 0; row < state.rows(sums); ++row)
    for (int step = 0; step < state.bytes(left) / 4; ++step)
      for (int column = 0; column < state.bytes(sums) / 4; ++column) {
        Sum* sum = reinterpret_cast<Sum*>(state.items[sums][row]) + column;
        *sum = add(*sum, state.items[left][row] + 4 * step, state.items[right][step] + 4 * column);
      }
}

inline void multiply_bfloat16(int sums, int left, int right) {
  multiply<float>(sums, left, right, [](float sum, const void* first, const void* second) {
    const auto *a = static_cast<const uint16_t*>(first), *b = static_cast<const uint16_t*>(second);
    for (int i = 0; i < 2; ++i) sum = std::fma(widened(a[i]), widened(b[i]), sum);
    return sum;
  });
}

inline void multiply_int8(int sums, int left, int right) {
  multiply<int32_t>(sums, left, right, [](int32_t sum, const void* first, const void* second) {
    const auto* a = static_cast<const int8_t*>(first);
    const auto* b = static_cast<const uint8_t*>(second);
    for (int i = 0; i < 4; ++i) sum += a[i] * b[i];
    return sum;
  });
}

}  // namespace emulated_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(from) std::memcpy(emulated_tiles::state.shapes, from, 64)
#define _tile_release() std::memset(emulated_tiles::state.shapes, 0, 64)
#define _tile_zero(tile) std::memset(emulated_tiles::state.items[tile], 0, 1024)
#define _tile_loadd(tile, from, stride) emulated_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_tiles::store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) emulated_tiles::multiply_bfloat16(sums, left, right)
#define _tile_dpbsud(sums, left, right) emulated_tiles::multiply_int8(sums, left, right)
#define syscall(...) 0L
