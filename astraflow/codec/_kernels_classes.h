/* Elements sorted by the exponent of the base, compiled once per level; included by _kernels_body.h. */

/* How many elements of each class there were in a segment: 16 bits at SLOT(c). */
typedef struct {
#if LEVEL == 2
    __m512i all;
#elif LEVEL == 1
    __m256i half[2];
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
#elif LEVEL == 3
    uint8x16_t each = vdupq_n_u8((uint8_t)c), part[4];
    for (int p = 0; p < 4; p++) part[p] = vceqq_u8(vld1q_u8(class_of + 16 * p), each);
    return FN(mask_of)(part);
#else
    uint64_t mask = 0;
    for (size_t t = 0; t < 64; t++) mask |= (uint64_t)(class_of[t] == c) << t;
    return mask;
#endif
}

#if LEVEL == 2
/* The classes of 64 elements of two bytes. */
static ALWAYS_INLINE __m512i FN(classes_of_words)(const uint8_t *old, rule_t rule) {
    /* Of four words in eight bytes each, eight bits from `shift` on: low half of the first 32 words, high half of the others. */
    const __m512i bits = _mm512_add_epi8(_mm512_set1_epi64(0x3020100030201000), _mm512_set1_epi8((char)rule.shift));
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m512i both = _mm512_multishift_epi64_epi8(bits, _mm512_loadu_si512(old));
    both = _mm512_mask_multishift_epi64_epi8(both, 0xf0f0f0f0f0f0f0f0, bits, _mm512_loadu_si512(old + 64));
    both = _mm512_and_si512(_mm512_permutexvar_epi32(order, both), _mm512_set1_epi8((char)rule.field));
    return _mm512_min_epu8(_mm512_subs_epu8(both, _mm512_set1_epi8((char)rule.low)), _mm512_set1_epi8((char)rule.top));
}

/* Lane p: bit p of 64 classes, a bit each, and in lane p + 4 the opposite. */
static ALWAYS_INLINE __m512i FN(class_bits)(__m512i classes) {
    const __m512i diagonal = _mm512_set1_epi64((long long)0x8040201008040201), each = _mm512_set1_epi64(0x0101010101010101);
    const __m512i planes = _mm512_mullo_epi64(each, _mm512_setr_epi64(0, 1, 2, 3, 0, 1, 2, 3));
    const __m512i gather = _mm512_add_epi8(_mm512_set1_epi64(0x3830282018100800), planes);
    /* A transposed matrix of 8 by 8 bits has the last element first, so it is mirrored. */
    __m512i bits = _mm512_gf2p8affine_epi64_epi8(_mm512_gf2p8affine_epi64_epi8(diagonal, classes, 0), diagonal, 0);
    return _mm512_xor_si512(_mm512_permutexvar_epi8(gather, bits), _mm512_setr_epi64(0, 0, 0, 0, -1, -1, -1, -1));
}

/* Lane l: which of 64 elements are of class l, and which are of class l + 8. */
static ALWAYS_INLINE void FN(members_by_lane)(__m512i classes, uint64_t valid, __m512i members[2]) {
    const __m512i on = _mm512_set1_epi64((long long)valid);
    __m512i bits = FN(class_bits)(classes);
    __m512i first = _mm512_permutexvar_epi64(_mm512_setr_epi64(4, 0, 4, 0, 4, 0, 4, 0), bits);
    __m512i second = _mm512_permutexvar_epi64(_mm512_setr_epi64(5, 5, 1, 1, 5, 5, 1, 1), bits);
    __m512i third = _mm512_permutexvar_epi64(_mm512_setr_epi64(6, 6, 6, 6, 2, 2, 2, 2), bits);
    __m512i fourth = _mm512_permutexvar_epi64(_mm512_set1_epi64(3), bits);
    __m512i all = _mm512_ternarylogic_epi64(first, second, third, 0x80);
    members[0] = _mm512_ternarylogic_epi64(all, fourth, on, 0x20);
    members[1] = _mm512_ternarylogic_epi64(all, fourth, on, 0x80);
}
#endif

#if LEVEL == 1
/* The classes of 32 elements of two bytes. */
static ALWAYS_INLINE __m256i FN(classes_of_words)(const uint8_t *old, rule_t rule) {
    const __m128i shift = _mm_cvtsi32_si128(rule.shift);
    const __m256i field = _mm256_set1_epi16((short)rule.field), low = _mm256_set1_epi16((short)rule.low), top = _mm256_set1_epi16((short)rule.top);
    __m256i each[2];
    for (int half = 0; half < 2; half++) {
        each[half] = _mm256_and_si256(_mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(old + 32 * half)), shift), field);
        each[half] = _mm256_min_epu16(_mm256_subs_epu16(each[half], low), top);
    }
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(each[0], each[1]), 0xd8);
}

/* How many bits are set in each 64. */
static ALWAYS_INLINE __m256i FN(popcounts)(__m256i bits) {
    const __m256i low = _mm256_set1_epi8(15), counts = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    __m256i bytes = _mm256_shuffle_epi8(counts, _mm256_and_si256(bits, low));
    bytes = _mm256_add_epi8(bytes, _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi64(bits, 4), low)));
    return _mm256_sad_epu8(bytes, _mm256_setzero_si256());
}

/* Lane l of half h: how many of 64 elements are of class 4 h + l, and above 16 bits of that class plus 8. */
static ALWAYS_INLINE void FN(count_classes)(const uint8_t *class_of, uint64_t valid, __m256i counts[2]) {
    __m256i low = _mm256_loadu_si256((const __m256i *)class_of), high = _mm256_loadu_si256((const __m256i *)(class_of + 32));
    uint64_t bits[4];
    for (int p = 3; p >= 0; p--) {
        /* Bit p of each class on top of its byte. */
        __m256i first = _mm256_slli_epi64(low, 7 - p), second = _mm256_slli_epi64(high, 7 - p);
        bits[p] = (uint64_t)(uint32_t)_mm256_movemask_epi8(first) | (uint64_t)(uint32_t)_mm256_movemask_epi8(second) << 32;
    }
    __m256i lowest = _mm256_xor_si256(_mm256_set1_epi64x((long long)bits[0]), _mm256_setr_epi64x(-1, 0, -1, 0));
    __m256i of_four = _mm256_and_si256(lowest, _mm256_xor_si256(_mm256_set1_epi64x((long long)bits[1]), _mm256_setr_epi64x(-1, -1, 0, 0)));
    for (int half = 0; half < 2; half++) {
        uint64_t on = valid & (half ? bits[2] : ~bits[2]);
        __m256i below_8 = FN(popcounts)(_mm256_and_si256(of_four, _mm256_set1_epi64x((long long)(on & ~bits[3]))));
        __m256i from_8 = FN(popcounts)(_mm256_and_si256(of_four, _mm256_set1_epi64x((long long)(on & bits[3]))));
        counts[half] = _mm256_or_si256(below_8, _mm256_slli_epi64(from_8, 16));
    }
}
#elif LEVEL == 3
/* The classes of 16 elements of two bytes. */
static ALWAYS_INLINE uint8x16_t FN(classes_of_words)(const uint8_t *old, rule_t rule) {
    const int16x8_t shift = vdupq_n_s16((int16_t)-rule.shift);
    const uint16x8_t field = vdupq_n_u16((uint16_t)rule.field), low = vdupq_n_u16((uint16_t)rule.low), top = vdupq_n_u16((uint16_t)rule.top);
    uint16x8_t each[2];
    for (int half = 0; half < 2; half++) {
        each[half] = vandq_u16(vshlq_u16(vreinterpretq_u16_u8(vld1q_u8(old + 16 * half)), shift), field);
        each[half] = vminq_u16(vqsubq_u16(each[half], low), top);
    }
    return vcombine_u8(vmovn_u16(each[0]), vmovn_u16(each[1]));
}
#endif

/* The classes of 64 elements; those that are `valid` are counted. */
static ALWAYS_INLINE void FN(classify)(const uint8_t *old, int size, rule_t rule, uint64_t valid, uint8_t *class_of, FN(by_class_t) *seen) {
#if LEVEL == 2
    __m512i classes, members[2];
    if (size == 2) {
        classes = FN(classes_of_words)(old, rule);
        _mm512_storeu_si512(class_of, classes);
    } else {
        for (int t = 0; t < 64; t++) class_of[t] = class_at(load(old, (size_t)t, size), &rule);
        classes = _mm512_loadu_si512(class_of);
    }
    FN(members_by_lane)(classes, valid, members);
    __m512i high = _mm512_slli_epi64(_mm512_popcnt_epi64(members[1]), 16);
    seen->all = _mm512_add_epi16(seen->all, _mm512_or_si512(high, _mm512_popcnt_epi64(members[0])));
#elif LEVEL == 1
    __m256i counts[2];
    if (size == 2)
        for (int half = 0; half < 2; half++) _mm256_storeu_si256((__m256i *)(class_of + 32 * half), FN(classes_of_words)(old + 64 * half, rule));
    else
        for (int t = 0; t < 64; t++) class_of[t] = class_at(load(old, (size_t)t, size), &rule);
    FN(count_classes)(class_of, valid, counts);
    for (int half = 0; half < 2; half++) seen->half[half] = _mm256_add_epi16(seen->half[half], counts[half]);
#else
#if LEVEL == 3
    if (size == 2)
        for (int p = 0; p < 4; p++) vst1q_u8(class_of + 16 * p, FN(classes_of_words)(old + 32 * p, rule));
    else
#endif
        for (int t = 0; t < 64; t++) class_of[t] = class_at(load(old, (size_t)t, size), &rule);
    for (int t = 0; t < 64 && valid >> t; t++) seen->each[SLOT(class_of[t])]++;
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
