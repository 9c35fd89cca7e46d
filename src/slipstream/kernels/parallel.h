// Work shared among torch's threads, as long as that pays.
//
// A thread that waits for another one spins, for milliseconds, and while other programs hold the other's core it waits for
// each of their turns: a pass of seventy shared loops then takes a hundred times as long as on one thread. So the loops
// are measured, and where the threads wait for longer than one thread alone would need, loops run on one thread for a
// while. No bit depends on it, since no loop's results depend on how it is divided.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

namespace slipstream {

constexpr int64_t MILLISECOND = 1'000'000;  // all times are in nanoseconds
constexpr int64_t WINDOW = 5 * MILLISECOND;  // of shared loops, after which they are judged
constexpr int64_t SHORTEST = 4 * MILLISECOND, LONGEST = 1024 * MILLISECOND;  // for which loops are not shared

inline std::atomic<int64_t> shared_again{0};         // the time from which loops are shared
inline std::atomic<int64_t> pause{SHORTEST};         // for which they will not be, the next time that sharing does not pay
inline std::atomic<int64_t> together{0}, alone{0};   // what the loops of this window took, and what they would have taken

inline int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Judge sharing after a loop that began and ended then; the fastest thread was done after `share`.
inline void judge(int64_t began, int64_t ended, int64_t share, int64_t threads) {
  alone.fetch_add(share * threads, std::memory_order_relaxed);
  if (together.fetch_add(ended - began, std::memory_order_relaxed) + ended - began < WINDOW) return;
  const int64_t lasted = together.exchange(0), needed = alone.exchange(0), now_for = pause.load();
  if (2 * lasted > 3 * needed) {
    shared_again = ended + now_for;
    pause = std::min(2 * now_for, LONGEST);
  } else {
    pause = std::max(now_for / 2, SHORTEST);
  }
}

// Run `body(from, to)` for parts of a range, by several threads where each gets at least `grain`.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (begin >= end) return;
  if (end - begin <= grain) return body(begin, end);
  const int64_t threads = torch::stable::get_num_threads(), began = now();
  if (threads == 1 || began < shared_again.load(std::memory_order_relaxed)) return body(begin, end);
  std::atomic<int64_t> first{std::numeric_limits<int64_t>::max()};
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    body(from, to);
    int64_t seen = first.load(std::memory_order_relaxed);
    const int64_t done = now();
    while (done < seen && !first.compare_exchange_weak(seen, done, std::memory_order_relaxed)) {}
  });
  judge(began, now(), first.load() - began, threads);
}

}  // namespace slipstream
