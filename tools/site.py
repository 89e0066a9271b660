"""What `make docs` needs beyond mkdocs: README, CONTRIBUTING and CHANGELOG as pages, and links that leave docs/.

Pages are written for a checkout, where `../src/…` is a file. On the site it is a link to the repository.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BORROWED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_LINK = re.compile(r'(\]\(|src=")([^)\s"]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files lie in the root."""
    for page, source in BORROWED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each link to a file into one to a page of the site, or to the repository."""
    at_home = {source: name for name, source in BORROWED.items()}
    folder = ROOT if page.file.src_uri in BORROWED else ROOT / "docs"

    def led(link: re.Match[str]) -> str:
        before, target = link.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"\w+:", target):
            return link[0]
        file = (folder / path).resolve().relative_to(ROOT)
        inside = at_home.get(str(file)) or (str(file.relative_to("docs")) if file.parts[0] == "docs" else "")
        if inside and files.get_file_from_path(inside):
            return before + inside + mark + anchor
        kind = "tree" if (ROOT / file).is_dir() else "blob"
        return f"{before}{config.extra['source']}/{kind}/main/{file.as_posix()}{mark}{anchor}"

    return _LINK.sub(led, markdown)
