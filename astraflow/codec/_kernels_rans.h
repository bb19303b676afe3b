/* rANS, compiled once per level; included by _kernels_body.h. */

/* Symbols backwards into `words`, from its end; returns the first word. NULL: no code for one. */
static uint8_t *FN(rans_encode)(const rans_out_t *out, uint32_t *x, uint8_t *end) {
    size_t i = out->count;
    uint8_t *word = end;
    for (size_t l = 0; l < out->lanes; l++) x[l] = 1 << 16;
    for (size_t run = out->run_count; run-- > 0;) {
        const uint16_t *frequency = out->frequencies + 256 * (size_t)out->tables[run], *start = out->starts + 256 * (size_t)out->tables[run];
        size_t stop = i - out->counts[run];
#if LEVEL == 2
        uint32_t both[256];
        for (int s = 0; s < 256; s++) both[s] = (uint32_t)frequency[s] | (uint32_t)start[s] << 16;
        while (i > stop) {
            size_t last = (i - 1) % 16 + 1, part = last < i - stop ? last : i - stop, first = last - part;
            __mmask16 on = (__mmask16)((0xffffu >> (16 - part)) << first);
            uint32_t *at = x + ((i - last) & (out->lanes - 1));
            __m512i symbols = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(on, out->symbols + (i - last)));
            __m512i entry = _mm512_i32gather_epi32(symbols, both, 4), v = _mm512_loadu_si512(at);
            __m512i f = _mm512_and_si512(entry, _mm512_set1_epi32(0xffff));
            if (_mm512_mask_testn_epi32_mask(on, f, f)) return NULL;
            __mmask16 due = _mm512_mask_cmpge_epu32_mask(on, _mm512_srli_epi32(v, 20), f);
            int words = __builtin_popcount(due);
            word -= 2 * words;
            _mm256_mask_storeu_epi16(word, (__mmask16)((1u << words) - 1), _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(due, v)));
            v = _mm512_mask_srli_epi32(v, due, v, 16);
            /* The quotient has 20 bits, so that of floats is at most one off. */
            __m512i q = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepu32_ps(v), _mm512_cvtepi32_ps(f)));
            __m512i rest = _mm512_sub_epi32(v, _mm512_mullo_epi32(q, f));
            __mmask16 below = _mm512_movepi32_mask(rest);
            q = _mm512_mask_sub_epi32(q, below, q, _mm512_set1_epi32(1));
            rest = _mm512_mask_add_epi32(rest, below, rest, f);
            __mmask16 above = _mm512_cmpge_epu32_mask(rest, f);
            q = _mm512_mask_add_epi32(q, above, q, _mm512_set1_epi32(1));
            rest = _mm512_mask_sub_epi32(rest, above, rest, f);
            v = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(q, 12), rest), _mm512_srli_epi32(entry, 16));
            _mm512_mask_storeu_epi32(at, on, v);
            i -= part;
        }
#else
        double inverse[256];
        for (int s = 0; s < 256; s++) inverse[s] = frequency[s] ? 1.0 / frequency[s] : 0;
        while (i > stop) {
            i--;
            uint8_t symbol = out->symbols[i];
            uint32_t f = frequency[symbol], *state = x + (i & (out->lanes - 1)), v = *state;
            if (!f) return NULL;
            /* Without a branch: whether a word is due is a coin toss. */
            size_t due = v >> 20 >= f;
            memcpy(word - 2, &v, 2);
            word -= 2 * due;
            v >>= 16 * due;
            /* Exact: a half more than v is at least 2^-13 of f away from every multiple. */
            uint32_t q = (uint32_t)(int64_t)((v + 0.5) * inverse[symbol]);
            *state = (q << 12) + (v - q * f) + start[symbol];
        }
#endif
    }
    return word;
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
            /* All of it: what is stored in part has to reach the cache before it can be loaded. */
            _mm512_storeu_si512(at, _mm512_mask_mov_epi32(v, on, y));
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
