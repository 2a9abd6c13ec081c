"""Long texts and files on the page, in a real browser with a small real model."""

import base64
import re

import pytest
from browser import Program, until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

STORY = "\n\n".join(f"Chapter {n}. The ship of captain Number{n} sailed from harbour {n}. " + "The sea was calm and the crew sang old songs. " * 6 for n in range(8))
QUESTION = "Where did the ship of captain Number7 sail from?"


def start(folder, small_model, **chat) -> Program:
    program = Program(
        folder,
        model={"path": str(small_model)},
        runtime={"n_ctx": 512, "parallel": 1},
        generation={"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 60},
        chat=chat,
    )
    return program.until_up()


@pytest.fixture(scope="module")
def program(small_model, tmp_path_factory):
    program = start(tmp_path_factory.mktemp("condenses"), small_model)
    yield program
    program.end()


@pytest.fixture(scope="module")
def strict(small_model, tmp_path_factory):
    """A program that refuses long messages and computes nothing ahead."""
    program = start(tmp_path_factory.mktemp("refuses"), small_model, long_input="refuse", type_ahead=False)
    yield program
    program.end()


@pytest.fixture
def page(open_page, program):
    page = open_page(program)
    yield page
    assert not page.errors


def give_file(page, kind: str, name: str, content: bytes) -> None:
    """Drops or pastes a file on the box, as the browser would after a person did."""
    page.box.evaluate(
        """(box, [kind, name, content]) => {
            const bytes = Uint8Array.from(atob(content), (char) => char.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], name));
            const given = kind === "paste" ? { clipboardData: data } : { dataTransfer: data };
            const event = new (kind === "paste" ? ClipboardEvent : DragEvent)(kind, { bubbles: true, cancelable: true, ...given });
            if (!box.dispatchEvent(event)) return;
            throw new Error("nobody took the file");
        }""",
        [kind, name, base64.b64encode(content).decode()],
    )


def note(page) -> str:
    return until(lambda: page.tab.locator("#attach [role=alert]").inner_text())


def test_a_long_message_is_condensed_with_progress_and_answered(page, program):
    seen = []
    page.send(f"{STORY}\n\n{QUESTION}")
    until(lambda: page.bots.count() and page.answer.startswith("Condensing part") and (seen.append(page.answer) or True))
    page.finish()
    assert re.fullmatch(r"Condensing part \d of \d", seen[0])
    assert page.bots.count() == 1 and page.answer and "Condensing" not in page.answer
    assert re.search(r"the message was condensed from [5-9]\d\d to [1-4]\d\d tokens in \d parts", page.figures())
    before = len(program.answers)
    first = program.answers[-1]
    page.ask("Thank you")
    assert len(program.answers) == before + 1  # nothing is condensed again
    assert program.answers[-1]["cached"] >= first["prompt"] + first["answer"] - 1
    assert "captain" not in program.log


def test_condensing_is_stopped_in_the_middle(page, program):
    before = len(program.answers)
    page.send(f"Another story.\n\n{STORY.replace('calm', 'wild')}")
    until(lambda: page.bots.count() and page.answer.startswith("Condensing part 1"))
    page.stop()
    assert page.bots.count() == 0 and page.users.count() == 1
    until(lambda: program.answers[before:] and program.answers[-1]["reason"] == "cancelled")
    page.button("Clear").click()
    page.ask("Hello")
    assert [each["reason"] for each in program.answers[before:]].count("cancelled") == 1


def test_chinese_progress(open_page, program):
    page = open_page(program, locale="zh-CN")
    page.send("船长唱着老歌，大海很平静。" * 60 + "\n\n船长在做什么？")
    until(lambda: page.bots.count() and re.match(r"正在压缩第 \d+ / \d+ 部分", page.answer))
    page.stop()


def test_with_refuse_a_long_message_is_refused_by_how_much_it_is_too_long(open_page, strict):
    page = open_page(strict)
    page.ask(STORY)
    size, limit, excess = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", page.answer))
    assert page.answer.startswith("This message is too long") and size - limit == excess > 0


def test_the_size_of_a_long_text_is_shown_while_it_is_typed(page):
    size = page.tab.locator("#size output")
    page.box.fill("word " * 30)
    page.tab.wait_for_timeout(1000)
    assert not size.count() or size.inner_text() == ""
    page.box.fill("word " * 200)
    playwright.expect(size).to_have_text(re.compile(r"^20\d / 512 tokens$"))
    page.box.fill(STORY)
    playwright.expect(size).to_have_text(re.compile(r"^[5-9]\d\d / 512 tokens · will be condensed$"))
    page.box.fill("word " * 200_000)  # counted from samples
    playwright.expect(size).to_have_text(re.compile(r"^200,\d{3} tokens · at most 80,000, 120,\d{3} too many$"))
    page.box.fill("Hello")
    playwright.expect(size).to_be_hidden()


def test_without_type_ahead_only_long_texts_are_counted(open_page, strict):
    page = open_page(strict)
    page.requests.clear()
    page.box.fill("Hello")
    page.tab.wait_for_timeout(800)
    assert not page.requests
    page.box.fill(STORY)
    playwright.expect(page.tab.locator("#size output")).to_have_text(re.compile(r"\d+ too many$"))
    assert len(page.requests) == 1 and "captain" not in strict.log


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_files_text_goes_into_the_box_and_nowhere_else(page, kind):
    page.box.fill("What is this?")
    page.requests.clear()
    give_file(page, kind, "notes.md", "# Notes\r\n\r\n你好, `x`\n".encode())
    until(lambda: "notes.md" in page.box.input_value())
    assert page.box.input_value() == "What is this?\n\nnotes.md\n```\n# Notes\n\n你好, `x`\n```\n"
    assert not [request for request in page.requests if "upload" in request.url]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "gb18030", "utf-16", "utf-16-le"])
def test_files_in_other_encodings_are_read(page, encoding):
    mark = b"\xff\xfe" if encoding == "utf-16-le" else b""
    give_file(page, "drop", "文件.txt", mark + "船长说：“你好”".encode(encoding))
    until(lambda: page.box.input_value() == "文件.txt\n```\n船长说：“你好”\n```\n")


def test_a_file_with_fences_gets_longer_ones(page):
    give_file(page, "drop", "a.md", b"````\ncode\n````")
    until(lambda: page.box.input_value() == "a.md\n`````\n````\ncode\n````\n`````\n")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "picture.png is not a text file."),
        ("broken.txt", b"\xff\xff\xff\xff", "broken.txt is not a text file."),
        ("huge.txt", b"x" * 1_000_001, "huge.txt is too large: at most 1 MB."),
        ("<b>.bin", b"\x00\x01", "<b>.bin is not a text file."),
    ],
)
def test_what_is_no_text_or_too_large_is_refused(page, name, content, said):
    give_file(page, "drop", name, content)
    assert note(page) == said and page.box.input_value() == ""
    page.box.fill("x")
    playwright.expect(page.tab.locator("#attach [role=alert]")).to_be_empty()


def test_the_button_below_the_box_adds_a_file(open_page, program):
    page = open_page(program, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    with page.tab.expect_file_chooser() as chooser:
        page.tab.get_by_role("button", name="Add a text file").tap()
    chooser.value.set_files({"name": "main.py", "mimeType": "text/x-python", "buffer": b"print(1)\n"})
    until(lambda: page.box.input_value() == "main.py\n```\nprint(1)\n```\n")
    box = page.box.bounding_box()
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= 390 and box["y"] + box["height"] < 844


def lines(page) -> list[tuple[int, str]]:
    """The lines in the chat: above which question each one is, and what it says."""
    return page.tab.evaluate("[...document.querySelectorAll('#chat .user-row')].map((row, i) => [i, row.dataset.line]).filter(([, line]) => line)")


def test_a_line_marks_what_is_no_longer_in_view_and_moves_on(page):
    text = "Tell me about number {}, and about the sea, the ships, the harbours and the songs of the crew. " * 2
    page.ask(text.format(0, 0))
    assert lines(page) == []
    seen = set()
    for number in range(1, 8):
        page.ask(text.format(number, number))
        page.figures()
        for at, label in until(lambda: lines(page)) if seen else lines(page):
            words = "first round" if at == 1 else f"first {at} rounds"
            assert label == f"The model no longer sees the {words}"
            seen.add(at)
    assert len(seen) > 1 and len(lines(page)) == 1
    row = page.tab.locator("#chat .user-row[data-line]")
    assert "sees the first" in row.evaluate("row => getComputedStyle(row, '::before').content")
    page.button("Clear").click()
    until(lambda: page.users.count() == 0)
    assert lines(page) == []


def test_a_refused_question_counts_as_no_round(open_page, strict):
    page = open_page(strict)
    page.ask("word " * 900)
    text = "Tell me about the sea, the ships, the harbours and the songs of the crew. " * 5
    for _ in range(5):
        page.ask(text)
        page.figures()
        if found := lines(page):
            break
    at, label = found[0]
    assert label == ("The model no longer sees the first round" if at == 2 else f"The model no longer sees the first {at - 1} rounds")
