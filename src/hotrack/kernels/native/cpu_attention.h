/* Included once, by cpu_bf16.c. */
/* ---- attention ----------------------------------------------------------------------------------------------- */
#define GROUP 16 /* keys scored at once */
#define MAX_D 256
#define AHEAD 4 /* groups fetched ahead of use */
#define SPAN 512 /* keys between two rescalings; their scores stay in the first-level cache */

typedef struct {
  const bf16 *q;          /* [tokens, kv_heads * group, d] */
  const bf16 *cache;      /* first K element of the layer */
  const int32_t *tables;  /* [sequences, table_stride] */
  const int32_t *row_seq; /* [tokens] sequence of each token */
  const int32_t *row_len; /* [tokens] keys it sees */
  bf16 *out;              /* [tokens, kv_heads * group, d] */
  long q_stride, table_stride, block_stride, block_size, kv_heads, group, d, tokens, rows_per_unit;
  float scale;
} attention;

/* The sums of the 16 lanes of each of 16 registers, in order. */
INLINE __m512 sums(__m512 v[GROUP]) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

INLINE __m512 score16(const bf16 *q, const bf16 *keys, const long d) {
  __m512 part[GROUP];
  for (int key = 0; key < GROUP; key++) {
    part[key] = _mm512_setzero_ps();
    for (long i = 0; i < d; i += 32)
      part[key] = dot_pairs(part[key], _mm512_loadu_si512(keys + key * d + i), _mm512_loadu_si512(q + i));
  }
  return sums(part);
}

/* In place: scores of `len` keys -> exp(score - *top); *top grows to their maximum. Returns the sum; *shrink is
 * what earlier results must be multiplied with (Milakov and Gimelshein, 2018). */
INLINE float softmax(float *scores, long len, float *top, float *shrink) {
  __m512 highest = _mm512_set1_ps(*top), total = _mm512_setzero_ps();
  for (long i = 0; i < len; i += 16)
    highest = _mm512_mask_max_ps(highest, columns(len, i), highest, _mm512_loadu_ps(scores + i));
  float before = *top;
  *top = _mm512_reduce_max_ps(highest);
  highest = _mm512_set1_ps(*top);
  for (long i = 0; i < len; i += 16) {
    __m512 p = _mm512_maskz_mov_ps(columns(len, i), exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), highest)));
    total = _mm512_add_ps(total, p);
    _mm512_storeu_ps(scores + i, p);
  }
  *shrink = _mm512_cvtss_f32(exp16(_mm512_set1_ps(before - *top)));
  return _mm512_reduce_add_ps(total);
}

/* out[heads][width] += p[heads] * v over one run of keys; `heads` * width / 16 registers. */
INLINE void add_values(const int heads, const int width, float (*out)[MAX_D], long column, const float *p, long p_stride,
                       const bf16 *v, long d, long keys) {
  __m512 acc[heads][width / 16];
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < width / 16; i++) acc[h][i] = _mm512_loadu_ps(out[h] + column + 16 * i);
  for (long key = 0; key < keys; key++)
    for (int i = 0; i < width / 16; i++) {
      __m512 value = load16(v + key * d + column + 16 * i);
      for (int h = 0; h < heads; h++)
        acc[h][i] = _mm512_fmadd_ps(_mm512_set1_ps(p[h * p_stride + key]), value, acc[h][i]);
    }
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < width / 16; i++) _mm512_storeu_ps(out[h] + column + 16 * i, acc[h][i]);
}

static void values(int heads, float (*out)[MAX_D], const float *p, long p_stride, const bf16 *v, long d, long keys) {
  for (long column = 0; column < d; column += 64) switch (heads) {
      case 1: add_values(1, 64, out, column, p, p_stride, v, d, keys); break;
      case 2: add_values(2, 64, out, column, p, p_stride, v, d, keys); break;
      case 3: add_values(3, 64, out, column, p, p_stride, v, d, keys); break;
      default: add_values(4, 64, out, column, p, p_stride, v, d, keys); break;
    }
}

/* Pages lie scattered; the processor does not see the next one coming. */
INLINE void prefetch_keys(const bf16 *pages, const attention *a, const int32_t *table, long key, long len) {
  if (key >= len) return;
  const char *from = (const char *)(pages + (long)table[key / a->block_size] * a->block_stride + key % a->block_size * a->d);
  for (long i = 0; i < GROUP * a->d * (long)sizeof(bf16); i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
}

/* Up to 4 query heads of one K/V head. */
static void attend(const attention *a, long token, long kv_head, long first, int heads) {
  long d = a->d, size = a->block_size, len = a->row_len[token];
  const int32_t *table = a->tables + a->row_seq[token] * a->table_stride;
  const bf16 *keys = a->cache + kv_head * size * d, *vals = keys + a->kv_heads * size * d;
  const bf16 *q = a->q + token * a->q_stride + (kv_head * a->group + first) * d;
  bf16 *out = a->out + ((token * a->kv_heads + kv_head) * a->group + first) * d;
  float scores[4][SPAN], result[4][MAX_D], total[4] = {0}, top[4];
  for (int h = 0; h < heads; h++) top[h] = -INFINITY;
  memset(result, 0, sizeof result);
  for (long span = 0; span < len; span += SPAN) {
    long count = len - span < SPAN ? len - span : SPAN;
    for (long key = span; key < span + count; key += GROUP) {
      const bf16 *from = keys + (long)table[key / size] * a->block_stride + key % size * d;
      prefetch_keys(keys, a, table, key + AHEAD * GROUP, span + count);
      if (key - span < AHEAD * GROUP) prefetch_keys(vals, a, table, key, span + count);
      for (int h = 0; h < heads; h++) {
        const bf16 *query = q + h * d;
        __m512 s = d == 64 ? score16(query, from, 64) : d == 128 ? score16(query, from, 128) : score16(query, from, d);
        _mm512_storeu_ps(scores[h] + key - span, _mm512_mul_ps(s, _mm512_set1_ps(a->scale)));
      }
    }
    for (int h = 0; h < heads; h++) {
      float shrink, sum = softmax(scores[h], count, &top[h], &shrink);
      total[h] = total[h] * shrink + sum;
      if (span)
        for (long i = 0; i < d; i++) result[h][i] *= shrink;
    }
    for (long key = span; key < span + count; key += GROUP) {
      const bf16 *from = vals + (long)table[key / size] * a->block_stride + key % size * d;
      prefetch_keys(vals, a, table, key + AHEAD * GROUP, span + count);
      long here = span + count - key < GROUP ? span + count - key : GROUP;
      values(heads, result, scores[0] + key - span, SPAN, from, d, here);
    }
  }
  for (int h = 0; h < heads; h++)
    for (long i = 0; i < d; i += 16)
      store16(out + h * d + i, _mm512_div_ps(_mm512_loadu_ps(result[h] + i), _mm512_set1_ps(total[h])));
}

static void attend_unit(const void *job, long unit) {
  const attention *a = job;
  long head = unit % a->kv_heads, row = unit / a->kv_heads * a->rows_per_unit;
  for (long token = row; token < row + a->rows_per_unit && token < a->tokens; token++)
    for (long first = 0; first < a->group; first += 4)
      attend(a, token, head, first, a->group - first < 4 ? (int)(a->group - first) : 4);
}

/* Every token sees the first row_len keys of its sequence; K and V pages lie as kvcache packs them. */
void hotrack_paged_attention(const bf16 *q, long q_stride, const bf16 *cache, const int32_t *tables, long table_stride,
                             const int32_t *row_seq, const int32_t *row_len, bf16 *out, long tokens, long kv_heads,
                             long group, long d, long block_size, long block_stride, float scale) {
  attention a = {q, cache, tables, row_seq, row_len, out, q_stride, table_stride, block_stride, block_size, kv_heads,
                 group, d, tokens, 1, scale};
  a.rows_per_unit = tokens > 64 ? 4 : 1;
  parallel(attend_unit, &a, (tokens + a.rows_per_unit - 1) / a.rows_per_unit * kv_heads);
}
