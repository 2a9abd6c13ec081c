"""How the next token is chosen: a llama.cpp sampler chain made from settings."""

import secrets
from dataclasses import dataclass

import llama_cpp

GREATEST_SEED = 0xFFFFFFFE  # 0xFFFFFFFF is llama.cpp's word for "any"


@dataclass(frozen=True)
class Sampling:
    """Settings of one answer. temperature 0 takes the most likely token; top_k 0, top_p 1, min_p 0
    and repeat_penalty 1 turn that step off. seed -1 draws a new seed; with any other, and nobody else at
    work, the same prompt gives the same text, for which its history is computed anew."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.0
    repeat_penalty: float = 1.1
    repeat_last_n: int = 64
    seed: int = -1

    @classmethod
    def from_config(cls, generation, seed: int = -1) -> "Sampling":
        """The settings of config.yaml's `generation` section."""
        names = cls.__dataclass_fields__.keys() - {"seed"}
        return cls(**{name: getattr(generation, name) for name in names}, seed=seed)


class Sampler:
    """One answer's sampler chain in llama.cpp; used by the decode thread alone. Close it after use."""

    def __init__(self, settings: Sampling, n_vocab: int):
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in _chain(settings, n_vocab):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, context, index: int) -> int:
        """The token chosen from output `index` of the last decode; the chain remembers it."""
        return llama_cpp.llama_sampler_sample(self._chain, context, index)

    def close(self) -> None:
        if self._chain:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None


def _chain(settings: Sampling, n_vocab: int) -> list:
    samplers = _penalties(settings, n_vocab)
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


def _penalties(settings: Sampling, n_vocab: int) -> list:
    """The repeat penalty over the answer's last tokens.

    llama.cpp looks every candidate up in a hash table, which for 151,936 of them costs more than the
    rest of the chain. A penalty above 1 only lowers tokens of the window, so the best top_k
    afterwards are among the best top_k + window before it: taking those first changes nothing.
    """
    if settings.repeat_penalty == 1 or settings.repeat_last_n == 0:
        return []
    penalties = llama_cpp.llama_sampler_init_penalties(
        n_vocab, settings.repeat_last_n, settings.repeat_penalty, 0.0, 0.0
    )
    kept = 1 if settings.temperature == 0 else settings.top_k
    if settings.repeat_penalty < 1 or kept == 0:
        return [penalties]
    return [llama_cpp.llama_sampler_init_top_k(kept + settings.repeat_last_n), penalties]
