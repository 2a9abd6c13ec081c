"""Figures of the running program in Prometheus' text form."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .hardware import memory_limit
from .performance import Usage

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60)
SPEEDS = (1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500)
REASONS = ("stop", "length", "cancelled", "error")


class Metrics:
    """Counts every answer of an engine, whoever asked for it; what changes by itself is looked up when asked for."""

    def __init__(self, engine):
        self._engine = engine
        self._usage = Usage()
        self._registry = registry = CollectorRegistry()
        self._first = Histogram("qwen_chat_first_token_seconds", "From the request to its first token", buckets=SECONDS, registry=registry)
        self._waited = Histogram("qwen_chat_queue_seconds", "From the request to the start of its computation", buckets=SECONDS, registry=registry)
        self._speed = Histogram("qwen_chat_tokens_per_second", "Speed of an answer after its first token", buckets=SPEEDS, registry=registry)
        self._prompt = Counter("qwen_chat_prompt_tokens", "Tokens of prompts, the cached ones too", registry=registry)
        self._cached = Counter("qwen_chat_cached_tokens", "Tokens of prompts that were not computed again", registry=registry)
        self._answer = Counter("qwen_chat_answer_tokens", "Tokens of answers", registry=registry)
        self._answers = Counter("qwen_chat_answers", "Answers by how they ended", ["reason"], registry=registry)
        for reason in REASONS:
            self._answers.labels(reason)
        registry.register(self)
        engine.on_answer.append(self.count)

    def count(self, reply) -> None:
        """Called by the engine after every answer; those on the way to another one are left out."""
        stats = reply.stats
        if stats.aside:
            return
        self._answers.labels(stats.finish_reason).inc()
        if stats.waited_ms:  # it was begun
            self._waited.observe(stats.waited_ms / 1000)
            self._prompt.inc(stats.prompt_tokens)
            self._cached.inc(stats.cached_tokens)
            self._answer.inc(stats.answer_tokens)
        if stats.first_token_ms:
            self._first.observe(stats.first_token_ms / 1000)
        if stats.tokens_per_second:
            self._speed.observe(stats.tokens_per_second)

    def text(self) -> bytes:
        """All figures, as /metrics answers."""
        return generate_latest(self._registry)

    def collect(self):
        """What is looked up at each scrape; called by the registry."""
        engine, cache = self._engine, self._engine.cache
        yield CounterMetricFamily("qwen_chat_rejections", "Requests that met a full line", value=engine.rejected)
        yield CounterMetricFamily("process_cpu_seconds", "Processor time used", value=self._usage.cpu_seconds())
        opening, used = (len(cache.opening), cache.used_cells) if cache else (0, 0)
        gauges = {
            "qwen_chat_ready": ("Whether the model answers", int(engine.state.phase == "ready")),
            "qwen_chat_running": ("Answers being computed", engine.running),
            "qwen_chat_waiting": ("Requests in line", engine.waiting),
            "qwen_chat_kv_cells_used": ("Tokens that the KV cache holds, shared ones once", used),
            "qwen_chat_kv_cells": ("Tokens that the KV cache can hold", engine.n_ctx * engine.runtime.parallel + opening),
            "qwen_chat_parked_bytes": ("Memory of conversations that pause", cache.parked_bytes if cache else 0),
            "process_resident_memory_bytes": ("Resident memory", self._usage.memory()),
            "qwen_chat_cpu_percent": ("Processor use since the last look, 100 for one core", 100 * self._usage.cores()),
        }
        limit = memory_limit()
        if limit:
            gauges["qwen_chat_memory_limit_bytes"] = ("What the container may use", limit)
        for name, (words, value) in gauges.items():
            yield GaugeMetricFamily(name, words, value=value)
