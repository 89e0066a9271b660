"""Pages in a real browser, without a window."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000")
_ASKING = """<body><iframe id="frame" style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe>
<pre id="answer"></pre><script>
document.getElementById("frame").addEventListener("load", (event) => {{
  const window = event.target.contentWindow, document = window.document;
  const answer = () => {{ {question} }};
  globalThis.document.getElementById("answer").textContent = JSON.stringify(answer());
}});
</script>"""


def dom(url: str, profile: Path, *options: str) -> str:
    """A page as its scripts leave it after a few seconds."""
    command = [str(CHROMIUM), *_OPTIONS, f"--user-data-dir={profile}", *options, "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def ask(page: str, question: str, folder: Path, width: int = 1280, dark: bool = False) -> Any:
    """What the body of a JavaScript function says about a page, which keeps its own policy."""
    path = folder / "asking.html"
    path.write_text(_ASKING.format(width=width, page=escape(page), question=question), encoding="utf-8")
    options = ["--window-size=1400,1000", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    found = re.search(r'<pre id="answer">(.*?)</pre>', dom(path.as_uri(), folder / "profile", *options), re.DOTALL)
    assert found is not None
    return json.loads(unescape(found[1]))
