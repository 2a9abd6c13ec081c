"""Whether llama.cpp's code computes rightly on this processor: python -m qwen_chat.cpu_check LIBRARY EXTRA_BUFFERS

A process of its own, since code that does not suit the processor ends it by a signal. It makes a tiny model with
random weights of the types that chat models have, computes some tokens with llama.cpp, in a batch and one by one,
computes the same with numpy, and prints as JSON how far the two are apart. LIBRARY is a variant of the code, or ""
for the one that is built in; EXTRA_BUFFERS is 1 or 0 (cpu_code.CpuCode).
"""

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp
import numpy as np

from . import cpu_code
from .gguf import InitParams, ggml

WIDTH, HEADS, KV_HEADS, LAYERS, VOCABULARY = 256, 4, 2, 2, 256  # 256: a block of the k-quants
HEAD = WIDTH // HEADS
EPSILON, ROPE_BASE = 1e-5, 10_000.0
PROMPT, STEPS = 40, 3  # tokens of the batch, for the matrix kernels, and tokens one by one, for the vector kernels
TYPES = ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_0", "IQ4_NL", "Q5_K", "F16", "Q4_1")
SHAPES = {  # of the matrices of a layer: rows (outputs), columns (inputs)
    "attn_q": (WIDTH, WIDTH), "attn_k": (KV_HEADS * HEAD, WIDTH), "attn_v": (KV_HEADS * HEAD, WIDTH),
    "attn_output": (WIDTH, WIDTH), "ffn_gate": (WIDTH, WIDTH), "ffn_up": (WIDTH, WIDTH), "ffn_down": (WIDTH, WIDTH),
}

_pointer, _text = ctypes.c_void_p, ctypes.c_char_p
_to_float = ctypes.CFUNCTYPE(None, _pointer, _pointer, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    """ggml.h: struct ggml_type_traits."""

    _fields_ = [("name", _text), ("block", ctypes.c_int64), ("interleave", ctypes.c_int64), ("size", ctypes.c_size_t),
                ("quantized", ctypes.c_bool), ("to_float", _to_float), ("from_float", _pointer)]


class TinyModel:
    """A model with random weights: writes itself as a GGUF file, and computes its own logits in float32.

    `weights` are what the quantised tensors stand for, by name, so that quantising costs the comparison nothing.
    Quantising and writing is code of libggml-base, which is the same for all processors.
    """

    def __init__(self, seed: int = 1):
        self._random = np.random.default_rng(seed)
        self._context = ggml("ggml_init", _pointer, InitParams)(InitParams(16 << 20, None, False))
        self._file = ggml("gguf_init_empty", _pointer)()
        self.weights: dict[str, np.ndarray] = {}
        self._describe()
        kinds = 0
        for layer in range(LAYERS):
            for name, shape in SHAPES.items():
                self._add(f"blk.{layer}.{name}", TYPES[kinds % len(TYPES)], self._matrix(shape))
                kinds += 1
            for name in ("attn_norm", "ffn_norm"):
                self._add(f"blk.{layer}.{name}", "F32", self._random.uniform(0.5, 1.5, WIDTH))
        self._add("token_embd", "Q8_0", self._random.normal(size=(VOCABULARY, WIDTH)))
        self._add("output_norm", "F32", self._random.uniform(0.5, 1.5, WIDTH))
        self._add("output", "Q8_0", self._matrix((VOCABULARY, WIDTH)))

    def write(self, path: str) -> bool:
        """Writes the GGUF file; False where that failed."""
        return ggml("gguf_write_to_file", ctypes.c_bool, _pointer, _text, ctypes.c_bool)(self._file, path.encode(), False)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """The logits after each token, shape (len(tokens), VOCABULARY): a transformer of the kind "llama"."""
        x = self.weights["token_embd"][tokens]
        for layer in range(LAYERS):
            of = {name: self.weights[f"blk.{layer}.{name}"] for name in (*SHAPES, "attn_norm", "ffn_norm")}
            x = x + _attention(_norm(x, of["attn_norm"]), of)
            h = _norm(x, of["ffn_norm"])
            gate = h @ of["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ of["ffn_up"].T)) @ of["ffn_down"].T
        return _norm(x, self.weights["output_norm"]) @ self.weights["output"].T

    def _matrix(self, shape: tuple[int, int]) -> np.ndarray:
        return self._random.normal(size=shape, scale=shape[1] ** -0.5)

    def _describe(self) -> None:
        text = ggml("gguf_set_val_str", None, _pointer, _text, _text)
        whole = ggml("gguf_set_val_u32", None, _pointer, _text, ctypes.c_uint32)
        real = ggml("gguf_set_val_f32", None, _pointer, _text, ctypes.c_float)
        text(self._file, b"general.architecture", b"llama")
        text(self._file, b"tokenizer.ggml.model", b"no_vocab")
        for key, value in {"context_length": 256, "embedding_length": WIDTH, "feed_forward_length": WIDTH, "block_count": LAYERS,
                           "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": VOCABULARY}.items():
            whole(self._file, f"llama.{key}".encode(), value)
        real(self._file, b"llama.attention.layer_norm_rms_epsilon", EPSILON)
        real(self._file, b"llama.rope.freq_base", ROPE_BASE)

    def _add(self, name: str, kind: str, values: np.ndarray) -> None:
        """Quantises `values` into a tensor of the file, and keeps what that stands for."""
        values = np.ascontiguousarray(values, np.float32)
        number, (rows, columns) = getattr(llama_cpp, f"GGML_TYPE_{kind}"), (values.shape if values.ndim == 2 else (1, len(values)))
        new = ggml("ggml_new_tensor_2d" if values.ndim == 2 else "ggml_new_tensor_1d", _pointer, _pointer, ctypes.c_int,
                    *[ctypes.c_int64] * values.ndim)
        tensor = new(self._context, number, *reversed(values.shape))
        ggml("ggml_set_name", _pointer, _pointer, _text)(tensor, f"{name}.weight".encode())
        data = ggml("ggml_get_data", _pointer, _pointer)(tensor)
        if kind == "F32":
            ctypes.memmove(data, values.ctypes.data, values.nbytes)
        else:
            quantize = ggml("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, _pointer, _pointer, *[ctypes.c_int64] * 3, _pointer)
            quantize(number, values.ctypes.data, data, 0, rows, columns, None)
            traits = ggml("ggml_get_type_traits", ctypes.POINTER(_TypeTraits), ctypes.c_int)(number).contents
            traits.to_float(data, values.ctypes.data, values.size)
        self.weights[name] = values
        ggml("gguf_add_tensor", None, _pointer, _pointer)(self._file, tensor)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * weight


def _attention(x: np.ndarray, of: dict[str, np.ndarray]) -> np.ndarray:
    def heads(name: str) -> np.ndarray:  # (heads, tokens, HEAD)
        return (x @ of[name].T).reshape(len(x), -1, HEAD).transpose(1, 0, 2)

    q, k, v = _rotated(heads("attn_q")), _rotated(heads("attn_k")), heads("attn_v")
    k, v = (np.repeat(each, HEADS // KV_HEADS, axis=0) for each in (k, v))
    scores = q @ k.transpose(0, 2, 1) / HEAD**0.5 + np.triu(np.full((len(x), len(x)), -np.inf), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(len(x), WIDTH) @ of["attn_output"].T


def _rotated(x: np.ndarray) -> np.ndarray:
    """Rotary position embedding (RoFormer, arXiv 2104.09864): neighbouring values are a pair, positions count from 0."""
    angles = np.arange(x.shape[1])[:, None] * ROPE_BASE ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin, even, odd = np.cos(angles), np.sin(angles), x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def computed(path: str, tokens: list[int], extra_buffers: bool) -> np.ndarray:
    """The same logits by llama.cpp: PROMPT tokens in a batch, the rest one by one."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, extra_buffers
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise OSError("llama.cpp cannot load the tiny model")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.flash_attn_type = 256, 1
    params.n_threads = params.n_threads_batch = min(2, os.cpu_count() or 1)
    context = llama_cpp.llama_init_from_model(model, params)
    batch, rows = llama_cpp.llama_batch_init(PROMPT, 0, 1), []
    for start, count in [(0, PROMPT), *((at, 1) for at in range(PROMPT, len(tokens)))]:
        batch.n_tokens = count
        for at in range(count):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = tokens[start + at], start + at, 1, 0, True
        if status := llama_cpp.llama_decode(context, batch):
            raise OSError(f"llama.cpp could not compute (status {status})")
        rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (count, VOCABULARY)).copy())
    return np.concatenate(rows)


@contextmanager
def _scratch_file() -> Iterator[str]:
    """The path of an empty file: in memory where the system has such, for there may be no folder to write to."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("tiny-model")
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        yield file.name


def main(library: str, extra_buffers: bool) -> dict:
    """How far llama.cpp's logits are from the right ones: the root mean square, in parts of the logits' own."""
    cpu_code.open_library(library)
    llama_cpp.llama_backend_init()
    model = TinyModel()
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, PROMPT + STEPS).tolist()
    right = model.logits(tokens)
    with _scratch_file() as path:
        if not model.write(path):
            raise OSError("the tiny model cannot be written")
        found = computed(path, tokens, extra_buffers)
    return {"off_by": float(np.sqrt(np.square(found - right).mean() / np.square(right).mean()))}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2] == "1")))
