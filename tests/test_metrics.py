"""The figures for Prometheus."""

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_engine import LIMIT, ask, until

from qwen_chat import hardware
from qwen_chat.engine import Busy
from qwen_chat.metrics import Metrics


def samples(metrics: Metrics) -> dict:
    """Every sample by its name, with the value of its only interesting label behind."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {"".join([sample.name, *(f":{value}" for value in sample.labels.values())]): sample.value for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def counted(make_bot):
    bot = make_bot(queue_size=0, runtime={"n_ctx": 512, "parallel": 1})
    return bot, Metrics(bot.engine)


def test_every_answer_is_counted(counted):
    bot, metrics = counted
    before = samples(metrics)
    replies = [ask(bot, "Tell me about the sea.", max_tokens=6)]
    "".join(replies[0])
    replies.append(ask(bot, "Tell me a long story.", max_tokens=300))
    next(iter(replies[1]))
    with pytest.raises(Busy):
        ask(bot, "And me?")
    assert samples(metrics)["qwen_chat_running"] == 1
    replies[1].cancel()
    until(lambda: replies[1].ended)
    after = samples(metrics)
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["qwen_chat_answers_total:length"] == grown["qwen_chat_answers_total:cancelled"] == 1
    assert grown["qwen_chat_answers_total:error"] == 0 and grown["qwen_chat_rejections_total"] == 1
    assert grown["qwen_chat_prompt_tokens_total"] == sum(reply.stats.prompt_tokens for reply in replies)
    assert grown["qwen_chat_cached_tokens_total"] == sum(reply.stats.cached_tokens for reply in replies)
    assert grown["qwen_chat_answer_tokens_total"] == sum(reply.stats.answer_tokens for reply in replies)
    assert grown["qwen_chat_first_token_seconds_count"] == grown["qwen_chat_queue_seconds_count"] == 2
    assert after["qwen_chat_running"] == after["qwen_chat_waiting"] == 0 and after["qwen_chat_ready"] == 1


def test_what_is_asked_on_the_way_to_an_answer_is_not_counted(counted):
    bot, metrics = counted
    before = samples(metrics)
    summary = ask(bot, "Shorten this.", max_tokens=4, keep=False)
    with pytest.raises(Busy):
        ask(bot, "And me?", keep=False, told=False)
    assert "".join(summary)
    until(lambda: bot.engine.idle)
    changed = {name.partition(":")[0] for name, value in samples(metrics).items() if value != before[name]}
    counters = {name for name in changed if name.endswith(("_total", "_count", "_sum", "_bucket"))}
    assert counters <= {"process_cpu_seconds_total"}


def test_what_is_looked_up(counted):
    bot, metrics = counted
    "".join(ask(bot, "Hello.", max_tokens=2))
    found = samples(metrics)
    assert 0 < found["qwen_chat_kv_cells_used"] <= found["qwen_chat_kv_cells"]
    held = sum(len(sequence) for sequence in [*bot.engine.cache.slots, bot.engine.cache.opening])
    assert len(bot.engine.cache.opening) <= found["qwen_chat_kv_cells_used"] < held  # the opening is shared
    assert found["process_resident_memory_bytes"] > 1e7 and found["process_cpu_seconds_total"] > 0
    assert found["qwen_chat_cpu_percent"] >= 0 and found["qwen_chat_parked_bytes"] == bot.engine.cache.parked_bytes


def test_two_programs_in_one_process_do_not_share_figures(counted, bot):
    other = Metrics(bot.engine)
    "".join(ask(counted[0], "Hello.", max_tokens=2))
    assert samples(other)["qwen_chat_answers_total:length"] == 0
    bot.engine.on_answer.remove(other.count)


def test_it_may_be_asked_at_any_time(counted):
    bot, metrics = counted
    reply = ask(bot, "Tell me a long story.", max_tokens=200)
    readers = [threading.Thread(target=lambda: [metrics.text() for _ in range(50)]) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(LIMIT)
    assert "".join(reply) and not any(reader.is_alive() for reader in readers)


def test_the_memory_limit_of_a_container(tmp_path):
    groups = tmp_path / "sys" / "fs" / "cgroup"
    (groups / "memory").mkdir(parents=True)
    assert hardware.memory_limit(tmp_path) is None
    (groups / "memory.max").write_text("max\n")
    assert hardware.memory_limit(tmp_path) is None
    (groups / "memory.max").write_text("104857600\n")
    assert hardware.memory_limit(tmp_path) == 104857600
    (groups / "memory.max").unlink()
    (groups / "memory" / "memory.limit_in_bytes").write_text("52428800\n")
    assert hardware.memory_limit(tmp_path) == 52428800
