"""Makes the README's pictures from the page of a running program.

    python docs/screenshots.py [http://localhost:7860]

Needs playwright (tests/requirements.txt) and Debian's chromium.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
SHOTS = {
    "page-en": ("en-US", "light", "Write a haiku about a small computer."),
    "page-zh": ("zh-CN", "dark", "帮我写一首关于春天的诗"),
}


def main(url: str) -> None:
    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, (locale, scheme, question) in SHOTS.items():
            page = browser.new_page(locale=locale, color_scheme=scheme, viewport={"width": 1000, "height": 640})
            page.goto(url)
            box = page.get_by_test_id("textbox")
            box.wait_for()
            page.wait_for_function("document.querySelector('[data-testid=textbox]').placeholder")
            box.fill(question)
            box.press("Enter")
            page.get_by_test_id("stop-button").wait_for()
            page.get_by_test_id("stop-button").wait_for(state="detached", timeout=120_000)
            page.wait_for_timeout(500)
            page.screenshot(path=HERE / f"{name}.png")
            if name == "page-en":
                page.get_by_role("tab", name="Performance").click()
                page.wait_for_timeout(2500)
                page.screenshot(path=HERE / "view-en.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:7860")
