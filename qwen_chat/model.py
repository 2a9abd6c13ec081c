"""llama.cpp's handles: the model, its context, one batch. Below the engine nothing else calls llama.cpp.

Everything here belongs to the decode thread, but for `tokenize`, `pieces` and `abort`, which only read
the vocabulary or set a flag.
"""

import ctypes
import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Callable

import llama_cpp
import numpy as np

from . import cpu_code, llama_log
from .memory import CELLS_STEP, Layout
from .sampling import NO_BYTE, FirstBytes, Logprob, Sampler, Sampling

log = logging.getLogger(__name__)

NO_CELLS, ABORTED = 1, 2  # what llama_decode returns, see llama.h
KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}


class ModelError(Exception):
    """The weights cannot be used; the message is a sentence for a person."""


class Model:
    """A model and its context. Raises ModelError where the file cannot be used for chat.

    `progress` is told what part of the file is loaded, 0 to 1; loading ends when it returns False. `layout` says how
    the weights lie in memory, where that is not as `runtime` has it.
    """

    def __init__(self, path: Path, runtime, progress: Callable[[float], bool] = lambda fraction: True, layout: Layout | None = None):
        code = cpu_code.use(runtime.cpu_code, runtime.cpu_code_exclude)
        self.cpu_code = code.name
        llama_log.install()
        llama_cpp.llama_backend_init()
        self.path = path
        self._context = self._batch = None
        self.layout = layout or Layout(runtime.use_mmap is not False, code.extra_buffers)
        self._model = _load(path, self.layout, runtime.use_mlock, progress)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train = llama_cpp.llama_model_n_ctx_train(self._model)
        self.size_bytes = llama_cpp.llama_model_size(self._model)
        self.n_params = llama_cpp.llama_model_n_params(self._model)
        self.quantization = _quantization(llama_cpp.llama_model_ftype(self._model))
        self.can_cut = not (
            llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        )
        self.can_shift = False
        self.chat_template = self._chat_template()
        self._pieces: dict[int, bytes] = {}
        self._abort_flag = ctypes.create_string_buffer(2)

    def open_context(self, runtime, n_cells: int, n_seq: int, n_threads: int, n_threads_batch: int) -> None:
        """Makes the KV cache of `n_cells` tokens, shared by `n_seq` sequences, and the compute buffers.

        The one there was before, if any, is freed.
        """
        self._close_context()
        params = llama_cpp.llama_context_default_params()
        self.n_batch = max(runtime.n_batch, n_seq)
        params.n_ctx = -(-n_cells // CELLS_STEP) * CELLS_STEP
        params.n_batch = self.n_batch
        params.n_ubatch = min(self.n_batch, max(runtime.n_ubatch, n_seq))
        params.n_seq_max = n_seq
        params.n_outputs_max = n_seq
        params.n_threads, params.n_threads_batch = n_threads, n_threads_batch
        if runtime.kv_type != "f16" and not runtime.flash_attn:
            log.warning("runtime.flash_attn: false does not count with kv_type %s, which needs it", runtime.kv_type)
        params.flash_attn_type = int(runtime.flash_attn or runtime.kv_type != "f16")
        params.type_k = params.type_v = KV_TYPES[runtime.kv_type]
        params.kv_unified = True
        params.swa_full = True  # a sliding window would forget what a later turn wants to reuse
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ModelError(f"{self.path.name}: no context of {params.n_ctx} tokens could be made{llama_log.because()}; a smaller runtime.n_ctx or runtime.parallel needs less memory")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.can_shift = self.can_cut and llama_cpp.llama_memory_can_shift(self._memory)
        self._batch = Batch(self.n_batch, n_seq)
        self._make_abortable()

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """How many threads compute a single token, and how many several, from now on."""
        llama_cpp.llama_set_n_threads(self._context, n_threads, n_threads_batch)

    # Words and tokens

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`, with no start token added; `special` reads control tokens as such."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        tokens = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, room, False, special)
        if count < 0:
            raise ValueError(f"text of {len(data)} bytes cannot be tokenized")
        return tokens[:count]

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for, which may be part of a character; control tokens only if `special`."""
        key = token if not special else -1 - token
        if key not in self._pieces:
            buffer = ctypes.create_string_buffer(256)
            size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
            self._pieces[key] = buffer.raw[: max(size, 0)]
        return self._pieces[key]

    def is_end(self, token: int) -> bool:
        """Whether the model ends its turn with this token."""
        return llama_cpp.llama_vocab_is_eog(self._vocab, token)

    def special_text(self, which: str) -> str:
        """The text of the "bos" or "eos" token, as chat templates want it; empty where there is none."""
        token = getattr(llama_cpp, f"llama_vocab_{which}")(self._vocab)
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    @property
    def adds_bos(self) -> bool:
        return llama_cpp.llama_vocab_get_add_bos(self._vocab)

    # Computing

    def decode(self, parts: list[tuple[int, int, list[int], bool]]) -> int:
        """Computes tokens: parts of (sequence, first position, token ids, whether the last one's logits are wanted).

        Returns llama_decode's status: 0 done, NO_CELLS, ABORTED, below 0 an error. The outputs are
        counted over the whole batch: use `output_index`.
        """
        return llama_cpp.llama_decode(self._context, self._batch.fill(parts))

    @staticmethod
    def output_index(parts, part: int) -> int:
        """The index of the last token of `parts[part]`, under which its logits are found."""
        return sum(len(tokens) for _, _, tokens, _ in parts[: part + 1]) - 1

    def sampler(self, settings: Sampling) -> Sampler:
        return Sampler(settings, self._vocab, self.n_vocab, self.first_bytes if settings.grammar else None)

    @cached_property
    def first_bytes(self) -> FirstBytes:
        """For grammars. It takes some tenths of a second the first time; from any thread."""
        of, single, buffer = np.full(self.n_vocab, NO_BYTE, np.int16), {}, ctypes.create_string_buffer(256)
        for token in range(self.n_vocab):
            size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            if size and not self.is_end(token):  # of more than the buffer holds, nothing is known
                of[token] = buffer[0][0] if size > 0 else NO_BYTE
                if size == 1:
                    single[of[token]] = token
        return FirstBytes(of, np.array(sorted(single.values()), np.int32))

    def sample(self, sampler: Sampler, index: int) -> tuple[int, Logprob | None]:
        """The next token by `sampler` from the logits of batch token `index`."""
        return sampler.sample(self._context, index)

    def abort(self) -> None:
        """Ends every decode at its next graph node, until `forget_abort`. From any thread."""
        self._abort_flag[0] = b"\1"

    def forget_abort(self) -> None:
        self._abort_flag[0] = b"\0"

    def _make_abortable(self) -> None:
        """llama.cpp asks a callback after every graph node. A Python function would need the interpreter's
        lock hundreds of times a token; strlen of a flag says the same: 0 for an empty string, 1 for "\\1"."""
        libc = ctypes.CDLL(None) if os.name == "posix" else ctypes.cdll.msvcrt
        callback = ctypes.cast(libc.strlen, llama_cpp.ggml_abort_callback)
        llama_cpp.llama_set_abort_callback(self._context, callback, ctypes.addressof(self._abort_flag))

    # The KV cache, as kvcache.Memory wants it

    def seq_rm(self, seq: int, start: int, end: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, seq, start, end)

    def seq_cp(self, source: int, target: int, start: int, end: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def seq_add(self, seq: int, start: int, end: int, delta: int) -> None:
        llama_cpp.llama_memory_seq_add(self._memory, seq, start, end, delta)

    def seq_range(self, seq: int) -> tuple[int, int]:
        """The first and the last position that a sequence holds; (-1, -1) where it is empty."""
        memory = self._memory
        return llama_cpp.llama_memory_seq_pos_min(memory, seq), llama_cpp.llama_memory_seq_pos_max(memory, seq)

    def saved_size(self, seq: int) -> int:
        return llama_cpp.llama_state_seq_get_size(self._context, seq)

    def save(self, seq: int) -> memoryview:
        """The sequence as bytes."""
        state = np.empty(self.saved_size(seq), np.uint8)
        size = llama_cpp.llama_state_seq_get_data(self._context, _bytes_at(state), len(state), seq)
        return state[:size].data

    def restore(self, seq: int, state: memoryview) -> bool:
        """Puts saved bytes into an empty sequence; False where there was no room."""
        state = np.frombuffer(state, np.uint8)
        return llama_cpp.llama_state_seq_set_data(self._context, _bytes_at(state), len(state), seq) > 0

    def close(self) -> None:
        self._close_context()
        if self._model:
            llama_cpp.llama_model_free(self._model)
        self._model = None

    def _close_context(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
        self._context = None

    def _chat_template(self) -> str:
        template = llama_cpp.llama_model_chat_template(self._model, None)
        if not template:
            raise ModelError(f"{self.path.name}: the file has no chat template, so it is not a chat model; choose an -Instruct or -Chat variant")
        return template.decode("utf-8", "replace")


class Batch:
    """A llama_batch over numpy arrays, so that filling it is a few slice assignments."""

    def __init__(self, n_tokens: int, n_seq: int):
        self._seq_ids = np.arange(n_seq, dtype=np.int32)
        self._addresses = self._seq_ids.ctypes.data + 4 * np.arange(n_seq, dtype=np.uintp)
        self._token = np.zeros(n_tokens, np.int32)
        self._pos = np.zeros(n_tokens, np.int32)
        self._one = np.ones(n_tokens, np.int32)
        self._seq = np.zeros(n_tokens, np.uintp)
        self._logits = np.zeros(n_tokens, np.int8)
        self._batch = llama_cpp.llama_batch(
            token=_pointer(self._token, ctypes.c_int32),
            pos=_pointer(self._pos, ctypes.c_int32),
            n_seq_id=_pointer(self._one, ctypes.c_int32),
            seq_id=_pointer(self._seq, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._logits, ctypes.c_int8),
        )

    def fill(self, parts, every: bool = False) -> llama_cpp.llama_batch:
        """The batch of `parts` as `Model.decode` takes them; with `every`, the logits of all tokens are wanted."""
        start = 0
        for seq, position, tokens, wanted in parts:
            end = start + len(tokens)
            self._token[start:end] = tokens
            self._pos[start:end] = np.arange(position, position + len(tokens))
            self._seq[start:end] = self._addresses[seq]
            self._logits[start:end] = every
            self._logits[end - 1] = wanted
            start = end
        self._batch.n_tokens = start
        return self._batch


def system_info() -> str:
    """Which instruction sets llama.cpp's code makes use of, in its own words."""
    return llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip()


def _quantization(ftype: int) -> str:
    """What a file's general.file_type stands for, in the words of file names: 15 -> "Q4_K_M". "" where it is unknown.

    Where the file has none, llama.cpp guesses it from the tensors and adds LLAMA_FTYPE_GUESSED.
    """
    ftype &= ~llama_cpp.LLAMA_FTYPE_GUESSED
    names = (name for name, value in vars(llama_cpp).items() if name.startswith("LLAMA_FTYPE_") and value == ftype)
    return next(names, "").removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")


def _load(path: Path, layout: Layout, use_mlock: bool, progress: Callable[[float], bool]):
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path.name}: not a GGUF file")
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mode = {
        (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
        (True, False): llama_cpp.LLAMA_LOAD_MODE_MMAP,
        (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
        (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    }[layout.use_mmap, use_mlock]
    params.use_extra_bufts = layout.extra_buffers

    def report(fraction: float, _data) -> bool:
        return progress(fraction)

    params.progress_callback = callback = llama_cpp.llama_progress_callback(report)
    llama_log.forget_errors()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    del callback
    if not model:
        raise ModelError(f"{path.name}: llama.cpp cannot load this file{llama_log.because()}")
    return model


def _pointer(values: np.ndarray, kind):
    return values.ctypes.data_as(ctypes.POINTER(kind))


def _bytes_at(values: np.ndarray):
    return values.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
