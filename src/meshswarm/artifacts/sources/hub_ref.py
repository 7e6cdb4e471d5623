"""References to files on a hub.

The rule this file keeps: a reference cannot lead out of its repository, and the same one always means the same
places on this disk.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from meshswarm.artifacts.sources.places import part_names, place, safe_name
from meshswarm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HubRef:
    """`hf:OWNER/REPO/FILE.gguf`, or with `@REVISION` (a branch, a tag or a commit) after it. `file`: its path in the
    repository; of a split model the first part's."""

    owner: str
    repo: str
    file: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> HubRef:
        """Raises ConfigError with a sentence for a person."""
        match = re.fullmatch(
            r"hf:(?P<owner>[\w-][\w.-]*)/(?P<repo>[\w-][\w.-]*)/(?P<file>[^@\\?#]+\.gguf)(?:@(?P<revision>[\w][\w./-]*))?",
            text,
            re.ASCII | re.IGNORECASE,
        )
        if match is None or len(text) > 500:
            raise ConfigError(f"{text[:120]} is not a file on the hub: write hf:OWNER/REPO/FILE.gguf or add @REVISION")
        folders = match["file"].split("/")
        if any(part in ("", ".", "..") for part in folders) or ".." in (match["revision"] or ""):
            raise ConfigError(f"{text[:120]} leads out of the repository")
        first = part_names(folders[-1])[0]
        return cls(match["owner"], match["repo"], "/".join([*folders[:-1], first]), match["revision"])

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}"

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of all parts."""
        folder, slash, name = self.file.rpartition("/")
        return tuple(folder + slash + part for part in part_names(name))

    def targets(self, folder: Path) -> tuple[Path, ...]:
        """Where its parts lie below `folder` once they are fetched."""
        where = place(
            folder,
            "hf",
            f"{self.owner}--{self.repo}",
            *(os.environ.get("HF_ENDPOINT", ""), self.repo_id, self.file, self.revision or "main"),
        )
        return tuple(where / safe_name(file) for file in self.files)


def hub_ref(ref: str) -> HubRef | None:
    """The file on the hub that `ref` means, also by the address that a browser shows; None for anything else. Raises
    ConfigError for `hf:` and something else after it."""
    if ref[:3].lower() == "hf:":
        return HubRef.parse(ref)
    parts = urlsplit(ref)
    if parts.scheme != "https" or parts.netloc not in ("huggingface.co", "hf.co"):
        return None
    match = re.fullmatch(r"/([^/]+/[^/]+)/(?:blob|resolve)/([^/]+)/(.+)", unquote(parts.path))
    return None if match is None else HubRef.parse(f"hf:{match[1]}/{match[3]}@{match[2]}")


def bare_repo(ref: str) -> str | None:
    """OWNER/REPO, where a reference to the hub says no more than that."""
    match = re.fullmatch(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)/?", ref, re.ASCII | re.IGNORECASE)
    return None if match is None else match[1]
