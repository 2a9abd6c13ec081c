"""llama.cpp's handles for the tools: scores texts, gathers what the weights are multiplied with, quantises.

At the level of model.py, and like it the only place where the tools touch llama.cpp.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import numpy as np

from . import interrupt
from .hardware import usable_cores
from . import cpu_code
from .gguf import Gguf, Tensor, ggml
from .model import Batch, Model, ModelError

FTYPES = {
    name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_"): value
    for name, value in vars(llama_cpp.llama_cpp).items()
    if name.startswith(("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")) and not name.endswith("NVFP4")  # which it reads, but does not make
}
TYPES = {
    name.removeprefix("GGML_TYPE_"): value
    for name, value in vars(llama_cpp.llama_cpp).items()
    if name.startswith("GGML_TYPE_") and name != "GGML_TYPE_COUNT"
}
FLOATS = ("F32", "F16", "BF16")
WINDOW = 512  # tokens of a text that are read together
CHUNK = 64  # tokens computed at once: the logits of more would take hundreds of MB
BUFFERED = 1 << 30  # bytes of a tensor that the quantiser holds at once


_pointer, _text = ctypes.c_void_p, ctypes.c_char_p


class Scorer(Model):
    """A model that reads texts of at most WINDOW tokens and tells what it expects after each token. No conversation.

    `watch`, an Activations, sees all that is computed. Raises ModelError where the file cannot be used for chat.
    """

    def __init__(self, path: Path, runtime, watch: "Activations | None" = None):
        super().__init__(path, runtime, interrupt.loading)
        threads = usable_cores() if runtime.n_threads == "auto" else runtime.n_threads
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = WINDOW
        params.n_batch = params.n_ubatch = params.n_outputs_max = CHUNK
        params.n_threads = threads
        params.n_threads_batch = threads if runtime.n_threads_batch == "auto" else runtime.n_threads_batch
        params.flash_attn_type = int(runtime.flash_attn)
        params.no_perf = True
        if watch:
            params.cb_eval = watch.callback
        self._watch = watch
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ModelError(f"{path.name}: no context of {WINDOW} tokens could be made")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = Batch(CHUNK, 1)

    def score(self, tokens: list[int]) -> Iterator[np.ndarray]:
        """The logits after each token of a text, from its start, in pieces of shape (at most CHUNK, n_vocab), float32.

        A piece stands in llama.cpp's own buffer: it is valid until the next is taken.
        """
        self.forget()
        for start in range(0, len(tokens), CHUNK):
            piece = tokens[start : start + CHUNK]
            yield self.read(piece, start)

    def answer(self, prompt: list[int], most: int) -> bytes:
        """The likeliest answer to `prompt`, of at most `most` tokens."""
        *_, logits = self.score(prompt)
        said, token = b"", int(logits[-1].argmax())
        for position in range(len(prompt), min(len(prompt) + most, WINDOW)):
            if self.is_end(token):
                break
            said += self.piece(token)
            token = int(self.read([token], position)[0].argmax())
        return said

    def forget(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def read(self, tokens: list[int], position: int, every: bool = True) -> np.ndarray:
        """Computes at most CHUNK tokens that stand from `position` on. Returns the logits after each, without
        `every` only those after the last, shape (n, n_vocab), valid until the next call."""
        interrupt.check()
        batch = self._batch.fill([(0, position, tokens, True)], every)
        if status := llama_cpp.llama_decode(self._context, batch):
            raise ModelError(f"{self.path.name}: llama.cpp could not compute {len(tokens)} tokens (status {status})")
        rows = len(tokens) if every else 1
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (rows, self.n_vocab))


class Activations:
    """Sums the squares of all that each weight is multiplied with: what llama.cpp calls an importance matrix.

    A weight counts as much as the values it meets, so its column's rounding errors are weighed by their mean
    square. The experts of a mixture (MUL_MAT_ID) are left out. Method: llama.cpp, tools/imatrix.
    """

    def __init__(self):
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, int] = {}
        self.fault: str | None = None
        self._op_name = ggml("ggml_op_desc", _text, _pointer)
        self._name = ggml("ggml_get_name", _text, _pointer)
        self._fetch = ggml("ggml_backend_tensor_get", None, _pointer, _pointer, ctypes.c_size_t, ctypes.c_size_t)
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._see)

    def means(self) -> dict[str, np.ndarray]:
        """The mean square of each input, by the name of the weight it meets. Raises ModelError where nothing was seen."""
        if self.fault or not self.sums:
            raise ModelError(f"this llama.cpp does not show what it computes ({self.fault or 'nothing was seen'})")
        return {name: (total / self.counts[name]).astype(np.float32) for name, total in self.sums.items()}

    def _see(self, address: int, asking: bool, _data) -> bool:
        """llama.cpp asks for each node whether to show it, then shows it. What is raised here would be lost."""
        try:
            if self.fault or self._op_name(address) != b"MUL_MAT":
                return not asking
            node = ctypes.cast(address, ctypes.POINTER(Tensor)).contents
            weight, values = node.src[0].contents, node.src[1].contents
            if asking:
                return weight.name.endswith(b".weight") and values.type == TYPES["F32"]
            self._add(node, weight, values)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
        return True

    def _add(self, node: Tensor, weight: Tensor, values: Tensor) -> None:
        if self._name(ctypes.addressof(weight)) != weight.name or values.nb[0] != 4:
            raise ValueError("ggml's tensors are laid out in another way")
        width, rows = values.ne[0], values.ne[1] * values.ne[2] * values.ne[3]
        if values.nb[1] != 4 * width or weight.ne[0] != width or weight.ne[2] != 1:
            return
        data = np.empty((rows, width), np.float32)
        self._fetch(ctypes.addressof(values), data.ctypes.data, 0, data.nbytes)
        name = weight.name.decode()
        self.sums[name] = self.sums.get(name, 0) + np.square(data, dtype=np.float64).sum(axis=0)
        self.counts[name] = self.counts.get(name, 0) + rows


# Files


def tensor_types(path: Path) -> dict[str, str]:
    """The type of each tensor in a GGUF file, by its name. Raises ModelError for a file that is none."""
    try:
        file = Gguf(path)
    except AttributeError:  # as in model.read_shape
        raise ModelError("on Windows this works in WSL2 only") from None
    if not file.handle:
        raise ModelError(f"{path.name}: not a GGUF file that llama.cpp can read")
    kinds = {value: name for name, value in TYPES.items()}
    try:
        return {
            file.call("get_tensor_name", number).decode(): kinds.get(file.call("get_tensor_type", number), "?")
            for number in range(file.call("get_n_tensors"))
        }
    finally:
        file.close()


def quantize(source: Path, target: Path, ftype: str, overrides: dict[str, str], importance: dict[str, np.ndarray],
             n_threads: int, dry_run: bool, on_line: Callable[[int, str], None]) -> bool:
    """llama.cpp's quantiser, from file to file. True when it went well; `on_line` gets its log, level and line.

    `overrides` are types by patterns of tensor names; with any, all other tensors get the type of `ftype` itself.
    Cannot be interrupted: run it in a process of its own.
    """
    cpu_code.use()
    llama_cpp.llama_backend_init()
    log = llama_cpp.llama_log_callback(lambda level, text, _: on_line(level, text.decode("utf-8", "replace")))
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FTYPES[ftype], n_threads
    params.allow_requantize = True
    params.pure = bool(overrides)
    params.dry_run = dry_run
    params.max_buf_size = BUFFERED
    patterns = [llama_cpp.llama_model_tensor_override(pattern.encode(), TYPES[kind]) for pattern, kind in overrides.items()]
    params.tt_overrides = (llama_cpp.llama_model_tensor_override * (len(patterns) + 1))(*patterns)  # ends with an empty one
    entries = [llama_cpp.llama_model_imatrix_data(name.encode(), values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), values.size)
               for name, values in importance.items()]
    if entries:
        params.imatrix = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)
    return llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) == 0
