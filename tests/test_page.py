"""The page in a real browser, served by the real program with a small real model."""

import os
import re
import signal
import subprocess
import sys

import pytest
from browser import PATIENCE, ROOT, STORY, Program, until

from qwen_chat.config import SMOLLM2

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture
def page(open_page, program):
    page = open_page(program)
    yield page
    assert not page.errors


def test_an_answer_grows_and_has_its_figures_under_it(page, program):
    page.send(STORY)
    page.growing()
    assert page.users.all_inner_texts() == [STORY]
    assert page.box.input_value() == ""
    page.finish()
    figures = program.answers[-1]
    used = figures["prompt"] + figures["answer"]
    assert re.fullmatch(
        rf"first token [\d.]+ m?s · [\d.,]+ tokens/s · window {used} / 1,024 tokens · {figures['cached']} reused"
        r"( · stopped at the limit of \d+ tokens)?",
        page.figures(),
    )
    assert "reused" not in page.answer


def test_the_page_and_the_thinking_state_need_no_other_host(page, program):
    page.ask("Hello")
    assert page.hosts == {f"127.0.0.1:{program.port}"}


def test_one_message_takes_few_requests(page):
    page.requests.clear()
    page.ask("Hello")
    paths = [request.url.split("?")[0].rsplit("/", 1)[-1] for request in page.requests]
    assert paths.count("join") == 1 and len(paths) <= 4, paths


def test_the_second_turn_reuses_the_first(page, program):
    page.ask("Hello")
    first = program.answers[-1]
    page.ask("Thank you")
    second = program.answers[-1]
    assert second["cached"] >= first["prompt"] + first["answer"] - 1
    assert f"{second['cached']} reused" in page.figures()


def test_stop_keeps_what_was_written_and_frees_the_box(page, program):
    page.send(STORY)
    page.growing()
    page.stop()
    stopped = page.answer
    until(lambda: program.answers[-1]["reason"] == "cancelled")
    assert stopped
    page.ask("Hello")
    assert page.bots.first.inner_text() == stopped
    assert page.users.count() == page.bots.count() == 2


def test_the_box_can_be_typed_in_while_an_answer_grows(page):
    page.send(STORY)
    page.growing()
    page.send("Not yet")  # Enter is ignored, the text stays
    assert page.box.input_value() == "Not yet"
    page.stop()
    assert page.box.input_value() == "Not yet" and page.users.count() == 1
    page.box.press("Enter")
    page.finish()
    assert page.users.all_inner_texts() == [STORY, "Not yet"]


def test_retry_answers_the_same_question_again(page):
    answer = page.ask("Say hello")
    page.button("Retry").click()
    page.finish()
    assert page.users.all_inner_texts() == ["Say hello"]
    assert page.bots.all_inner_texts() == [answer]


def test_a_retried_answer_can_be_stopped(page):
    page.send(STORY)
    page.growing()
    page.stop()
    page.button("Retry").click()
    page.stop()
    assert page.users.all_inner_texts() == [STORY]


def test_an_edited_question_is_answered_anew_and_what_followed_is_gone(page):
    first = page.ask("Hello")
    page.ask("Thank you")
    page.tab.get_by_role("button", name="Edit").first.click()
    page.tab.locator(".edit-textarea").fill("Say goodbye")
    page.tab.get_by_role("button", name="Submit").first.click()
    page.finish()
    assert page.users.all_inner_texts() == ["Say goodbye"]
    assert page.bots.count() == 1 and page.answer != first


def test_an_edited_question_can_be_stopped(page):
    page.ask("Hello")
    page.tab.get_by_role("button", name="Edit").first.click()
    page.tab.locator(".edit-textarea").fill(STORY)
    page.tab.get_by_role("button", name="Submit").first.click()
    page.growing()
    page.stop()
    assert page.users.all_inner_texts() == [STORY]


def test_undo_gives_the_question_back(page):
    page.ask("Hello")
    page.ask("Thank you")
    page.button("Undo").click()
    until(lambda: page.users.all_inner_texts() == ["Hello"])
    assert page.box.input_value() == "Thank you" and page.bots.count() == 1


def test_clear_stops_the_answer(page, program):
    page.send(STORY)
    page.growing()
    page.button("Clear").click()
    until(lambda: program.answers[-1]["reason"] == "cancelled")
    page.idle()
    until(lambda: page.users.count() == page.bots.count() == 0)
    page.ask("Hello")
    assert page.users.count() == page.bots.count() == 1


def test_copy_copies_the_answer_alone(open_page, program):
    page = open_page(program, permissions=["clipboard-read", "clipboard-write"])
    answer = page.ask("Say hello")
    page.figures()
    page.tab.locator("#chat .message-buttons-left button").first.click()
    assert until(lambda: page.tab.evaluate("navigator.clipboard.readText()")).split() == answer.split()


def test_an_example_is_asked_with_one_click(page):
    page.tab.get_by_role("button", name="Write a haiku about a small computer").click()
    page.finish()
    assert page.users.all_inner_texts() == ["Write a haiku about a small computer"]
    assert page.answer


def test_indented_text_is_kept_as_it_was_typed(page, program):
    """A message's indentation is part of its tokens: losing it would mean computing the turn again."""
    page.ask("What is this?\n\n        if x:\n            pass\n")
    first = program.answers[-1]
    page.ask("Thank you")
    assert program.answers[-1]["cached"] >= first["prompt"] + first["answer"] - 1


def test_a_message_that_is_too_long_is_refused_and_not_lost(page, program):
    page.ask("Hello")
    page.ask("word " * 1500)
    assert re.match(r"This message is too long: 1,\d+ tokens, and the limit is \d+", page.answer)
    assert len(page.users.last.inner_text().split()) == 1500
    page.ask("Thank you")
    assert program.answers[-1]["prompt"] < 300  # the refused message is not read again
    assert page.users.count() == 3


def test_who_comes_third_waits_in_line_or_is_told_that_all_are_busy(open_page, program):
    first, second, third = (open_page(program) for _ in range(3))
    first.send(STORY)
    first.growing()
    second.send("Hello")
    until(lambda: second.bots.count() and second.answer == "Waiting: 1 in line")
    third.send("Hello")
    third.finish()
    assert third.answer.startswith("Too many people are waiting")
    first.stop()
    second.finish()
    assert "Waiting" not in second.answer and second.bots.count() == 1
    third.button("Retry").click()
    third.finish()
    assert third.answer == second.answer


def test_stop_while_waiting_leaves_the_line(open_page, program):
    first, second = open_page(program), open_page(program)
    first.send(STORY)
    first.growing()
    second.send("Hello")
    until(lambda: second.bots.count() and second.answer == "Waiting: 1 in line")
    second.stop()
    assert second.bots.count() == 0 and second.users.count() == 1
    first.stop()
    second.box.press("Enter")  # the unanswered question is asked again
    second.finish()
    assert second.users.count() == second.bots.count() == 1


def test_a_closed_tab_stops_its_answer(open_page, program):
    page = open_page(program)
    page.send(STORY)
    page.growing()
    before = len(program.answers)
    page.tab.close()
    until(lambda: len(program.answers) > before)
    assert program.answers[-1]["reason"] == "cancelled"


def test_chinese_for_a_chinese_browser(open_page, program):
    page = open_page(program, locale="zh-CN")
    assert page.box.get_attribute("placeholder") == "输入消息"
    page.ask("你好")
    assert page.figures().startswith("首字 ")
    page.ask("字" * 3000)
    assert page.answer.startswith("这条消息太长了")


def test_what_is_typed_is_computed_before_it_is_sent(page, program):
    text = "Please explain what these numbers have in common: " + ", ".join(map(str, range(11, 31)))
    for attempt, pause in enumerate((0.5, 5, 20, 60)):  # the first is enough unless the machine is busy
        with page.tab.expect_response(lambda response: "/run/" in response.url):
            page.box.fill(f"{attempt}. {text}")
        page.tab.wait_for_timeout(pause * 1000)
        before = len(program.answers)
        page.box.press("Enter")
        page.growing()
        page.button("Clear").click()
        until(lambda: len(program.answers) > before)
        figures = program.answers[-1]
        if figures["prompt"] - figures["cached"] <= 8:
            break
    else:
        pytest.fail(f"only {figures['cached']} of {figures['prompt']} tokens were there already")
    assert text not in program.log


def test_half_composed_chinese_is_not_handed_over(open_page, program):
    page = open_page(program, locale="zh-CN")
    page.box.focus()
    page.requests.clear()
    keyboard = page.tab.context.new_cdp_session(page.tab)
    for text in ("n", "ni", "nih", "niha", "nihao"):
        keyboard.send("Input.imeSetComposition", {"text": text, "selectionStart": len(text), "selectionEnd": len(text)})
    page.tab.wait_for_timeout(500)
    assert not page.requests
    with page.tab.expect_response(lambda response: "/run/" in response.url):
        keyboard.send("Input.insertText", {"text": "你好"})
    assert page.box.input_value() == "你好"


def test_the_endpoint_of_gradio_client_answers(program):
    from gradio_client import Client

    client = Client(program.url, verbose=False)
    answer = client.predict("Say hello", api_name="/chat")
    assert isinstance(answer, str) and answer
    first = program.answers[-1]
    client.predict("Thank you", api_name="/chat")
    assert program.answers[-1]["cached"] >= first["prompt"]
    assert client.predict("word " * 1500, api_name="/chat").startswith("This message is too long")


def test_nothing_that_people_wrote_is_in_the_log(program):
    assert not any(text in program.log for text in ("cat and a dog", "Hello", "Say hello", "你好"))
    assert "Traceback" not in program.log


def test_the_newest_text_stays_in_sight_until_one_scrolls_away(page):
    hidden = "log => log.scrollHeight - log.scrollTop - log.clientHeight"  # pixels below the edge
    log = page.tab.locator("#chat [role=log]")
    page.ask("word " * 1500)  # higher than the window, and so is not answered
    until(lambda: log.evaluate(hidden) < 5)
    page.ask("Hello")
    until(lambda: log.evaluate(hidden) < 5)
    page.send(STORY)
    page.growing()
    log.evaluate("log => log.scrollTo(0, 0)")
    page.growing()
    assert log.evaluate("log => log.scrollTop") == 0
    page.stop_button.click()


def test_phones_have_no_sideways_scroll(open_page, program):
    page = open_page(program, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.ask("Say hello " + "x" * 200)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.box.bounding_box()["y"] < 844


@pytest.fixture(scope="module")
def stand_in(small_model, tmp_path_factory):
    """A program on the small fallback model, which loads when `gate` appears and whose engine fails at the word "explode"."""
    folder = tmp_path_factory.mktemp("stand-in")
    program = Program(
        folder,
        f"""
        import pathlib, time
        find, stream, gate = app.engine._find_weights, app.engine.stream, pathlib.Path({str(folder / "gate")!r})

        def slowly(report):
            report(app.weights.Progress("downloading", "the model", 43, 100))
            while not gate.exists():
                time.sleep(0.05)
            return find(report)

        def fragile(tokens, *args, **options):
            if len(tokens) in range(100, 200):
                raise RuntimeError("forced")
            return stream(tokens, *args, **options)

        app.engine._find_weights, app.engine.stream = slowly, fragile
        """,
        model={"endpoints": [], "fallbacks": [SMOLLM2.model_dump()]},
        generation={"temperature": 0.0, "max_tokens": 40},
        chat={"type_ahead": False},
        server={"language": "en"},
        profile="spaces",
    )
    program.gate = folder / "gate"
    yield program.until_up(503)
    program.end()


def test_a_message_sent_while_the_model_loads_is_answered_when_it_is_there(open_page, stand_in):
    until(lambda: stand_in.health()[1]["phase"] != "looking")
    status, health = stand_in.health()
    assert status == 503 and (health["status"], health["phase"], health["fraction"]) == ("loading", "downloading", 0.43)
    page = open_page(stand_in, locale="zh-CN")  # server.language wins over the browser's
    banner = page.tab.locator("#banner")
    playwright.expect(banner).to_contain_text("Downloading the model 43%")
    page.send("Hello")
    until(lambda: page.bots.count() and page.answer == "Downloading the model 43%")
    stand_in.gate.touch()
    page.finish()
    assert page.bots.count() == 1 and "Downloading" not in page.answer
    playwright.expect(banner).not_to_contain_text("Downloading")
    status, health = stand_in.health()
    assert status == 200 and (health["status"], health["model"]) == ("ok", SMOLLM2.name)


def test_a_stand_in_model_is_named_and_so_is_the_reason(open_page, stand_in):
    stand_in.gate.touch()
    stand_in.until_up()
    page = open_page(stand_in)
    banner = page.tab.locator("#banner")
    playwright.expect(banner).to_contain_text(SMOLLM2.name)
    assert len(banner.inner_text()) > len(SMOLLM2.name) + 40
    playwright.expect(page.tab.locator("#about")).to_contain_text(f"{SMOLLM2.name} · llama.cpp · profile spaces")


def test_an_exception_in_the_engine_is_one_message_and_the_page_goes_on(open_page, stand_in):
    stand_in.gate.touch()
    stand_in.until_up()
    page = open_page(stand_in)
    page.ask("word " * 100)
    assert page.answer.startswith("Something went wrong")
    assert "RuntimeError: forced" in stand_in.log
    assert "Something" not in page.ask("Hello")
    assert page.bots.count() == 2


def test_with_type_ahead_off_nothing_is_handed_over(open_page, stand_in):
    page = open_page(stand_in)
    page.requests.clear()
    page.box.fill("Hello")
    page.tab.wait_for_timeout(500)
    assert not page.requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_pages_open_and_an_answer_on_its_way(open_page, small_model, tmp_path, number):
    program = Program(tmp_path, model={"path": str(small_model)}, generation={"temperature": 0.0, "repeat_penalty": 1.0})
    page = open_page(program.until_up())
    page.send(STORY)
    page.growing()
    assert program.end(number) == 0
    assert "Traceback" not in program.log


def test_a_port_that_is_taken_is_said_in_a_sentence(program, tmp_path):
    other = Program(tmp_path, model={"path": "nowhere.gguf"}, server={"port": program.port})
    assert other.process.wait(PATIENCE) == 2
    assert f"127.0.0.1:{program.port} cannot be used" in other.log and "Traceback" not in other.log


def test_without_the_file_of_the_config_it_ends_with_status_4_and_says_why(tmp_path):
    program = Program(tmp_path, model={"path": str(tmp_path / "nowhere.gguf")})
    assert program.process.wait(PATIENCE) == 4
    assert "nowhere.gguf" in program.log and "Traceback" not in program.log


def test_with_a_file_that_is_no_model_it_ends_with_status_4(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(1000))
    program = Program(tmp_path, model={"path": str(tmp_path / "model.gguf")})
    assert program.process.wait(PATIENCE) == 4
    assert program.log.count("model.gguf: llama.cpp cannot load this file") == 1 and "Traceback" not in program.log


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_it_starts_ends_it_quietly(small_model, tmp_path, number):
    program = Program(tmp_path, model={"path": str(small_model)})
    until(lambda: program.log)  # its first line: the model begins to load, the page's library is still imported
    assert program.end(number) == 0 and "Traceback" not in program.log and "ended by " in program.log


@pytest.mark.parametrize("number", SIGNALS)
def test_the_log_says_which_signal_ended_it(small_model, tmp_path, number):
    program = Program(tmp_path, model={"path": str(small_model)}).until_up()
    until(lambda: "the page is at" in program.log)
    assert program.end(number) == 0
    assert re.search(f"INFO app: ended by {signal.Signals(number).name}$", program.log, re.M) and "Traceback" not in program.log


def test_a_question_is_shown_as_it_was_typed_and_loads_nothing(program, page):
    text = "What does <title> do in <head>?\n    indented, $5 and $6, # no heading\n![x](http://127.0.0.9:9/x.png) <img src=http://127.0.0.9:9/y.png>"
    page.ask(text)
    assert page.users.last.inner_text().strip() == text
    assert page.hosts == {program.url.split("/")[2]}


def test_importing_the_program_starts_nothing(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{path: {tmp_path / 'nowhere.gguf'}}}")
    code = "import threading; before = threading.active_count(); import app; assert threading.active_count() == before; assert app.engine.info is None"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "CONFIG": str(config)}, check=True, timeout=PATIENCE)
