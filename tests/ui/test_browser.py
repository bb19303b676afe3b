"""The page in a browser, on a large run: every view, and the way through.

Of 10,000 recorded rollouts, and where all tests are passed of 100,000. `pip install playwright`,
and chromium of the system.
"""

import re
import subprocess
import sys

import pytest

from ui import CHROMIUM, FAULTY_STEP, record_run, served

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs {CHROMIUM}"),
]

VIEWS = {
    "Curves": ".uplot canvas",
    "Steps": "a.rollout-bar:not(.faint)",
    "Rollouts": "a.vrow[data-at]",
    "Timeline": ".lanes svg .tick",
    "Books": ".stack i",
}
COUNTS = [10_000, pytest.param(100_000, marks=pytest.mark.long)]
_PATIENCE_MS = 120_000


@pytest.fixture(scope="module", params=COUNTS)
def count(request):
    """Recorded rollouts of the large run."""
    return request.param


@pytest.fixture(scope="module")
def url(tmp_path_factory, recorded, count):
    """The page of a large run and of a small one."""
    large = record_run(tmp_path_factory.mktemp("runs") / "large", rollout_count=count)
    with served(large.root, recorded) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens an address; what goes wrong on the page fails the test at its end."""
    faults, contexts = [], []

    def start(address, *, scheme="light", width=1280):
        context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.goto(address)
        return page

    yield start
    for context in contexts:
        context.close()
    assert faults == []


@pytest.mark.parametrize("width", [1280, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_opens_in_light_and_dark(url, open_page, scheme, width):
    page = open_page(url, scheme=scheme, width=width)
    for name, sign in VIEWS.items():
        page.get_by_role("link", name=name, exact=True).click()
        page.wait_for_selector(sign)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    page.evaluate("location.hash = '#/rollout/large/task-large-group-7%2F3?by=version'")
    page.wait_for_selector(".token.sampled")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert lightness(page) < 0.2 if scheme == "dark" else lightness(page) > 0.8
    page.get_by_role("button", name="Light" if scheme == "dark" else "Dark").click()
    page.reload()
    assert lightness(page) > 0.8 if scheme == "dark" else lightness(page) < 0.2


def lightness(page):
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / (3 * 255)


def test_three_clicks_lead_from_a_fallen_reward_to_the_token(url, count, open_page):
    page = open_page(url)
    page.get_by_role("button", name="small").click()  # The other run is not looked at.
    page.wait_for_selector(".uplot canvas")
    plot = page.locator(".part .u-over").bounding_box()
    at = plot["x"] + plot["width"] * (FAULTY_STEP - 1) / (count / 200 - 1)
    page.mouse.click(at, plot["y"] + plot["height"] * 0.9)
    page.get_by_role("heading", name=f"Step {FAULTY_STEP}").wait_for()
    bar = page.locator("a.rollout-bar:not(.faint)").first
    assert "reward 0" in bar.get_attribute("title")
    bar.click()
    page.locator(".token.sampled").nth(2).click()
    told = page.locator(".lineage").inner_text()
    for fact in (
        f"version {FAULTY_STEP - 2}",
        f"step {FAULTY_STEP}",
        "row ",
        "on node raas-",
        "prompt train/",
        "nats",
    ):
        assert fact in told


def test_a_long_table_draws_few_rows_and_sorts_and_filters_all(url, count, open_page):
    page = open_page(url)
    page.goto(f"{url.split('?')[0]}#/rollouts/large")
    page.get_by_text(f"{count:,} recorded rollouts", exact=True).wait_for()
    table = page.locator(".vtable")
    table.evaluate("each => { each.scrollTop = each.scrollHeight; }")
    page.wait_for_selector(f"a.vrow[data-at='{count - 1}']")
    assert page.locator(".vrow").count() < 100
    page.get_by_role("button", name="Step").click()
    page.locator("a.vrow[data-at='0'] .c-step", has_text=re.compile("^1$")).wait_for()
    page.get_by_label("reward ≥").fill("1")
    page.get_by_label("step ≤").fill("3")
    page.get_by_label("step ≤").press("Enter")
    page.locator(".hint", has_text=f" of {count:,} recorded").wait_for()
    rewards = page.locator("a.vrow .c-reward").all_inner_texts()
    assert set(rewards) == {"1"}
    assert "reward.min=1" in page.url
    table.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.locator("a.vrow[data-at='1']:focus").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_selector(".token.sampled")


def test_the_keyboard_goes_through_a_curve_and_through_tokens(url, open_page):
    page = open_page(url)
    page.wait_for_selector(".uplot canvas")
    page.locator(".part .plot").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".tip:not([hidden])")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step").wait_for()
    page.locator("a.rollout-bar:not(.faint)").first.click()
    page.locator(".turn.sampled .tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".token.sampled.chosen")


def test_a_rollout_without_a_text_says_so_and_where_its_row_came_from(url, open_page):
    page = open_page(url)
    for step in (1, 2, 3, 4):
        page.evaluate(f"location.hash = '#/step/small/solver/{step}'")
        page.get_by_role("heading", name=f"Step {step}").wait_for()
        if page.locator("a.rollout-bar.faint").count():
            break
    page.locator("a.rollout-bar.faint").first.click()
    page.get_by_text("Its text was not recorded").wait_for()
    told = page.locator(".lineage").first.inner_text()
    for fact in ("reward ", "sampled by version ", "on node raas-", f"step {step}", "prompt "):
        assert fact in told


def test_text_of_a_run_is_never_a_part_of_the_page(url, open_page):
    page = open_page(url)
    page.goto(f"{url.split('?')[0]}#/rollout/large/task-large-group-7%2F3")
    page.get_by_text("<img src=x onerror=alert(1)> row 7", exact=True).wait_for()
    assert page.locator("img").count() == 0


def test_an_exported_run_opens_as_a_file(recorded, open_page, tmp_path):
    command = [sys.executable, "-m", "astraflow", "ui", recorded, "--export", tmp_path / "page"]
    subprocess.run(command, check=True, capture_output=True)
    page = open_page((tmp_path / "page" / "index.html").as_uri())
    for name, sign in VIEWS.items():
        page.get_by_role("link", name=name, exact=True).click()
        page.wait_for_selector(sign)
    page.get_by_role("link", name="Rollouts", exact=True).click()
    page.get_by_role("button", name="Reward").click()
    page.wait_for_selector("[aria-sort=ascending]")
    rewards = [float(each) for each in page.locator("a.vrow .c-reward").all_inner_texts()]
    assert rewards == sorted(rewards)
    page.locator("a.vrow").first.click()
    page.wait_for_selector(".token.sampled")
