/* One pass over the arrays of a trajectory; rollouts.py has the same in numpy. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Bits of single precision: infinity, and 1e-4, the slack of a log-softmax above 0. */
#define INFINITE 0x7f800000u
#define SLACK 0x38d1b717u

static int sound(const char *tokens, const uint8_t *mask, const char *logprobs, size_t n, size_t shared, size_t sampled) {
    uint32_t bad = 0;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t token, bits;
        memcpy(&token, tokens + 4 * i, 4);
        memcpy(&bits, logprobs + 4 * i, 4);
        uint32_t size = bits & 0x7fffffffu;
        uint32_t limit = bits >> 31 ? INFINITE - 1 : SLACK;
        bad |= token >> 31;
        bad |= size > limit;
        bad |= (uint32_t)(size != 0) & (uint32_t)(mask[i] == 0);
        count += mask[i];
    }
    for (size_t i = 0; i < shared; i++) bad |= mask[i];
    return !bad && count == sampled;
}

static PyObject *is_sound(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer tokens, mask, logprobs;
    Py_ssize_t shared, sampled;
    if (!PyArg_ParseTuple(args, "y*y*y*nn", &tokens, &mask, &logprobs, &shared, &sampled)) return NULL;
    Py_ssize_t n = mask.len;
    int ok = n > 0 && tokens.len == 4 * n && logprobs.len == 4 * n && shared >= 0 && shared <= n && sampled >= 0;
    ok = ok && sound(tokens.buf, mask.buf, logprobs.buf, (size_t)n, (size_t)shared, (size_t)sampled);
    PyBuffer_Release(&tokens), PyBuffer_Release(&mask), PyBuffer_Release(&logprobs);
    return PyBool_FromLong(ok);
}

static PyMethodDef methods[] = {
    {"is_sound", is_sound, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_arrays", "Checks of arrays; see rollouts.py.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__arrays(void) { return PyModule_Create(&module); }
