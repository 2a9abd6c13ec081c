"""The cache's books, checked against a model of llama.cpp's memory that knows what each cell was computed from."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen_chat.kvcache import SHORTEST_RUN, SMALL_LOSS, KVCache, common_prefix, token_array


@dataclass(eq=False)
class Cell:
    token: int
    position: int
    before: tuple = ()  # the tokens in whose light it was computed


class Cells:
    """Unified memory: sequences point at cells, which they may share; shifting moves a cell for all of them."""

    can_cut = True

    def __init__(self, can_shift=True, can_cut=True):
        self.sequences: dict[int, list[Cell]] = {}
        self.can_shift, self.can_cut = can_shift, can_cut
        self.computed = 0

    def compute(self, seq, tokens):
        cells = self.sequences.setdefault(seq, [])
        for token in tokens:
            cells.append(Cell(token, len(cells), tuple(cell.token for cell in cells)))
        self.computed += len(tokens)

    def seq_rm(self, seq, start, end):
        inside = lambda cell: cell.position >= start and (end < 0 or cell.position < end)
        cells = self.sequences.get(seq, [])
        assert self.can_cut or all(inside(cell) for cell in cells), "a part of a recurrent state was to be forgotten"
        self.sequences[seq] = [cell for cell in cells if not inside(cell)]

    def seq_cp(self, source, target, start, end):
        assert not self.sequences.get(target)
        self.sequences[target] = [cell for cell in self.sequences[source] if cell.position >= start and (end < 0 or cell.position < end)]

    def seq_add(self, seq, start, end, delta):
        assert self.can_shift
        for cell in self.sequences[seq]:
            if start <= cell.position < end:
                cell.position += delta

    def saved_size(self, seq):
        return 10 + 100 * len(self.sequences.get(seq, []))

    def save(self, seq):
        return [replace(cell) for cell in self.sequences[seq]]

    def restore(self, seq, state):
        assert not self.sequences.get(seq)
        self.sequences[seq] = [replace(cell) for cell in state]
        return True


def check(cache, memory):
    for sequence in [*cache.slots, cache.opening]:
        cells = memory.sequences.get(sequence.id, [])
        assert [cell.token for cell in cells] == list(sequence.tokens)
        assert [cell.position for cell in cells] == list(range(len(sequence)))
        assert all(cell.before == tuple(sequence.tokens[:at]) for at, cell in enumerate(cells[: sequence.plain]))
    assert cache.used_cells == len({id(cell) for cells in memory.sequences.values() for cell in cells})
    assert cache.parked_bytes <= cache.cache_bytes


def serve(cache, memory, prompt, answer=(), owner=None, trimmed=False, client=None):
    """One request from begin to end; returns how many of the prompt's tokens were reused."""
    prompt = token_array(prompt)
    slot = cache.acquire(prompt, owner, client, trimmed)
    reused = len(slot)
    assert slot.tokens == prompt[:reused] and reused < len(prompt)
    rest = prompt[reused:] + token_array(answer)
    memory.compute(slot.id, rest)
    slot.tokens.extend(rest)
    check(cache, memory)
    cache.release(slot)
    return reused


def make(n_slots=2, cache_bytes=10**6, **memory):
    memory = Cells(**memory)
    cache = KVCache(memory, n_slots, cache_bytes)
    memory.compute(cache.opening.id, range(20))
    cache.opening.tokens = token_array(range(20))
    return cache, memory


SYSTEM = list(range(20))


def turn(number, length=40):
    return [1000 * number + at for at in range(length)]


def test_common_prefix():
    for a, b, length in [([], [1], 0), ([1], [1], 1), ([1, 2, 3], [1, 2, 4], 2), ([5], [6], 0), (range(999), range(500), 500)]:
        assert common_prefix(token_array(a), token_array(b)) == length


def test_a_new_conversation_starts_from_the_opening():
    cache, memory = make()
    assert serve(cache, memory, SYSTEM + turn(1)) == 20


def test_a_follow_up_goes_on_in_place():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1), turn(2))
    assert serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(3)) == 100
    assert sum(len(slot) > 0 for slot in cache.slots) == 1


def test_the_last_token_is_always_left_to_compute():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1))
    assert serve(cache, memory, SYSTEM + turn(1)) == 59


def test_an_edited_turn_leaves_the_old_branch_alone():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3))
    assert serve(cache, memory, SYSTEM + turn(1) + turn(4)) == 60
    assert serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(3) + turn(5)) == 140


@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_many_conversations_taking_turns_compute_nothing_twice(n_slots):
    cache, memory = make(n_slots)
    talks = {owner: SYSTEM + turn(100 + owner) for owner in range(8)}
    for number in range(4):
        for owner, talk in talks.items():
            reused = serve(cache, memory, talk, turn(200 + 10 * number + owner), owner)
            assert reused >= len(talk) - 40
            talk += turn(200 + 10 * number + owner) + turn(300 + 10 * number + owner)


def test_parked_states_stay_within_their_bound_and_the_oldest_goes_first():
    cache, memory = make(1, cache_bytes=2 * (100 * 60 + 10 + 4 * 60))
    for owner in range(4):
        serve(cache, memory, SYSTEM + turn(owner + 1))
    assert len(cache.parked) == 2
    assert serve(cache, memory, SYSTEM + turn(1) + [1]) == 20
    assert serve(cache, memory, SYSTEM + turn(4) + [1]) == 60


def test_nothing_is_parked_where_no_memory_is_given():
    cache, memory = make(1, cache_bytes=0)
    serve(cache, memory, SYSTEM + turn(1))
    serve(cache, memory, SYSTEM + turn(2))
    assert cache.parked == []


def test_dropped_turns_are_cut_out_and_the_rest_moves_down():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    assert serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True) == 100


def test_dropped_turns_are_cut_out_of_a_parked_conversation_too():
    cache, memory = make(1)
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(9), owner="b")
    assert serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True) == 100


def test_a_gap_is_never_closed_for_somebody_else_or_a_new_conversation():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    assert serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="b", trimmed=True) == 20
    assert serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a") > 20  # b's own work, by prefix
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    assert serve(cache, memory, SYSTEM + turn(2), owner="a") == 20


def test_shared_cells_are_not_moved_under_another_sequence():
    cache, memory = make(3)
    serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(4), owner="b")  # shares 100 cells with a
    assert serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(5), owner="a", trimmed=True) == 100
    assert serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(4) + [7], owner="b") == 140


def test_without_shifting_a_trimmed_prompt_is_computed_from_the_gap_on():
    cache, memory = make(can_shift=False)
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    assert serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True) == 20


def test_a_recurrent_state_is_reused_whole_or_not_at_all():
    cache, memory = make(can_shift=False, can_cut=False)
    serve(cache, memory, SYSTEM + turn(1), turn(2), owner="a")
    assert serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(3), owner="a") == 100
    assert serve(cache, memory, SYSTEM + turn(1) + turn(4), owner="a") == 20


def test_a_recurrent_state_that_is_cut_is_empty():
    cache, memory = make(can_shift=False, can_cut=False)
    serve(cache, memory, SYSTEM + turn(1))
    slot = max(cache.slots, key=len)
    cache.cut(slot, 100)
    assert len(slot) == 60
    cache.cut(slot, 30)
    assert len(slot) == 0
    check(cache, memory)


def test_afresh_reuses_the_opening_alone():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1))
    slot = cache.acquire(token_array(SYSTEM + turn(1) + [1]), afresh=True)
    assert len(slot) == 20
    cache.release(slot)
    assert len(cache.acquire(token_array(turn(1)), afresh=True)) == 0


def test_what_one_client_left_serves_no_other_live_parked_or_at_work():
    cache, memory = make(2)
    serve(cache, memory, SYSTEM + turn(1), client="a")
    assert serve(cache, memory, SYSTEM + turn(1), client="b") == 20
    assert serve(cache, memory, SYSTEM + turn(1), client="a") == 59
    serve(cache, memory, SYSTEM + turn(2), client="c")
    serve(cache, memory, SYSTEM + turn(3), client="c")
    assert {parked.client for parked in cache.parked} == {"a", "b"}  # the same tokens: one does not replace the other
    assert cache.missing(token_array(SYSTEM + turn(1)), None, "d", False, live=False) == 40
    working = cache.acquire(token_array(SYSTEM + turn(4)), client="a")
    memory.compute(working.id, turn(4))
    working.tokens.extend(turn(4))
    assert serve(cache, memory, SYSTEM + turn(4) + [1], client="b") == 20


def test_a_conversation_finds_its_own_sequence_whoever_asks_for_it():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1), owner="page", client="page")
    assert serve(cache, memory, SYSTEM + turn(1) + [1], owner="page", client="person") == 60
    assert serve(cache, memory, SYSTEM + turn(1) + [1], owner="other", client="other") == 20


@pytest.mark.parametrize("n_slots", [1, 2])
def test_what_was_computed_in_the_light_of_dropped_turns_serves_no_other_conversation(n_slots):
    cache, memory = make(n_slots)
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    moved = SYSTEM + turn(2) + turn(3)
    assert serve(cache, memory, moved + turn(4), owner="a", trimmed=True) == 100
    assert serve(cache, memory, moved + [1], owner="b", trimmed=True) == 20
    assert serve(cache, memory, moved + turn(4) + turn(5), owner="a", trimmed=True) == 140


def test_a_new_chat_is_not_answered_in_the_light_of_what_the_last_one_dropped():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True)
    assert serve(cache, memory, SYSTEM + turn(2) + turn(5), owner="a") == 20


def test_a_copy_of_what_was_computed_in_the_light_of_dropped_turns_serves_no_other_either():
    cache, memory = make(3)
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True)
    assert serve(cache, memory, SYSTEM + turn(2) + turn(5), owner="a", trimmed=True) == 60  # the rest is worth keeping
    assert serve(cache, memory, SYSTEM + turn(2) + turn(5) + [1], owner="b") == 20


def test_cells_of_its_own_do_not_make_a_sequence_forget_in_what_light_it_was_computed():
    cache, memory = make(3)
    serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(3), owner="a")
    moved = SYSTEM + turn(2) + turn(3) + turn(4)
    serve(cache, memory, moved + turn(5), owner="a", trimmed=True)
    assert serve(cache, memory, moved + turn(6), owner="a", trimmed=True) == 140  # shares what is common
    assert serve(cache, memory, SYSTEM + turn(2) + turn(4) + turn(5) + turn(7), owner="a", trimmed=True) == 140
    assert serve(cache, memory, SYSTEM + turn(2) + [1], owner="b") == 20


def test_a_copy_of_what_stands_before_the_gap_serves_everybody():
    cache, memory = make(3)
    serve(cache, memory, SYSTEM + turn(1) + turn(2) + turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(1) + turn(3) + turn(4), owner="a", trimmed=True)
    assert serve(cache, memory, SYSTEM + turn(1) + turn(5), owner="b") == 60
    assert serve(cache, memory, SYSTEM + turn(1) + turn(5) + [1], owner="c") == 100


def test_of_a_conversation_the_longest_copy_alone_is_parked():
    cache, memory = make(1)
    for talk in (turn(1), turn(1) + turn(2)):
        slot = cache.slots[0]
        cache._clear(slot)
        memory.compute(slot.id, SYSTEM + talk)
        slot.tokens = token_array(SYSTEM + talk)
        cache._vacate(slot)
    assert [len(parked.tokens) for parked in cache.parked] == [100]


@pytest.mark.parametrize(
    "first, second, parked",  # each the owner and how many tokens were computed in the light of those before alone
    [(("a", 60), ("b", 60), 1), (("a", 20), ("a", 20), 1), (("a", 20), ("b", 20), 2), (("a", 20), ("a", 60), 1),
     (("a", 60), ("a", 20), 1), (("a", 20), ("b", 60), 1), (("a", 60), ("b", 20), 1), (("a", 20), ("a", 40), 1)],
)
def test_a_copy_is_replaced_by_one_that_is_good_for_as_much(first, second, parked):
    cache, memory = make(1)
    for owner, plain in (first, second):
        slot = cache.slots[0]
        memory.compute(slot.id, SYSTEM + turn(1))
        slot.tokens, slot.owner, slot.plain = token_array(SYSTEM + turn(1)), owner, plain
        cache._vacate(slot)
    assert len(cache.parked) == parked
    assert max(each.plain for each in cache.parked) == max(first[1], second[1])


def test_an_emptied_sequence_serves_everybody_again():
    cache, memory = make(1, cache_bytes=0)
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True)
    serve(cache, memory, turn(8), owner="b")
    assert serve(cache, memory, turn(8) + [1], owner="c") == 40


def test_what_another_sequence_holds_anyhow_is_not_parked():
    cache, memory = make(2)
    for slot in [cache.acquire(token_array(SYSTEM + turn(1))) for _ in range(2)]:
        memory.compute(slot.id, turn(1))
        slot.tokens.extend(turn(1))
        cache.release(slot)
    serve(cache, memory, SYSTEM + turn(2))
    assert cache.parked == []


def test_a_sequence_at_work_closes_no_gap():
    cache, memory = make(3)
    working = cache.acquire(token_array(SYSTEM + turn(1)), owner="a")
    memory.compute(working.id, turn(1) + turn(2) + turn(3))
    working.tokens.extend(token_array(turn(1) + turn(2) + turn(3)))
    serve(cache, memory, SYSTEM + turn(2), owner="b")
    assert serve(cache, memory, SYSTEM + turn(2) + turn(3), owner="a", trimmed=True) == 60
    assert len(working) == 140


def test_what_is_cut_back_to_before_the_gap_serves_everybody_again():
    cache, memory = make(1)
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True)
    cache.cut(cache.slots[0], 20)
    memory.compute(0, turn(5))
    cache.slots[0].tokens.extend(turn(5))
    check(cache, memory)
    assert serve(cache, memory, SYSTEM + turn(5) + [1], owner="b") == 60


def test_what_is_too_large_to_park_does_not_push_its_shorter_copy_out():
    cache, memory = make(1, cache_bytes=104 * 60 + 10)
    serve(cache, memory, SYSTEM + turn(1), owner="a")
    serve(cache, memory, SYSTEM + turn(2), owner="b")  # parks the former
    slot = cache.slots[0]
    cache._clear(slot)
    memory.compute(slot.id, SYSTEM + turn(1) + turn(3))  # computed anew and longer, then pushed out by another
    slot.tokens = token_array(SYSTEM + turn(1) + turn(3))
    serve(cache, memory, SYSTEM + turn(4), owner="c")
    assert serve(cache, memory, SYSTEM + turn(1) + [1], owner="a") == 60


def test_equal_tokens_are_no_shared_cells():
    cache, memory = make(3)
    slots = [cache.acquire(token_array(SYSTEM + turn(1))) for _ in range(2)]
    for slot in slots:
        memory.compute(slot.id, turn(1))
        slot.tokens.extend(turn(1))
    assert cache.used_cells == 20 + 40 + 40  # the opening's own and two computed side by side
    check(cache, memory)
    copy = cache.acquire(token_array(SYSTEM + turn(1) + [1]))
    assert len(copy) == 60
    check(cache, memory)
    assert cache.used_cells == 100
    cache.cut(copy, 30)
    memory.compute(copy.id, turn(2))
    copy.tokens.extend(turn(2))
    check(cache, memory)
    assert cache.used_cells == 140


def test_the_end_of_another_conversation_is_not_cut_off_however_short():
    cache, memory = make()
    serve(cache, memory, SYSTEM + turn(1), owner="a")
    assert serve(cache, memory, SYSTEM + turn(1)[:25] + turn(2), owner="b") == 45
    assert serve(cache, memory, SYSTEM + turn(1) + [1], owner="a") == 60


def test_nor_is_it_of_a_parked_one():
    cache, memory = make(1)
    serve(cache, memory, SYSTEM + turn(1), owner="a")
    serve(cache, memory, SYSTEM + turn(2), owner="b")
    assert serve(cache, memory, SYSTEM + turn(1)[:25] + turn(3), owner="c") == 45
    assert serve(cache, memory, SYSTEM + turn(1) + [1], owner="a") == 60


def test_of_what_is_moved_down_no_copy_is_kept():
    cache, memory = make(1)
    serve(cache, memory, SYSTEM + turn(1) + turn(2), turn(3), owner="a")
    serve(cache, memory, SYSTEM + turn(2) + turn(3) + turn(4), owner="a", trimmed=True)
    assert cache.parked == []


def test_an_idle_sequence_goes_on_rather_than_a_copy_of_one_at_work():
    cache, memory = make(2)
    slots = [cache.acquire(token_array(SYSTEM + turn(1))) for _ in range(2)]
    for slot in slots:
        memory.compute(slot.id, turn(1))
        slot.tokens.extend(turn(1))
    cache.release(slots[1])
    assert cache.acquire(token_array(SYSTEM + turn(1) + [1])) is slots[1] and cache.used_cells == 100


def test_what_ended_last_is_overwritten_last():
    cache, memory = make(2, cache_bytes=0)
    first, second = (cache.acquire(token_array(SYSTEM + turn(number))) for number in (1, 2))
    for slot in (first, second):
        memory.compute(slot.id, turn(slot.id + 1))
        slot.tokens.extend(turn(slot.id + 1))
    cache.release(second)
    cache.release(first)
    assert cache.acquire(token_array(turn(3))) is second


def test_how_much_of_a_prompt_is_missing():
    cache, memory = make(1)
    prompt = token_array(SYSTEM + turn(1))
    missing = lambda live, trimmed=False: cache.missing(prompt, "a", None, trimmed, live)
    assert missing(live=True) == missing(live=False) == 40
    serve(cache, memory, prompt, owner="a")
    assert missing(live=True) == 0
    serve(cache, memory, SYSTEM + turn(2), owner="b")
    assert missing(live=True) == 40 and missing(live=False) == 0


TOKENS = st.lists(st.integers(30, 33), min_size=1, max_size=SMALL_LOSS + SHORTEST_RUN)


class Requests(RuleBasedStateMachine):
    """Random conversations: begun, continued, edited, trimmed, cancelled, several at once."""

    @initialize(n_slots=st.integers(1, 3), cache_kb=st.sampled_from([0, 8, 1000]), can_shift=st.booleans(), can_cut=st.booleans())
    def begin(self, n_slots, cache_kb, can_shift, can_cut):
        self.cache, self.memory = make(n_slots, cache_kb * 1024, can_shift=can_shift and can_cut, can_cut=can_cut)
        self.turns = {owner: [] for owner in range(4)}
        self.dropped = dict.fromkeys(range(4), 0)
        self.at_work = []

    @precondition(lambda self: self.cache.has_room())
    @rule(owner=st.integers(0, 3), text=TOKENS)
    def ask(self, owner, text):
        turns = self.turns[owner]
        turns.append(text)
        kept = turns[self.dropped[owner] :]
        prompt = token_array(SYSTEM + [token for part in kept for token in part])
        slot = self.cache.acquire(prompt, owner, owner % 2, self.dropped[owner] > 0)
        assert slot.tokens == prompt[: len(slot)] and len(slot) < len(prompt) and slot.busy
        assert slot.plain >= len(slot) or self.dropped[owner] > 0
        self.at_work.append((slot, prompt, owner))

    @precondition(lambda self: self.at_work)
    @rule(which=st.integers(0, 9), count=st.integers(1, 80))
    def compute(self, which, count):
        slot, prompt, _ = self.at_work[which % len(self.at_work)]
        tokens = prompt[len(slot) : len(slot) + count] or token_array([count])
        self.memory.compute(slot.id, tokens)
        slot.tokens.extend(tokens)

    @precondition(lambda self: self.at_work)
    @rule(which=st.integers(0, 9))
    def end(self, which):
        slot, prompt, owner = self.at_work.pop(which % len(self.at_work))
        if len(slot) > len(prompt):
            self.turns[owner].append(list(slot.tokens[len(prompt) :]))
        self.cache.release(slot)

    @rule(owner=st.integers(0, 3), keep=st.integers(0, 5))
    def edit(self, owner, keep):
        del self.turns[owner][keep:]
        self.dropped[owner] = min(self.dropped[owner], max(0, len(self.turns[owner]) - 1))

    @rule(owner=st.integers(0, 3))
    def drop_a_turn(self, owner):
        if len(self.turns[owner]) > self.dropped[owner] + 1:
            self.dropped[owner] += 1

    @invariant()
    def books_and_cells_agree(self):
        if hasattr(self, "cache"):
            check(self.cache, self.memory)
            assert {slot.id for slot in self.cache.slots if slot.busy} == {slot.id for slot, _, _ in self.at_work}
            assert list(self.cache.opening.tokens) == SYSTEM


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
