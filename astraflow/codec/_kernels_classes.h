/* Elements sorted by the exponent of the base, compiled once per level; included by _kernels_body.h. */

/* How many elements of each class there were in a segment: 16 bits at SLOT(c). */
typedef struct {
#if LEVEL == 2
    __m512i all;
#else
    uint16_t each[2 * CLASSES];
#endif
} FN(by_class_t);

static ALWAYS_INLINE void FN(spill)(const FN(by_class_t) *from, uint16_t *to) { memcpy(to, from, sizeof *from); }

/* Which of 64 elements are of a class. */
static ALWAYS_INLINE uint64_t FN(members)(const uint8_t *class_of, size_t c) {
#if LEVEL == 2
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(class_of), _mm512_set1_epi8((char)c));
#elif LEVEL == 1
    __m256i each = _mm256_set1_epi8((char)c), low = _mm256_loadu_si256((const __m256i *)class_of), high = _mm256_loadu_si256((const __m256i *)(class_of + 32));
    return (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, each)) | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, each)) << 32;
#else
    uint64_t mask = 0;
    for (size_t t = 0; t < 64; t++) mask |= (uint64_t)(class_of[t] == c) << t;
    return mask;
#endif
}

/* The classes of 64 elements; those that are `valid` are counted. */
static ALWAYS_INLINE void FN(classify)(const uint8_t *old, int size, rule_t rule, uint64_t valid, uint8_t *class_of, FN(by_class_t) *seen) {
#if LEVEL == 2
    __m512i classes, masks[CLASSES / 8];
    if (size == 2) {
        const __m512i field = _mm512_set1_epi16((short)rule.field), low = _mm512_set1_epi16((short)rule.low), top = _mm512_set1_epi16((short)rule.top);
        const __m128i shift = _mm_cvtsi32_si128(rule.shift);
        __m512i a = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old), shift), field);
        __m512i b = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old + 64), shift), field);
        a = _mm512_min_epu16(_mm512_subs_epu16(a, low), top);
        b = _mm512_min_epu16(_mm512_subs_epu16(b, low), top);
        classes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
        _mm512_storeu_si512(class_of, classes);
    } else {
        for (int t = 0; t < 64; t++) class_of[t] = class_at(load(old, (size_t)t, size), &rule);
        classes = _mm512_loadu_si512(class_of);
    }
    /* Four masks, one per bit of the class; a class is where all four are as its number has them. */
    for (int h = 0; h < CLASSES / 8; h++) masks[h] = _mm512_set1_epi64((long long)valid);
    for (int bit = 0; bit < 4; bit++) {
        __m512i has = _mm512_set1_epi64((long long)_mm512_test_epi8_mask(classes, _mm512_set1_epi8((char)(1 << bit))));
        for (int h = 0; h < CLASSES / 8; h++) masks[h] = _mm512_ternarylogic_epi64(masks[h], has, _mm512_load_si512(class_bits[bit] + 8 * h), 0x90);
    }
    __m512i high = _mm512_slli_epi64(_mm512_popcnt_epi64(masks[1]), 16);
    seen->all = _mm512_add_epi16(seen->all, _mm512_or_si512(high, _mm512_popcnt_epi64(masks[0])));
#else
    for (int t = 0; t < 64; t++) class_of[t] = class_at(load(old, (size_t)t, size), &rule);
#if LEVEL == 1
    for (unsigned c = 0; c < CLASSES; c++) seen->each[SLOT(c)] += (uint16_t)__builtin_popcountll(valid & FN(members)(class_of, c));
#else
    for (int t = 0; t < 64 && valid >> t; t++) seen->each[SLOT(class_of[t])]++;
#endif
#endif
}

/* The next block of a segment: its classes, and how many of each came before it. */
static ALWAYS_INLINE void FN(sort_block)(const uint8_t *a, int size, rule_t rule, uint64_t valid, size_t block, FN(by_class_t) *seen, classes_t *to) {
    FN(spill)(seen, to->seen[block]);
    FN(classify)(a, size, rule, valid, to->class_of + 64 * block, seen);
}

static ALWAYS_INLINE void FN(end_segment)(const FN(by_class_t) *seen, classes_t *to) {
    uint16_t seen_of[2 * CLASSES];
    FN(spill)(seen, seen_of);
    for (int c = 0; c < CLASSES; c++) to->before[c] += seen_of[SLOT(c)];
}

static ALWAYS_INLINE int FN(scan_classes_of)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, const rule_t *rule, scan_t *out) {
    FN(by_class_t) seen;
    classes_t sorted;
    uint64_t next[CLASSES] = {0};
    uint8_t tail[2][64 * 8] = {{0}};
    uint16_t found[SEGMENT + 64];
    part_t part;
    memset(sorted.before, 0, sizeof sorted.before);
    for (size_t from = 0; from < n; from += SEGMENT) {
        size_t to = n - from < SEGMENT ? n : from + SEGMENT, count = 0;
        memset(&seen, 0, sizeof seen);
        if (!reserve(out, SEGMENT, size)) return 0;
        for (size_t i = from; i < to; i += 64) {
            const uint8_t *a = old + i * (size_t)size, *b = new_ + i * (size_t)size;
            uint64_t valid = ~(uint64_t)0;
            if (to - i < 64) {
                size_t rest = to - i;
                memcpy(tail[0], a, rest * (size_t)size);
                memcpy(tail[1], b, rest * (size_t)size);
                a = tail[0], b = tail[1], valid = ((uint64_t)1 << rest) - 1;
            }
            fetch_ahead(a, size);
            fetch_ahead(b, size);
            FN(sort_block)(a, size, *rule, valid, (i - from) / 64, &seen, &sorted);
            count += FN(list)(FN(changed)(a, b, 0, size) & valid, i - from, found + count);
        }
        for (size_t start = 0; start < count; start += PART) {
            size_t more = count - start < PART ? count - start : PART;
            FN(gather)(old, new_, from, found + start, more, first, size, &part);
            FN(account)(&part, more, size, &out->sums);
            for (size_t j = 0; j < more; j++) {
                size_t t = found[start + j], block = t / 64, c = sorted.class_of[t];
                uint64_t below = FN(members)(sorted.class_of + 64 * block, c) & (((uint64_t)1 << (t & 63)) - 1);
                uint64_t rank = sorted.before[c] + sorted.seen[block][SLOT(c)] + (uint64_t)__builtin_popcountll(below);
                out->classes[out->count + j] = (uint8_t)c;
                out->gaps[out->count + j] = (uint32_t)(rank - next[c]);
                next[c] = rank + 1;
            }
            for (size_t j = 0; j < more; j++) store(out->distances, out->count + j, fold(part.before[j], part.values[j], size) - 1, size);
            out->count += more;
        }
        FN(end_segment)(&seen, &sorted);
    }
    return 1;
}

static int FN(scan_classes)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, const rule_t *rule, scan_t *out) {
    BY_SIZE(size, return FN(scan_classes_of)(old, new_, n, first, S, rule, out));
}

/* Which element of a segment is number `rank` of its class there. */
static ALWAYS_INLINE size_t FN(place)(const classes_t *sorted, size_t c, uint64_t rank) {
    size_t block = 0;
    for (size_t step = SEGMENT / 128; step; step /= 2) block += step & (0 - (size_t)(sorted->seen[block + step][SLOT(c)] <= rank));
    return 64 * block + FN(select_bit)(FN(members)(sorted->class_of + 64 * block, c), rank - sorted->seen[block][SLOT(c)]);
}

static ALWAYS_INLINE const char *FN(apply_classes_of)(const uint8_t *old, size_t n, uint64_t first, int size, const rule_t *rule, class_state_t *state, size_t count, changes_t *out) {
    FN(by_class_t) seen;
    classes_t sorted;
    uint8_t tail[64 * 8] = {0}, folded_of[SEGMENT * 8];
    uint16_t found[SEGMENT + 64];
    uint64_t hits[SEGMENT / 64], folded[PART];
    uint16_t seen_of[2 * CLASSES];
    size_t done = 0;
    part_t part;
    memset(sorted.before, 0, sizeof sorted.before);
    for (size_t from = 0; from < n && done < count; from += SEGMENT) {
        size_t to = n - from < SEGMENT ? n : from + SEGMENT, block = 0, in_segment = 0;
        memset(&seen, 0, sizeof seen);
        for (size_t i = from; i < to; i += 64, block++) {
            const uint8_t *a = old + i * (size_t)size;
            uint64_t valid = ~(uint64_t)0;
            if (to - i < 64) {
                memcpy(tail, a, (to - i) * (size_t)size);
                a = tail, valid = ((uint64_t)1 << (to - i)) - 1;
            }
            fetch_ahead(a, size);
            FN(sort_block)(a, size, *rule, valid, block, &seen, &sorted);
        }
        /* Blocks that are not there hold nothing. */
        for (; block < SEGMENT / 64; block++) FN(spill)(&seen, sorted.seen[block]);
        FN(spill)(&seen, seen_of);
        memset(hits, 0, sizeof hits);
        uint64_t touched[SEGMENT / 4096] = {0};
        for (size_t c = 0; c < CLASSES; c++) {
            size_t k = state->at[c];
            uint64_t before = sorted.before[c], end = before + seen_of[SLOT(c)];
            for (; state->ranks[k] < end; k++) {
                size_t t = FN(place)(&sorted, c, state->ranks[k] - before);
                hits[t / 64] |= (uint64_t)1 << (t & 63);
                touched[t / 4096] |= (uint64_t)1 << (t / 64 & 63);
                store(folded_of, t, load(state->distances, k - c, size) + 1, size);
            }
            state->at[c] = k;
        }
        FN(end_segment)(&seen, &sorted);
        for (size_t part_of = 0; part_of < SEGMENT / 4096; part_of++)
            for (uint64_t left = touched[part_of]; left; left &= left - 1) {
                block = 64 * part_of + first_bit(left);
                in_segment += FN(list)(hits[block], 64 * block, found + in_segment);
            }
        for (size_t start = 0; start < in_segment; start += PART) {
            size_t more = in_segment - start < PART ? in_segment - start : PART;
            for (size_t j = 0; j < more; j++) part.positions[j] = first + from + found[start + j];
            for (size_t j = 0; j < more; j++) part.before[j] = load(old, from + found[start + j], size);
            for (size_t j = 0; j < more; j++) folded[j] = load(folded_of, found[start + j], size);
            for (size_t j = 0; j < more; j++) part.values[j] = unfold(part.before[j], folded[j], size);
            for (size_t j = 0; j < more; j++) out->indices[done + j] = (uint32_t)(from + found[start + j]);
            FN(finish)(&part, more, size, done, out);
            done += more;
        }
    }
    return done == count ? NULL : "changes an element beyond its range";
}

static const char *FN(apply_classes)(const uint8_t *old, size_t n, uint64_t first, int size, const rule_t *rule, class_state_t *state, size_t count, changes_t *out) {
    BY_SIZE(size, return FN(apply_classes_of)(old, n, first, S, rule, state, count, out));
}
