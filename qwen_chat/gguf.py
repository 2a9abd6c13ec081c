"""llama.cpp's reader of GGUF headers (gguf.h), which its Python binding leaves out, and what a header says of memory."""

import ctypes
import os
from pathlib import Path

import llama_cpp

from . import llama_log
from .memory import Shape

INTEGERS, STRING, ARRAY = (4, 5), 8, 9  # see gguf.h; integers of 32 bits
ROWS = 512  # of the right-hand side for which llama.cpp asks whether a buffer type can multiply (llama-model.cpp)


def read_shape(path: Path) -> Shape | None:
    """What the header of a GGUF file says of the memory it takes, without loading it; None where it says too little,
    or is broken, which loading it will tell better. Which weights are copied depends on the code for the processor
    that is loaded (cpu_code.use)."""
    llama_log.install()
    try:
        gguf = Gguf(path)
    except AttributeError:  # on Windows a library does not lend the functions of those it uses
        return None
    try:
        return _shape(gguf, path) if gguf.handle else None
    finally:
        gguf.close()


def _shape(gguf: "Gguf", path: Path) -> Shape | None:
    architecture = gguf.text("general.architecture")

    def values(name: str, default: int = 0) -> list[int]:
        return gguf.integers(f"{architecture}.{name}") or [default]

    n_layer, n_embd, n_head = values("block_count")[0], values("embedding_length")[0], max(values("attention.head_count"))
    n_vocab = gguf.length("tokenizer.ggml.tokens")
    if not (n_layer and n_embd and n_head and n_vocab):
        return None
    heads, width = values("attention.head_count_kv", n_head), n_embd // n_head
    heads = heads * n_layer if len(heads) == 1 else heads
    tied = not gguf.tensor_size("output.weight")
    copies = {name: copy for name in gguf.tensors() if (tied or name != "token_embd.weight") and (copy := gguf.copy(name))}
    return Shape(
        weights=path.stat().st_size - gguf.call("get_data_offset"),
        looked_up=0 if tied else gguf.tensor_size("token_embd.weight"),
        kv_values=sum(heads) * (values("attention.key_length", width)[0] + values("attention.value_length", width)[0]),
        n_embd=n_embd, n_ff=max(values("feed_forward_length")), n_head=n_head, n_vocab=n_vocab,
        n_ctx_train=values("context_length")[0] or 2**31,
        copies=sum(size for _, size in copies.values()), copied=sum(map(gguf.tensor_size, copies)),
        copy_kinds=tuple(sorted({kind for kind, _ in copies.values()})), unmapped=_unmapped(gguf, copies.keys() - {"token_embd.weight"}),
    )


def _unmapped(gguf: "Gguf", copied: set[str]) -> int:
    """Bytes of copied weights at the ends of the file, from which llama.cpp takes its mapping away (llama_mmap)."""
    ranges = [(start, start + gguf.tensor_size(name), name in copied) for name, start in gguf.offsets().items()]
    kept = [(start, end) for start, end, gone in ranges if not gone] or [(0, 0)]
    first, last = min(start for start, _ in kept), max(end for _, end in kept)
    return first + max(end for _, end, _ in ranges) - last


class Tensor(ctypes.Structure):
    """ggml.h: struct ggml_tensor."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


class InitParams(ctypes.Structure):
    """ggml.h: struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def ggml(name: str, result, *arguments):
    """A function of ggml, which llama.cpp's library brings along. Raises AttributeError on Windows, where it lends none."""
    function = getattr(llama_cpp.llama_cpp._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


class Gguf:
    """A GGUF file's header. `handle` is None where the file is none."""

    class Params(ctypes.Structure):
        """gguf.h: struct gguf_init_params."""

        _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.POINTER(ctypes.c_void_p))]

    # name: what it returns, what it takes beside the handle
    FUNCTIONS = {
        "find_key": (ctypes.c_int64, ctypes.c_char_p), "get_kv_type": (ctypes.c_int, ctypes.c_int64),
        "get_val_u32": (ctypes.c_uint32, ctypes.c_int64), "get_val_str": (ctypes.c_char_p, ctypes.c_int64),
        "get_arr_type": (ctypes.c_int, ctypes.c_int64), "get_arr_n": (ctypes.c_size_t, ctypes.c_int64),
        "get_arr_data": (ctypes.c_void_p, ctypes.c_int64), "find_tensor": (ctypes.c_int64, ctypes.c_char_p),
        "get_tensor_size": (ctypes.c_size_t, ctypes.c_int64), "get_data_offset": (ctypes.c_size_t,), "free": (None,),
        "get_n_tensors": (ctypes.c_int64,), "get_tensor_name": (ctypes.c_char_p, ctypes.c_int64),
        "get_tensor_type": (ctypes.c_int, ctypes.c_int64), "get_tensor_offset": (ctypes.c_size_t, ctypes.c_int64),
    }

    def __init__(self, path: Path):
        self._functions = {
            name: ggml(f"gguf_{name}", result, ctypes.c_void_p, *arguments) for name, (result, *arguments) in self.FUNCTIONS.items()
        }
        self._context = ctypes.c_void_p()  # holds the tensors, without their data
        params = self.Params(True, ctypes.pointer(self._context))
        self.handle = ggml("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, self.Params)(os.fsencode(path), params)

    def call(self, name: str, *arguments):
        return self._functions[name](self.handle, *arguments)

    def text(self, key: str) -> str:
        at = self.call("find_key", key.encode())
        return self.call("get_val_str", at).decode() if at >= 0 and self.call("get_kv_type", at) == STRING else ""

    def integers(self, key: str) -> list[int]:
        """A number, or those of an array, as models have it whose layers differ; [] where there is no such key."""
        at = self.call("find_key", key.encode())
        kind = self.call("get_kv_type", at) if at >= 0 else None
        if kind in INTEGERS:
            return [self.call("get_val_u32", at)]
        if kind != ARRAY or self.call("get_arr_type", at) not in INTEGERS:
            return []
        return list((ctypes.c_uint32 * self.call("get_arr_n", at)).from_address(self.call("get_arr_data", at)))

    def length(self, key: str) -> int:
        at = self.call("find_key", key.encode())
        return self.call("get_arr_n", at) if at >= 0 and self.call("get_kv_type", at) == ARRAY else 0

    def tensors(self) -> list[str]:
        return [self.call("get_tensor_name", number).decode() for number in range(self.call("get_n_tensors"))]

    def offsets(self) -> dict[str, int]:
        """Where each tensor begins, from the first one's place on."""
        return {name: self.call("get_tensor_offset", number) for number, name in enumerate(self.tensors())}

    def tensor_size(self, name: str) -> int:
        at = self.call("find_tensor", name.encode())
        return self.call("get_tensor_size", at) if at >= 0 else 0

    def copy(self, name: str) -> tuple[str, int] | None:
        """The buffer type and the bytes of the copy that the code for this processor makes of a matrix; None where it
        makes none. Asked in the way of llama.cpp itself, weight_buft_supported in llama-model-loader.cpp."""
        weight = ggml("ggml_get_tensor", ctypes.POINTER(Tensor), ctypes.c_void_p, ctypes.c_char_p)(self._context, name.encode())
        if not name.endswith(".weight") or weight.contents.ne[1] == 1 or weight.contents.ne[2] > 1:
            return None
        device, kinds = _extra_buffer_types()
        for kind in kinds:
            if _multiplies(device, kind, weight):
                size = ggml("ggml_backend_buft_get_alloc_size", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)(kind, weight)
                return ggml("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)(kind).decode(), size
        return None

    def close(self) -> None:
        if self.handle:
            self.call("free")
            ggml("ggml_free", None, ctypes.c_void_p)(self._context)


def _extra_buffer_types() -> tuple[int, list[int]]:
    """The processor's device, and its types of buffers in which weights are laid out anew."""
    pointer = ctypes.c_void_p
    device = ggml("ggml_backend_dev_by_type", pointer, ctypes.c_int)(0)  # GGML_BACKEND_DEVICE_TYPE_CPU
    if not device:
        return 0, []
    registry = ggml("ggml_backend_dev_backend_reg", pointer, pointer)(device)
    address = ggml("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)(registry, b"ggml_backend_dev_get_extra_bufts")
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(device) if address else None
    kinds = []
    while listed and listed[len(kinds)]:  # ends with a null
        kinds.append(listed[len(kinds)])
    return device, kinds


def _multiplies(device: int, kind: int, weight) -> bool:
    """Whether a matrix in a buffer of this kind can be multiplied with others."""
    pointer = ctypes.c_void_p
    context = ggml("ggml_init", pointer, InitParams)(InitParams(1 << 14, None, True))
    other = ggml("ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)(
        context, llama_cpp.GGML_TYPE_F32, weight.contents.ne[0], ROWS)
    product = ggml("ggml_mul_mat", pointer, pointer, pointer, pointer)(context, weight, other)
    weight.contents.buffer = buffer = ggml("ggml_backend_buft_alloc_buffer", pointer, pointer, ctypes.c_size_t)(kind, 0)
    try:
        return ggml("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)(device, product)
    finally:
        weight.contents.buffer = None
        ggml("ggml_backend_buffer_free", None, pointer)(buffer)
        ggml("ggml_free", None, pointer)(context)
