// Attention of any number of tokens over a cache, read once and never held as a whole (arXiv 2205.14135, 2311.01282).
//
// Whatever is computed for a token has the same bits however many tokens, texts and hidden slots stand beside it. The
// slots that a token sees are numbered without gaps, from the first one's slot on: these are its places, and the order
// of its sums depends on them alone. A SPAN of places gets its weights at once, against the greatest score so far; a
// PIECE is summed on its own, so that threads can share a text, and pieces are put together in their order.
//
// A tile serves QUERIES queries: of several tokens, and of all heads that share keys and values. Both its products, scores
// and weighted values, are made by one function, as a row of numbers for each query: so whatever is stored becomes what
// that function multiplies first.

#include <atomic>

#include "lanes.h"
#include "parallel.h"

namespace {

constexpr int64_t SPAN = 64;
constexpr int64_t PIECE = 512;
constexpr int64_t TILES = 8;  // whose sums the second cache holds
constexpr float HIDDEN = -1e30f;       // what a mask adds where nothing is to be seen
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

using slipstream::Steps;
using slipstream::Stored;

// What is multiplied: pairs of bfloat16 where the processor has them, else float32.
#if defined(__AVX512BF16__)
template <class Type>
using Kind = Type;
#else
template <class Type>
using Kind = Float32;
#endif

// What a token sees: the places from `begin` to `end`.
struct Sight {
  int64_t begin = 0, end = 0;
  int64_t straight = 0;        // places before it are slots of the same number
  bool biased = false;         // whether the mask adds something to the scores of seen slots
  std::vector<int32_t> slots;  // of all places, unless all are straight

  bool straight_until(int64_t place) const { return straight >= std::min(end, place); }
};

// What attention reads and writes, in numbers of one type.
template <class Type>
struct Attention : slipstream::Attended {
  using Item = typename Type::Item;

  int64_t pieces() const { return std::max<int64_t>(1, (slots + PIECE - 1) / PIECE); }

  const Item* query_of(int64_t row, int64_t head, int64_t token) const { return at(queries, query, row, head, token); }
  const Item* mask_of(int64_t row, int64_t head, int64_t token) const { return at(mask, masked, row, head, token); }

  static const Item* at(const void* tensor, const Steps& steps, int64_t row, int64_t head, int64_t token) {
    return static_cast<const Item*>(tensor) + row * steps.row + head * steps.head + token * steps.token;
  }
};

// ---- what tokens see ------------------------------------------------------------------------------------------------

template <class Type>
Sight look(const typename Type::Item* mask, int64_t slots) {
  Sight found;
  int64_t count = 0;
  found.begin = slots;
  for (int64_t first = 0; first < slots; first += SPAN) {
    const int64_t last = std::min(slots, first + SPAN);
    int seen = 0, biased = 0;
    for (int64_t slot = first; slot < last; ++slot) {
      const float added = Type::widen(mask[slot]);
      seen += !(added <= HIDDEN);
      biased += !(added <= HIDDEN) & (added != 0);
    }
    if (!seen) continue;
    found.begin = std::min(found.begin, first);
    found.end = last;
    count += seen;
    found.biased |= biased > 0;
  }
  if (!count) return {};
  while (Type::widen(mask[found.begin]) <= HIDDEN) ++found.begin;
  while (Type::widen(mask[found.end - 1]) <= HIDDEN) --found.end;
  found.straight = found.end;
  if (count == found.end - found.begin) return found;
  found.slots.reserve(count);
  for (int64_t slot = found.begin; slot < found.end; ++slot)
    if (!(Type::widen(mask[slot]) <= HIDDEN)) found.slots.push_back(static_cast<int32_t>(slot));
  found.end = found.begin + count;
  found.straight = found.begin;
  while (found.slots[found.straight - found.begin] == found.straight) ++found.straight;
  return found;
}

// What every token of a mask sees; heads share it, unless the mask tells them apart.
template <class Type>
class Sights {
 public:
  explicit Sights(const Attention<Type>& work)
      : steps_(work.masked), heads_(steps_.head ? work.heads : 1), tokens_(steps_.token ? work.tokens : 1) {
    found_.resize((steps_.row ? work.rows : 1) * heads_ * tokens_);
    if (!work.mask) {
      found_[0].end = found_[0].straight = work.slots;
      return;
    }
    const int64_t share = share_of(work.slots);
    slipstream::parallel_for(0, found_.size(), share, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / (heads_ * tokens_), head = i / tokens_ % heads_, token = i % tokens_;
        found_[i] = look<Type>(work.mask_of(row, head, token), work.slots);
      }
    });
  }

  const Sight* of(int64_t row, int64_t head, int64_t token) const {
    const int64_t place = (steps_.row ? row : 0) * heads_ + (steps_.head ? head : 0);
    return &found_[place * tokens_ + (steps_.token ? token : 0)];
  }

 private:
  Steps steps_;
  int64_t heads_, tokens_;
  std::vector<Sight> found_;
};

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// LANES rows of as many words, `apart` words from row to row -> their columns.
inline __attribute__((always_inline)) void transpose(const void* from, int64_t apart, Lanes* to) {
  const auto* row = static_cast<const uint32_t*>(from);
#if defined(__AVX512F__)
  __m512i rows[LANES], pairs[LANES], fours[LANES];
  for (int i = 0; i < LANES; ++i) rows[i] = _mm512_loadu_si512(row + i * apart);
  for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
      fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i) {
    const __m512i even[] = {_mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x88),
                            _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0x88)};
    const __m512i odd[] = {_mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xdd),
                           _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0xdd)};
    to[i] = (Lanes)_mm512_shuffle_i32x4(even[0], even[1], 0x88);
    to[4 + i] = (Lanes)_mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
    to[8 + i] = (Lanes)_mm512_shuffle_i32x4(even[0], even[1], 0xdd);
    to[12 + i] = (Lanes)_mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
  }
#elif defined(__AVX2__)
  __m256 rows[LANES], pairs[LANES], fours[LANES];
  for (int i = 0; i < LANES; ++i) rows[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(row + i * apart));
  for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    to[i] = (Lanes)_mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
    to[4 + i] = (Lanes)_mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
  }
#else
  uint32_t rows[LANES][LANES], columns[LANES][LANES];  // copied, since words must not be read where numbers were written
  for (int i = 0; i < LANES; ++i) std::memcpy(rows[i], row + i * apart, sizeof(rows[i]));
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < LANES; ++j) columns[j][i] = rows[i][j];
  std::memcpy(to, columns, sizeof(columns));
#endif
}

int64_t up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

// What is put together of each of LANES vectors, in an order that few and many queries share.
template <class Put>
Lanes across(const Lanes* from, const Put& put) {
#if defined(__AVX512F__)  // in half of the shuffles that a transposition takes
  const auto pair = [&](__m512 one, __m512 other, auto low, auto high) {
    return (__m512)put((Lanes)low(one, other), (Lanes)high(one, other));
  };
  __m512 parts[LANES], *part = parts;
  for (int i = 0; i < LANES; ++i) parts[i] = (__m512)from[i];
  for (int i = 0; i < LANES / 2; ++i)
    parts[i] = pair(part[2 * i], part[2 * i + 1], [](auto x, auto y) { return _mm512_unpacklo_ps(x, y); },
                    [](auto x, auto y) { return _mm512_unpackhi_ps(x, y); });
  for (int i = 0; i < LANES / 4; ++i)
    parts[i] = pair(part[2 * i], part[2 * i + 1],
                    [](auto x, auto y) { return (__m512)_mm512_unpacklo_pd((__m512d)x, (__m512d)y); },
                    [](auto x, auto y) { return (__m512)_mm512_unpackhi_pd((__m512d)x, (__m512d)y); });
  for (int count = LANES / 8; count; count /= 2)
    for (int i = 0; i < count; ++i)
      parts[i] = pair(part[2 * i], part[2 * i + 1], [](auto x, auto y) { return _mm512_shuffle_f32x4(x, y, 0x88); },
                      [](auto x, auto y) { return _mm512_shuffle_f32x4(x, y, 0xdd); });
  return (Lanes)parts[0];
#else
  Lanes parts[LANES];
  transpose(from, LANES, parts);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] = put(parts[i], parts[i + half]);
  return parts[0];
#endif
}

Lanes sum(Lanes one, Lanes other) { return one + other; }

Lanes greater(Lanes one, Lanes other) { return one > other ? one : other; }

bool any(const Whole& lanes) {
  int32_t parts[LANES], found = 0;
  std::memcpy(parts, &lanes, sizeof(parts));
  for (int32_t part : parts) found |= part;
  return found;
}

#if defined(__AVX512BF16__)
// Vectors to pairs of bfloat16: those of two vectors that lie side by side, and those of a row and of the next one.
void join(const Lanes* from, int64_t vectors, uint16_t* to) {
  for (int64_t i = 0; i < vectors; i += 2, to += 2 * LANES)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)from[i + 1], (__m512)from[i]));
}

void join(const uint16_t* row, const uint16_t* next, int64_t width, uint16_t* to) {
  alignas(LINE) uint16_t order[4 * LANES];
  for (int i = 0; i < 2 * LANES; ++i) {
    order[2 * i] = i;
    order[2 * i + 1] = 2 * LANES + i;
  }
  const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 2 * LANES);
  for (int64_t i = 0; i < width; i += 2 * LANES, to += 4 * LANES) {
    const __m512i one = _mm512_loadu_si512(row + i), other = _mm512_loadu_si512(next + i);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(one, low, other));
    _mm512_storeu_si512(to + 2 * LANES, _mm512_permutex2var_epi16(one, high, other));
  }
}
#endif

// Items in memory that begins with a line of the cache.
template <class Item>
class Buffer {
 public:
  explicit Buffer(int64_t count) : held_(new Item[count + LINE / sizeof(Item)]()) {}

  Item* data() { return reinterpret_cast<Item*>((reinterpret_cast<uintptr_t>(held_.get()) + LINE - 1) / LINE * LINE); }

 private:
  std::unique_ptr<Item[]> held_;
};

// The sums of a tile over some places: the greatest score, the weights' sum, and the weighted values of every query.
class Sums {
 public:
  Sums(int queries, int64_t width)
      : vectors_(queries / LANES), width_(width), size_(size(queries, width)), found_(size_) {
    clear();
  }

  static int64_t size(int queries, int64_t width) { return (2 + width) * queries; }

  Lanes* greatest() { return reinterpret_cast<Lanes*>(found_.data()); }
  Lanes* total() { return greatest() + vectors_; }
  float* values() { return found_.data() + 2 * vectors_ * LANES; }  // (queries, width)
  const float* of(int query) { return values() + query * width_; }
  float total_of(int query) { return found_.data()[vectors_ * LANES + query]; }

  void clear() {
    std::fill_n(greatest(), vectors_, Lanes{} + NOTHING);
    std::fill_n(total(), vectors_, Lanes{});
    std::fill_n(values(), vectors_ * LANES * width_, 0.0f);
  }

  // Scales the sums of up to LANES queries.
  void scale(int vector, const Lanes& factors, int queries) {
    total()[vector] *= factors;
    for (int q = 0; q < queries; ++q) {
      float* value = values() + (vector * LANES + q) * width_;
      for (int64_t i = 0; i < width_; ++i) value[i] *= factors[q];
    }
  }

  void save(float* to) { std::copy_n(found_.data(), size_, to); }

  // Adds sums over later places.
  void add(Sums& later, int queries) { add(later.found_.data(), queries); }
  void add(const float* later, int queries) {
    const float* value = later + 2 * vectors_ * LANES;
    for (int v = 0; v * LANES < queries; ++v) {
      const int some = std::min(LANES, queries - v * LANES);
      const Lanes other = vector_at(later + v * LANES), before = greatest()[v];
      const Lanes most = other > before ? other : before, shift = most == NOTHING ? Lanes{} : most;
      const Lanes factors = exponential(other - shift);
      greatest()[v] = most;
      scale(v, exponential(before - shift), some);
      total()[v] = fused(vector_at(later + (vectors_ + v) * LANES), factors, total()[v]);
      for (int q = v * LANES; q < v * LANES + some; ++q)
        for (int64_t i = 0; i < width_; ++i) values()[q * width_ + i] += value[q * width_ + i] * factors[q % LANES];
    }
  }

 private:
  int vectors_;
  int64_t width_, size_;
  Buffer<float> found_;
};

// Rows of keys, values or what was made of them, `apart` items from each other.
template <class Item>
struct Rows {
  Item* first;
  int64_t apart;

  Rows from(int64_t row) const { return {first + row * apart, apart}; }
};

// ---- products -------------------------------------------------------------------------------------------------------

// What rows of a product are made of: vectors of LANES columns, `apart` items from step to step, and `vector` items from
// each other.
template <class Item>
struct Columns {
  const Item* first;
  int64_t apart, vector;
};

// What is asked for while the sums of the first rows are made, a line with every vector, into the second cache since the
// first one is full: the processor alone asks too late.
struct Ahead {
  const char* next;
  int64_t bytes;  // from vector to vector
};

// Makes sums, or adds to them (MORE): rows (count, steps) times columns (steps, vectors), each in the order of the steps.
template <class Work>
struct Vectors {
  using Item = typename Work::Item;
  static constexpr int QUERIES = 32;
  static constexpr int64_t STEPS = 1;  // of which there has to be a multiple
#if defined(__AVX512F__)
  static constexpr int MOST = 12, FEW = 6;  // rows whose sums of 2, or of 4 vectors stay in registers
#else
  static constexpr int MOST = 6, FEW = 3;
#endif

  template <bool MORE>
  void add(Rows<const Item> rows, int count, Columns<Item> columns, int64_t steps, int64_t vectors, Rows<float> sums,
           Ahead ahead) const {
    if (count <= FEW && vectors % 4 == 0)
      by<MORE, 4, FEW>(rows, count, columns, steps, vectors, sums, ahead);
    else
      by<MORE, 2, MOST>(rows, count, columns, steps, vectors, sums, ahead);
  }

 private:
  template <bool MORE, int VECTORS, int ROWS>
  static void by(Rows<const Item> rows, int count, Columns<Item> columns, int64_t steps, int64_t vectors, Rows<float> sums,
                 Ahead ahead) {
    for (int64_t vector = 0; vector < vectors; vector += VECTORS, columns.first += VECTORS * columns.vector)
      for (int first = 0; first < count; first += ROWS)
        as_constant<ROWS>(std::min(ROWS, count - first), [&](auto some) {
          const int64_t bytes = first ? 0 : VECTORS * ahead.bytes;
          float* sum = sums.from(first).first + vector * LANES;
          block<MORE, decltype(some)::value, VECTORS>(rows.from(first), columns, steps, sum, sums.apart, {ahead.next, bytes});
          ahead.next += steps * bytes;
        });
  }

  template <bool MORE, int ROWS, int VECTORS>
  static void block(Rows<const Item> rows, Columns<Item> columns, int64_t steps, float* sums, int64_t apart, Ahead ahead) {
    Lanes found[ROWS][VECTORS];  // copied one by one, since compilers keep in memory what is copied as a whole
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) found[r][v] = MORE ? vector_at(sums + r * apart + v * LANES) : Lanes{};
    const Item *row = rows.first, *column = columns.first;
    for (int64_t step = 0; step < steps; ++step, column += columns.apart, row += Work::STEP, ahead.next += ahead.bytes) {
      Lanes part[VECTORS];
      for (int v = 0; v < VECTORS; ++v) {
        __builtin_prefetch(ahead.next + v * LINE, 0, 2);
        part[v] = vector_at(column + v * columns.vector);
      }
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) fuse_item(found[r][v], part[v], row + r * rows.apart);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) std::memcpy(sums + r * apart + v * LANES, &found[r][v], sizeof(Lanes));
  }

  static void fuse_item(Lanes& sum, const Lanes& part, const Item* item) {
    if constexpr (Work::STEP == 1)
      fuse(sum, part, *item);
    else
      Work::add(sum, part, item);
  }
};

#if defined(__AMX_BF16__) && defined(__AVX512F__)
// The same by Intel's tiles (AMX) of bfloat16, 16 rows and columns by 16 pairs at once. They sum in another order, so all
// attention goes this way, or none. Rows beyond the last one are multiplied too, and nobody reads their sums.
class Blocks {
 public:
  using Item = uint16_t;
  static constexpr int64_t STEPS = SIDE;
  static constexpr int QUERIES = 64;

  Blocks() { tiles_.shape(2 * SIDE); }

  template <bool MORE>
  void add(Rows<const Item> rows, int count, Columns<Item> columns, int64_t steps, int64_t vectors, Rows<float> sums,
           Ahead) const {
    for (int64_t vector = 0; vector < vectors; vector += 2, columns.first += 2 * columns.vector)
      for (int64_t first = 0; first < count; first += 2 * SIDE) {
        float* to = sums.from(first).first + vector * LANES;
        first + SIDE < count ? add_block<MORE, true>(rows.from(first), columns, steps, to, sums.apart)
                             : add_block<MORE, false>(rows.from(first), columns, steps, to, sums.apart);
      }
  }

 private:
  AmxTiles tiles_;

  template <bool MORE, bool BOTH>
  static inline __attribute__((always_inline)) void add_block(Rows<const Item> rows, Columns<Item> columns, int64_t steps,
                                                              float* sums, int64_t apart) {
    const int64_t row = apart * sizeof(float), below = SIDE * row;
    MORE ? load_sums<BOTH>(sums, row, LINE, below) : zero_sums<BOTH>();
    for (int64_t step = 0; step < steps; step += SIDE) {
      const Item* column = columns.first + step * columns.apart;
      add_products<BOTH>(rows.first + 2 * step, rows.apart, column, column + columns.vector, columns.apart);
    }
    store_sums<BOTH>(sums, row, LINE, below);
  }
};
#endif

// ---- tiles ----------------------------------------------------------------------------------------------------------

// The queries of a tile, and the sums over the places that they see.
template <class Type, class Multiply>
class Tile {
 public:
  using Item = typename Type::Item;
  using Work = Kind<Type>;
  using Number = typename Work::Item;
  static constexpr int STEP = Work::STEP, QUERIES = Multiply::QUERIES;

  Tile(const Attention<Type>& work, const Sights<Type>& sights)
      : work_(work), sights_(sights), width_(up(work.width, PANEL)), room_(work.tokens * work.groups > QUERIES ? PIECE : SPAN),
        sums(QUERIES, width_), queries_(QUERIES * width_), rows_(SPAN * width_), keys_(room_ * width_),
        values_(STEP > 1 ? room_ * width_ : 0), weights_(STEP > 1 ? QUERIES * SPAN : 0), scores_(QUERIES * SPAN) {}

  // Takes the queries of tile `number` of a head of keys.
  void take(int64_t row, int64_t keys_head, int64_t number) {
    if (row != row_ || keys_head != keys_head_) ready_ = 0;
    row_ = row;
    keys_head_ = keys_head;
    first_ = number * QUERIES;
    count_ = static_cast<int>(std::min<int64_t>(QUERIES, work_.tokens * work_.groups - first_));
    begin_ = all_end_ = work_.slots;
    end_ = all_begin_ = 0;
    biased_ = false;
    for (int q = 0; q < count_; ++q) {
      convert(work_.query_of(row, head(q), token(q)), queries_.data() + q * width_);
      const Sight& sight = *(seen_[q] = sights_.of(row, head(q), token(q)));
      begin_ = std::min(begin_, sight.begin);
      end_ = std::max(end_, sight.end);
      all_begin_ = std::max(all_begin_, sight.begin);
      all_end_ = std::min({all_end_, sight.end, sight.straight});
      biased_ |= sight.biased;
    }
  }

  // Sums over the places `from` to `to`, of a piece.
  void read(int64_t from, int64_t to) {
    if (from != from_) ready_ = 0;
    from_ = from;
    sums.clear();
    std::fill_n(totals_, QUERIES, Lanes{});
    for (int64_t first = std::max(from, begin_) / SPAN * SPAN; first < std::min(to, end_); first += SPAN) read_span(first);
    for (int vector = 0; vector * LANES < count_; ++vector) sums.total()[vector] = across(totals_ + vector * LANES, sum);
  }

  // Whether there is something to be seen from `from` to `to`.
  bool sees(int64_t from, int64_t to) const { return begin_ < to && from < end_; }

  void write(Sums& found) {
    for (int q = 0; q < count_; ++q) {
      const int64_t place = ((row_ * work_.tokens + token(q)) * work_.heads + head(q)) * work_.width;
      Item* output = static_cast<Item*>(work_.outputs) + place;
      const float *values = found.of(q), total = found.total_of(q);
      for (int64_t i = 0; i < work_.width; ++i) output[i] = Type::round(total == 0 ? 0 : values[i] / total);
    }
  }

  int queries() const { return count_; }

 private:
  const Attention<Type>& work_;
  const Sights<Type>& sights_;
  int64_t width_;  // of queries, keys and values, filled up with zeros
  int64_t room_;   // places whose keys and values are held as they are multiplied: those of a piece, for further tiles

 public:
  Sums sums;

 private:
  Buffer<Number> queries_, rows_, keys_, values_, weights_;
  Buffer<float> scores_;
  Multiply multiply_;
  int64_t row_ = 0, keys_head_ = 0, first_ = 0;
  int count_ = 0;
  const Sight* seen_[QUERIES] = {};  // by each query
  int64_t begin_ = 0, end_ = 0;          // of the places that any query sees
  int64_t all_begin_ = 0, all_end_ = 0;  // of the slots that every query sees
  bool biased_ = false;
  Lanes totals_[QUERIES];  // of weights
  int64_t from_ = -1;      // where the piece begins of whose spans those that are `ready_` need not be made again
  uint64_t ready_ = 0;

  int64_t head(int query) const { return keys_head_ * work_.groups + (first_ + query) % work_.groups; }
  int64_t token(int query) const { return (first_ + query) / work_.groups; }

  // Some places of a span: from its `first` one on, those from `begin` to `end`, of which each query sees its own.
  struct Part {
    const Sight* map;  // null where places are slots
    bool whole;        // whether every query sees all of the span
    int64_t first, begin, end;
    int32_t begins[QUERIES], ends[QUERIES];

    int64_t slot(int64_t place) const { return map ? map->slots[place - map->begin] : place; }
  };

  // Reads a span for those queries first for whom places are slots, and then for others.
  void read_span(int64_t first) {
    if (all_begin_ <= first && first + SPAN <= all_end_) return read_part({nullptr, true, first, first, first + SPAN, {}, {}});
    bool done[QUERIES] = {};
    for (int q = 0; q < count_; ++q) {
      if (done[q]) continue;
      const Sight* sight = seen_[q];
      const bool straight = sight->straight_until(first + SPAN);
      Part part{straight ? nullptr : sight, false, first, std::max(first, sight->begin), std::min(first + SPAN, sight->end), {}, {}};
      for (int other = q; other < count_; ++other) {
        const Sight* joining = seen_[other];
        const int64_t begin = std::max(first, joining->begin), end = std::min(first + SPAN, joining->end);
        const bool near = joining->straight_until(first + SPAN) && begin <= part.end && part.begin <= end;
        if (done[other] || (joining != sight && !(straight && near))) continue;
        done[other] = true;
        part.begins[other] = static_cast<int32_t>(begin);
        part.ends[other] = static_cast<int32_t>(end);
        part.begin = std::min(part.begin, begin);
        part.end = std::max(part.end, end);
      }
      if (part.begin < part.end) read_part(part);
    }
  }

  void read_part(const Part& part) {
    const int64_t count = part.end - part.first, filled = up(count, PANEL), blocks = filled / LANES, words = width_ / STEP;
    const int64_t place = room_ > SPAN ? part.first - from_ : 0;
    Number *made = keys_.data() + place * width_, *joined = values_.data() + place * width_;
    const bool ready = part.whole && ready_ >> (place / SPAN) & 1;
    auto* transposed = reinterpret_cast<Lanes*>(made);
    for (int64_t block = 0; block < blocks && !ready; ++block) {  // of which the first cache holds what was made
      const Rows<const Number> keys = rows(work_.keys, part, part.first + block * LANES, LANES);
      for (int64_t i = 0; i < words; i += LANES, transposed += LANES)
        transpose(keys.first + i * STEP, keys.apart / STEP, transposed);
    }
    float* scores = scores_.data();
    multiply_.template add<false>({queries_.data(), width_}, count_, {made, LANES * STEP, LANES * width_}, words, blocks,
                                  {scores, SPAN}, ahead(work_.keys, part.first, words * blocks));
    if (biased_) add_bias(part);
    if (!part.whole) hide(part, filled);
    for (int vector = 0; vector * LANES < count_; ++vector) weigh(vector, blocks);
    const int64_t steps = up(up(count, STEP) / STEP, Multiply::STEPS), vectors = width_ / LANES;
    const Ahead later = ahead(work_.values, part.first, steps * vectors);
    if constexpr (STEP == 1) {
      const Rows<const Number> values = rows(work_.values, part, part.first, steps);
      multiply_.template add<true>({scores, SPAN}, count_, {values.first, values.apart, LANES}, steps, vectors,
                                   {sums.values(), width_}, later);
#if defined(__AVX512BF16__)
    } else {
      for (int q = 0; q < count_; ++q)
        join(reinterpret_cast<Lanes*>(scores + q * SPAN), blocks, weights_.data() + q * SPAN);
      const Rows<const Number> values = ready ? Rows<const Number>{} : rows(work_.values, part, part.first, steps * STEP);
      for (int64_t step = 0; step < steps && !ready; ++step)
        join(values.from(2 * step).first, values.from(2 * step + 1).first, width_, joined + 2 * step * width_);
      multiply_.template add<true>({weights_.data(), SPAN}, count_, {joined, 2 * width_, 2 * LANES}, steps, vectors,
                                   {sums.values(), width_}, later);
#endif
    }
    const uint64_t bit = uint64_t{1} << (place / SPAN);
    ready_ = part.whole && room_ > SPAN ? ready_ | bit : ready_ & ~bit;
  }

  // Scales the scores, and adds what the mask adds.
  void add_bias(const Part& part) {
    for (int q = 0; q < count_; ++q) {
      float* scores = scores_.data() + q * SPAN;
      const Item* added = work_.mask_of(row_, head(q), token(q));
      for (int64_t place = part.begin; place < part.end; ++place) {
        float& score = scores[place - part.first];
        score = score * work_.scale + Type::widen(added[part.slot(place)]);
      }
    }
  }

  // Hides from every query what it does not see.
  void hide(const Part& part, int64_t filled) {
    Whole first;
    for (int i = 0; i < LANES; ++i) first[i] = static_cast<int32_t>(part.first) + i;
    for (int q = 0; q < count_; ++q) {
      if (part.begins[q] <= part.first && part.first + filled <= part.ends[q]) continue;
      auto* score = reinterpret_cast<Lanes*>(scores_.data() + q * SPAN);
      for (int block = 0; block * LANES < filled; ++block) {
        const Whole place = first + block * LANES, seen = (place >= part.begins[q]) & (place < part.ends[q]);
        score[block] = seen ? score[block] : Lanes{} + NOTHING;
      }
    }
  }

  // The scores of up to LANES queries -> weights, against the greatest score so far.
  void weigh(int vector, int64_t blocks) {
    const float scale = biased_ ? 1 : work_.scale;
    const int some = std::min(LANES, count_ - vector * LANES);
    Lanes found[LANES] = {};
    auto* scores = reinterpret_cast<Lanes*>(scores_.data()) + vector * LANES * (SPAN / LANES);
    Lanes* totals = totals_ + vector * LANES;
    for (int q = 0; q < some; ++q) {
      const Lanes* score = scores + q * (SPAN / LANES);
      found[q] = score[0];
      for (int64_t i = 1; i < blocks; ++i) found[q] = greater(score[i], found[q]);
    }
    Lanes& greatest = sums.greatest()[vector];
    const Lanes most = greater(across(found, greater) * scale, greatest), shifts = most == NOTHING ? Lanes{} : most;
    if (any(most != greatest)) {
      const Lanes factors = exponential(greatest - shifts);
      sums.scale(vector, factors, some);
      for (int q = 0; q < some; ++q) totals[q] *= factors[q];
      greatest = most;
    }
    for (int q = 0; q < some; ++q) {
      Lanes* score = scores + q * (SPAN / LANES);
      const Lanes shift = Lanes{} + shifts[q];
      for (int64_t i = 0; i < blocks; ++i) {
        score[i] = exponential(fused(score[i], scale, -shift));
        totals[q] += score[i];
      }
    }
  }

  // What will be read of a store after the span from `first` on; behind the last slot there may be nothing, which is no
  // error.
  Ahead ahead(const Stored& store, int64_t first, int64_t steps) const {
    const int64_t size = store.scales ? 1 : sizeof(Item);
    const char* next = static_cast<const char*>(store.items) + place(store.steps, first + SPAN) * size;
    return {next, SPAN * work_.width * size / std::max<int64_t>(1, steps)};
  }

  // Rows of a store for `count` places from `first` on, where they lie or, if these are not what is multiplied, do not lie
  // side by side, or are too few or too narrow, made of them, with zeros where nobody looks.
  Rows<const Number> rows(const Stored& store, const Part& part, int64_t first, int64_t count) {
    const Steps& steps = store.steps;
    if constexpr (std::is_same_v<Number, Item>) {
      const bool whole = part.begin <= first && first + count <= part.end && work_.width == width_;
      if (whole && !part.map && !store.scales && steps.token % STEP == 0)
        return {static_cast<const Item*>(store.items) + place(steps, first), steps.token};
    }
    Number* to = rows_.data();
    for (int64_t each = first; each < first + count; ++each, to += width_) {
      const bool seen = part.begin <= each && each < part.end;
      if (seen) read_row(store, part.slot(each), to);
      std::fill(to + (seen ? work_.width : 0), to + width_, Number{});
    }
    return {rows_.data(), width_};
  }

  int64_t place(const Steps& steps, int64_t slot) const {
    return row_ * steps.row + keys_head_ * steps.head + slot * steps.token;
  }

  // What a slot holds, as it is multiplied.
  void read_row(const Stored& store, int64_t slot, Number* to) const {
    if (!store.scales) return convert(static_cast<const Item*>(store.items) + place(store.steps, slot), to);
    const auto* codes = static_cast<const int8_t*>(store.items) + place(store.steps, slot);
    const Item scale = static_cast<const Item*>(store.scales)[place(store.scale_steps, slot)];
    const float size = Type::widen(scale), split = size * 0x10001p0f;
    if (std::is_same_v<Type, Float32> || !(0x1p-100f < size && size < 0x1p100f)) {
      for (int64_t i = 0; i < work_.width; ++i) to[i] = as_number(Type::round(codes[i] * size));
      return;
    }
    // Products have 15 bits, and so this rounds them to the 8 of bfloat16, ties to even (Veltkamp).
    for (int64_t i = 0; i < work_.width; ++i) {
      const float code = codes[i], far = code * split, rounded = far + (code * size - far);
      if constexpr (std::is_same_v<Number, float>)
        to[i] = rounded;
      else
        to[i] = static_cast<Number>(bits<uint32_t>(rounded) >> 16);
    }
  }

  void convert(const Item* from, Number* to) const {
    for (int64_t i = 0; i < work_.width; ++i) to[i] = as_number(from[i]);
  }

  static Number as_number(Item item) {
    if constexpr (std::is_same_v<Number, Item>)
      return item;
    else
      return Type::widen(item);
  }
};

// Sets of tiles read a piece one after the other. Threads take sets whole; of few sets they share the pieces, and whoever
// reads the last piece of a tile puts them together.
template <class Type, class Multiply>
void attend_all(const Attention<Type>& work) {
  using Work = Tile<Type, Multiply>;
  const Sights<Type> sights(work);
  const int64_t queries = work.tokens * work.groups, tiles = up(queries, Work::QUERIES) / Work::QUERIES;
  const int64_t pieces = work.pieces(), keys_heads = work.heads / work.groups, heads = work.rows * keys_heads;
  const int64_t together = pieces > 1 ? std::min(TILES, tiles) : 1, sets = up(tiles, together) / together;
  const int64_t threads = torch::stable::get_num_threads(), shares = threads == 1 || heads * sets >= 4 * threads ? 1 : pieces;
  const int64_t width = up(work.width, PANEL), saved = Sums::size(Work::QUERIES, width);
  std::unique_ptr<float[]> partial(shares > 1 ? new float[heads * tiles * shares * saved] : nullptr);
  std::vector<std::atomic<int64_t>> left(shares > 1 ? heads * tiles : 0);
  for (auto& count : left) count = shares;
  const int64_t cost = std::min<int64_t>(Work::QUERIES, queries) * std::min(PIECE, work.slots) * work.width * 2 / (tiles > 1 ? 2 : 1);
  const int64_t share = share_of(cost);
  slipstream::parallel_for(0, heads * shares * sets, share, [&](int64_t begin, int64_t end) {
    Work tile(work, sights);
    std::vector<Sums> found;
    for (int64_t i = 0; i < together && pieces > 1; ++i) found.emplace_back(Work::QUERIES, width);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / (shares * sets), part = item / sets % shares, turn = item % sets;
      // Early sets see less than late ones, which take turns with them.
      const int64_t first = together * (turn % 2 ? sets - 1 - turn / 2 : turn / 2), last = std::min(tiles, first + together);
      const auto each = [&](auto&& body) {
        for (int64_t i = first; i < last; ++i) {
          tile.take(head / keys_heads, head % keys_heads, i);
          body(pieces > 1 ? found[i - first] : tile.sums, head * tiles + i);
        }
      };
      each([](Sums& sums, int64_t) { sums.clear(); });
      for (int64_t piece = pieces * part / shares; piece < pieces * (part + 1) / shares; ++piece)
        each([&](Sums& sums, int64_t) {
          if (!tile.sees(piece * PIECE, (piece + 1) * PIECE)) return;
          tile.read(piece * PIECE, (piece + 1) * PIECE);
          if (pieces > 1) sums.add(tile.sums, tile.queries());
        });
      each([&](Sums& sums, int64_t number) {
        if (shares > 1) {
          float* of_tile = partial.get() + number * shares * saved;
          sums.save(of_tile + part * saved);
          if (left[number].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
          sums.clear();
          for (int64_t i = 0; i < shares; ++i) sums.add(of_tile + i * saved, tile.queries());
        }
        tile.write(sums);
      });
    }
  });
}

template <class Type>
void run(const Attention<Type>& work) {
#if defined(__AMX_BF16__) && defined(__AVX512F__)
  if constexpr (Kind<Type>::STEP == 2)
    if (tiles_allowed()) return attend_all<Type, Blocks>(work);
#endif
  attend_all<Type, Vectors<Kind<Type>>>(work);
}

}  // namespace

void slipstream::attend(Number number, const Attended& work) {
  with_type(number, [&](auto type) { run(Attention<decltype(type)>{work}); });
}

// ---- operators of torch ---------------------------------------------------------------------------------------------

namespace {

// Steps over (rows, heads, tokens, width); a size of one is the same for all.
Steps steps(const Tensor& tensor) {
  const auto step = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
  return {step(0), step(1), step(2)};
}

// Queries (rows, heads, tokens, width), keys and values (rows, fewer or as many heads, slots, width), and what is added
// to their products, (rows or 1, heads or 1, tokens or 1, slots) -> (rows, tokens, heads, width).
Tensor attend(Tensor queries, Tensor keys, Tensor values, std::optional<Tensor> mask, double scale) {
  for (const Tensor& tensor : {queries, keys, values, mask ? *mask : queries})
    STD_TORCH_CHECK(tensor.dim() == 4 && tensor.scalar_type() == queries.scalar_type() &&
                        (tensor.stride(3) == 1 || tensor.size(3) == 1),
                    "slipstream::attend: four dimensions, of which the last is dense, and one type");
  STD_TORCH_CHECK(keys.size(3) == queries.size(3) && values.size(3) == queries.size(3) && keys.size(2) == values.size(2) &&
                      keys.size(1) == values.size(1) && queries.size(1) % keys.size(1) == 0 &&
                      keys.size(0) == queries.size(0) && values.size(0) == queries.size(0),
                  "slipstream::attend: queries, keys and values do not fit");
  STD_TORCH_CHECK(!mask || (mask->size(3) == keys.size(2) && (mask->size(2) == 1 || mask->size(2) == queries.size(2)) &&
                            (mask->size(1) == 1 || mask->size(1) == queries.size(1)) &&
                            (mask->size(0) == 1 || mask->size(0) == queries.size(0))),
                  "slipstream::attend: the mask does not fit");
  const std::vector<int64_t> shape = {queries.size(0), queries.size(2), queries.size(1), queries.size(3)};
  Tensor outputs = torch::stable::new_empty(queries, shape);
  const slipstream::Number number = number_of(queries, "attend");
  if (outputs.numel())
    slipstream::attend(number, {queries.data_ptr(), mask ? mask->data_ptr() : nullptr, outputs.data_ptr(),
                                {keys.data_ptr(), nullptr, steps(keys), {}}, {values.data_ptr(), nullptr, steps(values), {}},
                                steps(queries), mask ? steps(*mask) : Steps{}, queries.size(0), queries.size(1),
                                queries.size(1) / keys.size(1), queries.size(2), keys.size(2), queries.size(3),
                                static_cast<float>(scale)});
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("attend(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) { m.impl("attend", TORCH_BOX(&attend)); }
