// Multiplies ones in registers, as fast as one thread can, by the instructions that the kernels have at a level. Every
// function returns how many products of two numbers it has added, which the sums themselves say; 0 if the level has no
// such instructions here.

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>

namespace {

constexpr int CHAINS = 12;  // sums that do not wait for each other

template <class Item, class Sum, class Add>
int64_t counted(int64_t times, const Add& add) {
  Sum sums[CHAINS] = {};
  for (int64_t i = 0; i < times; ++i)
#pragma GCC unroll 12  // else the sums lie in memory
    for (int chain = 0; chain < CHAINS; ++chain) {
      Sum sum = sums[chain];
      add(sum);
      asm volatile("" : "+x"(sum));  // nobody knows what comes next
      sums[chain] = sum;
    }
  double found = 0;
  for (const Sum& sum : sums) {
    Item items[sizeof(Sum) / sizeof(Item)];
    std::memcpy(items, &sum, sizeof(sum));
    for (Item item : items) found += static_cast<double>(item);
  }
  return static_cast<int64_t>(found);
}

}  // namespace

#if defined(__AVX512F__)
extern "C" int64_t float32(int64_t times) {
  const __m512 one = _mm512_set1_ps(1);
  return counted<float, __m512>(times, [&](__m512& sum) { sum = _mm512_fmadd_ps(one, one, sum); });
}
#else
extern "C" int64_t float32(int64_t times) {
  const __m256 one = _mm256_set1_ps(1);
  return counted<float, __m256>(times, [&](__m256& sum) { sum = _mm256_fmadd_ps(one, one, sum); });
}
#endif

#if defined(__AVX512BF16__)
extern "C" int64_t bfloat16(int64_t times) {
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  return counted<float, __m512>(times, [&](__m512& sum) { sum = _mm512_dpbf16_ps(sum, one, one); });
}
#else
extern "C" int64_t bfloat16(int64_t times) { return float32(times); }
#endif

#if defined(__AVX512VNNI__)
extern "C" int64_t int4(int64_t times) {
  const __m512i one = _mm512_set1_epi8(1);
  return counted<int32_t, __m512i>(times, [&](__m512i& sum) { sum = _mm512_dpbusd_epi32(sum, one, one); });
}
extern "C" int64_t int8(int64_t times) { return int4(times); }
#elif defined(__AVXVNNI__)
extern "C" int64_t int4(int64_t times) {
  const __m256i one = _mm256_set1_epi8(1);
  return counted<int32_t, __m256i>(times, [&](__m256i& sum) { sum = _mm256_dpbusd_avx_epi32(sum, one, one); });
}
extern "C" int64_t int8(int64_t times) { return int4(times); }
#else
extern "C" int64_t int4(int64_t times) {
  const __m256i one = _mm256_set1_epi8(1);
  return counted<uint16_t, __m256i>(times, [&](__m256i& sum) {
    __m256i two;
    asm volatile("vpmaddubsw %1, %1, %0" : "=x"(two) : "x"(one));  // by the intrinsic, once for all
    sum = _mm256_add_epi16(sum, two);
  });
}
extern "C" int64_t int8(int64_t times) { return int4(times) / 2; }  // codes are multiplied by halves
#endif

#else
#define NOTHING(name) extern "C" int64_t name(int64_t) { return 0; }
NOTHING(float32) NOTHING(bfloat16) NOTHING(int4) NOTHING(int8)
#endif
