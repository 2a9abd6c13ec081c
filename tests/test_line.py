"""Who is served next, and who may join the line."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen_chat.line import Line


@dataclass(eq=False)
class Request:
    client: object


def fill(line: Line, client, most: int = 1000) -> list[Request]:
    """Has a client ask until it may no more."""
    requests = []
    while line.limit_met(client) is None and len(requests) < most:
        requests.append(Request(client))
        line.join(requests[-1])
    return requests


def run(line: Line, count: int) -> list[Request]:
    return [line.begin() for _ in range(count)]


def order(line: Line) -> list[Request]:
    """Ends what runs, one after the other, and returns in which order the rest is begun."""
    begun = []
    while request := line.begin():
        begun.append(request)
        line.leave(request)
    return begun


@pytest.mark.parametrize(
    "parallel, size, alone", [(1, 0, 1), (1, 1, 2), (2, 2, 3), (2, 3, 4), (2, 16, 10), (4, 64, 36)]
)
def test_one_person_alone_has_half_of_the_line_and_everybody_else_a_place(parallel, size, alone):
    line = Line(parallel, size)
    assert len(fill(line, "greedy")) == alone
    run(line, parallel)
    assert line.limit_met("greedy") == ("share" if size > 1 else "line")
    assert line.limit_met("other") == (None if size > 1 else "line")


def test_the_share_is_the_same_while_what_may_run_has_not_begun():
    line = Line(2, 16)
    early = len(fill(line, "greedy"))
    other = Line(2, 16)
    running = fill(other, "greedy", 2)
    run(other, 2)
    assert early == len(running) + len(fill(other, "greedy"))


def test_many_who_want_all_of_it_leave_a_place_until_they_are_very_many():
    line = Line(1, 16)
    sizes = [len(fill(line, "first"))]
    line.begin()
    assert [*sizes, *(len(fill(line, number)) for number in range(3))] == [9, 4, 2, 1]
    assert line.limit_met("somebody else") is None
    for number in range(100):
        fill(line, f"new {number}", 1)
    assert line.waiting == 16 and line.limit_met("the last") == line.limit_met(0) == "line"


def test_a_share_is_free_again_when_a_request_has_ended():
    line = Line(1, 4)
    requests = fill(line, "a")
    assert line.begin() is requests[0] and line.limit_met("a") == "share"
    line.leave(requests[-1])
    assert line.limit_met("a") is None
    line.join(requests[-1])
    line.leave(requests[0])
    assert line.limit_met("a") is None


def test_one_request_goes_before_the_second_of_another_whoever_came_first():
    line = Line(1, 16)
    greedy = fill(line, "greedy", 4)
    running = line.begin()
    single, double = fill(line, "single", 1), fill(line, "double", 2)
    assert [line.place(request) for request in [*greedy, *single, *double]] == [0, 3, 5, 6, 1, 2, 4]
    line.leave(running)
    assert order(line) == [single[0], double[0], greedy[1], double[1], greedy[2], greedy[3]]


def test_who_sends_many_at_once_is_served_as_if_each_came_when_the_one_before_had_ended():
    line = Line(1, 16)
    greedy = fill(line, "greedy", 3)
    line.leave(line.begin())
    second = line.begin()
    later = [fill(line, name, 1)[0] for name in "abc"]
    line.leave(second)
    latest = fill(line, "d", 1)
    assert order(line) == [*later, greedy[2], *latest]  # it is not starved by those who come after its turn


def test_a_free_sequence_goes_to_whoever_has_the_fewest_running():
    line = Line(3, 16)
    greedy, other = fill(line, "greedy", 6), fill(line, "other", 2)
    begun = run(line, 3)
    assert [request.client for request in begun] == ["greedy", "other", "greedy"]
    assert line.place(other[1]) == 1 and line.place(greedy[2]) == 2
    line.leave(greedy[0])
    third = fill(line, "third", 1)
    assert [line.place(request) for request in (third[0], greedy[2], other[1])] == [1, 3, 2]
    assert line.begin() is third[0]


def test_nothing_is_left_of_people_who_have_gone():
    line = Line(2, 8)
    for client in range(20):
        for request in fill(line, client, 1):
            line.leave(line.begin() if client % 2 else request)
    assert not line._people and line.waiting == line.running == 0 and line.begin() is None


class Use(RuleBasedStateMachine):
    """People come, are served, go: the books stay true, and everybody's place is where they really stand."""

    @initialize(parallel=st.integers(1, 3), size=st.integers(0, 9))
    def begin(self, parallel, size):
        self.line, self.parallel, self.size = Line(parallel, size), parallel, size
        self.waiting, self.running = [], []

    @rule(client=st.integers(0, 3))
    def ask(self, client):
        limit = self.line.limit_met(client)
        total = len(self.waiting) + len(self.running)
        assert (limit == "line") == (total >= self.parallel + self.size)
        if limit is None:
            self.waiting.append(Request(client))
            self.line.join(self.waiting[-1])

    @precondition(lambda self: len(self.running) < self.parallel)
    @rule()
    def serve(self):
        first = next((request for request in self.waiting if self.line.place(request) == 1), None)
        running = [sum(each.client == request.client for each in self.running) for request in self.waiting]
        request = self.line.begin()
        assert request is first
        if request:
            own = [each for each in self.waiting if each.client == request.client]
            assert own[0] is request and running[self.waiting.index(request)] == min(running)
            self.waiting.remove(request)
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def end(self, which):
        self.line.leave(self.running.pop(which % len(self.running)))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def give_up(self, which):
        self.line.leave(self.waiting.pop(which % len(self.waiting)))

    @invariant()
    def places_are_true(self):
        if hasattr(self, "line"):
            assert (self.line.waiting, self.line.running) == (len(self.waiting), len(self.running))
            places = {self.line.place(request): request for request in self.waiting}
            assert sorted(places) == list(range(1, len(self.waiting) + 1))
            assert all(self.line.place(request) == 0 for request in self.running)

    def teardown(self):
        """Where one runs at a time and nobody else comes, requests are begun in the order of their places."""
        if hasattr(self, "line") and self.parallel == 1:
            told = sorted(self.waiting, key=self.line.place)
            for request in self.running:
                self.line.leave(request)
            assert order(self.line) == told


TestUse = Use.TestCase
TestUse.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
