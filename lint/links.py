#!/usr/bin/env python3
"""Checks the documents: every page of the book is in its summary, and every link and anchor leads somewhere.

Links to other hosts are not followed. Anchors follow the rule of GitHub and mdBook: lower case, punctuation dropped, spaces to hyphens.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "docs"
SUMMARY = BOOK / "SUMMARY.md"

FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.M | re.S)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)|<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", re.M)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.M)


def text_of(page):
    """A page without its code, in which brackets are no links."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """Every anchor of a page."""
    seen, found = {}, set()
    text = text_of(page)
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found | set(re.findall(r"\bid=\"([^\"]+)\"", text))


def links(page):
    """Every link of a page."""
    for groups in LINK.findall(CODE.sub("", text_of(page))):
        yield next(link for link in groups if link)


def check(page):
    """What is wrong with a page, a line each."""
    name = page.relative_to(ROOT)
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{name}: {link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{name}: {link}: no such heading"


def main():
    skipped = {"target", ".git", "node_modules"}
    pages = [page for page in sorted(ROOT.rglob("*.md")) if not skipped & set(page.relative_to(ROOT).parts)]
    problems = [line for page in pages for line in check(page)]
    if SUMMARY.exists():
        listed = {(BOOK / link).resolve() for link in links(SUMMARY)}
        problems += [
            f"{page.relative_to(ROOT)}: not in docs/SUMMARY.md"
            for page in sorted(BOOK.rglob("*.md"))
            if page != SUMMARY and page.resolve() not in listed
        ]
    print("\n".join(problems) or f"{len(pages)} documents, every link leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
