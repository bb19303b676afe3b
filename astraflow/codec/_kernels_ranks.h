/* Changes found by their rank within a class, compiled once per level; included by _kernels_body.h. */

/* The changes of a segment, class by class: first their ranks there, then in which block and which of the class in that. */
typedef struct { uint32_t ranks[SEGMENT + 16], blocks[SEGMENT + 16], numbers[SEGMENT + 16]; uint8_t classes[SEGMENT + 16]; } FN(due_t);

/* The changes of a class with ranks below `end`, behind `count` others; returns how many there are now. */
static ALWAYS_INLINE size_t FN(take_due)(class_state_t *state, size_t c, uint64_t before, uint64_t end, size_t count, FN(due_t) *due) {
#if LEVEL == 2
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    size_t more;
    do {
        __m512i ranks = _mm512_loadu_si512(state->ranks + state->at[c]);
        more = first_bit(~(uint64_t)_mm512_cmplt_epu32_mask(ranks, _mm512_set1_epi32((int)(uint32_t)end)));
        _mm512_storeu_si512(due->ranks + count, _mm512_sub_epi32(ranks, _mm512_set1_epi32((int)(uint32_t)before)));
        _mm512_storeu_si512(due->numbers + count, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(uint32_t)(state->at[c] - c))));
        _mm_storeu_si128((__m128i *)(due->classes + count), _mm_set1_epi8((char)c));
        state->at[c] += more, count += more;
    } while (more == 16);
#else
    for (; state->ranks[state->at[c]] < end; count++) {
        due->ranks[count] = (uint32_t)(state->ranks[state->at[c]] - before);
        due->numbers[count] = (uint32_t)(state->at[c]++ - c);
        due->classes[count] = (uint8_t)c;
    }
#endif
    return count;
}

/* Find the block of each change by halving. */
static ALWAYS_INLINE void FN(find_blocks)(const classes_t *sorted, size_t count, FN(due_t) *due) {
#if LEVEL == 2
    for (size_t k = 0; k < count; k += 16) {
        __m512i classes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(due->classes + k))), ranks = _mm512_loadu_si512(due->ranks + k);
        __m512i high = _mm512_and_si512(_mm512_srli_epi32(classes, 3), _mm512_set1_epi32(1)), below = _mm512_setzero_si512();
        __m512i at = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(classes, _mm512_set1_epi32(7)), 2), high);
        for (int step = SEGMENT / 128; step; step /= 2) {
            __m512i there = _mm512_add_epi32(at, _mm512_set1_epi32(step * 2 * CLASSES));
            __m512i seen = _mm512_and_si512(_mm512_i32gather_epi32(there, sorted->seen, 2), _mm512_set1_epi32(0xffff));
            __mmask16 is_behind = _mm512_cmple_epu32_mask(seen, ranks);
            at = _mm512_mask_mov_epi32(at, is_behind, there), below = _mm512_mask_mov_epi32(below, is_behind, seen);
        }
        _mm512_storeu_si512(due->blocks + k, _mm512_srli_epi32(at, 5));
        _mm512_storeu_si512(due->ranks + k, _mm512_sub_epi32(ranks, below));
    }
#else
    for (size_t k = 0; k < count; k++) {
        size_t block = 0, slot = SLOT(due->classes[k]);
        for (size_t step = SEGMENT / 128; step; step /= 2) block += step & (0 - (size_t)(sorted->seen[block + step][slot] <= due->ranks[k]));
        due->blocks[k] = (uint32_t)block;
        due->ranks[k] -= sorted->seen[block][slot];
    }
#endif
}

/* Sort a segment of [from, to) by class. */
static ALWAYS_INLINE void FN(sort_segment)(const uint8_t *old, size_t from, size_t to, int size, rule_t rule, FN(by_class_t) *seen, classes_t *sorted) {
    uint8_t tail[64 * 8] = {0};
    size_t block = 0, i = from;
    memset(seen, 0, sizeof *seen);
    for (; i + 64 <= to; i += 64, block++) {
        fetch_ahead(old + i * (size_t)size, size);
        FN(sort_block)(old + i * (size_t)size, size, rule, ~(uint64_t)0, block, seen, sorted);
    }
    if (i < to) {
        memcpy(tail, old + i * (size_t)size, (to - i) * (size_t)size);
        FN(sort_block)(tail, size, rule, ((uint64_t)1 << (to - i)) - 1, block++, seen, sorted);
    }
    /* Blocks that are not there hold nothing. */
    for (; block < SEGMENT / 64; block++) FN(spill)(seen, sorted->seen[block]);
}

/* Where the changes of a sorted segment are, in order; their distances by place. Returns how many there are.
 * Memory would wait meanwhile, so lines of what comes `next` are fetched by the way. */
static ALWAYS_INLINE size_t FN(find_due)(const classes_t *sorted, const uint16_t *seen_of, class_state_t *state, const uint8_t *next, int size, uint16_t *found, uint8_t *distance_of) {
    FN(due_t) due;
    uint64_t hits[SEGMENT / 64] = {0}, touched[(SEGMENT + 4095) / 4096] = {0};
    size_t count = 0, listed = 0;
    for (size_t c = 0; c < CLASSES; c++) count = FN(take_due)(state, c, sorted->before[c], sorted->before[c] + seen_of[SLOT(c)], count, &due);
    FN(find_blocks)(sorted, count, &due);
    for (size_t k = 0; k < count; k++) {
        for (size_t line = 3 * k; line < 3 * k + 3; line++) PREFETCH_NEAR(next + 64 * line);
        size_t block = due.blocks[k], t = FN(select_bit)(FN(members)(sorted->class_of + 64 * block, due.classes[k]), due.ranks[k]);
        hits[block] |= (uint64_t)1 << t;
        touched[block / 64] |= (uint64_t)1 << (block & 63);
        store(distance_of, 64 * block + t, load(state->distances, due.numbers[k], size), size);
    }
    for (size_t part = 0; part < (SEGMENT + 4095) / 4096; part++)
        for (uint64_t left = touched[part]; left; left &= left - 1) {
            size_t block = 64 * part + first_bit(left);
            listed += FN(list)(hits[block], 64 * block, found + listed);
        }
    return listed;
}

/* Places in a segment become places in the range; distances lie where the values will be. */
static ALWAYS_INLINE void FN(put_found)(const uint16_t *found, size_t count, size_t from, const uint8_t *distance_of, int size, size_t at, changes_t *out) {
#if LEVEL == 2
    for (size_t j = 0; size == 2 && j < count; j += 16) {
        __mmask16 on = (__mmask16)(count - j < 16 ? (1u << (count - j)) - 1 : 0xffff);
        __m512i places = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(found + j)));
        __m512i distances = _mm512_mask_i32gather_epi32(places, on, places, distance_of, 2);
        _mm512_mask_storeu_epi32(out->indices + at + j, on, _mm512_add_epi32(places, _mm512_set1_epi32((int)(uint32_t)from)));
        _mm512_mask_cvtepi32_storeu_epi16(out->values + 2 * (at + j), on, distances);
    }
    if (size == 2) return;
#endif
    for (size_t j = 0; j < count; j++) out->indices[at + j] = (uint32_t)(from + found[j]);
    for (size_t j = 0; j < count; j++) store(out->values, at + j, load(distance_of, found[j], size), size);
}

/* Distances become values; up to 64 of them. */
static ALWAYS_INLINE void FN(move_part)(const uint8_t *old, uint64_t first, int size, size_t at, size_t count, changes_t *out) {
    part_t part;
    for (size_t j = 0; j < count; j++) part.positions[j] = first + out->indices[at + j];
    for (size_t j = 0; j < count; j++) part.before[j] = load(old, out->indices[at + j], size);
    for (size_t j = 0; j < count; j++) part.values[j] = unfold(part.before[j], load(out->values, at + j, size) + 1, size);
    FN(finish)(&part, count, size, at, out);
}

#if LEVEL == 2
/* As move_part, of 64 changes of two bytes. */
static ALWAYS_INLINE void FN(move_part_of_words)(const uint8_t *old, uint64_t first, size_t at, changes_t *out) {
    const __m512i one = _mm512_set1_epi16(1), none = _mm512_setzero_si512();
    uint8_t *before = out->before + 2 * at, *values = out->values + 2 * at;
    for (int half = 0; half < 2; half++) {
        __m512i from = FN(gather_words)(old, out->indices + at + 32 * half);
        __m512i folded = _mm512_add_epi16(_mm512_loadu_si512(values + 64 * half), one);
        __m512i units = _mm512_xor_si512(_mm512_srli_epi16(folded, 1), _mm512_sub_epi16(none, _mm512_and_si512(folded, one)));
        _mm512_storeu_si512(before + 64 * half, from);
        _mm512_storeu_si512(values + 64 * half, FN(unordered_words)(_mm512_add_epi16(FN(ordered_words)(from), units)));
    }
    FN(account_words)(out->indices + at, before, values, old, NULL, first, &out->sums);
}
#endif

static ALWAYS_INLINE void FN(move_parts_of)(const uint8_t *old, uint64_t first, int size, size_t at, size_t end, size_t n, changes_t *out) {
    (void)n;
    for (; at < end; at += PART) {
#if LEVEL == 2
        /* The last element is read alone: four bytes of it may not be there. */
        if (size == 2 && at + PART <= end && out->indices[at + PART - 1] + 1 < n) {
            FN(move_part_of_words)(old, first, at, out);
            continue;
        }
#endif
        FN(move_part)(old, first, size, at, end - at < PART ? end - at : PART, out);
    }
}

/* The changes in [at, end), of a range of `n` elements. */
static void FN(move_parts)(const uint8_t *old, uint64_t first, int size, size_t at, size_t end, size_t n, changes_t *out) {
    BY_SIZE(size, FN(move_parts_of)(old, first, S, at, end, n, out));
}

static ALWAYS_INLINE const char *FN(apply_classes_of)(const uint8_t *old, size_t n, uint64_t first, int size, const rule_t *rule, class_state_t *state, size_t count, changes_t *out) {
    FN(by_class_t) seen;
    classes_t sorted;
    uint8_t distance_of[SEGMENT * 8];
    uint16_t found[SEGMENT + 64], seen_of[2 * CLASSES];
    size_t done = 0, moved = 0;
    if (n > INT32_MAX) return "covers more elements than a chunk has";
    memset(sorted.before, 0, sizeof sorted.before);
    for (size_t from = 0; from < n && done < count; from += SEGMENT) {
        FN(sort_segment)(old, from, n - from < SEGMENT ? n : from + SEGMENT, size, *rule, &seen, &sorted);
        FN(spill)(&seen, seen_of);
        size_t more = FN(find_due)(&sorted, seen_of, state, old + (from + SEGMENT) * (size_t)size + FETCH_AHEAD, size, found, distance_of);
        FN(put_found)(found, more, from, distance_of, size, done, out);
        FN(end_segment)(&seen, &sorted);
        done += more;
        size_t end = done / PART * PART;
        FN(move_parts)(old, first, size, moved, end, n, out);
        moved = end;
    }
    FN(move_parts)(old, first, size, moved, done, n, out);
    return done == count ? NULL : "changes an element beyond its range";
}

static const char *FN(apply_classes)(const uint8_t *old, size_t n, uint64_t first, int size, const rule_t *rule, class_state_t *state, size_t count, changes_t *out) {
    BY_SIZE(size, return FN(apply_classes_of)(old, n, first, S, rule, state, count, out));
}
