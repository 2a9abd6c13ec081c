from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_chat.client_memory import LEAST, ClientMemory


def test_a_value_is_found_by_its_client_alone():
    memory = ClientMemory(len, 1000)
    memory.put("mine", "key", "value")
    assert memory.get("mine", "key") == "value"
    assert [memory.get(*each) for each in (("yours", "key"), (None, "key"), ("mine", "other"))] == [None] * 3
    assert memory.holds("mine") and not memory.holds("yours")
    memory.put("mine", "key", "another")
    assert memory.get("mine", "key") == "another"


def test_nothing_is_kept_for_whom_nothing_is_known():
    memory = ClientMemory(len, 1000)
    memory.put(None, "key", "value")
    assert memory.get(None, "key") is None


def test_whoever_holds_most_loses_what_was_used_longest_ago():
    memory = ClientMemory(len, 100)
    memory.put("quiet", "key", "x" * 40)
    for number in range(3):
        memory.put("greedy", number, "x" * 20)
    memory.get("greedy", 0)
    memory.put("greedy", 3, "x" * 20)
    assert [memory.get("greedy", number) is not None for number in range(4)] == [True, False, True, True]
    for number in range(1000):
        memory.put("greedy", number, "x" * 20)
    assert memory.get("quiet", "key") and memory.get("greedy", 999) and not memory.get("greedy", 996)


def test_what_is_larger_than_all_there_is_takes_no_place():
    memory = ClientMemory(len, 100)
    memory.put("quiet", "key", "x" * 40)
    memory.put("greedy", "key", "x" * 200)
    assert memory.get("greedy", "key") is None and memory.get("quiet", "key")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 60)), max_size=60))
def test_it_never_holds_more_than_it_may_and_no_client_loses_a_fair_share(puts):
    memory, latest, asked = ClientMemory(len, 150), {}, {client: 0 for client in "abc"}
    for client, key, size in puts:
        memory.put(client, key, "x" * size)
        latest[client, key] = max(LEAST, size)
        asked[client] = max(asked[client], sum(size for (owner, _), size in latest.items() if owner == client))
        held = {each: max(LEAST, len(value)) for each in latest if (value := memory.get(*each)) is not None}
        assert sum(held.values()) <= 150
        assert all(latest[each] == size for each, size in held.items())
    for each in latest:
        if asked[each[0]] <= 50:  # never more than a third
            assert memory.get(*each) is not None
