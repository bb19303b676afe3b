/* The loops, compiled once per level of the processor: FN names a function of this level.
 * LEVEL: 0 portable, 1 AVX2 + BMI2, 2 AVX-512 (F, BW, DQ, VL, VBMI, VBMI2, VPOPCNTDQ) + BMI2 + GFNI, 3 NEON. */

static ALWAYS_INLINE uint64_t FN(select_bit)(uint64_t mask, uint64_t rank) {
#if LEVEL == 1 || LEVEL == 2
    return (uint64_t)__builtin_ctzll(_pdep_u64((uint64_t)1 << rank, mask));
#else
    while (rank--) mask &= mask - 1;
    return first_bit(mask);
#endif
}

#if LEVEL == 3
/* Bit t: byte t of 64 that are all ones or all zeros. */
static ALWAYS_INLINE uint64_t FN(mask_of)(const uint8x16_t part[4]) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    uint8x16_t low = vpaddq_u8(vandq_u8(part[0], bit), vandq_u8(part[1], bit));
    uint8x16_t high = vpaddq_u8(vandq_u8(part[2], bit), vandq_u8(part[3], bit));
    low = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(low, low)), 0);
}

/* The lower halves of elements of so many bytes, of which two vectors are full. */
static ALWAYS_INLINE uint8x16_t FN(narrowed)(uint8x16_t low, uint8x16_t high, int size) {
    if (size == 2) return vuzp1q_u8(low, high);
    if (size == 4) return vreinterpretq_u8_u16(vuzp1q_u16(vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high)));
    return vreinterpretq_u8_u32(vuzp1q_u32(vreinterpretq_u32_u8(low), vreinterpretq_u32_u8(high)));
}
#endif

/* Bit t: element i + t differs. */
static ALWAYS_INLINE uint64_t FN(changed)(const uint8_t *old, const uint8_t *new_, size_t i, int size) {
    const uint8_t *a = old + i * (size_t)size, *b = new_ + i * (size_t)size;
#if LEVEL == 2
    uint64_t mask = 0;
    for (int part = 0; part < size; part++) {
        __m512i x = _mm512_loadu_si512(a + 64 * part), y = _mm512_loadu_si512(b + 64 * part);
        if (size == 1) mask |= (uint64_t)_mm512_cmpneq_epi8_mask(x, y);
        else if (size == 2) mask |= (uint64_t)_mm512_cmpneq_epi16_mask(x, y) << (32 * part);
        else if (size == 4) mask |= (uint64_t)_mm512_cmpneq_epi32_mask(x, y) << (16 * part);
        else mask |= (uint64_t)_mm512_cmpneq_epi64_mask(x, y) << (8 * part);
    }
    return mask;
#elif LEVEL == 1
    uint64_t mask = 0;
    if (size == 2) {
        for (int part = 0; part < 2; part++) {
            const __m256i *p = (const __m256i *)(a + 64 * part), *q = (const __m256i *)(b + 64 * part);
            __m256i x = _mm256_cmpeq_epi16(_mm256_loadu_si256(p), _mm256_loadu_si256(q));
            __m256i y = _mm256_cmpeq_epi16(_mm256_loadu_si256(p + 1), _mm256_loadu_si256(q + 1));
            __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xd8);
            mask |= (uint64_t)(uint32_t)~_mm256_movemask_epi8(packed) << (32 * part);
        }
        return mask;
    }
    for (int part = 0; part < 2 * size; part++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(a + 32 * part));
        __m256i y = _mm256_loadu_si256((const __m256i *)(b + 32 * part));
        if (size == 1)
            mask |= (uint64_t)(uint32_t)~_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y)) << (32 * part);
        else if (size == 4)
            mask |= (uint64_t)(0xffu & (unsigned)~_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, y)))) << (8 * part);
        else
            mask |= (uint64_t)(0xfu & (unsigned)~_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(x, y)))) << (4 * part);
    }
    return mask;
#elif LEVEL == 3
    uint8x16_t part[32], differs = vdupq_n_u8(0);
    for (int p = 0; p < 4 * size; p++) {
        part[p] = veorq_u8(vld1q_u8(a + 16 * p), vld1q_u8(b + 16 * p));
        differs = vorrq_u8(differs, part[p]);
    }
    if (!vmaxvq_u8(differs)) return 0;
    for (int p = 0; p < 4 * size; p++) {
        if (size == 1) part[p] = vtstq_u8(part[p], part[p]);
        else if (size == 2) part[p] = vreinterpretq_u8_u16(vtstq_u16(vreinterpretq_u16_u8(part[p]), vreinterpretq_u16_u8(part[p])));
        else if (size == 4) part[p] = vreinterpretq_u8_u32(vtstq_u32(vreinterpretq_u32_u8(part[p]), vreinterpretq_u32_u8(part[p])));
        else part[p] = vreinterpretq_u8_u64(vtstq_u64(vreinterpretq_u64_u8(part[p]), vreinterpretq_u64_u8(part[p])));
    }
    for (int wide = size; wide > 1; wide /= 2)
        for (int p = 0; p < 2 * wide; p++) part[p] = FN(narrowed)(part[2 * p], part[2 * p + 1], wide);
    return FN(mask_of)(part);
#else
    uint64_t mask = 0;
    if (!memcmp(a, b, 64 * (size_t)size)) return 0;
    for (int word = 0; word < 8 * size; word++) {
        if (load(a, (size_t)word, 8) == load(b, (size_t)word, 8)) continue;
        for (int t = word * 8 / size; t < (word + 1) * 8 / size; t++) mask |= (uint64_t)(load(a, (size_t)t, size) != load(b, (size_t)t, size)) << t;
    }
    return mask;
#endif
}

/* Offsets of the set bits of a mask, from `at` on: returns how many. Up to 64 are written. */
static ALWAYS_INLINE size_t FN(list)(uint64_t mask, size_t at, uint16_t *found) {
#if LEVEL == 2
    /* Without a branch: whether 64 elements hold a change is a coin toss. */
    __m512i low = _mm512_add_epi16(_mm512_load_si512(counting), _mm512_set1_epi16((short)at));
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(32));
    size_t in_low = (size_t)__builtin_popcount((uint32_t)mask);
    _mm512_storeu_si512(found, _mm512_maskz_compress_epi16((__mmask32)mask, low));
    _mm512_storeu_si512(found + in_low, _mm512_maskz_compress_epi16((__mmask32)(mask >> 32), high));
    return in_low + (size_t)__builtin_popcount((uint32_t)(mask >> 32));
#else
    size_t count = 0;
#if LEVEL == 1
    count = (size_t)__builtin_popcountll(mask);
    found[0] = (uint16_t)(at + _tzcnt_u64(mask)), mask = _blsr_u64(mask);
    found[1] = (uint16_t)(at + _tzcnt_u64(mask)), mask = _blsr_u64(mask);
    for (size_t j = 2; mask; mask &= mask - 1) found[j++] = (uint16_t)(at + first_bit(mask));
#else
    for (; mask; mask &= mask - 1) found[count++] = (uint16_t)(at + first_bit(mask));
#endif
    return count;
#endif
}

/* Offsets from `from` of changed elements in [from, to): returns how many. */
static ALWAYS_INLINE size_t FN(find)(const uint8_t *old, const uint8_t *new_, size_t from, size_t to, int size, uint16_t *found) {
    size_t count = 0, i = from;
    for (; i + 64 <= to; i += 64) {
        fetch_ahead(old + i * (size_t)size, size);
        fetch_ahead(new_ + i * (size_t)size, size);
        count += FN(list)(FN(changed)(old, new_, i, size), i - from, found + count);
    }
    for (; i < to; i++)
        if (load(old, i, size) != load(new_, i, size)) found[count++] = (uint16_t)(i - from);
    return count;
}

/* What changes add to the sums of the digest: old bits out, new bits in. */
static ALWAYS_INLINE void FN(account)(const part_t *part, size_t count, int size, sums_t *sums) {
    uint64_t scale = (uint64_t)size * DIGEST_A, low = 0, high = 0;
    for (size_t j = 0; j < count; j++) {
        uint64_t at = part->positions[j] * scale + DIGEST_KEY;
        uint64_t x = mix_low(at + part->values[j] * DIGEST_B), y = mix_low(at + part->before[j] * DIGEST_B);
        low += x - y;
        high += mix_high(x) - mix_high(y);
    }
    sums->low += low;
    sums->high += high;
}

/* Old and new bits of changed elements, side by side; `first` is the position of element 0. */
static ALWAYS_INLINE void FN(gather)(const uint8_t *old, const uint8_t *new_, size_t from, const uint16_t *found, size_t count, uint64_t first, int size, part_t *part) {
    for (size_t j = 0; j < count; j++) part->positions[j] = first + from + found[j];
    for (size_t j = 0; j < count; j++) part->before[j] = load(old, from + found[j], size);
    for (size_t j = 0; j < count; j++) part->values[j] = load(new_, from + found[j], size);
}

static ALWAYS_INLINE sums_t FN(digest_array_of)(const uint8_t *bits, size_t count, uint64_t first, int size) {
    uint64_t low = 0, high = 0, scale = (uint64_t)size * DIGEST_A;
    for (size_t j = 0; j < count; j++) {
        uint64_t x = mix_low((first + j) * scale + load(bits, j, size) * DIGEST_B + DIGEST_KEY);
        low += x;
        high += mix_high(x);
    }
    sums_t sums = {low, high};
    return sums;
}

static sums_t FN(digest_array)(const uint8_t *bits, size_t count, uint64_t first, int size) {
    BY_SIZE(size, return FN(digest_array_of)(bits, count, first, S));
}

static ALWAYS_INLINE sums_t FN(digest_changes_of)(const uint64_t *positions, const uint8_t *before, const uint8_t *values, size_t count, int size) {
    sums_t sums = {0, 0};
    uint64_t scale = (uint64_t)size * DIGEST_A, low = 0, high = 0;
    for (size_t j = 0; j < count; j++) {
        uint64_t at = positions[j] * scale + DIGEST_KEY;
        uint64_t x = mix_low(at + load(values, j, size) * DIGEST_B), y = mix_low(at + load(before, j, size) * DIGEST_B);
        low += x - y;
        high += mix_high(x) - mix_high(y);
    }
    sums.low = low;
    sums.high = high;
    return sums;
}

static sums_t FN(digest_changes)(const uint64_t *positions, const uint8_t *before, const uint8_t *values, size_t count, int size) {
    BY_SIZE(size, return FN(digest_changes_of)(positions, before, values, count, S));
}

/* How often each exponent occurs among the changed elements. */
static ALWAYS_INLINE void FN(exponents_of)(const uint8_t *old, const uint8_t *new_, size_t n, int size, int shift, uint64_t field, uint32_t *histogram) {
    uint16_t found[SEGMENT + 64];
    for (size_t from = 0; from < n; from += SEGMENT) {
        size_t count = FN(find)(old, new_, from, n - from < SEGMENT ? n : from + SEGMENT, size, found);
        for (size_t j = 0; j < count; j++) histogram[load(old, from + found[j], size) >> shift & field]++;
    }
}

static void FN(exponents)(const uint8_t *old, const uint8_t *new_, size_t n, int size, int shift, uint64_t field, uint32_t *histogram) {
    BY_SIZE(size, FN(exponents_of)(old, new_, n, S, shift, field, histogram));
}

/* Changes that are known, into `out`, and what they add to the digest. */
static ALWAYS_INLINE void FN(finish)(part_t *part, size_t count, int size, size_t at, changes_t *out) {
    FN(account)(part, count, size, &out->sums);
    for (size_t j = 0; j < count; j++) store(out->before, at + j, part->before[j], size);
    for (size_t j = 0; j < count; j++) store(out->values, at + j, part->values[j], size);
}

/* f32 to bf16, to nearest, ties to even; not-a-number stays one. */
static void FN(round_bf16)(const uint8_t *restrict values, uint8_t *restrict bits, size_t n) {
    for (size_t j = 0; j < n; j++) {
        uint32_t x = (uint32_t)load(values, j, 4), rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
        store(bits, j, (x & 0x7fffffff) > 0x7f800000 ? x >> 16 | 0x40 : rounded, 2);
    }
}

#include "_kernels_fast.h"
#include "_kernels_classes.h"
#include "_kernels_ranks.h"
#include "_kernels_tokens.h"
#include "_kernels_planes.h"
#include "_kernels_rans.h"
