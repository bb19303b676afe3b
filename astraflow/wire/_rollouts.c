/* Reads a serialized Rollout of the usual kind, and measures a StreamRolloutsRequest and finds its
items; rollout.py has the same in Python.

What is unusual, malformed or unknown is left to those: scan() and split() return None for it. Fields
have the numbers of rollout/v1/rollout.proto, trajectory.proto and dataflow/v1/raas_service.proto. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { VARINT = 0, FIXED64 = 1, DELIMITED = 2 };
/* Of common/v1/tensor.proto. */
enum { BOOL = 1, I32 = 6, F32 = 12 };

typedef struct {
    const uint8_t *at, *end;
} Span;

typedef struct {
    uint32_t number, type;
    uint64_t value; /* of a varint, or the bits of a double */
    Span data;      /* of what is delimited */
} Field;

static int read_varint(Span *s, uint64_t *out) {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && s->at < s->end; shift += 7) {
        uint8_t byte = *s->at++;
        if (shift == 63 && byte > 1) return 0;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *out = value;
            return 1;
        }
    }
    return 0;
}

/* A tag or a length, which protobuf's classes refuse in more than five bytes. */
static int read_short(Span *s, uint64_t *out) {
    const uint8_t *from = s->at;
    return read_varint(s, out) && s->at - from <= 5 && *out <= UINT32_MAX;
}

/* 1: a field was read; 0: the end; -1: malformed, or of another type. */
static int next_field(Span *s, Field *f) {
    uint64_t tag;
    if (s->at == s->end) return 0;
    if (!read_short(s, &tag)) return -1;
    f->number = (uint32_t)tag >> 3;
    f->type = (uint32_t)tag & 7;
    if (f->type == VARINT) return read_varint(s, &f->value) ? 1 : -1;
    if (f->type == FIXED64) {
        if (s->end - s->at < 8) return -1;
        f->value = 0;
        for (int i = 7; i >= 0; i--) f->value = f->value << 8 | s->at[i];
        s->at += 8;
        return 1;
    }
    uint64_t length;
    if (f->type != DELIMITED || !read_short(s, &length) || length > (uint64_t)(s->end - s->at)) return -1;
    f->data.at = s->at;
    s->at += length;
    f->data.end = s->at;
    return 1;
}

static double as_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

static PyObject *as_text(Span s) { return PyUnicode_DecodeUTF8((const char *)s.at, s.end - s.at, NULL); }

/* A field that may come once; its place in a tuple is taken over. 0: it came before, or no object. */
static int fill(PyObject **place, PyObject *value) {
    if (!value) return 0;
    if (*place) {
        Py_DECREF(value);
        return 0;
    }
    *place = value;
    return 1;
}

static int is_int32(uint64_t value) { return (int64_t)value >= INT32_MIN && (int64_t)value <= INT32_MAX; }

/* Where the elements of a vector lie; 0: it is no vector of this dtype. */
static int read_vector(Span s, uint64_t dtype, size_t itemsize, Span *elements) {
    Field f = {0};
    int got, has_data = 0, has_dtype = 0, has_shape = 0;
    uint64_t count = 0;
    while ((got = next_field(&s, &f)) > 0) {
        if (f.number == 1 && f.type == VARINT && f.value == dtype && !has_dtype) has_dtype = 1;
        else if (f.number == 2 && f.type == DELIMITED && !has_shape) {
            has_shape = read_varint(&f.data, &count) && f.data.at == f.data.end;
            if (!has_shape) return 0;
        } else if (f.number == 3 && f.type == DELIMITED && !has_data) has_data = 1, *elements = f.data;
        else return 0;
    }
    if (got < 0 || !has_data || !has_dtype || !has_shape) return 0;
    size_t nbytes = (size_t)(elements->end - elements->at);
    return count && count <= SIZE_MAX / itemsize && nbytes == count * itemsize;
}

static PyObject *read_span(Span s) {
    Field f = {0};
    int got = 0, ok = 1;
    uint64_t version = 0, length = 0, kv = 0;
    PyObject *policy = NULL;
    while (ok && (got = next_field(&s, &f)) > 0) {
        if (f.number == 1 && f.type == VARINT) version = f.value;
        else if (f.number == 2 && f.type == VARINT && is_int32(f.value)) length = f.value;
        else if (f.number == 3 && f.type == VARINT && is_int32(f.value)) kv = f.value;
        else if (f.number == 4 && f.type == DELIMITED) ok = fill(&policy, as_text(f.data));
        else ok = 0;
    }
    if (!ok || got < 0 || (int64_t)version < 0) {
        Py_XDECREF(policy);
        return NULL;
    }
    if (!policy) policy = Py_NewRef(Py_None);
    return Py_BuildValue("LLLN", (long long)version, (long long)length, (long long)kv, policy);
}

/* What a Payload without columns says. */
static PyObject *read_payload(Span s) {
    Field f = {0};
    int got = 0, ok = 1;
    uint64_t nbytes = 0, count = 0;
    PyObject *name = NULL, *digest = NULL;
    while (ok && (got = next_field(&s, &f)) > 0) {
        if (f.number == 1 && f.type == DELIMITED) ok = fill(&name, as_text(f.data));
        else if (f.number == 2 && f.type == DELIMITED) ok = fill(&digest, PyBytes_FromStringAndSize((const char *)f.data.at, f.data.end - f.data.at));
        else if (f.number == 3 && f.type == VARINT) nbytes = f.value;
        else if (f.number == 4 && f.type == VARINT) count = f.value;
        else ok = 0;
    }
    if (!ok || got < 0 || !name || !digest) {
        Py_XDECREF(name);
        Py_XDECREF(digest);
        return NULL;
    }
    return Py_BuildValue("NNLL", name, digest, (long long)nbytes, (long long)count);
}

enum { T_ID, T_POLICY, T_AGENT, T_COUNT, T_TOKENS, T_MASK, T_LOGPROBS, T_SPANS, T_SAMPLING, T_FINISH, T_PARENT, T_BRANCH, T_SEGMENT, T_REWARD, T_ENGINE, T_AT, T_END, T_SIZE };

static PyObject *read_trajectory(const uint8_t *start, Span s) {
    PyObject *parts[T_SIZE] = {NULL}, *result = NULL, *spans = PyList_New(0);
    const uint8_t *at = s.at;
    Span tokens = {NULL, NULL}, mask = {NULL, NULL}, logprobs = {NULL, NULL};
    Field f = {0};
    int got, ok = spans != NULL;
    while (ok && (got = next_field(&s, &f)) > 0) {
        PyObject **place = NULL;
        switch (f.number << 3 | f.type) {
        case 1 << 3 | DELIMITED: ok = fill(&parts[T_ID], as_text(f.data)); break;
        case 2 << 3 | DELIMITED: ok = fill(&parts[T_POLICY], as_text(f.data)); break;
        case 3 << 3 | DELIMITED: ok = fill(&parts[T_AGENT], as_text(f.data)); break;
        case 4 << 3 | DELIMITED: ok = !tokens.at && read_vector(f.data, I32, 4, &tokens); break;
        case 5 << 3 | DELIMITED: ok = !mask.at && read_vector(f.data, BOOL, 1, &mask); break;
        case 6 << 3 | DELIMITED: ok = !logprobs.at && read_vector(f.data, F32, 4, &logprobs); break;
        case 7 << 3 | DELIMITED: {
            PyObject *span = read_span(f.data);
            ok = span && PyList_Append(spans, span) == 0;
            Py_XDECREF(span);
            break;
        }
        case 8 << 3 | DELIMITED: ok = fill(&parts[T_SAMPLING], PyBytes_FromStringAndSize((const char *)f.data.at, f.data.end - f.data.at)); break;
        case 9 << 3 | VARINT: place = &parts[T_FINISH]; break;
        case 10 << 3 | DELIMITED: ok = fill(&parts[T_PARENT], as_text(f.data)); break;
        case 11 << 3 | VARINT: place = &parts[T_BRANCH]; break;
        case 12 << 3 | VARINT: place = &parts[T_SEGMENT]; break;
        case 13 << 3 | FIXED64: ok = fill(&parts[T_REWARD], PyFloat_FromDouble(as_double(f.value))); break;
        case 15 << 3 | DELIMITED: ok = fill(&parts[T_ENGINE], as_text(f.data)); break;
        case 16 << 3 | DELIMITED: ok = fill(&parts[T_COUNT], read_payload(f.data)); break;
        default: ok = 0; /* columns, and what a later release adds */
        }
        if (place) ok = is_int32(f.value) && fill(place, PyLong_FromLongLong((int64_t)f.value));
    }
    ok = ok && got == 0 && parts[T_ID] && parts[T_POLICY] && fill(&parts[T_SPANS], Py_NewRef(spans));
    if (parts[T_COUNT]) {
        /* In their place. */
        ok = ok && !tokens.at && !mask.at && !logprobs.at;
    } else if (ok && (ok = tokens.at && mask.at && logprobs.at)) {
        Py_ssize_t count = mask.end - mask.at;
        ok = tokens.end - tokens.at == 4 * count && logprobs.end - logprobs.at == 4 * count;
        uint8_t seen = 0;
        for (Py_ssize_t i = 0; i < count; i++) seen |= mask.at[i];
        ok = ok && seen <= 1;
        ok = ok && fill(&parts[T_COUNT], PyLong_FromSsize_t(count)) && fill(&parts[T_TOKENS], PyLong_FromSsize_t(tokens.at - start)) && fill(&parts[T_MASK], PyLong_FromSsize_t(mask.at - start)) && fill(&parts[T_LOGPROBS], PyLong_FromSsize_t(logprobs.at - start));
    }
    ok = ok && fill(&parts[T_AT], PyLong_FromSsize_t(at - start)) && fill(&parts[T_END], PyLong_FromSsize_t(s.end - start));
    if (ok && (result = PyTuple_New(T_SIZE)))
        for (int i = 0; i < T_SIZE; i++) {
            PyTuple_SetItem(result, i, parts[i] ? parts[i] : Py_NewRef(Py_None));
            parts[i] = NULL;
        }
    for (int i = 0; i < T_SIZE; i++) Py_XDECREF(parts[i]);
    Py_XDECREF(spans);
    return result;
}

/* An entry of map<string, double>. */
static int read_number(Span s, PyObject **map) {
    Field f = {0};
    int got = 0, ok = 1;
    PyObject *key = NULL;
    double number = 0.0;
    while (ok && (got = next_field(&s, &f)) > 0) {
        if (f.number == 1 && f.type == DELIMITED) ok = fill(&key, as_text(f.data));
        else if (f.number == 2 && f.type == FIXED64) number = as_double(f.value);
        else ok = 0;
    }
    PyObject *value = ok && got == 0 && key ? PyFloat_FromDouble(number) : NULL;
    if (value && !*map) *map = PyDict_New();
    ok = value && *map && PyDict_SetItem(*map, key, value) == 0;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return ok;
}

/* An entry of map<string, int64>, which nobody asks for: whether it is sound. */
static int is_count(Span s) {
    Field f = {0};
    int got, ok = 1;
    while (ok && (got = next_field(&s, &f)) > 0) {
        if (f.number == 1 && f.type == DELIMITED) {
            PyObject *key = as_text(f.data);
            ok = key != NULL;
            Py_XDECREF(key);
        } else ok = f.number == 2 && f.type == VARINT;
    }
    return ok && got == 0;
}

static PyObject *read_time(Span s) {
    Field f = {0};
    int got;
    uint64_t seconds = 0, nanos = 0;
    while ((got = next_field(&s, &f)) > 0) {
        if (f.number == 1 && f.type == VARINT) seconds = f.value;
        else if (f.number == 2 && f.type == VARINT && is_int32(f.value)) nanos = f.value;
        else return NULL;
    }
    return got < 0 ? NULL : Py_BuildValue("LL", (long long)seconds, (long long)nanos);
}

enum { R_ID, R_TASK, R_GROUP, R_INDEX, R_OUTCOME, R_REWARD, R_PARTS, R_DIGEST, R_TRAJECTORIES, R_METRICS, R_START, R_FINISH, R_TRACE, R_SIZE };

static PyObject *scan(PyObject *self, PyObject *data) {
    (void)self;
    char *start;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(data, &start, &length) < 0) return NULL;
    Span s = {(const uint8_t *)start, (const uint8_t *)start + length};
    PyObject *parts[R_SIZE] = {NULL}, *result = NULL;
    Field f = {0};
    int got = 0, ok = (parts[R_TRAJECTORIES] = PyList_New(0)) != NULL;
    while (ok && (got = next_field(&s, &f)) > 0) {
        PyObject **place = NULL;
        switch (f.number << 3 | f.type) {
        case 1 << 3 | DELIMITED: ok = fill(&parts[R_ID], as_text(f.data)); break;
        case 2 << 3 | DELIMITED: ok = fill(&parts[R_TASK], as_text(f.data)); break;
        case 3 << 3 | DELIMITED: ok = fill(&parts[R_GROUP], as_text(f.data)); break;
        case 4 << 3 | VARINT: place = &parts[R_INDEX]; break;
        case 5 << 3 | VARINT: place = &parts[R_OUTCOME]; break;
        case 6 << 3 | FIXED64: ok = fill(&parts[R_REWARD], PyFloat_FromDouble(as_double(f.value))); break;
        case 7 << 3 | DELIMITED: ok = read_number(f.data, &parts[R_PARTS]); break;
        case 9 << 3 | DELIMITED: ok = fill(&parts[R_DIGEST], PyBytes_FromStringAndSize((const char *)f.data.at, f.data.end - f.data.at)); break;
        case 10 << 3 | DELIMITED: {
            PyObject *trajectory = read_trajectory((const uint8_t *)start, f.data);
            ok = trajectory && PyList_Append(parts[R_TRAJECTORIES], trajectory) == 0;
            Py_XDECREF(trajectory);
            break;
        }
        case 11 << 3 | DELIMITED: ok = is_count(f.data); break; /* policy_versions: counted from the spans */
        case 12 << 3 | DELIMITED: ok = read_number(f.data, &parts[R_METRICS]); break;
        case 13 << 3 | DELIMITED: ok = fill(&parts[R_START], read_time(f.data)); break;
        case 14 << 3 | DELIMITED: ok = fill(&parts[R_FINISH], read_time(f.data)); break;
        case 15 << 3 | DELIMITED: ok = fill(&parts[R_TRACE], as_text(f.data)); break;
        default: ok = 0; /* failures, and what a later release adds */
        }
        if (place) ok = is_int32(f.value) && fill(place, PyLong_FromLongLong((int64_t)f.value));
    }
    ok = ok && got == 0 && parts[R_ID] && parts[R_TASK] && parts[R_GROUP];
    if (ok && (result = PyTuple_New(R_SIZE)))
        for (int i = 0; i < R_SIZE; i++) {
            PyTuple_SetItem(result, i, parts[i] ? parts[i] : Py_NewRef(Py_None));
            parts[i] = NULL;
        }
    for (int i = 0; i < R_SIZE; i++) Py_XDECREF(parts[i]);
    if (result) return result;
    /* Memory, or text that is none: protobuf's classes say it better. */
    PyErr_Clear();
    return Py_NewRef(Py_None);
}

/* [(whether it is a Rollout, its start, its end)] for each item. */
static PyObject *split(PyObject *self, PyObject *data) {
    (void)self;
    char *start;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(data, &start, &length) < 0) return NULL;
    Span s = {(const uint8_t *)start, (const uint8_t *)start + length};
    PyObject *items = PyList_New(0);
    Field item = {0}, kind = {0};
    int got = 0, ok = items != NULL;
    while (ok && (got = next_field(&s, &item)) > 0) {
        ok = item.number == 1 && item.type == DELIMITED && next_field(&item.data, &kind) > 0;
        ok = ok && (kind.number == 1 || kind.number == 2) && kind.type == DELIMITED && item.data.at == item.data.end;
        if (!ok) break;
        const char *at = (const char *)kind.data.at, *end = (const char *)kind.data.end;
        PyObject *found = Py_BuildValue("Nnn", PyBool_FromLong(kind.number == 1), (Py_ssize_t)(at - start), (Py_ssize_t)(end - start));
        ok = found && PyList_Append(items, found) == 0;
        Py_XDECREF(found);
    }
    if (ok && got == 0) return items;
    Py_XDECREF(items);
    /* Memory; protobuf's classes say it better. */
    PyErr_Clear();
    return Py_NewRef(Py_None);
}

enum { REQUEST, ITEM, ROLLOUT, TRAJECTORY, ENTRY, COLUMN, TENSOR, OTHER };

/* What a field holds, as far as arrays are in it. */
static int kind_of(int parent, uint32_t number) {
    switch (parent) {
    case REQUEST: return number == 1 ? ITEM : OTHER;
    case ITEM: return number == 1 ? ROLLOUT : OTHER;
    case ROLLOUT: return number == 10 ? TRAJECTORY : OTHER;
    case TRAJECTORY: return number >= 4 && number <= 6 ? TENSOR : number == 14 ? ENTRY : OTHER;
    case ENTRY: return number == 2 ? COLUMN : OTHER;
    case COLUMN: return number == 2 ? TENSOR : OTHER;
    default: return OTHER;
    }
}

/* What a message leaves of so many bytes, elements of arrays not counted; below 0: it has more. */
static int64_t spare(Span s, int kind, int64_t left) {
    Field f = {0};
    const uint8_t *from = s.at;
    while (left >= 0 && next_field(&s, &f) > 0) {
        left -= s.at - from;
        from = s.at;
        if (f.type != DELIMITED) continue;
        int64_t nbytes = f.data.end - f.data.at;
        int inner = kind_of(kind, f.number);
        if (kind == TENSOR && f.number == 3) left += nbytes;
        else if (inner != OTHER) left = spare(f.data, inner, left + nbytes);
    }
    /* What is malformed is no array. */
    return left < 0 ? left : left - (s.end - from);
}

/* Whether a StreamRolloutsRequest has no more than so many bytes beside the elements of arrays. */
static PyObject *fits(PyObject *self, PyObject *args) {
    (void)self;
    const char *start;
    Py_ssize_t length, most;
    if (!PyArg_ParseTuple(args, "y#n", &start, &length, &most)) return NULL;
    Span s = {(const uint8_t *)start, (const uint8_t *)start + length};
    return PyBool_FromLong(spare(s, REQUEST, most) >= 0);
}

static PyMethodDef methods[] = {
    {"fits", fits, METH_VARARGS, NULL},
    {"scan", scan, METH_O, NULL},
    {"split", split, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rollouts", "Reads rollouts; see rollout.py.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rollouts(void) { return PyModule_Create(&module); }
