/* Decode-sized bf16 kernels for CPUs with AVX-512 BF16: matrix products, RMSNorm, rotary embedding and attention
 * over the paged cache. Plain C, loaded with ctypes; the torch twins in kernels/cpu_ops are the documentation.
 *
 * Numbers: products accumulate in float32 and are rounded to bf16 once, at the end.
 */
#include <immintrin.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))

#include "cpu_threads.h"

/* ---- numbers ------------------------------------------------------------------------------------------------ */
INLINE __m512 widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }
INLINE __m512 load16(const bf16 *from) { return widen(_mm256_loadu_si256((const __m256i *)from)); }
INLINE void store16(bf16 *to, __m512 value) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(value)); }
INLINE __m512 load_some(const bf16 *from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }
INLINE void store_some(bf16 *to, __m512 value, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}
INLINE __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* 2^n times a degree-6 polynomial of the remainder; relative error below 2e-7 where the result is normal, and the
 * limits beyond: 0 and infinity. NaN stays NaN (min and max return their second operand then). */
INLINE __m512 exp16(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(150.0f), _mm512_max_ps(_mm512_set1_ps(-150.0f), x));
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

/* out[i] = exp(x[i]), n a multiple of 16; for tests. */
void hotrack_exp(const float *x, float *out, long n) {
  for (long i = 0; i < n; i += 16) _mm512_storeu_ps(out + i, exp16(_mm512_loadu_ps(x + i)));
}

/* ---- matrix products ----------------------------------------------------------------------------------------
 * Packed weight: blocks of 32 output columns, each [K / 2][32][2]: two registers hold one pair of K of a block.
 * A gate-and-up weight alternates a block of gate with the same block of up.
 */
#define COLS 32
#define ROWS 12 /* 24 accumulators, 2 registers of weights */

enum { PLAIN, ADD, SILU_MUL, FLOAT_OUT };

typedef struct {
  const bf16 *weight; /* packed */
  const bf16 *bias;   /* [N] or NULL; gate-and-up: [2 N], gate first */
  long n, k;          /* n: columns of the result */
} linear;

typedef struct {
  const linear *fixed;
  const bf16 *x, *residual;
  void *out;
  long m, x_stride, residual_stride;
  long blocks_per_unit;
  int kind;
} product;

typedef struct {
  const bf16 *source;
  bf16 *packed;
  long n, k;
  int halves;
} packing;

/* 16 rows of 16 words, columns of 16 words out. */
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) { /* lane j of r[4 q + i] holds word 4 j + i of rows 4 q to 4 q + 3 */
    __m512i low02 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), low13 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    __m512i high02 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    __m512i high13 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(low02, high02, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
    t[4 + i] = _mm512_shuffle_i32x4(low13, high13, 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
  }
  memcpy(r, t, sizeof t);
}

static void pack_unit(const void *job, long unit) {
  const packing *j = job;
  long block = unit / j->halves, half = unit % j->halves, pairs = j->k / 2;
  bf16 *packed = j->packed + unit * COLS * j->k;
  for (long col = 0; col < COLS; col += 16) {
    long first = block * COLS + col, rows = j->n - first < 16 ? j->n - first : 16;
    const bf16 *from = j->source + (half * j->n + first) * j->k;
    for (long pair = 0; pair < pairs; pair += 16) {
      long count = pairs - pair < 16 ? pairs - pair : 16;
      __mmask16 mask = (__mmask16)((1u << count) - 1);
      __m512i words[16];
      for (int r = 0; r < 16; r++)
        words[r] = r < rows ? _mm512_maskz_loadu_epi32(mask, from + r * j->k + 2 * pair) : _mm512_setzero_si512();
      transpose(words);
      for (int p = 0; p < count; p++) _mm512_storeu_si512(packed + (pair + p) * 2 * COLS + 2 * col, words[p]);
    }
  }
}

/* source [halves * n, k] -> packed; `halves` is 2 for a gate-and-up weight, else 1. */
void hotrack_pack(const bf16 *source, long n, long k, int halves, bf16 *packed) {
  packing j = {source, packed, n, k, halves};
  parallel(pack_unit, &j, (n + COLS - 1) / COLS * halves);
}

/* acc[rows][2] = x[rows, k] @ block */
INLINE void tile(const int rows, __m512 acc[][2], const bf16 *x, long stride, const bf16 *block, long k) {
  __m512 low[ROWS], high[ROWS];
  for (int r = 0; r < rows; r++) low[r] = high[r] = _mm512_setzero_ps();
  for (long p = 0; p < k; p += 2) {
    __m512i w0 = _mm512_loadu_si512(block + p * COLS), w1 = _mm512_loadu_si512(block + p * COLS + COLS);
    for (int r = 0; r < rows; r++) {
      int32_t pair;
      memcpy(&pair, x + r * stride + p, 4);
      __m512i value = _mm512_set1_epi32(pair);
      low[r] = dot_pairs(low[r], w0, value);
      high[r] = dot_pairs(high[r], w1, value);
    }
  }
  for (int r = 0; r < rows; r++) acc[r][0] = low[r], acc[r][1] = high[r];
}

/* One row: memory sets the pace; four pairs at a time hide the latency of the products. */
INLINE void tile_row(__m512 acc[][2], const bf16 *x, const bf16 *block, long k) {
  __m512 sum[4][2];
  for (int i = 0; i < 4; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  long p = 0;
  for (; p + 8 <= k; p += 8)
    for (int i = 0; i < 4; i++) {
      const bf16 *from = block + (p + 2 * i) * COLS;
      int32_t pair;
      memcpy(&pair, x + p + 2 * i, 4);
      __m512i value = _mm512_set1_epi32(pair);
      _mm_prefetch(from + 1024, _MM_HINT_T1);
      _mm_prefetch(from + 1024 + COLS, _MM_HINT_T1);
      sum[i][0] = dot_pairs(sum[i][0], _mm512_loadu_si512(from), value);
      sum[i][1] = dot_pairs(sum[i][1], _mm512_loadu_si512(from + COLS), value);
    }
  for (; p < k; p += 2) {
    int32_t pair;
    memcpy(&pair, x + p, 4);
    __m512i value = _mm512_set1_epi32(pair);
    sum[0][0] = dot_pairs(sum[0][0], _mm512_loadu_si512(block + p * COLS), value);
    sum[0][1] = dot_pairs(sum[0][1], _mm512_loadu_si512(block + p * COLS + COLS), value);
  }
  for (int j = 0; j < 2; j++)
    acc[0][j] = _mm512_add_ps(_mm512_add_ps(sum[0][j], sum[1][j]), _mm512_add_ps(sum[2][j], sum[3][j]));
}

static void multiply(int rows, __m512 acc[][2], const bf16 *x, long stride, const bf16 *block, long k) {
  switch (rows) {
    case 1: tile_row(acc, x, block, k); return;
    case 2: tile(2, acc, x, stride, block, k); return;
    case 3: tile(3, acc, x, stride, block, k); return;
    case 4: tile(4, acc, x, stride, block, k); return;
    case 5: tile(5, acc, x, stride, block, k); return;
    case 6: tile(6, acc, x, stride, block, k); return;
    case 7: tile(7, acc, x, stride, block, k); return;
    case 8: tile(8, acc, x, stride, block, k); return;
    case 9: tile(9, acc, x, stride, block, k); return;
    case 10: tile(10, acc, x, stride, block, k); return;
    case 11: tile(11, acc, x, stride, block, k); return;
    default: tile(12, acc, x, stride, block, k); return;
  }
}

INLINE __mmask16 columns(long n, long first) { /* which of 16 columns from `first` on exist */
  long left = n - first;
  return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

static void add_bias(int rows, __m512 acc[][2], const bf16 *bias, long n, long first) {
  for (int j = 0; j < 2; j++) {
    __m512 value = load_some(bias + first + 16 * j, columns(n, first + 16 * j));
    for (int r = 0; r < rows; r++) acc[r][j] = _mm512_add_ps(acc[r][j], value);
  }
}

static void product_rows(const product *p, long block, long row, int rows) {
  const linear *f = p->fixed;
  long n = f->n, first = block * COLS, block_size = f->k * COLS;
  const bf16 *x = p->x + row * p->x_stride;
  __m512 acc[ROWS][2];
  if (p->kind == SILU_MUL) {
    __m512 gate[ROWS][2];
    multiply(rows, gate, x, p->x_stride, f->weight + 2 * block * block_size, f->k);
    multiply(rows, acc, x, p->x_stride, f->weight + (2 * block + 1) * block_size, f->k);
    if (f->bias) {
      add_bias(rows, gate, f->bias, n, first);
      add_bias(rows, acc, f->bias + n, n, first);
    }
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < 2; j++) {
        __m512 one = _mm512_set1_ps(1.0f), g = gate[r][j];
        __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), g))));
        acc[r][j] = _mm512_mul_ps(acc[r][j], _mm512_mul_ps(g, sigmoid));
      }
  } else {
    multiply(rows, acc, x, p->x_stride, f->weight + block * block_size, f->k);
    if (f->bias) add_bias(rows, acc, f->bias, n, first);
  }
  for (int j = 0; j < 2; j++) {
    long col = first + 16 * j;
    __mmask16 mask = columns(n, col);
    for (int r = 0; r < rows; r++) {
      if (p->kind == FLOAT_OUT) {
        _mm512_mask_storeu_ps((float *)p->out + (row + r) * n + col, mask, acc[r][j]);
        continue;
      }
      if (p->kind == ADD)
        acc[r][j] = _mm512_add_ps(acc[r][j], load_some(p->residual + (row + r) * p->residual_stride + col, mask));
      store_some((bf16 *)p->out + (row + r) * n + col, acc[r][j], mask);
    }
  }
}

static void product_unit(const void *job, long unit) {
  const product *p = job;
  long blocks = (p->fixed->n + COLS - 1) / COLS;
  long last = (unit + 1) * p->blocks_per_unit;
  long tiles = (p->m + ROWS - 1) / ROWS;
  for (long block = unit * p->blocks_per_unit; block < last && block < blocks; block++)
    for (long t = 0; t < tiles; t++) { /* tiles of equal size: a tile of one row would waste a pass */
      long row = p->m * t / tiles, end = p->m * (t + 1) / tiles;
      product_rows(p, block, row, (int)(end - row));
    }
}

/* out [m, n] = x [m, k] @ weight.T (+ bias), then what `kind` says; rows of x and residual are `stride` apart. */
void hotrack_linear(const linear *fixed, int kind, const bf16 *x, long x_stride, const bf16 *residual,
                    long residual_stride, void *out, long m) {
  product p = {fixed, x, residual, out, m, x_stride, residual_stride, 1, kind};
  long blocks = (fixed->n + COLS - 1) / COLS;
  p.blocks_per_unit = blocks > 256 ? blocks / 64 : 1;
  parallel(product_unit, &p, (blocks + p.blocks_per_unit - 1) / p.blocks_per_unit);
}

/* ---- RMSNorm ------------------------------------------------------------------------------------------------ */
typedef struct {
  const bf16 *x, *weight;
  bf16 *out;
  long rows, heads, row_stride, d, rows_per_unit;
  float eps;
} norm;

static void norm_one(const norm *j, long index) {
  const bf16 *x = j->x + index / j->heads * j->row_stride + index % j->heads * j->d;
  bf16 *out = j->out + index * j->d;
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < j->d; i += 16) {
    __m512 v = load_some(x + i, columns(j->d, i));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)j->d + j->eps));
  for (long i = 0; i < j->d; i += 16) {
    __mmask16 mask = columns(j->d, i);
    __m512 v = _mm512_mul_ps(_mm512_mul_ps(load_some(x + i, mask), scale), load_some(j->weight + i, mask));
    store_some(out + i, v, mask);
  }
}

static void norm_unit(const void *job, long unit) {
  const norm *j = job;
  long last = (unit + 1) * j->rows_per_unit;
  for (long i = unit * j->rows_per_unit; i < last && i < j->rows; i++) norm_one(j, i);
}

/* x [tokens, heads, d] with rows `row_stride` apart -> out, contiguous */
void hotrack_rms_norm(const bf16 *x, long row_stride, const bf16 *weight, bf16 *out, long tokens, long heads, long d,
                      float eps) {
  norm j = {x, weight, out, tokens * heads, heads, row_stride, d, 1, eps};
  j.rows_per_unit = 1 + (16 << 10) / d;
  parallel(norm_unit, &j, (j.rows + j.rows_per_unit - 1) / j.rows_per_unit);
}

/* ---- rotary embedding and cache ------------------------------------------------------------------------------ */
typedef struct {
  bf16 *qkv; /* [tokens, (heads + kv_heads) rotated, then kv_heads of V] */
  const bf16 *cos, *sin;
  const long *rows;
  bf16 *cache;
  long tokens, stride, rotated, kv_heads, d, per_unit;
} rotate;

static void rotate_one(const rotate *j, long t) {
  const bf16 *cos = j->cos + t * j->d, *sin = j->sin + t * j->d;
  bf16 *token = j->qkv + t * j->stride;
  long half = j->d / 2;
  for (long h = 0; h < j->rotated; h++) {
    bf16 *x = token + h * j->d;
    for (long i = 0; i < half; i += 16) { /* sin carries the sign of the first half */
      __m512 a = load16(x + i), b = load16(x + half + i);
      __m512 low = _mm512_fmadd_ps(b, load16(sin + i), _mm512_mul_ps(a, load16(cos + i)));
      __m512 high = _mm512_fmadd_ps(a, load16(sin + half + i), _mm512_mul_ps(b, load16(cos + half + i)));
      store16(x + i, low);
      store16(x + half + i, high);
    }
  }
  const bf16 *kv = token + (j->rotated - j->kv_heads) * j->d; /* K of every head, then V of every head */
  for (long i = 0; i < 2 * j->kv_heads; i++)
    memcpy(j->cache + j->rows[t * 2 * j->kv_heads + i] * j->d, kv + i * j->d, j->d * sizeof(bf16));
}

static void rotate_unit(const void *job, long unit) {
  const rotate *j = job;
  for (long t = unit * j->per_unit; t < (unit + 1) * j->per_unit && t < j->tokens; t++) rotate_one(j, t);
}

/* Rotates the q and k heads of qkv [tokens, rotated + kv_heads, d] in place and puts k and v into the cache. */
void hotrack_rotate_and_cache(bf16 *qkv, long stride, const bf16 *cos, const bf16 *sin, const long *rows, bf16 *cache,
                              long tokens, long rotated, long kv_heads, long d) {
  rotate j = {qkv, cos, sin, rows, cache, tokens, stride, rotated, kv_heads, d, 8};
  parallel(rotate_unit, &j, (tokens + 7) / 8);
}

#include "cpu_attention.h"
