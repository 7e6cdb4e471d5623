/* The tap: the callback llama.cpp calls for every node of its computation graph, where hidden states enter and leave.
 *
 * It is native because llama.cpp calls it about 31 times a layer and step: a Python callback takes the interpreter lock
 * each time. The rule this file keeps: it never allocates, never blocks and never fails loudly. What does not fit is
 * flagged in `error` and ends the graph; the caller looks at the flag afterwards. It links against nothing of ggml: the
 * functions it needs are handed over in `struct tap`, whose layout `tap.py` repeats field by field. `tap.py` also holds
 * the same logic in Python, and the tests run both.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NAME_BYTES 64 /* GGML_MAX_NAME */
#define GGML_TYPE_F32 0

enum { TAP_OK = 0, TAP_NOT_F32 = 1, TAP_WRONG_SHAPE = 2, TAP_TOO_MANY_ROWS = 3, TAP_NOT_FINITE = 4 };

struct tap {
    const char *(*get_name)(const void *tensor);
    size_t (*nbytes)(const void *tensor);
    int64_t (*nelements)(const void *tensor);
    int64_t (*nrows)(const void *tensor);
    void (*tensor_get)(const void *tensor, void *data, size_t offset, size_t size);
    void (*tensor_set)(void *tensor, const void *data, size_t offset, size_t size);
    char inject_name[NAME_BYTES];  /* empty: nothing is injected */
    char capture_name[NAME_BYTES]; /* empty: nothing is captured and the graph runs to its end */
    const float *inject;           /* [n_rows, n_embd] */
    float *capture;                /* [n_rows, n_embd] */
    int64_t n_rows;
    int64_t n_embd;
    int64_t injected; /* rows done so far: a batch may run as several graphs, one after the other */
    int64_t captured;
    int32_t error;
    volatile int32_t cancelled;
};

/* Whether every number's magnitude is at most `bound`: NaN compares false. No early exit, so that it vectorises. */
static bool all_within(const float *numbers, size_t n, float bound) {
    int outside = 0;
    for (size_t i = 0; i < n; i++) {
        outside |= !(fabsf(numbers[i]) <= bound);
    }
    return !outside;
}

/* Rows of the tensor, or -1 with the error set. `type` is the first field of the public struct ggml_tensor. */
static int64_t rows_of(struct tap *tap, const void *tensor, int64_t done) {
    const int64_t n_elements = tap->nelements(tensor);
    const int64_t n_rows = tap->nrows(tensor);
    if (*(const int32_t *)tensor != GGML_TYPE_F32 || tap->nbytes(tensor) != (size_t)n_elements * sizeof(float)) {
        tap->error = TAP_NOT_F32;
    } else if (n_elements != n_rows * tap->n_embd) {
        tap->error = TAP_WRONG_SHAPE;
    } else if (n_rows > tap->n_rows - done) {
        tap->error = TAP_TOO_MANY_ROWS;
    } else {
        return n_rows;
    }
    return -1;
}

/* ggml_backend_sched_eval_callback. `ask`: is this node wanted? Otherwise it is computed: false ends the graph. */
static bool on_node(void *tensor, bool ask, void *user_data) {
    struct tap *tap = user_data;
    const char *name = tap->get_name(tensor);
    const bool injects = tap->inject_name[0] != '\0' && strcmp(name, tap->inject_name) == 0;
    const bool captures = !injects && tap->capture_name[0] != '\0' && strcmp(name, tap->capture_name) == 0;
    const size_t row_bytes = (size_t)tap->n_embd * sizeof(float);
    int64_t n_rows;
    float *rows;

    if (ask || tap->error != TAP_OK) {
        return ask && (injects || captures || tap->error != TAP_OK);
    }
    if (injects) {
        n_rows = rows_of(tap, tensor, tap->injected);
        if (n_rows < 0) {
            return false;
        }
        tap->tensor_set(tensor, tap->inject + tap->injected * tap->n_embd, 0, (size_t)n_rows * row_bytes);
        tap->injected += n_rows;
        return true;
    }
    if (captures) {
        n_rows = rows_of(tap, tensor, tap->captured);
        if (n_rows < 0) {
            return false;
        }
        rows = tap->capture + tap->captured * tap->n_embd;
        tap->tensor_get(tensor, rows, 0, (size_t)n_rows * row_bytes);
        tap->captured += n_rows;
        if (!all_within(rows, (size_t)(n_rows * tap->n_embd), FLT_MAX)) {
            tap->error = TAP_NOT_FINITE;
        }
        return false;
    }
    return true;
}

/* ggml_abort_callback: true stops a running llama_decode at the next node. */
static bool is_cancelled(void *user_data) {
    return ((const struct tap *)user_data)->cancelled != 0;
}

/* is_within(rows, bound): whether all float32 numbers of a C-contiguous buffer have a magnitude of at most `bound`. */
static PyObject *is_within(PyObject *module, PyObject *args) {
    PyObject *rows;
    double bound;
    Py_buffer view;
    bool within;
    (void)module;
    if (!PyArg_ParseTuple(args, "Od", &rows, &bound) || PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    within = all_within(view.buf, (size_t)view.len / sizeof(float), (float)bound);
    PyBuffer_Release(&view);
    return PyBool_FromLong(within);
}

static PyMethodDef methods[] = {{"is_within", is_within, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static int add_constants(PyObject *module) {
    PyObject *on_node_address = PyLong_FromVoidPtr((void *)on_node);
    PyObject *is_cancelled_address = PyLong_FromVoidPtr((void *)is_cancelled);
    int failed = on_node_address == NULL || is_cancelled_address == NULL ||
                 PyModule_AddObjectRef(module, "ON_NODE", on_node_address) < 0 ||
                 PyModule_AddObjectRef(module, "IS_CANCELLED", is_cancelled_address) < 0 ||
                 PyModule_AddIntConstant(module, "TAP_BYTES", sizeof(struct tap)) < 0;
    Py_XDECREF(on_node_address);
    Py_XDECREF(is_cancelled_address);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_constants}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_tap", "The native tap: addresses of its callbacks, size of its struct.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tap(void) {
    return PyModuleDef_Init(&definition);
}
