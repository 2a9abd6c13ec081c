"""The drawer of the page: conversations kept in the browser, the settings of a tab; keys, and answers that go on."""

import json
import re

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from browser import CHROMIUM, STORY, Program, until  # noqa: E402

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
expect = playwright.expect


@pytest.fixture(scope="module")
def program(small_model, tmp_path_factory):
    """Greedy and short of breath: an answer ends after 24 tokens."""
    program = Program(
        tmp_path_factory.mktemp("program"),
        model={"path": str(small_model)},
        runtime={"n_ctx": 1024},
        generation={"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 24},
    )
    yield program.until_up()
    program.end()


@pytest.fixture
def page(open_page, program):
    page = open_page(program)
    yield page
    assert not page.errors


def drawer(page):
    page.tab.locator("#side .toggle-button").click()
    page.tab.locator("#kept .new").wait_for()
    return page.tab.locator("#kept")


def titles(page) -> list[str]:
    return page.tab.locator("#kept .open").all_inner_texts()


def settings(page):
    drawer(page)
    page.tab.locator("#settings > button").click()
    return page.tab.locator("#settings")


# Conversations


def test_a_conversation_survives_a_reload_with_its_figures_and_goes_on_from_the_cache(page, program):
    answer = page.ask("Say hello")
    figures = page.figures()
    page.reload()
    expect(page.users).to_have_text(["Say hello"])
    expect(page.bots).to_have_text([answer])
    assert page.figures() == figures
    page.ask("Thank you")
    first, second = program.answers[-2:]
    assert second["cached"] >= first["prompt"] + first["answer"] - 2


def test_another_tab_begins_anew_and_can_open_what_is_kept(page):
    page.ask("Say hello")
    other = page.tab.context.new_page()
    other.goto(page.tab.url)
    other.get_by_test_id("textbox").wait_for()
    assert other.get_by_test_id("user").count() == 0
    other.locator("#side .toggle-button").click()
    other.locator("#kept .open").click()
    expect(other.get_by_test_id("user")).to_have_text(["Say hello"])


def test_a_conversation_in_another_browser_is_not_seen(page, open_page, program):
    page.ask("Say hello")
    other = open_page(program)
    drawer(other)
    assert titles(other) == []
    expect(other.tab.locator("#kept .none")).to_have_text("None yet")


def test_a_new_chat_then_back_to_the_old_one(page):
    page.ask("Say hello")
    kept = drawer(page)
    kept.locator(".new").click()
    until(lambda: page.users.count() == 0)
    page.ask("Thank you")
    assert titles(page) == ["Thank you", "Say hello"]
    kept.locator(".open", has_text="Say hello").click()
    expect(page.users).to_have_text(["Say hello"])
    page.ask("Good bye")
    assert titles(page) == ["Say hello", "Thank you"]


def test_a_new_chat_stops_the_answer_and_keeps_what_was_written(page, program):
    settings(page).get_by_label("number input for Longest answer").fill("400")
    page.box.focus()
    page.send(STORY)
    page.growing()
    page.tab.locator("#kept .new").click()
    page.idle()
    until(lambda: program.answers[-1]["reason"] == "cancelled")
    assert page.users.count() == page.bots.count() == 0
    page.tab.locator("#kept .open").click()
    expect(page.users).to_have_text([STORY])
    assert page.bots.count() == 1 and page.answer


def test_clearing_begins_a_new_chat_and_the_old_one_stays_kept(page):
    page.ask("Say hello")
    page.button("Clear").click()
    until(lambda: page.users.count() == 0)
    page.ask("Thank you")
    drawer(page)
    assert titles(page) == ["Thank you", "Say hello"]


def test_a_conversation_is_renamed(page):
    page.ask("Say hello")
    kept = drawer(page)
    kept.get_by_role("button", name="Rename").click()
    kept.locator("li input").fill("Greetings <b>")
    kept.locator("li input").press("Enter")
    assert titles(page) == ["Greetings <b>"]
    page.ask("Thank you")
    page.reload()
    drawer(page)
    assert titles(page) == ["Greetings <b>"]


def test_a_name_is_left_as_it_was_with_escape(page):
    page.ask("Say hello")
    kept = drawer(page)
    kept.get_by_role("button", name="Rename").click()
    kept.locator("li input").fill("Other")
    kept.locator("li input").press("Escape")
    assert titles(page) == ["Say hello"]


def test_a_conversation_is_deleted_after_a_question(page):
    page.ask("Say hello")
    kept = drawer(page)
    kept.get_by_role("button", name="Delete").click()
    kept.get_by_role("button", name="No").click()
    assert titles(page) == ["Say hello"]
    kept.get_by_role("button", name="Delete").click()
    kept.get_by_role("button", name="Yes").click()
    until(lambda: titles(page) == [] and page.users.count() == 0)
    page.reload()
    assert page.users.count() == 0 and "Say hello" not in page.tab.evaluate("JSON.stringify(localStorage)")


def exported(page, name: str) -> str:
    with page.tab.expect_download() as download:
        page.tab.locator("#kept").get_by_role("button", name=name).click()
    return download.value.path().read_text(encoding="utf-8")


def brought_in(page, name: str, text: str):
    file = {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
    page.tab.locator("#kept input[type=file]").set_input_files(file)


@pytest.mark.parametrize("name, file", [("Export as Markdown", "c.md"), ("Export all as JSON", "c.json")])
def test_what_is_exported_can_be_brought_in_elsewhere(page, open_page, program, name, file):
    question = "Say\n\n  <!-- qwen-chat user -->\n<!-- qwen-chat user -->\n\\<!-- qwen-chat x\n# hello **you**"
    answer = page.ask(question)
    drawer(page)
    text = exported(page, name)
    assert "hello **you**" in text
    other = open_page(program, locale="zh-CN")
    drawer(other)
    brought_in(other, file, text)
    expect(other.tab.locator("#kept .say")).to_have_text("已导入 1 个")
    other.tab.locator("#kept .open").click()
    until(lambda: other.users.count() == 1)
    stored = json.loads(other.tab.evaluate("localStorage.getItem('qwen-chat.conversations')"))
    assert [message["text"] for message in stored[0]["messages"]][0] == question
    expect(other.bots).to_have_text([answer])


@pytest.mark.parametrize(
    "file, text",
    [("a.json", "{"), ("a.json", "[]"), ("a.json", '{"format": "qwen-chat conversations 1", "conversations": [{"messages": [{"role": "x"}]}]}'), ("a.md", "# Shopping\n\nmilk"), ("a.md", "")],
)
def test_a_file_that_is_no_export_is_refused_by_name(page, file, text):
    drawer(page)
    brought_in(page, file, text)
    expect(page.tab.locator("#kept .say")).to_contain_text(f"{file} is not an export of this page")
    assert titles(page) == []


def test_what_was_typed_and_not_sent_survives_a_reload(page):
    page.box.fill("Not yet sent")
    page.tab.wait_for_timeout(50)
    page.reload()
    expect(page.box).to_have_value("Not yet sent")


def test_what_was_sent_does_not_come_back_into_the_box(page):
    page.ask("Say hello")
    page.reload()
    expect(page.users).to_have_text(["Say hello"])
    assert page.box.input_value() == ""


def test_a_reload_in_the_middle_of_an_answer_keeps_what_was_written(page):
    settings(page).get_by_label("number input for Longest answer").fill("400")
    page.box.focus()
    page.send(STORY)
    page.growing()
    begun = page.answer
    page.reload()
    expect(page.users).to_have_text([STORY])
    until(lambda: page.bots.count() == 1)
    assert page.answer.startswith(begun[:20])
    page.button("Continue").click()
    until(lambda: len(page.answer) > len(begun) + 5)
    page.stop()


def test_two_tabs_that_go_on_with_one_conversation_keep_both(page):
    page.ask("Say hello")
    other = page.tab.context.new_page()
    other.goto(page.tab.url)
    other.locator("#side .toggle-button").click()
    other.locator("#kept .open").click()
    expect(other.get_by_test_id("user")).to_have_count(1)
    page.ask("Thank you")
    box = other.locator("#box textarea")
    box.fill("Good bye")
    box.press("Enter")
    expect(other.locator("#kept .open")).to_have_count(2)
    stored = json.loads(page.tab.evaluate("localStorage.getItem('qwen-chat.conversations')"))
    asked = sorted([message["text"] for message in each["messages"] if message["role"] == "user"] for each in stored)
    assert asked == [["Say hello", "Good bye"], ["Say hello", "Thank you"]]


def test_what_was_deleted_in_another_tab_does_not_come_back(page):
    page.ask("Say hello")
    other = page.tab.context.new_page()
    other.goto(page.tab.url)
    other.locator("#side .toggle-button").click()
    other.get_by_role("button", name="Delete").click()
    other.get_by_role("button", name="Yes").click()
    drawer(page)
    expect(page.tab.locator("#kept .say")).to_contain_text("deleted in another tab")
    page.ask("Thank you")
    assert titles(page) == []


def test_a_conversation_that_was_taken_back_whole_is_gone(page):
    page.ask("Say hello")
    page.button("Undo").click()
    until(lambda: page.users.count() == 0)
    page.reload()
    drawer(page)
    assert titles(page) == [] and page.users.count() == 0


def test_a_question_is_not_edited_to_nothing(page):
    answer = page.ask("Say hello")
    page.tab.get_by_role("button", name="Edit").first.click()
    page.tab.locator(".edit-textarea").fill("   ")
    page.tab.get_by_role("button", name="Submit").first.click()
    page.finish()
    assert page.users.all_inner_texts() == ["Say hello"] and page.answer == answer


def test_on_a_phone_the_drawer_closes_when_something_was_chosen(open_page, program):
    page = open_page(program, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.ask("Say hello")
    drawer(page).locator(".new").click()
    until(lambda: page.users.count() == 0)
    expect(page.tab.locator("#side")).not_to_have_class(re.compile(r"\bopen\b"))
    page.ask("Thank you")


def test_a_system_prompt_that_fills_the_window_is_told_as_that(page):
    settings(page).get_by_label("System prompt").fill("字" * 3000)
    page.ask("Hello")
    assert page.answer == "No answer: The system prompt in the settings is too long for the window. Please shorten it."


def test_a_full_storage_is_said_and_the_chat_goes_on(page):
    page.tab.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }; }")
    drawer(page)
    assert page.ask("Say hello")
    expect(page.tab.locator("#kept .say")).to_contain_text("storage is full")
    expect(page.tab.locator("#attach [role=alert]")).to_contain_text("storage is full")


# Settings


def test_the_system_prompt_of_a_tab_is_what_the_model_reads(page, program, open_page):
    panel = settings(page)
    panel.get_by_role("button", name="Teacher").click()
    expect(panel.get_by_label("System prompt")).to_have_value(re.compile("patient teacher"))
    panel.get_by_label("System prompt").fill("You are a pirate. " * 30)
    page.ask("Say hello")
    other = open_page(program)
    other.ask("Say hello")
    pirate, plain = program.answers[-2:]
    assert pirate["prompt"] > plain["prompt"] + 60


def test_settings_count_from_the_next_message_and_survive_a_reload(page, program):
    panel = settings(page)

    def length_of_an_answer() -> int:
        page.tab.locator("#kept .new").click()
        until(lambda: page.users.count() == 0)
        page.ask(STORY)
        return program.answers[-1]["answer"]

    assert length_of_an_answer() == 24
    panel.get_by_label("number input for Longest answer").fill("40")
    assert length_of_an_answer() == 40
    page.reload()
    panel = settings(page)
    assert length_of_an_answer() == 40
    panel.get_by_role("button", name="Reset").click()
    assert length_of_an_answer() == 24


def test_rounds_beyond_those_set_are_out_of_view(page, program):
    panel = settings(page)
    for text in ("Hello", "Thank you", "Good bye"):
        page.ask(text)
    before = program.answers[-1]["prompt"]
    panel.get_by_label("number input for Rounds the model sees").fill("1")
    page.ask("Hello again")
    assert program.answers[-1]["prompt"] < before
    expect(page.tab.locator("#chat .user-row[data-line]")).to_have_count(1)  # the line above the first one in view


def test_a_value_out_of_range_is_brought_back(page, program):
    number = settings(page).get_by_label("number input for Longest answer")
    number.fill("100000")
    number.press("Tab")
    expect(number).to_have_value("512")  # half the window
    assert page.ask("Say hello")


def test_programs_may_set_the_same_and_are_told_what_is_allowed(program):
    from gradio_client import Client

    client = Client(program.url, verbose=False)
    client.predict(STORY, max_tokens=7, api_name="/chat")
    assert program.answers[-1]["answer"] == 7
    said = client.predict("Hello", seed=-7, temperature=9, api_name="/chat")
    assert said == (
        "These settings cannot be used: runtime.seed: -7 found; allowed: a whole number from -1 to 4294967294; "
        "generation.temperature: 9 found; allowed: a number from 0 to 2"
    )


# Answers that go on


def test_an_answer_that_hit_its_limit_goes_on_in_place_from_the_cache(page, program):
    page.ask(STORY)
    first, begun = program.answers[-1], page.answer
    page.button("Continue").click()
    page.finish()
    second = program.answers[-1]
    assert page.bots.count() == 1 and len(page.answer) > len(begun)
    assert page.answer.startswith(begun.rstrip()[:-8])  # Markdown may read the seam in another way
    assert second["prompt"] == first["prompt"] + first["answer"] and second["cached"] >= second["prompt"] - 2
    page.ask("Thank you")
    assert program.answers[-1]["cached"] >= second["prompt"] + second["answer"] - 2


def test_a_stopped_answer_goes_on(page, program):
    settings(page).get_by_label("number input for Longest answer").fill("300")
    page.send(STORY)
    page.growing()
    page.stop()
    begun = page.answer
    page.button("Continue").click()
    until(lambda: len(page.answer) > len(begun) + 5)
    page.stop()
    assert page.bots.count() == 1 and page.answer.startswith(begun.rstrip()[:-8])


def test_only_an_answer_that_was_cut_off_can_go_on(page):
    page.ask(STORY)
    expect(page.button("Continue")).to_be_visible()
    page.send("Say hello")
    page.finish()
    assert page.tab.locator("#chat").get_by_role("button", name="Continue", exact=True).count() <= 1


# Keys


def test_escape_stops(page):
    settings(page).get_by_label("number input for Longest answer").fill("400")
    page.box.focus()
    page.send(STORY)
    page.growing()
    page.box.press("Escape")
    page.idle()
    assert page.bots.count() == 1


def test_shift_and_enter_break_the_line(page):
    page.box.fill("one")
    page.box.press("Shift+Enter")
    page.box.type("two")
    assert page.box.input_value() == "one\ntwo" and page.users.count() == 0


def test_the_arrow_up_brings_back_what_was_asked(page):
    page.ask("Say hello")
    page.ask("Thank you")
    page.box.press("ArrowUp")
    assert page.box.input_value() == "Thank you"
    page.box.press("ArrowUp")
    assert page.box.input_value() == "Say hello"
    page.box.press("ArrowUp")
    assert page.box.input_value() == "Say hello"
    page.box.press("ArrowDown")
    page.box.press("ArrowDown")
    assert page.box.input_value() == ""
    page.box.fill("My own words")
    page.box.press("ArrowUp")
    assert page.box.input_value() == "My own words"
    page.box.fill("")
    page.box.press("ArrowUp")
    page.box.press("Enter")
    page.finish()
    assert page.users.last.inner_text() == "Thank you"


def test_the_box_has_the_focus_after_an_answer(page):
    page.ask("Say hello")
    page.button("Retry").click()
    page.finish()
    page.tab.keyboard.type("x")
    assert page.box.input_value() == "x"


def test_everything_that_can_be_pressed_has_a_name(page):
    page.ask("Say hello")
    settings(page)
    nameless = page.tab.evaluate(
        "[...document.querySelectorAll('button, input, textarea')].filter(e => e.offsetParent && !(e.innerText || e.ariaLabel || e.title"
        " || e.labels?.[0]?.innerText || e.placeholder)).map(e => e.outerHTML.slice(0, 200))"
    )
    assert nameless == []


# Languages


def test_a_forced_language_is_that_of_gradios_own_words_too(open_page, small_model, tmp_path):
    program = Program(tmp_path, model={"path": str(small_model)}, generation={"max_tokens": 8}, server={"language": "zh"})
    try:
        page = open_page(program.until_up(), locale="en-US")
        expect(page.box).to_have_attribute("placeholder", "输入消息")
        page.ask("你好")
        assert page.figures().startswith("首字 ")
        english = page.tab.evaluate(
            "[...document.querySelectorAll('button')].filter(b => b.offsetParent).map(b => b.title || b.ariaLabel || b.innerText)"
            ".filter(name => /^[A-Za-z ]{4,}$/.test(name))"
        )
        assert english == []
        assert page.tab.evaluate("document.documentElement.lang") == "zh-CN"
    finally:
        program.end()
