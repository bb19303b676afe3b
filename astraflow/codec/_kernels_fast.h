/* Gaps and steps of changed elements, compiled once per level; included by _kernels_body.h. */

/* Gaps as bytes: so many of 255 as fit, then the rest. */
static ALWAYS_INLINE uint8_t *FN(put_gaps)(const uint16_t *found, size_t count, size_t from, size_t *next, uint8_t *gaps) {
    for (size_t j = 0; j < count; j++) {
        size_t at = from + found[j], gap = at - *next, is_wide = gap >= 255;
        *next = at + 1;
        *gaps = 255;
        gaps += is_wide;
        gap -= 255 & (0 - is_wide);
        for (; gap >= 255; gap -= 255) *gaps++ = 255;
        *gaps++ = (uint8_t)gap;
    }
    return gaps;
}

/* Bit j: number j of up to 64 has a bit of `bits`. */
static ALWAYS_INLINE uint64_t FN(having)(const uint64_t *numbers, uint64_t bits, size_t count) {
    uint64_t mask = 0;
#if LEVEL == 2
    for (size_t j = 0; j < count; j += 8) mask |= (uint64_t)_mm512_test_epi64_mask(_mm512_loadu_si512(numbers + j), _mm512_set1_epi64((long long)bits)) << j;
    if (count < 64) mask &= ((uint64_t)1 << count) - 1;
#else
    for (size_t j = 0; j < count; j++) mask |= (uint64_t)((numbers[j] & bits) != 0) << j;
#endif
    return mask;
}

/* One bit each: whether a change leads up, and whether it is a far one; how far those are. */
static ALWAYS_INLINE void FN(put_steps)(const part_t *part, size_t count, int size, fast_out_t *out) {
    uint64_t steps[PART] = {0};
    for (size_t j = 0; j < count; j++) steps[j] = fold(part->before[j], part->values[j], size) - 1;
    uint64_t marks = FN(having)(steps, ~(uint64_t)1, count);
    append(&out->ups, FN(having)(steps, 1, count), (unsigned)count);
    append(&out->marks, marks, (unsigned)count);
    for (; marks; marks &= marks - 1) {
        uint64_t step = steps[first_bit(marks)] >> 1;
        out->steps.at[out->steps.used++] = (uint8_t)(step < 255 ? step : 255);
        if (step < 255) continue;
        store(out->escapes.at + out->escapes.used, 0, step, size);
        out->escapes.used += (size_t)size;
    }
}

/* Room for what `count` changes add to the streams. */
static int FN(make_room)(fast_out_t *out, size_t count, size_t gap_nbytes, int size) {
    return grow(&out->gaps, gap_nbytes) && grow(&out->ups.bytes, count / 8 + 16) && grow(&out->marks.bytes, count / 8 + 16) && grow(&out->steps, count) && grow(&out->escapes, count * (size_t)size);
}

static ALWAYS_INLINE int FN(encode_fast_of)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, fast_out_t *out) {
    uint16_t found[SEGMENT + 64];
    size_t next = 0;
    part_t part;
    for (size_t from = 0; from < n; from += SEGMENT) {
        size_t to = n - from < SEGMENT ? n : from + SEGMENT;
        size_t count = FN(find)(old, new_, from, to, size, found);
        out->count += count;
        out->too_long |= out->gaps.used + out->ups.bytes.used + out->marks.bytes.used + out->steps.used + out->escapes.used > out->limit;
        if (count && !out->too_long && !FN(make_room)(out, count, count + (to - next) / 255 + 1, size)) return 0;
        for (size_t start = 0; start < count; start += PART) {
            size_t more = count - start < PART ? count - start : PART;
            FN(gather)(old, new_, from, found + start, more, first, size, &part);
            FN(account)(&part, more, size, &out->sums);
            if (out->too_long) continue;
            uint8_t *gaps = out->gaps.at + out->gaps.used;
            out->gaps.used += (size_t)(FN(put_gaps)(found + start, more, from, &next, gaps) - gaps);
            FN(put_steps)(&part, more, size, out);
        }
    }
    flush(&out->ups), flush(&out->marks);
    return 1;
}

static int FN(encode_fast)(const uint8_t *old, const uint8_t *new_, size_t n, uint64_t first, int size, fast_out_t *out) {
    BY_SIZE(size, return FN(encode_fast_of)(old, new_, n, first, S, out));
}

/* Gaps of one block become indices from `*next` on; returns how many there are, or NONE: more than `room`. */
static ALWAYS_INLINE size_t FN(take_gaps)(const uint8_t *gaps, size_t nbytes, size_t room, uint32_t *next, uint32_t *indices) {
    size_t i = 0, found = 0;
    uint32_t at = *next;
#if LEVEL == 2
    const __m512i one = _mm512_set1_epi32(1), none = _mm512_setzero_si512(), last = _mm512_set1_epi32(15);
    __m512i before = _mm512_set1_epi32((int)(at - 1));
    for (; i + 16 <= nbytes && found + 16 <= room; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(gaps + i));
        __mmask16 ends = _mm_cmpneq_epi8_mask(bytes, _mm_set1_epi8(-1));
        /* A sum of all up to each byte; a changed element takes a place itself. */
        __m512i sum = _mm512_cvtepu8_epi32(bytes);
        sum = _mm512_mask_add_epi32(sum, ends, sum, one);
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, none, 15));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, none, 14));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, none, 12));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, none, 8));
        _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(ends, _mm512_add_epi32(sum, before)));
        before = _mm512_add_epi32(before, _mm512_permutexvar_epi32(last, sum));
        found += (size_t)__builtin_popcount(ends);
    }
    at = (uint32_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(before)) + 1;
#endif
    for (; i < nbytes && found < room; i++) {
        uint32_t is_end = gaps[i] != 255;
        indices[found] = at + gaps[i];
        at += gaps[i] + is_end;
        found += is_end;
    }
    *next = at;
    return i < nbytes ? NONE : found;
}

/* Go on until it is known where `wanted` changes are, or all of them. */
static ALWAYS_INLINE const char *FN(find_places)(fast_in_t *in, size_t wanted, size_t count, size_t n, uint32_t *indices) {
    while (in->found < wanted && in->gap_nbytes) {
        size_t nbytes = in->gap_nbytes < GAPS ? in->gap_nbytes : GAPS;
        size_t more = FN(take_gaps)(in->gaps, nbytes, count - in->found, &in->next, indices + in->found);
        if (more == NONE) return "has another number of gaps than of changes";
        /* So few move on by less than 2^17: `next` does not overflow unseen. */
        if (in->next > n) return "changes an element beyond its range";
        in->gaps += nbytes, in->gap_nbytes -= nbytes, in->found += more;
    }
    return in->found < (wanted < count ? wanted : count) ? "has another number of gaps than of changes" : NULL;
}

/* How many units further than one the marked changes lead: 0 for the others. */
static ALWAYS_INLINE const char *FN(take_steps)(fast_in_t *in, uint64_t ups, uint64_t marks, int size, uint64_t *steps) {
    memset(steps, 0, PART * sizeof *steps);
    for (; marks; marks &= marks - 1) {
        unsigned j = first_bit(marks);
        if (!in->step_count) return "has another number of steps than it says";
        uint64_t step = *in->steps++, least = 1;
        in->step_count--;
        if (step == 255) {
            if (!in->escape_count) return "has another number of escapes than it says";
            step = load(in->escapes, 0, size), least = 255;
            in->escapes += size, in->escape_count--;
        }
        if (step < least || step > (ones(size) >> 1) - (ups >> j & 1)) return "is not canonical";
        steps[j] = step;
    }
    return NULL;
}

static ALWAYS_INLINE const char *FN(decode_part)(const uint8_t *old, int size, int back, fast_in_t *in, size_t start, size_t count, uint64_t first, changes_t *out) {
    part_t part;
    uint64_t steps[PART], ups = 0, marks = 0;
    memcpy(&ups, in->ups + start / 8, (count + 7) / 8);
    memcpy(&marks, in->marks + start / 8, (count + 7) / 8);
    if (count < PART && (ups | marks) >> count) return "is not canonical";
    const char *why = FN(take_steps)(in, ups, marks, size, steps);
    if (why) return why;
    if (back) ups = ~ups;
    for (size_t j = 0; j < count; j++) part.positions[j] = first + out->indices[start + j];
    for (size_t j = 0; j < count; j++) part.before[j] = load(old, out->indices[start + j], size);
    for (size_t j = 0; j < count; j++) {
        uint64_t down = (ups >> j & 1) - 1, distance = ((steps[j] + 1) ^ down) - down;
        part.values[j] = unordered((ordered(part.before[j], size) + distance) & ones(size), size);
    }
    FN(finish)(&part, count, size, start, out);
    return NULL;
}

#if LEVEL == 2
/* What 64 changes of two bytes add to the digest; the lines of some later ones are fetched by the way. */
static ALWAYS_INLINE void FN(account_words)(const uint32_t *indices, const uint8_t *before, const uint8_t *values, const uint8_t *old, const uint32_t *later, uint64_t first, sums_t *sums) {
    const __m512i scale = _mm512_set1_epi64((long long)(2 * DIGEST_A)), b = _mm512_set1_epi64((long long)DIGEST_B);
    const __m512i key = _mm512_set1_epi64((long long)(first * 2 * DIGEST_A + DIGEST_KEY));
    __m512i low = _mm512_setzero_si512(), high = low;
    for (size_t j = 0; j < PART; j += 8) {
        for (size_t t = 0; later && t < 8; t++) PREFETCH_NEAR(old + 2 * (size_t)later[j + t]);
        __m512i at = _mm512_add_epi64(key, _mm512_mullo_epi64(_mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(indices + j))), scale));
        __m512i x = _mm512_add_epi64(at, _mm512_mullo_epi64(_mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)(values + 2 * j))), b));
        __m512i y = _mm512_add_epi64(at, _mm512_mullo_epi64(_mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)(before + 2 * j))), b));
        x = mix_low_of_8(x), y = mix_low_of_8(y);
        low = _mm512_add_epi64(low, _mm512_sub_epi64(x, y));
        high = _mm512_add_epi64(high, _mm512_sub_epi64(mix_high_of_8(x), mix_high_of_8(y)));
    }
    sums->low += sum_of_8(low);
    sums->high += sum_of_8(high);
}

/* Bits of 32 elements of two bytes, of which none is the last one. */
static ALWAYS_INLINE __m512i FN(gather_words)(const uint8_t *old, const uint32_t *indices) {
    __m512i low = _mm512_i32gather_epi32(_mm512_loadu_si512(indices), old, 2), high = _mm512_i32gather_epi32(_mm512_loadu_si512(indices + 16), old, 2);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
}

/* As ordered() and unordered(), of 32 elements. */
static ALWAYS_INLINE __m512i FN(ordered_words)(__m512i bits) {
    return _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi16(bits, 15), _mm512_set1_epi16((short)0x8000)));
}

static ALWAYS_INLINE __m512i FN(unordered_words)(__m512i place) {
    __m512i flipped = _mm512_andnot_si512(_mm512_srai_epi16(place, 15), _mm512_set1_epi16(0x7fff));
    return _mm512_xor_si512(place, _mm512_or_si512(flipped, _mm512_set1_epi16((short)0x8000)));
}

/* Bits that are so many units up or down from others. */
static ALWAYS_INLINE __m512i FN(move_words)(__m512i from, __m256i steps, __mmask32 ups) {
    __m512i units = _mm512_add_epi16(_mm512_cvtepu8_epi16(steps), _mm512_set1_epi16(1)), place = FN(ordered_words)(from);
    return FN(unordered_words)(_mm512_mask_add_epi16(_mm512_sub_epi16(place, units), ups, place, units));
}

/* As decode_part, of 64 changes of two bytes; 0: it is not as simple as that. */
static ALWAYS_INLINE int FN(decode_words)(const uint8_t *old, int back, fast_in_t *in, size_t start, const uint32_t *later, uint64_t first, changes_t *out) {
    uint64_t ups = load(in->ups, start / 64, 8), marks = load(in->marks, start / 64, 8);
    size_t count = (size_t)__builtin_popcountll(marks);
    if (count > in->step_count) return 0;
    __m512i packed = _mm512_maskz_loadu_epi8(_bzhi_u64(~(uint64_t)0, (unsigned)count), in->steps);
    __m512i steps = _mm512_maskz_expand_epi8(marks, packed);
    /* 0 is refused, 255 has an escape. */
    if (_mm512_mask_cmpge_epu8_mask(marks, _mm512_sub_epi8(steps, _mm512_set1_epi8(1)), _mm512_set1_epi8(-2))) return 0;
    in->steps += count, in->step_count -= count;
    if (back) ups = ~ups;
    const uint32_t *indices = out->indices + start;
    uint8_t *before = out->before + 2 * start, *values = out->values + 2 * start;
    for (int half = 0; half < 2; half++) {
        __m512i from = FN(gather_words)(old, indices + 32 * half);
        __m256i far = half ? _mm512_extracti64x4_epi64(steps, 1) : _mm512_castsi512_si256(steps);
        _mm512_storeu_si512(before + 64 * half, from);
        _mm512_storeu_si512(values + 64 * half, FN(move_words)(from, far, (__mmask32)(ups >> (32 * half))));
    }
    FN(account_words)(indices, before, values, old, later, first, &out->sums);
    return 1;
}
#endif

static ALWAYS_INLINE const char *FN(decode_fast_of)(const uint8_t *old, size_t n, int size, int back, fast_in_t *in, size_t count, uint64_t first, changes_t *out) {
    const char *why = FN(find_places)(in, FAR_AHEAD, count, n, out->indices);
    for (size_t j = 0; !why && j < in->found && j < FAR_AHEAD; j++) PREFETCH_NEAR(old + out->indices[j] * (size_t)size);
    for (size_t start = 0; start < count; start += PART) {
        size_t part = count - start < PART ? count - start : PART, ahead = start + FAR_AHEAD;
        if (!why) why = FN(find_places)(in, ahead + PART, count, n, out->indices);
        if (why) return why;
#if LEVEL == 2
        const uint32_t *later = ahead + PART <= count ? out->indices + ahead : NULL;
        /* The last element is read alone: four bytes of it may not be there. */
        if (size == 2 && start + PART < count && n <= INT32_MAX && FN(decode_words)(old, back, in, start, later, first, out)) continue;
#endif
        for (size_t j = ahead; j < ahead + PART && j < count; j++) PREFETCH_NEAR(old + out->indices[j] * (size_t)size);
        why = FN(decode_part)(old, size, back, in, start, part, first, out);
    }
    if (why) return why;
    if (in->gap_nbytes) return "has another number of gaps than of changes";
    if (in->step_count) return "has another number of steps than it says";
    return in->escape_count ? "has another number of escapes than it says" : NULL;
}

static const char *FN(decode_fast)(const uint8_t *old, size_t n, int size, int back, fast_in_t *in, size_t count, uint64_t first, changes_t *out) {
    BY_SIZE(size, return FN(decode_fast_of)(old, n, S, back, in, count, first, out));
}
