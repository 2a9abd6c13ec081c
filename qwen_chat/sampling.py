"""How the next token is chosen: a llama.cpp sampler chain made from settings."""

import ctypes
import secrets
from dataclasses import dataclass

import llama_cpp
import numpy as np

GREATEST_SEED = 0xFFFFFFFE  # 0xFFFFFFFF is llama.cpp's word for "any"
WHOLE_ANSWER = 32768  # tokens: as far back as frequency and presence are counted
NO_BYTE = 256  # in place of the first byte of a token without text
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


@dataclass(frozen=True)
class Sampling:
    """Settings of one answer. temperature 0 takes the most likely token; top_k 0, top_p 1, min_p 0
    and repeat_penalty 1 turn that step off. seed -1 draws a new seed; with any other, and nobody else at
    work, the same prompt gives the same text, for which its history is computed anew.

    `logit_bias` is added to logits: pairs of (token id, bias). `grammar` in llama.cpp's GBNF allows only
    texts that fit it. `top_logprobs` is how many alternatives are reported for each token; None: nothing is.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.0
    repeat_penalty: float = 1.1
    repeat_last_n: int = 64
    seed: int = -1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    top_logprobs: int | None = None

    @classmethod
    def from_config(cls, config) -> "Sampling":
        """The settings of config.yaml."""
        given = config.generation
        names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "repeat_last_n")
        return cls(**{name: getattr(given, name) for name in names}, seed=config.runtime.seed)


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a chosen token before any sampling step, and of the likeliest ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class FirstBytes:
    """What tokens begin with: `of` each its first byte, or NO_BYTE; and which tokens are a `single` byte."""

    of: np.ndarray
    single: np.ndarray


class Sampler:
    """One answer's sampler chain in llama.cpp; used by the decode thread alone. Close it after use.

    Raises ValueError when the grammar cannot be read.
    """

    def __init__(self, settings: Sampling, vocab, n_vocab: int, first_bytes: FirstBytes | None = None):
        self._n_vocab = n_vocab
        self._first_bytes = first_bytes  # for a grammar
        self._top_logprobs = settings.top_logprobs
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        self._grammar = None
        for sampler in _chain(settings, n_vocab):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        if settings.grammar:
            self._grammar = llama_cpp.llama_sampler_init_grammar(vocab, settings.grammar.encode(), b"root")
            if not self._grammar:
                self.close()
                raise ValueError("the grammar cannot be read")

    def sample(self, context, index: int) -> tuple[int, Logprob | None]:
        """The token chosen from output `index` of the last decode, which the chain remembers, and its
        log-probability where that is asked for."""
        if self._grammar:
            token = self._sample_by_grammar(self._logits(context, index))
        else:
            token = llama_cpp.llama_sampler_sample(self._chain, context, index)
        if self._top_logprobs is None:
            return token, None
        return token, _logprob(self._logits(context, index), token, self._top_logprobs)

    def close(self) -> None:
        for sampler in (self._chain, self._grammar):
            if sampler:
                llama_cpp.llama_sampler_free(sampler)
        self._chain = self._grammar = None

    def _logits(self, context, index: int) -> np.ndarray:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), (self._n_vocab,))

    def _sample_by_grammar(self, logits: np.ndarray) -> int:
        """Chooses as if there were no grammar, and only if that does not fit it, among what does: holding a
        grammar against every token of the vocabulary takes far longer than against one."""
        token = self._apply(_candidates(logits), self._chain)
        alone = _candidates(np.zeros(1, np.float32))
        alone["id"] = token
        self._apply(alone, self._grammar)
        if np.isneginf(alone["logit"][0]):
            fitting = self._fitting(logits)
            if np.isneginf(fitting["logit"]).all():
                raise ValueError("no token fits the grammar")  # llama.cpp would end the process
            token = self._apply(fitting, self._chain)
        llama_cpp.llama_sampler_accept(self._grammar, token)
        llama_cpp.llama_sampler_accept(self._chain, token)
        return token

    def _fitting(self, logits: np.ndarray) -> np.ndarray:
        """The candidates that fit the grammar, and some with a logit of -inf that do not. Where a byte does not fit,
        nor does what begins with it: mostly a few hundred tokens are left to be held against the grammar."""
        everything = _candidates(logits)
        single = everything[self._first_bytes.single]
        single["logit"] = 0
        self._apply(single, self._grammar)
        open_bytes = np.ones(NO_BYTE + 1, bool)
        open_bytes[self._first_bytes.of[single["id"]]] = ~np.isneginf(single["logit"])
        fitting = everything[open_bytes[self._first_bytes.of]]
        self._apply(fitting, self._grammar)
        return fitting

    def _apply(self, candidates: np.ndarray, *samplers) -> int:
        """Runs samplers over the candidates; the id of the one they select, -1 where they only weigh."""
        data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)
        for sampler in samplers:
            llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return array.data[array.selected].id if array.selected >= 0 else -1


def _candidates(logits: np.ndarray) -> np.ndarray:
    candidates = np.zeros(len(logits), CANDIDATE)
    candidates["id"] = np.arange(len(logits))
    candidates["logit"] = logits
    return candidates


def _logprob(logits: np.ndarray, token: int, count: int) -> Logprob:
    highest = logits.max()
    norm = highest + np.log(np.exp(logits - highest).sum())
    top = np.argpartition(logits, -count)[-count:] if count else []
    top = sorted(((int(each), float(logits[each] - norm)) for each in top), key=lambda pair: -pair[1])
    return Logprob(token, float(logits[token] - norm), top)


def _chain(settings: Sampling, n_vocab: int) -> list:
    samplers = [*_logit_bias(settings, n_vocab), *_penalties(settings, n_vocab)]
    if settings.temperature == 0:
        return [*samplers, llama_cpp.llama_sampler_init_greedy()]
    seed = settings.seed if settings.seed >= 0 else secrets.randbelow(GREATEST_SEED)
    return [
        *samplers,
        llama_cpp.llama_sampler_init_top_k(settings.top_k),
        llama_cpp.llama_sampler_init_top_p(settings.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(settings.min_p, 1),
        llama_cpp.llama_sampler_init_temp(settings.temperature),
        llama_cpp.llama_sampler_init_dist(seed),
    ]


def _logit_bias(settings: Sampling, n_vocab: int) -> list:
    if not settings.logit_bias:
        return []
    pairs = (llama_cpp.llama_logit_bias * len(settings.logit_bias))(*settings.logit_bias)
    return [llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(pairs), pairs)]


def _penalties(settings: Sampling, n_vocab: int) -> list:
    """The repeat penalty over the answer's last tokens, and frequency and presence over all of it.

    llama.cpp looks every candidate up in a hash table, which for 151,936 of them costs more than the
    rest of the chain. A repeat penalty above 1 only lowers tokens of the window, so the best top_k
    afterwards are among the best top_k + window before it: taking those first changes nothing.
    """
    penalty, counted = llama_cpp.llama_sampler_init_penalties, (settings.frequency_penalty, settings.presence_penalty)
    samplers = [penalty(n_vocab, WHOLE_ANSWER, 1.0, *counted)] if any(counted) else []
    if settings.repeat_penalty == 1 or settings.repeat_last_n == 0:
        return samplers
    kept = 1 if settings.temperature == 0 else settings.top_k
    if settings.repeat_penalty > 1 and kept and not samplers:
        samplers.append(llama_cpp.llama_sampler_init_top_k(kept + settings.repeat_last_n))
    return [*samplers, penalty(n_vocab, settings.repeat_last_n, settings.repeat_penalty, 0.0, 0.0)]
