// Recurrences of linear attention and state space layers over few tokens, and the short convolutions before them.
//
// Tokens are taken one after the other, so that whatever is computed for a token has the same bits however many others are
// read in the same pass, and a state behind some tokens the bits of having read only these. A state is read from memory once
// for all tokens, and written only by who asks for the one behind them: a pass does not, since nobody knows yet how many of
// its tokens stand. Everything is float32.

#include "lanes.h"
#include "parallel.h"

namespace {

constexpr int COLUMNS = 4 * LANES;  // of a state that are worked on at a time: with 128 keys they fit the first cache

// Numbers of every row, token and head, (rows, tokens, heads, ...), of which the last dimension is dense.
struct Given {
  const float* place;
  int64_t row, token, head;

  Given(const Tensor& tensor, int dims)
      : place(static_cast<const float*>(tensor.data_ptr())), row(tensor.stride(0)), token(tensor.stride(1)),
        head(tensor.stride(2)) {
    STD_TORCH_CHECK(tensor.dim() == dims && tensor.scalar_type() == ScalarType::Float &&
                        (dims == 3 || tensor.stride(3) == 1 || tensor.size(3) == 1),
                    "slipstream: recurrences take float32 with a dense last dimension");
  }

  const float* at(int64_t r, int64_t t, int64_t h) const { return place + r * row + t * token + h * head; }
};

float* floats(const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

// A tensor of the sizes of another one, in one piece.
Tensor made_like(const Tensor& tensor) {
  return torch::stable::new_empty(tensor, std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end()));
}

void check_state(const Tensor& state) {
  STD_TORCH_CHECK(state.dim() == 4 && state.scalar_type() == ScalarType::Float && state.is_contiguous(),
                  "slipstream: a state is (rows, heads, ..., ...), float32 and contiguous");
}

float total(const Lanes& lanes) {
  float parts[LANES];
  std::memcpy(parts, &lanes, sizeof(parts));
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

float product(const float* left, const float* right, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += left[i] * right[i];
  return sum;
}

// ---- the gated delta rule -------------------------------------------------------------------------------------------

// S_t = a_t S_{t-1} + k_t u_t', u_t = b_t (v_t - a_t S_{t-1}' k_t), o_t = S_t' q_t (equation 10 of arXiv 2412.06464).
struct DeltaRule {
  Given keys, values, decays, strengths;
  const Given* queries;  // null: nobody asks for outputs
  const float* start;    // (rows, heads, size, width)
  float *outputs, *end;  // (rows, tokens, heads, width), and like `start`; null: nobody asks for them
  int64_t rows, tokens, heads, key_heads, size, width;
};

// Keys (or queries) of a head as the rule takes them, of length `scale`, one token behind the other.
void take(const DeltaRule& rule, const Given& from, int64_t row, int64_t head, float scale, float* to) {
  for (int64_t token = 0; token < rule.tokens; ++token, to += rule.size) {
    const float* given = from.at(row, token, head * rule.key_heads / rule.heads);
    const float factor = scale / std::sqrt(product(given, given, rule.size) + 1e-6f);
    for (int64_t i = 0; i < rule.size; ++i) to[i] = given[i] * factor;
  }
}

// One sweep over the state: the token before is written into it while this one's key and query read it.
template <bool FIRST>
void sweep(float* state, int64_t size, float decay, const float* before, const float* added, const float* key,
           const float* query, float* known, float* seen) {
  Lanes news[4], by_key[4] = {}, by_query[4] = {};
  std::memcpy(news, added, sizeof(news));
  for (int64_t i = 0; i < size; ++i, state += COLUMNS) {
    Lanes line[4];
    std::memcpy(line, state, sizeof(line));
    for (int part = 0; part < 4; ++part) {
      if (!FIRST) line[part] = fused(line[part], decay, news[part] * before[i]);
      by_key[part] = fused(line[part], key[i], by_key[part]);
      by_query[part] = fused(line[part], query[i], by_query[part]);
    }
    if (!FIRST) std::memcpy(state, line, sizeof(line));
  }
  std::memcpy(known, by_key, sizeof(by_key));
  std::memcpy(seen, by_query, sizeof(by_query));
}

// Some columns of a head's state: `keys`, `queries` (tokens, size), and `state` (size, COLUMNS) to work in.
void run_columns(const DeltaRule& rule, int64_t row, int64_t head, int64_t first, const float* keys,
                 const float* queries, float* state) {
  const int64_t count = std::min<int64_t>(COLUMNS, rule.width - first), place = (row * rule.heads + head) * rule.size;
  for (int64_t i = 0; i < rule.size; ++i) {
    const float* from = rule.start + (place + i) * rule.width + first;
    std::fill(std::copy(from, from + count, state + i * COLUMNS), state + (i + 1) * COLUMNS, 0.0f);
  }
  alignas(LINE) float added[COLUMNS] = {}, known[COLUMNS], seen[COLUMNS];
  float decay = 1;
  for (int64_t token = 0; token < rule.tokens; ++token) {
    const float *key = keys + token * rule.size, *query = queries + token * rule.size;
    token ? sweep<false>(state, rule.size, decay, key - rule.size, added, key, query, known, seen)
          : sweep<true>(state, rule.size, decay, key, added, key, query, known, seen);
    decay = std::exp(*rule.decays.at(row, token, head));
    const float strength = *rule.strengths.at(row, token, head), *value = rule.values.at(row, token, head) + first;
    for (int64_t i = 0; i < count; ++i) added[i] = strength * (value[i] - decay * known[i]);
    if (!rule.outputs) continue;
    const float own = product(query, key, rule.size);
    float* output = rule.outputs + ((row * rule.tokens + token) * rule.heads + head) * rule.width + first;
    for (int64_t i = 0; i < count; ++i) output[i] = decay * seen[i] + own * added[i];
  }
  if (!rule.end) return;
  const float* last = keys + (rule.tokens - 1) * rule.size;
  sweep<false>(state, rule.size, decay, last, added, last, last, known, seen);
  for (int64_t i = 0; i < rule.size; ++i)
    std::copy_n(state + i * COLUMNS, count, rule.end + (place + i) * rule.width + first);
}

void run(const DeltaRule& rule) {
  const int64_t cost = rule.size * rule.width * rule.tokens;
  slipstream::parallel_for(0, rule.rows * rule.heads, share_of(cost), [&](int64_t begin, int64_t end) {
    const int64_t all = rule.tokens * rule.size;
    std::unique_ptr<float[]> room(new float[2 * all + rule.size * COLUMNS]);
    float *keys = room.get(), *queries = keys + (rule.queries ? all : 0), *state = keys + 2 * all;
    for (int64_t each = begin; each < end; ++each) {
      const int64_t row = each / rule.heads, head = each % rule.heads;
      take(rule, rule.keys, row, head, 1, keys);
      if (rule.queries) take(rule, *rule.queries, row, head, 1 / std::sqrt(static_cast<float>(rule.size)), queries);
      for (int64_t first = 0; first < rule.width; first += COLUMNS)
        run_columns(rule, row, head, first, keys, queries, state);
    }
  });
}

// Queries and keys (rows, tokens, heads or fewer, size), values (rows, tokens, heads, width), log a_t and b_t (rows,
// tokens, heads), and the state before them (rows, heads, size, width) -> outputs like values; without queries, the state
// behind the tokens.
Tensor gated_delta_rule(std::optional<Tensor> queries, Tensor keys, Tensor values, Tensor decays, Tensor strengths,
                        Tensor state) {
  check_state(state);
  const int64_t heads = state.size(1);
  STD_TORCH_CHECK(keys.dim() == 4 && values.dim() == 4 && keys.size(3) == state.size(2) &&
                      values.size(3) == state.size(3) && values.size(2) == heads && values.size(0) == state.size(0) &&
                      keys.size(2) > 0 && heads % keys.size(2) == 0 && keys.size(1) == values.size(1) && keys.size(1) > 0,
                  "slipstream::gated_delta_rule: keys, values and the state do not fit");
  const Given asked(queries ? *queries : keys, 4);
  STD_TORCH_CHECK(!queries || (queries->size(3) == keys.size(3) && queries->size(2) == keys.size(2) &&
                               queries->size(1) == keys.size(1)),
                  "slipstream::gated_delta_rule: queries and keys do not fit");
  Tensor found = made_like(queries ? values : state);
  run(DeltaRule{Given(keys, 4), Given(values, 4), Given(decays, 3), Given(strengths, 3), queries ? &asked : nullptr,
                floats(state), queries ? floats(found) : nullptr, queries ? nullptr : floats(found), state.size(0),
                keys.size(1), heads, keys.size(2), state.size(2), state.size(3)});
  return found;
}

// ---- state spaces ---------------------------------------------------------------------------------------------------

// h_t = exp(d_t A) h_{t-1} + d_t x_t B_t', y_t = h_t C_t + D x_t (arXiv 2405.21060).
struct StateSpace {
  Given inputs, steps, decays, into;
  const Given* out_of;   // C; null: nobody asks for outputs
  const float* skip;     // D of every head, or null
  const float* start;    // (rows, heads, width, size)
  float *outputs, *end;  // (rows, tokens, heads, width), and like `start`; null: nobody asks for them
  int64_t rows, tokens, heads, groups, width, size;

  int64_t vectors() const { return (size + LANES - 1) / LANES; }
};

// What goes in or out of the states of a head, in whole vectors, one token behind the other.
void take(const StateSpace& space, const Given& from, int64_t row, int64_t head, float* to) {
  const int64_t padded = space.vectors() * LANES;
  for (int64_t token = 0; token < space.tokens; ++token, to += padded) {
    const float* given = from.at(row, token, head * space.groups / space.heads);
    std::fill(std::copy(given, given + space.size, to), to + padded, 0.0f);
  }
}

void run_head(const StateSpace& space, int64_t row, int64_t head, const float* into, const float* out_of, float* decays,
              float* line) {
  const int64_t vectors = space.vectors();
  for (int64_t token = 0; token < space.tokens; ++token) decays[token] = std::exp(*space.decays.at(row, token, head));
  for (int64_t p = 0; p < space.width; ++p) {
    const int64_t place = ((row * space.heads + head) * space.width + p) * space.size;
    std::fill(std::copy_n(space.start + place, space.size, line), line + vectors * LANES, 0.0f);
    for (int64_t token = 0; token < space.tokens; ++token) {
      const float input = space.inputs.at(row, token, head)[p], added = *space.steps.at(row, token, head) * input;
      const float *in = into + token * vectors * LANES, *out = out_of + token * vectors * LANES;
      Lanes sum = {};
      for (int64_t i = 0; i < vectors; ++i) {
        const Lanes now = fused(Float32::load(line + i * LANES), decays[token], Float32::load(in + i * LANES) * added);
        std::memcpy(line + i * LANES, &now, sizeof(now));
        sum = fused(now, Float32::load(out + i * LANES), sum);
      }
      if (space.outputs)
        space.outputs[((row * space.tokens + token) * space.heads + head) * space.width + p] =
            total(sum) + (space.skip ? space.skip[head] * input : 0);
    }
    if (space.end) std::copy_n(line, space.size, space.end + place);
  }
}

void run(const StateSpace& space) {
  const int64_t cost = space.size * space.width * space.tokens;
  slipstream::parallel_for(0, space.rows * space.heads, share_of(cost), [&](int64_t begin, int64_t end) {
    const int64_t padded = space.vectors() * LANES, all = space.tokens * padded;
    std::unique_ptr<float[]> room(new float[2 * all + padded + space.tokens]);
    float *into = room.get(), *out_of = into + (space.out_of ? all : 0), *line = into + 2 * all;
    for (int64_t each = begin; each < end; ++each) {
      const int64_t row = each / space.heads, head = each % space.heads;
      take(space, space.into, row, head, into);
      if (space.out_of) take(space, *space.out_of, row, head, out_of);
      run_head(space, row, head, into, out_of, line + padded, line);
    }
  });
}

// Inputs x (rows, tokens, heads, width), d_t and d_t A (rows, tokens, heads), B and C (rows, tokens, heads or fewer, size), D
// (heads,) and the state before them (rows, heads, width, size) -> outputs like inputs; without C, the state behind the
// tokens.
Tensor state_space(Tensor inputs, Tensor steps, Tensor decays, Tensor into, std::optional<Tensor> out_of,
                   std::optional<Tensor> skip, Tensor state) {
  check_state(state);
  const int64_t heads = state.size(1);
  STD_TORCH_CHECK(inputs.dim() == 4 && into.dim() == 4 && inputs.size(2) == heads && inputs.size(3) == state.size(2) &&
                      inputs.size(0) == state.size(0) && into.size(3) == state.size(3) && into.size(2) > 0 &&
                      heads % into.size(2) == 0 && inputs.size(1) == into.size(1),
                  "slipstream::state_space: inputs and the state do not fit");
  const Given asked(out_of ? *out_of : into, 4);
  STD_TORCH_CHECK((!out_of || (out_of->size(3) == into.size(3) && out_of->size(2) == into.size(2))) &&
                      (!skip || (skip->is_contiguous() && skip->scalar_type() == ScalarType::Float)),
                  "slipstream::state_space: what goes out does not fit what goes in");
  Tensor found = made_like(out_of ? inputs : state);
  run(StateSpace{Given(inputs, 4), Given(steps, 3), Given(decays, 3), Given(into, 4), out_of ? &asked : nullptr,
                 skip ? floats(*skip) : nullptr, floats(state), out_of ? floats(found) : nullptr,
                 out_of ? nullptr : floats(found), state.size(0), inputs.size(1), heads, into.size(2), state.size(2),
                 state.size(3)});
  return found;
}

// ---- short convolutions ---------------------------------------------------------------------------------------------

// Inputs of a panel's channels at a place, of which `count` are there.
template <class Type>
void read_panel(const typename Type::Item* from, int64_t step, int64_t count, Lanes* to) {
  if (step == 1 && count == PANEL) {
    for (int part = 0; part < PARTS; ++part) to[part] = Type::load(from + part * LANES);
    return;
  }
  float found[PANEL] = {};
  for (int64_t i = 0; i < count; ++i) found[i] = Type::widen(from[i * step]);
  std::memcpy(to, found, sizeof(found));
}

// A panel of channels of a row: inputs at (channel, place), outputs at (place, channel).
template <class Type>
void convolve_panel(const typename Type::Item* inputs, int64_t step, int64_t onward, const float* weights, int64_t taps,
                    const typename Type::Item* bias, typename Type::Item* outputs, int64_t places, int64_t channels,
                    int64_t count) {
  for (int64_t at = 0; at < places; ++at) {
    Lanes sums[PARTS] = {}, line[PARTS];
    for (int64_t tap = 0; tap < taps; ++tap) {
      read_panel<Type>(inputs + (at + tap) * onward, step, count, line);
      for (int part = 0; part < PARTS; ++part)
        sums[part] = fused(line[part], Float32::load(weights + tap * PANEL + part * LANES), sums[part]);
    }
    float found[PANEL];
    std::memcpy(found, sums, sizeof(found));
    write_panel<Type>(found, bias, outputs + at * channels, count);
  }
}

template <class Type>
void convolve(const Tensor& inputs, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& outputs) {
  using Item = typename Type::Item;
  const int64_t taps = weight.size(1), channels = weight.size(0), places = outputs.size(1), panels = panels_of(channels);
  const auto place = [](const Tensor& tensor) { return static_cast<Item*>(tensor.data_ptr()); };
  const int64_t share = share_of(taps * places * PANEL);
  const Item *from = place(inputs), *given = place(weight), *added = bias ? place(*bias) : nullptr;
  const int64_t apart = inputs.stride(0), step = inputs.stride(1), onward = inputs.stride(2);
  Item* to = place(outputs);
  slipstream::parallel_for(0, inputs.size(0) * panels, share, [&](int64_t begin, int64_t end) {
    std::unique_ptr<float[]> weights(new float[taps * PANEL]());
    for (int64_t each = begin; each < end; ++each) {
      const int64_t row = each / panels, first = each % panels * PANEL, count = std::min<int64_t>(PANEL, channels - first);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t tap = 0; tap < taps; ++tap)
          weights[tap * PANEL + i] = Type::widen(given[(first + i) * taps + tap]);
      convolve_panel<Type>(from + row * apart + first * step, step, onward, weights.get(), taps,
                           added ? added + first : nullptr, to + row * places * channels + first, places, channels, count);
    }
  });
}

// Inputs (rows, channels, places) and a weight (channels, taps) -> (rows, places - taps + 1, channels): at every place where
// all taps have an input, each channel by itself.
Tensor short_convolution(Tensor inputs, Tensor weight, std::optional<Tensor> bias) {
  STD_TORCH_CHECK(inputs.dim() == 3 && weight.dim() == 2 && inputs.size(1) == weight.size(0) &&
                      inputs.size(2) >= weight.size(1) && weight.is_contiguous() && (!bias || bias->is_contiguous()) &&
                      weight.scalar_type() == inputs.scalar_type() &&
                      (!bias || bias->scalar_type() == inputs.scalar_type()),
                  "slipstream::short_convolution: inputs and weight do not fit");
  const int64_t places = inputs.size(2) - weight.size(1) + 1;
  Tensor outputs = torch::stable::new_empty(inputs, std::vector<int64_t>{inputs.size(0), places, inputs.size(1)});
  with_type(number_of(inputs, "short_convolution"),
            [&](auto type) { convolve<decltype(type)>(inputs, weight, bias, outputs); });
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("gated_delta_rule(Tensor? queries, Tensor keys, Tensor values, Tensor decays, Tensor strengths, Tensor state) "
        "-> Tensor");
  m.def("state_space(Tensor inputs, Tensor steps, Tensor decays, Tensor into, Tensor? out_of, Tensor? skip, "
        "Tensor state) -> Tensor");
  m.def("short_convolution(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
  m.impl("state_space", TORCH_BOX(&state_space));
  m.impl("short_convolution", TORCH_BOX(&short_convolution));
}
