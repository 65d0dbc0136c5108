"""The viewer's views by their addresses, and content that would be more than text; for its tests and its benchmark."""

from __future__ import annotations

import json
from urllib.parse import quote

from tests.browser import Tab

FOREIGN = "x-foreign"
ATTACKS = (
    f"<{FOREIGN}></{FOREIGN}><script>window.hit=1</script><img src=x onerror='window.hit=1'>",
    f"</script><script>window.hit=1</script></pre></dd></style>--><{FOREIGN}>",
    f"<svg onload='window.hit=1'><foreignObject><{FOREIGN} /></foreignObject></svg><iframe srcdoc='<b>'></iframe>",
    "javascript:window.hit=1//\"onmouseover='window.hit=1' style='position:fixed'",
    "data:text/html,<script>window.hit=1</script> {{DATA}} ${window.hit=1} {{constructor}}",
    "\x1b[31m\x07\x9b2J\u202egnp.exe\u2066\u200b\ufeff\U000e0041\u2028\u0000\ud7ff",
    "e\u0301" * 3 + "Z\u0351\u036b\u0343" * 50,
)
HOSTILE = " ".join(ATTACKS)
READY = "document.querySelector('#main[data-view]:not([aria-busy])')"
WORST = "e1~0.r#2.2"
VIEWS = {
    "overview": "#/overview?metrics=tool/ok&by=seconds",
    "list": "#/episodes?where=reward < 0&sort=reward&ascending=1",
    "search": "#/episodes?match=checker says",
    "conversation": f"#/episode/{quote(WORST)}?call={quote('r#2')}",
    "tokens": f"#/episode/{quote(WORST)}/tokens?seat=solver&index=0&row=0&token=40",
    "why": f"#/episode/{quote(WORST)}/why",
    "family": "#/episode/e1/family",
    "steps": "#/steps",
    "evaluations": "#/evaluations",
    "step": "#/step/solver/1/5",
    "forks": "#/forks",
    "fork": f"#/episode/{quote('forks/f0', safe='')}",
    "compare": f"#/compare?a={quote('forks/f0')}",
}


def hostile_views() -> list[str]:
    """Every view of what `write_run` writes, and addresses that are content themselves."""
    columns = "episode,environment,task,drop_reason,detail,seats,policies,group,parent"
    views = [
        "#/overview",
        f"#/overview?metrics={quote(HOSTILE)}",
        f"#/episodes?columns={columns}",
        "#/steps",
        "#/evaluations",
        "#/step/policy/0/1",
        "#/forks",
        "#/compare?a=e1&b=e2",
    ]
    views += [f"#/episode/{name}{part}" for name in ("e1", "e5", "e99") for part in ("", "/tokens", "/why", "/family")]
    views += [
        f"#/episode/{quote(HOSTILE, safe='')}",
        f"#/episodes?where={quote(HOSTILE)}",
        f"#/{quote(HOSTILE)}",
        f"#/compare?a={quote(HOSTILE)}",
    ]
    return views


def foreign_elements(tab: Tab) -> int:
    """Elements that the page's own script does not make, and attributes that would act."""
    script = (
        f"document.querySelectorAll('{FOREIGN}, img, iframe, object, embed, video, audio, link, base, foreignObject,"
        ' [style*=fixed], [srcdoc], body script:not(.block):not([type=module]), a:not([href^="#"])\').length'
        " + [...document.querySelectorAll('*')].filter(e => [...e.attributes].some(a => /^on/.test(a.name))).length"
    )
    return int(tab.evaluate(script))


def show(tab: Tab, address: str) -> None:
    """The view at an address, once it is drawn with all it asks for."""
    tab.open("about:blank")
    tab.open(address)
    tab.wait(READY)
    tab.evaluate("new Promise(done => setTimeout(done))")


def text(tab: Tab, selector: str = "#main") -> str:
    return str(tab.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))


def faint_texts(tab: Tab) -> list[str]:
    """Visible texts whose contrast is below WCAG AA: 4.5, or 3 for large text. Disabled controls are exempt."""
    tab.wait("getComputedStyle(document.querySelector('#main')).opacity === '1'")
    return [str(found) for found in tab.evaluate(CONTRAST)]


CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colors = new Map();
  const parse = (color) => {
    if (!colors.has(color)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      colors.set(color, [r, g, b, a / 255]);
    }
    return colors.get(color);
  };
  const over = (top, alpha, under) => under.map((value, place) => top[place] * alpha + value * (1 - alpha));
  const luminance = (rgb) => {
    const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility({ visibilityProperty: true })) continue;
    if (parent.closest(":disabled, script, style, .unseen, .skip")) continue;
    const chain = [];
    for (let each = parent; each; each = each.parentElement) chain.unshift(getComputedStyle(each));
    let [back, opacity] = [[255, 255, 255], 1];
    for (const style of chain) {
      const [r, g, b, a] = parse(style.backgroundColor);
      opacity *= Number(style.opacity);
      back = over([r, g, b], a * opacity, back);
    }
    const style = chain.at(-1);
    const [r, g, b, a] = parse(style.color);
    const contrast = ratio(over([r, g, b], a * opacity, back), back);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const label = `${parent.className} ${node.data.slice(0, 20)} ${contrast.toFixed(2)}`;
    if (contrast < (isLarge ? 3 : 4.5)) found.push(label);
  }
  return [...new Set(found)];
})()"""


def lost_keys(tab: Tab) -> list[str]:
    """What keeps the Tab key from leading through a view: a focus that does not move, or that nobody sees."""
    problems, passed = [], []
    tab.evaluate("document.activeElement.blur()")
    for _ in range(12):
        tab.press("Tab")
        name, outline, width = tab.evaluate(FOCUSED)
        passed.append(name)
        if not name.startswith("BODY") and (outline == "none" or width == "0px"):
            problems.append(f"{name}: its focus cannot be seen")
    if len(set(passed)) < len(passed) / 2:
        problems.append(f"the focus stays at {passed[-1]}")
    return problems


FOCUSED = """(() => {
  const held = document.activeElement;
  const style = getComputedStyle(held);
  const name = `${held.tagName} ${[...document.querySelectorAll("*")].indexOf(held)} ${held.className}`;
  return [name, style.outlineStyle, style.outlineWidth];
})()"""
