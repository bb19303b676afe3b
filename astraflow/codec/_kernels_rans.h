/* rANS, compiled once per level; included by _kernels_body.h. */

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
