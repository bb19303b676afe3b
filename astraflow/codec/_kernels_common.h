/* What the loops of all levels share: sizes, streams, elements, bits; included by _kernels_levels.h. */

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define PREFETCH(at) __builtin_prefetch(at)
#define PREFETCH_NEAR(at) __builtin_prefetch(at, 0, 2) /* into the second cache: more can be on their way */
#else
#define ALWAYS_INLINE inline
#define PREFETCH(at) ((void)(at))
#define PREFETCH_NEAR(at) ((void)(at))
#define restrict
#endif
#if defined(__GNUC__) && defined(__x86_64__)
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif
#if defined(__GNUC__) && defined(__aarch64__)
#define HAS_NEON 1
#include <arm_neon.h>
#else
#define HAS_NEON 0
#endif
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
static ALWAYS_INLINE unsigned first_bit(uint64_t mask) { unsigned long at; _BitScanForward64(&at, mask); return at; }
static ALWAYS_INLINE unsigned last_bit(uint64_t mask) { unsigned long at; _BitScanReverse64(&at, mask); return at; }
#define __builtin_popcountll(mask) __popcnt64(mask)
#else
static ALWAYS_INLINE unsigned first_bit(uint64_t mask) { return (unsigned)__builtin_ctzll(mask); }
static ALWAYS_INLINE unsigned last_bit(uint64_t mask) { return 63u - (unsigned)__builtin_clzll(mask); }
#endif

#define SEGMENT 2048 /* elements that are scanned before their changes are worked on */
#define PART 64 /* changes that are worked on together */
#define GAPS 256 /* bytes of gaps that become places together */
#define FAR_AHEAD 128 /* changes whose elements are fetched before they are read or written */
#define FETCH_AHEAD 2048 /* bytes */
#define BRIEF 32768 /* elements that are rounded in less time than another thread takes to wake up */
#define CLASSES 16
#define MAX_LANES 256
#define NONE UINT32_MAX /* a rank that no element has */

#define DIGEST_KEY 0x6173747261666c77u
#define DIGEST_A 0x9e3779b97f4a7c15u
#define DIGEST_B 0xd6e8feb86659fd93u

#define BY_SIZE(size, call) \
    do { \
        switch (size) { \
        case 1: { enum { S = 1 }; call; break; } \
        case 2: { enum { S = 2 }; call; break; } \
        case 4: { enum { S = 4 }; call; break; } \
        default: { enum { S = 8 }; call; break; } \
        } \
    } while (0)

typedef struct { uint64_t low, high; } sums_t;
typedef struct { uint32_t *indices; uint8_t *before, *values; sums_t sums; } changes_t;
typedef struct { uint64_t positions[PART], before[PART], values[PART]; } part_t;
typedef struct { uint8_t *at; size_t used, room; } stream_t;
typedef struct { stream_t bytes; uint64_t held; unsigned count; } bits_t;
/* The streams of what changed: bytes, but one bit per change in `ups` and `marks`. */
typedef struct {
    stream_t gaps, steps, escapes;
    bits_t ups, marks;
    size_t limit, count;
    int too_long;
    sums_t sums;
} fast_out_t;
typedef struct {
    const uint8_t *gaps, *ups, *marks, *steps, *escapes;
    size_t gap_nbytes, step_count, escape_count, found; /* what is left, and how many places are known */
    uint32_t next;
} fast_in_t;
typedef struct { int shift; uint32_t field, low, top; } rule_t;
typedef struct {
    uint8_t *classes, *distances;
    uint32_t *gaps;
    size_t count, room;
    sums_t sums;
} scan_t;
/* A segment in blocks of 64 elements: their classes, and how many of each came before a block and,
 * `before`, in earlier segments. In a row of `seen` class c is number SLOT(c). */
#define SLOT(c) (((c) & 7) * 4 + ((c) >> 3))
typedef struct {
    uint16_t seen[SEGMENT / 64][2 * CLASSES];
    uint64_t before[CLASSES];
    uint8_t class_of[SEGMENT];
} classes_t;
typedef struct {
    size_t at[CLASSES];
    const uint32_t *ranks;
    const uint8_t *distances;
} class_state_t;
typedef struct {
    const uint8_t *states, *words;
    size_t word_count, lanes, run_count;
    const uint32_t *counts, *tables, *slots;
} rans_in_t;
typedef struct {
    const uint8_t *symbols;
    size_t count, lanes, run_count;
    const uint32_t *counts, *tables;
    const uint16_t *frequencies, *starts;
} rans_out_t;

static ALWAYS_INLINE uint64_t load(const uint8_t *bits, size_t i, int size) {
    if (size == 1) return bits[i];
    if (size == 2) { uint16_t v; memcpy(&v, bits + 2 * i, 2); return v; }
    if (size == 4) { uint32_t v; memcpy(&v, bits + 4 * i, 4); return v; }
    uint64_t v;
    memcpy(&v, bits + 8 * i, 8);
    return v;
}

static ALWAYS_INLINE void store(uint8_t *bits, size_t i, uint64_t v, int size) {
    if (size == 1) bits[i] = (uint8_t)v;
    else if (size == 2) { uint16_t w = (uint16_t)v; memcpy(bits + 2 * i, &w, 2); }
    else if (size == 4) { uint32_t w = (uint32_t)v; memcpy(bits + 4 * i, &w, 4); }
    else memcpy(bits + 8 * i, &v, 8);
}

/* What comes next of a stream: the processor's own prefetching ends with each page. */
static ALWAYS_INLINE void fetch_ahead(const uint8_t *at, int size) {
    for (int line = 0; line < size; line++) PREFETCH(at + FETCH_AHEAD + 64 * line);
}

static ALWAYS_INLINE uint64_t ones(int size) { return ~(uint64_t)0 >> (64 - 8 * size); }

/* The order in which neighbours are a unit of the last place apart: sign bit flipped, or all. */
static ALWAYS_INLINE uint64_t ordered(uint64_t v, int size) {
    uint64_t sign = (uint64_t)1 << (8 * size - 1);
    return v & sign ? ~v & ones(size) : v | sign;
}

static ALWAYS_INLINE uint64_t unordered(uint64_t v, int size) {
    uint64_t sign = (uint64_t)1 << (8 * size - 1);
    return v & sign ? v ^ sign : ~v & ones(size);
}

static ALWAYS_INLINE uint64_t fold(uint64_t before, uint64_t value, int size) {
    uint64_t d = (ordered(value, size) - ordered(before, size)) & ones(size);
    return ((d << 1) ^ (0 - (d >> (8 * size - 1)))) & ones(size);
}

static ALWAYS_INLINE uint64_t unfold(uint64_t from, uint64_t folded, int size) {
    uint64_t d = (folded >> 1) ^ (0 - (folded & 1));
    return unordered((ordered(from, size) + d) & ones(size), size);
}

static ALWAYS_INLINE uint64_t mix_low(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static ALWAYS_INLINE uint64_t mix_high(uint64_t x) {
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    return x ^ x >> 29;
}

static int grow(stream_t *stream, size_t more) {
    if (stream->used + more <= stream->room) return 1;
    size_t room = 2 * stream->room + more + 4096;
    void *at = realloc(stream->at, room);
    if (!at) return 0;
    stream->at = at, stream->room = room;
    return 1;
}

static ALWAYS_INLINE uint8_t class_at(uint64_t bits, const rule_t *rule) {
    uint64_t e = bits >> rule->shift & rule->field;
    e = e > rule->low ? e - rule->low : 0;
    return (uint8_t)(e < rule->top ? e : rule->top);
}

static int reserve(scan_t *out, size_t more, int size) {
    if (out->count + more <= out->room) return 1;
    size_t room = 2 * out->room + 16 * more;
    void *classes = realloc(out->classes, room);
    if (classes) out->classes = classes;
    void *gaps = realloc(out->gaps, 4 * room);
    if (gaps) out->gaps = gaps;
    void *distances = realloc(out->distances, (size_t)size * room);
    if (distances) out->distances = distances;
    if (!classes || !gaps || !distances) return 0;
    out->room = room;
    return 1;
}

#if HAS_X86
#define EIGHT(n) n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7
static const uint16_t counting[32] __attribute__((aligned(64))) = {EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)};
#undef EIGHT
#endif

typedef struct { uint8_t *at; uint64_t held; unsigned count; } bit_writer_t;

static ALWAYS_INLINE void put(bit_writer_t *w, uint64_t v, unsigned width) {
    w->held |= v << w->count;
    if (w->count + width >= 64) {
        memcpy(w->at, &w->held, 8);
        w->at += 8;
        w->held = w->count ? v >> (64 - w->count) : 0;
        w->count += width - 64;
    } else
        w->count += width;
}

static ALWAYS_INLINE void append(bits_t *to, uint64_t v, unsigned width) {
    bit_writer_t w = {to->bytes.at + to->bytes.used, to->held, to->count};
    put(&w, v, width);
    to->bytes.used = (size_t)(w.at - to->bytes.at), to->held = w.held, to->count = w.count;
}

static ALWAYS_INLINE void flush(bits_t *to) {
    if (to->count) memcpy(to->bytes.at + to->bytes.used, &to->held, 8);
    to->bytes.used += (to->count + 7) / 8;
}

static ALWAYS_INLINE uint64_t get(const uint8_t *bits, uint64_t at, unsigned width) {
    uint64_t v, shift = at & 7;
    memcpy(&v, bits + (at >> 3), 8);
    v >>= shift;
    if (shift + width > 64) v |= (uint64_t)bits[(at >> 3) + 8] << (64 - shift);
    return v & (((uint64_t)1 << width) - 1);
}

/* What tokens stand for. */
#define MAX_TOKEN 251
#define NARROW 100 /* of 23 low bits at most: 16 such numbers fit into 64 bytes, and each into four */
#define PADDING 64 /* bytes behind the bits, which are read and not used */
typedef struct { uint64_t base[256]; uint8_t width[256]; } token_table_t;
typedef struct {
    const token_table_t *table;
    const uint8_t *bits;
    uint64_t at, end;
} bit_reader_t;

static void fill(token_table_t *table) {
    for (unsigned token = 0; token <= MAX_TOKEN; token++) {
        unsigned width = token < 8 ? 0 : (token - 8) / 4 + 1;
        table->base[token] = token < 8 ? token : (uint64_t)(4 + (token & 3)) << width;
        table->width[token] = (uint8_t)width;
    }
}
