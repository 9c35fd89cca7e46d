// Attention of any number of tokens over a cache, read once and never held as a whole (arXiv 2205.14135, 2311.01282).
//
// Whatever is computed for a token has the same bits however many tokens, texts and hidden slots stand beside it. The
// slots that a token sees are numbered without gaps, from the first one's slot on: these are its places, and the order
// of its sums depends on them alone. A SPAN of places gets its weights at once, against the greatest score so far; a
// PIECE is summed on its own, so that threads can share a text, and pieces are put together in their order.
//
// A tile serves as many queries as one or two vectors have lanes: of several tokens, and of all heads that share keys and
// values. The lanes of a vector of scores are queries or, if there are few of these, places: the bits are the same.

#include <atomic>

#include "lanes.h"
#include "parallel.h"

namespace {

constexpr int64_t SPAN = 64;
constexpr int64_t PIECE = 1024;
constexpr int OUTPUTS = 2 * LANES;     // of a value that are summed at a time
constexpr float HIDDEN = -1e30f;       // what a mask adds where nothing is to be seen
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int MOST_KEYS = 8;           // that are scored at a time
#if defined(__AVX512F__)
constexpr int MOST_QUERIES = 12;  // whose OUTPUTS stay in registers
#else
constexpr int MOST_QUERIES = 4;
#endif

using slipstream::Steps;

// What a token sees: the places from `begin` to `end`.
struct Sight {
  int64_t begin = 0, end = 0;
  int64_t straight = 0;        // places before it are slots of the same number
  bool biased = false;         // whether the mask adds something to the scores of seen slots
  std::vector<int32_t> slots;  // of all places, unless all are straight

  bool straight_until(int64_t place) const { return straight >= std::min(end, place); }
};

// What attention reads and writes.
template <class Type>
struct Attention {
  const typename Type::Item *queries, *keys, *values, *mask;  // mask may be null: all slots are seen
  typename Type::Item* outputs;                               // (rows, tokens, heads, width)
  Steps query, key, value, masked;
  int64_t rows, heads, groups, tokens, slots, width;  // `groups`: query heads for one head of keys
  float scale;

  int64_t pieces() const { return std::max<int64_t>(1, (slots + PIECE - 1) / PIECE); }

  float added(int64_t row, int64_t head, int64_t token, int64_t slot) const {
    return Type::widen(mask[row * masked.row + head * masked.head + token * masked.token + slot]);
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
    const int64_t share = std::max<int64_t>(1, SHARE / std::max<int64_t>(1, work.slots));
    slipstream::parallel_for(0, found_.size(), share, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / (heads_ * tokens_), head = i / tokens_ % heads_, token = i % tokens_;
        found_[i] = look<Type>(work.mask + row * steps_.row + head * steps_.head + token * steps_.token, work.slots);
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

#if defined(__AVX512F__)
// 16 rows of 16 words, `apart` words from row to row -> their columns.
void transpose(const void* from, int64_t apart, Lanes* to) {
  const auto* row = static_cast<const uint32_t*>(from);
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
}
#endif

int64_t up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

// Halves are put together until one of LANES vectors is left: an order that few and many queries share.
template <class Put>
Lanes fold(Lanes* parts, const Put& put) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] = put(parts[i], parts[i + half]);
  return parts[0];
}

Lanes sum(Lanes one, Lanes other) { return one + other; }

Lanes greater(Lanes one, Lanes other) { return one > other ? one : other; }

bool any(const Whole& lanes) {
  int32_t parts[LANES], found = 0;
  std::memcpy(parts, &lanes, sizeof(parts));
  for (int32_t part : parts) found |= part;
  return found;
}

// How vectors become what `Type::add` multiplies by pairs (or single items).
template <class Type>
struct Pairs;

template <>
struct Pairs<Float32> {
  static void join(const Lanes* from, int, float* to) { std::memcpy(to, from, sizeof(Lanes)); }

  // OUTPUTS items of a row.
  static void load(const float* row, int64_t, Lanes* to) {
    for (int part = 0; part < 2; ++part) std::memcpy(&to[part], row + part * LANES, sizeof(Lanes));
  }

  // Numbers that lie side by side.
  static void round(const Lanes* from, int64_t vectors, float* to) { std::memcpy(to, from, vectors * sizeof(Lanes)); }
};

template <>
struct Pairs<BFloat16> {
  // A vector and the one `apart` behind it, rounded.
  static void join(const Lanes* from, int apart, uint16_t* to) {
#if defined(__AVX512BF16__)
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)from[apart], (__m512)from[0]);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order(0, 16), both));
#else
    const Words both = (rounded(from[0]) >> 16) | (rounded(from[apart]) & 0xffff0000u);
    std::memcpy(to, &both, sizeof(both));
#endif
  }

  // Numbers that lie side by side, an even count of vectors.
  static void round(const Lanes* from, int64_t vectors, uint16_t* to) {
    for (int64_t i = 0; i < vectors; i += 2, to += 2 * LANES) {
#if defined(__AVX512BF16__)
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)from[i + 1], (__m512)from[i]));
#else
      for (int part = 0; part < 2; ++part) {
        const Halves half = __builtin_convertvector(rounded(from[i + part]) >> 16, Halves);
        std::memcpy(to + part * LANES, &half, sizeof(half));
      }
#endif
    }
  }

  // OUTPUTS items of a row and the row `apart` behind it.
  static void load(const uint16_t* row, int64_t apart, Lanes* to) {
#if defined(__AVX512BW__)
    const __m512i low = _mm512_loadu_si512(row), high = _mm512_loadu_si512(row + apart);
    to[0] = (Lanes)_mm512_permutex2var_epi16(low, order(0, 32), high);
    to[1] = (Lanes)_mm512_permutex2var_epi16(low, order(16, 32), high);
#else
    for (int part = 0; part < 2; ++part) {
      Halves low, high;
      std::memcpy(&low, row + part * LANES, sizeof(low));
      std::memcpy(&high, row + apart + part * LANES, sizeof(high));
      to[part] = (Lanes)(__builtin_convertvector(low, Words) | (__builtin_convertvector(high, Words) << 16));
    }
#endif
  }

 private:
#if defined(__AVX512BW__)
  // Places in turns: from `first` on, and `apart` behind these.
  static __m512i order(int first, int apart) {
    alignas(LINE) uint16_t places[2 * LANES];
    for (int i = 0; i < LANES; ++i) {
      places[2 * i] = first + i;
      places[2 * i + 1] = first + apart + i;
    }
    return _mm512_load_si512(places);
  }
#endif

  static Words rounded(Lanes value) {
    const Words all = (Words)value;
    return value == value ? all + 0x7fff + ((all >> 16) & 1) : all | 0x00400000u;
  }
};

// Items in memory that begins with a line of the cache.
template <class Item>
class Buffer {
 public:
  explicit Buffer(int64_t count) : held_(new Item[count + LINE / sizeof(Item)]) {}

  Item* data() { return reinterpret_cast<Item*>((reinterpret_cast<uintptr_t>(held_.get()) + LINE - 1) / LINE * LINE); }

 private:
  std::unique_ptr<Item[]> held_;
};

// The sums of a tile over some places: the greatest score, the weights' sum, and the weighted values of every query.
template <int VECTORS>
class Sums {
 public:
  static constexpr int QUERIES = VECTORS * LANES;

  explicit Sums(int64_t width) : width_(width), held_(QUERIES * width) { clear(); }

  static int64_t size(int64_t width) { return (2 + width) * QUERIES; }

  void clear() {
    for (int v = 0; v < VECTORS; ++v) {
      greatest[v] = Lanes{} + NOTHING;
      total[v] = Lanes{};
    }
    std::fill_n(values(), QUERIES * width_, 0.0f);
  }

  // (QUERIES, width)
  float* values() { return held_.data(); }

  void scale(const Lanes* factors, int queries) {
    for (int v = 0; v < VECTORS; ++v) total[v] *= factors[v];
    for (int q = 0; q < queries; ++q)
      for (int64_t i = 0; i < width_; ++i) values()[q * width_ + i] *= factors[q / LANES][q % LANES];
  }

  void save(float* to) {
    std::memcpy(to, greatest, sizeof(greatest));
    std::memcpy(to + QUERIES, total, sizeof(total));
    std::copy_n(values(), QUERIES * width_, to + 2 * QUERIES);
  }

  // Adds sums over later places, as they were saved.
  void add(const float* later, int queries) {
    Lanes before[VECTORS], factors[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      const Lanes other = Float32::load(later + v * LANES);
      const Lanes most = other > greatest[v] ? other : greatest[v], shift = most == NOTHING ? Lanes{} : most;
      before[v] = exponential(greatest[v] - shift);
      factors[v] = exponential(other - shift);
      greatest[v] = most;
    }
    scale(before, queries);
    for (int v = 0; v < VECTORS; ++v) total[v] = fused(Float32::load(later + QUERIES + v * LANES), factors[v], total[v]);
    later += 2 * QUERIES;
    for (int q = 0; q < queries; ++q)
      for (int64_t i = 0; i < width_; ++i)
        values()[q * width_ + i] += later[q * width_ + i] * factors[q / LANES][q % LANES];
  }

  Lanes greatest[VECTORS], total[VECTORS];

 private:
  int64_t width_;
  Buffer<float> held_;
};

// Asks for a line of keys or values: into the second cache, since the first one is full. Behind the last slot there may
// be nothing, which is no error.
void ask(const void* line) { __builtin_prefetch(line, 0, 2); }

// Rows of keys, values or what was made of them, `apart` items from each other.
template <class Item>
struct Rows {
  const Item* first;
  int64_t apart;

  Rows from(int64_t row) const { return {first + row * apart, apart}; }
};

// ---- products -------------------------------------------------------------------------------------------------------

// Scores and sums of a tile's queries by vectors. `width` is a multiple of PANEL; weights and values lie in steps.
template <class Type, int VECTORS>
struct Vectors {
  using Item = typename Type::Item;
  static constexpr int STEP = Type::STEP, STRIDE = VECTORS * LANES * STEP;
  static constexpr int64_t KEYS = 1, STEPS = 1;  // of which a span has a multiple
  static constexpr bool TRANSPOSES = true;  // keys, if queries are few

  // Queries (width / STEP, VECTORS * LANES, STEP) and keys (count, width) -> scores (count, VECTORS).
  static void score(const Item* queries, const Item* keys, int64_t apart, int64_t count, int64_t width, Lanes* scores) {
    for (int64_t first = 0; first < count; first += MOST_KEYS)
      as_constant<MOST_KEYS>(std::min<int64_t>(MOST_KEYS, count - first), [&](auto rows) {
        score_block<decltype(rows)::value>(queries, keys + first * apart, apart, width, scores + first * VECTORS);
      });
  }

  // Adds to sums (queries, width): weights (steps, VECTORS * LANES, STEP) times values in steps of `apart` items.
  static void sum(const Item* weights, const Item* values, int64_t apart, int64_t steps, int64_t width, int queries,
                  float* sums) {
    for (int64_t begin = 0; begin < width; begin += OUTPUTS)
      for (int first = 0; first < queries; first += MOST_QUERIES)
        as_constant<MOST_QUERIES>(std::min(MOST_QUERIES, queries - first), [&](auto rows) {
          const auto next = [](const Item* step, Lanes* value) {
            for (int part = 0; part < 2; ++part) std::memcpy(&value[part], step + part * LANES * STEP, sizeof(Lanes));
          };
          sum_block<decltype(rows)::value, STEP, STRIDE>(weights + first * STEP, values + begin * STEP, apart, steps,
                                                         width, sums + first * width + begin, next);
        });
  }

#if defined(__AVX512F__)
  // Few queries with places as lanes: LANES keys -> scores (queries, SPAN / LANES), of which it writes a vector of every
  // query. Meanwhile it asks for as many `later` keys.
  static void score_transposed(const Item* queries, Rows<Item> keys, Rows<Item> later, int64_t width, int count,
                               Lanes* scores) {
    as_constant<LANES>(count, [&](auto rows) {
      constexpr int ROWS = decltype(rows)::value;
      Lanes transposed[LANES], found[ROWS] = {};
      const Item* query = queries;
      for (int64_t i = 0; i < width; i += LANES * STEP) {
        transpose(keys.first + i, keys.apart / STEP, transposed);
        for (int step = 0; step < LANES; ++step, query += STRIDE) {
          ask(later.from(step).first + i);
          for (int r = 0; r < ROWS; ++r) Type::add(found[r], transposed[step], query + r * STEP);
        }
      }
      for (int r = 0; r < ROWS; ++r) scores[r * (SPAN / LANES)] = found[r];
    });
  }

  // Adds to sums (queries, width): weights (queries, SPAN) times values, while it asks for as many `later` ones.
  static void sum_transposed(const Item* weights, Rows<Item> values, Rows<Item> later, int64_t steps, int64_t width,
                             int queries, float* sums) {
    for (int64_t begin = 0; begin < width; begin += OUTPUTS)
      for (int first = 0; first < queries; first += MOST_QUERIES)
        as_constant<MOST_QUERIES>(std::min(MOST_QUERIES, queries - first), [&](auto rows) {
          Rows<Item> asked{later.first + begin, later.apart};
          const auto next = [&](const Item* row, Lanes* value) {
            for (int each = 0; each < STEP; ++each, asked = asked.from(1))
              for (int64_t i = 0; i < OUTPUTS; i += LINE / sizeof(Item)) ask(asked.first + i);
            Pairs<Type>::load(row, values.apart, value);
          };
          sum_block<decltype(rows)::value, SPAN, STEP>(weights + first * SPAN, values.first + begin, STEP * values.apart,
                                                       steps, width, sums + first * width + begin, next);
        });
  }
#endif

 private:
  template <int ROWS>
  static void score_block(const Item* queries, const Item* keys, int64_t apart, int64_t width, Lanes* scores) {
    Lanes found[ROWS][VECTORS] = {};
    for (int64_t i = 0; i < width; i += STEP, queries += STRIDE) {
      Lanes query[VECTORS];
      std::memcpy(query, queries, sizeof(query));
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) Type::add(found[r][v], query[v], keys + r * apart + i);
    }
    std::memcpy(scores, found, sizeof(found));
  }

  // `ROW` and `APART` items lie between the weights of two queries and of two steps; `next` takes the values of a step.
  template <int ROWS, int ROW, int APART, class Next>
  static void sum_block(const Item* weights, const Item* values, int64_t apart, int64_t steps, int64_t width, float* sums,
                        const Next& next) {
    Lanes found[ROWS][2];  // copied one by one, since compilers keep in memory what is copied as a whole
    for (int r = 0; r < ROWS; ++r)
      for (int part = 0; part < 2; ++part) found[r][part] = Float32::load(sums + r * width + part * LANES);
    for (int64_t step = 0; step < steps; ++step, values += apart, weights += APART) {
      Lanes value[2];
      next(values, value);
      for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < 2; ++part) Type::add(found[r][part], value[part], weights + r * ROW);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int part = 0; part < 2; ++part) std::memcpy(sums + r * width + part * LANES, &found[r][part], sizeof(Lanes));
  }
};

#if defined(__AMX_BF16__) && defined(__AVX512F__)
// The same by Intel's tiles (AMX) of bfloat16: 16 keys or queries by 32 items at once. They sum in another order, so all
// attention goes this way, or none.
template <int VECTORS>
class Blocks {
 public:
  static constexpr int64_t SIDE = 16, KEYS = 2 * SIDE, STEPS = SIDE;
  static constexpr bool TRANSPOSES = false;
  static constexpr int STRIDE = VECTORS * LANES * 2;

  Blocks() {
    TileShapes tiles;
    std::fill_n(tiles.bytes, 8, LINE);
    std::fill_n(tiles.heights, 8, SIDE);
    tiles.load();
  }

  ~Blocks() { _tile_release(); }

  // Tiles 0 to 3 are scores, 4 and 5 keys, 6 and 7 queries.
  static void score(const uint16_t* queries, const uint16_t* keys, int64_t apart, int64_t count, int64_t width,
                    Lanes* scores) {
    const int64_t row = apart * sizeof(uint16_t);
    constexpr int64_t QUERY = STRIDE * sizeof(uint16_t);
    for (int64_t first = 0; first < count; first += 2 * SIDE) {
      const uint16_t *key = keys + first * apart, *query = queries;
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (VECTORS > 1) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t i = 0; i < width; i += 2 * SIDE, query += SIDE * STRIDE) {
        _tile_loadd(6, query, QUERY);
        _tile_loadd(4, key + i, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, key + SIDE * apart + i, row);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (VECTORS > 1) {
          _tile_loadd(7, query + 2 * LANES, QUERY);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      Lanes *to = scores + first * VECTORS, *after = to + SIDE * VECTORS;
      _tile_stored(0, to, QUERY);
      _tile_stored(1, after, QUERY);
      if constexpr (VECTORS > 1) {
        _tile_stored(2, to + 1, QUERY);
        _tile_stored(3, after + 1, QUERY);
      }
    }
  }

  // Tiles 0 and 1 are sums, 4 and 5 weights, 6 values.
  static void sum(const uint16_t* weights, const uint16_t* values, int64_t apart, int64_t steps, int64_t width, int,
                  float* sums) {
    Lanes transposed[VECTORS][SPAN / 2 / SIDE][SIDE];
    for (int v = 0; v < VECTORS; ++v)
      for (int64_t first = 0; first < steps; first += SIDE)
        transpose(weights + first * STRIDE + 2 * v * LANES, STRIDE / 2, transposed[v][first / SIDE]);
    const int64_t row = width * sizeof(float);
    for (int64_t begin = 0; begin < width; begin += SIDE) {
      const uint16_t* value = values + 2 * begin;
      _tile_loadd(0, sums + begin, row);
      if constexpr (VECTORS > 1) _tile_loadd(1, sums + SIDE * width + begin, row);
      for (int64_t first = 0; first < steps; first += SIDE, value += SIDE * apart) {
        _tile_loadd(6, value, apart * sizeof(uint16_t));
        _tile_loadd(4, transposed[0][first / SIDE], LINE);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (VECTORS > 1) {
          _tile_loadd(5, transposed[1][first / SIDE], LINE);
          _tile_dpbf16ps(1, 5, 6);
        }
      }
      _tile_stored(0, sums + begin, row);
      if constexpr (VECTORS > 1) _tile_stored(1, sums + SIDE * width + begin, row);
    }
  }
};
#endif

// ---- tiles ----------------------------------------------------------------------------------------------------------

// The queries of a tile, and the sums over the places that they see.
template <class Type, int VECTORS, class Multiply>
class Tile {
 public:
  using Item = typename Type::Item;
  static constexpr int STEP = Type::STEP, QUERIES = VECTORS * LANES;

  Tile(const Attention<Type>& work, const Sights<Type>& sights)
      : work_(work), sights_(sights), width_(up(work.width, PANEL)), sums(width_),
        queries_(width_ * QUERIES), keys_(SPAN * width_), values_(SPAN * width_), weights_(SPAN * QUERIES) {}

  static int64_t saved(const Attention<Type>& work) { return Sums<VECTORS>::size(up(work.width, PANEL)); }

  // Takes the queries of tile `number` of a head of keys.
  void take(int64_t row, int64_t keys_head, int64_t number) {
    row_ = row;
    keys_head_ = keys_head;
    first_ = number * QUERIES;
    count_ = static_cast<int>(std::min<int64_t>(QUERIES, work_.tokens * work_.groups - first_));
    Item* to = queries_.data();
    std::fill_n(to, width_ * QUERIES, Item{});
    for (int lane = 0; lane < count_; ++lane) {
      const Item* query = work_.queries + row * work_.query.row + head(lane) * work_.query.head + token(lane) * work_.query.token;
      for (int64_t i = 0; i < work_.width; ++i) to[(i / STEP * QUERIES + lane) * STEP + i % STEP] = query[i];
      lanes_[lane] = sights_.of(row, head(lane), token(lane));
    }
    compare();
  }

  // Sums over the places `from` to `to`.
  void read(int64_t from, int64_t to) {
    sums.clear();
    for (int64_t first = std::max(from, begin_) / SPAN * SPAN; first < std::min(to, end_); first += SPAN) {
#if defined(__AVX512F__)
      if constexpr (VECTORS == 1 && Multiply::TRANSPOSES)
        if (together_ && !biased_) {
          add_transposed({nullptr, first, std::max(first, begin_), std::min(first + SPAN, end_)});
          continue;
        }
#endif
      if (together_)
        add({nullptr, first, std::max(first, begin_), std::min(first + SPAN, end_)}, begins_, ends_);
      else
        add_apart(first);
    }
  }

  // Whether there is something to be seen from `from` to `to`.
  bool sees(int64_t from, int64_t to) const { return begin_ < to && from < end_; }

  void write() {
    for (int lane = 0; lane < count_; ++lane) {
      Item* output = work_.outputs + ((row_ * work_.tokens + token(lane)) * work_.heads + head(lane)) * work_.width;
      const float *values = sums.values() + lane * width_, total = sums.total[lane / LANES][lane % LANES];
      for (int64_t i = 0; i < work_.width; ++i) output[i] = Type::round(total == 0 ? 0 : values[i] / total);
    }
  }

  int queries() const { return count_; }

 private:
  const Attention<Type>& work_;
  const Sights<Type>& sights_;
  int64_t width_;  // of queries, keys and values, filled up with zeros

 public:
  Sums<VECTORS> sums;

 private:
  Buffer<Item> queries_, keys_, values_, weights_;
  Multiply multiply_;
  int64_t row_ = 0, keys_head_ = 0, first_ = 0;
  int count_ = 0;
  const Sight* lanes_[QUERIES] = {};
  int64_t begin_ = 0, end_ = 0;  // of the places that any query sees
  int64_t all_begin_ = 0, all_end_ = 0;  // of those that every query sees
  Whole begins_[VECTORS] = {}, ends_[VECTORS] = {};
  bool together_ = false, biased_ = false;

  // The keys and values of all slots.
  Rows<Item> keys_store() const { return store(work_.keys, work_.key); }
  Rows<Item> values_store() const { return store(work_.values, work_.value); }
  Rows<Item> store(const Item* first, const Steps& steps) const {
    return {first + row_ * steps.row + keys_head_ * steps.head, steps.token};
  }
  int64_t head(int lane) const { return keys_head_ * work_.groups + (first_ + lane) % work_.groups; }
  int64_t token(int lane) const { return (first_ + lane) / work_.groups; }

  // What the queries see, and whether they can be served together: places are slots, and any in between is seen.
  void compare() {
    std::fill_n(begins_, VECTORS, Whole{});
    std::fill_n(ends_, VECTORS, Whole{});
    begin_ = all_begin_ = lanes_[0]->begin;
    end_ = all_end_ = lanes_[0]->end;
    together_ = true;
    biased_ = false;
    for (int lane = 0; lane < count_; ++lane) {
      const Sight& sight = *lanes_[lane];
      begins_[lane / LANES][lane % LANES] = static_cast<int32_t>(sight.begin);
      ends_[lane / LANES][lane % LANES] = static_cast<int32_t>(sight.end);
      biased_ |= sight.biased;
      together_ &= sight.slots.empty() && sight.begin <= end_ && begin_ <= sight.end;
      begin_ = std::min(begin_, sight.begin);
      end_ = std::max(end_, sight.end);
      all_begin_ = std::max(all_begin_, sight.begin);
      all_end_ = std::min(all_end_, sight.end);
    }
  }

  // Some places of a span: from its `first` one on, those from `begin` to `end`.
  struct Part {
    const Sight* map;  // null where places are slots
    int64_t first, begin, end;

    int64_t slot(int64_t place) const { return map ? map->slots[place - map->begin] : place; }
  };

  // A span of queries that see different slots at the same places: first those for whom places are slots, then others.
  void add_apart(int64_t first) {
    bool done[QUERIES] = {};
    for (int lane = 0; lane < count_; ++lane) {
      if (done[lane]) continue;
      const Sight* sight = lanes_[lane];
      const bool straight = sight->straight_until(first + SPAN);
      Part part{straight ? nullptr : sight, first, std::max(first, sight->begin), std::min(first + SPAN, sight->end)};
      Whole begins[VECTORS] = {}, ends[VECTORS] = {};
      for (int other = lane; other < count_; ++other) {
        const Sight* theirs = lanes_[other];
        const int64_t begin = std::max(first, theirs->begin), end = std::min(first + SPAN, theirs->end);
        const bool near = theirs->straight_until(first + SPAN) && begin <= part.end && part.begin <= end;
        if (done[other] || (theirs != sight && !(straight && near))) continue;
        done[other] = true;
        begins[other / LANES][other % LANES] = static_cast<int32_t>(begin);
        ends[other / LANES][other % LANES] = static_cast<int32_t>(end);
        part.begin = std::min(part.begin, begin);
        part.end = std::max(part.end, end);
      }
      if (part.begin < part.end) add(part, begins, ends);
    }
  }

  // Adds some places of a span to the sums of lanes that see them.
  void add(const Part& part, const Whole* begins, const Whole* ends) {
    alignas(LINE) Lanes scores[SPAN * VECTORS];
    const int64_t count = part.end - part.first, steps = up(up(count, STEP) / STEP, Multiply::STEPS);
    const int64_t filled = up(count, Multiply::KEYS);
    const Rows<Item> keys = rows(keys_store(), part, filled);
    multiply_.score(queries_.data(), keys.first, keys.apart, filled, width_, scores);
    if (biased_) add_bias(part, scores);
    if (!together_ || part.first < all_begin_ || part.end > all_end_) hide(part, begins, ends, scores);
    weigh(scores, count, biased_ ? 1 : work_.scale, part.first + SPAN);
    std::fill(scores + count * VECTORS, scores + steps * STEP * VECTORS, Lanes{});
    for (int64_t i = 0; i < steps; ++i)
      for (int v = 0; v < VECTORS; ++v)
        Pairs<Type>::join(scores + i * STEP * VECTORS + v, VECTORS, weights_.data() + (i * QUERIES + v * LANES) * STEP);
    const Rows<Item> values = panels(part, steps);
    multiply_.sum(weights_.data(), values.first, values.apart, steps, width_, count_, sums.values());
  }

  // Scales the scores, and adds what the mask adds.
  void add_bias(const Part& part, Lanes* scores) const {
    for (int64_t place = part.begin; place < part.end; ++place) {
      Lanes* score = scores + (place - part.first) * VECTORS;
      for (int v = 0; v < VECTORS; ++v) score[v] *= work_.scale;
      for (int lane = 0; lane < count_; ++lane)
        score[lane / LANES][lane % LANES] += work_.added(row_, head(lane), token(lane), part.slot(place));
    }
  }

  static void hide(const Part& part, const Whole* begins, const Whole* ends, Lanes* scores) {
    for (int64_t place = part.first; place < part.end; ++place, scores += VECTORS)
      for (int v = 0; v < VECTORS; ++v) {
        const int32_t here = static_cast<int32_t>(place);
        const Whole seen = (begins[v] <= here) & (ends[v] > here);
        scores[v] = seen ? scores[v] : Lanes{} + NOTHING;
      }
  }

  // Scores -> weights, against the greatest score so far. Meanwhile the memory has nothing else to do, so that the slots
  // from `next` on are asked for.
  void weigh(Lanes* scores, int64_t count, float scale, int64_t next) {
    Lanes factors[VECTORS], shifts[VECTORS];
    bool grown = false;
    for (int v = 0; v < VECTORS; ++v) {
      Lanes greatest = Lanes{} + NOTHING;
      for (int64_t i = 0; i < count; ++i) greatest = greater(scores[i * VECTORS + v], greatest);
      greatest = greater(greatest * scale, sums.greatest[v]);
      shifts[v] = greatest == NOTHING ? Lanes{} : greatest;
      factors[v] = exponential(sums.greatest[v] - shifts[v]);
      grown |= any(greatest != sums.greatest[v]);
      sums.greatest[v] = greatest;
    }
    if (grown) sums.scale(factors, count_);
    Lanes totals[VECTORS][LANES] = {};
    const Rows<Item> keys = keys_store().from(next), values = values_store().from(next);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t item = 0; item < width_; item += LINE / sizeof(Item)) {
        ask(keys.from(i).first + item);
        ask(values.from(i).first + item);
      }
      for (int v = 0; v < VECTORS; ++v) {
        Lanes& score = scores[i * VECTORS + v];
        score = exponential(fused(score, scale, -shifts[v]));
        totals[v][i % LANES] += score;
      }
    }
    for (int v = 0; v < VECTORS; ++v) sums.total[v] += fold(totals[v], sum);
  }

#if defined(__AVX512F__)
  // Adds some places of a span to the sums of few queries, which see all slots between their first and last ones.
  void add_transposed(const Part& part) {
    alignas(LINE) Lanes scores[LANES][SPAN / LANES];
    const int64_t count = part.end - part.first, steps = up(count, STEP) / STEP;
    const int64_t blocks = up(count, LANES) / LANES, vectors = up(blocks, STEP);
    const Rows<Item> keys = rows(keys_store(), part, blocks * LANES), later = keys_store().from(part.first + SPAN);
    for (int64_t block = 0; block < blocks; ++block)
      multiply_.score_transposed(queries_.data(), keys.from(block * LANES), later.from(block * LANES), width_, count_,
                                  scores[0] + block);
    if (part.first < all_begin_ || part.end > all_end_ || count % LANES) hide_transposed(part, blocks, scores);
    weigh_transposed(scores, blocks);
    for (int q = 0; q < count_; ++q) {
      std::fill(scores[q] + blocks, scores[q] + vectors, Lanes{});
      Pairs<Type>::round(scores[q], vectors, weights_.data() + q * SPAN);
    }
    const Rows<Item> values = rows(values_store(), part, steps * STEP);
    multiply_.sum_transposed(weights_.data(), values, values_store().from(part.first + SPAN), steps, width_, count_,
                             sums.values());
  }

  void hide_transposed(const Part& part, int64_t blocks, Lanes (*scores)[SPAN / LANES]) const {
    Whole place;
    for (int i = 0; i < LANES; ++i) place[i] = static_cast<int32_t>(part.first) + i;
    for (int64_t block = 0; block < blocks; ++block, place += LANES)
      for (int q = 0; q < count_; ++q) {
        const Whole seen = (place >= begins_[0][q]) & (place < ends_[0][q]);
        scores[q][block] = seen ? scores[q][block] : Lanes{} + NOTHING;
      }
  }

  void weigh_transposed(Lanes (*scores)[SPAN / LANES], int64_t blocks) {
    Lanes found[LANES] = {}, transposed[LANES];
    for (int q = 0; q < count_; ++q) {
      Lanes most = scores[q][0];
      for (int64_t i = 1; i < blocks; ++i) most = greater(scores[q][i], most);
      found[q] = most;
    }
    transpose(found, LANES, transposed);
    const Lanes greatest = greater(fold(transposed, greater) * work_.scale, sums.greatest[0]);
    const Lanes shifts = greatest == NOTHING ? Lanes{} : greatest;
    if (any(greatest != sums.greatest[0])) {
      const Lanes factors = exponential(sums.greatest[0] - shifts);
      sums.scale(&factors, count_);
      sums.greatest[0] = greatest;
    }
    for (int q = 0; q < count_; ++q) {
      const Lanes shift = Lanes{} + shifts[q];
      Lanes total = {};
      for (int64_t i = 0; i < blocks; ++i) {
        scores[q][i] = exponential(fused(scores[q][i], work_.scale, -shift));
        total += scores[q][i];
      }
      found[q] = total;
    }
    transpose(found, LANES, transposed);
    sums.total[0] += fold(transposed, sum);
  }
#endif

  // Rows of a store for `count` places where they lie or, if they do not lie side by side or are too few or too narrow,
  // copied, with zeros where nobody looks.
  Rows<Item> rows(const Rows<Item>& store, const Part& part, int64_t count) {
    if (!part.map && part.begin == part.first && part.end == part.first + count && work_.width == width_)
      return store.from(part.first);
    Item* to = keys_.data();
    for (int64_t place = part.first; place < part.first + count; ++place, to += width_) {
      const int64_t width = part.begin <= place && place < part.end ? work_.width : 0;
      if (width) std::copy_n(store.from(part.slot(place)).first, width, to);
      std::fill(to + width, to + width_, Item{});
    }
    return {keys_.data(), width_};
  }

  // The values of some places, in steps.
  Rows<Item> panels(const Part& part, int64_t steps) {
    const Rows<Item> values = rows(values_store(), part, steps * STEP);
    if constexpr (STEP == 1) {
      return values;
    } else {
      Item* to = values_.data();
      for (int64_t step = 0; step < steps; ++step)
        for (int64_t i = 0; i < width_; i += OUTPUTS, to += 2 * OUTPUTS) {
          Lanes both[2];
          Pairs<Type>::load(values.first + 2 * step * values.apart + i, values.apart, both);
          std::memcpy(to, both, sizeof(both));
        }
      return {values_.data(), 2 * width_};
    }
  }
};

// Every tile reads its pieces; whoever reads the last one of a tile puts them together.
template <class Type, int VECTORS, class Multiply>
void attend_all(const Attention<Type>& work) {
  using Work = Tile<Type, VECTORS, Multiply>;
  const Sights<Type> sights(work);
  const int64_t pieces = work.pieces(), tiles = up(work.tokens * work.groups, Work::QUERIES) / Work::QUERIES;
  const int64_t keys_heads = work.heads / work.groups;
  const int64_t all = work.rows * keys_heads * tiles, saved = Work::saved(work);
  std::unique_ptr<float[]> partial(pieces > 1 ? new float[all * pieces * saved] : nullptr);
  std::vector<std::atomic<int64_t>> left(pieces > 1 ? all : 0);
  for (auto& count : left) count = pieces;
  const int64_t cost = Work::QUERIES * std::min(PIECE, work.slots) * work.width * 2 / (tiles > 1 ? 2 : 1);
  const int64_t share = std::max<int64_t>(1, SHARE / std::max<int64_t>(1, cost));
  slipstream::parallel_for(0, all * pieces, share, [&](int64_t begin, int64_t end) {
    Work tile(work, sights);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t number = item / pieces, piece = item % pieces, head = number / tiles;
      if (item == begin || piece == 0) tile.take(head / keys_heads, head % keys_heads, number % tiles);
      if (tile.sees(piece * PIECE, (piece + 1) * PIECE) || pieces == 1) tile.read(piece * PIECE, (piece + 1) * PIECE);
      if (pieces > 1) {
        float* mine = partial.get() + number * pieces * saved;
        if (tile.sees(piece * PIECE, (piece + 1) * PIECE)) tile.sums.save(mine + piece * saved);
        if (left[number].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
        tile.sums.clear();
        for (int64_t each = 0; each < pieces; ++each)
          if (tile.sees(each * PIECE, (each + 1) * PIECE)) tile.sums.add(mine + each * saved, tile.queries());
      }
      tile.write();
    }
  });
}

template <class Type>
void run(const slipstream::Attended& given) {
  using Item = typename Type::Item;
  const auto place = [](const void* tensor) { return static_cast<const Item*>(tensor); };
  const Attention<Type> work{place(given.queries), place(given.keys), place(given.values), place(given.mask),
                             static_cast<Item*>(given.outputs), given.query, given.key, given.value, given.masked,
                             given.rows, given.heads, given.groups, given.tokens, given.slots, given.width, given.scale};
  // With float32, two vectors are slower than one.
  const bool few = Type::STEP == 1 || work.tokens * work.groups <= LANES;
#if defined(__AMX_BF16__) && defined(__AVX512F__)
  if constexpr (Type::STEP == 2)
    if (tiles_allowed()) return few ? attend_all<Type, 1, Blocks<1>>(work) : attend_all<Type, 2, Blocks<2>>(work);
#endif
  few ? attend_all<Type, 1, Vectors<Type, 1>>(work) : attend_all<Type, 2, Vectors<Type, 2>>(work);
}

}  // namespace

void slipstream::attend(Number number, const Attended& work) {
  with_type(number, [&](auto type) { run<decltype(type)>(work); });
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
    slipstream::attend(number, {queries.data_ptr(), keys.data_ptr(), values.data_ptr(), mask ? mask->data_ptr() : nullptr,
                                outputs.data_ptr(), steps(queries), steps(keys), steps(values),
                                mask ? steps(*mask) : Steps{}, queries.size(0), queries.size(1),
                                queries.size(1) / keys.size(1), queries.size(2), keys.size(2), queries.size(3),
                                static_cast<float>(scale)});
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("attend(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) { m.impl("attend", TORCH_BOX(&attend)); }
