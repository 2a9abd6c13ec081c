"""Whether the memory suffices, reckoned before the weights are loaded. Arithmetic alone: all sizes in bytes.

Weights that are mapped (`use_mmap`) are pages of a file, which the system may drop and read again: a program short
of them is not ended but crawls, reading hundreds of megabytes from disk for every token. So they count in full,
but for those of which only a few rows are looked up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .hardware import Memory

# Measured with the pinned packages on x86-64 Linux, Python 3.11 and 3.12: Python, Gradio's page, llama.cpp, some open pages
PROGRAM_BYTES = 175_000_000
VOCABULARY_BYTES = 340  # a token of the vocabulary, in llama.cpp's tables; measured with 49,152 and 151,936 of them
CELLS_STEP = 256  # llama.cpp rounds a context up to this many cells
OPENING_CELLS = 256  # for the system prompt, which is not tokenised yet
BYTES_PER_VALUE = {"f16": 2.0, "q8_0": 34 / 32}  # q8_0: 32 values and a scale of two bytes, ggml-common.h
# The sum is right to within so much. Measured in containers: 5% short of it, answers come as fast as ever, 10 tokens/s
# there; 19% short, 1.2 tokens/s.
LEEWAY = 0.05
SMALLEST_FILE = 60_000_000  # there are hardly any chat models below


class NotEnoughMemory(Exception):
    """The model would not fit; the message has the sum and what would."""


@dataclass(frozen=True)
class Shape:
    """What the header of a GGUF file says about the memory a model takes.

    `weights` are all tensors' bytes; `looked_up` those of an embedding matrix that is not the output matrix, too.
    `kv_values` are the numbers that one token adds to the cache, over all layers. The loaded code for the processor
    lays weights of `copied` bytes out anew in `copies` bytes, in buffers of the types `copy_kinds`; `unmapped` bytes of
    the originals do not stay mapped.
    """

    weights: int
    looked_up: int
    kv_values: int
    n_embd: int
    n_ff: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    copies: int = 0
    copied: int = 0
    copy_kinds: tuple[str, ...] = ()
    unmapped: int = 0


@dataclass(frozen=True)
class Layout:
    """How weights lie in memory: mapped from their file or read into memory of the process, and whether those that the
    processor multiplies faster in another order are laid out anew ("extra buffers" of llama.cpp)."""

    use_mmap: bool = True
    extra_buffers: bool = True


@dataclass(frozen=True)
class Need:
    """What running takes, part by part; `droppable` is what of the weights the system may drop without harm.

    `repacked` are the weights that are laid out anew, which are resident twice where their file is mapped, too.
    """

    program: int
    weights: int
    vocabulary: int
    kv: int
    compute: int
    droppable: int
    repacked: int = 0
    layout: Layout = Layout()

    @property
    def total(self) -> int:
        """What is resident where memory is plenty."""
        return self.program + self.weights + self.repacked + self.vocabulary + self.kv + self.compute

    @property
    def least(self) -> int:
        """What has to be resident so that nothing is slower for it."""
        return self.total - self.droppable

    @property
    def of_weights(self) -> int:
        return self.weights - self.droppable

    def parts(self) -> str:
        """The sum in words."""
        names = {"weights": self.of_weights, "weights repacked for the processor": self.repacked, "KV cache": self.kv, "compute buffers": self.compute,
                 "vocabulary": self.vocabulary, "the program itself": self.program}
        return ", ".join(f"{name} {mb(size)}" for name, size in names.items() if size)


def needed(shape: Shape, runtime, program: int = PROGRAM_BYTES, layout: Layout | None = None) -> Need:
    """What a model of this shape takes with these settings of `runtime`, and with the layout that suits it best."""
    layout = layout or _layouts(shape, runtime)[0]
    cells = min(runtime.n_ctx, shape.n_ctx_train) * runtime.parallel + OPENING_CELLS
    cells = -(-cells // CELLS_STEP) * CELLS_STEP
    kv = int(cells * shape.kv_values * BYTES_PER_VALUE[runtime.kv_type])
    droppable = shape.looked_up if layout.use_mmap and not runtime.use_mlock else 0
    repacked = shape.copies if layout.extra_buffers else 0
    weights = shape.weights - (0 if not repacked else shape.unmapped if layout.use_mmap else shape.copied)
    vocabulary, compute = shape.n_vocab * VOCABULARY_BYTES, _compute(shape, runtime, cells)
    return Need(program, weights, vocabulary, kv, compute, droppable, repacked, layout)


def _layouts(shape: Shape, runtime, extra_buffers: bool = True) -> list[Layout]:
    """The layouts that the settings leave, the fastest first, and last the one that takes least. Of a file that is
    mostly laid out anew, a mapping would hold the originals for nothing."""
    mostly = shape.copied > shape.weights / 2
    use_mmap = not (extra_buffers and mostly) if runtime.use_mmap == "auto" else runtime.use_mmap
    plain = Layout(runtime.use_mmap is not False, False)
    return [Layout(use_mmap, True), plain] if extra_buffers and shape.copies else [plain]


def _compute(shape: Shape, runtime, cells: int) -> int:
    """llama.cpp's buffers for one step, of a dense transformer, with 4 bytes a value.

    The largest moment of the graph: with flash attention the feed-forward part, 3 n_ff + 4 n_embd a token, and a mask
    of 2 bytes a cell; without, the attention itself, every head's weight for every cell. To within 5% of what
    llama.cpp (0.3.36) logs as "compute buffer size" for 72 settings of two models; those of others may differ.
    """
    sequences = runtime.parallel + 1
    ubatch = max(min(runtime.n_batch, runtime.n_ubatch), sequences)
    logits = 4 * sequences * shape.n_vocab
    token = 4 * (3 * shape.n_ff + 4 * shape.n_embd) + 2 * cells
    if not runtime.flash_attn and runtime.kv_type == "f16":
        token = max(token, 4 * ((shape.n_head + 1) * cells + 6 * shape.n_embd))
    return max(ubatch * token, logits) + logits


def choose(shape: Shape, runtime, memory: Memory, own: int, extra_buffers: bool = True) -> Need:
    """What the model takes with the fastest layout of its weights that fits, else with the smallest.

    `own` is what the process holds already, which is part of the sum and not of what is available. Without
    `extra_buffers`, weights cannot be laid out anew here.
    """
    needs = [needed(shape, runtime, layout=layout) for layout in _layouts(shape, runtime, extra_buffers)]
    return next((each for each in needs if not short(each, memory, own)), min(needs, key=lambda each: each.least))


def check(shape: Shape, runtime, memory: Memory, own: int, extra_buffers: bool = True) -> Need:
    """What `choose` finds. Raises NotEnoughMemory where that is clearly more than there is, swap counted in."""
    need, there = choose(shape, runtime, memory, own, extra_buffers), memory.available + own + memory.swap
    if runtime.memory_check and need.least > there * (1 + LEEWAY):
        where = "the container's limit leaves" if memory.limited else "this machine has"
        raise NotEnoughMemory(
            f"Not enough memory: about {mb(need.least)} are needed ({need.parts()}), {where} {mb(there)}. "
            f"{_advice(shape, runtime, there)} runtime.memory_check: false starts all the same."
        )
    return need


def parking(need: Need, runtime, memory: Memory, own: int) -> int:
    """How many bytes of paused conversations may be kept: `cache_mb`, or what the rest of the memory leaves of it."""
    wanted = runtime.cache_mb * 2**20
    return min(wanted, max(0, memory.available + own - need.least)) if runtime.memory_check else wanted


def short(need: Need, memory: Memory, own: int) -> int:
    """How many bytes are missing, and have to be swapped out or read from disk again and again."""
    return max(0, need.least - memory.available - own)


def _advice(shape: Shape, runtime, there: int) -> str:
    """Which settings would fit, and how large a file."""
    changes, need = {}, _least(shape, runtime)
    file = there - (need.least - need.of_weights)
    smaller = f" So would weights of at most {mb(file)} with the settings as they are." if file >= SMALLEST_FILE else ""
    for key, changed in _savings(runtime):
        less = _least(shape, changed)
        if less.least < need.least:
            changes[key], need = getattr(changed, key), less
        if need.least <= there:
            return f"runtime: {_yaml(changes)} would fit, with {mb(need.least)}.{smaller}"
    file = there - (need.least - need.of_weights)
    if file < SMALLEST_FILE:
        return f"That is too little for any model: all but the weights takes {mb(need.least - need.of_weights)} with the smallest settings."
    others = f" with runtime: {_yaml(changes)}" if changes else ""
    return f"Weights of at most {mb(file)} would fit{others}; these take {mb(need.of_weights)}."


def _least(shape: Shape, runtime) -> Need:
    return min((needed(shape, runtime, layout=layout) for layout in _layouts(shape, runtime)), key=lambda need: need.least)


def _savings(runtime) -> Iterator[tuple[str, object]]:
    """Settings that take less, each on top of those before it, in the order in which they are missed least."""
    for key, value in (("parallel", 1), ("n_ctx", 1024), ("kv_type", "q8_0"), ("n_ubatch", 64), ("n_ctx", 512)):
        runtime = runtime.model_copy(update={key: value if isinstance(value, str) else min(value, getattr(runtime, key))})
        yield key, runtime


def _yaml(changes: dict) -> str:
    longest = " (and generation.max_tokens: 256 at most)" if changes.get("n_ctx") == 512 else ""
    return f"{{{', '.join(f'{key}: {value}' for key, value in changes.items())}}}{longest}"


def mb(size: int) -> str:
    """A size for people, in millions of bytes."""
    return f"{size / 1e6:,.0f} MB"
