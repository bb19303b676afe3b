/* The loops, compiled once per level of the processor: FN names a function of this level.
 * LEVEL: 0 portable, 1 AVX2 + BMI2, 2 AVX-512 (F, BW, DQ, VL, VPOPCNTDQ) + BMI2. */

static ALWAYS_INLINE uint64_t FN(select_bit)(uint64_t mask, uint64_t rank) {
#if LEVEL >= 1
    return (uint64_t)__builtin_ctzll(_pdep_u64((uint64_t)1 << rank, mask));
#else
    while (rank--) mask &= mask - 1;
    return first_bit(mask);
#endif
}

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

/* Indices of changed elements in [from, to): returns how many. */
static ALWAYS_INLINE size_t FN(find)(const uint8_t *old, const uint8_t *new_, size_t from, size_t to, int size, uint32_t *found) {
    size_t count = 0, i = from;
    for (; i + 64 <= to; i += 64)
        for (uint64_t mask = FN(changed)(old, new_, i, size); mask; mask &= mask - 1)
            found[count++] = (uint32_t)(i + first_bit(mask));
    for (; i < to; i++)
        if (load(old, i, size) != load(new_, i, size)) found[count++] = (uint32_t)i;
    return count;
}

static ALWAYS_INLINE void FN(mix)(const uint64_t *restrict positions, const uint64_t *restrict bits, size_t count, uint64_t scale, sums_t *sums) {
    uint64_t low = 0, high = 0;
    for (size_t j = 0; j < count; j++) {
        uint64_t x = mix_low(positions[j] * scale + bits[j] * DIGEST_B + DIGEST_KEY);
        low += x;
        high += mix_high(x);
    }
    sums->low += low;
    sums->high += high;
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

/* What a segment changes, for the digest: old bits out, new bits in. */
static ALWAYS_INLINE void FN(account)(const uint8_t *old, const uint8_t *new_, const uint32_t *found, size_t count, uint64_t first, int size, sums_t *sums) {
    uint64_t positions[SEGMENT / 8], bits[SEGMENT / 8];
    sums_t out = {0, 0};
    for (size_t start = 0; start < count; start += SEGMENT / 8) {
        size_t part = count - start < SEGMENT / 8 ? count - start : SEGMENT / 8;
        for (size_t j = 0; j < part; j++) positions[j] = first + found[start + j];
        for (size_t j = 0; j < part; j++) bits[j] = load(new_, found[start + j], size);
        FN(mix)(positions, bits, part, (uint64_t)size * DIGEST_A, sums);
        for (size_t j = 0; j < part; j++) bits[j] = load(old, found[start + j], size);
        FN(mix)(positions, bits, part, (uint64_t)size * DIGEST_A, &out);
    }
    sums->low -= out.low;
    sums->high -= out.high;
}

static ALWAYS_INLINE int FN(encode_fast_of)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, fast_out_t *out) {
    uint32_t found[SEGMENT];
    size_t next = 0;
    for (size_t from = 0; from < n; from += SEGMENT) {
        size_t to = n - from < SEGMENT ? n : from + SEGMENT;
        size_t count = FN(find)(old, new_, from, to, size, found);
        FN(account)(old, new_, found, count, first, size, &out->sums);
        out->count += count;
        if (out->gaps.used + out->distances.used + out->escapes.used > out->limit) out->too_long = 1;
        if (out->too_long || !count) continue;
        if (!grow(&out->gaps, count + (to - next) / 255 + 1) || !grow(&out->distances, count) || !grow(&out->escapes, count * (size_t)size)) return 0;
        uint8_t *gaps = out->gaps.at + out->gaps.used, *distances = out->distances.at + out->distances.used, *escapes = out->escapes.at + out->escapes.used;
        for (size_t j = 0; j < count; j++) {
            size_t at = found[j], gap = at - next;
            uint64_t folded = fold(load(old, at, size), load(new_, at, size), size);
            next = at + 1;
            for (; gap >= 255; gap -= 255) *gaps++ = 255;
            *gaps++ = (uint8_t)gap;
            *distances++ = folded < 255 ? (uint8_t)folded : 255;
            if (folded >= 255) {
                memcpy(escapes, &folded, (size_t)size);
                escapes += size;
            }
        }
        out->gaps.used = (size_t)(gaps - out->gaps.at);
        out->distances.used = (size_t)(distances - out->distances.at);
        out->escapes.used = (size_t)(escapes - out->escapes.at);
    }
    return 1;
}

static int FN(encode_fast)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, fast_out_t *out) {
    BY_SIZE(size, return FN(encode_fast_of)(old, new_, n, first, S, out));
}

static ALWAYS_INLINE const char *FN(decode_fast_of)(const uint8_t *old, size_t n, int size, int back, const uint8_t *gaps, size_t gap_nbytes, const uint8_t *distances, size_t count, const uint8_t *escapes, size_t escape_count, uint64_t first, changes_t *out) {
    const uint8_t *gap = gaps, *gap_end = gaps + gap_nbytes;
    size_t next = 0, escaped = 0;
    /* Where, some changes ahead of what: the old bits are on their way meanwhile. */
    for (size_t start = 0; start < count; start += AHEAD) {
        size_t stop = count - start < AHEAD ? count : start + AHEAD;
        for (size_t j = start; j < stop; j++) {
            while (gap < gap_end && *gap == 255) next += 255, gap++;
            if (gap == gap_end) return "has another number of gaps than of changes";
            next += *gap++;
            if (next >= n) return "changes an element beyond its range";
            PREFETCH(old + next * (size_t)size);
            out->positions[j] = next++;
        }
        for (size_t j = start; j < stop; j++) {
            uint64_t folded = distances[j], before = load(old, out->positions[j], size);
            if (folded == 255) {
                if (escaped == escape_count) return "has another number of escapes than it says";
                folded = load(escapes, escaped++, size);
                if (folded < 255) return "is not canonical";
            } else if (!folded)
                return "is not canonical";
            out->positions[j] += first;
            store(out->before, j, before, size);
            store(out->values, j, unfold(before, folded, back, size), size);
        }
    }
    if (gap != gap_end) return "has another number of gaps than of changes";
    return escaped == escape_count ? NULL : "has another number of escapes than it says";
}

static const char *FN(decode_fast)(const uint8_t *old, size_t n, int size, int back, const uint8_t *gaps, size_t gap_nbytes, const uint8_t *distances, size_t count, const uint8_t *escapes, size_t escape_count, uint64_t first, changes_t *out) {
    if (back) BY_SIZE(size, return FN(decode_fast_of)(old, n, S, 1, gaps, gap_nbytes, distances, count, escapes, escape_count, first, out));
    BY_SIZE(size, return FN(decode_fast_of)(old, n, S, 0, gaps, gap_nbytes, distances, count, escapes, escape_count, first, out));
}

/* How often each exponent occurs among the changed elements. */
static ALWAYS_INLINE void FN(exponents_of)(const uint8_t *old, const uint8_t *new_, size_t n, int size, int shift, uint64_t field, uint32_t *histogram) {
    uint32_t found[SEGMENT];
    for (size_t from = 0; from < n; from += SEGMENT) {
        size_t count = FN(find)(old, new_, from, n - from < SEGMENT ? n : from + SEGMENT, size, found);
        for (size_t j = 0; j < count; j++) histogram[load(old, found[j], size) >> shift & field]++;
    }
}

static void FN(exponents)(const uint8_t *old, const uint8_t *new_, size_t n, int size, int shift, uint64_t field, uint32_t *histogram) {
    BY_SIZE(size, FN(exponents_of)(old, new_, n, S, shift, field, histogram));
}

/* A number of 64 bits per class: the mask of its elements among 64, or how many there were. */
typedef struct {
#if LEVEL == 2
    __m512i half[CLASSES / 8];
#else
    uint64_t each[CLASSES];
#endif
} FN(by_class_t);

static ALWAYS_INLINE void FN(spill)(const FN(by_class_t) *from, uint64_t *to) {
#if LEVEL == 2
    for (int h = 0; h < CLASSES / 8; h++) _mm512_storeu_si512(to + 8 * h, from->half[h]);
#else
    memcpy(to, from->each, sizeof from->each);
#endif
}

static ALWAYS_INLINE void FN(classify)(const uint8_t *old, int size, const rule_t *rule, uint64_t valid, uint8_t *class_of, FN(by_class_t) *masks) {
#if LEVEL == 2
    __m512i classes;
    if (size == 2) {
        const __m512i field = _mm512_set1_epi16((short)rule->field), low = _mm512_set1_epi16((short)rule->low), top = _mm512_set1_epi16((short)rule->top);
        const __m128i shift = _mm_cvtsi32_si128(rule->shift);
        __m512i a = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old), shift), field);
        __m512i b = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old + 64), shift), field);
        a = _mm512_min_epu16(_mm512_subs_epu16(a, low), top);
        b = _mm512_min_epu16(_mm512_subs_epu16(b, low), top);
        classes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
        _mm512_storeu_si512(class_of, classes);
    } else {
        for (int t = 0; t < 64; t++) class_of[t] = class_at(load(old, (size_t)t, size), rule);
        classes = _mm512_loadu_si512(class_of);
    }
    /* Four masks, one per bit of the class; a class is where all four are as its number has them. */
    for (int h = 0; h < CLASSES / 8; h++) masks->half[h] = _mm512_set1_epi64((long long)valid);
    for (int bit = 0; bit < 4; bit++) {
        __m512i has = _mm512_set1_epi64((long long)_mm512_test_epi8_mask(classes, _mm512_set1_epi8((char)(1 << bit))));
        for (int h = 0; h < CLASSES / 8; h++) {
            __m512i wants = _mm512_load_si512(class_bits[bit] + 8 * h);
            masks->half[h] = _mm512_ternarylogic_epi64(masks->half[h], has, wants, 0x90);
        }
    }
#else
    for (int t = 0; t < 64; t++) class_of[t] = class_at(load(old, (size_t)t, size), rule);
#if LEVEL == 1
    __m256i a = _mm256_loadu_si256((const __m256i *)class_of), b = _mm256_loadu_si256((const __m256i *)(class_of + 32));
    for (int c = 0; c < CLASSES; c++) {
        __m256i each = _mm256_set1_epi8((char)c);
        masks->each[c] = valid & ((uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, each)) | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(b, each)) << 32);
    }
#else
    memset(masks->each, 0, sizeof masks->each);
    for (int t = 0; t < 64; t++) masks->each[class_of[t]] |= (uint64_t)1 << t;
    for (int c = 0; c < CLASSES; c++) masks->each[c] &= valid;
#endif
#endif
}

static ALWAYS_INLINE void FN(advance)(FN(by_class_t) *seen, const FN(by_class_t) *masks) {
#if LEVEL == 2
    for (int h = 0; h < CLASSES / 8; h++) seen->half[h] = _mm512_add_epi64(seen->half[h], _mm512_popcnt_epi64(masks->half[h]));
#else
    for (int c = 0; c < CLASSES; c++) seen->each[c] += (uint64_t)__builtin_popcountll(masks->each[c]);
#endif
}

static ALWAYS_INLINE int FN(scan_classes_of)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, const rule_t *rule, scan_t *out) {
    FN(by_class_t) seen, masks;
    uint64_t seen_of[CLASSES], mask_of[CLASSES], next[CLASSES] = {0};
    uint8_t class_of[64], tail_old[64 * 8] = {0}, tail_new[64 * 8] = {0};
    uint32_t found[SEGMENT];
    memset(&seen, 0, sizeof seen);
    for (size_t from = 0; from < n; from += SEGMENT) {
        size_t to = n - from < SEGMENT ? n : from + SEGMENT, count = 0;
        if (!reserve(out, SEGMENT)) return 0;
        for (size_t i = from; i < to; i += 64) {
            const uint8_t *a = old + i * (size_t)size, *b = new_ + i * (size_t)size;
            uint64_t valid = ~(uint64_t)0;
            if (to - i < 64) {
                size_t rest = to - i;
                memcpy(tail_old, a, rest * (size_t)size);
                memcpy(tail_new, b, rest * (size_t)size);
                a = tail_old, b = tail_new, valid = ((uint64_t)1 << rest) - 1;
            }
            uint64_t mask = FN(changed)(a, b, 0, size) & valid;
            FN(classify)(a, size, rule, valid, class_of, &masks);
            if (mask) {
                FN(spill)(&seen, seen_of);
                FN(spill)(&masks, mask_of);
            }
            for (; mask; mask &= mask - 1) {
                uint64_t t = first_bit(mask);
                unsigned c = class_of[t];
                uint64_t rank = seen_of[c] + (uint64_t)__builtin_popcountll(mask_of[c] & (((uint64_t)1 << t) - 1));
                size_t k = out->count++;
                out->classes[k] = (uint8_t)c;
                out->gaps[k] = (uint32_t)(rank - next[c]);
                out->distances[k] = fold(load(a, t, size), load(b, t, size), size) - 1;
                next[c] = rank + 1;
                found[count++] = (uint32_t)(i + t);
            }
            FN(advance)(&seen, &masks);
        }
        FN(account)(old, new_, found, count, first, size, &out->sums);
    }
    return 1;
}

static int FN(scan_classes)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, const rule_t *rule, scan_t *out) {
    BY_SIZE(size, return FN(scan_classes_of)(old, new_, n, first, S, rule, out));
}

/* Which classes have a change among the next elements: bit c. */
static ALWAYS_INLINE unsigned FN(due)(const FN(by_class_t) *seen, const uint64_t *next) {
    unsigned due = 0;
#if LEVEL == 2
    for (int h = 0; h < CLASSES / 8; h++) due |= (unsigned)_mm512_cmpgt_epu64_mask(seen->half[h], _mm512_loadu_si512(next + 8 * h)) << 8 * h;
#else
    for (int c = 0; c < CLASSES; c++) due |= (unsigned)(seen->each[c] > next[c]) << c;
#endif
    return due;
}

static ALWAYS_INLINE const char *FN(apply_classes_of)(const uint8_t *old, size_t n, uint64_t first, int size, const rule_t *rule, class_state_t *state, size_t count, changes_t *out) {
    FN(by_class_t) seen, masks;
    uint64_t seen_of[CLASSES], mask_of[CLASSES], folded[64];
    uint8_t class_of[64], tail[64 * 8] = {0};
    size_t done = 0;
    memset(&seen, 0, sizeof seen);
    for (unsigned c = 0; c < CLASSES; c++) state->next[c] = state->ranks[state->at[c]];
    for (size_t i = 0; i < n && done < count; i += 64) {
        const uint8_t *a = old + i * (size_t)size;
        uint64_t valid = ~(uint64_t)0, hits = 0;
        if (n - i < 64) {
            memcpy(tail, a, (n - i) * (size_t)size);
            a = tail, valid = ((uint64_t)1 << (n - i)) - 1;
        }
        FN(classify)(a, size, rule, valid, class_of, &masks);
        FN(advance)(&seen, &masks);
        unsigned due = FN(due)(&seen, state->next);
        if (!due) continue;
        FN(spill)(&seen, seen_of);
        FN(spill)(&masks, mask_of);
        for (; due; due &= due - 1) {
            unsigned c = (unsigned)first_bit(due);
            uint64_t before = seen_of[c] - (uint64_t)__builtin_popcountll(mask_of[c]);
            do {
                uint64_t t = FN(select_bit)(mask_of[c], state->next[c] - before);
                hits |= (uint64_t)1 << t;
                size_t k = state->at[c]++;
                folded[t] = state->distances[k] + 1;
                state->next[c] = state->ranks[k + 1];
            } while (state->next[c] < seen_of[c]);
        }
        for (; hits; hits &= hits - 1) {
            uint64_t t = first_bit(hits), before = load(a, t, size);
            out->positions[done] = first + i + t;
            store(out->before, done, before, size);
            store(out->values, done, unfold(before, folded[t], 0, size), size);
            done++;
        }
    }
    return done == count ? NULL : "changes an element beyond its range";
}

static const char *FN(apply_classes)(const uint8_t *old, size_t n, uint64_t first, int size, const rule_t *rule, class_state_t *state, size_t count, changes_t *out) {
    BY_SIZE(size, return FN(apply_classes_of)(old, n, first, S, rule, state, count, out));
}

/* `tables`: of each symbol's run; slots are 4096 per table: symbol | frequency - 1 << 8 | bias << 20. */
static const char *FN(rans_decode)(const rans_in_t *in, uint8_t *out) {
    uint32_t x[MAX_LANES];
    const uint8_t *word = in->words, *end = in->words + 2 * in->word_count;
    size_t i = 0, lane = 0;
    memcpy(x, in->states, 4 * in->lanes);
    for (size_t run = 0; run < in->run_count; run++) {
        size_t stop = i + in->counts[run];
        const uint32_t *slots = in->slots + 4096 * (size_t)in->tables[run];
#if LEVEL == 2
        while (i < stop) {
            size_t part = 16 - lane % 16 < stop - i ? 16 - lane % 16 : stop - i;
            if (end - word < 32) break;
            __mmask16 on = (__mmask16)(((1u << part) - 1) << (lane % 16));
            uint32_t *at = x + (lane & ~(size_t)15);
            __m512i v = _mm512_loadu_si512(at);
            __m512i entry = _mm512_i32gather_epi32(_mm512_and_si512(v, _mm512_set1_epi32(4095)), slots, 4);
            __m512i frequency = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(4095)), _mm512_set1_epi32(1));
            __m512i y = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(v, 12)), _mm512_srli_epi32(entry, 20));
            __mmask16 low = _mm512_mask_cmplt_epu32_mask(on, y, _mm512_set1_epi32(1 << 16));
            __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)word));
            y = _mm512_mask_or_epi32(y, low, _mm512_slli_epi32(y, 16), _mm512_maskz_expand_epi32(low, words));
            _mm512_mask_storeu_epi32(at, on, y);
            word += 2 * __builtin_popcount(low);
            _mm512_mask_cvtepi32_storeu_epi8(out + i - lane % 16, on, entry);
            i += part;
            lane = (lane + part) & (in->lanes - 1);
        }
#endif
        for (; i < stop; i++, lane = (lane + 1) & (in->lanes - 1)) {
            uint32_t entry = slots[x[lane] & 4095];
            out[i] = (uint8_t)entry;
            x[lane] = ((entry >> 8 & 4095) + 1) * (x[lane] >> 12) + (entry >> 20);
            if (x[lane] < 1 << 16) {
                if (word == end) return "ends before its last symbol";
                x[lane] = x[lane] << 16 | (uint32_t)word[0] | (uint32_t)word[1] << 8;
                word += 2;
            }
        }
    }
    for (size_t l = 0; l < in->lanes; l++)
        if (x[l] != 1 << 16) return "does not end where it began";
    return word == end ? NULL : "has bytes behind its last symbol";
}
