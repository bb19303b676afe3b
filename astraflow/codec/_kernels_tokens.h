/* Gaps and distances as tokens and back, compiled once per level; included by _kernels_body.h. */

/* Without a branch: 0 to 7 as they are; above, the place of the top bit and the two below it. */
static ALWAYS_INLINE unsigned FN(token_of)(uint64_t v, unsigned *width) {
    unsigned top = last_bit(v | 4);
    *width = top - 2;
    return 4 * (top - 1) + (unsigned)(v >> (top - 2) & 3) - 4 * (v < 4);
}

/* Tokens of what is sorted by class; two histograms in turn: equal neighbours do not wait. */
static ALWAYS_INLINE void FN(put_tokens)(const uint8_t *sorted, int size, const uint32_t *counts, uint32_t *histogram, uint8_t *tokens, bit_writer_t *w) {
    uint32_t odd[256];
    size_t at = 0;
    for (int c = 0; c < CLASSES; c++, histogram += 256) {
        memset(odd, 0, sizeof odd);
        for (size_t stop = at + counts[c]; at < stop; at++) {
            uint64_t v = load(sorted, at, size);
            unsigned width, token = FN(token_of)(v, &width);
            tokens[at] = (uint8_t)token;
            (at & 1 ? odd : histogram)[token]++;
            put(w, v & (((uint64_t)1 << width) - 1), width);
        }
        for (int s = 0; s < 256; s++) histogram[s] += odd[s];
    }
}

static ALWAYS_INLINE size_t FN(tokenise_of)(const scan_t *scan, int size, uint32_t *counts, uint32_t *histogram, uint8_t *tokens, uint8_t *sorted, uint8_t *low_bits) {
    size_t n = scan->count, at[CLASSES], sum = 0;
    uint8_t *distances = sorted + 4 * n;
    for (size_t k = 0; k < n; k++) counts[scan->classes[k]]++;
    for (int c = 0; c < CLASSES; c++) at[c] = sum, sum += counts[c];
    for (size_t k = 0; k < n; k++) {
        size_t place = at[scan->classes[k]]++;
        store(sorted, place, scan->gaps[k], 4);
        store(distances, place, load(scan->distances, k, size), size);
    }
    bit_writer_t w = {low_bits, 0, 0};
    FN(put_tokens)(sorted, 4, counts, histogram, tokens, &w);
    FN(put_tokens)(distances, size, counts, histogram + 256 * CLASSES, tokens + n, &w);
    memcpy(w.at, &w.held, 8);
    return (size_t)(w.at - low_bits) + (w.count + 7) / 8;
}

/* Sort by class, in order within each: tokens (gaps, then distances), their low bits, counts. */
static size_t FN(tokenise)(const scan_t *scan, int size, uint32_t *counts, uint32_t *histogram, uint8_t *tokens, uint8_t *sorted, uint8_t *low_bits) {
    BY_SIZE(size, return FN(tokenise_of)(scan, S, counts, histogram, tokens, sorted, low_bits));
}

#if LEVEL == 2
/* Sums of lanes up to and with each. */
static ALWAYS_INLINE __m512i FN(sums_up_to)(__m512i x) {
    const __m512i none = _mm512_setzero_si512();
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, none, 15));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, none, 14));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, none, 12));
    return _mm512_add_epi32(x, _mm512_alignr_epi32(x, none, 8));
}

/* Numbers of 16 tokens below NARROW, whose bits `data` holds from bit `shift` on; returns how many bits they have. */
static ALWAYS_INLINE unsigned FN(take_16)(__m512i tokens, __m512i data, unsigned shift, uint64_t *numbers) {
    const __m512i one = _mm512_set1_epi32(1), same = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    __mmask16 has_bits = _mm512_cmpge_epu32_mask(tokens, _mm512_set1_epi32(8));
    __m512i width = _mm512_maskz_sub_epi32(has_bits, _mm512_srli_epi32(tokens, 2), one), ends = FN(sums_up_to)(width);
    __m512i top = _mm512_or_si512(_mm512_and_si512(tokens, _mm512_set1_epi32(3)), _mm512_set1_epi32(4));
    __m512i base = _mm512_mask_sllv_epi32(tokens, has_bits, top, width);
    __m512i at = _mm512_add_epi32(_mm512_sub_epi32(ends, width), _mm512_set1_epi32((int)shift));
    __m512i bytes = _mm512_add_epi8(_mm512_shuffle_epi8(_mm512_srli_epi32(at, 3), same), _mm512_set1_epi32(0x03020100));
    __m512i low = _mm512_srlv_epi32(_mm512_permutexvar_epi8(bytes, data), _mm512_and_si512(at, _mm512_set1_epi32(7)));
    low = _mm512_and_si512(low, _mm512_sub_epi32(_mm512_sllv_epi32(one, width), one));
    __m512i sum = _mm512_add_epi32(base, low);
    _mm512_storeu_si512(numbers, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(sum)));
    _mm512_storeu_si512(numbers + 8, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(sum, 1)));
    return (unsigned)_mm_extract_epi32(_mm512_extracti32x4_epi32(ends, 3), 3);
}
#endif

/* Numbers of `count` tokens; returns whether there are as many bits as they need. */
static ALWAYS_INLINE int FN(take_tokens)(bit_reader_t *from, const uint8_t *tokens, size_t count, uint64_t *numbers) {
    const token_table_t *table = from->table;
    uint64_t at = from->at;
    size_t k = 0;
#if LEVEL == 2
    for (; k + 16 <= count; k += 16) {
        __m512i some = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(tokens + k)));
        if (_mm512_cmpge_epu32_mask(some, _mm512_set1_epi32(NARROW))) break;
        at += FN(take_16)(some, _mm512_loadu_si512(from->bits + (at >> 3)), (unsigned)at & 7, numbers + k);
        if (at > from->end) return 0;
    }
#endif
    for (; k < count; k++) {
        unsigned width = table->width[tokens[k]];
        if (width > from->end - at) return 0;
        numbers[k] = table->base[tokens[k]] + get(from->bits, at, width);
        at += width;
    }
    from->at = at;
    return 1;
}

/* The ranks of the changes of one class, and NONE behind them. */
static ALWAYS_INLINE const char *FN(take_ranks)(bit_reader_t *from, const uint8_t *tokens, size_t count, uint32_t *ranks) {
    uint64_t numbers[PART], rank = 0, worst = 0;
    for (size_t start = 0; start < count; start += PART) {
        size_t more = count - start < PART ? count - start : PART;
        if (!FN(take_tokens)(from, tokens + start, more, numbers)) return "has another number of bits than its tokens need";
        for (size_t k = 0; k < more; k++) {
            worst |= numbers[k];
            ranks[start + k] = (uint32_t)(rank + numbers[k]);
            rank += numbers[k] + 1;
        }
    }
    ranks[count] = NONE;
    return (worst | rank) > UINT32_MAX ? "changes an element beyond its range" : NULL;
}

static ALWAYS_INLINE const char *FN(take_changes)(bit_reader_t *from, const uint8_t *tokens, size_t count, int size, uint8_t *distances) {
    uint64_t numbers[PART];
    for (size_t start = 0; start < count; start += PART) {
        size_t more = count - start < PART ? count - start : PART;
        uint8_t far = 0;
        if (!FN(take_tokens)(from, tokens + start, more, numbers)) return "has another number of bits than its tokens need";
        for (size_t k = 0; k < more; k++) far |= numbers[k] >= ones(size);
        if (far) return "has a distance that its elements cannot have";
        for (size_t k = 0; k < more; k++) store(distances, start + k, numbers[k], size);
    }
    return NULL;
}

/* Tokens and their low bits become, class by class, ranks and distances; after each class NONE. */
static const char *FN(untokenise)(const uint8_t *tokens, size_t n, const uint32_t *counts, bit_reader_t *from, int size, uint32_t *ranks, uint8_t *distances) {
    const char *why = NULL;
    uint64_t low_nbytes = from->end / 8;
    uint8_t unknown = 0;
    for (size_t k = 0; k < 2 * n; k++) unknown |= tokens[k] > MAX_TOKEN;
    if (unknown) return "has another number of bits than its tokens need";
    for (size_t c = 0; c < CLASSES && !why; tokens += counts[c], ranks += counts[c] + 1, c++) why = FN(take_ranks)(from, tokens, counts[c], ranks);
    if (!why) BY_SIZE(size, why = FN(take_changes)(from, tokens, n, S, distances));
    if (why) return why;
    if ((from->at + 7) / 8 != low_nbytes || (from->at & 7 && from->bits[from->at >> 3] >> (from->at & 7))) return "has another number of bits than its tokens need";
    return NULL;
}
