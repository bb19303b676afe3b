/* Gaps and distances as tokens and back, compiled once per level; included by _kernels_body.h. */

/* Without a branch: 0 to 7 as they are; above, the place of the top bit and the two below it. */
static ALWAYS_INLINE unsigned FN(token_of)(uint64_t v, unsigned *width) {
    unsigned top = last_bit(v | 4);
    *width = top - 2;
    return 4 * (top - 1) + (unsigned)(v >> (top - 2) & 3) - 4 * (v < 4);
}

/* Tokens of what is sorted by class; two histograms in turn: equal neighbours do not wait. */
static ALWAYS_INLINE void FN(put_tokens)(const uint64_t *sorted, const uint32_t *counts, uint32_t *histogram, uint8_t *tokens, bit_writer_t *w) {
    uint32_t odd[256];
    for (int c = 0; c < CLASSES; c++, histogram += 256) {
        memset(odd, 0, sizeof odd);
        for (size_t k = 0; k < counts[c]; k++) {
            unsigned width, token = FN(token_of)(sorted[k], &width);
            tokens[k] = (uint8_t)token;
            (k & 1 ? odd : histogram)[token]++;
            put(w, sorted[k] & (((uint64_t)1 << width) - 1), width);
        }
        for (int s = 0; s < 256; s++) histogram[s] += odd[s];
        sorted += counts[c], tokens += counts[c];
    }
}

/* Sort by class, in order within each: tokens (gaps, then distances), their low bits, counts. */
static size_t FN(tokenise)(const scan_t *scan, uint32_t *counts, uint32_t *histogram, uint8_t *tokens, uint64_t *sorted, uint8_t *low_bits) {
    size_t n = scan->count, at[CLASSES], sum = 0;
    for (size_t k = 0; k < n; k++) counts[scan->classes[k]]++;
    for (int c = 0; c < CLASSES; c++) at[c] = sum, sum += counts[c];
    for (size_t k = 0; k < n; k++) {
        size_t place = at[scan->classes[k]]++;
        sorted[place] = scan->gaps[k];
        sorted[n + place] = scan->distances[k];
    }
    bit_writer_t w = {low_bits, 0, 0};
    FN(put_tokens)(sorted, counts, histogram, tokens, &w);
    FN(put_tokens)(sorted + n, counts, histogram + 256 * CLASSES, tokens + n, &w);
    memcpy(w.at, &w.held, 8);
    return (size_t)(w.at - low_bits) + (w.count + 7) / 8;
}

/* Numbers of `count` tokens; returns whether there are as many bits as they need. */
static ALWAYS_INLINE int FN(take_tokens)(bit_reader_t *from, const uint8_t *tokens, size_t count, uint64_t *numbers) {
    const token_table_t *table = from->table;
    uint64_t at = from->at;
    for (size_t k = 0; k < count; k++) {
        unsigned width = table->width[tokens[k]];
        if (width > from->end - at) return 0;
        numbers[k] = table->base[tokens[k]] + get(from->bits, at, width);
        at += width;
    }
    from->at = at;
    return 1;
}

/* Tokens and their low bits become, class by class, ranks and distances; after each class NONE. */
static const char *FN(untokenise)(const uint8_t *tokens, size_t n, const uint32_t *counts, bit_reader_t *from, int size, uint64_t *ranks, uint64_t *distances) {
    uint64_t largest = ones(size), worst = 0, low_nbytes = from->end / 8;
    uint8_t unknown = 0;
    for (size_t k = 0; k < 2 * n; k++) unknown |= tokens[k] > MAX_TOKEN;
    if (unknown) return "has another number of bits than its tokens need";
    for (size_t c = 0; c < CLASSES; tokens += counts[c], ranks += counts[c] + 1, c++) {
        uint64_t rank = 0;
        if (!FN(take_tokens)(from, tokens, counts[c], ranks)) return "has another number of bits than its tokens need";
        for (size_t k = 0; k < counts[c]; k++) {
            uint64_t gap = ranks[k];
            worst |= gap;
            ranks[k] = rank + gap;
            rank += gap + 1;
        }
        ranks[counts[c]] = NONE;
    }
    if (worst > UINT32_MAX) return "changes an element beyond its range";
    if (!FN(take_tokens)(from, tokens, n, distances)) return "has another number of bits than its tokens need";
    for (size_t k = 0; k < n; k++)
        if (distances[k] >= largest) return "has a distance that its elements cannot have";
    if ((from->at + 7) / 8 != low_nbytes || (from->at & 7 && from->bits[from->at >> 3] >> (from->at & 7))) return "has another number of bits than its tokens need";
    return NULL;
}
