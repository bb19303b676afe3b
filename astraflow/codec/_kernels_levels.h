/* The loops at every level of the processor, and what is the same at all; knows nothing of Python.
 *
 * _kernels.c hands them to Python, tests/codec/fuzz_kernels.c compares their levels. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels are written for little-endian machines; numpy does their work elsewhere"
#endif

#include "_kernels_common.h"

/* What lies between BEGIN_TARGET and END_TARGET may use the instructions that the processor needs to have. */
#define PRAGMA(words) _Pragma(#words)
#if defined(__clang__)
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

#define LEVEL 0
#define FN(name) name##_0
#include "_kernels_body.h"
#undef LEVEL
#undef FN
#if HAS_X86
BEGIN_TARGET("avx2,bmi,bmi2,popcnt,lzcnt")
#define LEVEL 1
#define FN(name) name##_1
#include "_kernels_body.h"
#undef LEVEL
#undef FN
END_TARGET
BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,avx512vbmi,avx512vbmi2,gfni,avx2,bmi,bmi2,popcnt,lzcnt")
static ALWAYS_INLINE __m512i mix_low_of_8(__m512i x) {
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64((long long)0xbf58476d1ce4e5b9u));
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64((long long)0x94d049bb133111ebu));
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

/* Modulo 2^64, which the intrinsic does not promise. */
static ALWAYS_INLINE uint64_t sum_of_8(__m512i x) {
    uint64_t each[8], sum = 0;
    _mm512_storeu_si512(each, x);
    for (int j = 0; j < 8; j++) sum += each[j];
    return sum;
}

static ALWAYS_INLINE __m512i mix_high_of_8(__m512i x) {
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 33)), _mm512_set1_epi64((long long)0xff51afd7ed558ccdu));
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, 29));
}

#define LEVEL 2
#define FN(name) name##_2
#include "_kernels_body.h"
#undef LEVEL
#undef FN
END_TARGET
#define AT(level, name) ((level) == 2 ? name##_2 : (level) == 1 ? name##_1 : name##_0)
#elif HAS_NEON
#define LEVEL 3
#define FN(name) name##_3
#include "_kernels_body.h"
#undef LEVEL
#undef FN
#define AT(level, name) ((level) == 3 ? name##_3 : name##_0)
#else
#define AT(level, name) ((void)(level), name##_0)
#endif

static int is_level_here(long level) {
    if (level == 0) return 1;
#if HAS_X86
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    if (level == 1) return has_avx2;
    if (level == 2) return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("gfni");
#endif
    return HAS_NEON && level == 3;
}

static size_t streams_nbytes(const fast_out_t *out) { return out->gaps.used + out->ups.bytes.used + out->marks.bytes.used + out->steps.used + out->escapes.used; }

static int are_below(const uint32_t *indices, size_t count, size_t n) {
    uint32_t last = (uint32_t)(n > UINT32_MAX ? UINT32_MAX : n - 1), beyond = 0;
    for (size_t j = 0; j < count; j++) beyond |= indices[j] > last;
    return !count || (n && !beyond);
}

static ALWAYS_INLINE void scatter_of(uint8_t *bits, const uint32_t *indices, const uint8_t *values, size_t count, int size) {
    size_t j = 0;
    for (; j + FAR_AHEAD < count; j++) {
        PREFETCH_NEAR(bits + (size_t)indices[j + FAR_AHEAD] * (size_t)size);
        store(bits, indices[j], load(values, j, size), size);
    }
    for (; j < count; j++) store(bits, indices[j], load(values, j, size), size);
}

/* The parts of a payload of SPARSE_COMPACT. */
typedef struct {
    uint32_t counts[2 * CLASSES], tables[2 * CLASSES]; /* of gaps, then the same of distances */
    rans_in_t symbols;
    const uint8_t *low_bits;
    size_t low_nbytes;
} compact_t;

/* Returns how many bytes a number has; 0: it is cut off, larger than it can be, or has another form. */
static size_t read_leb128(const uint8_t *at, const uint8_t *end, size_t largest, uint32_t *number) {
    uint64_t value = 0;
    for (size_t j = 0; j < 5 && at + j < end; j++) {
        value |= (uint64_t)(at[j] & 127) << (7 * j);
        if (at[j] & 128) continue;
        *number = (uint32_t)value;
        return value > largest || (j && !at[j]) ? 0 : j + 1;
    }
    return 0;
}

static size_t lane_count(size_t symbol_count) {
    size_t lanes = 16;
    while (lanes < MAX_LANES && symbol_count >> 14 >= lanes) lanes *= 2;
    return lanes;
}

static const char *read_compact(const uint8_t *at, size_t nbytes, size_t class_count, size_t n, compact_t *to) {
    const uint8_t *end = at + nbytes;
    uint64_t sum = 0;
    for (uint32_t c = 0; c < 2 * CLASSES; c++) to->tables[c] = c, to->counts[c] = 0;
    for (size_t c = 0, more; c < class_count; c++, at += more) {
        more = read_leb128(at, end, n, to->counts + c);
        if (!more) return "has another number of changes than it says";
        sum += to->counts[c];
    }
    if (sum != n) return "has another number of changes than it says";
    memcpy(to->counts + CLASSES, to->counts, CLASSES * sizeof *to->counts);
    size_t lanes = lane_count(2 * n);
    if ((size_t)(end - at) < 4 + 4 * lanes) return "is cut off";
    rans_in_t symbols = {at + 4, at + 4 + 4 * lanes, (size_t)load(at, 0, 4), lanes, 2 * CLASSES, to->counts, to->tables, NULL};
    if ((size_t)(end - symbols.words) / 2 < symbols.word_count) return "is cut off";
    to->symbols = symbols;
    to->low_bits = symbols.words + 2 * symbols.word_count;
    to->low_nbytes = (size_t)(end - to->low_bits);
    return NULL;
}

static const char *apply_compact(int level, const uint8_t *old, size_t old_count, int size, uint64_t first, const rule_t *rule, const compact_t *from, size_t n, changes_t *out) {
    const char *why = "needs more memory than there is";
    uint32_t *ranks = malloc(4 * (n + CLASSES + 16));
    uint8_t *tokens = malloc(2 * n + 1), *distances = malloc((size_t)size * n + 8), *padded = malloc(from->low_nbytes + PADDING);
    class_state_t state = {{0}, ranks, distances};
    for (size_t c = 1; c < CLASSES; c++) state.at[c] = state.at[c - 1] + from->counts[c - 1] + 1;
    if (ranks && tokens && distances && padded) {
        memset(padded + from->low_nbytes, 0, PADDING);
        memcpy(padded, from->low_bits, from->low_nbytes);
        token_table_t table = {{0}, {0}};
        bit_reader_t bits = {&table, padded, 0, 8 * (uint64_t)from->low_nbytes};
        fill(&table);
        why = AT(level, rans_decode)(&from->symbols, tokens);
        if (!why) why = AT(level, untokenise)(tokens, n, from->counts, &bits, size, ranks, distances);
        if (!why) why = AT(level, apply_classes)(old, old_count, first, size, rule, &state, n, out);
    }
    free(ranks), free(tokens), free(distances), free(padded);
    return why;
}
