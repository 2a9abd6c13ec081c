from hypothesis import given
from hypothesis import strategies as st

from qwen_chat.textstream import TextStream


def fed(pieces, stop=()):
    stream = TextStream(list(stop))
    out = []
    for piece in pieces:
        out.append(stream.feed(piece))
        if stream.stopped:
            return out
    return [*out, stream.close()]


@given(st.text(), st.data())
def test_characters_cut_anywhere_come_out_whole(text, data):
    raw = text.encode("utf-8", "ignore")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)])]
    assert "".join(fed(pieces)) == raw.decode()


def test_half_a_character_at_the_end_and_bytes_that_are_no_text_are_left_out():
    assert "".join(fed([b"ok\xe4\xbd"])) == "ok"
    assert "".join(fed([b"a\xff\xfeb"])) == "ab"


def test_a_stop_string_ends_the_text_before_it_even_across_pieces():
    assert fed([b"one tw", b"o thr", b"ee"], ["two"]) == ["one ", ""]
    assert "".join(fed([b"one tw", b"in"], ["two"])) == "one twin"
    assert "".join(fed([b"ab", b"abac"], ["abac"])) == "ab"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_the_result_is_the_text_up_to_the_first_stop(text, stops, size):
    pieces = [text[at : at + size].encode() for at in range(0, len(text), size)]
    result = "".join(fed(pieces, stops))
    assert text.startswith(result)
    assert not any(stop in result for stop in stops)
    if not any(stop in text for stop in stops):
        assert result == text
