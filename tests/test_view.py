"""The performance view in a real browser: it shows the answers just given, and asks for nothing while nobody sees it."""

import re

import pytest
from browser import Program, until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

SECONDS = 3  # long enough for several renewals, were there any
HIDE = """hidden => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture
def page(open_page, program):
    page = open_page(program)
    yield page
    assert not page.errors


def choose(page, tab: str):
    page.tab.locator(f"#{tab}-tab-button").click()
    return page.tab.locator("#view")


def follow(page):
    """Waits until the view was renewed, and once more."""
    for _ in range(2):
        with page.tab.expect_response(lambda response: "/run/" in response.url):
            pass


def asked(page) -> list:
    """What the page asks for in a while, after what is still on its way."""
    page.tab.wait_for_timeout(SECONDS * 1000)
    page.requests.clear()
    page.tab.wait_for_timeout(SECONDS * 1000)
    return page.requests


def bars(page) -> list[int]:
    """How many bars each plot has."""
    return [plot.locator("rect").count() for plot in page.tab.locator("#view svg").all()]


def test_it_shows_the_answer_just_given_and_follows_the_next(page, open_page, program):
    page.ask("Hello")
    before = len(program.answers)
    view = choose(page, "view")
    until(lambda: bars(page) == [before] * 3)
    first = program.answers[-1]
    assert view.locator("rect:first-child title").last.text_content() == f"{100 * first['cached'] / first['prompt']:.0f}%"
    assert re.search(r"[\d.]+ s", view.locator("strong").first.inner_text())
    assert "98\u00a0MB, quantised to Q4_1" in view.inner_text()
    other = open_page(program)
    other.ask("Thank you")
    until(lambda: bars(page) == [before + 1] * 3)
    assert page.hosts == {f"127.0.0.1:{program.port}"}


def test_the_chat_goes_on_behind_it(page):
    page.send("Hello")
    page.tab.locator("#chat [data-testid=user]").wait_for()
    choose(page, "view")
    page.finish()
    choose(page, "chat")
    assert page.users.count() == page.bots.count() == 1 and page.answer.strip()


def test_nothing_is_asked_for_while_it_is_not_seen(page):
    assert not asked(page) and page.tab.locator("#view").count() == 0
    page.tab.evaluate(HIDE, True)
    page.tab.evaluate(HIDE, False)
    assert not asked(page)  # it is the chat that can be seen again
    choose(page, "view")
    follow(page)
    page.tab.evaluate(HIDE, True)
    assert not asked(page)
    page.tab.evaluate(HIDE, False)
    follow(page)
    choose(page, "chat")
    assert not asked(page)


def test_chinese_for_a_chinese_browser_on_a_phone_without_sideways_scroll(open_page, program):
    page = open_page(program, locale="zh-CN", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.ask("你好")
    assert page.tab.locator("#view-tab-button").inner_text() == "性能"
    view = choose(page, "view")
    until(lambda: bars(page))
    shown = view.inner_text()
    assert all(word in shown for word in ("首字时间", "词元/秒", "复用", "内存", "处理器", "正在回答 0 个", "模型", "量化为 Q4_1"))
    for wide in ("document.documentElement", "document.querySelector('#view-tab')"):
        assert page.tab.evaluate(f"{wide}.scrollWidth <= {wide}.clientWidth")
    assert page.tab.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert not page.errors


def test_before_the_first_answer_it_says_so_in_the_language_that_is_set(open_page, small_model, tmp_path):
    program = Program(tmp_path, model={"path": str(small_model)}, server={"language": "zh"})
    page = open_page(program.until_up(), locale="en-US")
    view = choose(page, "view")
    playwright.expect(view).to_contain_text("还没有回答过")
    assert page.tab.locator("#view svg").count() == 0
    program.end()
