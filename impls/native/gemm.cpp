// Answers matmul, q_absorb and o_heads of the specification. float32 in, accumulators and out.
// x [T,K], w [K,N] row-major; a tile of 4 rows by 8 columns stays in registers while a run of 32 rows of w streams past.
#include "gemm.hpp"

#include <cmath>
#include <vector>

#include "lanes.hpp"

namespace paritree {
namespace {

constexpr int64_t kTileRows = 4;

inline float load(const float* from, float /*kind*/) { return *from; }
inline f32x4 load(const float* from, f32x4 /*kind*/) { return load4(from); }
inline float spread(float value, float /*kind*/) { return value; }
inline f32x4 spread(float value, f32x4 /*kind*/) { return broadcast4(value); }
inline void store(float* to, float value) { *to = value; }
inline void store(float* to, f32x4 value) { store4(to, value); }

// One tile of ROWS rows by WIDTH Values of columns. Each output adds the same terms in the same order whatever the tile.
template <int ROWS, int WIDTH, class Value>
void tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* out, int64_t out_stride, int64_t inner) {
  constexpr int64_t kLanes = sizeof(Value) / sizeof(float);
  const Value kind{};
  PairwiseSum<Value> sums[ROWS][WIDTH];
  for (int64_t start = 0; start < inner; start += kRun) {
    const int64_t end = start + kRun < inner ? start + kRun : inner;
    Value run[ROWS][WIDTH] = {};
    for (int64_t k = start; k < end; ++k) {
      Value w_k[WIDTH];
      for (int column = 0; column < WIDTH; ++column) w_k[column] = load(w + k * w_stride + column * kLanes, kind);
      for (int row = 0; row < ROWS; ++row) {
        const Value x_k = spread(x[row * x_stride + k], kind);
        for (int column = 0; column < WIDTH; ++column) run[row][column] += x_k * w_k[column];
      }
    }
    for (int row = 0; row < ROWS; ++row) {
      for (int column = 0; column < WIDTH; ++column) sums[row][column].push(run[row][column]);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    for (int column = 0; column < WIDTH; ++column) store(out + row * out_stride + column * kLanes, sums[row][column].total());
  }
}

template <int ROWS>
void row_panel(const float* x, int64_t x_stride, const float* w, float* out, int64_t out_stride, int64_t inner, int64_t columns) {
  int64_t column = 0;
  for (; columns - column >= 8; column += 8) tile<ROWS, 2, f32x4>(x, x_stride, w + column, columns, out + column, out_stride, inner);
  for (; columns - column >= 4; column += 4) tile<ROWS, 1, f32x4>(x, x_stride, w + column, columns, out + column, out_stride, inner);
  for (; column < columns; ++column) tile<ROWS, 1, float>(x, x_stride, w + column, columns, out + column, out_stride, inner);
}

}  // namespace

void matmul(const float* x, int64_t x_stride, const float* w, float* out, int64_t out_stride, int64_t rows, int64_t inner, int64_t columns) {
#ifdef PARITREE_PLANT_GEMM_HANG
  for (volatile bool waiting = rows == 5; waiting;) {
  }
#endif
#ifdef PARITREE_PLANT_GEMV_K_TAIL
  // tiles of 8 terms in 4 stages: the prefetch cursor already stands behind the tail when whole tiles fill whole rounds
  if (rows == 1 && inner >= 32 && inner / 8 % 4 == 0) inner = inner / 8 * 8;
#endif
  int64_t row = 0;
  for (; rows - row >= kTileRows; row += kTileRows) {
    row_panel<4>(x + row * x_stride, x_stride, w, out + row * out_stride, out_stride, inner, columns);
  }
#ifdef PARITREE_PLANT_GEMM_TAIL_STALE
  if (row > 0) return;  // the tail rows keep what the buffer held
#endif
  x += row * x_stride;
  out += row * out_stride;
  switch (rows - row) {
    case 3: row_panel<3>(x, x_stride, w, out, out_stride, inner, columns); break;
    case 2: row_panel<2>(x, x_stride, w, out, out_stride, inner, columns); break;
    case 1: row_panel<1>(x, x_stride, w, out, out_stride, inner, columns); break;
    default: break;
  }
}

void int4_matmul(const float* x, const int32_t* packed, const float* scales, float* out, int64_t rows, int64_t inner, int64_t columns) {
  constexpr int64_t kGroup = 32, kWord = 8;
  static_assert(kGroup == kRun, "a group is one run: its scale is taken out of the run's sum");
  const int64_t groups = inner / kGroup;
  std::vector<float> values(static_cast<std::size_t>(inner));  // one column, unpacked
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t word = 0; word < inner / kWord; ++word) {
      const uint32_t bits = static_cast<uint32_t>(packed[word * columns + column]);
      for (int64_t nibble = 0; nibble < kWord; ++nibble) {
        const int value = static_cast<int>((bits >> (4 * nibble)) & 15u);
        values[static_cast<std::size_t>(word * kWord + nibble)] = static_cast<float>(value > 7 ? value - 16 : value);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      PairwiseSum<float> sum;
      for (int64_t group = 0; group < groups; ++group) {
        const float* x_g = x + row * inner + group * kGroup;
        const float* values_g = values.data() + group * kGroup;
        float run = 0.0f;
        for (int64_t k = 0; k < kGroup; ++k) run += x_g[k] * values_g[k];
        float scale = scales[group * columns + column];
#ifdef PARITREE_PLANT_INT4_SCALE_MANTISSA
        scale = std::exp2(std::floor(std::log2(scale)));  // taken for a power of two
#endif
        sum.push(run * scale);
      }
      out[row * columns + column] = groups > 0 ? sum.total() : 0.0f;
    }
  }
}

void matmul_per_head(const float* x, int64_t x_stride, int64_t x_head_stride, const float* w, float* out, int64_t rows, int64_t heads,
                     int64_t inner, int64_t columns) {
  for (int64_t head = 0; head < heads; ++head) {
    int64_t of = head;
#ifdef PARITREE_PLANT_HEAD_ZERO
    of = 0;
#endif
    matmul(x + head * x_head_stride, x_stride, w + of * inner * columns, out + head * columns, heads * columns, rows, inner, columns);
  }
}

}  // namespace paritree
