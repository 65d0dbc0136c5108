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
    "timeline": f"#/episode/{quote(WORST)}/timeline",
    "why": f"#/episode/{quote(WORST)}/why",
    "family": "#/episode/e1/family",
    "run": "#/run",
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
        "#/run",
        "#/steps",
        "#/evaluations",
        "#/step/policy/0/1",
        "#/forks",
        "#/compare?a=e1&b=e2",
    ]
    views += [
        f"#/episode/{name}{part}"
        for name in ("e1", "e5", "e99")
        for part in ("", "/tokens", "/timeline", "/why", "/family")
    ]
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
