"""The page in a real browser: typing, streaming, sources, figures, stopping, the dark, a telephone, the keyboard."""

import re
import shutil
from collections.abc import Callable, Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from serve.conftest import ServerProcess
from serve.test_server import running, until

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUIET = ("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync", "disable-quic")
FLAGS = ("headless=new", "no-sandbox", "disable-gpu", *QUIET)
PROMPT = "def moving_average(values, window):"
SOURCES = {"draft", "correction", "bonus", "target"}

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with its chromedriver here")


class Page:
    def __init__(self, driver: webdriver.Chrome, server: ServerProcess) -> None:
        self.driver, self.server = driver, server

    def open(self) -> None:
        """Load it anew, with short texts, and wait until it knows what runs."""
        self.driver.get(self.server.url)
        self.wait(lambda: "embedded" in self.at("models").text)
        self.set("max-tokens", "24")

    def at(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def set(self, name: str, value: str) -> None:
        """Give a setting a value, also while the settings are folded."""
        self.driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)

    def wait(self, condition: Callable[[], object], seconds: float = 30) -> None:
        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def say(self, text: str = PROMPT) -> None:
        self.at("text").send_keys(text, Keys.ENTER)

    def ask(self, text: str = PROMPT) -> str:
        """Say a text and wait for the answer -> the answer, without what was refused."""
        self.say(text)
        self.wait(self.at("again").is_enabled)
        return self.answer()

    def answer(self) -> str:
        [*_, latest] = self.all("#messages li.assistant")
        return "".join(span.get_property("textContent") for span in latest.find_elements(By.TAG_NAME, "span"))

    def color(self, element: WebElement) -> tuple[int, ...]:
        found = re.findall(r"\d+", element.value_of_css_property("background-color"))
        return tuple(map(int, found[:3]))

    def media(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(service=Service(DRIVER), options=options)
    driver.set_window_size(1200, 900)
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: webdriver.Chrome, server: ServerProcess) -> Iterator[Page]:
    """The page, freshly loaded; its console stays empty but for what a test takes from it."""
    page = Page(driver, server)
    page.open()
    driver.get_log("browser")
    yield page
    assert driver.get_log("browser") == []


@pytest.fixture
def drafting_page(driver: webdriver.Chrome) -> Iterator[Page]:
    """The page of a server that drafts in every round, whatever its controller would think of this machine."""
    with ServerProcess.start("--gamma", "4") as server:
        page = Page(driver, server)
        page.open()
        yield page


def test_an_answer_streams_with_its_sources_and_figures(drafting_page: Page) -> None:
    page = drafting_page
    page.set("max-tokens", "600")
    page.say()
    page.wait(lambda: page.all("#messages li.assistant span"))
    assert page.at("stop").is_enabled() and not page.at("send").is_enabled()
    page.wait(lambda: re.match(r"\d", page.at("per-call").text))  # while the text streams
    assert page.at("stop").is_enabled() and page.all("#rounds li")
    early = len(page.answer())
    page.wait(page.at("again").is_enabled)
    assert len(page.answer()) > early
    classes = {span.get_attribute("class") for span in page.all("#messages li.assistant span")}
    assert {"draft", "correction"} <= classes <= SOURCES
    colors = {name: page.color(page.all(f"#messages span.{name}")[0]) for name in classes}
    assert len(set(colors.values())) == len(classes)
    assert all(page.color(page.all(f".legend .{name}")[0]) == color for name, color in colors.items())
    assert page.all("#messages del")
    for name in ("per-call", "rate", "speed", "first"):
        assert re.match(r"\d", page.at(name).text), name
    page.wait(lambda: page.all("#chart rect"))
    assert "Draft length" in page.at("chart-text").text or "does not pay" in page.at("chart-text").text
    tokens = sum(int(item.text) for item in page.all("#rounds li"))
    assert tokens >= 160


def test_examples_are_asked_until_something_was(page: Page) -> None:
    page.wait(lambda: page.all("#examples button"))
    wanted = page.all("#examples button")[0].text
    page.all("#examples button")[0].click()
    page.wait(page.at("again").is_enabled)
    assert page.all("#messages li.user")[0].text.startswith(wanted) and page.answer()
    assert not page.all("#examples button")
    page.at("clear").click()
    assert page.all("#examples button")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("24", "too short to tell|nothing was drafted"),
        pytest.param("96", r"\d+\.\d\d×|as fast|nothing was drafted", marks=pytest.mark.slow),
    ],
)
def test_a_plain_rerun_gives_the_same_text_and_a_factor_above_noise(page: Page, tokens: str, said: str) -> None:
    page.set("max-tokens", tokens)
    text = page.ask()
    page.at("again").click()
    page.wait(lambda: "(" in page.at("factor").text)
    assert re.fullmatch(rf"({said}) \(the same text\)", page.at("factor").text)
    assert page.answer() == text and len(page.all("#messages li.assistant")) == 2
    [*_, latest] = page.all("#messages li.assistant")
    assert {span.get_attribute("class") for span in latest.find_elements(By.TAG_NAME, "span")} == {"target"}


@pytest.mark.parametrize("how", [pytest.param("button", marks=pytest.mark.slow), "Escape"])
def test_stop_ends_the_answer_here_and_in_the_server(page: Page, how: str) -> None:
    page.set("max-tokens", "1500")
    page.set("temperature", "1.5")
    page.say()
    page.wait(lambda: page.all("#messages li.assistant span"))
    if how == "button":
        page.at("stop").click()
    else:
        page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(page.at("send").is_enabled)
    assert page.at("error").text == "" and not page.at("stop").is_enabled()
    length = len(page.answer())
    with page.server.http() as http:
        until(lambda: running(http) == (0, 0))
    assert len(page.answer()) == length


def test_an_error_is_shown_in_words(page: Page) -> None:
    page.set("temperature", "1000")
    page.say()
    page.wait(lambda: page.at("error").text)
    assert "temperature" in page.at("error").text and "100" in page.at("error").text
    assert page.at("send").is_enabled()
    [line] = page.driver.get_log("browser")
    assert "400" in line["message"]
    page.set("temperature", "0")
    page.ask()
    assert page.at("error").text == ""


def test_light_and_dark(page: Page) -> None:
    [body] = page.all("body")
    found = {}
    for scheme in ("light", "dark"):
        page.media(scheme)
        ink = tuple(map(int, re.findall(r"\d+", body.value_of_css_property("color"))[:3]))
        found[scheme] = (sum(page.color(body)), sum(ink))
    page.media("")
    assert found["light"][0] > 600 > 150 > found["light"][1]
    assert found["dark"][0] < 150 < 600 < found["dark"][1]


def test_a_telephone_needs_no_sideways_scrolling(page: Page) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.ask("x" * 400)
        page.all("summary")[0].click()
        widths = page.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert widths == [360, 360]
        page.driver.execute_script("document.getElementById('error').style.width = '500px'")  # what a fault looks like
        assert page.driver.execute_script("return document.documentElement.scrollWidth") > 360
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_can_be_done_by_keyboard(page: Page) -> None:
    def focus() -> str:
        active = page.driver.switch_to.active_element
        return active.get_attribute("id") or active.tag_name

    def press(*keys: str) -> None:
        webdriver.ActionChains(page.driver).send_keys(*keys).perform()

    assert focus() == "text"
    press("first line")
    webdriver.ActionChains(page.driver).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    assert page.at("text").get_property("value") == "first line\n" and not page.all("#messages li")
    press(Keys.ENTER)
    page.wait(page.at("again").is_enabled)
    order = []
    for _ in ("send", "again", "clear"):
        press(Keys.TAB)
        order.append(focus())
    assert order == ["send", "again", "clear"]
    press(Keys.ENTER)
    assert page.all("#messages li") == [] and focus() == "text"
    for _ in range(10):
        webdriver.ActionChains(page.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
        if focus() == "summary":
            break
    press(Keys.ENTER, Keys.TAB)
    assert focus() == "temperature"
    outline = page.driver.switch_to.active_element.value_of_css_property("outline-style")
    assert outline == "solid"
