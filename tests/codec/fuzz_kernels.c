/* Compares all levels of the codec's kernels with the portable one, on random and on damaged input.
 *
 *     fuzz_kernels ROUNDS [SEED]
 *
 * Buffers have exactly the bytes that they need, so that a sanitizer sees what is read or written
 * beside them. Ends with 0 when all levels agreed; else it says in which round and at what not. */

#define _DEFAULT_SOURCE /* of MAP_ANONYMOUS */
#include <stdio.h>
#include <sys/mman.h>

#include "_kernels_levels.h"

#define MOST 9000 /* elements: some segments, and a part of one */
#define LEVELS 4
#define GUARD 65536 /* bytes: a page of any machine, or some */

static uint64_t state, round_number;
static int level; /* that is compared */

static uint64_t next_random(void) {
    state += 0x9e3779b97f4a7c15u;
    return mix_low(state);
}

static uint64_t below(uint64_t n) { return next_random() % n; }

static void require(int is_true, const char *what) {
    if (is_true) return;
    printf("round %llu, level %d: %s\n", (unsigned long long)round_number, level, what);
    exit(1);
}

static void *take(size_t nbytes) {
    void *at = malloc(nbytes ? nbytes : 1);
    require(at != NULL, "no memory");
    return at;
}

static void *copy_of(const void *from, size_t nbytes) {
    void *at = take(nbytes);
    if (nbytes) memcpy(at, from, nbytes);
    return at;
}

static int same(const void *a, const void *b, size_t nbytes) { return !nbytes || !memcmp(a, b, nbytes); }

static int same_sums(sums_t a, sums_t b) { return a.low == b.low && a.high == b.high; }

typedef struct { uint8_t *old, *new_; size_t n; int size; uint64_t first; rule_t rule; } versions_t;

/* What the versions of weights are like, or noise, or nearly all the same. */
static versions_t make_versions(void) {
    static const int shifts[4] = {3, 7, 23, 52}, fields[4] = {15, 255, 255, 2047};
    int kind = (int)below(4), which = (int)below(4);
    versions_t v = {NULL, NULL, below(8) ? below(MOST) : below(130), 1 << which, below(1 << 20), {shifts[which], (uint32_t)fields[which], 0, (uint32_t)below(CLASSES)}};
    v.rule.low = (uint32_t)below(v.rule.field + 1);
    if (!below(8)) v.rule.shift = 0, v.rule.field = 0, v.rule.low = 0, v.rule.top = 0;
    v.old = take(v.n * (size_t)v.size), v.new_ = take(v.n * (size_t)v.size);
    uint64_t share = (uint64_t)1 << below(14), often = below(3);
    for (size_t i = 0; i < v.n; i++) {
        uint64_t noise = next_random(), bits = kind == 0 ? 0 : kind == 1 ? noise : (uint64_t)(v.rule.low + noise % 20) << v.rule.shift | (noise >> 32 & (((uint64_t)1 << v.rule.shift) - 1));
        uint64_t is_changed = !below(share) || (often == 2 && below(64)), far = !below(16);
        store(v.old, i, bits, v.size);
        store(v.new_, i, is_changed ? (far ? next_random() : bits + (noise & 1 ? 1 : ~(uint64_t)0)) : bits, v.size);
    }
    return v;
}

static const stream_t *stream_of(const fast_out_t *out, int number) {
    const stream_t *each[5] = {&out->gaps, &out->ups.bytes, &out->marks.bytes, &out->steps, &out->escapes};
    return each[number];
}

static void release(fast_out_t *out) {
    free(out->gaps.at), free(out->ups.bytes.at), free(out->marks.bytes.at), free(out->steps.at), free(out->escapes.at);
}

static changes_t make_changes(size_t count, int size) {
    changes_t out = {take(4 * count), take(count * (size_t)size), take(count * (size_t)size), {0, 0}};
    return out;
}

static void release_changes(changes_t *out) { free(out->indices), free(out->before), free(out->values); }

static int same_changes(const changes_t *a, const changes_t *b, size_t count, int size) {
    size_t nbytes = count * (size_t)size;
    return same(a->indices, b->indices, 4 * count) && same(a->before, b->before, nbytes) && same(a->values, b->values, nbytes) && same_sums(a->sums, b->sums);
}

/* What leads from one version to the other, applied. */
static int leads_to(const versions_t *v, const uint8_t *from, const uint8_t *to, const changes_t *changes, size_t count) {
    uint8_t *state_of = copy_of(from, v->n * (size_t)v->size);
    int ok = are_below(changes->indices, count, v->n);
    if (ok) BY_SIZE(v->size, scatter_of(state_of, changes->indices, changes->values, count, S));
    ok = ok && same(state_of, to, v->n * (size_t)v->size);
    free(state_of);
    return ok;
}

static const char *decode_streams(int at, const versions_t *v, const uint8_t *from, int back, uint8_t *streams[5], const size_t nbytes[5], size_t count, changes_t *out) {
    fast_in_t in = {streams[0], streams[1], streams[2], streams[3], streams[4], nbytes[0], nbytes[3], nbytes[4] / (size_t)v->size, 0, 0};
    return AT(at, decode_fast)(from, v->n, v->size, back, &in, count, v->first, out);
}

/* All levels take or refuse the same streams, and find the same. */
static void compare_decoding(const versions_t *v, int back, uint8_t *streams[5], const size_t nbytes[5], size_t count, int is_damaged) {
    const uint8_t *from = back ? v->new_ : v->old, *to = back ? v->old : v->new_;
    changes_t first = make_changes(count, v->size);
    const char *why = decode_streams(0, v, from, back, streams, nbytes, count, &first);
    require(is_damaged || (!why && leads_to(v, from, to, &first, count)), "fast does not come back");
    for (level = 1; level < LEVELS; level++) {
        if (!is_level_here(level)) continue;
        changes_t other = make_changes(count, v->size);
        const char *why_not = decode_streams(level, v, from, back, streams, nbytes, count, &other);
        require(!why == !why_not, "decoding fast, one refuses what the other takes");
        require(why || same_changes(&first, &other, count, v->size), "decoding fast");
        release_changes(&other);
    }
    level = 0;
    release_changes(&first);
}

static void fuzz_fast(const versions_t *v) {
    fast_out_t out = {0};
    out.limit = below(4) ? SIZE_MAX / 2 : below(2 * v->n + 1);
    require(AT(0, encode_fast)(v->old, v->new_, v->n, v->first, v->size, &out), "no memory");
    for (level = 1; level < LEVELS; level++) {
        if (!is_level_here(level)) continue;
        fast_out_t other = {0};
        other.limit = out.limit;
        require(AT(level, encode_fast)(v->old, v->new_, v->n, v->first, v->size, &other), "no memory");
        require(out.count == other.count && same_sums(out.sums, other.sums) && out.too_long == other.too_long && streams_nbytes(&out) == streams_nbytes(&other), "encoding fast");
        for (int s = 0; s < 5; s++) require(stream_of(&out, s)->used == stream_of(&other, s)->used && same(stream_of(&out, s)->at, stream_of(&other, s)->at, stream_of(&out, s)->used), "encoding fast");
        release(&other);
    }
    level = 0;
    if (!out.too_long && streams_nbytes(&out) <= out.limit) {
        uint8_t *streams[5];
        size_t nbytes[5];
        for (int s = 0; s < 5; s++) nbytes[s] = stream_of(&out, s)->used, streams[s] = copy_of(stream_of(&out, s)->at, nbytes[s]);
        compare_decoding(v, 0, streams, nbytes, out.count, 0);
        compare_decoding(v, 1, streams, nbytes, out.count, 0);
        for (int tries = 0; tries < 6; tries++) {
            int s = (int)below(5);
            size_t count = out.count, whole = nbytes[s];
            if (!below(4)) {
                /* Bits of ups and marks are as many as the changes say, which are as many as a range has. */
                count = below(out.count + 1);
            } else if (nbytes[s] && below(3)) {
                size_t place = below(nbytes[s]);
                streams[s][place] = (uint8_t)(below(4) ? next_random() : below(2) * 255);
            } else if (s != 1 && s != 2) {
                nbytes[s] = below(nbytes[s] + 1) / (size_t)(s == 4 ? v->size : 1) * (size_t)(s == 4 ? v->size : 1);
            }
            compare_decoding(v, (int)below(2), streams, nbytes, count, 1);
            nbytes[s] = whole;
        }
        for (int s = 0; s < 5; s++) free(streams[s]);
    }
    release(&out);
}

typedef struct { uint16_t frequencies[2 * CLASSES][256], starts[2 * CLASSES][256]; uint32_t slots[2 * CLASSES][4096]; } tables_t;

/* Frequencies that sum to 4096, of all symbols that occur. */
static void make_tables(const uint32_t *histogram, tables_t *tables) {
    memset(tables, 0, sizeof *tables);
    for (int t = 0; t < 2 * CLASSES; t++, histogram += 256) {
        uint64_t total = 0, sum = 0, largest = 0;
        for (int s = 0; s < 256; s++) total += histogram[s];
        for (int s = 0; s < 256; s++) {
            if (!histogram[s]) continue;
            uint64_t share = (uint64_t)histogram[s] * 3800 / total + 1;
            tables->frequencies[t][s] = (uint16_t)share, sum += share;
            if (histogram[s] > histogram[largest]) largest = (uint64_t)s;
        }
        if (!total) continue;
        tables->frequencies[t][largest] = (uint16_t)(tables->frequencies[t][largest] + 4096 - sum);
        uint32_t slot = 0;
        for (uint32_t s = 0; s < 256; s++) {
            tables->starts[t][s] = (uint16_t)slot;
            for (uint32_t k = 0, f = tables->frequencies[t][s]; k < f; k++) tables->slots[t][slot++] = s | (f - 1) << 8 | k << 20;
        }
    }
}

/* A payload of SPARSE_COMPACT. */
typedef struct { uint8_t *at; size_t nbytes, changed; } payload_t;

static size_t put_leb128(uint8_t *at, uint32_t value) {
    size_t j = 0;
    for (; value >= 128; value >>= 7) at[j++] = (uint8_t)(value | 128);
    at[j++] = (uint8_t)value;
    return j;
}

static const char *decode_payload(int at, const versions_t *v, const payload_t *payload, const tables_t *tables, size_t count, changes_t *out) {
    compact_t from;
    const char *why = read_compact(payload->at, payload->nbytes, (size_t)v->rule.top + 1, count, &from);
    from.symbols.slots = tables->slots[0];
    return why ? why : apply_compact(at, v->old, v->n, v->size, v->first, &v->rule, &from, count, out);
}

static void compare_compact(const versions_t *v, const payload_t *payload, const tables_t *tables, size_t count, int is_damaged) {
    changes_t first = make_changes(count, v->size);
    const char *why = decode_payload(0, v, payload, tables, count, &first);
    require(is_damaged || (!why && leads_to(v, v->old, v->new_, &first, count)), "compact does not come back");
    for (level = 1; level < LEVELS; level++) {
        if (!is_level_here(level)) continue;
        changes_t other = make_changes(count, v->size);
        const char *why_not = decode_payload(level, v, payload, tables, count, &other);
        require(!why == !why_not, "decoding compact, one refuses what the other takes");
        require(why || same_changes(&first, &other, count, v->size), "decoding compact");
        release_changes(&other);
    }
    level = 0;
    release_changes(&first);
}

/* The same over a range that ends with a whole part of the changes, before the last of them. */
static void compare_cut_off(const versions_t *v, const payload_t *payload, const tables_t *tables) {
    if (payload->changed <= PART) return;
    changes_t all = make_changes(payload->changed, v->size);
    require(!decode_payload(0, v, payload, tables, payload->changed, &all), "compact does not come back");
    versions_t shorter = *v;
    shorter.n = all.indices[(payload->changed - 1) / PART * PART - 1] + 1;
    /* What follows cannot be read: sanitizers do not see what vectors gather. */
    size_t nbytes = shorter.n * (size_t)v->size, whole = (nbytes + GUARD - 1) / GUARD * GUARD;
    uint8_t *pages = mmap(NULL, whole + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(pages != MAP_FAILED && !mprotect(pages + whole, GUARD, PROT_NONE), "no memory");
    shorter.old = memcpy(pages + whole - nbytes, v->old, nbytes);
    compare_compact(&shorter, payload, tables, payload->changed, 1);
    munmap(pages, whole + GUARD);
    release_changes(&all);
}

static void release_scan(scan_t *scan) { free(scan->classes), free(scan->gaps), free(scan->distances); }

typedef struct { uint32_t counts[CLASSES], histogram[2 * CLASSES * 256]; uint8_t *tokens, *low_bits; size_t changed, low_nbytes; sums_t sums; } tokens_t;

static void tokenise(int at, const versions_t *v, tokens_t *to) {
    scan_t scan = {0};
    memset(to, 0, sizeof *to);
    require(AT(at, scan_classes)(v->old, v->new_, v->n, v->first, v->size, &v->rule, &scan), "no memory");
    uint8_t *sorted = take((4 + (size_t)v->size) * scan.count + 8);
    to->changed = scan.count, to->sums = scan.sums;
    to->tokens = take(2 * scan.count + 1), to->low_bits = take(16 * scan.count + 16);
    to->low_nbytes = AT(at, tokenise)(&scan, v->size, to->counts, to->histogram, to->tokens, sorted, to->low_bits);
    free(sorted);
    release_scan(&scan);
}

static uint8_t *encode_symbols(int at, const tokens_t *from, const tables_t *tables, size_t lanes, uint32_t *x, uint8_t *end) {
    uint32_t counts[2 * CLASSES], numbers[2 * CLASSES];
    for (uint32_t c = 0; c < 2 * CLASSES; c++) counts[c] = from->counts[c % CLASSES], numbers[c] = c;
    rans_out_t out = {from->tokens, 2 * from->changed, lanes, 2 * CLASSES, counts, numbers, tables->frequencies[0], tables->starts[0]};
    return AT(at, rans_encode)(&out, x, end);
}

static payload_t make_payload(const versions_t *v, const tokens_t *from, const tables_t *tables) {
    size_t lanes = lane_count(2 * from->changed), room = 4 * from->changed + 2;
    uint32_t x[MAX_LANES] = {0};
    uint8_t *words = take(room), *first = encode_symbols(0, from, tables, lanes, x, words + room);
    require(first != NULL, "a symbol without a frequency");
    size_t nbytes = (size_t)(words + room - first), used = 0;
    for (level = 1; level < LEVELS; level++) {
        if (!is_level_here(level)) continue;
        uint32_t others[MAX_LANES] = {0};
        uint8_t *room_of = take(room), *other = encode_symbols(level, from, tables, lanes, others, room_of + room);
        require(other && (size_t)(room_of + room - other) == nbytes && same(first, other, nbytes) && same(x, others, 4 * lanes), "encoding symbols");
        free(room_of);
    }
    level = 0;
    payload_t payload = {take(5 * CLASSES + 4 + 4 * lanes + nbytes + from->low_nbytes), 0, from->changed};
    for (uint32_t c = 0; c <= v->rule.top; c++) used += put_leb128(payload.at + used, from->counts[c]);
    store(payload.at + used, 0, nbytes / 2, 4), used += 4;
    memcpy(payload.at + used, x, 4 * lanes), used += 4 * lanes;
    memcpy(payload.at + used, first, nbytes), used += nbytes;
    memcpy(payload.at + used, from->low_bits, from->low_nbytes), used += from->low_nbytes;
    uint8_t *exact = copy_of(payload.at, used);
    free(payload.at), free(words);
    payload.at = exact, payload.nbytes = used;
    return payload;
}

static void fuzz_compact(const versions_t *v) {
    static tables_t tables;
    tokens_t first, other;
    tokenise(0, v, &first);
    for (level = 1; level < LEVELS; level++) {
        if (!is_level_here(level)) continue;
        tokenise(level, v, &other);
        require(first.changed == other.changed && same_sums(first.sums, other.sums) && same(first.counts, other.counts, sizeof first.counts) && same(first.histogram, other.histogram, sizeof first.histogram), "counting tokens");
        require(first.low_nbytes == other.low_nbytes && same(first.tokens, other.tokens, 2 * first.changed) && same(first.low_bits, other.low_bits, first.low_nbytes), "tokens");
        free(other.tokens), free(other.low_bits);
    }
    level = 0;
    make_tables(first.histogram, &tables);
    payload_t payload = make_payload(v, &first, &tables);
    compare_compact(v, &payload, &tables, payload.changed, 0);
    compare_cut_off(v, &payload, &tables);
    for (int tries = 0; tries < 6; tries++) {
        payload_t damaged = {copy_of(payload.at, payload.nbytes), payload.nbytes, payload.changed};
        size_t count = below(6) ? payload.changed : below(payload.changed + 2);
        if (below(4)) damaged.at[below(damaged.nbytes)] = (uint8_t)next_random();
        else damaged.nbytes = below(damaged.nbytes + 1);
        uint8_t *exact = copy_of(damaged.at, damaged.nbytes);
        free(damaged.at), damaged.at = exact;
        compare_compact(v, &damaged, &tables, count, 1);
        free(damaged.at);
    }
    free(payload.at), free(first.tokens), free(first.low_bits);
}

static void fuzz_planes(const versions_t *v) {
    size_t nbytes = v->n * (size_t)v->size;
    int rotate = (int)below(2);
    uint8_t *first = take(nbytes);
    uint32_t histograms[8 * 256] = {0};
    AT(0, split_planes)(v->old, v->n, v->size, rotate, first, histograms);
    for (level = 0; level < LEVELS; level++) {
        if (!is_level_here(level)) continue;
        uint8_t *planes = take(nbytes), *bits = take(nbytes);
        uint32_t counted[8 * 256] = {0};
        const uint8_t *each[8] = {NULL};
        AT(level, split_planes)(v->old, v->n, v->size, rotate, planes, counted);
        require(same(first, planes, nbytes) && same(histograms, counted, sizeof counted), "splitting planes");
        for (int p = 0; p < v->size; p++) each[p] = planes + (size_t)p * v->n;
        AT(level, join_planes)(each, v->n, v->size, rotate, bits);
        require(same(bits, v->old, nbytes), "joining planes");
        free(planes), free(bits);
    }
    level = 0;
    free(first);
}

static void fuzz_rest(const versions_t *v) {
    sums_t sums = AT(0, digest_array)(v->old, v->n, v->first, v->size);
    uint32_t *exponents = take(4 * ((size_t)v->rule.field + 1));
    uint64_t *positions = take(8 * v->n);
    size_t words = v->n * (size_t)v->size / 4;
    uint8_t *rounded = take(2 * words);
    memset(exponents, 0, 4 * ((size_t)v->rule.field + 1));
    for (size_t i = 0; i < v->n; i++) positions[i] = v->first + i;
    AT(0, exponents)(v->old, v->new_, v->n, v->size, v->rule.shift, v->rule.field, exponents);
    AT(0, round_bf16)(v->old, rounded, words);
    sums_t moved = AT(0, digest_changes)(positions, v->old, v->new_, v->n, v->size);
    sums_t after = AT(0, digest_array)(v->new_, v->n, v->first, v->size);
    require(sums.low + moved.low == after.low && sums.high + moved.high == after.high, "the digest of changes");
    for (level = 1; level < LEVELS; level++) {
        if (!is_level_here(level)) continue;
        uint32_t *counted = take(4 * ((size_t)v->rule.field + 1));
        uint8_t *bits = take(2 * words);
        memset(counted, 0, 4 * ((size_t)v->rule.field + 1));
        AT(level, exponents)(v->old, v->new_, v->n, v->size, v->rule.shift, v->rule.field, counted);
        AT(level, round_bf16)(v->old, bits, words);
        require(same(exponents, counted, 4 * ((size_t)v->rule.field + 1)), "counting exponents");
        require(same(rounded, bits, 2 * words), "rounding");
        require(same_sums(sums, AT(level, digest_array)(v->old, v->n, v->first, v->size)), "the digest");
        require(same_sums(moved, AT(level, digest_changes)(positions, v->old, v->new_, v->n, v->size)), "the digest of changes");
        free(counted), free(bits);
    }
    level = 0;
    free(exponents), free(positions), free(rounded);
}

int main(int count, char **words) {
    uint64_t rounds = count > 1 ? strtoull(words[1], NULL, 10) : 1000, seed = count > 2 ? strtoull(words[2], NULL, 10) : 1;
    for (round_number = 0; round_number < rounds; round_number++) {
        state = mix_low(seed << 32 | round_number);
        versions_t v = make_versions();
        fuzz_fast(&v);
        fuzz_compact(&v);
        fuzz_planes(&v);
        fuzz_rest(&v);
        free(v.old), free(v.new_);
    }
    printf("%llu rounds; levels", (unsigned long long)rounds);
    for (level = 0; level < LEVELS; level++)
        if (is_level_here(level)) printf(" %d", level);
    printf("\n");
    return 0;
}
